"""Reading pages and single entries from memory, the hot store, segments and a fork's ancestors.

`Reader._gather` runs on the loop thread and reads memory only. When a block is not in memory it returns a
`MissingBlock`; `Reader.read` fetches that block (`History`) and continues. Blocks never change, so a page
assembled in several steps is still one consistent slice.

`PointReader` reads single entries that are far apart, such as search hits. It decodes and caches only their
payloads: the blocks around fifty hits would be fifty megabytes and evict everything else from the cache.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.log.decide import offset_gone
from tailrace.log.history import (
    FetchedBlock,
    History,
    MissingBlock,
    NotLocalError,
    SkippedRange,
    StoredSegment,
)
from tailrace.log.model import AppendRecord, Block, ReadPart, Stream, fold_records
from tailrace.log.publish import TrafficCounts
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.cold_reader import ColdReader


class EntryLabels:
    """Append time and routing key of each entry of a page."""

    __slots__ = ("keys", "times")

    def __init__(self) -> None:
        self.times: array[int] = array("q")
        self.keys: list[bytes | None] = []

    def add_block(self, block: Block, begin: int, end: int) -> None:
        self.times += block.times[begin:end]
        self.keys += [None] * (end - begin) if block.keys is None else block.keys[begin:end]

    def add_record(self, record: AppendRecord, begin: int, end: int) -> None:
        self.times += array("q", [record.time_ns]) * (end - begin)
        self.keys += [record.key] * (end - begin) if record.keys is None else record.keys[begin:end]


class Page:
    """A slice `(after, next_entry]`; `parts` are runs of entries, to be joined by the stream's separator.

    A page by key that was read with `apart` also has the entry numbers.
    """

    __slots__ = ("count", "labels", "next_entry", "numbers", "parts")

    def __init__(
        self,
        parts: list[ReadPart],
        next_entry: int,
        count: int,
        numbers: list[int] | None = None,
        labels: EntryLabels | None = None,
    ) -> None:
        self.parts = parts
        self.next_entry = next_entry
        self.count = count
        self.numbers = numbers
        self.labels = labels

    def entries(self) -> Sequence[int]:
        """The number of each entry in the page, in order."""
        if self.numbers is not None:
            return self.numbers
        return range(self.next_entry - self.count + 1, self.next_entry + 1)


class PageBudget:
    """A page being assembled: its parts so far and the remaining bytes and entries."""

    __slots__ = (
        *("apart", "bytes_left", "count", "entries_left", "key", "labels", "next_entry", "numbers", "parts"),
    )

    def __init__(
        self,
        after: int,
        bytes_max: int,
        entries_max: int,
        key: bytes | None,
        *,
        apart: bool = False,
        labels: EntryLabels | None = None,
    ) -> None:
        self.parts: list[ReadPart] = []
        self.count = 0
        self.next_entry = after
        self.bytes_left = bytes_max
        self.entries_left = entries_max
        self.key = key
        self.apart = apart  # each entry is a separate part, without separators
        self.numbers: list[int] | None = [] if apart and key is not None else None
        self.labels = labels

    @property
    def full(self) -> bool:
        return self.entries_left <= 0 or self.bytes_left <= 0

    def page(self) -> Page:
        return Page(self.parts, self.next_entry, self.count, self.numbers, self.labels)


class BlockCache:
    """LRU cache of blocks read from the hot store and segments, bounded in bytes.

    Not an `LruCache`: blocks are found by the entries they have, and every read of older entries passes here.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._firsts: dict[int, list[int]] = {}
        self.bytes = 0

    def find(self, number: int, entry: int) -> Block | None:
        firsts = self._firsts.get(number)
        if not firsts:
            return None
        index = bisect_right(firsts, entry) - 1
        if index < 0:
            return None
        key = (number, firsts[index])
        block = self._blocks[key]
        if entry > block.last:
            return None
        self._blocks.move_to_end(key)
        return block

    def put(self, number: int, block: Block) -> None:
        key = (number, block.first)
        old = self._blocks.pop(key, None)
        if old is None:
            firsts = self._firsts.setdefault(number, [])
            firsts.insert(bisect_left(firsts, block.first), block.first)
        else:
            self.bytes -= old.memory_bytes
        self._blocks[key] = block
        self.bytes += block.memory_bytes
        while self.bytes > self._bytes_max and len(self._blocks) > 1:
            self._evict()

    def clear(self) -> None:
        while self._blocks:
            self._evict()

    def _evict(self) -> None:
        (number, first), block = self._blocks.popitem(last=False)
        self.bytes -= block.memory_bytes
        firsts = self._firsts[number]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[number]


