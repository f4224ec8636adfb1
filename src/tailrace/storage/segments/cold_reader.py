"""Reading entries that are only in segments: footer, ranged get or cache, decode.

Runs on the server's loop. The object store's library and Arrow are imported at the first read of a segment.
Concurrent readers of the same row groups share one fetch and one decoding. Decoding runs on two threads, and
budgets bound the bytes in flight.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.tasks import SingleFlight
from tailrace.storage.object_store.cache import (
    ByteBudget,
    LoopTasks,
    ObjectCache,
    ObjectRange,
    cache_source,
    fail_future,
)
from tailrace.storage.object_store.interface import ObjectMissingError, ObjectStoreError
from tailrace.storage.segments.model import FOOTER_GUESS_BYTES, CorruptSegmentError, SegmentInfo, SegmentRows

if TYPE_CHECKING:
    from tailrace.storage.segments.reader import Footer, RowGroup

logger = logging.getLogger("tailrace.store")

COLD_READ_THREADS = 2
FOOTER_BYTES_MAX = 16 << 20  # of parsed footers
LOADING_BYTES_MAX = 64 << 20
READ_AHEAD_BYTES = 4 << 20  # from a bucket, for a reader that continues


T = TypeVar("T")


class ColdReadCounts:
    """What the cold reader did, in plain numbers."""

    __slots__ = ("corrupt", "decoded_groups", "hits", "misses", "shared")

    def __init__(self) -> None:
        self.hits = 0  # ranges of row groups that came from the cache
        self.misses = 0  # stretches that did not
        self.shared = 0  # row groups that another read was loading already
        self.decoded_groups = 0
        self.corrupt = 0  # reads that failed on a missing or damaged segment


class _OpenSegment(NamedTuple):
    """One segment as the steps of a read need it."""

    key: str
    source: str
    footer: Footer

    def part(self, index: int) -> ObjectRange:
        group = self.footer.group(index)
        return ObjectRange(self.source, group.start, group.stop)


class ColdReader:
    def __init__(
        self,
        url: str,
        cache_dir: Path | None,
        cache_bytes: int,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.counts = ColdReadCounts()
        self._work = LoopTasks(loop, COLD_READ_THREADS)
        self.parts = ObjectCache(url, cache_dir, cache_bytes, limits, self._work)
        self._budget = ByteBudget(LOADING_BYTES_MAX)
        self._footers: LruCache[str, Footer] = LruCache(
            size_max=FOOTER_BYTES_MAX, size_of=lambda _, footer: footer.memory_bytes, keep_newest=True
        )
        self._parsing: SingleFlight[str, Footer] = SingleFlight(self._work)
        self._groups: dict[tuple[str, int], asyncio.Future[SegmentRows]] = {}

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.cold_cache_bytes.read = lambda: self.parts.cached_bytes
        metrics.cold_reads.reads[("cache",)] = lambda: self.counts.hits
        metrics.cold_reads.reads[("store",)] = lambda: self.counts.misses
        metrics.cold_reads.reads[("shared",)] = lambda: self.counts.shared
        metrics.cold_failures.read = lambda: self.counts.corrupt

    # -- reading -------------------------------------------------------------------------------------------

    async def rows(
        self, prefix: str, info: SegmentInfo, footer: bytes, entry: int, bytes_ahead: int
    ) -> list[SegmentRows]:
        """The row group of `entry`, and the following ones of this segment up to `bytes_ahead`.

        `footer` is what `write_segment` returned; if it was not stored it is empty, and is fetched.
        """
        with self._map_errors(prefix + info.key):
            segment = await self._segment(prefix, info, footer)
            first = segment.footer.find(entry)
            return await self._load_groups(segment, first, segment.footer.reach(first, bytes_ahead))

    async def payloads(
        self, prefix: str, info: SegmentInfo, footer: bytes, entries: Sequence[int]
    ) -> dict[int, bytes]:
        """The payloads of some entries of a segment, and nothing else of their row groups."""
        with self._map_errors(prefix + info.key):
            segment = await self._segment(prefix, info, footer)
            wanted: dict[int, list[int]] = {}
            for entry in entries:
                wanted.setdefault(segment.footer.find(entry), []).append(entry)
            found = await asyncio.gather(*(self._read_payloads(segment, *one) for one in wanted.items()))
            return {entry: payload for picked in found for entry, payload in picked.items()}

    async def first_since(self, prefix: str, info: SegmentInfo, footer: bytes, since_ns: int) -> int:
        """The first entry appended at or after the instant; the one after the segment if there is none."""
        with self._map_errors(prefix + info.key):
            segment = await self._segment(prefix, info, footer)
            index = segment.footer.group_since(since_ns)
            if index is None:
                return info.last + 1
            (found,) = await self._load_groups(segment, index, index)
            return found.first + bisect_left(found.times, since_ns)

    async def next_with_key(
        self, prefix: str, info: SegmentInfo, footer: bytes, key: bytes, entry: int
    ) -> int:
        """The first entry from `entry` on that may have the key: `entry`, or the start of a later row group.

        It is the entry after the segment if no row group can have it.
        """
        with self._map_errors(prefix + info.key):
            found = (await self._segment(prefix, info, footer)).footer
            index = found.next_with_key(key, found.find(entry))
            return info.last + 1 if index is None else max(entry, found.group(index).first)

    @property
    def footer_bytes(self) -> int:
        return self._footers.size

    def evict_all(self) -> None:
        """Evicts all caches."""
        self._footers.clear()

    async def close(self) -> None:
        await self._work.end()
        await self.parts.close()

    @contextmanager
    def _map_errors(self, key: str) -> Generator[None]:
        """Maps errors to the one that a reader gets; details are logged for operators."""
        try:
            yield
        except (CorruptSegmentError, ObjectMissingError) as error:
            self.counts.corrupt += 1
            logger.error("cannot read segment", extra=log_fields(key=key, error=str(error)))
            raise TailraceError("unavailable", "a segment of this stream is missing or damaged") from error
        except ObjectStoreError as error:
            raise TailraceError("unavailable", "the object store does not respond") from error

    # -- footers -------------------------------------------------------------------------------------------

    async def _segment(self, prefix: str, info: SegmentInfo, stored: bytes) -> _OpenSegment:
        key = prefix + info.key
        footer = self._footers.get(key)
        if footer is None:
            footer = await self._parsing.run(key, lambda: self._load_footer(key, info, stored))
        return _OpenSegment(key, cache_source(key), footer)

    async def _load_footer(self, key: str, info: SegmentInfo, stored: bytes) -> Footer:
        footer = None
        if stored:
            try:
                footer = await self._work.on_thread(_parse_footer, stored, info)
            except CorruptSegmentError as error:
                logger.warning(
                    "stored footer is damaged, reading it from the segment",
                    extra=log_fields(key=key, error=str(error)),
                )
        if footer is None:
            footer = await self._work.on_thread(
                _parse_footer, await self._fetch_footer(key, info.bytes), info
            )
        self._footers.put(key, footer)
        return footer

    async def _fetch_footer(self, key: str, size: int) -> bytes:
        found: bytes | int = max(size - FOOTER_GUESS_BYTES, 0)
        while not isinstance(found, bytes):
            found = await self._work.on_thread(_footer_from_end, await self.parts.get(key, found, size), size)
        return found

    # -- row groups ----------------------------------------------------------------------------------------

    async def _load_groups(self, segment: _OpenSegment, first: int, last: int) -> list[SegmentRows]:
        """Row groups; those that are not being loaded yet are loaded in runs."""
        wanted: list[asyncio.Future[SegmentRows]] = []
        run: list[int] = []
        for index in range(first, last + 1):
            future = self._groups.get((segment.key, index))
            if future is None:
                future = self._groups[segment.key, index] = self._work.loop.create_future()
                run.append(index)
            else:
                self.counts.shared += 1
                self._start(segment, run)
                run = []
            wanted.append(future)
        self._start(segment, run)
        # A cancelled reader must not cancel the loading for the others.
        return await asyncio.gather(*map(asyncio.shield, wanted))

    def _start(self, segment: _OpenSegment, run: list[int]) -> None:
        if run:
            self._work.start(self._load(segment, run))

    async def _load(self, segment: _OpenSegment, run: list[int]) -> None:
        stretch = _RowGroupRange(segment, run, [segment.footer.group(index) for index in run])
        futures = [self._groups[segment.key, index] for index in run]
        unpacked_bytes = sum(map(segment.footer.group_bytes, run))
        try:
            async with self._budget.hold(stretch.part.size + unpacked_bytes):
                loaded = await self._load_stretch(stretch)
            for future, rows in zip(futures, loaded, strict=True):
                future.set_result(rows)
        except BaseException as error:
            for future in futures:
                fail_future(future, error)
            raise
        finally:
            for index in run:
                del self._groups[segment.key, index]

    async def _load_stretch(self, whole: _RowGroupRange) -> list[SegmentRows]:
        """What is cached is read and decoded from there; a gap between cached parts is one ranged get."""
        await self.parts.opened()
        self._read_ahead(whole)
        loaded: list[SegmentRows] = []
        while len(loaded) < len(whole.indices):
            cached, stretch = self._next(whole, len(loaded))
            rows = None if cached is None else await self._from_cache(cached, stretch, stretch.decode)
            if rows is None:
                self.counts.misses += 1
                raw = await self.parts.fetch(whole.segment.key, stretch.part)
                rows = await self._work.on_thread(stretch.decode, raw)
            loaded += rows
        self.counts.decoded_groups += len(loaded)
        return loaded

    def _next(self, whole: _RowGroupRange, at: int) -> tuple[ObjectRange | None, _RowGroupRange]:
        """From group `at` on, the groups in one cached part, or those in none."""
        parts, groups = self.parts, whole.groups
        source = whole.segment.source
        cached = parts.find(source, groups[at].start, groups[at].stop)
        end = at + 1
        while end < len(groups):
            found = parts.find(source, groups[end].start, groups[end].stop)
            if found != cached:
                break
            end += 1
        return cached, _RowGroupRange(whole.segment, whole.indices[at:end], groups[at:end])

    async def _read_payloads(
        self, segment: _OpenSegment, index: int, entries: Sequence[int]
    ) -> dict[int, bytes]:
        stretch = _RowGroupRange(segment, [index], [segment.footer.group(index)])
        pick = partial(stretch.payloads, entries)
        async with self._budget.hold(stretch.part.size + segment.footer.group_bytes(index)):
            await self.parts.opened()
            cached = self.parts.find(*stretch.part)
            found = None if cached is None else await self._from_cache(cached, stretch, pick)
            if found is None:
                self.counts.misses += 1
                raw = await self.parts.fetch(segment.key, stretch.part)
                found = await self._work.on_thread(pick, raw)
        self.counts.decoded_groups += 1
        return found

    async def _from_cache(
        self, cached: ObjectRange, stretch: _RowGroupRange, decode: Callable[[bytes | memoryview], T]
    ) -> T | None:
        """Row groups of a cached range. None if the file is missing or damaged; then it is evicted."""
        raw = await self.parts.read(cached, stretch.part)
        if raw is not None:
            try:
                found = await self._work.on_thread(decode, raw)
            except CorruptSegmentError as error:
                fields = log_fields(key=stretch.segment.key, error=str(error))
                logger.warning("cached part of a segment is damaged, fetching it again", extra=fields)
            else:
                self.counts.hits += 1
                return found
        await self.parts.evict(cached)
        return None

    def _read_ahead(self, stretch: _RowGroupRange) -> None:
        """A reader that came from the previous row group will probably read the following ones."""
        segment, parts = stretch.segment, self.parts
        footer, first, following = segment.footer, stretch.indices[0], stretch.indices[-1] + 1
        if parts.cache is None or following == footer.count:
            return
        if first > 0 and not parts.is_cached_or_pending(segment.part(first - 1)):
            return
        start = stop = stretch.part.stop
        for index in range(following, footer.count):
            part = segment.part(index)
            if part.stop - start > READ_AHEAD_BYTES or parts.is_cached_or_pending(part):
                break
            stop = part.stop
        if stop > start:
            parts.fetch_ahead(segment.key, ObjectRange(segment.source, start, stop))


class _RowGroupRange(NamedTuple):
    """Adjacent row groups of one segment."""

    segment: _OpenSegment
    indices: list[int]
    groups: list[RowGroup]

    @property
    def part(self) -> ObjectRange:
        return ObjectRange(self.segment.source, self.groups[0].start, self.groups[-1].stop)

    def decode(self, raw: bytes | memoryview) -> list[SegmentRows]:
        from tailrace.storage.segments.reader import read_row_groups

        return read_row_groups(self.segment.footer, self.indices, raw)

    def payloads(self, entries: Sequence[int], raw: bytes | memoryview) -> dict[int, bytes]:
        """Of its first row group."""
        from tailrace.storage.segments.reader import read_payloads

        return read_payloads(self.segment.footer, self.indices[0], raw, entries)


def _footer_from_end(end: bytes, size: int) -> bytes | int:
    """The footer from the end of a file in its stored form, or the position from which to read more."""
    from tailrace.storage.segments import reader

    tail = reader.find_tail(end, size)
    return reader.pack_tail(tail) if isinstance(tail, bytes) else tail


def _parse_footer(stored: bytes, info: SegmentInfo) -> Footer:
    from tailrace.storage.segments.reader import Footer

    footer = Footer(stored)
    if (footer.first, footer.last, footer.size) != (info.first, info.last, info.bytes):
        raise CorruptSegmentError(f"its footer is of {footer.size} bytes and {footer.first} to {footer.last}")
    return footer
