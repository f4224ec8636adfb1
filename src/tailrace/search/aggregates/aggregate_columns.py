"""Aggregates from columns: those of the tail index, and those made of payloads that have to be scanned."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

from tailrace.schema.convert import value_text
from tailrace.search.aggregate_request import AggregateRequest
from tailrace.search.aggregates.aggregate import AggregateScan, Groups, Payload
from tailrace.search.aggregates.measures import Number, SummaryParts, summary_pointers
from tailrace.search.chunk import Chunk, build_columns
from tailrace.search.column import Column
from tailrace.search.index_files.format import MBLK_POINTERS
from tailrace.search.packed import rows_from_bits
from tailrace.search.scan import query_fields
from tailrace.search.values import Value
from tailrace.search.view import RecordDecoder, RecordView

ROWS_AT_ONCE = 1024  # between two looks at the clock
SummaryPartsLookup = Callable[[Sequence[int]], Sequence[SummaryParts | None]]  # of some entries


def columns_suffice(request: AggregateRequest) -> bool:
    """Whether columns have all that is measured. Summaries made by others lie in records alone."""
    return all(measure.kind != "summary_parts" for measure in request.measures.values())


def columns_and_blocks_suffice(request: AggregateRequest) -> bool:
    """Whether columns have it all together with blocks of metrics, in which summaries of one form are."""
    return all(
        measure.kind != "summary_parts" or summary_pointers(measure) == MBLK_POINTERS
        for measure in request.measures.values()
    )


class ColumnAggregator:
    """Adds chunks to groups. `trimmed` is the last entry that retention has taken."""

    def __init__(self, view: RecordView, request: AggregateRequest, groups: Groups, trimmed: int) -> None:
        self._view = view
        self._request = request
        self._groups = groups
        self._trimmed = trimmed
        self._summaries = [
            (name, cast("str", measure.field))
            for name, measure in request.measures.items()
            if measure.kind == "summary"
        ]
        self._parts = [name for name, one in request.measures.items() if one.kind == "summary_parts"]

    def add(self, chunk: Chunk, parts_of: SummaryPartsLookup | None = None) -> int:
        """Answers how many rows had to be looked at. `parts_of` has summaries that records bring along."""
        rows = rows_from_bits(self._members(chunk))
        if not rows:
            return 0
        columns, request = chunk.columns, self._request
        grouped = [self._texts(columns[name], name, rows) for name in request.group_by]
        found: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for key, row in zip(zip(self._windows(chunk, rows), *grouped, strict=True), rows, strict=True):
            found[key].append(row)
        includes = [request.measure_includes.get(name) for name in self._groups.counted]
        counted = [None if query is None else set(rows_from_bits(chunk.match(query))) for query in includes]
        summaries = [(name, _numbers(columns[field])) for name, field in self._summaries]
        brought: dict[int, SummaryParts | None] = {}
        if parts_of is not None:
            brought = dict(zip(rows, parts_of([chunk.entries[row] for row in rows]), strict=True))
        for (start_ms, *values), own in found.items():
            group = self._groups.at((start_ms, tuple(values)))
            for index, included in enumerate(counted):
                group.counts[index] += len(own) if included is None else sum(map(included.__contains__, own))
            for name, numbers_of in summaries:
                if numbers := numbers_of(own):
                    group.waiting.setdefault(name, []).extend(numbers)
            for name in self._parts if brought else ():
                found_parts = (brought[row] for row in own)
                group.parts += [(name, parts) for parts in found_parts if parts is not None]
        self._groups.settle()
        return len(rows)

    def _windows(self, chunk: Chunk, rows: Sequence[int]) -> list[int]:
        """The start of the window that each row lies in; all of them have exactly one time."""
        times = chunk.columns[self._request.timestamp_field]
        interval_ms = self._request.interval_ms
        starts = [at_ms - at_ms % interval_ms for at_ms in cast("Sequence[int]", times.terms.all())]
        return [starts[rank] for rank in _first_ranks(times, rows)]

    def primary_max(self, chunk: Chunk) -> int | None:
        """The largest primary timestamp of the rows that are still there."""
        primary = self._view.primary
        if primary is None:
            return None
        if chunk.first > self._trimmed:
            bounds = chunk.bounds(primary)
            return None if bounds is None else cast("int", bounds[1])
        found = (chunk.edge(primary, row, True) for row in rows_from_bits(chunk.after(self._trimmed)))
        return max((cast("int", value) for value in found if value is not None), default=None)

    def _members(self, chunk: Chunk) -> int:
        """The rows that contribute."""
        request, rows = self._request, self.within_time(chunk)
        for query in (request.query, request.include):
            if query is not None and rows:
                rows &= chunk.match(query)
        for name in request.rollup.dimensions:
            column = chunk.columns[name]
            for row in rows_from_bits(rows & column.multiple):
                if len(set(column.ranks_of(row))) > 1:
                    rows &= ~(1 << row)
        return rows

    def within_time(self, chunk: Chunk) -> int:
        """The rows that are still there, with one time, which lies within what is asked for."""
        request, field = self._request, self._request.timestamp_field
        bounds = cast("tuple[int, int] | None", chunk.bounds(field))
        if bounds is None or bounds[0] >= request.to_ms or bounds[1] < request.from_ms:
            return 0
        rows = chunk.columns[field].present & ~chunk.columns[field].multiple
        if bounds[0] < request.from_ms:
            rows &= chunk.within(field, ">=", request.from_ms)
        if bounds[1] >= request.to_ms:
            rows &= chunk.within(field, "<", request.to_ms)
        if chunk.first <= self._trimmed:
            rows &= chunk.after(self._trimmed)
        return rows

    def _texts(self, column: Column, name: str, rows: Sequence[int]) -> list[str | None]:
        """The value of a dimension in each row, as groups are named."""
        terms: Sequence[Value] = column.terms.all()
        if self._view.config.fields[name].kind == "bool":
            terms = [bool(term) for term in terms]  # columns have them as numbers
        texts: list[str | None] = [value_text(term) for term in terms]
        if column.starts is not None:
            texts.append(None)  # has the rank of those without a value
        return [texts[rank] for rank in _first_ranks(column, rows)]


class ColumnScanner:
    """Adds stored payloads to groups, by columns that are made of them for this purpose alone."""

    def __init__(self, view: RecordView, request: AggregateRequest, adder: ColumnAggregator) -> None:
        self._view = view
        self._request = request
        self._adder = adder
        times = {request.timestamp_field: None}
        if view.primary is not None:
            times[view.primary] = None
        measured = [cast("str", one.field) for one in request.measures.values() if one.kind == "summary"]
        queries = (request.query, request.include, *request.measure_includes.values())
        asked = [name for query in queries if query is not None for name in sorted(query_fields(query))]
        # Rows outside the time that is asked for are looked at for their times alone.
        self._narrow = RecordDecoder(view, list(times))
        self._wide = RecordDecoder(
            view, list(dict.fromkeys([*times, *request.rollup.dimensions, *measured, *asked]))
        )
        self._mostly_inside = True

    def scan(self, first: int, payloads: Sequence[Payload], deadline: float) -> AggregateScan:
        """Takes payloads of consecutive entries; answers how many before the deadline."""
        primaries: list[int] = []
        seen: list[int] = []
        decided = 0
        while decided < len(payloads) and time.monotonic() < deadline:
            batch = payloads[decided : decided + ROWS_AT_ONCE]
            chunk = self._add(range(first + decided, first + decided + len(batch)), batch)
            primary = self._adder.primary_max(chunk)
            primaries += () if primary is None else (primary,)
            seen += cast("tuple[int, int] | None", chunk.bounds(self._request.timestamp_field)) or ()
            decided += len(batch)
        return AggregateScan(decided, max(primaries, default=None), (min(seen), max(seen)) if seen else None)

    def _add(self, entries: Sequence[int], payloads: Sequence[Payload]) -> Chunk:
        """Answers the times of all of the payloads."""
        if self._mostly_inside:
            chunk = self._chunk(self._wide, entries, payloads)
            self._mostly_inside = self._adder.add(chunk) * 2 > len(entries)
            return chunk
        chunk = self._chunk(self._narrow, entries, payloads)
        inside = rows_from_bits(self._adder.within_time(chunk))
        if inside:
            some = [entries[row] for row in inside], [payloads[row] for row in inside]
            self._adder.add(self._chunk(self._wide, *some))
            self._mostly_inside = len(inside) * 2 > len(entries)
        return chunk

    def _chunk(self, decoder: RecordDecoder, entries: Sequence[int], payloads: Sequence[Payload]) -> Chunk:
        members = decoder.all_members(entries, payloads)
        return Chunk(entries, build_columns(self._view.config, decoder.gets, members, lists=False))


def _first_ranks(column: Column, rows: Sequence[int]) -> Sequence[int]:
    """The first rank of each row, or -1."""
    ranks, starts = column.ranks, column.starts
    if starts is None:
        return [ranks[row] for row in rows] if len(rows) < column.count else ranks
    return [ranks[at] if (at := starts[row]) < starts[row + 1] else -1 for row in rows]


def _numbers(column: Column) -> Callable[[Sequence[int]], list[Number]]:
    """All values that some rows have."""
    terms = cast("Sequence[Number]", column.terms.all())
    if column.starts is None:
        numbers = [terms[rank] for rank in column.ranks]
        return lambda rows: [numbers[row] for row in rows]
    return lambda rows: [terms[rank] for row in rows for rank in column.ranks_of(row)]
