"""Reads with `filter=`: entries are narrowed by index files, then decoded and matched in bounded steps.

Small pages are matched on the event loop, larger ones on threads. A read ends when its page is full, when
everything is decided, or at a limit of time or scanned bytes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from tailrace.common.caches import LruCache
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
from tailrace.search.matching import Matcher
from tailrace.search.query_language import FILTER_DIALECT, BoundQuery, add_context_fields, bind_query
from tailrace.search.records import RecordView

Payload = bytes | memoryview


class RecordFilter:
    """A filter bound to one registry. Entries count from 1, sequence numbers from 0."""

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
        # Part of the ETag: which entries match depends on the registry as well.
        self.mark = xxhash.xxh3_64_hexdigest(registry.to_json())

    def matches(self, entry: int, payload: Payload) -> bool:
        if entry >= self._first_current or self._view.is_current(entry):
            return self._matcher.matches(payload)
        return self._matcher.matches_record(self._view.record(entry, payload))

    def promoted(self, entry: int, payload: Payload) -> bytes:
        """The entry at the current schema version; unchanged if it cannot be promoted."""
        if entry < self._first_current:
            try:
                payload = self._promoter.promote_payload(payload, entry - 1)
            except LensFailureError:
                pass
        # A copy: a view would hold the whole block in memory.
        return bytes(payload)


class FilterScan:
    """The state of one filtered read: matching entries so far, and the last entry that is decided."""

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
        self.upto = upto  # later entries may belong to a newer registry
        self.decided = after
        self.scanned_bytes = 0
        self.parts: list[Payload] = []
        self.count = 0

    @property
    def etag_part(self) -> str:
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

    def consume(
        self, entries: Sequence[int], payloads: Sequence[Payload], begin: int, work_bytes: int
    ) -> int:
        """Match entries from index `begin` on, up to `work_bytes`. Returns the index after the last."""
        for index in range(begin, len(payloads)):
            entry, payload = entries[index], payloads[index]
            if entry > self.upto:
                self.decided = self.upto  # entries between have another routing key
                return index
            if self.done or work_bytes <= 0:
                return index
            if self._filter.matches(entry, payload) and not self._add(entry, payload):
                return index
            self.decided = entry
            self.scanned_bytes += len(payload)
            work_bytes -= len(payload)
        return len(payloads)

    def skip_to(self, entry: int) -> None:
        """Mark all entries up to `entry` as decided: none of them matches."""
        self.decided = max(self.decided, min(entry, self.upto))

    def _add(self, entry: int, payload: Payload) -> bool:
        """Add a match if there is room; the first one always fits."""
        promoted = self._filter.promoted(entry, payload)
        if self.count and len(promoted) > self._bytes_left:
            self._full = True
            return False
        self.parts.append(promoted)
        self.count += 1
        self._bytes_left -= len(promoted)
        self._entries_left -= 1
        self._full = self._bytes_left <= 0 or self._entries_left <= 0
        return True


CANDIDATE_GAP_MAX = 64  # entries between two candidates that are read together


class CandidateEntries(NamedTuple):
    """The entries of one span that may match; none of its others does."""

    last: int
    entries: list[int]

    def next_run(self, after: int) -> tuple[int, int] | None:
        """The next entries to read behind `after`, first and last; None if there are no more here."""
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
    """Finds the entries that may match a filter by index files, for one read; caches the current span."""

    def __init__(
        self, catalogue: IndexCatalogue, stream: Stream, view: RecordView, query: BoundQuery
    ) -> None:
        self._catalogue = catalogue
        self._stream = stream
        self._view = view
        self._query = query
        # Filters do not report timestamp bounds.
        self._selection = FileSelection(view, query, (), (), with_times=False)
        self._known: tuple[IndexSpan, CandidateEntries | None] | None = None

    async def at(self, entry: int) -> CandidateEntries | None:
        """The candidates in the span of an entry; None if it has no usable index files."""
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
        if self._selection.rules_out(span):
            return CandidateEntries(span.last, [])
        files = self._selection.files(span, self._stream.earliest)
        if files is None:
            return None
        opened = await self._catalogue.open_all(files)
        if len(opened) < len(files):
            return None

        def find_candidates() -> CandidateEntries:
            from tailrace.search.index_files.span_source import SpanSource  # imports Arrow, which is large

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
CONCURRENT_SCANS_MAX = 8  # each holds a page or two in memory
FILTER_CACHE_BYTES = 256 * 1024  # filter texts plus FILTER_BASE_BYTES each; compiled filters grow alike
FILTER_BASE_BYTES = 1024
SHORT_FILTER_BYTES = 1024  # a longer filter is never evaluated on the event loop
INLINE_BYTES = 32 * 1024  # matched on the event loop: cheaper than a thread
SCAN_STEP_BYTES = 256 * 1024  # matched on a thread in one step, before other scans run
# Share of the request time-out after which a read returns what is decided so far.
SCAN_TIME_SHARE = 0.6


class FilteredReads:
    """Compiled filters by stream and text, and the scans that use them."""

    def __init__(
        self,
        context: Context,
        registry_of: Callable[[Stream], Registry | None],
        catalogue: IndexCatalogue | None = None,
    ) -> None:
        """Without a `catalogue` every entry is read."""
        self._loop = context.loop
        self._reader = context.log.reader
        self._limits = context.limits
        self._registry_of = registry_of
        self._threads = ThreadPoolExecutor(FILTER_THREADS, "filter")
        self._slots = asyncio.Semaphore(CONCURRENT_SCANS_MAX)
        self._cached: LruCache[tuple[int, str], RecordFilter] = LruCache(
            size_max=FILTER_CACHE_BYTES, size_of=lambda key, _: len(key[1]) + FILTER_BASE_BYTES
        )
        self._catalogue = catalogue

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, stream: Stream, text: str, mode: str) -> None:
        """Reject an invalid filter, independent of the data in the stream."""
        if not stream.json:
            raise TailraceError("invalid_filter", "filter is only supported on application/json streams")
        if mode in ("sse", "ws"):
            raise TailraceError("invalid_filter", f"filter does not support live={mode}")
        self.filter_of(stream, text)

    def filter_of(self, stream: Stream, text: str) -> RecordFilter:
        """The filter bound to the stream's current registry."""
        registry = self._registry_of(stream)
        key = (stream.number, text)
        found = self._cached.get(key)
        if found is None or found.registry is not registry:
            found = RecordFilter(text, registry)
            self._cached.put(key, found)
        return found

    def begin(self, stream: Stream, text: str, start: int, scanned_bytes: int) -> FilterScan:
        """Start a filtered read. `scanned_bytes` of its limit have been used already."""
        limits = self._limits
        return FilterScan(
            self.filter_of(stream, text),
            start,
            stream.visible,
            limits.read_page_bytes,
            limits.read_page_entries,
            limits.filter_scan_bytes - scanned_bytes,
        )

    def try_scan(self, stream: Stream, scan: FilterScan, key: bytes | None) -> bool:
        """Match a small page on the event loop. Returns whether the read is finished."""
        if scan.done:
            return True
        if scan.filter_bytes > SHORT_FILTER_BYTES:
            return False
        page = self._reader.try_read(
            stream, scan.decided, INLINE_BYTES, self._limits.read_page_entries, key, apart=True
        )
        if isinstance(page, MissingBlock) or sum(map(len, page.parts)) > 2 * INLINE_BYTES:
            return False
        self._finish_page(scan, page, scan.consume(page.entries(), page.parts, 0, 2 * INLINE_BYTES))
        return scan.done

    async def scan(self, stream: Stream, scan: FilterScan, key: bytes | None, until: float) -> None:
        """Scan until the page is full, everything is decided, or the time `until` of the event loop."""
        limits = self._limits
        prefilter = None
        if self._catalogue is not None and scan.decided < stream.sealed:
            prefilter = IndexPrefilter(self._catalogue, stream, scan.filter.view, scan.filter.query)
        async with self._slots:
            while not scan.done:
                entries_max = limits.read_page_entries
                if prefilter is not None and scan.decided < stream.sealed:
                    entries_max = await self._skip_by_index(prefilter, scan, key, entries_max)
                    if not entries_max or scan.done:
                        if self._loop.time() >= until:
                            break
                        continue
                page = await self._reader.read(
                    stream, scan.decided, limits.read_page_bytes, entries_max, key, apart=True
                )
                entries, index = page.entries(), 0
                while index < page.count and not scan.done:
                    index = await self._loop.run_in_executor(
                        self._threads, scan.consume, entries, page.parts, index, SCAN_STEP_BYTES
                    )
                self._finish_page(scan, page, index)
                if self._loop.time() >= until:
                    break

    async def _skip_by_index(
        self, prefilter: IndexPrefilter, scan: FilterScan, key: bytes | None, entries_max: int
    ) -> int:
        """Skip entries that an index excludes. Returns how many entries to read next, 0 for none here."""
        known = await prefilter.at(scan.decided + 1)
        if known is None:
            return entries_max
        run = known.next_run(scan.decided)
        if run is None:
            scan.skip_to(known.last)
            return 0
        scan.skip_to(run[0] - 1)
        return entries_max if key is not None else min(entries_max, run[1] - run[0] + 1)

    def _finish_page(self, scan: FilterScan, page: Page, index: int) -> None:
        if index == page.count:
            scan.skip_to(page.next_entry)

    def scan_deadline(self, started: float) -> float:
        """When the scan of a request that started at `started` must end."""
        return started + self._limits.request_ms * SCAN_TIME_SHARE / 1000

    def limit_lines(self, scan: FilterScan, scanned_before: int) -> bytes:
        """The headers of a read that reached the limit of scanned bytes."""
        if not scan.scan_limit_reached:
            return b""
        return (
            header_line("Stream-Filter-Scan-Limit-Reached", "true")
            + header_line("Stream-Filter-Scan-Limit-Bytes", str(self._limits.filter_scan_bytes))
            + header_line("Stream-Filter-Scanned-Bytes", str(scanned_before + scan.scanned_bytes))
        )