class Reader:
    """Reads pages of published entries."""

    def __init__(
        self, streams: Streams, store: StoredStreams, cache_bytes: int, cold: ColdReader | None = None
    ) -> None:
        self._streams = streams
        self.history = History(store, streams, cold)
        self.cache = BlockCache(cache_bytes)
        self.served: TrafficCounts | None = None  # entries and bytes sent to clients, if counted

    def close(self) -> None:
        self.history.close()

    def try_read(
        self,
        stream: Stream,
        after: int,
        bytes_max: int,
        entries_max: int,
        key: bytes | None = None,
        *,
        apart: bool = False,
    ) -> Page | MissingBlock:
        """The page if all of it is in memory, or the first block that is not."""
        budget = PageBudget(after, bytes_max, entries_max, key, apart=apart)
        missing = self._gather(stream, budget, None)
        return budget.page() if missing is None else missing

    async def read(
        self,
        stream: Stream,
        after: int,
        bytes_max: int,
        entries_max: int,
        key: bytes | None = None,
        *,
        apart: bool = False,
    ) -> Page:
        """The page; fetches blocks that are not in memory."""
        return await self._fill(stream, PageBudget(after, bytes_max, entries_max, key, apart=apart))

    def try_read_labelled(
        self, stream: Stream, after: int, bytes_max: int, entries_max: int
    ) -> Page | MissingBlock:
        """As `try_read` with `apart`, and with the labels of each entry."""
        budget = PageBudget(after, bytes_max, entries_max, None, apart=True, labels=EntryLabels())
        missing = self._gather(stream, budget, None)
        return budget.page() if missing is None else missing

    async def read_labelled(
        self, stream: Stream, after: int, bytes_max: int, entries_max: int, key: bytes | None = None
    ) -> Page:
        """As `read` with `apart`, and with the labels of each entry."""
        budget = PageBudget(after, bytes_max, entries_max, key, apart=True, labels=EntryLabels())
        return await self._fill(stream, budget)

    async def _fill(self, stream: Stream, budget: PageBudget) -> Page:
        pinned: FetchedBlock | SkippedRange | None = None
        while (missing := self._gather(stream, budget, pinned)) is not None:
            # Fetches some blocks ahead; the first is pinned in case a small cache evicts it.
            try:
                found = await self.history.fetch(missing, budget.bytes_left, budget.key)
            except TailraceError:
                if budget.next_entry < stream.earliest:  # removed by retention during the read
                    raise offset_gone(stream, stream.earliest) from None
                raise
            pinned = found if isinstance(found, SkippedRange) else self._cache_blocks(missing, found)
        return budget.page()

    async def fetch_block(self, missing: MissingBlock) -> FetchedBlock:
        """Fetches the block named by a `NotLocalError`, to be passed in `fetched` when retrying."""
        found = await self.history.fetch(missing, 1)
        assert isinstance(found, list)
        return self._cache_blocks(missing, found)

    def _cache_blocks(self, missing: MissingBlock, found: list[Block]) -> FetchedBlock:
        for block in found:
            self.cache.put(missing.number, block)
        return FetchedBlock(missing.number, found[0])

    def read_entry(self, stream: Stream, entry: int, fetched: Sequence[FetchedBlock]) -> bytes:
        """One entry without awaiting, for rare steps that must not be interleaved with others."""
        budget = PageBudget(entry - 1, 1, 1, None)
        pinned: FetchedBlock | None = None
        while (missing := self._gather(stream, budget, pinned)) is not None:
            pinned = FetchedBlock(missing.number, self._local_block(missing, fetched))
        return b"".join(budget.parts)

    def time_of(self, stream: Stream, entry: int, fetched: Sequence[FetchedBlock] = ()) -> int:
        """When an entry was appended to the stream or to the ancestor it comes from; 0 for the start."""
        if entry <= stream.earliest:
            return 0  # no earlier entry is visible
        owner = stream
        while owner.parent and entry <= owner.fork_entry:
            owner = self._streams.parent_of(owner)
        if entry == owner.tail:
            return owner.last_ns
        if entry <= owner.stored:
            block = self._local_block(MissingBlock(owner, entry), fetched)
            return block.times[entry - block.first]
        for block in owner.blocks or ():
            if entry <= block.last:
                return block.times[entry - block.first]
        recent = owner.recent or []
        return recent[bisect_left(recent, entry, key=_last_of_record)].time_ns

    def _local_block(self, missing: MissingBlock, fetched: Sequence[FetchedBlock]) -> Block:
        """A block from the local disk or from `fetched`; raises NotLocalError otherwise."""
        for pinned in fetched:
            if pinned.holds(missing.number, missing.entry):
                return pinned.block
        found = self.history.read_local(missing, 1)
        if isinstance(found, StoredSegment):
            raise NotLocalError(missing)
        return found[0]

    def entry_before(self, stream: Stream, since_ns: int) -> int:
        """The position before the first visible entry that was appended at or after the instant.

        Raises NotLocalError if a segment has to be read for it; use `find_before` then.
        """
        for owner, upto in self.levels(stream):
            found = self._own_entry_since(owner, since_ns)
            if isinstance(found, StoredSegment):
                raise NotLocalError(MissingBlock(owner, found.info.first))
            if found is not None and found <= upto:
                return found - 1
        return stream.visible

    async def find_before(self, stream: Stream, since_ns: int) -> int:
        """As `entry_before`; reads segments if necessary."""
        for owner, upto in self.levels(stream):
            found = self._own_entry_since(owner, since_ns)
            if isinstance(found, StoredSegment):
                found = await self.history.since_in(found, since_ns)
            if found is not None and found <= upto:
                return found - 1
        return stream.visible

    def levels(self, stream: Stream) -> list[tuple[Stream, int]]:
        """A stream and its ancestors, oldest first, each with the last of its visible entries."""
        levels: list[tuple[Stream, int]] = [(stream, stream.visible)]
        while (owner := levels[-1][0]).parent and stream.earliest < owner.fork_entry:
            levels.append((self._streams.parent_of(owner), min(owner.fork_entry, levels[-1][1])))
        return levels[::-1]

    def _own_entry_since(self, stream: Stream, since_ns: int) -> int | StoredSegment | None:
        if stream.last_ns < since_ns:
            return None
        found = self.history.since(stream, since_ns)
        if found is not None:
            return found
        for block in stream.blocks or ():
            if block.times[-1] >= since_ns:
                return block.first + bisect_left(block.times, since_ns)
        for record in stream.recent or ():
            if record.time_ns >= since_ns:
                return record.first
        return None

    def _gather(
        self, stream: Stream, budget: PageBudget, pinned: FetchedBlock | SkippedRange | None
    ) -> MissingBlock | None:
        # A fork shows its ancestors' entries up to the fork point: oldest ancestor first.
        levels: list[tuple[Stream, int]] = [(stream, stream.visible)]
        owner = stream
        while owner.parent and budget.next_entry < owner.fork_entry:
            upto = min(owner.fork_entry, levels[-1][1])
            owner = self._streams.parent_of(owner)
            levels.append((owner, upto))
        for owner, upto in reversed(levels):
            while budget.next_entry < upto and not budget.full:
                entry = budget.next_entry + 1
                if entry <= owner.stored:
                    block = self.cache.find(owner.number, entry)
                    if block is None and pinned is not None and pinned.holds(owner.number, entry):
                        if isinstance(pinned, SkippedRange):
                            budget.next_entry = min(upto, pinned.last)
                            continue
                        block = pinned.block
                    if block is None:
                        return MissingBlock(owner, entry)
                    read_block(block, budget, min(upto, owner.stored), owner.separator)
                else:
                    read_memory_tail(owner, budget, upto)
        return None


