"""Locations of forks, which are not on the worker that owns their name but on the worker of their source.

A fork shares the entries of its source, so both are in one log. The worker that owns the fork's name stores
the location durably before the fork is created, and requests for the name reach that worker first. The
location is not deleted with the stream: a stream created again under this name is on the same worker, and its
epochs continue. If the worker dies between the two steps, the location refers to a worker that has no such
stream yet, which is harmless.
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
from tailrace.log.commit_path import APPEND_TIMED_OUT
from tailrace.log.group_commit import CommitBatch
from tailrace.log.log import Log

LOCATION_PREFIX: Final = "home/"
LOCATION_PATH: Final = "/_worker/home"


class ForkLocation(msgspec.Struct, frozen=True):
    worker: int
    exists: bool  # there may be a stream of this name


class ForkLocations:
    """The locations of names that this worker owns."""

    def __init__(self, log: Log, cluster: Peers) -> None:
        self._log = log
        self._index, self._placement, self._peers, _ = cluster
        self._on_moved: list[Callable[[], None]] = []
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._locations = dict(_load_locations(log))

    def notify_moves(self, on_moved: Callable[[], None]) -> None:
        """Call `on_moved` after each change of a location: owners that were looked up before may be wrong."""
        self._on_moved.append(on_moved)

    def location(self, name: str) -> int:
        """The worker with the stream of a name that this worker owns."""
        return self._locations.get(name, self._index)

    def is_elsewhere(self, name: str) -> bool:
        """Whether another worker has a stream of this name, or would create it."""
        if self._placement.owner(name) == self._index:
            return self.location(name) != self._index
        return self._log.find(name) is None

    def is_being_placed(self, name: str) -> bool:
        """Whether the location of a fork of this name is being decided; other creates have to wait."""
        return name in self._placing

    async def await_placement(self, name: str) -> None:
        """Wait until the location of a name is decided; raises after a timeout."""
        try:
            async with asyncio.timeout(self._log.limits.append_ms / 1000):
                while (placing := self._placing.get(name)) is not None:
                    await asyncio.shield(placing)
        except TimeoutError:
            raise TailraceError(
                "unavailable", f"the worker for stream {name!r} is not decided yet; retry the request"
            ) from None

    async def find(self, name: str) -> int:
        """The worker with the stream of any name."""
        return (await self._find(name)).worker

    def lookup(self, name: str) -> ForkLocation:
        """The location of a name that this worker owns."""
        worker = self.location(name)
        return ForkLocation(worker, worker != self._index or self._log.find(name) is not None)

    async def _find(self, name: str) -> ForkLocation:
        first = self._placement.owner(name)
        if first == self._index:
            return self.lookup(name)
        status, body = await self._peers[first].ask("GET", f"{LOCATION_PATH}?name={quote(name, safe='')}")
        if status != 200:
            raise peer_unavailable_error()
        return msgspec.json.decode(body, type=ForkLocation)

    async def place_fork(self, name: str, source: str) -> int:
        """Decide on which worker a fork is created; returns when that is durable."""
        await self.await_placement(name)
        known = self.location(name)
        if known != self._index or self._log.find(name) is not None:
            return known
        self._placing[name] = asyncio.get_running_loop().create_future()
        try:
            source_location = await self._find(source)
            location = (
                self._store_location(name, source_location.worker)
                if self._is_remote(name, source_location)
                else None
            )
        except BaseException:
            self._end_placing(name)
            raise
        if location is None:
            self._end_placing(name)
            return self._index  # creates it here, or reports that the source does not exist
        await location
        return source_location.worker

    def _is_remote(self, name: str, source_location: ForkLocation) -> bool:
        """Whether the fork is created on another worker."""
        if source_location.worker == self._index or not source_location.exists:
            return False
        if self._log.streams.tombstone(name) is not None:
            raise TailraceError(
                "conflict",
                f"a stream {name!r} was deleted on this worker, and the fork would be on another one; "
                "use another name for the fork",
            )
        return True

    def _store_location(self, name: str, source_location: int) -> asyncio.Future[None]:
        """Store the location durably.

        A commit that times out may still succeed. Until that is known the name stays undecided: a stream
        created here in the meantime would be hidden by the location.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_commit(error: TailraceError | None) -> None:
            if not written.done():
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)
            if error is APPEND_TIMED_OUT:
                batch.waiting.append(on_commit)
                return
            if error is None:
                self._locations[name] = source_location
                for on_moved in self._on_moved:
                    on_moved()
            self._end_placing(name)

        self._log.put_meta(LOCATION_PREFIX + name, b"%d" % source_location)
        batch = self._newest_batch()
        batch.waiting.append(on_commit)
        return written

    def _newest_batch(self) -> CommitBatch:
        """The batch with the last change."""
        newest = self._log.committer.newest
        assert newest is not None
        return newest

    def _end_placing(self, name: str) -> None:
        self._placing.pop(name).set_result(None)


def _load_locations(log: Log) -> Iterator[tuple[str, int]]:
    """All stored locations, except for names of streams on this worker."""
    for key, value in log.streams.meta.items():
        if key.startswith(LOCATION_PREFIX) and log.streams.find(name := key[len(LOCATION_PREFIX) :]) is None:
            yield name, int(value)
