"""The hub's streams: what decisions may know of them, how entries get in and out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from tailrace.common.errors import TailraceError
from tailrace.hub.effects import ReadResult, StreamSummary
from tailrace.log.decide import CreateRequest, offset_gone, resolve_position
from tailrace.log.history import MissingBlock
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.reader import Page
from tailrace.log.transaction import ignore_reply
from tailrace.protocol import offsets

JSON_TYPE: Final = "application/json"
DAY_S: Final = 24 * 3600
PAGE_ENTRIES: Final = 1000
PAGE_BYTES: Final = 1024 * 1024
MISSING_NAMES_MAX: Final = 100_000

# What is kept for people who look into it goes after a while; what actors still need does not.
STREAM_LIFETIMES: Final = {
    "hub/dead-letters": Lifetime(retention_s=30 * DAY_S, retention_bytes=1024**3),
    "hub/audit": Lifetime(retention_s=90 * DAY_S),
    "hub/trace": Lifetime(retention_s=7 * DAY_S),
    # What still holds is written again every day, or twice a day.
    "hub/registry": Lifetime(retention_s=30 * DAY_S),
    "hub/subscriptions": Lifetime(retention_s=30 * DAY_S),
    "hub/cursors/0": Lifetime(retention_s=7 * DAY_S),
}


class LogStreams:
    """The log as the hub sees it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # Names that were looked for in vain. Only the hub makes streams under `hub/`, so nobody else can
        # make this wrong, and looking again would ask the disk.
        self._absent: set[str] = set()

    def find(self, name: str) -> Stream | None:
        if name in self._absent:
            return None
        stream = self._log.find(name)
        if stream is None:
            if len(self._absent) >= MISSING_NAMES_MAX:
                self._absent.clear()
            self._absent.add(name)
            return None
        return None if stream.gone or stream.visible < 0 else stream

    def tail(self, stream: str) -> int | None:
        found = self.find(stream)
        return None if found is None else found.visible

    def earliest(self, stream: str) -> int:
        found = self.find(stream)
        return 0 if found is None else found.earliest

    def size_bytes(self, stream: str) -> int:
        found = self.find(stream)
        return 0 if found is None else found.size_bytes

    def offset(self, stream: str, entry: int) -> str:
        found = self.find(stream)
        return (
            offsets.encode_offset(self._log.streams.first_epoch, entry)
            if found is None
            else found.offset(entry)
        )

    def resolve(self, stream: str, offset: str) -> int:
        position = offsets.parse_offset(offset)
        found = self.find(stream)
        if found is None:
            if position[1] == 0:
                return 0
            raise TailraceError("offset_beyond_tail", "the offset is past the end of the stream")
        return resolve_position(found, position, found.earliest)

    def names(self, prefix: str, after: str, limit: int) -> list[StreamSummary]:
        """The next streams by name; those that are not in memory stay where they are."""
        return [
            StreamSummary(
                stream.name,
                stream.earliest,
                stream.visible,
                stream.size_bytes,
                stream.created_ns // 1_000_000,
                stream.last_ns // 1_000_000,
            )
            for stream in list_streams(self._log, after or prefix, prefix, limit, system=True)
        ]

    def made(self, name: str) -> Stream:
        """The stream to append to; it is made in the record before if it is missing."""
        self._absent.discard(name)
        stream = self._log.find(name)
        if stream is None:
            self._log.create(
                CreateRequest(name, JSON_TYPE, STREAM_LIFETIMES.get(name, NO_LIFETIME)), ignore_reply, None
            )
            stream = self._log.find(name)
            assert stream is not None
        if stream.gone:
            raise TailraceError("unavailable", "the name is held by a deleted stream that still has forks")
        return stream

    def try_read(self, stream: Stream, after: int, entries_max: int, bytes_max: int) -> ReadResult | None:
        """A page if memory has it all."""
        if after < stream.earliest:
            return ReadResult(error=offset_gone(stream, stream.earliest))
        page = self._log.reader.try_read_labelled(stream, after, bytes_max, entries_max)
        return None if isinstance(page, MissingBlock) else _read_result(page)

    async def read(
        self, stream: Stream, after: int, entries_max: int, bytes_max: int, since_ns: int | None
    ) -> ReadResult:
        """A page, from wherever its entries are."""
        try:
            if since_ns is not None:
                after = max(stream.earliest, await self._log.reader.find_before(stream, since_ns))
            if after < stream.earliest:
                raise offset_gone(stream, stream.earliest)
            return _read_result(await self._log.reader.read_labelled(stream, after, bytes_max, entries_max))
        except TailraceError as error:
            return ReadResult(error=error)

    async def all_of(self, name: str) -> AsyncIterator[bytes]:
        """Every entry of a stream, at start-up."""
        stream = self.find(name)
        if stream is None:
            return
        after = stream.earliest
        while after < stream.visible:
            page = await self._log.reader.read_labelled(stream, after, PAGE_BYTES, PAGE_ENTRIES)
            for part in page.parts:
                yield bytes(part)
            after = page.next_entry


def _read_result(page: Page) -> ReadResult:
    assert page.labels is not None
    numbers = page.entries()
    entries = zip(numbers, page.labels.times, page.parts, strict=True)
    return ReadResult(
        tuple((number, time_ns, bytes(part)) for number, time_ns, part in entries), page.next_entry
    )
