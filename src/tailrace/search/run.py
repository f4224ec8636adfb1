"""Runs searches: takes a snapshot, plans, brings the rows that have to be decoded, and watches the clock."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar, TypeVarTuple, Unpack

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
SPANS_OPENED_AT_ONCE = 8  # spans for which one search opens files, and holds them
CACHED_SPANS_AT_ONCE = 64  # spans whose files are open anyway
SCORING_TIME_SHARE = 0.2  # of the time for a search that is kept for scores, when scans have been counted
STREAMS_CACHED_MAX = 64  # whose segments are known without asking the hot store, if they are not too many
SEGMENTS_CACHED_MAX = 2000

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class SearchResult(NamedTuple):
    """What a search found. `hits` has one more than a page if others follow."""

    hits: list[Hit]
    matches: int
    exact: bool  # whether `matches` is all of them
    timed_out: bool
    first: int
    last: int  # of the snapshot
    through: int  # the last entry with nothing undecided at or below it
    primary_max: int | None
    omitted: OmittedRows
    oldest_omitted_ns: int | None
    counters: SearchCounters

    @property
    def complete(self) -> bool:
        return not self.timed_out and not self.omitted.rows


class Searcher:
    """The searches of one server."""

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
        self.segments_of = segments_of  # of the stream with this number, asked on a thread
        self.total_exact_max = total_exact_max
        self.library: IndexCatalogue | None = None  # set by whoever knows what is published
        self.facts = RangeStatisticsCache()
        self.scan_rows = SCAN_ROWS
        self.scans = True  # without them, what is not indexed is left out
        self._segments: OrderedDict[int, tuple[object, Sequence[SegmentInfo]]] = OrderedDict()

    async def segments(self, stream: Stream) -> Sequence[SegmentInfo]:
        """The segments of a stream. They are read once for as long as they stay the same."""
        mark = (stream.sealed, stream.earliest, stream.cold)
        kept = self._segments.get(stream.number)
        if kept is not None and kept[0] == mark:
            self._segments.move_to_end(stream.number)
            return kept[1]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.threads, self.segments_of, stream.number)
        # What is not durable yet counts already, and is not found yet.
        whole = bool(found) and found[-1].last == stream.sealed and len(found) == stream.cold.segments
        if (
            whole
            and mark == (stream.sealed, stream.earliest, stream.cold)
            and len(found) <= SEGMENTS_CACHED_MAX
        ):
            self._segments[stream.number] = mark, found
            self._segments.move_to_end(stream.number)
            if len(self._segments) > STREAMS_CACHED_MAX:
                self._segments.popitem(last=False)
        return found

    async def follow(self, stream: Stream, view: RecordView) -> None:
        """Indexes rows that have arrived, unless built indexes answer for them already."""
        covered = 0
        if self.library is not None and await self.library.spans(stream, view):
            covered = self.library.covered(stream)
        self.tail.follow(stream, view, covered)

    async def search(
        self, stream: Stream, view: RecordView, request: SearchRequest, deadline: float
    ) -> SearchResult:
        """`deadline` is a time of the monotonic clock."""
        run = _SearchRun(self, stream, view, request, deadline)
        with self.tail.search():
            await run.decide()
        return await run.outcome()


class _SearchRun:
    """One search. What it computes runs on threads; what it reads comes through the loop."""

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
        self._left_out = False
        self._again: list[ScanRange] = []
        self._scanned: list[ScanRange] = []
        self._spans: SpanSearch | None = None

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._deadline

    async def decide(self) -> None:
        sources: Sequence[IndexedRows] = ()
        spans: Sequence[IndexSpan] = ()
        if self._late:
            self._timed_out = True  # there was no time to begin with
        else:
            built, covered = await self._built_spans()
            sources = await self._searcher.tail.chunks(self._stream, self._view.indexed, self._last, covered)
            spans = self._usable(built, sources)
        key = self._request.sort[0]
        ascending = key.kind == "offset" and not key.descending
        pieces = plan_pieces(
            self._first,
            self._last,
            [*spans, *sources],
            self._searcher.scan_rows,
            newest_first=not ascending,
        )
        if self._collector.weighs and self._request.by_score:
            await self._decide_by_weight(pieces)
        else:
            indexed = [piece for piece in pieces if is_indexed(piece)]
            if not self._late:
                self._collector.count_sources(indexed)
            if key.kind not in ("offset", "score"):
                known = [piece for piece in pieces if isinstance(piece, IndexSpan)]
                if key.name == self._view.primary:
                    known = order_by_time(known) if not key.descending else order_by_time(known)[::-1]
                rest = [piece for piece in pieces if isinstance(piece, ScanRange)]
                pieces = [*order_by_best_value(indexed, key), *known, *rest]
            await self._decide_in_order(pieces)

    async def _built_spans(self) -> tuple[Sequence[IndexSpan], int]:
        """What built indexes speak for, and up to where they speak for everything."""
        library = self._searcher.library
        spans = () if library is None else await library.spans(self._stream, self._view.indexed)
        if library is None or not spans:
            return (), 0
        from tailrace.search.span_search import SpanSearch  # brings Arrow, which is large

        self._spans = SpanSearch(library, self._view, self._request, self._collector, self._stream.earliest)
        return spans, library.covered(self._stream)

    def _usable(self, spans: Sequence[IndexSpan], chunks: Sequence[IndexedRows]) -> list[IndexSpan]:
        """Those of use to this search, as far as they come before the chunks and are in the snapshot."""
        end = chunks[0].first if chunks else self._last + 1
        shown = (span for span in spans if self._stream.earliest < span.last < end)
        return [] if self._spans is None else self._spans.usable(shown)

    async def _decide_in_order(self, pieces: list[PlanPiece]) -> None:
        waiting = pieces[::-1]
        while waiting:
            if self._late:
                break
            piece = waiting[-1]
            if self._collector.enough and not is_indexed(piece):
                self._stopped_early = True  # what is in memory is still counted: that costs little
                waiting.pop()
                continue
            if isinstance(piece, IndexSpan):
                waiting += (await self._take_spans(self._next_spans(waiting), counts=True))[::-1]
            elif is_indexed(piece):
                indexed: list[IndexedRows] = []
                while waiting and is_indexed(found := waiting[-1]):
                    indexed.append(found)
                    waiting.pop()
                waiting += await self._sources(indexed)
            else:
                assert isinstance(piece, ScanRange)
                waiting.pop()
                await self._scan(piece)
        self._give_up(waiting)

    def _next_spans(self, waiting: list[PlanPiece]) -> list[IndexSpan]:
        """Takes as many spans as are decided in one go: few if files have to be opened for them."""
        assert self._spans is not None
        spans: list[IndexSpan] = []
        opening = 0
        while waiting and len(spans) < CACHED_SPANS_AT_ONCE and isinstance(span := waiting[-1], IndexSpan):
            opening += not self._spans.is_at_hand(span)
            if opening > SPANS_OPENED_AT_ONCE:
                break
            spans.append(span)
            waiting.pop()
        return spans

    async def _decide_by_weight(self, pieces: list[PlanPiece]) -> None:
        """All statistics first, then scores: indexed rows are weighed when the scans have been counted."""
        collector = self._collector
        now = time.monotonic()
        self._scan_until = now + (self._deadline - now) * (1 - SCORING_TIME_SHARE)
        indexed = [piece for piece in pieces if is_indexed(piece)]
        unread = [piece for piece in pieces if isinstance(piece, ScanRange)]
        # Counted last, weighed first: not all of their files may find room in memory at once.
        spans, uncounted = await self._count_spans(
            [one for one in pieces[::-1] if isinstance(one, IndexSpan)]
        )
        spans.reverse()
        unread += [stretch for span in uncounted for stretch in self._stretches_of(span)]
        if not self._late:
            await self._on_thread(collector.count_sources, indexed)
        while unread and time.monotonic() < self._scan_until:
            await self._scan(unread.pop(0))
        self._scan_until = self._deadline
        await self._on_thread(collector.settle)
        left: Sequence[PlanPiece] = indexed if self._late else await self._sources(indexed)
        while spans and not self._late:
            spans = (
                await self._take_spans(spans[:SPANS_OPENED_AT_ONCE], counts=False)
                + spans[SPANS_OPENED_AT_ONCE:]
            )
        while self._again and not self._late:
            await self._scan(self._again.pop(0), again=True)
        self._give_up([*left, *spans, *unread, *self._again])

    def _give_up(self, pieces: Sequence[PlanPiece]) -> None:
        """The clock has run out with these undecided."""
        if pieces:
            self._timed_out = True
            self._collector.undecided += [ScanRange(piece.first, piece.last) for piece in pieces]

    # -- indexed sources ---------------------------------------------------------------------------------

    async def _sources(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        """Decides sources one after the other; answers, in reverse, those that were not reached."""
        if self._view.indexed is not self._view:
            return await self._narrow(indexed)
        begun = time.monotonic()
        left = await self._on_thread(self._decide_sources, indexed)
        self._collector.counters.scanned_tail_s += time.monotonic() - begun
        return left

    async def _narrow(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        """As `_sources`, for a query with fields that no index has: the rows that may match are decoded."""
        for index, source in enumerate(indexed):
            if self._late:
                return indexed[index:][::-1]
            if self._collector.enough:
                self._stopped_early = True
                return []
            candidates = await self._on_thread(self._candidates, source)
            if len(candidates) > len(source.entries) * CANDIDATE_SHARE_MAX:
                first = max(source.first, self._first)
                for stretch in split_scan_ranges(first, source.last, self._searcher.scan_rows):
                    await self._scan(stretch, again=True)
            else:
                await self._verify(candidates)
        return []

    def _candidates(self, source: IndexedRows) -> list[int]:
        """The entries of a source that may match, by the clauses that it knows."""
        declared = self._view.indexed.config.fields

        def decide(clause: Clause) -> RowMatches | None:
            assert not isinstance(clause, Anywhere)
            return certain_match(source.match(clause)) if clause.field in declared else None

        shown = source.after(self._first - 1)
        rows = match_rows(self._request.query, shown, decide).maybe & shown
        return [source.entries[row] for row in rows_from_bits(rows)]

    def _decide_sources(self, indexed: list[IndexedRows]) -> list[IndexedRows]:
        collector = self._collector
        for index, source in enumerate(indexed):
            if self._late:
                return indexed[index:][::-1]
            collector.source(source)
        return []

    # -- built indexes -----------------------------------------------------------------------------------

    async def _count_spans(self, spans: list[IndexSpan]) -> tuple[list[IndexSpan], list[IndexSpan]]:
        """Takes the statistics of spans in; answers those that were counted, and those to be scanned."""
        counted: list[IndexSpan] = []
        refused: list[IndexSpan] = []
        for begin in range(0, len(spans), SPANS_OPENED_AT_ONCE):
            batch = spans[begin : begin + SPANS_OPENED_AT_ONCE]
            if self._late:
                return counted, refused + spans[begin:]
            assert self._spans is not None
            opened = await self._spans.open(batch)
            failed = await self._on_thread(self._spans.count, opened)
            refused += failed
            counted += [span for span in batch if span not in failed]
        return counted, refused

    async def _take_spans(self, spans: list[IndexSpan], *, counts: bool) -> list[IndexSpan]:
        """Decides some spans; answers those that there was no time for."""
        assert self._spans is not None
        opened = await self._spans.open(spans)
        if not opened:
            await asyncio.sleep(0)  # all were decided here, and there may be many more
            return []
        left, late = await self._on_thread(
            lambda: run.decide(opened, self._deadline, counts=counts) if (run := self._spans) else ([], [])
        )
        for one in left:
            if one.candidates is not None:
                await self._verify(one.candidates)
            else:
                for stretch in self._stretches_of(one.span):
                    await self._scan(stretch, again=one.counted)
        return late

    def _stretches_of(self, span: IndexSpan) -> list[ScanRange]:
        first, last = max(span.first, self._first), min(span.last, self._last)
        return split_scan_ranges(first, last, self._searcher.scan_rows)

    async def _verify(self, entries: Sequence[int]) -> None:
        """Decodes the entries that an index could not decide."""
        collector = self._collector
        if not self._searcher.scans:
            collector.undecided += [ScanRange(entry, entry) for entry in entries]
            self._left_out = self._left_out or bool(entries)
            return
        for wanted in group_adjacent(entries):
            try:
                payloads = await self._payloads(wanted)
            except TimeoutError:
                self._timed_out = True
                payloads = {}
            except TailraceError:
                self._left_out = True
                payloads = {}
            found = [entry for entry in wanted if entry in payloads]
            decided = await self._on_thread(
                collector.verify, found, [payloads[entry] for entry in found], self._deadline
            )
            if decided < len(found):
                self._timed_out = True
            done = set(found[:decided])
            gone = self._stream.earliest  # what was taken away meanwhile is not missed
            collector.undecided += [
                ScanRange(entry, entry) for entry in wanted if entry > gone and entry not in done
            ]

    async def _payloads(self, entries: Sequence[int]) -> dict[int, Payload]:
        """The payloads of entries that lie near each other. What retention has taken is left out."""
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
        """Hits from built indexes, in an order without scores: what weighs in them is in their records."""
        top = self._collector.top
        if self._spans is None or not self._collector.weighs or self._request.by_score:
            return
        for place, hit in enumerate(top.hits):
            if hit.source is not None and not self._spans.can_explain(hit.source):
                payloads = await self._payloads([hit.entry])
                if hit.entry in payloads:
                    top.hits[place] = self._collector.explain(hit, payloads[hit.entry])

    # -- scans -------------------------------------------------------------------------------------------

    async def _scan(self, stretch: ScanRange, *, again: bool = False) -> None:
        if not self._searcher.scans:
            self._collector.undecided.append(stretch)
            self._left_out = True
            return
        collector = self._collector
        repeat = not again and collector.must_scan_again
        facts = self._facts_of(stretch)
        counts: ScanStatistics | None = None
        if again:
            pass  # it was counted the first time
        elif facts is not None:
            collector.known(facts, stretch.last)
            if facts.rules_out(self._request.query, self._view.primary):
                return
        else:
            counts = ScanStatistics(collector.scanner.new_statistics())
        if repeat:
            self._again.append(stretch)
            if counts is None:
                return
        decided = await self._scan_rows(stretch, counts)
        if counts is not None:
            collector.counted(counts, decided)
            if decided == stretch.last and stretch.is_whole(self._searcher.scan_rows):
                known = (
                    self._searcher.facts.find(self._stream.number, stretch, self._view.indexed)
                    or RangeStatistics()
                )
                known.learn(counts.statistics, counts.primary_max, counts.primary_min)
                self._searcher.facts.put(self._stream.number, stretch, self._view.indexed, known)
        if decided < stretch.last and not repeat:
            collector.undecided.append(ScanRange(decided + 1, stretch.last))

    def _facts_of(self, stretch: ScanRange) -> RangeStatistics | None:
        if not stretch.is_whole(self._searcher.scan_rows):
            return None
        facts = self._searcher.facts.find(self._stream.number, stretch, self._view.indexed)
        if facts is None or not facts.answers(self._collector.scanner.wanted, self._view.primary):
            return None
        return facts

    async def _scan_rows(self, stretch: ScanRange, counts: ScanStatistics | None) -> int:
        """The last entry that was decided."""
        collector, counters = self._collector, self._collector.counters
        after = stretch.first - 1
        begun = time.monotonic()
        self._scanned.append(stretch)
        while after < stretch.last:
            try:
                async with asyncio.timeout(max(0.0, self._scan_until - time.monotonic())):
                    page = await self._searcher.reader.read(
                        self._stream, after, READ_BYTES, stretch.last - after, apart=True
                    )
            except TimeoutError:
                self._timed_out = True
                break
            except TailraceError as refusal:
                if refusal.code == "offset_gone" and self._stream.earliest > after:
                    # Taken away while we were looking; what is behind it is still there.
                    after = min(self._stream.earliest, stretch.last)
                    continue
                self._left_out = True
                break
            payloads = page.parts
            decided = await self._on_thread(collector.scan, after + 1, payloads, counts, self._scan_until)
            counters.payload_bytes += sum(map(len, payloads))
            after += decided
            if decided < len(payloads):
                self._timed_out = True
                break
        seconds = time.monotonic() - begun
        if stretch.first <= self._stream.sealed:
            counters.scanned_s += seconds
        else:
            counters.scanned_tail_s += seconds
            counters.scanned_tail_docs += after - stretch.first + 1
        return after

    async def _on_thread(self, work: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        return await self._loop.run_in_executor(self._searcher.threads, work, *arguments)

    # -- the end -----------------------------------------------------------------------------------------

    async def outcome(self) -> SearchResult:
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
        hits = await self._on_thread(collector.hits) if collector.weighs_last else collector.hits()
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
                return info.first_ns  # at the latest: the entry itself is on the object store
        try:
            return self._searcher.reader.time_of(self._stream, entry)
        except (NotLocalError, TailraceError):
            return None


def is_indexed(piece: PlanPiece) -> TypeGuard[IndexedRows]:
    return not isinstance(piece, ScanRange | IndexSpan)
