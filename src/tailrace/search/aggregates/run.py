"""Runs one aggregate: takes a snapshot, and sums rollup files, columns and decoded records.

The event loop reads, threads compute.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import orjson

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.schema.timestamps import from_unix_ms
from tailrace.search.aggregates.groups import (
    AggregateScanner,
    ColumnAggregator,
    ColumnScanner,
    Groups,
    aggregate_timeout,
    columns_and_blocks_suffice,
    columns_suffice,
)
from tailrace.search.aggregates.rollup_ranges import (
    RollupRange,
    TimeWindow,
    add_rollup_states,
    files_for_rows,
    may_overlap,
    partial_windows_in,
    required_columns,
    rollup_selection,
    select_rollup_ranges,
    span_chunks,
)
from tailrace.search.chunks import Chunk
from tailrace.search.collector import Coverage, SearchResult
from tailrace.search.index_files.file_cache import OpenedFile, UnusableFileError
from tailrace.search.index_files.format import AGG, COL, MBLK
from tailrace.search.index_files.spans import IndexSpan
from tailrace.search.planner import ScanRange, plan_pieces, split_scan_ranges
from tailrace.search.records import RecordView
from tailrace.search.requests import AggregateRequest
from tailrace.search.response import build_coverage
from tailrace.search.run import RangeReader, Searcher

if TYPE_CHECKING:
    from tailrace.search.aggregates.array_states import ArrayStates
    from tailrace.search.index_files.rollup_files import MetricBlocks

COVERAGE_FIELDS = (
    "mode",
    "complete",
    "stream_head_offset",
    "visible_through_offset",
    "visible_through_primary_timestamp_max",
    "oldest_omitted_append_at",
    "possible_missing_uploaded_segments",
    "possible_missing_sealed_rows",
    "possible_missing_wal_rows",
    "possible_missing_events_upper_bound",
    "indexed_segments",
    "indexed_segment_time_ms",
    "scanned_segments",
    "scanned_segment_time_ms",
    "scanned_tail_docs",
    "scanned_tail_time_ms",
    "index_families_used",
)

FILES_OPENED_AT_ONCE = 16  # rollup files or spans that one aggregate holds open
RANGES_CACHED_MAX = 8192  # scan ranges, about 200 bytes each


class ScannedTimes(NamedTuple):
    """Timestamp bounds of a scan range that was scanned before, under the fields of one view."""

    view: RecordView
    times: tuple[int, int] | None
    primary_max: int | None


class _TimePart(NamedTuple):
    """A part of the requested time, and what sums the rows in it."""

    request: AggregateRequest
    columns: ColumnAggregator
    scanner: AggregateScanner | ColumnScanner

    def reaches(self, times: tuple[int, int] | None) -> bool:
        """Whether rows within these timestamp bounds may count."""
        return times is not None and times[0] < self.request.to_ms and times[1] >= self.request.from_ms


class Aggregator:
    """What the aggregates of one server share; caches the timestamp bounds of scan ranges."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self._known: LruCache[tuple[int, int, str], ScannedTimes] = LruCache(entries_max=RANGES_CACHED_MAX)

    async def aggregate(
        self, stream: Stream, view: RecordView, request: AggregateRequest, deadline: float
    ) -> bytes:
        """The response body. Raises after `deadline`, a time of the monotonic clock."""
        run = _AggregateRun(self, stream, view, request, deadline)
        await run.add_up()
        return await run.body()

    def find(self, number: int, first: int, field: str, view: RecordView) -> ScannedTimes | None:
        known = self._known.get((number, first, field))
        if known is None or not known.view.same_values(view) or known.view.primary != view.primary:
            return None
        return known

    def learn(self, number: int, first: int, field: str, known: ScannedTimes) -> None:
        self._known.put((number, first, field), known)


