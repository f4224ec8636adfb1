"""Streams that live elsewhere than their names say: forks, which are with their source.

A fork shares its source's entries, so both are in one log. The worker that a fork's name belongs to keeps a
note of where it went, written before the fork is made: whoever asks for the name asks that worker first. A
note stays when the stream goes, so a name that is used again lives where it lived before, and its epochs go
on. Nothing breaks if the worker dies in between: the note then leads to a worker that has no such stream yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import quote

import msgspec

from tailrace.cluster.peers import Peers
from tailrace.common.errors import TailraceError
from tailrace.http.relay import peer_unavailable_error
from tailrace.log.commit import CommitBatch
from tailrace.log.commit_path import APPEND_TIMED_OUT
from tailrace.log.log import Log

FORK_NOTE_PREFIX: Final = "home/"
LOCATION_PATH: Final = "/_worker/home"


class ForkLocation(msgspec.Struct, frozen=True):
    worker: int
    exists: bool  # there may be a stream of the name


class ForkLocations:
    """What this worker knows of names that belong to it."""

    def __init__(self, log: Log, circle: Peers) -> None:
        self._log = log
        self._index, self._placement, self._peers, _ = circle
        self.on_moved: Callable[[], None] = _nothing  # what was learnt about paths may be wrong now
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._notes = dict(_load_notes(log))

    def noted(self, name: str) -> int:
        """Where a name that belongs to this worker lives."""
        return self._notes.get(name, self._index)

    def is_elsewhere(self, name: str) -> bool:
        """Whether another worker has a stream of this name, or would make it."""
        if self._placement.home(name) == self._index:
            return self.noted(name) != self._index
        return self._log.find(name) is None

    def is_being_placed(self, name: str) -> bool:
        """Whether it is being decided where a fork of this name is made: whoever makes a stream waits."""
        return name in self._placing

    async def placed(self, name: str) -> None:
        """Raises if it takes too long to be decided."""
        try:
            async with asyncio.timeout(self._log.limits.append_ms / 1000):
                while (placing := self._placing.get(name)) is not None:
                    await asyncio.shield(placing)
        except TimeoutError:
            raise TailraceError(
                "unavailable", f"it is not decided yet on which worker a stream {name!r} is made"
            ) from None

    async def find(self, name: str) -> int:
        """Where any name lives."""
        return (await self._find(name)).worker

    def tell(self, name: str) -> ForkLocation:
        """About a name that belongs to this worker."""
        worker = self.noted(name)
        return ForkLocation(worker, worker != self._index or self._log.find(name) is not None)

    async def _find(self, name: str) -> ForkLocation:
        first = self._placement.home(name)
        if first == self._index:
            return self.tell(name)
        status, body = await self._peers[first].ask("GET", f"{LOCATION_PATH}?name={quote(name, safe='')}")
        if status != 200:
            raise peer_unavailable_error()
        return msgspec.json.decode(body, type=ForkLocation)

    async def place_fork(self, name: str, source: str) -> int:
        """Where a fork is to be made; that is durable when it is known."""
        await self.placed(name)
        known = self.noted(name)
        if known != self._index or self._log.find(name) is not None:
            return known
        self._placing[name] = asyncio.get_running_loop().create_future()
        try:
            home = await self._find(source)
            noted = self._note(name, home.worker) if self._goes(name, home) else None
        except BaseException:
            self._end_placing(name)
            raise
        if noted is None:
            self._end_placing(name)
            return self._index  # where it is found that there is no source
        await noted
        return home.worker

    def _goes(self, name: str, home: ForkLocation) -> bool:
        """Whether the fork is made on another worker."""
        if home.worker == self._index or not home.exists:
            return False
        if self._log.streams.tombstone(name) is not None:
            raise TailraceError(
                "conflict",
                f"a stream {name!r} was deleted here, and the fork would live on another worker; "
                "give the fork another name",
            )
        return True

    def _note(self, name: str, home: int) -> asyncio.Future[None]:
        """A commit that takes too long is answered, and may succeed all the same. Until it is known whether
        it did, the name is being placed: a stream made here meanwhile would be lost behind the note."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settled(error: TailraceError | None) -> None:
            if not written.done():
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)
            if error is APPEND_TIMED_OUT:
                batch.waiting.append(settled)
                return
            if error is None:
                self._notes[name] = home
                self.on_moved()
            self._end_placing(name)

        self._log.put_meta(FORK_NOTE_PREFIX + name, b"%d" % home)
        batch = self._newest()
        batch.waiting.append(settled)
        return written

    def _newest(self) -> CommitBatch:
        """The batch that the last change is in."""
        newest = self._log.committer.newest
        assert newest is not None
        return newest

    def _end_placing(self, name: str) -> None:
        self._placing.pop(name).set_result(None)


def _load_notes(log: Log) -> Iterator[tuple[str, int]]:
    """All notes but those that a stream of ours disproves."""
    for key, value in log.streams.meta.items():
        if (
            key.startswith(FORK_NOTE_PREFIX)
            and log.streams.find(name := key[len(FORK_NOTE_PREFIX) :]) is None
        ):
            yield name, int(value)


def _nothing() -> None:
    return
