"""Telling those who wait at a stream's tail that there is more.

A few are told at once. Many are told in rounds, some per turn of the loop, so that appends and other readers
are served in between. Somebody whose turn has not come when the next entries are published gets all of them
together: the busier the server, the fewer writes an entry costs.
"""

from __future__ import annotations

import asyncio
import logging

from tailrace.log.model import LiveReader, Stream

logger = logging.getLogger("tailrace.log")

READERS_PER_TURN = 32


class WakeRound:
    """One walk over the readers that a stream had when it began."""

    __slots__ = ("_listed", "_readers", "_told", "again")

    def __init__(self, readers: list[LiveReader]) -> None:
        self._listed = readers  # the stream's own list; it gets another when somebody leaves
        self._readers = readers.copy()
        self._told = 0
        self.again = False  # more was published since: those who were told first have to be told again

    @property
    def over(self) -> bool:
        return self._told >= len(self._readers)

    def next_to_tell(self, stream: Stream) -> list[LiveReader]:
        """The next few who are still there."""
        found = self._readers[self._told : self._told + READERS_PER_TURN]
        self._told += READERS_PER_TURN
        if stream.readers is self._listed:
            return found
        present = set(map(id, stream.readers or ()))
        return [reader for reader in found if id(reader) in present]


class Waker:
    """Runs on the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rounds: dict[Stream, WakeRound] = {}

    def wake(self, stream: Stream) -> None:
        """Tells everybody who waits. They may leave or come back while being told."""
        readers = stream.readers
        if readers is None:
            return
        under_way = self._rounds.get(stream)
        if under_way is not None:
            under_way.again = True
        elif len(readers) <= READERS_PER_TURN:
            notify_readers(stream, readers.copy())
        else:
            self._rounds[stream] = WakeRound(readers)
            self._go_on(stream)

    def _go_on(self, stream: Stream) -> None:
        found = self._rounds[stream]
        notify_readers(stream, found.next_to_tell(stream))
        if not found.over:
            self._loop.call_soon(self._go_on, stream)
            return
        del self._rounds[stream]
        if found.again:
            # Not now: whatever else waits for the loop comes first.
            self._loop.call_soon(self.wake, stream)


def notify_readers(stream: Stream, readers: list[LiveReader]) -> None:
    for reader in readers:
        try:
            reader.on_published(stream)
        except Exception:
            logger.exception("a live reader failed")  # the others are told all the same
