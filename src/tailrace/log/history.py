"""Reading entries that are not in memory: blocks of the hot store, or segments on the object store.

The hot store is read first, on a thread. A checkpoint inserts a segment's row and deletes the blocks it
covers in one transaction, so an entry without a block always has a segment.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.decide import offset_gone
from tailrace.log.model import Block, Stream
from tailrace.log.segment_catalogue import replacement_segment
from tailrace.log.stored_streams import StoredStreams, decode_block
from tailrace.log.streams import Streams
from tailrace.storage.hot_store.tables import SegmentRow
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

HISTORY_THREADS = 2
_SEGMENT_INFO = msgspec.msgpack.Decoder(SegmentInfo)


class MissingBlock(NamedTuple):
    """An entry whose block is not in memory and has to be fetched."""

    owner: Stream
    entry: int

    @property
    def number(self) -> int:
        return self.owner.number


class NotLocalError(Exception):
    """An entry is only on the object store, and the caller cannot wait for it."""

    def __init__(self, missing: MissingBlock) -> None:
        super().__init__(f"entry {missing.entry} of {missing.owner.name} is on the object store")
        self.missing = missing


class FetchedBlock(NamedTuple):
    """A fetched block and its stream's number: a fork and its source use the same entry numbers."""

    number: int
    block: Block

    def holds(self, number: int, entry: int) -> bool:
        return number == self.number and self.block.first <= entry <= self.block.last


class SkippedRange(NamedTuple):
    """Entries without the requested key, skipped without reading them."""

    number: int
    first: int
    last: int

    def holds(self, number: int, entry: int) -> bool:
        return number == self.number and self.first <= entry <= self.last


class StoredSegment(NamedTuple):
    """A segment as recorded in the hot store."""

    prefix: str
    info: SegmentInfo
    footer: bytes


class KeyIndex(Protocol):
    """Finds keys without reading segments."""

    async def next_with_key(self, stream: Stream, key: bytes, entry: int) -> int:
        """The first entry from `entry` on that may have the key."""
        ...


