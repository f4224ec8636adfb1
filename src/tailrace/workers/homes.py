"""Streams that live elsewhere than their names say: forks, which are with their source.

A fork shares its source's entries, so both are in one log. The worker that a fork's name belongs to keeps a
note of where it went, written before the fork is made: whoever asks for the name asks that worker first. A
note stays when the stream goes, so a name that is used again lives where it lived before, and its epochs go
on. Nothing breaks if the worker dies in between: the note then leads to a worker that has no such stream yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import msgspec

from tailrace.errors import TailraceError
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction
from tailrace.net.relay import lost
from tailrace.workers.circle import Circle

NOTE: Final = "home/"
PATH: Final = "/_worker/home"


class Home(msgspec.Struct, frozen=True):
    worker: int
    exists: bool  # there may be a stream of the name


class Homes:
    """What this worker knows of names that belong to it."""

    def __init__(self, log: Log, circle: Circle) -> None:
        self._log = log
        self._index, self._placement, self._peers, _ = circle
        self.on_moved: Callable[[], None] = _nothing  # what was learnt about paths may be wrong now
        facts = log.streams.meta.items()
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._notes = {key[len(NOTE) :]: int(value) for key, value in facts if key.startswith(NOTE)}

    def noted(self, name: str) -> int:
        """Where a name that belongs to this worker lives."""
        return self._notes.get(name, self._index)

    def is_being_placed(self, name: str) -> bool:
        """Whether it is being decided where a fork of this name is made: whoever makes a stream waits."""
        return name in self._placing

    async def placed(self, name: str) -> None:
        while (placing := self._placing.get(name)) is not None:
            await asyncio.shield(placing)

    async def find(self, name: str) -> int:
        """Where any name lives."""
        return (await self._find(name)).worker

    def tell(self, name: str) -> Home:
        """About a name that belongs to this worker."""
        worker = self.noted(name)
        return Home(worker, worker != self._index or self._log.find(name) is not None)

    async def _find(self, name: str) -> Home:
        first = self._placement.home(name)
        if first == self._index:
            return self.tell(name)
        status, body = await self._peers[first].ask("GET", f"{PATH}?name={quote(name, safe='')}")
        if status != 200:
            raise lost()
        return msgspec.json.decode(body, type=Home)

    async def place_fork(self, name: str, source: str) -> int:
        """Where a fork is to be made; that is durable when it is known."""
        await self.placed(name)
        known = self.noted(name)
        if known != self._index or self._log.find(name) is not None:
            return known
        placing = self._placing[name] = asyncio.get_running_loop().create_future()
        try:
            return await self._place(name, await self._find(source))
        finally:
            del self._placing[name]
            placing.set_result(None)

    async def _place(self, name: str, home: Home) -> int:
        if home.worker == self._index or not home.exists:
            return self._index  # where it is found that there is no source
        if self._log.streams.tombstone(name) is not None:
            raise TailraceError(
                "conflict",
                f"a stream {name!r} was deleted here, and the fork would live on another worker; "
                "give the fork another name",
            )
        await self._note(name, home.worker)
        return home.worker

    async def _note(self, name: str, home: int) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if written.done():
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        self._log.put_meta(NOTE + name, b"%d" % home, reply)
        await written
        self._notes[name] = home
        self.on_moved()


def _nothing() -> None:
    return
