"""Runs one search: takes a snapshot, plans which source decides which rows, and watches the deadline.

Sources are chunks of the tail index, spans with index files, and ranges whose records are decoded. Each of
them returns what it decides; `SearchRun` adds that to the `SearchProgress`, which nothing else changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeGuard, TypeVar, TypeVarTuple, Unpack

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.log.history import NotLocalError
from tailrace.log.model import Stream
from tailrace.log.reader import Page, Reader
from tailrace.search.collector import (
    Coverage,
    Hit,
    HitCollector,
    OmittedRows,
    SearchProgress,
    SearchResult,
    largest_value,
)
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.spans import IndexSpan, order_by_time
from tailrace.search.matching import RowMatches, certain_match, match_rows
from tailrace.search.planner import (
    CANDIDATE_SHARE_MAX,
    SCAN_ROWS,
    IndexedRows,
    PlanPiece,
    RangeStatistics,
    RangeStatisticsCache,
    ScanRange,
    group_adjacent,
    order_by_best_value,
    plan_pieces,
    split_scan_ranges,
)
from tailrace.search.query_language import Anywhere, Clause
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import Payload, PieceStatistics, Scanner
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

if TYPE_CHECKING:
    from tailrace.search.index_files.span_source import SpanSource
    from tailrace.search.span_search import OpenedSpans, SpanResult, SpanSearch

READ_BYTES = 1 << 20
SPANS_OPENED_AT_ONCE = 8  # spans for which one search opens files and holds them open
CACHED_SPANS_AT_ONCE = 64  # spans whose files are open already
SCORING_TIME_SHARE = 0.2  # share of the time reserved for scoring once scans have been counted
STREAMS_CACHED_MAX = 64  # streams whose segment lists are cached
SEGMENTS_CACHED_MAX = 2000

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class RangeReader:
    """Reads the entries of a range in pages, without those that retention removes meanwhile."""

    def __init__(self, reader: Reader, stream: Stream, first: int, last: int) -> None:
        self._reader = reader
        self._stream = stream
        self._last = last
        self.after = first - 1  # all entries up to this one were read, or are removed

    async def next_page(self, deadline: float) -> Page | None:
        """The next entries; None at the end. Raises TimeoutError at the deadline."""
        while self.after < self._last:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    page = await self._reader.read(
                        self._stream, self.after, READ_BYTES, self._last - self.after, apart=True
                    )
            except TailraceError as error:
                if error.code != "offset_gone" or self._stream.earliest <= self.after:
                    raise
                self.after = min(self._stream.earliest, self._last)
                continue
            self.after = page.next_entry
            return page
        return None


class Searcher:
    """Everything the searches of one server share: tail index, index catalogue, threads and caches."""

    def __init__(
        self,
        reader: Reader,
        tail: TailIndex,
        threads: Executor,
        segments_of: Callable[[int], list[SegmentInfo]],
        total_exact_max: int,
        catalogue: IndexCatalogue | None = None,
    ) -> None:
        """Without a `catalogue` there are no index files."""
        self.reader = reader
        self.tail = tail
        self.threads = threads
        self.segments_of = segments_of  # by stream number; runs on a thread
        self.total_exact_max = total_exact_max
        self.catalogue = catalogue
        self.range_statistics = RangeStatisticsCache()
        self.scan_rows = SCAN_ROWS
        self.scanning_enabled = True  # if not, rows without an index are omitted
        self._segments: LruCache[int, tuple[object, Sequence[SegmentInfo]]] = LruCache(
            entries_max=STREAMS_CACHED_MAX
        )

    async def segments(self, stream: Stream) -> Sequence[SegmentInfo]:
        """The segments of a stream, cached until they change."""
        version = (stream.sealed, stream.earliest, stream.cold)
        cached = self._segments.get(stream.number)
        if cached is not None and cached[0] == version:
            return cached[1]
        found = await self.on_thread(self.segments_of, stream.number)
        # The stream's state may count a segment that the hot store does not have yet.
        whole = bool(found) and found[-1].last == stream.sealed and len(found) == stream.cold.segments
        if (
            whole
            and version == (stream.sealed, stream.earliest, stream.cold)
            and len(found) <= SEGMENTS_CACHED_MAX
        ):
            self._segments.put(stream.number, (version, found))
        return found

    async def index_new_rows(self, stream: Stream, view: RecordView) -> None:
        """Add appended rows to the tail index, except those that index files cover."""
        covered = 0
        if self.catalogue is not None and await self.catalogue.spans(stream, view):
            covered = self.catalogue.covered_through(stream)
        self.tail.index_new_rows(stream, view, covered)

    async def search(
        self, stream: Stream, view: RecordView, request: SearchRequest, deadline: float
    ) -> SearchResult:
        """Run a search until `deadline`, a time of the monotonic clock."""
        return await SearchRun(self, stream, view, request, deadline).run()

    # -- used by searches and aggregates -----------------------------------------------------------------

    async def on_thread(self, work: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)

    async def omitted_rows(self, stream: Stream, coverage: Coverage) -> tuple[OmittedRows, int | None]:
        """The rows that were not decided, and when the oldest of them was appended, if that is known."""
        segments: Sequence[SegmentInfo] = ()
        if stream.sealed and (coverage.scanned or coverage.undecided or coverage.indexed):
            segments = await self.segments(stream)
        omitted = coverage.omitted(stream.sealed, [(info.first, info.last) for info in segments])
        if omitted.oldest is None:
            return omitted, None
        for info in segments:
            if info.first <= omitted.oldest <= info.last:
                return omitted, info.first_ns  # of the segment: reading the entry's own needs a fetch
        try:
            return omitted, self.reader.time_of(stream, omitted.oldest)
        except (NotLocalError, TailraceError):
            return omitted, None


class SearchRun:
    """One search: plans pieces of the stream, decides one after the other, and adds each to its progress.

    It reads on the event loop and computes on threads, in one step at a time.
    """

    def __init__(
        self, searcher: Searcher, stream: Stream, view: RecordView, request: SearchRequest, deadline: float
    ) -> None:
        self._searcher = searcher
        self._stream = stream
        self._view = view
        self._request = request
        self._deadline = deadline
        self._scan_until = deadline
        self._trimmed = stream.earliest
        self._scanner = Scanner(view, request)
        statistics = self._scanner.new_statistics()
        self._progress = SearchProgress(stream.earliest + 1, stream.visible, statistics)
        self._hits = HitCollector(view, request, self._scanner, statistics, searcher.total_exact_max)
        self._spans: SpanSearch | None = None

    @property
    def _past_deadline(self) -> bool:
        return time.monotonic() >= self._deadline

    async def run(self) -> SearchResult:
        with self._searcher.tail.search():
            pieces = await self._plan()
            if self._hits.scores_text and self._request.by_score:
                await self._decide_by_score(pieces)
            else:
                await self._decide_in_order(pieces)
        return await self._result()

    # -- the plan ----------------------------------------------------------------------------------------

    async def _plan(self) -> list[PlanPiece]:
        """The pieces of the snapshot: chunks of the tail index, spans with index files, ranges to scan."""
        first, last = self._progress.first, self._progress.last
        chunks: Sequence[IndexedRows] = ()
        spans: Sequence[IndexSpan] = ()
        if self._past_deadline:
            self._progress.timed_out = True  # the request waited in the queue until its deadline
        else:
            built, covered = await self._indexed_spans()
            chunks = await self._searcher.tail.chunks(self._stream, self._view.indexed, last, covered)
            spans = self._usable_spans(built, chunks)
        key = self._request.sort[0]
        ascending = key.kind == "offset" and not key.descending
        sources = [*spans, *chunks]
        return plan_pieces(first, last, sources, self._searcher.scan_rows, newest_first=not ascending)

    async def _indexed_spans(self) -> tuple[Sequence[IndexSpan], int]:
        """The spans with index files, and the last entry up to which these cover every row."""
        catalogue = self._searcher.catalogue
        spans = () if catalogue is None else await catalogue.spans(self._stream, self._view.indexed)
        if catalogue is None or not spans:
            return (), 0
        from tailrace.search.span_search import SpanSearch  # imports Arrow, which is large

        self._spans = SpanSearch(catalogue, self._view, self._request, self._trimmed)
        return spans, catalogue.covered_through(self._stream)

    def _usable_spans(self, spans: Sequence[IndexSpan], chunks: Sequence[IndexedRows]) -> list[IndexSpan]:
        """The spans that help this search, lie in the snapshot and end before the first chunk."""
        end = chunks[0].first if chunks else self._progress.last + 1
        visible = (span for span in spans if self._stream.earliest < span.last < end)
        return [] if self._spans is None else self._spans.usable(visible)

    # -- in the order of the sort keys -------------------------------------------------------------------

    async def _decide_in_order(self, pieces: list[PlanPiece]) -> None:
        if not self._past_deadline:
            self._add_statistics_of([piece for piece in pieces if is_indexed(piece)])
        waiting = self._best_first(pieces)[::-1]
        while waiting:
            if self._past_deadline:
                break
            piece = waiting[-1]
            if self._hits.has_enough and not is_indexed(piece):
                self._progress.stopped_early = True  # chunks in memory are still counted, which is cheap
                waiting.pop()
                continue
            if isinstance(piece, IndexSpan):
                waiting += (await self._decide_spans(self._next_spans(waiting), counts=True))[::-1]
            elif is_indexed(piece):
                chunks: list[IndexedRows] = []
                while waiting and is_indexed(found := waiting[-1]):
                    chunks.append(found)
                    waiting.pop()
                waiting += await self._decide_chunks(chunks)
            else:
                assert isinstance(piece, ScanRange)
                waiting.pop()
                await self._scan(piece)
        self._progress.leave_undecided(waiting)

    def _best_first(self, pieces: list[PlanPiece]) -> list[PlanPiece]:
        """The pieces in an order in which the page fills early. They are in the order of offsets."""
        key = self._request.sort[0]
        if key.kind in ("offset", "score"):
            return pieces
        spans = [piece for piece in pieces if isinstance(piece, IndexSpan)]
        if key.name == self._view.primary:
            spans = order_by_time(spans)[:: -1 if key.descending else 1]
        chunks = order_by_best_value([piece for piece in pieces if is_indexed(piece)], key)
        return [*chunks, *spans, *(piece for piece in pieces if isinstance(piece, ScanRange))]

    def _next_spans(self, waiting: list[PlanPiece]) -> list[IndexSpan]:
        """Remove from `waiting` the spans to decide in one step: few if their files have to be opened."""
        assert self._spans is not None
        spans: list[IndexSpan] = []
        opening = 0
        while waiting and len(spans) < CACHED_SPANS_AT_ONCE and isinstance(span := waiting[-1], IndexSpan):
            opening += not self._spans.is_cached(span)
            if opening > SPANS_OPENED_AT_ONCE:
                break
            spans.append(span)
            waiting.pop()
        return spans

    # -- by score ----------------------------------------------------------------------------------------

    async def _decide_by_score(self, pieces: list[PlanPiece]) -> None:
        """Count the text statistics of all rows first, then score: a score depends on all of them."""
        now = time.monotonic()
        self._scan_until = now + (self._deadline - now) * (1 - SCORING_TIME_SHARE)
        chunks = [piece for piece in pieces if is_indexed(piece)]
        unread = [piece for piece in pieces if isinstance(piece, ScanRange)]
        # Counted last, scored first: the cache may not hold the files of all spans at once.
        spans, uncounted = await self._count_spans(
            [one for one in pieces[::-1] if isinstance(one, IndexSpan)]
        )
        spans.reverse()
        unread += [scan_range for span in uncounted for scan_range in self._scan_ranges_of(span)]
        if not self._past_deadline:
            await self._searcher.on_thread(self._add_statistics_of, chunks)
        while unread and time.monotonic() < self._scan_until:
            await self._scan(unread.pop(0))
        self._scan_until = self._deadline
        await self._searcher.on_thread(self._hits.settle_statistics, self._progress.statistics)
        left: Sequence[PlanPiece] = chunks if self._past_deadline else await self._decide_chunks(chunks)
        while spans and not self._past_deadline:
            spans = (
                await self._decide_spans(spans[:SPANS_OPENED_AT_ONCE], counts=False)
                + spans[SPANS_OPENED_AT_ONCE:]
            )
        rescans = self._progress.rescans
        while rescans and not self._past_deadline:
            await self._scan(rescans.pop(0), already_counted=True)
        self._progress.leave_undecided([*left, *spans, *unread, *rescans])

    async def _count_spans(self, spans: list[IndexSpan]) -> tuple[list[IndexSpan], list[IndexSpan]]:
        """Add the text statistics of spans. Returns the counted spans, and those that must be scanned."""
        counted: list[IndexSpan] = []
        uncounted: list[IndexSpan] = []
        for begin in range(0, len(spans), SPANS_OPENED_AT_ONCE):
            if self._past_deadline:
                return counted, uncounted + spans[begin:]
            batch = spans[begin : begin + SPANS_OPENED_AT_ONCE]
            found = await self._open(batch)
            failed = await self._searcher.on_thread(self._add_span_statistics, found.opened)
            uncounted += failed
            counted += [span for span in batch if span not in failed]
        return counted, uncounted

    def _add_span_statistics(self, opened: Sequence[tuple[IndexSpan, SpanSource | None]]) -> list[IndexSpan]:
        """Runs on a thread. Returns the spans whose statistics have to be scanned for."""
        assert self._spans is not None
        failed: list[IndexSpan] = []
        begun = time.monotonic()
        for span, source in opened:
            statistics = self._spans.count(span, source)
            if statistics is None:
                failed.append(span)
            else:
                self._progress.add_statistics(statistics, span.last)
        self._progress.counters.fts_clause_estimate_s += time.monotonic() - begun
        return failed

    # -- chunks of the tail index ------------------------------------------------------------------------

    def _add_statistics_of(self, chunks: Sequence[IndexedRows]) -> None:
        """Add the text statistics and the largest timestamps of chunks."""
        begun = time.monotonic()
        progress, primary = self._progress, self._view.primary
        for chunk in chunks:
            chunk.add_statistics(progress.statistics, self._trimmed)
            if primary is not None:
                progress.add_primary(largest_value(chunk, primary, self._trimmed), chunk.last)
        progress.counters.fts_clause_estimate_s += time.monotonic() - begun

    async def _decide_chunks(self, chunks: list[IndexedRows]) -> list[IndexedRows]:
        """Decide chunks in order. Returns those not reached before the deadline, in reverse."""
        if self._view.indexed is not self._view:
            return await self._decide_by_candidates(chunks)
        begun = time.monotonic()
        left = await self._searcher.on_thread(self._add_chunks, chunks)
        self._progress.counters.scanned_tail_s += time.monotonic() - begun
        return left

    def _add_chunks(self, chunks: list[IndexedRows]) -> list[IndexedRows]:
        """Runs on a thread."""
        counters = self._progress.counters
        for index, chunk in enumerate(chunks):
            if self._past_deadline:
                return chunks[index:][::-1]
            rows = chunk.match(self._request.query)
            if chunk.first <= self._trimmed:
                rows &= chunk.rows_after(self._trimmed)
            counters.scanned_tail_docs += rows.bit_count()
            counters.candidates += rows.bit_count()
            self._hits.add(chunk, rows)
        return []

    async def _decide_by_candidates(self, chunks: list[IndexedRows]) -> list[IndexedRows]:
        """As `_decide_chunks`, for a query on fields without an index: decodes the rows that may match."""
        for index, chunk in enumerate(chunks):
            if self._past_deadline:
                return chunks[index:][::-1]
            if self._hits.has_enough:
                self._progress.stopped_early = True
                return []
            candidates = await self._searcher.on_thread(self._candidates, chunk)
            if len(candidates) > len(chunk.entries) * CANDIDATE_SHARE_MAX:
                first = max(chunk.first, self._progress.first)
                for scan_range in split_scan_ranges(first, chunk.last, self._searcher.scan_rows):
                    await self._scan(scan_range, already_counted=True)
            else:
                await self._verify(candidates)
        return []

    def _candidates(self, chunk: IndexedRows) -> list[int]:
        """The entries that may match, judged by the clauses on indexed fields."""
        declared = self._view.indexed.config.fields

        def decide(clause: Clause) -> RowMatches | None:
            assert not isinstance(clause, Anywhere)
            return certain_match(chunk.match(clause)) if clause.field in declared else None

        visible = chunk.rows_after(self._progress.first - 1)
        rows = match_rows(self._request.query, visible, decide).possible & visible
        return [chunk.entries[row] for row in rows_from_bits(rows)]

    # -- index files -------------------------------------------------------------------------------------

    async def _open(self, spans: Sequence[IndexSpan]) -> OpenedSpans:
        assert self._spans is not None
        begun = time.monotonic()
        found = await self._spans.open(spans)
        self._progress.counters.fts_section_get_s += time.monotonic() - begun
        return found

    async def _decide_spans(self, spans: list[IndexSpan], *, counts: bool) -> list[IndexSpan]:
        """Decide some spans. Returns those not reached before the deadline."""
        found = await self._open(spans)
        for span, family in found.excluded:
            self._progress.add_indexed(span.first, span.last, (family,))
            self._progress.add_primary(None if span.primary is None else span.primary[1], span.last)
        if not found.opened:
            await asyncio.sleep(0)  # decided without a thread; there may be many more such steps
            return []
        left, late = await self._searcher.on_thread(self._add_spans, found.opened, counts)
        for result in left:
            if result.candidates is not None:
                await self._verify(result.candidates)
            else:
                for scan_range in self._scan_ranges_of(result.span):
                    await self._scan(scan_range, already_counted=result.statistics is not None)
        return late

    def _add_spans(
        self, opened: Sequence[tuple[IndexSpan, SpanSource | None]], counts: bool
    ) -> tuple[list[SpanResult], list[IndexSpan]]:
        """Runs on a thread. Returns what has to be decoded, and the spans that were not reached.

        Spans are not reached at the deadline, or when the page is full and the total large enough.
        """
        assert self._spans is not None
        progress, begun = self._progress, time.monotonic()
        left: list[SpanResult] = []
        for index, (span, source) in enumerate(opened):
            if self._past_deadline or (counts and self._hits.has_enough):
                return left, [span for span, _ in opened[index:]]
            result = self._spans.decide(span, source, self._hits.may_rank, counts=counts)
            if result.statistics is not None:
                progress.add_statistics(result.statistics, span.last)
            if result.source is not None:
                doubtful = len(result.candidates or ())
                progress.counters.candidates += result.rows.bit_count() + doubtful
                self._hits.add(result.source, result.rows)
                progress.add_indexed(span.first, span.last, result.source.families)
            if result.candidates is None or result.candidates:
                left.append(result)
        progress.counters.indexed_s += time.monotonic() - begun
        return left, []

    def _scan_ranges_of(self, span: IndexSpan) -> list[ScanRange]:
        first, last = max(span.first, self._progress.first), min(span.last, self._progress.last)
        return split_scan_ranges(first, last, self._searcher.scan_rows)

    # -- decoded records ---------------------------------------------------------------------------------

    async def _verify(self, entries: Sequence[int]) -> None:
        """Decode and match the entries that an index could not decide."""
        progress = self._progress
        if not self._searcher.scanning_enabled:
            progress.undecided += [ScanRange(entry, entry) for entry in entries]
            return
        for group in group_adjacent(entries):
            payloads: dict[int, Payload] = {}
            try:
                payloads = await self._payloads(group)
            except TimeoutError:
                progress.timed_out = True
            except TailraceError:
                pass  # they stay undecided
            found = [entry for entry in group if entry in payloads]
            texts = [payloads[entry] for entry in found]
            decided = await self._searcher.on_thread(self._add_scanned, found, texts, None, self._deadline)
            if decided < len(found):
                progress.timed_out = True
            done = set(found[:decided])
            trimmed = self._stream.earliest  # entries removed by retention meanwhile are not undecided
            progress.undecided += [
                ScanRange(entry, entry) for entry in group if entry > trimmed and entry not in done
            ]

    async def _payloads(self, entries: Sequence[int]) -> dict[int, Payload]:
        """The payloads of adjacent entries, without those that retention has removed."""
        wanted, found = set(entries), dict[int, Payload]()
        pages = RangeReader(self._searcher.reader, self._stream, entries[0], entries[-1])
        while (page := await pages.next_page(self._deadline)) is not None:
            for entry, payload in zip(page.entries(), page.parts, strict=True):
                if entry in wanted:
                    found[entry] = payload
                    self._progress.counters.payload_bytes += len(payload)
        return found

    async def _scan(self, scan_range: ScanRange, *, already_counted: bool = False) -> None:
        """Decode and match a range, and count its statistics unless they are known."""
        progress = self._progress
        if not self._searcher.scanning_enabled:
            progress.undecided.append(scan_range)
            return
        repeat = not already_counted and self._hits.must_scan_again
        known = self._cached_statistics(scan_range)
        counts: PieceStatistics | None = None
        if already_counted:
            pass
        elif known is not None:
            progress.add_primary(known.primary_max, scan_range.last)
            known.add_to(progress.statistics)
            if known.rules_out(self._request.query, self._view.primary):
                return
        else:
            counts = PieceStatistics(self._scanner.new_statistics())
        if repeat:
            progress.rescans.append(scan_range)
            if counts is None:
                return
        decided = await self._scan_rows(scan_range, counts)
        if counts is not None:
            progress.add_statistics(counts, decided)
            if decided == scan_range.last:
                self._cache_statistics(scan_range, counts)
        if decided < scan_range.last and not repeat:
            progress.undecided.append(ScanRange(decided + 1, scan_range.last))

    def _cached_statistics(self, scan_range: ScanRange) -> RangeStatistics | None:
        if not scan_range.is_whole(self._searcher.scan_rows):
            return None
        found = self._searcher.range_statistics.find(self._stream.number, scan_range, self._view.indexed)
        if found is None or not found.has_counts(self._scanner.scored_tokens, self._view.primary):
            return None
        return found

    def _cache_statistics(self, scan_range: ScanRange, counts: PieceStatistics) -> None:
        if scan_range.is_whole(self._searcher.scan_rows):
            cache, number, view = self._searcher.range_statistics, self._stream.number, self._view.indexed
            known = cache.find(number, scan_range, view) or RangeStatistics()
            known.learn(counts.statistics, counts.primary_max, counts.primary_min)
            cache.put(number, scan_range, view, known)

    async def _scan_rows(self, scan_range: ScanRange, counts: PieceStatistics | None) -> int:
        """Decode and match a range. Returns the last entry that was decided."""
        progress, begun = self._progress, time.monotonic()
        progress.scanned.append(scan_range)
        pages = RangeReader(self._searcher.reader, self._stream, scan_range.first, scan_range.last)
        left = 0  # entries that were read but not decided
        while not left:
            try:
                page = await pages.next_page(self._scan_until)
            except TimeoutError:
                progress.timed_out = True
                break
            except TailraceError:
                break  # the rest stays undecided
            if page is None:
                break
            decided = await self._searcher.on_thread(
                self._add_scanned, page.entries(), page.parts, counts, self._scan_until
            )
            progress.counters.payload_bytes += sum(map(len, page.parts))
            left = len(page.parts) - decided
        progress.timed_out = progress.timed_out or left > 0
        through = pages.after - left
        progress.add_scan(scan_range, through, self._stream.sealed, time.monotonic() - begun)
        return through

    def _add_scanned(
        self,
        entries: Sequence[int],
        payloads: Sequence[Payload],
        counts: PieceStatistics | None,
        deadline: float,
    ) -> int:
        """Runs on a thread. Returns how many payloads were decided before the deadline."""
        decided, begun = 0, time.monotonic()
        for done, rows in self._scanner.scan(entries, payloads, counts, deadline):
            if rows is not None:
                self._hits.add_scanned(rows)
            decided = done
        self._progress.counters.json_parse_s += time.monotonic() - begun
        return decided

    # -- result ------------------------------------------------------------------------------------------

    async def _result(self) -> SearchResult:
        progress, hits, counters = self._progress, self._hits, self._progress.counters
        omitted, oldest_ns = await self._searcher.omitted_rows(self._stream, progress)
        await self._explain()
        counters.peak_hits = hits.top.peak
        counters.decoded = self._scanner.decoded
        return SearchResult(
            await self._best_hits(),
            hits.matches,
            progress.exact,
            progress.timed_out,
            progress.first,
            progress.last,
            progress.through,
            progress.primary_max,
            omitted,
            oldest_ns,
            counters,
        )

    async def _best_hits(self) -> list[Hit]:
        hits, statistics = self._hits, self._progress.statistics
        if hits.scores_at_end:
            return await self._searcher.on_thread(hits.hits, statistics)
        return hits.hits(statistics)

    async def _explain(self) -> None:
        """Read the records of hits from index files, whose scores are computed last, for their terms."""
        top = self._hits.top
        if self._spans is None or not self._hits.scores_at_end:
            return
        for place, hit in enumerate(top.hits):
            if hit.source is not None and self._spans.needs_record(hit.source):
                payloads = await self._payloads([hit.entry])
                if hit.entry in payloads:
                    top.hits[place] = self._hits.explain(hit, payloads[hit.entry])


def is_indexed(piece: PlanPiece) -> TypeGuard[IndexedRows]:
    return not isinstance(piece, ScanRange | IndexSpan)
