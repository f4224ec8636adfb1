"""Runs aggregates: takes a snapshot, adds up columns where there are any and records elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

import orjson

from tailrace.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.query.aggregate import AggregateScanner, Groups, too_late
from tailrace.query.aggregate_columns import ColumnAdder, ColumnScanner, has_columns
from tailrace.query.aggregate_request import AggregateRequest
from tailrace.query.chunk import Chunk
from tailrace.query.coverage import Counters, omitted, touched, visible_through
from tailrace.query.execute import READ_BYTES, Outcome, Searcher
from tailrace.query.page import coverage_of
from tailrace.query.plan import Stretch, plan
from tailrace.query.view import View
from tailrace.schema.instants import from_unix_ms
from tailrace.store.segments import SegmentInfo

SHOWN = (
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

KNOWN_MAX = 8192  # stretches, some 200 bytes each

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Known(NamedTuple):
    """What an earlier scan saw of one stretch, under the fields of one view."""

    view: View
    times: tuple[int, int] | None
    primary_max: int | None


class Aggregator:
    """The aggregates of one server. It remembers how far the times of stretches reach: they never change."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self._known: OrderedDict[tuple[int, int, str], Known] = OrderedDict()

    async def aggregate(
        self, stream: Stream, view: View, request: AggregateRequest, deadline: float
    ) -> bytes:
        """The body of the answer. `deadline` is a time of the monotonic clock; behind it there is none."""
        run = _Run(self, stream, view, request, deadline)
        await run.add_up()
        return await run.body()

    def find(self, number: int, first: int, field: str, view: View) -> Known | None:
        known = self._known.get((number, first, field))
        if known is None or not known.view.same_values(view) or known.view.primary != view.primary:
            return None
        self._known.move_to_end((number, first, field))
        return known

    def learn(self, number: int, first: int, field: str, known: Known) -> None:
        self._known[number, first, field] = known
        self._known.move_to_end((number, first, field))
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)


