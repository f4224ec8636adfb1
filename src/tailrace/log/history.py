"""Entries that are not in memory: blocks of the hot store, or segments on the object store.

The hot store is asked first, and on a thread. A checkpoint puts a segment's row in and takes the blocks it
covers out in one transaction, so an entry without a block has its segment.
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
    """The block that holds this entry of this stream has to be fetched first."""

    owner: Stream
    entry: int

    @property
    def number(self) -> int:
        return self.owner.number


class NotLocalError(Exception):
    """What was asked for can only be had by waiting for the object store."""

    def __init__(self, missing: MissingBlock) -> None:
        super().__init__(f"entry {missing.entry} of {missing.owner.name} is on the object store")
        self.missing = missing


class FetchedBlock(NamedTuple):
    """A block just fetched, and whose it is: a fork and its source use the same entry numbers."""

    number: int
    block: Block

    def holds(self, number: int, entry: int) -> bool:
        return number == self.number and self.block.first <= entry <= self.block.last


class SkippedRange(NamedTuple):
    """Entries that a search by key may pass over without looking at them."""

    number: int
    first: int
    last: int

    def holds(self, number: int, entry: int) -> bool:
        return number == self.number and self.first <= entry <= self.last


class StoredSegment(NamedTuple):
    """A segment as the hot store tells it."""

    prefix: str
    info: SegmentInfo
    footer: bytes


class KeyIndex(Protocol):
    """Something that knows where keys are without looking at segments."""

    async def next_with_key(self, stream: Stream, key: bytes, entry: int) -> int:
        """Where to look for a key: at `entry`, or at a later one before which there is none."""
        ...


class History:
    """Fetches blocks. `cold` is set by whoever knows the object store; without one nothing is ever sealed."""

    def __init__(self, store: StoredStreams, streams: Streams) -> None:
        self._store = store
        self._streams = streams
        self._threads = ThreadPoolExecutor(HISTORY_THREADS, "read")
        self.cold: ColdReader | None = None
        self.keys: KeyIndex | None = None
        self.fetching = 0  # reads of the hot store that run or wait for a thread
        self._looking: dict[tuple[int, int, int], asyncio.Future[list[Block] | StoredSegment]] = {}
        self.joined = 0  # reads that another one was under way for

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- by entry --------------------------------------------------------------------------------------

    async def fetch(
        self, missing: MissingBlock, bytes_max: int, key: bytes | None = None
    ) -> list[Block] | SkippedRange:
        """The block that holds the entry and some that follow; or, for a key, what need not be looked at."""
        if key is not None and self.keys is not None and missing.entry <= missing.owner.sealed:
            following = await self.keys.next_with_key(missing.owner, key, missing.entry)
            if following > missing.entry:
                return SkippedRange(missing.number, missing.entry, following - 1)
        found = await self._looked(missing, bytes_max)
        if isinstance(found, list):
            return found
        cold, (prefix, info, footer) = self._cold, found
        if key is not None:
            following = await cold.next_with_key(prefix, info, footer, key, missing.entry)
            if following > missing.entry:
                return SkippedRange(missing.number, missing.entry, following - 1)
        rows = await cold.rows(prefix, info, footer, missing.entry, bytes_max)
        return [Block(*run) for run in rows]

    async def _looked(self, missing: MissingBlock, bytes_max: int) -> list[Block] | StoredSegment:
        """As `look`. Readers that want the same at the same time share one read: entries never change."""
        wanted = (missing.number, missing.entry, bytes_max)
        looking = self._looking.get(wanted)
        if looking is None:
            loop = asyncio.get_running_loop()
            looking = loop.run_in_executor(self._threads, self.look, missing, bytes_max)
            self._looking[wanted] = looking
            self.fetching += 1
            looking.add_done_callback(lambda done: self._looked_up(wanted, done))
        else:
            self.joined += 1
        return await asyncio.shield(looking)  # a reader that leaves takes nothing from the others

    def _looked_up(
        self, wanted: tuple[int, int, int], done: asyncio.Future[list[Block] | StoredSegment]
    ) -> None:
        del self._looking[wanted]
        self.fetching -= 1
        if not done.cancelled():
            done.exception()  # all who wanted to know may have left

    async def payloads(self, missing: Sequence[MissingBlock]) -> list[bytes]:
        """Single entries that may lie anywhere; of segments nothing but their payloads is decoded."""
        loop = asyncio.get_running_loop()
        self.fetching += 1
        try:
            looked = await loop.run_in_executor(self._threads, self._look_each, missing)
        finally:
            self.fetching -= 1
        wanted: dict[str, tuple[StoredSegment, list[int]]] = {}
        for one, found in zip(missing, looked, strict=True):
            if isinstance(found, StoredSegment):
                wanted.setdefault(found.prefix + found.info.key, (found, []))[1].append(one.entry)
        cold = [self._cold.payloads(*segment, entries) for segment, entries in wanted.values()]
        fetched = dict(zip(wanted, await asyncio.gather(*cold), strict=True))
        return [
            found if isinstance(found, bytes) else fetched[found.prefix + found.info.key][one.entry]
            for one, found in zip(missing, looked, strict=True)
        ]

    def _look_each(self, missing: Sequence[MissingBlock]) -> list[bytes | StoredSegment]:
        """On a thread. Each payload, or the segment that has it."""
        found: list[bytes | StoredSegment] = []
        for one in missing:
            looked = self.look(one, 1)
            found.append(
                looked
                if isinstance(looked, StoredSegment)
                else looked[0].payload(one.entry, one.owner.separator)
            )
        return found

    def look(self, missing: MissingBlock, bytes_max: int) -> list[Block] | StoredSegment:
        """Blocks if the hot store has them, else the segment. Waits for the disk and for nothing else."""
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
        # Segments are older than blocks, so if one of them reaches that far the entry is there.
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
        """The segment of a row; or the one that has taken its place, if the hot store has not heard of it."""
        prefix = stream_prefix(make_stream_id(stream.name, stream.incarnation))
        joined = replacement_segment(self._streams, stream.number, row.first)
        if joined is not None:
            return StoredSegment(prefix, joined.segment, joined.footer)
        return StoredSegment(prefix, _SEGMENT_INFO.decode(row.info), row.footer)
