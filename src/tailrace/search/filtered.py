"""Reads with `filter=`: entries are scanned through a sieve, off the loop, in bounded steps."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tailrace.api.context import Context
from tailrace.common.errors import TailraceError
from tailrace.log.history import MissingBlock
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.http_headers import header_line
from tailrace.schema.registry import Registry
from tailrace.search.filtering import FilterScan, RecordFilter
from tailrace.search.index_files.library import IndexCatalogue
from tailrace.search.narrowing import IndexPrefilter

FILTER_THREADS = 2
CONCURRENT_SCANS_MAX = 8  # at once; each holds a page or two
FILTER_CACHE_BYTES = 256 * 1024  # of their texts, each with something on top: what is compiled grows alike
FILTER_BASE_BYTES = 1024
SHORT_FILTER_BYTES = 1024  # a longer one is never evaluated on the loop
INLINE_BYTES = 32 * 1024  # decided on the loop: less than handing them to a thread would cost
SCAN_STEP_BYTES = 256 * 1024  # decided on a thread before others have their turn
# Part of the time for a request after which an answer is given with what is decided so far.
SCAN_TIME_SHARE = 0.6


class FilteredReads:
    """Filters by stream and text, and the scans that use them."""

    def __init__(self, context: Context, registry_of: Callable[[Stream], Registry | None]) -> None:
        self._loop = context.loop
        self._reader = context.log.reader
        self._limits = context.limits
        self._registry_of = registry_of
        self._threads = ThreadPoolExecutor(FILTER_THREADS, "filter")
        self._turns = asyncio.Semaphore(CONCURRENT_SCANS_MAX)
        self._kept: OrderedDict[tuple[int, str], RecordFilter] = OrderedDict()
        self._kept_bytes = 0
        self.library: IndexCatalogue | None = None  # set by whoever knows what is published

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, stream: Stream, text: str, mode: str) -> None:
        """Refuses a filter that cannot be, whatever is in the stream."""
        if not stream.json:
            raise TailraceError("invalid_filter", "filter is only supported on application/json streams")
        if mode in ("sse", "ws"):
            raise TailraceError("invalid_filter", f"filter does not support live={mode}")
        self.filter_of(stream, text)

    def filter_of(self, stream: Stream, text: str) -> RecordFilter:
        """The filter as the stream's registry of this moment understands it."""
        registry = self._registry_of(stream)
        key = (stream.number, text)
        found = self._kept.get(key)
        if found is not None and found.registry is registry:
            self._kept.move_to_end(key)
            return found
        if found is not None:
            del self._kept[key]
            self._kept_bytes -= len(text) + FILTER_BASE_BYTES
        made = self._kept[key] = RecordFilter(text, registry)
        self._kept_bytes += len(text) + FILTER_BASE_BYTES
        while self._kept_bytes > FILTER_CACHE_BYTES:
            (_, oldest), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest) + FILTER_BASE_BYTES
        return made

    def begin(self, stream: Stream, text: str, start: int, scanned_bytes: int) -> FilterScan:
        """A sieve for one answer. Of the bytes that may be scanned for it, some may have been already."""
        limits = self._limits
        return FilterScan(
            self.filter_of(stream, text),
            start,
            stream.visible,
            limits.read_page_bytes,
            limits.read_page_entries,
            limits.filter_scan_bytes - scanned_bytes,
        )

    def try_scan(self, stream: Stream, sieve: FilterScan, key: bytes | None) -> bool:
        """Scans a little, on the spot. Whether that was all there is to do."""
        if sieve.done:
            return True
        if sieve.filter_bytes > SHORT_FILTER_BYTES:
            return False
        page = self._reader.try_read(
            stream, sieve.decided, INLINE_BYTES, self._limits.read_page_entries, key, apart=True
        )
        if isinstance(page, MissingBlock) or sum(map(len, page.parts)) > 2 * INLINE_BYTES:
            return False
        self._settle(sieve, page, sieve.take(page.entries(), page.parts, 0, 2 * INLINE_BYTES))
        return sieve.done

    async def scan(self, stream: Stream, sieve: FilterScan, key: bytes | None, until: float) -> None:
        """Scans until the answer is full, everything is decided, or the time (of the loop) has come."""
        limits = self._limits
        narrowing = None
        if self.library is not None and sieve.decided < stream.sealed:
            narrowing = IndexPrefilter(self.library, stream, sieve.filter.view, sieve.filter.query)
        async with self._turns:
            while not sieve.done:
                entries_max = limits.read_page_entries
                if narrowing is not None and sieve.decided < stream.sealed:
                    entries_max = await self._narrow(narrowing, sieve, key, entries_max)
                    if not entries_max or sieve.done:
                        if self._loop.time() >= until:
                            break
                        continue
                page = await self._reader.read(
                    stream, sieve.decided, limits.read_page_bytes, entries_max, key, apart=True
                )
                entries, index = page.entries(), 0
                while index < page.count and not sieve.done:
                    index = await self._loop.run_in_executor(
                        self._threads, sieve.take, entries, page.parts, index, SCAN_STEP_BYTES
                    )
                self._settle(sieve, page, index)
                if self._loop.time() >= until:
                    break

    async def _narrow(
        self, narrowing: IndexPrefilter, sieve: FilterScan, key: bytes | None, entries_max: int
    ) -> int:
        """Passes over what an index rules out; answers how many entries to read then, 0 for none here."""
        known = await narrowing.at(sieve.decided + 1)
        if known is None:
            return entries_max
        run = known.next_run(sieve.decided)
        if run is None:
            sieve.pass_over(known.last)
            return 0
        sieve.pass_over(run[0] - 1)
        return entries_max if key is not None else min(entries_max, run[1] - run[0] + 1)

    def _settle(self, sieve: FilterScan, page: Page, index: int) -> None:
        if index == page.count:
            sieve.pass_over(page.next_entry)

    def patience(self, started: float) -> float:
        """When a scan that began with a request has to come to an end."""
        return started + self._limits.request_ms * SCAN_TIME_SHARE / 1000

    def limit_lines(self, sieve: FilterScan, scanned_before: int) -> bytes:
        """The headers that say that the scan ended before the stream did."""
        if not sieve.scan_limit_reached:
            return b""
        return (
            header_line("Stream-Filter-Scan-Limit-Reached", "true")
            + header_line("Stream-Filter-Scan-Limit-Bytes", str(self._limits.filter_scan_bytes))
            + header_line("Stream-Filter-Scanned-Bytes", str(scanned_before + sieve.scanned_bytes))
        )