class _Run:
    """One aggregate. What it computes runs on threads, step by step; what it reads comes through the loop."""

    def __init__(
        self, aggregator: Aggregator, stream: Stream, view: View, request: AggregateRequest, deadline: float
    ) -> None:
        self._aggregator = aggregator
        self._searcher = aggregator.searcher
        self._stream = stream
        self._view = view
        self._request = request
        self._deadline = deadline
        self._first = stream.earliest + 1
        self._last = stream.visible
        self._groups = Groups(view, request)
        self._columns = ColumnAdder(view, request, self._groups, stream.earliest)
        self._scanner: AggregateScanner | ColumnScanner = (
            ColumnScanner(view, request, self._columns)
            if has_columns(request)
            else AggregateScanner(view, request, self._groups)
        )
        self._counters = Counters()
        self._primaries: list[tuple[int, int]] = []  # by piece: its last entry, its largest timestamp
        self._undecided: list[Stretch] = []
        self._scanned: list[Stretch] = []

    def _look_at_clock(self) -> None:
        if time.monotonic() >= self._deadline:
            raise too_late()

    async def add_up(self) -> None:
        self._look_at_clock()
        chunks: Sequence[Chunk] = ()
        if has_columns(self._request):
            chunks = await self._searcher.tail.chunks(self._stream, self._view, self._last)
        for piece in plan(self._first, self._last, chunks, self._searcher.scan_rows, newest_first=False):
            self._look_at_clock()
            if isinstance(piece, Chunk):
                begun = time.monotonic()
                self._counters.scanned_tail_docs += await self._on_thread(self._columns.add, piece)
                self._see_primary(self._columns.primary_max(piece), piece.last)
                self._counters.scanned_tail_s += time.monotonic() - begun
            else:
                assert isinstance(piece, Stretch)
                await self._scan(piece)

    def _see_primary(self, primary: int | None, last: int) -> None:
        if primary is not None:
            self._primaries.append((last, primary))

    async def _scan(self, stretch: Stretch) -> None:
        if not self._searcher.scans:
            self._undecided.append(stretch)
            return
        number, field = self._stream.number, self._request.timestamp_field
        known = self._aggregator.find(number, stretch.first, field, self._view)
        whole = stretch.is_whole(self._searcher.scan_rows)
        if whole and known is not None and not self._reaches(known.times):
            self._see_primary(known.primary_max, stretch.last)
            return
        scanned = await self._scan_rows(stretch)
        if whole and scanned is not None:
            self._aggregator.learn(number, stretch.first, field, scanned)

    def _reaches(self, times: tuple[int, int] | None) -> bool:
        """Whether a row with such a time may count."""
        return times is not None and times[0] < self._request.to_ms and times[1] >= self._request.from_ms

    async def _scan_rows(self, stretch: Stretch) -> Known | None:
        """None if not every row was seen."""
        counters, after, begun = self._counters, stretch.first - 1, time.monotonic()
        times: list[int] = []
        primaries: list[int] = []
        whole = True
        self._scanned.append(stretch)
        while after < stretch.last:
            try:
                async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                    page = await self._searcher.reader.read(
                        self._stream, after, READ_BYTES, stretch.last - after, apart=True
                    )
            except TimeoutError:
                raise too_late() from None
            except TailraceError as refusal:
                whole = False
                if refusal.code == "offset_gone" and self._stream.earliest > after:
                    after = min(self._stream.earliest, stretch.last)  # taken away while we were looking
                    continue
                self._undecided.append(Stretch(after + 1, stretch.last))
                break
            found = await self._on_thread(self._scanner.scan, after + 1, page.parts, self._deadline)
            if found.decided < len(page.parts):
                raise too_late()
            after += found.decided
            self._see_primary(found.primary_max, after)
            times += found.times or ()
            primaries += () if found.primary_max is None else (found.primary_max,)
        if stretch.first <= self._stream.sealed:
            counters.scanned_s += time.monotonic() - begun
        else:
            counters.scanned_tail_s += time.monotonic() - begun
            counters.scanned_tail_docs += after - stretch.first + 1
        if not whole:
            return None
        span = (min(times), max(times)) if times else None
        return Known(self._view, span, max(primaries, default=None))

    async def _on_thread(self, work: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._searcher.threads, work, *arguments)

    # -- the end -----------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        coverage = await self._coverage()
        return await self._on_thread(self._body, coverage)

    def _body(self, coverage: dict[str, object]) -> bytes:
        request = self._request
        buckets = [
            {
                "start": from_unix_ms(start_ms),
                "end": from_unix_ms(start_ms + request.interval_ms),
                "groups": groups,
            }
            for start_ms, groups in self._groups.shown(self._deadline)
        ]
        return orjson.dumps(
            {
                "stream": self._stream.name,
                "rollup": request.rollup_name,
                "from": from_unix_ms(request.from_ms),
                "to": from_unix_ms(request.to_ms),
                "interval": request.interval,
                "coverage": coverage,
                "buckets": buckets,
            }
        )

    async def _coverage(self) -> dict[str, object]:
        undecided = self._undecided
        segments: list[SegmentInfo] = []
        if self._stream.sealed and (self._scanned or undecided):
            segments = await self._on_thread(self._searcher.segments_of, self._stream.number)
        ranges = [(info.first, info.last) for info in segments]
        self._counters.scanned_segments = touched(ranges, self._scanned)
        left = omitted(undecided, self._stream.sealed, ranges)
        through = visible_through(self._first, self._last, undecided)
        oldest_ns = None
        if left.oldest is not None:
            oldest_ns = next((i.first_ns for i in segments if i.first <= left.oldest <= i.last), None)
        outcome = Outcome(
            hits=[],
            matches=0,
            exact=not undecided,
            timed_out=False,
            first=self._first,
            last=self._last,
            through=through,
            primary_max=max((at for last, at in self._primaries if last <= through), default=None),
            omitted=left,
            oldest_omitted_ns=oldest_ns,
            counters=self._counters,
        )
        coverage = coverage_of(outcome, self._stream)
        # No family of built rollups is there yet: whatever is asked is added up from rows.
        return {**{name: coverage[name] for name in SHOWN}, "used_rollups": False}
