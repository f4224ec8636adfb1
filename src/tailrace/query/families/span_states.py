"""States of the rows of a span, made of whole columns: which rows count, in which group, and of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from tailrace.query.aggregate_request import AggregateRequest
from tailrace.query.bind import Bound
from tailrace.query.families.agg_states import Measured
from tailrace.query.families.field_column import FieldColumn
from tailrace.query.families.numbers import np, numbers_in, rows_in
from tailrace.query.families.published import UnusableFileError
from tailrace.query.families.source import SpanSource
from tailrace.query.states.keyed import Piece, Texts, group_ids
from tailrace.query.states.summaries import Summaries, numbers_from, summaries_of
from tailrace.schema.convert import text_of

ROWS_AT_ONCE = 65_536


def pieces_of(
    source: SpanSource,
    request: AggregateRequest,
    counted: Sequence[str],
    measured: Sequence[Measured],
    texts: Sequence[Texts],
) -> Iterator[Piece]:
    """The states of a span's rows. Its columns are read before the first of them is made."""
    inside = _inside(source, request)
    count = source.rows.count
    queries = [request.measure_includes.get(name) for name in counted]
    included = [None if query is None else _matching(source, query) for query in queries]
    rows = rows_in(inside, count)
    marks = [None if bits is None else _marked(bits, count) for bits in included]
    for name in {*request.group_by, *(cast("str", request.measures[one.name].field) for one in measured)}:
        source.column(name)
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[begin : begin + ROWS_AT_ONCE]
        yield _piece(source, request, some, dict(zip(counted, marks, strict=True)), measured, texts)


def _inside(source: SpanSource, request: AggregateRequest) -> int:
    """The set of the rows that contribute."""
    field = request.timestamp_field
    rows = source.within(field, ">=", request.from_ms) & source.within(field, "<", request.to_ms)
    rows &= ~source.several(field)
    for query in (request.query, request.include):
        if query is not None and rows:
            rows &= _matching(source, query)
    for name in request.rollup.dimensions:
        several = rows & source.several(name)
        if several:
            rows &= ~_different(source, name, several)
    return rows


def _matching(source: SpanSource, query: Bound) -> int:
    verdict = source.judge(query)
    if not verdict.is_final:
        raise UnusableFileError("its columns leave a row in doubt")
    return verdict.sure


def _different(source: SpanSource, name: str, several: int) -> int:
    """Of rows with several values those that have two different ones."""
    column, shift = source.column(name)
    found = 0
    for row in rows_in(several, source.rows.count).tolist():
        if len(set(column.values(row + shift))) > 1:
            found |= 1 << row
    return found


def _marked(bits: int, count: int) -> Any:
    marks = np.zeros(count, bool)
    marks[rows_in(bits, count)] = True
    return marks


def _piece(
    source: SpanSource,
    request: AggregateRequest,
    rows: Any,
    counted: dict[str, Any],
    measured: Sequence[Measured],
    texts: Sequence[Texts],
) -> Piece:
    times, shift = source.column(request.timestamp_field)
    at_ms = numbers_in(times.flat_at(rows + shift)[0])
    windows = at_ms - at_ms % request.interval_ms
    codes = [_codes(source, name, rows, known) for name, known in zip(request.group_by, texts, strict=True)]
    _, leads, group_of = np.unique(
        group_ids([windows, *codes], len(rows)), return_index=True, return_inverse=True
    )
    groups = len(leads)
    return Piece(
        windows[leads],
        [column[leads] for column in codes],
        {
            name: np.bincount(group_of if marks is None else group_of[marks[rows]], minlength=groups)
            for name, marks in counted.items()
        },
        {one.name: _summaries(source, request, rows, one, group_of, groups) for one in measured},
    )


def _codes(source: SpanSource, name: str, rows: Any, known: Texts) -> Any:
    """The code of the value of each row; all values of a row are the same."""
    column, shift = source.column(name)
    values, of = column.flat_at(rows + shift)
    found, which = _distinct(column, values)
    if len(of) == len(rows) and len(values) == len(rows):
        return known.coded(found)[which]
    codes = np.full(len(rows), known.coded([None])[0])
    codes[of] = known.coded(found)[which]
    return codes


def _distinct(column: FieldColumn, values: Any) -> tuple[list[str], Any]:
    """The texts of different values, and which of them each value has."""
    if column.words is not None:
        places, which = np.unique(numbers_in(values), return_inverse=True)
        return [column.words[place].as_py() for place in places.tolist()], which
    encoded = values.dictionary_encode()
    return [text_of(value) for value in encoded.dictionary.to_pylist()], numbers_in(encoded.indices)


def _summaries(
    source: SpanSource, request: AggregateRequest, rows: Any, one: Measured, group_of: Any, groups: int
) -> Summaries:
    column, shift = source.column(cast("str", request.measures[one.name].field))
    values, of = column.flat_at(rows + shift)
    return summaries_of(numbers_from(numbers_in(values), histogram=one.histogram), group_of[of], groups)