class _AggregateRun:
    """One aggregate. It computes on threads, one step at a time, and reads on the event loop."""

    def __init__(
        self,
        aggregator: Aggregator,
        stream: Stream,
        view: RecordView,
        request: AggregateRequest,
        deadline: float,
    ) -> None:
        self._aggregator = aggregator
        self._searcher = aggregator.searcher
        self._stream = stream
        self._view = view
        self._request = request
        self._deadline = deadline
        self._coverage = Coverage(stream.earliest + 1, stream.visible)
        self._groups = Groups(view, request)
        self._part = self._part_of(request)
        self._counters = self._coverage.counters
        self._used_rollups = False
        self._spans: Sequence[IndexSpan] = ()
        self._wanted = required_columns(view, request) if columns_and_blocks_suffice(request) else None
        self._blocks = not columns_suffice(request)  # summaries in records are requested
        self._arrays: ArrayStates | None = None  # states from index files

    def _part_of(self, request: AggregateRequest) -> _TimePart:
        columns = ColumnAggregator(self._view, request, self._groups, self._stream.earliest)
        if columns_suffice(request):
            return _TimePart(request, columns, ColumnScanner(self._view, request, columns))
        return _TimePart(request, columns, AggregateScanner(self._view, request, self._groups))

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise aggregate_timeout()

    async def add_up(self) -> None:
        self._check_deadline()
        built, covered = await self._built_ranges()
        chunks: Sequence[Chunk] = ()
        if columns_suffice(self._request):
            chunks = await self._searcher.tail.chunks(self._stream, self._view, self._coverage.last, covered)
        begin = chunks[0].first if chunks else self._coverage.last + 1
        at = self._coverage.first
        built = [one for one in built if one.last < begin]
        for place in range(0, len(built), FILES_OPENED_AT_ONCE):
            some = built[place : place + FILES_OPENED_AT_ONCE]
            for one in some:
                await self._add_rows(at, one.first - 1, self._part)
                at = one.last + 1
            await self._add_built(some)
        await self._add_rows(at, begin - 1, self._part)
        for piece in plan_pieces(
            begin, self._coverage.last, chunks, self._searcher.scan_rows, newest_first=False
        ):
            self._check_deadline()
            if isinstance(piece, Chunk):
                begun = time.monotonic()
                self._counters.scanned_tail_docs += await self._searcher.on_thread(
                    self._part.columns.add, piece
                )
                self._coverage.add_primary(self._part.columns.primary_max(piece), piece.last)
                self._counters.scanned_tail_s += time.monotonic() - begun
            else:
                assert isinstance(piece, ScanRange)
                await self._scan(piece, self._part)

    # -- index files -------------------------------------------------------------------------------------

    async def _built_ranges(self) -> tuple[list[RollupRange], int | None]:
        """The ranges that rollup files cover, and the last entry up to which index files cover every row."""
        catalogue = self._searcher.catalogue
        if catalogue is None:
            return [], None
        self._spans = await catalogue.spans(self._stream, self._view)
        rollups = await catalogue.rollups(self._stream, self._view)
        after, last = self._stream.earliest, self._coverage.last
        built = select_rollup_ranges(rollups, self._spans, self._request, self._view, after, last)
        return built, catalogue.covered_through(self._stream)

    async def _add_built(self, built: Sequence[RollupRange]) -> None:
        """Add whole windows from rollup files, and single rows of partial windows."""
        self._check_deadline()
        catalogue, request = self._searcher.catalogue, self._request
        assert catalogue is not None
        begun = time.monotonic()
        opened = await catalogue.open_all({one.served.published.key: one.served for one in built})
        added = await self._searcher.on_thread(
            self._add_files, [opened.get(one.served.published.key) for one in built]
        )
        self._counters.indexed_s += time.monotonic() - begun
        for one, found in zip(built, added, strict=True):
            if found is None:
                await self._add_rows(one.first, one.last, self._part)
                continue
            states, left = found
            self._used_rollups = self._used_rollups or bool(states)
            self._coverage.add_indexed(one.first, one.last, (AGG,))
            self._coverage.add_primary(one.primary_max, one.last)
            for window in left:
                part = self._part_of(request._replace(from_ms=window.from_ms, to_ms=window.to_ms))
                await self._add_rows(one.first, one.last, part)

    def _add_files(self, files: Sequence[OpenedFile | None]) -> list[tuple[int, list[TimeWindow]] | None]:
        """Runs on a thread. None for each unusable file, of which nothing was added."""
        found: list[tuple[int, list[TimeWindow]] | None] = []
        for file in files:
            try:
                found.append(self._add_states(file))
            except UnusableFileError:
                found.append(None)
        return found

    def _add_states(self, file: OpenedFile | None) -> tuple[int, list[TimeWindow]]:
        """Add a file. Returns the number of states, and the partial windows left."""
        from tailrace.search.index_files.rollup_files import RollupFile

        request = self._request
        if not isinstance(file, RollupFile):
            raise UnusableFileError("agg file could not be opened")
        left = partial_windows_in(file, request)
        if self._blocks:
            return add_rollup_states(file, request, self._groups, self._deadline), left
        return self._array_states().add_file(file, rollup_selection(request)), left

    def _array_states(self) -> ArrayStates:
        from tailrace.search.aggregates.array_states import ArrayStates  # imports Arrow, which is large

        if self._arrays is None:
            self._arrays = ArrayStates(self._view, self._request, self._deadline)
        return self._arrays

    async def _add_rows(self, first: int, last: int, part: _TimePart) -> None:
        """Add single rows: from the columns of spans, else from decoded records."""
        at = first
        begin = bisect_left(self._spans, first, key=lambda span: span.first)
        end = bisect_right(self._spans, last, key=lambda span: span.last)
        for place in range(begin, end, FILES_OPENED_AT_ONCE):
            some = self._spans[place : min(place + FILES_OPENED_AT_ONCE, end)]
            for span, is_added in zip(some, await self._add_spans(some, part), strict=True):
                if is_added:
                    await self._scan_rows_of(at, span.first - 1, part)
                    at = span.last + 1
        await self._scan_rows_of(at, last, part)

    async def _scan_rows_of(self, first: int, last: int, part: _TimePart) -> None:
        for scan_range in split_scan_ranges(first, last, self._searcher.scan_rows):
            self._check_deadline()
            await self._scan(scan_range, part)

    async def _add_spans(self, spans: Sequence[IndexSpan], part: _TimePart) -> list[bool]:
        """Add spans. Returns for each whether its columns were used."""
        catalogue, wanted = self._searcher.catalogue, self._wanted
        added = dict.fromkeys((span.first for span in spans), False)
        opened: list[tuple[IndexSpan, Mapping[str, OpenedFile]]] = []
        for span in spans:
            files = None if wanted is None else files_for_rows(span, wanted, blocks=self._blocks)
            if files is None or catalogue is None or span.first <= self._stream.earliest:
                continue
            if not may_overlap(span, self._view, part.request):
                self._see_span(span, None if span.primary is None else span.primary[1])
                added[span.first] = True
            elif len(found := await catalogue.open_all(files)) == len(files):
                opened.append((span, found))
        begun = time.monotonic()
        if opened:
            for span, primary in await self._searcher.on_thread(self._add_opened, opened, part):
                self._see_span(span, primary)
                added[span.first] = True
        self._counters.indexed_s += time.monotonic() - begun
        return list(added.values())

    def _see_span(self, span: IndexSpan, primary: int | None) -> None:
        """Count a span that was added, or has nothing to add."""
        self._coverage.add_primary(primary, span.last)
        self._coverage.add_indexed(span.first, span.last, (COL, MBLK) if self._blocks else (COL,))

    def _add_opened(
        self, opened: Sequence[tuple[IndexSpan, Mapping[str, OpenedFile]]], part: _TimePart
    ) -> list[tuple[IndexSpan, int | None]]:
        """Runs on a thread. Returns the spans that were added, with their largest primary timestamps."""
        assert self._wanted is not None
        found: list[tuple[IndexSpan, int | None]] = []
        for span, files in opened:
            self._check_deadline()
            try:
                found.append((span, self._add_columns(span, files, self._wanted, part)))
            except UnusableFileError:
                continue
        return found

    def _add_columns(
        self, span: IndexSpan, opened: Mapping[str, OpenedFile], wanted: Sequence[str], part: _TimePart
    ) -> int | None:
        """Add a span without trimmed rows. Returns its largest primary timestamp."""
        from tailrace.search.index_files.span_source import SpanSource  # imports Arrow, which is large

        view = self._view
        source = SpanSource(span, view.config, opened)
        if not all(source.has_column(name) for name in wanted):
            raise UnusableFileError("col file lacks a required column")
        bounds = None if view.primary is None else source.bounds(view.primary)
        if self._blocks:
            chunks = span_chunks(source, view, part.request, wanted)
            self._add_with_blocks(chunks, _blocks_of(span, opened), part.request)
        else:
            self._array_states().add_span(source, part.request)
        return None if bounds is None else cast("int", bounds[1])

    def _add_with_blocks(
        self, chunks: Iterable[Chunk], blocks: MetricBlocks, request: AggregateRequest
    ) -> None:
        """Add all of a span or nothing: its blocks may be damaged."""
        groups = self._groups.empty_copy()
        columns = ColumnAggregator(self._view, request, groups, self._stream.earliest)
        for chunk in chunks:
            self._check_deadline()
            columns.add(chunk, blocks.parts)
        self._groups.merge_all(groups)

    # -- scans -------------------------------------------------------------------------------------------

    async def _scan(self, scan_range: ScanRange, part: _TimePart) -> None:
        if not self._searcher.scanning_enabled:
            self._coverage.undecided.append(scan_range)
            return
        number, field = self._stream.number, self._request.timestamp_field
        known = self._aggregator.find(number, scan_range.first, field, self._view)
        whole = scan_range.is_whole(self._searcher.scan_rows)
        if whole and known is not None and not part.reaches(known.times):
            self._coverage.add_primary(known.primary_max, scan_range.last)
            return
        scanned = await self._scan_rows(scan_range, part)
        if whole and scanned is not None:
            self._aggregator.learn(number, scan_range.first, field, scanned)

    async def _scan_rows(self, scan_range: ScanRange, part: _TimePart) -> ScannedTimes | None:
        """Scan a range. Returns its timestamp bounds; None if not every row was read."""
        coverage, begun = self._coverage, time.monotonic()
        times: list[int] = []
        primaries: list[int] = []
        count = 0
        coverage.scanned.append(scan_range)
        pages = RangeReader(self._searcher.reader, self._stream, scan_range.first, scan_range.last)
        while True:
            try:
                page = await pages.next_page(self._deadline)
            except TimeoutError:
                raise aggregate_timeout() from None
            except TailraceError:
                coverage.undecided.append(ScanRange(pages.after + 1, scan_range.last))
                break
            if page is None:
                break
            found = await self._searcher.on_thread(
                part.scanner.scan, page.entries()[0], page.parts, self._deadline
            )
            if found.decided < len(page.parts):
                raise aggregate_timeout()
            count += found.decided
            coverage.add_primary(found.primary_max, pages.after)
            times += found.times or ()
            primaries += () if found.primary_max is None else (found.primary_max,)
        coverage.add_scan(scan_range, pages.after, self._stream.sealed, time.monotonic() - begun)
        if count < scan_range.last - scan_range.first + 1:
            return None
        span = (min(times), max(times)) if times else None
        return ScannedTimes(self._view, span, max(primaries, default=None))

    # -- response ----------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        coverage = await self._coverage_body()
        return await self._searcher.on_thread(self._body, coverage)

    def _body(self, coverage: dict[str, object]) -> bytes:
        request = self._request
        head = {
            "stream": self._stream.name,
            "rollup": request.rollup_name,
            "from": from_unix_ms(request.from_ms),
            "to": from_unix_ms(request.to_ms),
            "interval": request.interval,
            "coverage": coverage,
        }
        body = b"".join([orjson.dumps(head)[:-1], b',"buckets":', *self._buckets(), b"}"])
        self._groups.groups.clear()  # on this thread: freeing many of them would block the loop
        return body

    def _buckets(self) -> list[bytes | memoryview]:
        """The JSON array of buckets, in pieces."""
        if self._arrays is not None:
            return self._arrays.to_json(self._groups)
        buckets = [
            {
                "start": from_unix_ms(start_ms),
                "end": from_unix_ms(start_ms + self._request.interval_ms),
                "groups": groups,
            }
            for start_ms, groups in self._groups.to_json(self._deadline)
        ]
        return [orjson.dumps(buckets)]

    async def _coverage_body(self) -> dict[str, object]:
        found = self._coverage
        omitted, oldest_ns = await self._searcher.omitted_rows(self._stream, found)
        result = SearchResult(
            hits=[],
            matches=0,
            exact=not found.undecided,
            timed_out=False,
            first=found.first,
            last=found.last,
            through=found.through,
            primary_max=found.primary_max,
            omitted=omitted,
            oldest_omitted_ns=oldest_ns,
            counters=found.counters,
        )
        coverage = build_coverage(result, self._stream)
        return {**{name: coverage[name] for name in COVERAGE_FIELDS}, "used_rollups": self._used_rollups}


def _blocks_of(span: IndexSpan, opened: Mapping[str, OpenedFile]) -> MetricBlocks:
    from tailrace.search.index_files.rollup_files import MetricBlockFile

    served = span.serving(MBLK, MBLK)
    file = None if served is None else opened.get(served.published.key)
    if not isinstance(file, MetricBlockFile):
        raise UnusableFileError("mblk file could not be opened")
    return file.blocks()