class History:
    """Fetches blocks, from the object store only if there is a cold reader."""

    def __init__(self, store: StoredStreams, streams: Streams, cold: ColdReader | None = None) -> None:
        self._store = store
        self._streams = streams
        self._threads = ThreadPoolExecutor(HISTORY_THREADS, "read")
        self.cold = cold
        self.keys: KeyIndex | None = None
        self.fetching = 0  # reads of the hot store that run or wait for a thread
        self._reads: dict[tuple[int, int, int], asyncio.Future[list[Block] | StoredSegment]] = {}
        self.joined = 0  # reads that shared a running one

    def use_key_index(self, keys: KeyIndex) -> None:
        """Skip entries by the index of routing keys, which reads the log and so is built after it."""
        self.keys = keys

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- by entry --------------------------------------------------------------------------------------

    async def fetch(
        self, missing: MissingBlock, bytes_max: int, key: bytes | None = None
    ) -> list[Block] | SkippedRange:
        """The block of the entry and some after it; for a key, possibly a range to skip instead."""
        if key is not None and self.keys is not None and missing.entry <= missing.owner.sealed:
            following = await self.keys.next_with_key(missing.owner, key, missing.entry)
            if following > missing.entry:
                return SkippedRange(missing.number, missing.entry, following - 1)
        found = await self._shared_read(missing, bytes_max)
        if isinstance(found, list):
            return found
        cold, (prefix, info, footer) = self._cold, found
        if key is not None:
            following = await cold.next_with_key(prefix, info, footer, key, missing.entry)
            if following > missing.entry:
                return SkippedRange(missing.number, missing.entry, following - 1)
        rows = await cold.rows(prefix, info, footer, missing.entry, bytes_max)
        return [Block(*run) for run in rows]

    async def _shared_read(self, missing: MissingBlock, bytes_max: int) -> list[Block] | StoredSegment:
        """As `read_local`. Concurrent readers of the same block share one read: entries never change."""
        key = (missing.number, missing.entry, bytes_max)
        running = self._reads.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, self.read_local, missing, bytes_max)
            self._reads[key] = running
            self.fetching += 1
            running.add_done_callback(lambda done: self._read_done(key, done))
        else:
            self.joined += 1
        return await asyncio.shield(running)  # a cancelled reader must not cancel the read of the others

    def _read_done(
        self, key: tuple[int, int, int], done: asyncio.Future[list[Block] | StoredSegment]
    ) -> None:
        del self._reads[key]
        self.fetching -= 1
        if not done.cancelled():
            done.exception()  # marks it as retrieved: all readers may have been cancelled

    async def payloads(self, missing: Sequence[MissingBlock]) -> list[bytes]:
        """Single entries; of segments only the payload column is decoded."""
        loop = asyncio.get_running_loop()
        self.fetching += 1
        try:
            local = await loop.run_in_executor(self._threads, self._read_each_local, missing)
        finally:
            self.fetching -= 1
        by_segment: dict[str, tuple[StoredSegment, list[int]]] = {}
        for one, found in zip(missing, local, strict=True):
            if isinstance(found, StoredSegment):
                by_segment.setdefault(found.prefix + found.info.key, (found, []))[1].append(one.entry)
        cold = [self._cold.payloads(*segment, entries) for segment, entries in by_segment.values()]
        fetched = dict(zip(by_segment, await asyncio.gather(*cold), strict=True))
        return [
            found if isinstance(found, bytes) else fetched[found.prefix + found.info.key][one.entry]
            for one, found in zip(missing, local, strict=True)
        ]

    def _read_each_local(self, missing: Sequence[MissingBlock]) -> list[bytes | StoredSegment]:
        """Runs on a thread. Each payload, or the segment that has it."""
        found: list[bytes | StoredSegment] = []
        for one in missing:
            local = self.read_local(one, 1)
            found.append(
                local
                if isinstance(local, StoredSegment)
                else local[0].payload(one.entry, one.owner.separator)
            )
        return found

    def read_local(self, missing: MissingBlock, bytes_max: int) -> list[Block] | StoredSegment:
        """Blocks if the hot store has them, else the segment. Blocks on the local disk only."""
        number, entry = missing.number, missing.entry
        found: list[Block] = []
        size = 0
        for row in self._store.db.blocks_from(number, entry):
            found.append(decode_block(row))
            size += len(row.body)
            if size >= bytes_max:
                break
        if found:
            return found
        row = self._store.db.cold.segment_at(number, entry)
        if row is not None:
            return self.segment_of(missing.owner, row)
        if entry <= missing.owner.earliest:
            raise offset_gone(missing.owner, missing.owner.earliest)
        raise AssertionError(f"entry {entry} of stream {number} is neither in memory nor stored")

    # -- by time ---------------------------------------------------------------------------------------

    def since(self, stream: Stream, since_ns: int) -> int | StoredSegment | None:
        """The first stored entry appended at or after the instant, or the segment that holds it."""
        # Segments are older than blocks, so a segment that reaches the instant has the first such entry.
        row = self._store.db.cold.segment_since(stream.number, since_ns)
        if row is not None and _SEGMENT_INFO.decode(row.info).first_ns >= since_ns:
            return row.first
        if row is not None:
            return self.segment_of(stream, row)
        found = self._store.db.first_entry_since(stream.number, since_ns)
        if found is None:
            return None
        block = decode_block(found)
        return block.first + bisect_left(block.times, since_ns)

    async def since_in(self, segment: StoredSegment, since_ns: int) -> int:
        return await self._cold.first_since(*segment, since_ns)

    @property
    def _cold(self) -> ColdReader:
        if self.cold is None:
            raise TailraceError("unavailable", "this server has no object store to read from")
        return self.cold

    def segment_of(self, stream: Stream, row: SegmentRow) -> StoredSegment:
        """The segment of a row, or its replacement by a compaction that is not checkpointed yet."""
        prefix = stream_prefix(make_stream_id(stream.name, stream.incarnation))
        compacted = replacement_segment(self._streams, stream.number, row.first)
        if compacted is not None:
            return StoredSegment(prefix, compacted.segment, compacted.footer)
        return StoredSegment(prefix, _SEGMENT_INFO.decode(row.info), row.footer)
