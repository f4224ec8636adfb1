"""Conversion of measure states to the columns of `agg` index files, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from tailrace.search.aggregates.exact_sums import split_to_doubles
from tailrace.search.aggregates.measures import (
    EXACT_SUM_SCALE,
    Histogram,
    Number,
    Summary,
    decode_total,
    nearest_ratio,
)
from tailrace.search.aggregates.summary_arrays import (
    BucketArray,
    SummaryArray,
    concat_buckets,
    encode_sketch,
    sketch_from_buckets,
)
from tailrace.search.index_files.format import (
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
    encode_sum,
)
from tailrace.spark.index.arrays import DOUBLE, from_numpy, np, offsets_from_counts
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, pa

StateRow = tuple[object, ...]

BUCKETS_TYPE: Final = pa.map_(INT32, pa.field("value", INT64, nullable=False))
STATE_SCHEMA: Final = pa.schema(
    [
        pa.field(COUNT, INT64, nullable=False),
        pa.field(SUM, DOUBLE),
        pa.field(SUM_REST, DOUBLE),
        pa.field(SUM_EXACT, BINARY),
        pa.field(MIN, DOUBLE),
        pa.field(MAX, DOUBLE),
        pa.field(MIN_WHOLE, INT64),
        pa.field(MAX_WHOLE, INT64),
        pa.field(HISTOGRAM, BUCKETS_TYPE),
        pa.field(UNPLACED, INT64),
        pa.field(SKETCH, BUCKETS_TYPE),
    ]
)


# -- single states ---------------------------------------------------------------------------------------


def count_row(count: int) -> StateRow:
    return (count, *[None] * (len(STATE_SCHEMA) - 1))


def summary_row(summary: Summary) -> StateRow:
    """The values of a summary in the order of STATE_SCHEMA."""
    histogram = None
    if summary.histogram is not None:
        histogram = sorted(summary.histogram.counts.items())
    halves = split_to_doubles(summary.total)
    return (
        summary.count,
        *(halves or (nearest_ratio(summary.total, 1 << EXACT_SUM_SCALE), 0.0)),
        None if halves else encode_sum(summary.total),
        as_double(summary.smallest),
        as_double(summary.largest),
        as_whole(summary.smallest),
        as_whole(summary.largest),
        histogram,
        summary.unplaced,
        list(encode_sketch(summary.sketch).items()),
    )


def summary_from_row(row: Mapping[str, object]) -> Summary:
    """The inverse of `summary_row`. `whole` is not stored: it only affects how results are formatted."""
    histogram = row[HISTOGRAM]
    summary = Summary(histogram=histogram is not None, whole=False)
    summary.count = cast("int", row[COUNT])
    halves = cast("float", row[SUM]), cast("float", row[SUM_REST])
    summary.total = decode_total(*halves, cast("bytes | None", row[SUM_EXACT]))
    summary.smallest = _number(row[MIN], row[MIN_WHOLE])
    summary.largest = _number(row[MAX], row[MAX_WHOLE])
    summary.unplaced = cast("int", row[UNPLACED])
    if histogram is not None:
        summary.histogram = Histogram()
        summary.histogram.counts = dict(cast("list[tuple[int, int]]", histogram))
    summary.sketch = sketch_from_buckets(dict(cast("list[tuple[int, int]]", row[SKETCH])))
    return summary


def as_double(number: Number | None) -> float | None:
    return None if number is None else float(number)


def as_whole(number: Number | None) -> int | None:
    return number if isinstance(number, int) else None


def _number(double: object, whole: object) -> Number | None:
    return cast("Number | None", double if whole is None else whole)


# -- tables of states ------------------------------------------------------------------------------------


def state_table_from_rows(rows: Sequence[StateRow]) -> Any:
    columns = zip(*rows, strict=True) if rows else [()] * len(STATE_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, STATE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=STATE_SCHEMA)


def state_table_from_groups(measures: Sequence[Any], groups: int) -> Any:
    """One row per group and measure, ordered by group, as of `count_row` and `summary_row`.

    A measure is an array of counts or a SummaryArray.
    """
    summed = [(place, found) for place, found in enumerate(measures) if isinstance(found, SummaryArray)]
    rows = _GroupedColumns(len(measures), groups)
    counts = [found.counts if isinstance(found, SummaryArray) else found for found in measures]
    columns = [from_numpy(np.stack(counts, axis=1).astype(np.int64).reshape(-1), INT64)]
    nearest = [(place, _nearest_sums(found)) for place, found in summed]
    columns.append(rows.numbers(nearest, DOUBLE))
    columns.append(rows.numbers([(place, found.sums.rests) for place, found in summed], DOUBLE))
    columns.append(rows.exact_sums(summed))
    edges = [
        [(place, np.where(found.counts == 0, 0, found[edge]), found.counts == 0) for place, found in summed]
        for edge in _MIN_MAX_FIELDS
    ]
    whole = {place for place, found in summed if found.whole}
    columns += [rows.numbers(edge, DOUBLE) for edge in edges]
    columns += [rows.numbers([one for one in edge if one[0] in whole], INT64) for edge in edges]
    columns.append(
        rows.buckets([(place, found.histogram) for place, found in summed if found.histogram is not None])
    )
    columns.append(rows.numbers([(place, np.zeros(groups, np.int64)) for place, _ in summed], INT64))
    columns.append(rows.buckets([(place, found.sketch) for place, found in summed]))
    return pa.Table.from_arrays(columns, schema=STATE_SCHEMA)


_MIN_MAX_FIELDS: Final = (SummaryArray._fields.index("smallest"), SummaryArray._fields.index("largest"))


class _GroupedColumns:
    """Builds columns of rows ordered by group, from the values of single measures."""

    def __init__(self, size: int, groups: int) -> None:
        self._shape = groups, size

    def numbers(self, parts: Sequence[tuple[Any, ...]], kind: Any) -> Any:
        """A part is the index of a measure, its numbers and, optionally, a null mask."""
        if not parts:
            return pa.nulls(self._shape[0] * self._shape[1], kind)
        values = np.zeros(self._shape, np.float64 if kind == DOUBLE else np.int64)
        is_null = np.ones(self._shape, bool)
        for place, numbers, *missing in parts:
            values[:, place] = numbers
            is_null[:, place] = missing[0] if missing else False
        return pa.array(values.reshape(-1), kind, mask=is_null.reshape(-1))

    def exact_sums(self, summed: Sequence[tuple[int, SummaryArray]]) -> Any:
        groups, size = self._shape
        if not any(found.sums.beyond for _, found in summed):
            return pa.nulls(groups * size, BINARY)
        stored = list[bytes | None]([None] * (groups * size))
        for place, found in summed:
            for group, total in found.sums.beyond.items():
                stored[group * size + place] = encode_sum(total)
        return pa.array(stored, BINARY)

    def buckets(self, parts: Sequence[tuple[int, BucketArray]]) -> Any:
        groups, size = self._shape
        if not parts:
            return pa.nulls(groups * size, BUCKETS_TYPE)
        sizes = np.zeros(self._shape, np.int64)
        is_null = np.ones(self._shape, bool)
        for place, spread in parts:
            sizes[:, place] = np.diff(spread.starts)
            is_null[:, place] = False
        spread = parts[0][1]
        if len(parts) > 1:
            by_group = np.arange(groups * len(parts)).reshape(len(parts), groups).T.reshape(-1)
            spread = concat_buckets([part for _, part in parts]).take(by_group)
        return pa.MapArray.from_arrays(
            pa.array(offsets_from_counts(sizes.reshape(-1)).astype(np.int32), INT32),
            from_numpy(spread.codes.astype(np.int32), INT32),
            from_numpy(spread.counts, INT64),
            type=BUCKETS_TYPE,
            mask=pa.array(is_null.reshape(-1)),
        )


def _nearest_sums(found: SummaryArray) -> Any:
    if not found.sums.beyond:
        return found.sums.nearest
    nearest = found.sums.nearest.copy()
    for row, total in found.sums.beyond.items():
        nearest[row] = nearest_ratio(total, 1 << EXACT_SUM_SCALE)
    return nearest