def read_memory_tail(stream: Stream, budget: PageBudget, upto: int) -> None:
    """Reads from the memory tail: blocks first, then single appends."""
    blocks = stream.blocks
    if blocks and budget.next_entry < blocks[-1].last:
        index = bisect_left(blocks, budget.next_entry + 1, key=_last_of_block)
        read_block(blocks[index], budget, upto, stream.separator)
        return
    recent = stream.recent
    assert recent, f"entry {budget.next_entry + 1} of {stream.name} is not in memory"
    assert recent[0].first <= budget.next_entry + 1
    index = bisect_left(recent, budget.next_entry + 1, key=_last_of_record)
    while index < len(recent) and budget.next_entry < upto and not budget.full:
        read_record(recent[index], budget, upto, stream.separator)
        index += 1


def _last_of_block(block: Block) -> int:
    return block.last


def _last_of_record(record: AppendRecord) -> int:
    return record.first + record.count - 1


def read_block(block: Block, budget: PageBudget, upto: int, separator: int) -> None:
    """Adds as many entries of a block as the budget allows, but at least one if the page is empty."""
    begin = budget.next_entry + 1 - block.first
    end = min(upto, block.last) - block.first + 1
    assert 0 <= begin < end <= len(block.ends)
    if budget.key is not None:
        _read_keyed(block, budget, begin, end, separator)
        return
    ends = block.ends
    start = ends[begin - 1] + separator if begin else 0
    end = min(end, begin + budget.entries_left)
    if ends[end - 1] - start > budget.bytes_left:
        end = bisect_right(ends, start + budget.bytes_left, begin, end)
        if end == begin:
            if budget.count:
                budget.bytes_left = 0
                return
            end = begin + 1
    stop = ends[end - 1]
    if budget.apart and (separator or budget.labels is not None):
        starts = [start, *(ends[index] + separator for index in range(begin, end - 1))]
        view = memoryview(block.body)
        budget.parts += [view[first:last] for first, last in zip(starts, ends[begin:end], strict=True)]
    else:
        whole = begin == 0 and end == len(ends)
        budget.parts.append(block.body if whole else memoryview(block.body)[start:stop])
    if budget.labels is not None:
        budget.labels.add_block(block, begin, end)
    taken = end - begin
    budget.count += taken
    budget.entries_left -= taken
    budget.bytes_left -= stop - start
    budget.next_entry += taken


