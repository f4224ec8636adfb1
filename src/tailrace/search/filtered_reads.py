"""Reads with `filter=`: entries are narrowed by index files, then decoded and matched in bounded steps.

`filter=`: a query on one registry's fields, and the sieve that entries of a stream go through.

Filtered reads through built indexes: which entries of a stream may match at all.

Reads with `filter=`: entries are scanned through a sieve, off the loop, in bounded steps.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from tailrace.common.errors import TailraceError
from tailrace.log.history import MissingBlock
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.http_headers import header_line
from tailrace.routing.context import Context
from tailrace.schema.lenses import LensFailureError
from tailrace.schema.registry import Promoter, Registry
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.file_cache import UnusableFileError
from tailrace.search.index_files.spans import FileSelection, IndexSpan
from tailrace.search.language import FILTER_DIALECT, BoundQuery, add_context_fields, bind_query
from tailrace.search.matching import Matcher
from tailrace.search.records import RecordView

Payload = bytes | memoryview


class RecordFilter:
    """A filter as one registry understands it. Entries count from 1, sequence numbers from 0."""

    def __init__(self, text: str, registry: Registry | None) -> None:
        view: RecordView | None = None
        if registry is not None and registry.search is not None:
            view = add_context_fields(RecordView(registry), text, FILTER_DIALECT)
        query = bind_query(text, None if view is None else view.config, FILTER_DIALECT)
        assert registry is not None
        assert view is not None
        self.text = text
        self.registry = registry
        self.query = query
        self.view = self._view = view
        self._promoter = Promoter(registry)
        self._first_current = self._view.first_current()
        self._matcher = Matcher(query, view.config, registry.version)
        # What matches depends on the registry as well: it goes into the tag of the answer.
        self.mark = xxhash.xxh3_64_hexdigest(registry.to_json())

    def matches(self, entry: int, payload: Payload) -> bool:
        if entry >= self._first_current or self._view.is_current(entry):
            return self._matcher.matches(payload)
        return self._matcher.matches_record(self._view.record(entry, payload))

    def shown(self, entry: int, payload: Payload) -> bytes:
        """The entry as readers get it. One that cannot be promoted has no values, and stays as it is."""
        if entry < self._first_current:
            try:
                payload = self._promoter.promote_payload(payload, entry - 1)
            except LensFailureError:
                pass
        # A copy: a view would keep the whole block it was cut from in memory.
        return bytes(payload)


class FilterScan:
    """What one answer has of a stream so far: the matching entries, and how far everything is decided."""

    __slots__ = (
        "_bytes_left",
        "_entries_left",
        "_filter",
        "_full",
        "_scan_bytes_max",
        "count",
        "decided",
        "parts",
        "scanned_bytes",
        "upto",
    )

    def __init__(
        self,
        chosen: RecordFilter,
        after: int,
        upto: int,
        bytes_max: int,
        entries_max: int,
        scan_bytes_max: int,
    ) -> None:
        self._filter = chosen
        self._bytes_left = bytes_max
        self._entries_left = entries_max
        self._scan_bytes_max = scan_bytes_max
        self._full = False
        self.upto = upto  # later entries may belong to a registry that this filter does not know
        self.decided = after
        self.scanned_bytes = 0
        self.parts: list[Payload] = []
        self.count = 0

    @property
    def mark(self) -> str:
        return self._filter.mark

    @property
    def filter(self) -> RecordFilter:
        return self._filter

    @property
    def filter_bytes(self) -> int:
        return len(self._filter.text)

    @property
    def scan_limit_reached(self) -> bool:
        return self.scanned_bytes >= self._scan_bytes_max

    @property
    def done(self) -> bool:
        return self._full or self.decided >= self.upto or self.scan_limit_reached

    def take(self, entries: Sequence[int], payloads: Sequence[Payload], begin: int, work_bytes: int) -> int:
        """Decides entries from an index on, until some bytes of work are done; answers how far it came."""
        for index in range(begin, len(payloads)):
            entry, payload = entries[index], payloads[index]
            if entry > self.upto:
                self.decided = self.upto  # what lies between has another key
                return index
            if self.done or work_bytes <= 0:
                return index
            if self._filter.matches(entry, payload) and not self._add(entry, payload):
                return index
            self.decided = entry
            self.scanned_bytes += len(payload)
            work_bytes -= len(payload)
        return len(payloads)

    def pass_over(self, entry: int) -> None:
        """Everything up to here is known not to match."""
        self.decided = max(self.decided, min(entry, self.upto))

    def _add(self, entry: int, payload: Payload) -> bool:
        """Whether there was room; the first match always fits."""
        shown = self._filter.shown(entry, payload)
        if self.count and len(shown) > self._bytes_left:
            self._full = True
            return False
        self.parts.append(shown)
        self.count += 1
        self._bytes_left -= len(shown)
        self._entries_left -= 1
        self._full = self._bytes_left <= 0 or self._entries_left <= 0
        return True


CANDIDATE_GAP_MAX = 64  # entries between two candidates that are fetched in one go


class CandidateEntries(NamedTuple):
    """The entries of one stretch that may match; all others of it do not."""

    last: int
    entries: list[int]

    def next_run(self, after: int) -> tuple[int, int] | None:
        """The first and last entry to be looked at behind one; None if there is none here any more."""
        at = bisect_left(self.entries, after + 1)
        if at == len(self.entries):
            return None
        first = end = self.entries[at]
        for entry in self.entries[at + 1 :]:
            if entry - end > CANDIDATE_GAP_MAX:
                break
            end = entry
        return first, end


class IndexPrefilter:
    """One read with one filter. It remembers the span it is in."""

    def __init__(
        self, catalogue: IndexCatalogue, stream: Stream, view: RecordView, query: BoundQuery
    ) -> None:
        self._catalogue = catalogue
        self._stream = stream
        self._view = view
        self._query = query
        # Without a primary timestamp: nobody asks a filter how far times reach.
        self._wants = FileSelection(view, query, (), (), with_times=False)
        self._known: tuple[IndexSpan, CandidateEntries | None] | None = None

    async def at(self, entry: int) -> CandidateEntries | None:
        """What may match in the span that an entry lies in; None if nothing is known of it."""
        if self._known is not None and self._known[0].first <= entry <= self._known[0].last:
            return self._known[1]
        spans = await self._catalogue.spans(self._stream, self._view.indexed)
        place = bisect_left(spans, entry, key=lambda span: span.last)
        if place == len(spans) or spans[place].first > entry:
            return None
        span = spans[place]
        self._known = (span, await self._find_candidates(span))
        return self._known[1]

    async def _find_candidates(self, span: IndexSpan) -> CandidateEntries | None:
        if self._wants.rules_out(span):
            return CandidateEntries(span.last, [])
        files = self._wants.files(span, self._stream.earliest)
        if files is None:
            return None
        opened = await self._catalogue.open_all(files)
        if len(opened) < len(files):
            return None

        def find_candidates() -> CandidateEntries:
            from tailrace.search.index_files.span_source import SpanSource  # brings Arrow, which is large

            source = SpanSource(span, self._view.config, opened)
            return CandidateEntries(
                span.last,
                [source.entries[row] for row in rows_from_bits(source.match_rows(self._query).possible)],
            )

        try:
            return await self._catalogue.files.on_thread(find_candidates)
        except UnusableFileError:
            return None


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
        self.catalogue: IndexCatalogue | None = None  # set by whoever knows what is published

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
        if self.catalogue is not None and sieve.decided < stream.sealed:
            narrowing = IndexPrefilter(self.catalogue, stream, sieve.filter.view, sieve.filter.query)
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
