"""States of measures as the columns of `agg`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from tailrace.pipeline.kernels.arrays import BINARY, DOUBLE, INT32, INT64, from_numpy, np, pa
from tailrace.query.family_format import (
    COUNT,
    HISTOGRAM,
    MAX,
    MAX_WHOLE,
    MIN,
    MIN_WHOLE,
    SKETCH,
    SUM,
    SUM_EXACT,
    SUM_REST,
    UNPLACED,
    stored_sum,
)
from tailrace.query.measures import SCALE, Histogram, Number, Summary, nearest_ratio, total_of
from tailrace.query.states.exact_sums import halves_of
from tailrace.query.states.spread import Spread, coded, sketch_from
from tailrace.query.states.summaries import Summaries

Row = tuple[object, ...]

BUCKETS: Final = pa.map_(INT32, pa.field("value", INT64, nullable=False))
SCHEMA: Final = pa.schema(
    [
        pa.field(COUNT, INT64, nullable=False),
        pa.field(SUM, DOUBLE),
        pa.field(SUM_REST, DOUBLE),
        pa.field(SUM_EXACT, BINARY),
        pa.field(MIN, DOUBLE),
        pa.field(MAX, DOUBLE),
        pa.field(MIN_WHOLE, INT64),
        pa.field(MAX_WHOLE, INT64),
        pa.field(HISTOGRAM, BUCKETS),
        pa.field(UNPLACED, INT64),
        pa.field(SKETCH, BUCKETS),
    ]
)


# -- one by one ------------------------------------------------------------------------------------------


def count_row(count: int) -> Row:
    return (count, *[None] * (len(SCHEMA) - 1))


def summary_row(summary: Summary) -> Row:
    """Count, sum, the edges, the histogram and the sketch, in the order of the file."""
    histogram = None
    if summary.histogram is not None:
        histogram = sorted(summary.histogram.counts.items())
    halves = halves_of(summary.total)
    return (
        summary.count,
        *(halves or (nearest_ratio(summary.total, 1 << SCALE), 0.0)),
        None if halves else stored_sum(summary.total),
        as_double(summary.smallest),
        as_double(summary.largest),
        as_whole(summary.smallest),
        as_whole(summary.largest),
        histogram,
        summary.unplaced,
        list(coded(summary.sketch).items()),
    )


def summary_of(row: Mapping[str, object]) -> Summary:
    """The state that a row was made of. `whole` is for the caller: it only matters for what is shown."""
    histogram = row[HISTOGRAM]
    summary = Summary(histogram=histogram is not None, whole=False)
    summary.count = cast("int", row[COUNT])
    halves = cast("float", row[SUM]), cast("float", row[SUM_REST])
    summary.total = total_of(*halves, cast("bytes | None", row[SUM_EXACT]))
    summary.smallest = _number(row[MIN], row[MIN_WHOLE])
    summary.largest = _number(row[MAX], row[MAX_WHOLE])
    summary.unplaced = cast("int", row[UNPLACED])
    if histogram is not None:
        summary.histogram = Histogram()
        summary.histogram.counts = dict(cast("list[tuple[int, int]]", histogram))
    summary.sketch = sketch_from(dict(cast("list[tuple[int, int]]", row[SKETCH])))
    return summary


def as_double(number: Number | None) -> float | None:
    return None if number is None else float(number)


def as_whole(number: Number | None) -> int | None:
    return number if isinstance(number, int) else None


def _number(double: object, whole: object) -> Number | None:
    return cast("Number | None", double if whole is None else whole)


# -- many at a time --------------------------------------------------------------------------------------


def table_of_rows(rows: Sequence[Row]) -> Any:
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def table_of_counts(counts: Any) -> Any:
    columns = [from_numpy(counts.astype(np.int64), INT64)]
    columns += [pa.nulls(len(counts), field.type) for field in list(SCHEMA)[1:]]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def table_of_summaries(found: Summaries) -> Any:
    """What `summary_row` makes of each of them."""
    size, sums = len(found.counts), found.sums
    nearest, exact = sums.nearest, pa.nulls(size, BINARY)
    if sums.beyond:
        nearest, stored = nearest.copy(), list[bytes | None]([None] * size)
        for row, total in sums.beyond.items():
            nearest[row], stored[row] = nearest_ratio(total, 1 << SCALE), stored_sum(total)
        exact = pa.array(stored, BINARY)
    is_empty = found.counts == 0
    edges = [np.where(is_empty, 0, edge) for edge in (found.smallest, found.largest)]
    doubles = [pa.array(edge.astype(np.float64), DOUBLE, mask=is_empty) for edge in edges]
    wholes = [pa.nulls(size, INT64)] * 2
    if found.whole:
        wholes = [pa.array(edge, INT64, mask=is_empty) for edge in edges]
    histogram = pa.nulls(size, BUCKETS) if found.histogram is None else _buckets(found.histogram)
    columns = [from_numpy(found.counts, INT64), from_numpy(nearest, DOUBLE), from_numpy(sums.rests, DOUBLE)]
    columns += [exact, *doubles, *wholes, histogram, from_numpy(np.zeros(size, np.int64), INT64)]
    return pa.Table.from_arrays([*columns, _buckets(found.sketch)], schema=SCHEMA)


def _buckets(spread: Spread) -> Any:
    codes, counts = from_numpy(spread.codes.astype(np.int32), INT32), from_numpy(spread.counts, INT64)
    starts = pa.array(spread.starts.astype(np.int32), INT32)
    return pa.MapArray.from_arrays(starts, codes, counts, type=BUCKETS)