def _read_keyed(block: Block, budget: PageBudget, begin: int, end: int, separator: int) -> None:
    keys, ends = block.keys, block.ends
    if keys is None:
        budget.next_entry = block.first + end - 1
        return
    for index in range(begin, end):
        if keys[index] == budget.key:
            start = ends[index - 1] + separator if index else 0
            size = ends[index] - start
            if budget.count and (size > budget.bytes_left or budget.entries_left <= 0):
                budget.bytes_left = 0
                return
            budget.parts.append(memoryview(block.body)[start : ends[index]])
            if budget.numbers is not None:
                budget.numbers.append(block.first + index)
            if budget.labels is not None:
                budget.labels.add_block(block, index, index + 1)
            budget.count += 1
            budget.entries_left -= 1
            budget.bytes_left -= size
        budget.next_entry = block.first + index


def read_record(record: AppendRecord, budget: PageBudget, upto: int, separator: int) -> None:
    """Adds the entries of one append that are in the range and fit the budget."""
    last = record.first + record.count - 1
    if budget.key is not None and record.key != budget.key:
        if record.keys is not None:
            read_block(fold_records([record], separator, 0), budget, upto, separator)
        else:
            budget.next_entry = min(last, upto)
        return
    lengths = record.lengths
    begin = budget.next_entry + 1 - record.first
    end = min(upto, last) - record.first + 1
    if begin == 0 and end == record.count and end <= budget.entries_left:
        if len(record.body) <= budget.bytes_left or (not budget.count and record.count == 1):
            if budget.labels is not None:
                budget.labels.add_record(record, 0, record.count)
            _add_part(budget, record.body, record.count, lengths, separator)
            return
        if record.count == 1:
            budget.bytes_left = 0
            return
    assert lengths is not None
    start = sum(lengths[:begin]) + separator * begin
    stop = start
    taken = 0
    for length in lengths[begin : min(end, begin + budget.entries_left)]:
        following = stop + length + (separator if taken else 0)
        if following - start > budget.bytes_left and (taken or budget.count):
            break
        stop = following
        taken += 1
    if not taken:
        budget.bytes_left = 0
        return
    if budget.labels is not None:
        budget.labels.add_record(record, begin, begin + taken)
    _add_part(budget, memoryview(record.body)[start:stop], taken, lengths[begin : begin + taken], separator)
    if begin + taken < end:
        budget.bytes_left = 0  # the page ends inside this batch


