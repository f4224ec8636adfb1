"""States of rollups as arrays: what a file has of some windows and groups, without an object for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tailrace.search.aggregates.exact_sums import SumArray
from tailrace.search.aggregates.keyed import KeyedStates
from tailrace.search.aggregates.spread import CODE_MAX, BucketArray
from tailrace.search.aggregates.stored import StoredStates
from tailrace.search.aggregates.summaries import SummaryArray
from tailrace.search.index_files import format as names
from tailrace.search.index_files.agg_file import RollupFile, RollupSelection
from tailrace.search.index_files.parquet_file import column_array
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.numpy_arrays import np, to_numpy
from tailrace.storage.segments.parquet import pa, pc

_EDGES = (names.MIN, names.MAX)
_WHOLE_EDGES = (names.MIN_WHOLE, names.MAX_WHOLE)
_EXPONENT_MAX = 1 << 11  # no double has a greater one


class SummaryMeasure(NamedTuple):
    """A measure of numbers: what its states are made of."""

    name: str
    whole: bool
    histogram: bool


def add_rollup_file(
    file: RollupFile,
    wanted: RollupSelection,
    counted: Sequence[str],
    measured: Sequence[SummaryMeasure],
    states: KeyedStates,
    look_at_clock: Callable[[], None],
) -> int:
    """Adds what is wanted of a file, all of it or nothing; answers how many groups that were."""
    found, rows = states.fresh(), 0
    try:
        for stored, is_kept in _stored_states(file, wanted, tuple(counted), tuple(measured)):
            look_at_clock()
            chosen = stored.chosen(wanted.from_ms, wanted.to_ms, wanted.having)
            piece = stored.piece(chosen, wanted.grouped, states.texts)
            rows += len(piece.windows)
            found.add(piece if is_kept else piece.arrays())
    except (pa.ArrowException, IndexError) as error:
        raise UnusableFileError(f"it is not what it should be: {error}") from error
    states.absorb(found)
    return rows


def _stored_states(
    file: RollupFile, wanted: RollupSelection, counted: tuple[str, ...], measured: tuple[SummaryMeasure, ...]
) -> Iterator[tuple[StoredStates, bool]]:
    """The states of a rollup and interval, by row group, and whether the file keeps them."""
    section = _RollupSection(file, wanted, _columns_for(measured))
    for group in file.groups_for(wanted):
        key = (group, wanted.rollup, wanted.interval_ms, counted, measured)
        found = file.kept.find(key)
        if found is not None:
            yield found, True
            continue
        found = _decode_states(section.begun_in(group), wanted.measures, counted, measured)
        yield found, file.kept.put(key, found)


class _RollupSection:
    """The rows of one rollup and interval. A group may begin in one row group and end in the next."""

    def __init__(self, file: RollupFile, wanted: RollupSelection, columns: Sequence[str]) -> None:
        self._file = file
        self._wanted = wanted
        self._columns = columns
        self._read: dict[int, tuple[Any, Any]] = {}

    def begun_in(self, group: int) -> Any:
        """All rows of the groups that begin in a row group."""
        table, places = self._rows(group)
        begins = np.flatnonzero(places == 0)
        if not len(begins):
            return table.slice(0, 0)
        found = [table.slice(int(begins[0]))]
        missing = len(self._wanted.measures) - (len(places) - int(begins[-1]))
        while missing > 0 and (group := group + 1) < self._file.groups:
            table, places = self._rows(group)
            begins = np.flatnonzero(places == 0)
            found.append(table.slice(0, int(begins[0]) if len(begins) else None))
            missing -= found[-1].num_rows
            if len(begins):
                break
        return found[0] if len(found) == 1 else pa.concat_tables(found).combine_chunks()

    def _rows(self, group: int) -> tuple[Any, Any]:
        """The rows of a row group that are of this section, and the place of each one's measure."""
        found = self._read.get(group)
        if found is None:
            table = self._file.read(group, self._columns, self._wanted)
            measures = pa.array(self._wanted.measures, column_array(table, names.MEASURE).type)
            places = pc.index_in(column_array(table, names.MEASURE), value_set=measures)
            found = table, to_numpy(pc.fill_null(places, -1))
            self._read = {group: found}  # the next row group is asked for twice at most
        return found


