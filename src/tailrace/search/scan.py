"""Rows decided by decoding their payloads: some at a time become a chunk of the fields in question.

A chunk made here answers as those of the tail index do, and is gone when the search is. Runs on a thread, and
looks at the clock between two chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tailrace.schema.search_fields import Field
from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Negation
from tailrace.search.chunk import Chunk, build_columns
from tailrace.search.chunk_score import explain_row_score
from tailrace.search.column_build import build_column
from tailrace.search.members import raw_column
from tailrace.search.needle import build_prefilter
from tailrace.search.score import ClauseMatches, FieldStatistics, Statistics, field_boosts, scored_tokens
from tailrace.search.search_request import SearchRequest
from tailrace.search.values import Value, timestamp_bounds
from tailrace.search.view import RecordDecoder, RecordView

ROWS_AT_ONCE = 512  # between two looks at the clock; far less than 20 ms of work
BYTES_AT_ONCE = 1 << 20

Payload = bytes | memoryview


class ScannedRows(Chunk):
    """Rows that were decoded for one search."""


ScanCallback = Callable[[ScannedRows], None]


def query_fields(query: BoundQuery) -> set[str]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {field for clause in clauses for field in query_fields(clause)}
        case Negation(clause):
            return query_fields(clause)
        case _:
            return {query.field}


class Scanner:
    """One search's way to look at payloads.

    Whoever takes the rows that may match is named with each call: kept here, it would be held by its own
    scanner, and with it every file its hits come from, until somebody looks for cycles.
    """

    def __init__(self, view: RecordView, request: SearchRequest) -> None:
        self._view = view
        self._query = request.query
        self._first_current = view.first_current()
        self._needles = build_prefilter(request.query, view.config)
        self._boosts = field_boosts(view.config)
        self.wanted = scored_tokens(request.query)
        self._fields = query_fields(request.query)
        self._fields |= {key.name for key in request.sort if key.kind not in ("score", "offset")}
        self._columns = self._fields | set(self.wanted)
        self.decoded = 0

    # Where indexes decide everything, nothing is decoded and nobody needs these.

    @cached_property
    def _asked(self) -> RecordDecoder:
        return RecordDecoder(self._view, sorted(self._fields))

    @cached_property
    def _counted(self) -> RecordDecoder:
        primary = self._view.primary
        return RecordDecoder(
            self._view, sorted(self._columns if primary is None else {*self._columns, primary})
        )

    def new_statistics(self) -> Statistics:
        return {name: FieldStatistics(sorted(tokens)) for name, tokens in self.wanted.items()}

    def scan(
        self,
        first: int,
        payloads: Sequence[Payload],
        counts: ScanStatistics | None,
        deadline: float,
        take: ScanCallback,
    ) -> int:
        """Decides payloads of consecutive entries; answers how many before the deadline.

        Without `counts` nothing is asked but matches, and rows may be passed over undecoded.
        """
        entries = range(first, first + len(payloads))
        if counts is None:
            return self.verify(entries, payloads, deadline, take)
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return begin
            members = self._counted.all_members(entries[begin:end], payloads[begin:end])
            chunk = self._chunk(self._counted, entries[begin:end], members)
            chunk.add_statistics(counts.statistics, 0)
            self._see_times(members, counts)
            take(chunk)
        return len(payloads)

    def _see_times(self, members: Sequence[Any], counts: ScanStatistics) -> None:
        primary = self._view.primary
        get = None if primary is None else self._counted.gets[primary]
        if primary is not None and get is not None:
            bounds = value_bounds(self._view.config.fields[primary], raw_column(members, get))
            if bounds is not None:
                counts.see(bounds)

    def verify(
        self, entries: Sequence[int], payloads: Sequence[Payload], deadline: float, take: ScanCallback
    ) -> int:
        """Decides payloads for their matches alone; answers how many before the deadline."""
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return begin
            rows = self._hopeful(entries[begin:end], payloads[begin:end])
            if rows:
                numbers, some = (
                    [entries[begin + row] for row in rows],
                    [payloads[begin + row] for row in rows],
                )
                take(self._chunk(self._asked, numbers, self._asked.all_members(numbers, some)))
        return len(payloads)

    def groups_in(self, entry: int, payload: Payload) -> list[ClauseMatches]:
        """What weighs in a row that matches."""
        members = self._asked.all_members([entry], [payload])
        return self.explain(self._chunk(self._asked, [entry], members), 0)

    def explain(self, chunk: ScannedRows, row: int) -> list[ClauseMatches]:
        return explain_row_score(chunk, self._query, row, self._boosts)

    def _hopeful(self, entries: Sequence[int], payloads: Sequence[Payload]) -> Sequence[int]:
        """Rows that may match, as far as can be told without decoding them."""
        if self._needles is None:
            return range(len(payloads))
        current, may_match = self._first_current, self._needles.may_match
        return [
            row for row, payload in enumerate(payloads) if may_match(bytes(payload)) or entries[row] < current
        ]

    def _chunk(self, decoder: RecordDecoder, entries: Sequence[int], members: Sequence[Any]) -> ScannedRows:
        """Of the fields that are asked for; how far times reach is told without a column of them."""
        self.decoded += len(members)
        gets = {name: get for name, get in decoder.gets.items() if name in self._columns}
        return ScannedRows(entries, build_columns(self._view.config, gets, members, lists=False))


def _batches(payloads: Sequence[Payload]) -> Iterator[tuple[int, int]]:
    """Where to begin and end, so that neither rows nor bytes become too many."""
    if sum(map(len, payloads)) <= BYTES_AT_ONCE:
        for begin in range(0, len(payloads), ROWS_AT_ONCE):
            yield begin, min(begin + ROWS_AT_ONCE, len(payloads))
        return
    begin = size = 0
    for end, payload in enumerate(payloads):
        if end - begin >= ROWS_AT_ONCE or (size and size + len(payload) > BYTES_AT_ONCE):
            yield begin, end
            begin, size = end, 0
        size += len(payload)
    if begin < len(payloads):
        yield begin, len(payloads)


def value_bounds(field: Field, found: list[object]) -> tuple[Value, Value] | None:
    """The smallest and the largest value of a field; None if no row has one."""
    bounds = timestamp_bounds(found) if field.kind == "date" else None
    if bounds is not None:
        return bounds
    terms = build_column(field, found, lists=False).terms
    return (terms[0], terms[len(terms) - 1]) if len(terms) else None


class ScanStatistics:
    """What is counted over all rows of a stretch, matching or not."""

    __slots__ = ("primary_max", "primary_min", "statistics")

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.primary_max: int | None = None
        self.primary_min: int | None = None

    def see(self, bounds: tuple[Value, Value]) -> None:
        """The smallest and largest primary timestamp of some of the rows."""
        least, most = bounds
        assert isinstance(least, int)
        assert isinstance(most, int)
        self.primary_min = least if self.primary_min is None else min(least, self.primary_min)
        self.primary_max = most if self.primary_max is None else max(most, self.primary_max)
