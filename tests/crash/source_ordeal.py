"""What databases go through beside a server that follows them: somebody writes, and things are killed."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from support.calls import Caller
from support.sources import QUICK, changes, check_log, documents, wait_until
from support.watch_client import Follower

SMALL = {**QUICK, "TAILRACE_WATCH_PARTITIONS": "2", "TAILRACE_JOURNAL_FILE_BYTES": "200000"}

Ops = dict[str, list[str]]  # by document, in order


class SourceWriter(ABC):
    """Writes to a database on a thread of its own, and knows nothing of the server."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ended = threading.Event()
        self.committed = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @abstractmethod
    def write(self) -> None:
        """One transaction after the other, until `ended`."""

    def _run(self) -> None:
        try:
            self.write()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def noted(self) -> None:
        """A transaction is committed."""
        self.committed += 1
        self.ended.wait(self.random.random() * 0.01)

    def wait_for(self, more: int) -> None:
        """Until so many more transactions are committed, or it has failed."""
        goal = self.committed + more
        wait_until(lambda: (self.committed, self.failure), lambda seen: seen[0] >= goal or seen[1])

    def end(self) -> None:
        self.ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


def reopen(followers: Iterable[Follower]) -> None:
    for follower in followers:
        if not follower.connected:
            follower.open()


def followed(log: list[list[dict[str, Any]]]) -> Ops:
    """What our log says was done."""
    found: Ops = {}
    for entries in log:
        for entry in entries:
            if entry["kind"] == "change":
                found.setdefault(entry["documentKey"], []).append(entry["op"])
    return found


def settle(
    call: Caller,
    followers: dict[str, Follower],
    contents: Callable[[str], dict[str, Any]],
    history: Callable[[str], Ops],
) -> None:
    """When all is quiet, the database, the view, the log and whoever follows say the same."""
    for name, follower in followers.items():
        wanted = contents(name)
        wait_until(lambda name=name: documents(call, name), lambda seen, wanted=wanted: seen == wanted)
        log = changes(call, name, 2)
        check_log(log)
        assert followed(log) == history(name)

        def held(follower: Follower = follower) -> set[str]:
            reopen([follower])
            if follower.failure is not None:
                raise follower.failure
            return set(follower.held)

        wait_until(held, lambda seen, wanted=wanted: seen == set(wanted))
        assert follower.resyncs == [], "nothing was missing at any time"
        follower.cut()