def _decode_states(
    table: Any, measures: Sequence[str], counted: Sequence[str], measured: Sequence[SummaryMeasure]
) -> StoredStates:
    """Whole groups of one rollup and interval."""
    found = column_array(table, names.MEASURE)
    expected = pa.array(list(measures) * (len(found) // len(measures)), found.type)
    if len(found) != len(expected) or not found.equals(expected):
        raise UnusableFileError("a group does not have each measure once")
    rows = {name: np.arange(place, len(found), len(measures)) for place, name in enumerate(measures)}
    sizes, lead = to_numpy(column_array(table, names.COUNT)), rows[measures[0]]
    return StoredStates(
        to_numpy(column_array(table, names.WINDOW_START))[lead],
        column_array(table, names.DIMENSIONS).take(pa.array(lead)),
        {name: sizes[rows[name]] for name in counted},
        {one.name: _summaries(table, sizes, rows[one.name], one) for one in measured},
    )


def _columns_for(measured: Sequence[SummaryMeasure]) -> list[str]:
    found = {names.SUM, names.SUM_REST, names.SUM_EXACT, names.SKETCH} if measured else set[str]()
    for one in measured:
        found.update(_WHOLE_EDGES if one.whole else _EDGES)
        found.update([names.HISTOGRAM] if one.histogram else [])
    return sorted(found)


def _summaries(table: Any, sizes: Any, rows: Any, measured: SummaryMeasure) -> SummaryArray:
    counts = sizes[rows]
    sketch = _decode_buckets(column_array(table, names.SKETCH), rows, CODE_MAX)
    totals = np.concatenate([[0], np.cumsum(sketch.counts)])
    if (totals[sketch.starts[1:]] - totals[sketch.starts[:-1]] != counts).any():
        raise UnusableFileError("it has a sketch that is none")
    smallest, largest = (
        _decode_extreme(column_array(table, name), rows, counts)
        for name in (_WHOLE_EDGES if measured.whole else _EDGES)
    )
    histogram = None
    if measured.histogram:
        histogram = _decode_buckets(column_array(table, names.HISTOGRAM), rows, _EXPONENT_MAX)
    return SummaryArray(counts, _sums(table, rows), smallest, largest, histogram, sketch)


def _sums(table: Any, rows: Any) -> SumArray:
    nearest, rests = (
        _filled(column_array(table, name).take(pa.array(rows)), 0.0) for name in (names.SUM, names.SUM_REST)
    )
    stored, beyond = column_array(table, names.SUM_EXACT), dict[int, int]()
    if stored.null_count < len(stored):
        beyond = {
            place: names.decode_sum(total)
            for place, total in enumerate(stored.take(pa.array(rows)).to_pylist())
            if total is not None
        }
        nearest[list(beyond)] = 0.0
    return SumArray(nearest, rests, beyond)


def _decode_extreme(numbers: Any, rows: Any, counts: Any) -> Any:
    found = numbers.take(pa.array(rows))
    if found.null_count and (to_numpy(found.is_null()) & (counts > 0)).any():
        raise UnusableFileError("it has numbers without their edges")
    return _filled(found, 0)


def _filled(numbers: Any, none: float) -> Any:
    """Numbers that may be changed."""
    if numbers.null_count:
        numbers = pc.fill_null(numbers, pa.scalar(none, numbers.type))
    return to_numpy(numbers).copy()


def _decode_buckets(maps: Any, rows: Any, code_max: int) -> BucketArray:
    """The buckets of some rows; those of other measures lie in between."""
    starts = to_numpy(maps.offsets).astype(np.int64)
    mine = slice(starts[0], starts[-1])  # the rows may be a part of a longer list
    codes, counts = to_numpy(maps.keys)[mine], to_numpy(maps.items)[mine]
    starts -= starts[0]
    if starts[-1] != len(codes):
        raise UnusableFileError("it has buckets of no state")
    sizes = np.diff(starts)[rows]
    if int(sizes.sum()) == len(codes):
        found = BucketArray(np.concatenate([[0], np.cumsum(sizes)]), codes, counts)
    else:
        found = BucketArray(starts, codes, counts).take(rows)
    if len(codes) and (int(np.abs(codes).max()) > code_max or int(counts.min()) <= 0):
        raise UnusableFileError("it has buckets that are none")
    return found
