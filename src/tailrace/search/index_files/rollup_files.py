"""The `agg` and `mblk` index files: stored rollup states and blocks of metric summaries.

An `agg` file has a state for every window and every combination of all dimensions, many more than a request
needs. So a row group is summed by the requested dimensions in Arrow, and only the results become objects. An
`mblk` file has the summaries that metric records carry, by entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, cast

from tailrace.search.aggregates.keyed_states import StateCache
from tailrace.search.aggregates.measures import (
    Histogram,
    Number,
    Summary,
    SummaryParts,
    decode_sketch,
    decode_total,
)
from tailrace.search.aggregates.summary_arrays import sketch_from_buckets
from tailrace.search.index_files import format as names
from tailrace.search.index_files.file_cache import UnusableFileError
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.numpy_arrays import np, to_numpy
from tailrace.storage.segments.parquet import INT64, pa, pc

# The columns that select states, and all of a state of one number.
_KEYS = (names.WINDOW_START, names.DIMENSIONS, names.MEASURE, names.COUNT)
_LIGHT = (*_KEYS, names.MIN, names.MIN_WHOLE)
_WHOSE = (names.ROLLUP, names.INTERVAL_MS)  # the same in nearly every row of a row group
_HEAVY = (
    *(names.SUM, names.SUM_REST, names.SUM_EXACT, names.MAX, names.MAX_WHOLE),
    *(names.HISTOGRAM, names.UNPLACED, names.SKETCH),
)

# Cached states of a file: as many bytes as the file has, but at least these.
STATE_CACHE_BYTES_MIN: Final = 1 << 20

GroupKey = tuple[int, tuple[str | None, ...]]  # start of the window, and values of some dimensions


class RollupSelection(NamedTuple):
    """The states an aggregate needs: of windows that begin at or after `from_ms` and before `to_ms`."""

    rollup: str
    interval_ms: int
    from_ms: int
    to_ms: int
    grouped: Sequence[int] = ()  # positions of the dimensions to group by
    having: Sequence[tuple[int, str]] = ()  # positions of dimensions, and their required values
    numbers: Sequence[str] = ()  # measures of numbers: a state of one number is the number
    others: Sequence[str] = ()  # measures whose states are always merged
    measures: Sequence[str] = ()  # all measures of the rollup by name


class RollupPart(NamedTuple):
    """The selected states of one row group. `counts` has every group and every measure."""

    states: int
    counts: list[tuple[GroupKey, str, int]]
    numbers: list[tuple[GroupKey, str, list[Number]]]
    summaries: list[tuple[GroupKey, str, Summary]]


class RollupFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self.kept = StateCache(max(file.size, STATE_CACHE_BYTES_MIN))

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + self.kept.nbytes

    # -- states as arrays ----------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """The number of row groups."""
        return self._file.groups

    def groups_for(self, wanted: RollupSelection) -> list[int]:
        """Row groups that may have selected states."""
        return [group for group in range(self._file.groups) if self._may_have(group, wanted)]

    def read(self, group: int, columns: Sequence[str], wanted: RollupSelection) -> Any:
        """The rows of a row group of the selected rollup and interval, of any time; not cached."""
        is_all = self._is_all_of(group, wanted)
        table = self._file.read_group(group, [*_KEYS, *columns, *([] if is_all else _WHOSE)])
        if is_all:
            return table
        return table.filter(_is_of(table, wanted)).select([*_KEYS, *columns]).combine_chunks()

    # -- states as objects ---------------------------------------------------------------------------------

    def parts(self, wanted: RollupSelection) -> Iterator[RollupPart]:
        """The selected states by row group."""
        try:
            for group, table, marks in self.chosen(wanted):
                yield self._part(group, table, marks, wanted)
        except pa.ArrowException as error:
            raise UnusableFileError(f"agg file cannot be decoded: {error}") from error

    def has_window(self, rollup: str, interval_ms: int, start_ms: int) -> bool:
        """Whether a window has any record."""
        window = RollupSelection(rollup, interval_ms, start_ms, start_ms + interval_ms)
        return any(pc.any(marks).as_py() for _, _, marks in self.chosen(window))

    def chosen(self, wanted: RollupSelection) -> Iterator[tuple[int, Any, Any]]:
        """Row groups that may have selected states, and their selected rows."""
        for is_all, run in groupby(self.groups_for(wanted), key=lambda group: self._is_all_of(group, wanted)):
            alike = list(run)
            tables = self._file.tables(alike, _LIGHT if is_all else (*_LIGHT, *_WHOSE))
            for group, table in zip(alike, tables, strict=True):
                yield group, table, _selection_mask(table, wanted, is_all=is_all)

    def _may_have(self, group: int, wanted: RollupSelection) -> bool:
        rollups = self._file.statistics(group, names.ROLLUP)
        intervals = self._file.statistics(group, names.INTERVAL_MS)
        starts = self._file.statistics(group, names.WINDOW_START)
        if rollups is not None and not rollups[0] <= wanted.rollup <= rollups[1]:
            return False
        if intervals is not None and not intervals[0] <= wanted.interval_ms <= intervals[1]:
            return False
        return starts is None or (starts[0] < wanted.to_ms and starts[1] >= wanted.from_ms)

    def _is_all_of(self, group: int, wanted: RollupSelection) -> bool:
        """Whether the whole row group is of the selected rollup and interval."""
        one = self._file.statistics(group, names.ROLLUP) == (wanted.rollup, wanted.rollup)
        span = (wanted.interval_ms, wanted.interval_ms)
        return one and self._file.statistics(group, names.INTERVAL_MS) == span

    def _part(self, group: int, table: Any, marks: Any, wanted: RollupSelection) -> RollupPart:
        measures = column_array(table, names.MEASURE)
        single = pc.equal(column_array(table, names.COUNT), pa.scalar(1))
        numbers = pc.and_(marks, pc.and_(single, _is_one_of(measures, wanted.numbers)))
        summed = pc.and_(marks, _is_one_of(measures, (*wanted.numbers, *wanted.others)))
        summed = pc.and_not(summed, numbers)
        counts = _rows(table, marks, wanted)
        return RollupPart(
            counts.num_rows,
            _counts(counts, len(wanted.grouped)),
            _numbers(_rows(table, numbers, wanted), len(wanted.grouped)),
            self._summaries(group, _rows(table, summed, wanted), summed, len(wanted.grouped)),
        )

    def _summaries(
        self, group: int, rows: Any, marks: Any, dimensions: int
    ) -> list[tuple[GroupKey, str, Summary]]:
        """States that have to be merged: of more than one number, or from records with summaries."""
        if not rows.num_rows:
            return []
        heavy = self._file.read_group(group, _HEAVY).filter(marks)
        columns = {name: rows.column(name).to_pylist() for name in (names.COUNT, names.MIN, names.MIN_WHOLE)}
        columns |= {name: heavy.column(name).to_pylist() for name in _HEAVY}
        keyed = zip(_group_keys(rows, dimensions), rows.column(names.MEASURE).to_pylist(), strict=True)
        states = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [(key, measure, _summary(state)) for (key, measure), state in zip(keyed, states, strict=True)]


def _selection_mask(table: Any, wanted: RollupSelection, *, is_all: bool) -> Any:
    """The selected rows of a row group, all of which may be of the selected rollup and interval."""
    starts = column_array(table, names.WINDOW_START)
    marks = pc.and_(
        pc.greater_equal(starts, pa.scalar(wanted.from_ms)), pc.less(starts, pa.scalar(wanted.to_ms))
    )
    if not is_all:
        marks = pc.and_(marks, _is_of(table, wanted))
    return (
        _with_dimension_values(column_array(table, names.DIMENSIONS), marks, wanted)
        if wanted.having
        else marks
    )


def _is_of(table: Any, wanted: RollupSelection) -> Any:
    """Mark the rows of the selected rollup and interval."""
    spans = pc.equal(column_array(table, names.INTERVAL_MS), pa.scalar(wanted.interval_ms))
    return pc.and_(pc.equal(column_array(table, names.ROLLUP), wanted.rollup), spans)


def _with_dimension_values(dimensions: Any, marks: Any, wanted: RollupSelection) -> Any:
    """The marked rows with the required values; other rows may have fewer dimensions."""
    rows = np.flatnonzero(to_numpy(marks))
    for place, text in wanted.having:
        found = pc.fill_null(pc.equal(pc.list_element(dimensions.take(pa.array(rows)), place), text), False)
        rows = rows[to_numpy(found)]
    kept = np.zeros(len(marks), bool)
    kept[rows] = True
    return pa.array(kept)


def _is_one_of(measures: Any, wanted: Sequence[str]) -> Any:
    return pc.is_in(measures, value_set=pa.array(wanted, measures.type))


def _rows(table: Any, marks: Any, wanted: RollupSelection) -> Any:
    """The marked rows, with a column for each dimension to group by."""
    light = (names.WINDOW_START, names.MEASURE, names.COUNT, names.MIN, names.MIN_WHOLE)
    found = {name: column_array(table, name).filter(marks) for name in light}
    dimensions = column_array(table, names.DIMENSIONS).filter(marks)
    for column, place in enumerate(wanted.grouped):
        found[_dimension(column)] = pc.list_element(dimensions, place)
    return pa.table(found)


def _dimension(column: int) -> str:
    return f"dimension {column}"


def _aggregate_rows(rows: Any, dimensions: int, sums: Sequence[tuple[str, str]]) -> Any:
    by = [names.WINDOW_START, *map(_dimension, range(dimensions)), names.MEASURE]
    return rows.group_by(by, use_threads=False).aggregate(list(sums))


def _group_keys(rows: Any, dimensions: int) -> list[GroupKey]:
    starts: list[int] = rows.column(names.WINDOW_START).to_pylist()
    columns = [rows.column(_dimension(column)).to_pylist() for column in range(dimensions)]
    values = list(zip(*columns, strict=True)) if columns else [()] * len(starts)
    return list(zip(starts, values, strict=True))


def _counts(rows: Any, dimensions: int) -> list[tuple[GroupKey, str, int]]:
    if not rows.num_rows:
        return []
    found = _aggregate_rows(rows, dimensions, [(names.COUNT, "sum")])
    measures: list[str] = found.column(names.MEASURE).to_pylist()
    sizes: list[int] = found.column(f"{names.COUNT}_sum").to_pylist()
    return list(zip(_group_keys(found, dimensions), measures, sizes, strict=True))


def _numbers(rows: Any, dimensions: int) -> list[tuple[GroupKey, str, list[Number]]]:
    if not rows.num_rows:
        return []
    found = _aggregate_rows(rows, dimensions, [(names.MIN, "list"), (names.MIN_WHOLE, "list")])
    measures: list[str] = found.column(names.MEASURE).to_pylist()
    doubles: list[list[float | None]] = found.column(f"{names.MIN}_list").to_pylist()
    wholes: list[list[int | None]] = found.column(f"{names.MIN_WHOLE}_list").to_pylist()
    numbers = map(_chosen_numbers, doubles, wholes)
    return list(zip(_group_keys(found, dimensions), measures, numbers, strict=True))


def _chosen_numbers(doubles: list[float | None], wholes: list[int | None]) -> list[Number]:
    if wholes.count(None) == len(wholes):
        numbers: list[Number | None] = list(doubles)
    else:
        numbers = [_number(double, whole) for double, whole in zip(doubles, wholes, strict=True)]
    if None in numbers:
        raise UnusableFileError("agg file has a state of one number without the number")
    return cast("list[Number]", numbers)


def _summary(state: dict[str, Any]) -> Summary:
    histogram = cast("list[tuple[int, int]] | None", state[names.HISTOGRAM])
    buckets = cast("list[tuple[int, int]] | None", state[names.SKETCH])
    if buckets is None:
        raise UnusableFileError("agg file has a state without a sketch")
    summary = Summary(histogram=histogram is not None, whole=False)
    summary.count = state[names.COUNT]
    summary.total = decode_total(state[names.SUM], state[names.SUM_REST], state[names.SUM_EXACT])
    summary.smallest = _number(state[names.MIN], state[names.MIN_WHOLE])
    summary.largest = _number(state[names.MAX], state[names.MAX_WHOLE])
    summary.unplaced = state[names.UNPLACED] or 0
    summary.sketch = sketch_from_buckets(dict(buckets))
    if histogram is not None:
        summary.histogram = Histogram()
        summary.histogram.counts = dict(histogram)
    return summary


def _number(double: float | None, whole: int | None) -> Number | None:
    return double if whole is None else whole


_COLUMNS = (
    names.COUNT,
    *(names.SUM, names.SUM_WHOLE, names.MIN, names.MIN_WHOLE, names.MAX, names.MAX_WHOLE),
    *(names.HISTOGRAM, names.SKETCH),
)


class MetricBlockFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes

    def blocks(self) -> MetricBlocks:
        """All blocks of the file; not cached."""
        return MetricBlocks(self._file.read((names.ENTRY, *_COLUMNS)))


class MetricBlocks:
    """The rows of an `mblk` file, which are sorted by metric, with lookup by entry."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._entries = column_array(table, names.ENTRY)

    def parts(self, entries: Sequence[int]) -> list[SummaryParts | None]:
        """The summary of each entry; None if it has none."""
        places = pc.index_in(pa.array(entries, INT64), value_set=self._entries)
        if places.null_count:
            raise UnusableFileError("mblk file has no rows for some entries")
        some = self._table.take(places)
        columns = [some.column(name).to_pylist() for name in _COLUMNS]
        return [_parts(*row) for row in zip(*columns, strict=True)]


def _parts(
    count: int | None,
    total: float | None,
    whole_total: int | None,
    least: float | None,
    whole_least: int | None,
    most: float | None,
    whole_most: int | None,
    buckets: list[tuple[int, int]] | None,
    sketch: bytes | None,
) -> SummaryParts | None:
    if count is None:
        return None
    found_sum = _number(total, whole_total)
    found_sketch = None if sketch is None else decode_sketch(sketch)
    if found_sum is None or (sketch is not None and found_sketch is None):
        raise UnusableFileError("mblk file has an invalid summary")
    histogram = None
    if buckets is not None:
        histogram = Histogram()
        histogram.counts = dict(buckets)
    smallest, largest = _number(least, whole_least), _number(most, whole_most)
    return SummaryParts(count, found_sum, smallest, largest, histogram, found_sketch)
