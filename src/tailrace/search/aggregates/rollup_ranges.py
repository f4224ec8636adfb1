"""The part of an aggregate that uses index files: whole windows from rollup files, single rows from columns.

A window within the requested time is used as stored. Partial windows at the bounds of the requested time are
summed from their rows.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from tailrace.schema.lenses import value_text
from tailrace.search.aggregates.groups import Groups, aggregate_timeout
from tailrace.search.chunks import Chunk
from tailrace.search.columns import build_column
from tailrace.search.index_files.format import COL, MBLK, partial_rollup_name
from tailrace.search.index_files.spans import IndexSpan, UsableFile
from tailrace.search.query_language import All, BoundQuery, Equals
from tailrace.search.records import RecordView
from tailrace.search.requests import AggregateRequest
from tailrace.search.scan import query_fields

if TYPE_CHECKING:
    from tailrace.search.index_files.rollup_files import RollupFile, RollupSelection
    from tailrace.search.index_files.span_source import SpanSource

ROWS_AT_ONCE = 8192  # rows of a span that are objects at the same time; a span may have a million


class RollupRange(NamedTuple):
    """A range of entries that a rollup file covers."""

    first: int
    last: int
    served: UsableFile
    primary_max: int | None


class TimeWindow(NamedTuple):
    """A half-open interval of time."""

    from_ms: int
    to_ms: int


def whole_windows(request: AggregateRequest) -> TimeWindow:
    """The requested time in whole windows; it may be empty."""
    interval_ms = request.interval_ms
    begin = -(-request.from_ms // interval_ms) * interval_ms
    return TimeWindow(begin, max(begin, request.to_ms // interval_ms * interval_ms))


def partial_windows(request: AggregateRequest) -> list[TimeWindow]:
    """The requested time outside of whole windows."""
    whole = whole_windows(request)
    if whole.from_ms >= whole.to_ms:
        return [TimeWindow(request.from_ms, request.to_ms)]
    found = [TimeWindow(request.from_ms, whole.from_ms), TimeWindow(whole.to_ms, request.to_ms)]
    return [window for window in found if window.from_ms < window.to_ms]


def fixed_dimensions(request: AggregateRequest) -> dict[str, str] | None:
    """The dimensions that the query fixes to a value; None if it has other clauses."""
    found: dict[str, str] = {}
    for clause in _conjuncts(request.query):
        if not isinstance(clause, Equals) or clause.field not in request.rollup.dimensions:
            return None
        text = value_text(clause.value)
        if found.setdefault(clause.field, text) != text:
            return None  # contradictory: decided by rows
    return found


def _conjuncts(query: BoundQuery | None) -> list[BoundQuery]:
    match query:
        case None:
            return []
        case All(clauses):
            return [found for clause in clauses for found in _conjuncts(clause)]
        case _:
            return [query]


def select_rollup_ranges(
    rollups: Sequence[UsableFile],
    spans: Sequence[IndexSpan],
    request: AggregateRequest,
    view: RecordView,
    after: int,
    last: int,
) -> list[RollupRange]:
    """The visible ranges to read from rollup files, in order and without overlaps."""
    if fixed_dimensions(request) is None:
        return []
    found: list[RollupRange] = []
    at = after + 1
    for served in rollups:
        index_file = served.index_file
        if request.rollup_name not in served.names or index_file.first < at or index_file.last > last:
            continue
        primary = _primary_max(spans, index_file.first, index_file.last) if view.primary is not None else None
        if view.primary is not None and primary is None:
            continue  # the response includes the largest timestamp
        found.append(RollupRange(index_file.first, index_file.last, served, primary))
        at = index_file.last + 1
    return found


def _primary_max(spans: Sequence[IndexSpan], first: int, last: int) -> int | None:
    """The largest primary timestamp of a range; None if not known of all of it."""
    largest: int | None = None
    at = first
    for place in range(bisect_left(spans, first, key=lambda span: span.last), len(spans)):
        span = spans[place]
        if span.first > last:
            break
        if span.first > at or span.primary is None:
            return None
        largest = span.primary[1] if largest is None else max(largest, span.primary[1])
        at = span.last + 1
    return largest if at > last else None


def add_rollup_states(file: RollupFile, request: AggregateRequest, groups: Groups, deadline: float) -> int:
    """Add the whole windows of a file to groups. Returns the number of states."""
    counted = {name: index for index, name in enumerate(groups.counted)}
    # The whole file first: nothing of a damaged file may be added.
    found, states = groups.empty_copy(), 0
    for part in file.parts(rollup_selection(request)):
        if time.monotonic() >= deadline:
            raise aggregate_timeout()
        states += part.states
        for key, measure, size in part.counts:
            group = found.at(key)
            if measure in counted:
                group.counts[counted[measure]] += size
        for key, measure, numbers in part.numbers:
            found.at(key).waiting.setdefault(measure, []).extend(numbers)
        for key, measure, summary in part.summaries:
            found.merge(key, measure, summary)
        found.flush_pending()
    groups.merge_all(found)
    return states


def rollup_selection(request: AggregateRequest) -> RollupSelection:
    from tailrace.search.index_files.rollup_files import RollupSelection  # imports Arrow, which is large

    having = fixed_dimensions(request)
    assert having is not None
    name, dimensions = _fewest_dimensions(request, {*request.group_by, *having})
    kinds = {name: measure.kind for name, measure in request.measures.items()}
    return RollupSelection(
        name,
        request.interval_ms,
        *whole_windows(request),
        [dimensions.index(name) for name in request.group_by],
        [(dimensions.index(name), text) for name, text in having.items()],
        [name for name, kind in kinds.items() if kind == "summary"],
        [name for name, kind in kinds.items() if kind == "summary_parts"],
        sorted(request.rollup.measures),
    )


def _fewest_dimensions(request: AggregateRequest, wanted: set[str]) -> tuple[str, tuple[str, ...]]:
    """The stored rollup with the fewest dimensions that has the wanted ones, and its dimensions."""
    dimensions = request.rollup.dimensions
    kept = tuple(name for name in dimensions if name in wanted)
    if len(kept) > 1 or len(kept) == len(dimensions):
        return request.rollup_name, dimensions
    return partial_rollup_name(request.rollup_name, [dimensions.index(name) for name in kept]), kept


def partial_windows_in(file: RollupFile, request: AggregateRequest) -> list[TimeWindow]:
    """The partial windows in which the file has any record."""
    interval_ms = request.interval_ms
    return [
        window
        for window in partial_windows(request)
        if any(
            file.has_window(request.rollup_name, interval_ms, start_ms)
            for start_ms in _window_starts(window, interval_ms)
        )
    ]


def _window_starts(window: TimeWindow, interval_ms: int) -> list[int]:
    """The starts of the stored windows that contain a partial one: one or two."""
    first = window.from_ms // interval_ms * interval_ms
    last = (window.to_ms - 1) // interval_ms * interval_ms
    return [first] if first == last else [first, last]


# -- rows from columns -----------------------------------------------------------------------------------


def required_columns(view: RecordView, request: AggregateRequest) -> list[str]:
    """The fields that select, group and measure records."""
    queries = (request.query, request.include, *request.measure_includes.values())
    asked = {name for query in queries if query is not None for name in query_fields(query)}
    measured = {cast("str", one.field) for one in request.measures.values() if one.kind == "summary"}
    primary = set[str]() if view.primary is None else {view.primary}
    return sorted({request.timestamp_field, *request.rollup.dimensions, *measured, *asked, *primary})


def files_for_rows(span: IndexSpan, wanted: Sequence[str], *, blocks: bool) -> dict[str, UsableFile] | None:
    """The files with all these columns and the metric blocks; None if a column has no file."""
    found: dict[str, UsableFile] = {}
    for family, name in [*((COL, name) for name in wanted), *([(MBLK, MBLK)] if blocks else [])]:
        served = span.serving(family, name)
        if served is None:
            return None
        found[served.published.key] = served
    return found


def may_overlap(span: IndexSpan, view: RecordView, request: AggregateRequest) -> bool:
    """Whether a row of a span may lie in the requested time."""
    if request.timestamp_field != view.primary or span.primary is None:
        return True
    return span.primary[0] < request.to_ms and span.primary[1] >= request.from_ms


def span_chunks(
    source: SpanSource, view: RecordView, request: AggregateRequest, wanted: Sequence[str]
) -> Iterator[Chunk]:
    """The rows of a span that may lie in the requested time, as chunks of these fields only.

    All columns are read before the first chunk, so that a damaged file adds nothing.
    """
    fields, field = view.config.fields, request.timestamp_field
    for name in wanted:
        source.rows_without(name)
    inside = source.rows_in_range(field, ">=", request.from_ms) & source.rows_in_range(
        field, "<", request.to_ms
    )
    for begin in range(0, source.rows.count, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, source.rows.count)
        if inside >> begin & ((1 << (end - begin)) - 1):
            leaves = {name: source.leaves(name, begin, end) for name in wanted}
            columns = {name: build_column(fields[name], found, lists=False) for name, found in leaves.items()}
            yield Chunk(source.entries[begin:end], columns)
