"""States of the rows of spans, made of whole columns: which rows count, in which group, and of what.

Rows are taken span by span, and added up when there are many: what numpy does to thousands of rows takes it
hardly longer than what it does to ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from tailrace.schema.convert import value_text
from tailrace.search.aggregate_request import AggregateRequest
from tailrace.search.aggregates.agg_states import SummaryMeasure
from tailrace.search.aggregates.keyed import DimensionValues, StatePiece, group_ids
from tailrace.search.aggregates.summaries import SummaryArray, build_number_array, summarise_by_group
from tailrace.search.bind import BoundQuery
from tailrace.search.index_files.field_column import ArrowColumn
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.index_files.source import SpanSource
from tailrace.search.numpy_arrays import np, row_array_from_bits, to_numpy

ROWS_AT_ONCE = 65_536


class SpanRows(NamedTuple):
    """Rows that count: the window of each, the codes of its dimensions, and what is measured of it."""

    windows: Any
    codes: list[Any]
    counted: dict[str, Any]  # by measure, which rows count; None for all
    measured: dict[str, tuple[Any, Any]]  # by measure, numbers and the row of each

    @property
    def size(self) -> int:
        return len(self.windows)


def read_span_rows(
    source: SpanSource,
    request: AggregateRequest,
    counted: Sequence[str],
    measured: Sequence[SummaryMeasure],
    texts: Sequence[DimensionValues],
) -> Iterator[SpanRows]:
    """The rows of a span, some at a time. Its columns are read before the first of them come."""
    inside = _contributing_rows(source, request)
    count = source.rows.count
    queries = [request.measure_includes.get(name) for name in counted]
    included = [None if query is None else _matching_rows(source, query) for query in queries]
    rows = row_array_from_bits(inside, count)
    marks = [None if bits is None else _mask_from_bits(bits, count) for bits in included]
    for name in {*request.group_by, *(cast("str", request.measures[one.name].field) for one in measured)}:
        source.column(name)
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[begin : begin + ROWS_AT_ONCE]
        yield _take_rows(source, request, some, dict(zip(counted, marks, strict=True)), measured, texts)


def build_piece(parts: Sequence[SpanRows], measured: Sequence[SummaryMeasure]) -> StatePiece:
    """The states of all groups that some rows are of."""
    rows = _concat_rows(parts)
    _, leads, group_of = np.unique(
        group_ids([rows.windows, *rows.codes], rows.size), return_index=True, return_inverse=True
    )
    groups = len(leads)
    summaries: dict[str, SummaryArray] = {}
    for one in measured:
        values, of = rows.measured[one.name]
        summaries[one.name] = summarise_by_group(
            build_number_array(values, histogram=one.histogram), group_of[of], groups
        )
    return StatePiece(
        rows.windows[leads],
        [column[leads] for column in rows.codes],
        {
            name: np.bincount(group_of if marks is None else group_of[marks], minlength=groups)
            for name, marks in rows.counted.items()
        },
        summaries,
    )


def _concat_rows(parts: Sequence[SpanRows]) -> SpanRows:
    """One behind the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    begins = np.cumsum([0, *(part.size for part in parts)])
    return SpanRows(
        np.concatenate([part.windows for part in parts]),
        [np.concatenate([part.codes[place] for part in parts]) for place in range(len(first.codes))],
        {
            name: None if marks is None else np.concatenate([part.counted[name] for part in parts])
            for name, marks in first.counted.items()
        },
        {
            name: (
                np.concatenate([part.measured[name][0] for part in parts]),
                np.concatenate(
                    [part.measured[name][1] + begin for part, begin in zip(parts, begins[:-1], strict=True)]
                ),
            )
            for name in first.measured
        },
    )


def _contributing_rows(source: SpanSource, request: AggregateRequest) -> int:
    """The set of the rows that contribute."""
    field = request.timestamp_field
    rows = source.within(field, ">=", request.from_ms) & source.within(field, "<", request.to_ms)
    rows &= ~source.several(field)
    for query in (request.query, request.include):
        if query is not None and rows:
            rows &= _matching_rows(source, query)
    for name in request.rollup.dimensions:
        several = rows & source.several(name)
        if several:
            rows &= ~_ambiguous_rows(source, name, several)
    return rows


def _matching_rows(source: SpanSource, query: BoundQuery) -> int:
    verdict = source.judge(query)
    if not verdict.is_final:
        raise UnusableFileError("its columns leave a row in doubt")
    return verdict.sure


def _ambiguous_rows(source: SpanSource, name: str, several: int) -> int:
    """Of rows with several values those that have two different ones."""
    column, shift = source.column(name)
    found = 0
    for row in row_array_from_bits(several, source.rows.count).tolist():
        if len(set(column.values(row + shift))) > 1:
            found |= 1 << row
    return found


def _mask_from_bits(bits: int, count: int) -> Any:
    marks = np.zeros(count, bool)
    marks[row_array_from_bits(bits, count)] = True
    return marks


def _take_rows(
    source: SpanSource,
    request: AggregateRequest,
    rows: Any,
    counted: dict[str, Any],
    measured: Sequence[SummaryMeasure],
    texts: Sequence[DimensionValues],
) -> SpanRows:
    times, shift = source.column(request.timestamp_field)
    at_ms = to_numpy(times.flat_at(rows + shift)[0])
    numbers: dict[str, tuple[Any, Any]] = {}
    for one in measured:
        column, shift = source.column(cast("str", request.measures[one.name].field))
        values, of = column.flat_at(rows + shift)
        numbers[one.name] = to_numpy(values), of
    return SpanRows(
        at_ms - at_ms % request.interval_ms,
        [_codes(source, name, rows, known) for name, known in zip(request.group_by, texts, strict=True)],
        {name: None if marks is None else marks[rows] for name, marks in counted.items()},
        numbers,
    )


def _codes(source: SpanSource, name: str, rows: Any, known: DimensionValues) -> Any:
    """The code of the value of each row; all values of a row are the same."""
    column, shift = source.column(name)
    values, of = column.flat_at(rows + shift)
    found, which = _distinct_texts(column, values)
    if len(of) == len(rows) and len(values) == len(rows):
        return known.coded(found)[which]
    codes = np.full(len(rows), known.coded([None])[0])
    codes[of] = known.coded(found)[which]
    return codes


def _distinct_texts(column: ArrowColumn, values: Any) -> tuple[list[str], Any]:
    """The texts of different values, and which of them each value has."""
    if column.words is not None:
        places, which = np.unique(to_numpy(values), return_inverse=True)
        return [column.words[place].as_py() for place in places.tolist()], which
    encoded = values.dictionary_encode()
    return [value_text(value) for value in encoded.dictionary.to_pylist()], to_numpy(encoded.indices)