def _add_part(
    budget: PageBudget, part: ReadPart, taken: int, lengths: Sequence[int] | None, separator: int
) -> None:
    if budget.apart and lengths is not None:
        view = memoryview(part)
        position = 0
        for length in lengths:
            budget.parts.append(view[position : position + length])
            position += length + separator
    else:
        budget.parts.append(part)
    if budget.numbers is not None:
        budget.numbers += range(budget.next_entry + 1, budget.next_entry + taken + 1)
    budget.count += taken
    budget.entries_left -= taken
    budget.bytes_left -= len(part)
    budget.next_entry += taken


POINT_CACHE_BYTES_MAX: Final = 8 << 20
_OVERHEAD_BYTES: Final = 200  # per cached entry


class PointReader:
    """Reads and caches single payloads. Runs on the loop thread."""

    def __init__(self, reader: Reader, bytes_max: int = POINT_CACHE_BYTES_MAX) -> None:
        self._reader = reader
        self._cached: LruCache[tuple[int, int], bytes] = LruCache(  # by owner's number and entry
            size_max=bytes_max, size_of=lambda _, payload: len(payload) + _OVERHEAD_BYTES
        )

    @property
    def bytes(self) -> int:
        return self._cached.size

    async def payloads(self, stream: Stream, entries: Sequence[int]) -> dict[int, bytes]:
        """The payload of each entry; fetches those that are not in memory."""
        found: dict[int, bytes] = {}
        missing: list[MissingBlock] = []
        for entry in entries:
            page = self._reader.try_read(stream, entry - 1, 1, 1, apart=True)
            if not isinstance(page, MissingBlock):
                found[entry] = bytes(page.parts[0])
            elif (cached := self._cached.get((page.number, page.entry))) is not None:
                found[entry] = cached
            else:
                missing.append(page)
        if missing:
            try:
                fetched = await self._reader.history.payloads(missing)
            except TailraceError:
                if any(one.entry <= stream.earliest for one in missing):  # removed by retention meanwhile
                    raise offset_gone(stream, stream.earliest) from None
                raise
            for one, payload in zip(missing, fetched, strict=True):
                found[one.entry] = payload
                self._cached.put((one.number, one.entry), payload)
        return found

    def evict_all(self) -> None:
        """Evicts everything, when memory is short."""
        self._cached.clear()
