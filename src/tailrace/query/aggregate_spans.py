"""The part of an aggregate that asks built indexes: windows from rollups, and rows from columns.

A window that lies wholly within what is asked for is taken as it was built. What is left of a range of
entries, the edges of the time that is asked for, is added up from its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from tailrace.query.aggregate import Groups
from tailrace.query.aggregate_request import AggregateRequest
from tailrace.query.bind import All, Bound, Equals
from tailrace.query.chunk import Chunk
from tailrace.query.column_build import column_from
from tailrace.query.families.span import Served, Span
from tailrace.query.family_format import COL
from tailrace.query.scan import fields_in
from tailrace.query.view import View
from tailrace.schema.convert import text_of

if TYPE_CHECKING:
    from tailrace.query.families.agg_file import AggFile
    from tailrace.query.families.source import SpanSource


class Built(NamedTuple):
    """A range of entries that a file of rollups speaks for."""

    first: int
    last: int
    served: Served
    primary_max: int | None


class Window(NamedTuple):
    """A stretch of time, the end not in it."""

    from_ms: int
    to_ms: int


def whole_windows(request: AggregateRequest) -> Window:
    """The time that whole windows make up; it may be empty."""
    interval_ms = request.interval_ms
    begin = -(-request.from_ms // interval_ms) * interval_ms
    return Window(begin, max(begin, request.to_ms // interval_ms * interval_ms))


def edges(request: AggregateRequest) -> list[Window]:
    """The time that is asked for and lies in no whole window."""
    whole = whole_windows(request)
    if whole.from_ms >= whole.to_ms:
        return [Window(request.from_ms, request.to_ms)]
    found = [Window(request.from_ms, whole.from_ms), Window(whole.to_ms, request.to_ms)]
    return [window for window in found if window.from_ms < window.to_ms]


def wanted_dimensions(request: AggregateRequest) -> dict[str, str] | None:
    """The dimensions that the query wants to have some value; None if it asks for something else."""
    found: dict[str, str] = {}
    for clause in _conjuncts(request.query):
        if not isinstance(clause, Equals) or clause.field not in request.rollup.dimensions:
            return None
        text = text_of(clause.value)
        if found.setdefault(clause.field, text) != text:
            return None  # no group is of both; rows say so, too
    return found


def _conjuncts(query: Bound | None) -> list[Bound]:
    match query:
        case None:
            return []
        case All(clauses):
            return [found for clause in clauses for found in _conjuncts(clause)]
        case _:
            return [query]


def built_ranges(
    rollups: Sequence[Served],
    spans: Sequence[Span],
    request: AggregateRequest,
    view: View,
    after: int,
    last: int,
) -> list[Built]:
    """The ranges that are taken from rollups, in order, without overlaps; all of their entries are shown."""
    if wanted_dimensions(request) is None:
        return []
    found: list[Built] = []
    at = after + 1
    for served in rollups:
        companion = served.companion
        if request.rollup_name not in served.names or companion.first < at or companion.last > last:
            continue
        primary = _primary_max(spans, companion.first, companion.last) if view.primary is not None else None
        if view.primary is not None and primary is None:
            continue  # how far its times reach is part of the answer
        found.append(Built(companion.first, companion.last, served, primary))
        at = companion.last + 1
    return found


def _primary_max(spans: Sequence[Span], first: int, last: int) -> int | None:
    """The largest primary timestamp of a range; None if that is not known of all of it."""
    largest: int | None = None
    at = first
    for span in spans:
        if span.last < at or span.first > last:
            continue
        if span.first > at or span.primary is None:
            return None
        largest = span.primary[1] if largest is None else max(largest, span.primary[1])
        at = span.last + 1
    return largest if at > last else None


def add_states(file: AggFile, request: AggregateRequest, groups: Groups) -> int:
    """Adds the whole windows of a file to groups; answers how many states that were."""
    window, wanted = whole_windows(request), wanted_dimensions(request)
    assert wanted is not None
    dimensions = request.rollup.dimensions
    places = [dimensions.index(name) for name in request.group_by]
    asked = [(dimensions.index(name), text) for name, text in wanted.items()]
    counted = {name: index for index, name in enumerate(groups.counted)}
    # All of the file first: if something in it is broken, nothing of it must have been added.
    found = [
        (
            state,
            None if state.measure in counted or state.measure not in request.measures else state.summary(),
        )
        for state in file.states(request.rollup_name, request.interval_ms, *window)
        if all(state.dimensions[place] == text for place, text in asked)
    ]
    for state, summary in found:
        key = (state.start_ms, tuple([state.dimensions[place] for place in places]))
        if summary is not None:
            groups.merge(key, state.measure, summary)
            continue
        group = groups.at(key)
        if state.measure in counted:
            group.counts[counted[state.measure]] += state.size
    groups.settle()
    return len(found)


def edges_in(file: AggFile, request: AggregateRequest) -> list[Window]:
    """The edges in which the file has anything at all."""
    interval_ms = request.interval_ms
    return [
        window
        for window in edges(request)
        if any(
            file.has_window(request.rollup_name, interval_ms, start_ms)
            for start_ms in _starts(window, interval_ms)
        )
    ]


def _starts(window: Window, interval_ms: int) -> list[int]:
    """The windows that an edge is part of: one, or two where no whole one lies between."""
    first = window.from_ms // interval_ms * interval_ms
    last = (window.to_ms - 1) // interval_ms * interval_ms
    return [first] if first == last else [first, last]


# -- rows from columns -----------------------------------------------------------------------------------


def columns_wanted(view: View, request: AggregateRequest) -> list[str]:
    """The fields whose values decide which records count, and what is measured of them."""
    queries = (request.query, request.include, *request.measure_includes.values())
    asked = {name for query in queries if query is not None for name in fields_in(query)}
    measured = {cast("str", one.field) for one in request.measures.values() if one.kind == "summary"}
    primary = set[str]() if view.primary is None else {view.primary}
    return sorted({request.timestamp_field, *request.rollup.dimensions, *measured, *asked, *primary})


def files_for_rows(span: Span, wanted: Sequence[str]) -> dict[str, Served] | None:
    """The files that have all these columns; None if some have to be decoded."""
    found: dict[str, Served] = {}
    for name in wanted:
        served = span.serving(COL, name)
        if served is None:
            return None
        found[served.published.key] = served
    return found


def reaches(span: Span, view: View, request: AggregateRequest) -> bool:
    """Whether a row of a span may have a time that is asked for."""
    if request.timestamp_field != view.primary or span.primary is None:
        return True
    return span.primary[0] < request.to_ms and span.primary[1] >= request.from_ms


def chunk_of_span(source: SpanSource, view: View, wanted: Sequence[str]) -> Chunk:
    """The rows of a span as a chunk, with nothing but these fields."""
    fields = view.config.fields
    columns = {name: column_from(fields[name], source.leaves(name), lists=False) for name in wanted}
    return Chunk(source.entries, columns)
