"""Runs one search: takes a snapshot, plans which source decides which rows, and watches the deadline.

Sources are chunks of the tail index, index files, and scans that decode records. The event loop reads,
threads compute, and never two steps of the same search run at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar, TypeVarTuple, Unpack

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.log.history import NotLocalError
from tailrace.log.model import Stream
from tailrace.log.reader import Reader
from tailrace.search.collector import (
    Hit,
    HitCollector,
    OmittedRows,
    SearchCounters,
    count_omitted,
    count_touched_segments,
    visible_through,
)
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.spans import IndexSpan, order_by_time
from tailrace.search.language import Anywhere, Clause
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
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import Payload, ScanStatistics
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

if TYPE_CHECKING:
    from tailrace.search.span_search import SpanSearch

READ_BYTES = 1 << 20
SPANS_OPENED_AT_ONCE = 8  # spans for which one search opens files and holds them open
CACHED_SPANS_AT_ONCE = 64  # spans whose files are open already
SCORING_TIME_SHARE = 0.2  # share of the time reserved for scoring once scans have been counted
STREAMS_CACHED_MAX = 64  # streams whose segment lists are cached
SEGMENTS_CACHED_MAX = 2000

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class SearchResult(NamedTuple):
    """Hits and coverage of a search. `hits` has one more than a page if others follow."""

    hits: list[Hit]
    matches: int
    exact: bool  # whether `matches` is the total
    timed_out: bool
    first: int
    last: int  # entry of the snapshot
    through: int  # last entry with no undecided entry at or below it
    primary_max: int | None
    omitted: OmittedRows
    oldest_omitted_ns: int | None
    counters: SearchCounters

    @property
    def complete(self) -> bool:
        return not self.timed_out and not self.omitted.rows


class Searcher:
    """Everything the searches of one server share: tail index, index catalogue, threads and caches."""

    def __init__(
        self,
        reader: Reader,
        tail: TailIndex,
        threads: Executor,
        segments_of: Callable[[int], list[SegmentInfo]],
        total_exact_max: int,
    ) -> None:
        self.reader = reader
        self.tail = tail
        self.threads = threads
        self.segments_of = segments_of  # by stream number; runs on a thread
        self.total_exact_max = total_exact_max
        self.catalogue: IndexCatalogue | None = None  # None without an object store
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
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.threads, self.segments_of, stream.number)
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
        run = _SearchRun(self, stream, view, request, deadline)
        with self.tail.search():
            await run.run()
        return await run.result()


class _SearchRun:
    """One search. It computes on threads and reads on the event loop."""

    def __init__(
        self, searcher: Searcher, stream: Stream, view: RecordView, request: SearchRequest, deadline: float
    ) -> None:
        self._searcher = searcher
        self._stream = stream
        self._view = view
        self._request = request
        self._deadline = deadline
        self._scan_until = deadline
        self._first = stream.earliest + 1
        self._last = stream.visible
        self._loop = asyncio.get_running_loop()
        self._collector = HitCollector(view, request, stream.earliest, searcher.total_exact_max)
        self._stopped_early = False
        self._timed_out = False
        self._incomplete = False
        self._rescans: list[ScanRange] = []
        self._scanned: list[ScanRange] = []
        self._spans: SpanSearch | None = None

    @property
    def _past_deadline(self) -> bool:
        return time.monotonic() >= self._deadline

    async def run(self) -> None:
        sources: Sequence[IndexedRows] = ()
        spans: Sequence[IndexSpan] = ()
        if self._past_deadline:
            self._timed_out = True  # the request waited in the queue until its deadline
        else:
            built, covered = await self._indexed_spans()
            sources = await self._searcher.tail.chunks(self._stream, self._view.indexed, self._last, covered)
            spans = self._usable_spans(built, sources)
        key = self._request.sort[0]
        ascending = key.kind == "offset" and not key.descending
        pieces = plan_pieces(
            self._first,
            self._last,
            [*spans, *sources],
            self._searcher.scan_rows,
            newest_first=not ascending,
        )
        if self._collector.scores_text and self._request.by_score:
            await self._decide_by_score(pieces)
        else:
            indexed = [piece for piece in pieces if is_indexed(piece)]
            if not self._past_deadline:
                self._collector.add_statistics_of(indexed)
            if key.kind not in ("offset", "score"):
                known = [piece for piece in pieces if isinstance(piece, IndexSpan)]
                if key.name == self._view.primary:
                    known = order_by_time(known) if not key.descending else order_by_time(known)[::-1]
                rest = [piece for piece in pieces if isinstance(piece, ScanRange)]
                pieces = [*order_by_best_value(indexed, key), *known, *rest]
            await self._decide_in_order(pieces)

    async def _indexed_spans(self) -> tuple[Sequence[IndexSpan], int]:
        """The spans with index files, and the last entry up to which these cover every row."""
        catalogue = self._searcher.catalogue
        spans = () if catalogue is None else await catalogue.spans(self._stream, self._view.indexed)
        if catalogue is None or not spans:
            return (), 0
        from tailrace.search.span_search import SpanSearch  # imports Arrow, which is large

        self._spans = SpanSearch(catalogue, self._view, self._request, self._collector, self._stream.earliest)
        return spans, catalogue.covered_through(self._stream)

    def _usable_spans(self, spans: Sequence[IndexSpan], chunks: Sequence[IndexedRows]) -> list[IndexSpan]:
        """The spans that help this search, lie in the snapshot and end before the first chunk."""
        end = chunks[0].first if chunks else self._last + 1
        visible = (span for span in spans if self._stream.earliest < span.last < end)
        return [] if self._spans is None else self._spans.usable(visible)

    async def _decide_in_order(self, pieces: list[PlanPiece]) -> None:
        waiting = pieces[::-1]
        while waiting:
            if self._past_deadline:
                break
            piece = waiting[-1]
            if self._collector.has_enough and not is_indexed(piece):
                self._stopped_early = True  # chunks in memory are still counted, which is cheap
                waiting.pop()
                continue
            if isinstance(piece, IndexSpan):
                waiting += (await self._decide_spans(self._next_spans(waiting), counts=True))[::-1]
            elif is_indexed(piece):
                indexed: list[IndexedRows] = []
                while waiting and is_indexed(found := waiting[-1]):
                    indexed.append(found)
                    waiting.pop()
                waiting += await self._decide_chunks(indexed)
            else:
                assert isinstance(piece, ScanRange)
                waiting.pop()
                await self._scan(piece)
        self._leave_undecided(waiting)

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

    async def _decide_by_score(self, pieces: list[PlanPiece]) -> None:
        """Count the text statistics of all rows first, then score: a score depends on all of them."""
        collector = self._collector
        now = time.monotonic()
        self._scan_until = now + (self._deadline - now) * (1 - SCORING_TIME_SHARE)
        indexed = [piece for piece in pieces if is_indexed(piece)]
        unread = [piece for piece in pieces if isinstance(piece, ScanRange)]
        # Counted last, scored first: the cache may not hold the files of all spans at once.
        spans, uncounted = await self._count_spans(
            [one for one in pieces[::-1] if isinstance(one, IndexSpan)]
        )
        spans.reverse()
        unread += [scan_range for span in uncounted for scan_range in self._scan_ranges_of(span)]
        if not self._past_deadline:
            await self._on_thread(collector.add_statistics_of, indexed)
        while unread and time.monotonic() < self._scan_until:
            await self._scan(unread.pop(0))
        self._scan_until = self._deadline
        await self._on_thread(collector.settle_statistics)
        left: Sequence[PlanPiece] = indexed if self._past_deadline else await self._decide_chunks(indexed)
        while spans and not self._past_deadline:
            spans = (
                await self._decide_spans(spans[:SPANS_OPENED_AT_ONCE], counts=False)
                + spans[SPANS_OPENED_AT_ONCE:]
            )
        while self._rescans and not self._past_deadline:
            await self._scan(self._rescans.pop(0), already_counted=True)
        self._leave_undecided([*left, *spans, *unread, *self._rescans])

    def _leave_undecided(self, pieces: Sequence[PlanPiece]) -> None:
        """Time is up: record the pieces that were not decided."""
        if pieces:
            self._timed_out = True
            self._collector.undecided += [ScanRange(piece.first, piece.last) for piece in pieces]

    # -- chunks of the tail index ------------------------------------------------------------------------

    async def _decide_chunks(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        """Decide chunks in order. Returns those not reached before the deadline, in reverse."""
        if self._view.indexed is not self._view:
            return await self._decide_by_candidates(indexed)
        begun = time.monotonic()
        left = await self._on_thread(self._add_chunks, indexed)
        self._collector.counters.scanned_tail_s += time.monotonic() - begun
        return left

    async def _decide_by_candidates(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        """As `_decide_chunks`, for a query on fields without an index: decodes the rows that may match."""
        for index, source in enumerate(indexed):
            if self._past_deadline:
                return indexed[index:][::-1]
            if self._collector.has_enough:
                self._stopped_early = True
                return []
            candidates = await self._on_thread(self._candidates, source)
            if len(candidates) > len(source.entries) * CANDIDATE_SHARE_MAX:
                first = max(source.first, self._first)
                for scan_range in split_scan_ranges(first, source.last, self._searcher.scan_rows):
                    await self._scan(scan_range, already_counted=True)
            else:
                await self._verify(candidates)
        return []

    def _candidates(self, source: IndexedRows) -> list[int]:
        """The entries that may match, judged by the clauses on indexed fields."""
        declared = self._view.indexed.config.fields

        def decide(clause: Clause) -> RowMatches | None:
            assert not isinstance(clause, Anywhere)
            return certain_match(source.match(clause)) if clause.field in declared else None

        visible = source.rows_after(self._first - 1)
        rows = match_rows(self._request.query, visible, decide).possible & visible
        return [source.entries[row] for row in rows_from_bits(rows)]

    def _add_chunks(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        collector = self._collector
        for index, source in enumerate(indexed):
            if self._past_deadline:
                return indexed[index:][::-1]
            collector.add_chunk(source)
        return []

    # -- index files -------------------------------------------------------------------------------------

    async def _count_spans(self, spans: list[IndexSpan]) -> tuple[list[IndexSpan], list[IndexSpan]]:
        """Add the text statistics of spans. Returns the counted spans, and those that must be scanned."""
        counted: list[IndexSpan] = []
        uncounted: list[IndexSpan] = []
        for begin in range(0, len(spans), SPANS_OPENED_AT_ONCE):
            batch = spans[begin : begin + SPANS_OPENED_AT_ONCE]
            if self._past_deadline:
                return counted, uncounted + spans[begin:]
            assert self._spans is not None
            opened = await self._spans.open(batch)
            failed = await self._on_thread(self._spans.count, opened)
            uncounted += failed
            counted += [span for span in batch if span not in failed]
        return counted, uncounted

    async def _decide_spans(self, spans: list[IndexSpan], *, counts: bool) -> list[IndexSpan]:
        """Decide some spans. Returns those not reached before the deadline."""
        assert self._spans is not None
        opened = await self._spans.open(spans)
        if not opened:
            await asyncio.sleep(0)  # decided without a thread; there may be many more such steps
            return []
        left, late = await self._on_thread(
            lambda: run.decide(opened, self._deadline, counts=counts) if (run := self._spans) else ([], [])
        )
        for one in left:
            if one.candidates is not None:
                await self._verify(one.candidates)
            else:
                for scan_range in self._scan_ranges_of(one.span):
                    await self._scan(scan_range, already_counted=one.counted)
        return late

    def _scan_ranges_of(self, span: IndexSpan) -> list[ScanRange]:
        first, last = max(span.first, self._first), min(span.last, self._last)
        return split_scan_ranges(first, last, self._searcher.scan_rows)

    async def _verify(self, entries: Sequence[int]) -> None:
        """Decode and match the entries that an index could not decide."""
        collector = self._collector
        if not self._searcher.scanning_enabled:
            collector.undecided += [ScanRange(entry, entry) for entry in entries]
            self._incomplete = self._incomplete or bool(entries)
            return
        for group in group_adjacent(entries):
            try:
                payloads = await self._payloads(group)
            except TimeoutError:
                self._timed_out = True
                payloads = {}
            except TailraceError:
                self._incomplete = True
                payloads = {}
            found = [entry for entry in group if entry in payloads]
            decided = await self._on_thread(
                collector.verify, found, [payloads[entry] for entry in found], self._deadline
            )
            if decided < len(found):
                self._timed_out = True
            done = set(found[:decided])
            trimmed = self._stream.earliest  # entries removed by retention meanwhile are not undecided
            collector.undecided += [
                ScanRange(entry, entry) for entry in group if entry > trimmed and entry not in done
            ]

    async def _payloads(self, entries: Sequence[int]) -> dict[int, Payload]:
        """The payloads of adjacent entries, without those that retention has removed."""
        wanted, found = set(entries), dict[int, Payload]()
        after, last = entries[0] - 1, entries[-1]
        while after < last:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                try:
                    page = await self._searcher.reader.read(
                        self._stream, after, READ_BYTES, last - after, apart=True
                    )
                except TailraceError as refusal:
                    if refusal.code != "offset_gone" or self._stream.earliest <= after:
                        raise
                    after = min(self._stream.earliest, last)
                    continue
            for entry, payload in zip(page.entries(), page.parts, strict=True):
                if entry in wanted:
                    found[entry] = payload
                    self._collector.counters.payload_bytes += len(payload)
            after = page.next_entry
        return found

    async def _explain(self) -> None:
        """Read the records of hits from index files, whose scores are computed last, for their terms."""
        top = self._collector.top
        if self._spans is None or not self._collector.scores_text or self._request.by_score:
            return
        for place, hit in enumerate(top.hits):
            if hit.source is not None and not self._spans.can_explain(hit.source):
                payloads = await self._payloads([hit.entry])
                if hit.entry in payloads:
                    top.hits[place] = self._collector.explain(hit, payloads[hit.entry])

    # -- scans -------------------------------------------------------------------------------------------

    async def _scan(self, scan_range: ScanRange, *, already_counted: bool = False) -> None:
        if not self._searcher.scanning_enabled:
            self._collector.undecided.append(scan_range)
            self._incomplete = True
            return
        collector = self._collector
        repeat = not already_counted and collector.must_scan_again
        facts = self._cached_statistics(scan_range)
        counts: ScanStatistics | None = None
        if already_counted:
            pass
        elif facts is not None:
            collector.add_known(facts, scan_range.last)
            if facts.rules_out(self._request.query, self._view.primary):
                return
        else:
            counts = ScanStatistics(collector.scanner.new_statistics())
        if repeat:
            self._rescans.append(scan_range)
            if counts is None:
                return
        decided = await self._scan_rows(scan_range, counts)
        if counts is not None:
            collector.add_counted(counts, decided)
            if decided == scan_range.last and scan_range.is_whole(self._searcher.scan_rows):
                known = (
                    self._searcher.range_statistics.find(self._stream.number, scan_range, self._view.indexed)
                    or RangeStatistics()
                )
                known.learn(counts.statistics, counts.primary_max, counts.primary_min)
                self._searcher.range_statistics.put(
                    self._stream.number, scan_range, self._view.indexed, known
                )
        if decided < scan_range.last and not repeat:
            collector.undecided.append(ScanRange(decided + 1, scan_range.last))

    def _cached_statistics(self, scan_range: ScanRange) -> RangeStatistics | None:
        if not scan_range.is_whole(self._searcher.scan_rows):
            return None
        facts = self._searcher.range_statistics.find(self._stream.number, scan_range, self._view.indexed)
        if facts is None or not facts.has_counts(self._collector.scanner.scored_tokens, self._view.primary):
            return None
        return facts

    async def _scan_rows(self, scan_range: ScanRange, counts: ScanStatistics | None) -> int:
        """Decode and match a range. Returns the last entry that was decided."""
        collector, counters = self._collector, self._collector.counters
        after = scan_range.first - 1
        begun = time.monotonic()
        self._scanned.append(scan_range)
        while after < scan_range.last:
            try:
                async with asyncio.timeout(max(0.0, self._scan_until - time.monotonic())):
                    page = await self._searcher.reader.read(
                        self._stream, after, READ_BYTES, scan_range.last - after, apart=True
                    )
            except TimeoutError:
                self._timed_out = True
                break
            except TailraceError as refusal:
                if refusal.code == "offset_gone" and self._stream.earliest > after:
                    # Removed by retention during the scan; later entries are still there.
                    after = min(self._stream.earliest, scan_range.last)
                    continue
                self._incomplete = True
                break
            payloads = page.parts
            decided = await self._on_thread(collector.scan, after + 1, payloads, counts, self._scan_until)
            counters.payload_bytes += sum(map(len, payloads))
            after += decided
            if decided < len(payloads):
                self._timed_out = True
                break
        seconds = time.monotonic() - begun
        if scan_range.first <= self._stream.sealed:
            counters.scanned_s += seconds
        else:
            counters.scanned_tail_s += seconds
            counters.scanned_tail_docs += after - scan_range.first + 1
        return after

    async def _on_thread(self, work: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        return await self._loop.run_in_executor(self._searcher.threads, work, *arguments)

    # -- result ------------------------------------------------------------------------------------------

    async def result(self) -> SearchResult:
        collector = self._collector
        undecided = collector.undecided
        segments: Sequence[SegmentInfo] = ()
        if self._stream.sealed and (self._scanned or undecided or self._spans is not None):
            segments = await self._searcher.segments(self._stream)
        ranges = [(info.first, info.last) for info in segments]
        collector.counters.scanned_segments = count_touched_segments(ranges, self._scanned)
        used = [] if self._spans is None else self._spans.used
        collector.counters.indexed_segments = count_touched_segments(
            ranges, [ScanRange(s.first, s.last) for s in used]
        )
        left = count_omitted(undecided, self._stream.sealed, ranges)
        await self._explain()
        hits = await self._on_thread(collector.hits) if collector.scores_at_end else collector.hits()
        through = visible_through(self._first, self._last, undecided)
        return SearchResult(
            hits,
            collector.matches,
            not (self._timed_out or undecided or self._stopped_early),
            self._timed_out,
            self._first,
            self._last,
            through,
            collector.primary_max(through),
            left,
            None if left.oldest is None else self._appended_ns(left.oldest, segments),
            collector.counters,
        )

    def _appended_ns(self, entry: int, segments: Sequence[SegmentInfo]) -> int | None:
        for info in segments:
            if info.first <= entry <= info.last:
                return info.first_ns  # the segment's first time: reading the entry's own needs a fetch
        try:
            return self._searcher.reader.time_of(self._stream, entry)
        except (NotLocalError, TailraceError):
            return None


def is_indexed(piece: PlanPiece) -> TypeGuard[IndexedRows]:
    return not isinstance(piece, ScanRange | IndexSpan)
