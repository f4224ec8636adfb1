"""Aggregates from the columns of the tail index, without decoding a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from tailrace.query.aggregate import Groups
from tailrace.query.aggregate_request import AggregateRequest
from tailrace.query.chunk import Chunk
from tailrace.query.column import Column
from tailrace.query.measures import Number
from tailrace.query.packed import rows_of
from tailrace.query.view import View
from tailrace.schema.convert import text_of

Ranks = Callable[[int], Sequence[int]]


def has_columns(request: AggregateRequest) -> bool:
    """Whether columns have all that is measured. Summaries made by others lie in records alone."""
    return all(measure.kind != "summary_parts" for measure in request.measures.values())


class ColumnAdder:
    """Adds chunks to groups. `trimmed` is the last entry that retention has taken."""

    def __init__(self, view: View, request: AggregateRequest, groups: Groups, trimmed: int) -> None:
        self._view = view
        self._request = request
        self._groups = groups
        self._trimmed = trimmed
        self._summaries = [
            (name, cast("str", measure.field))
            for name, measure in request.measures.items()
            if measure.kind == "summary"
        ]

    def add(self, chunk: Chunk) -> int:
        """Answers how many rows had to be looked at."""
        rows = rows_of(self._members(chunk))
        if not rows:
            return 0
        columns, request = chunk.columns, self._request
        times = columns[request.timestamp_field]
        time_of = _ranks(times)
        grouped = [(_ranks(columns[name]), self._texts(columns[name], name)) for name in request.group_by]
        summaries = [(name, _ranks(columns[field]), columns[field].terms) for name, field in self._summaries]
        includes = [request.measure_includes.get(name) for name in self._groups.counted]
        counted = [None if query is None else set(rows_of(chunk.match(query))) for query in includes]
        interval_ms = request.interval_ms
        for row in rows:
            at_ms = cast("int", times.terms[time_of(row)[0]])
            values = tuple([texts[found[0]] if (found := ranks(row)) else None for ranks, texts in grouped])
            group = self._groups.at((at_ms - at_ms % interval_ms, values))
            for index, included in enumerate(counted):
                if included is None or row in included:
                    group.counts[index] += 1
            for name, ranks, terms in summaries:
                if found := ranks(row):
                    numbers = group.waiting.setdefault(name, [])
                    numbers += [cast("Number", terms[rank]) for rank in found]
        self._groups.settle()
        return len(rows)

    def primary_max(self, chunk: Chunk) -> int | None:
        """The largest primary timestamp of the rows that are still there."""
        primary = self._view.primary
        if primary is None:
            return None
        if chunk.first > self._trimmed:
            bounds = chunk.bounds(primary)
            return None if bounds is None else cast("int", bounds[1])
        found = (chunk.edge(primary, row, True) for row in rows_of(chunk.after(self._trimmed)))
        return max((cast("int", value) for value in found if value is not None), default=None)

    def _members(self, chunk: Chunk) -> int:
        """The rows that contribute."""
        request, field = self._request, self._request.timestamp_field
        rows = chunk.within(field, ">=", request.from_ms) & chunk.within(field, "<", request.to_ms)
        rows &= ~chunk.columns[field].multiple
        if chunk.first <= self._trimmed:
            rows &= chunk.after(self._trimmed)
        for query in (request.query, request.include):
            if query is not None and rows:
                rows &= chunk.match(query)
        for name in request.rollup.dimensions:
            column = chunk.columns[name]
            for row in rows_of(rows & column.multiple):
                if len(set(column.ranks_of(row))) > 1:
                    rows &= ~(1 << row)
        return rows

    def _texts(self, column: Column, name: str) -> list[str]:
        """The terms of a dimension as groups are named."""
        terms = [column.terms[rank] for rank in range(len(column.terms))]
        if self._view.config.fields[name].kind == "bool":
            terms = [bool(term) for term in terms]  # columns have them as numbers
        return [text_of(term) for term in terms]


def _ranks(column: Column) -> Ranks:
    if column.starts is not None:
        return column.ranks_of
    ranks = column.ranks
    return lambda row: ranks[row : row + 1]
