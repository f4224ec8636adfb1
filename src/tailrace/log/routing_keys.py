"""Listing the distinct routing keys of a stream in byte order, a page at a time.

Four sources are merged: the memory tail, blocks of the hot store, lexicons, and the segments that no lexicon
covers. The keys of a segment never change, so those found by a scan are cached, bounded in bytes.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.log.history import StoredSegment
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.hot_store.tables import SegmentRow
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import make_stream_id, stream_prefix

CACHE_BYTES_MAX = 16 << 20
SEGMENT_KEY_BYTES_MAX = 4 << 20  # segments with more keys are not cached
SCAN_BYTES = 4 << 20  # read from a segment at once
KEY_OVERHEAD_BYTES = 50
SCANS_AT_ONCE = 2
SCANS_WAITING_MAX = 32

_KEYS = msgspec.msgpack.Decoder(list[bytes | None])


class AncestorLevel(NamedTuple):
    """A stream or an ancestor of it, and its visible entries: those after `after` up to `upto`."""

    owner: Stream
    after: int
    upto: int


class LexiconTimes:
    """Seconds that a page spent on lexicons, by step."""

    __slots__ = ("decode_s", "enumerate_s", "get_s", "merge_s")

    def __init__(self) -> None:
        self.get_s = 0.0  # fetching and opening files
        self.decode_s = 0.0  # row groups of them
        self.enumerate_s = 0.0  # selecting keys in decoded row groups
        self.merge_s = 0.0  # with the keys from elsewhere


class LexiconKeys(NamedTuple):
    """Keys from lexicons, and the ranges of entries that these cover."""

    covered: list[tuple[int, int]]
    keys: list[bytes]

    def covers(self, first: int, last: int) -> bool:
        """Whether the ranges, which are sorted, contain all entries from `first` to `last`."""
        for begin, end in self.covered:
            if begin <= first <= end:
                if last <= end:
                    return True
                first = end + 1
        return False


class LexiconReader(Protocol):
    """Built indexes of the keys of a stream."""

    async def first_keys(
        self, stream: Stream, below: int, upto: int, after: bytes | None, wanted: int, times: LexiconTimes
    ) -> LexiconKeys: ...


class KeyPage(NamedTuple):
    keys: list[bytes]
    more: bool
    segments: int  # scanned
    indexed_segments: int  # covered by lexicons
    runs: int  # of lexicons
    missing_segments: int  # not scanned because the time was used up
    unsealed_rows: int
    unsealed_s: float
    lexicon_s: float
    segments_s: float
    lexicon_times: LexiconTimes


class SmallestKeys:
    """The smallest `wanted` keys after `after`, in bounded memory."""

    def __init__(self, after: bytes | None, wanted: int) -> None:
        self.after = after
        self.wanted = wanted
        self._keys: set[bytes] = set()

    def add(self, keys: Iterable[bytes | None]) -> None:
        after, found = self.after, self._keys
        found.update([key for key in keys if key is not None and (after is None or key > after)])
        if len(found) > 8 * self.wanted + 4096:
            self._keys = set(sorted(found)[: self.wanted])

    def first(self) -> list[bytes]:
        return sorted(self._keys)[: self.wanted]


class KeyListing:
    def __init__(self, log: Log, lexicons: LexiconReader | None = None) -> None:
        self._log = log
        self._lexicons = lexicons
        self._gate = asyncio.Semaphore(SCANS_AT_ONCE)
        self._waiting = 0
        # The sorted keys of segments, and their size.
        self.cache: LruCache[str, tuple[list[bytes], int]] = LruCache(
            size_max=CACHE_BYTES_MAX, size_of=lambda _, cached: cached[1]
        )

    async def page(self, stream: Stream, after: bytes | None, limit: int, seconds_max: float) -> KeyPage:
        """Up to `limit` keys after `after`. Segments that cannot be scanned in time are only counted."""
        if self._log.pressure is not None:
            raise self._log.pressure
        if self._waiting >= SCANS_WAITING_MAX:
            raise TailraceError(
                "overloaded", f"{SCANS_WAITING_MAX} listings of routing keys are already waiting"
            )
        self._waiting += 1
        try:
            async with self._gate:
                return await self._page(stream, after, limit, seconds_max)
        finally:
            self._waiting -= 1

    async def _page(self, stream: Stream, after: bytes | None, limit: int, seconds_max: float) -> KeyPage:
        loop = asyncio.get_running_loop()
        begun_s = time.monotonic()
        levels = list(self._levels(stream))
        # Memory first: entries evicted meanwhile are in the hot store by then.
        recent = [run for level in levels for run in _memory_keys(level)]
        smallest = SmallestKeys(after, limit + 1)
        segment_of = self._log.reader.history.segment_of
        segments = await loop.run_in_executor(
            None, _collect_local_keys, self._log.store, levels, recent, smallest, segment_of
        )
        gathered_s = time.monotonic()
        times = LexiconTimes()
        lexicals = await self._from_lexicons(levels, smallest, times)
        left = [one for one in segments if not _is_covered(one, lexicals)]
        indexed, segments = len(segments) - len(left), left
        listed_s = time.monotonic()
        missing = 0
        for index, (segment, low, high) in enumerate(segments):
            if not await self._scan(segment, low, high, smallest, begun_s + seconds_max):
                missing = len(segments) - index
                break
        keys = smallest.first()
        return KeyPage(
            keys[:limit],
            len(keys) > limit,
            len(segments) - missing,
            indexed,
            sum(len(lexical.covered) for lexical in lexicals.values()),
            missing,
            sum(max(0, level.upto - max(level.after, level.owner.sealed)) for level in levels),
            gathered_s - begun_s,
            listed_s - gathered_s,
            time.monotonic() - listed_s,
            times,
        )

    async def _from_lexicons(
        self, levels: list[AncestorLevel], smallest: SmallestKeys, times: LexiconTimes
    ) -> dict[str, LexiconKeys]:
        """The keys of lexicons, by the prefix of the stream whose segments they cover."""
        found: dict[str, LexiconKeys] = {}
        for owner, after, upto in levels if self._lexicons is not None else ():
            assert self._lexicons is not None
            lexical = await self._lexicons.first_keys(
                owner, after, upto, smallest.after, smallest.wanted, times
            )
            found_s = time.monotonic()
            smallest.add(lexical.keys)
            times.merge_s += time.monotonic() - found_s
            found[stream_prefix(make_stream_id(owner.name, owner.incarnation))] = lexical
        return found

    def _levels(self, stream: Stream) -> Iterator[AncestorLevel]:
        """The stream itself, then the ancestors it inherits entries from."""
        owner, upto = stream, stream.visible
        while True:
            below = max(stream.earliest, owner.fork_entry if owner.parent else 0)
            if upto > below:
                yield AncestorLevel(owner, below, upto)
            if not owner.parent or stream.earliest >= owner.fork_entry:
                return
            upto = min(upto, owner.fork_entry)
            owner = self._log.streams.parent_of(owner)

    async def _scan(
        self, segment: StoredSegment, low: int, high: int, smallest: SmallestKeys, until_s: float
    ) -> bool:
        """Adds the keys of entries after `low` up to `high`; False if the time is used up."""
        prefix, info, _ = segment
        whole = low < info.first and info.last <= high
        cached = self.cache.get(prefix + info.key) if whole else None
        if cached is not None:
            known, _ = cached
            begin = 0 if smallest.after is None else bisect_right(known, smallest.after)
            smallest.add(known[begin : begin + smallest.wanted])
            return True
        cold = self._log.reader.history.cold
        if cold is None:
            raise TailraceError("unavailable", "this server has no object store to read from")
        to_cache: set[bytes] | None = set() if whole else None
        size = 0
        async for keys in _segment_keys(cold, segment, max(low + 1, info.first), min(high, info.last)):
            found = {key for key in keys if key is not None}
            smallest.add(found)
            if to_cache is not None:
                size += sum(len(key) + KEY_OVERHEAD_BYTES for key in found - to_cache)
                to_cache |= found
                if size > SEGMENT_KEY_BYTES_MAX:
                    to_cache = None
            if time.monotonic() > until_s:
                return False
        if to_cache is not None:
            self.cache.put(prefix + info.key, (sorted(to_cache), size + KEY_OVERHEAD_BYTES))
        return True


def _is_covered(found: tuple[StoredSegment, int, int], lexicals: dict[str, LexiconKeys]) -> bool:
    segment, low, high = found
    lexical = lexicals.get(segment.prefix)
    first, last = max(segment.info.first, low + 1), min(segment.info.last, high)
    return lexical is not None and lexical.covers(first, last)


def _memory_keys(level: AncestorLevel) -> Iterator[Sequence[bytes | None]]:
    """Keys of the memory tail, from lists that are copied or never changed in place."""
    owner = level.owner
    for block in tuple(owner.blocks or ()):
        if block.keys is not None and block.last > level.after and block.first <= level.upto:
            begin = max(0, level.after + 1 - block.first)
            yield block.keys[begin : level.upto + 1 - block.first]
    for record in tuple(owner.recent or ()):
        keys = record.keys if record.keys is not None else [record.key] * min(record.count, 1)
        if record.first > level.after and record.first + record.count - 1 <= level.upto:
            yield keys
        elif record.keys is not None:
            begin = max(0, level.after + 1 - record.first)
            yield keys[begin : max(0, level.upto + 1 - record.first)]
        elif record.first <= level.upto and record.first + record.count > level.after + 1:
            yield keys


def _collect_local_keys(
    store: StoredStreams,
    levels: list[AncestorLevel],
    recent: list[Sequence[bytes | None]],
    smallest: SmallestKeys,
    segment_of: Callable[[Stream, SegmentRow], StoredSegment],
) -> list[tuple[StoredSegment, int, int]]:
    """Runs on a thread: adds keys of memory and hot store to `smallest`; returns the segments to scan."""
    for keys in recent:
        smallest.add(keys)
    segments: list[tuple[StoredSegment, int, int]] = []
    with store.snapshot():
        for owner, after, upto in levels:
            through = after
            for row in store.db.cold.segments_within(owner.number, after, upto):
                segment = segment_of(owner, row)
                through = row.last
                # A compaction that is not checkpointed yet may have merged several rows into one segment.
                if not segments or segments[-1][0] != segment:
                    segments.append((segment, after, upto))
            for first, raw in store.db.keys_within(owner.number, through, upto):
                keys = _KEYS.decode(raw)
                smallest.add(keys[max(0, through + 1 - first) : max(0, upto + 1 - first)])
    return segments


async def _segment_keys(
    cold: ColdReader, segment: StoredSegment, first: int, last: int
) -> AsyncIterator[list[bytes | None]]:
    entry = first
    while entry <= last:
        for rows in await cold.rows(*segment, entry, SCAN_BYTES):
            keys, begin = rows.keys, max(0, entry - rows.first)
            if keys is not None:
                yield keys[begin : last + 1 - rows.first]
            entry = rows.first + len(rows.ends)
