"""States of rollups as arrays: what a file has of some windows and groups, without an object for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tailrace.query import family_format as names
from tailrace.query.families.agg_file import AggFile, Wanted
from tailrace.query.families.numbers import np, numbers_in
from tailrace.query.families.parquet_file import array_in
from tailrace.query.families.published import UnusableFileError
from tailrace.query.states.exact_sums import Sums
from tailrace.query.states.keyed import KeyedStates, Piece, Texts
from tailrace.query.states.spread import CODE_MAX, Spread
from tailrace.query.states.summaries import Summaries
from tailrace.store.arrow import pa, pc

_EDGES = (names.MIN, names.MAX)
_WHOLE_EDGES = (names.MIN_WHOLE, names.MAX_WHOLE)
_EXPONENT_MAX = 1 << 11  # no double has a greater one


class Measured(NamedTuple):
    """A measure of numbers: what its states are made of."""

    name: str
    whole: bool
    histogram: bool


def add_file(
    file: AggFile,
    wanted: Wanted,
    counted: Sequence[str],
    measured: Sequence[Measured],
    states: KeyedStates,
    look_at_clock: Callable[[], None],
) -> int:
    """Adds what is wanted of a file, all of it or nothing; answers how many groups that were."""
    found, rows = states.fresh(), 0
    try:
        for piece in _pieces(file, wanted, counted, measured, states.texts):
            look_at_clock()
            rows += len(piece.windows)
            found.add(piece)
    except (pa.ArrowException, IndexError) as error:
        raise UnusableFileError(f"it is not what it should be: {error}") from error
    states.absorb(found)
    return rows


def _pieces(
    file: AggFile,
    wanted: Wanted,
    counted: Sequence[str],
    measured: Sequence[Measured],
    texts: Sequence[Texts],
) -> Iterator[Piece]:
    columns = _columns_for(measured)
    for group, table, marks in file.chosen(wanted):
        rows = np.flatnonzero(numbers_in(marks))
        if not len(rows):
            continue
        measures = array_in(table, names.MEASURE)
        named = {name: _rows_of(measures, rows, name) for name in (*counted, *(one.name for one in measured))}
        lead = next(iter(named.values()), None)
        if lead is None:
            lead = _rows_of(measures, rows, measures[int(rows[0])].as_py())
        windows, codes = _keys(table, lead, wanted, texts)
        for places in named.values():
            # A group has a row for every measure, in one order.
            if (
                len(places) != len(lead)
                or (numbers_in(array_in(table, names.WINDOW_START))[places] != windows).any()
            ):
                raise UnusableFileError("a group lacks a measure")
        sizes = numbers_in(array_in(table, names.COUNT))
        heavy = file.heavy(group, columns) if measured else None
        yield Piece(
            windows,
            codes,
            {name: sizes[named[name]] for name in counted},
            {one.name: _summaries(heavy, sizes, named[one.name], one) for one in measured},
        )


def _columns_for(measured: Sequence[Measured]) -> list[str]:
    found = {names.SUM, names.SUM_REST, names.SUM_EXACT, names.SKETCH}
    for one in measured:
        found.update(_WHOLE_EDGES if one.whole else _EDGES)
        found.update([names.HISTOGRAM] if one.histogram else [])
    return sorted(found)


def _rows_of(measures: Any, rows: Any, name: str) -> Any:
    """Of some rows those of a measure."""
    return rows[numbers_in(pc.equal(measures, name))[rows]]


def _keys(table: Any, rows: Any, wanted: Wanted, texts: Sequence[Texts]) -> tuple[Any, list[Any]]:
    """The windows of some rows, and the codes of their dimensions."""
    windows = numbers_in(array_in(table, names.WINDOW_START))[rows]
    if not wanted.grouped:
        return windows, []
    dimensions = array_in(table, names.DIMENSIONS).take(pa.array(rows))
    codes: list[Any] = []
    for place, known in zip(wanted.grouped, texts, strict=True):
        encoded = pc.list_element(dimensions, place).dictionary_encode("encode")
        codes.append(known.coded(encoded.dictionary.to_pylist())[numbers_in(encoded.indices)])
    return windows, codes


def _summaries(table: Any, sizes: Any, rows: Any, measured: Measured) -> Summaries:
    counts = sizes[rows]
    sketch = _spread(array_in(table, names.SKETCH), rows, CODE_MAX)
    totals = np.concatenate([[0], np.cumsum(sketch.counts)])
    if (totals[sketch.starts[1:]] - totals[sketch.starts[:-1]] != counts).any():
        raise UnusableFileError("it has a sketch that is none")
    smallest, largest = (
        _edge(array_in(table, name), rows, counts) for name in (_WHOLE_EDGES if measured.whole else _EDGES)
    )
    histogram = None
    if measured.histogram:
        histogram = _spread(array_in(table, names.HISTOGRAM), rows, _EXPONENT_MAX)
    return Summaries(counts, _sums(table, rows), smallest, largest, histogram, sketch)


def _sums(table: Any, rows: Any) -> Sums:
    nearest, rests = (
        _filled(array_in(table, name).take(pa.array(rows)), 0.0) for name in (names.SUM, names.SUM_REST)
    )
    stored, beyond = array_in(table, names.SUM_EXACT), dict[int, int]()
    if stored.null_count < len(stored):
        beyond = {
            place: names.sum_of(total)
            for place, total in enumerate(stored.take(pa.array(rows)).to_pylist())
            if total is not None
        }
        nearest[list(beyond)] = 0.0
    return Sums(nearest, rests, beyond)


def _edge(numbers: Any, rows: Any, counts: Any) -> Any:
    found = numbers.take(pa.array(rows))
    if found.null_count and (numbers_in(found.is_null()) & (counts > 0)).any():
        raise UnusableFileError("it has numbers without their edges")
    return _filled(found, 0)


def _filled(numbers: Any, none: float) -> Any:
    """Numbers that may be changed."""
    if numbers.null_count:
        numbers = pc.fill_null(numbers, pa.scalar(none, numbers.type))
    return numbers_in(numbers).copy()


def _spread(maps: Any, rows: Any, code_max: int) -> Spread:
    """The buckets of some rows; those of other measures lie in between."""
    starts = numbers_in(maps.offsets).astype(np.int64)
    codes, counts = numbers_in(maps.keys), numbers_in(maps.items)
    if starts[0] or starts[-1] != len(codes):
        raise UnusableFileError("it has buckets of no state")
    sizes = np.diff(starts)[rows]
    if int(sizes.sum()) == len(codes):
        found = Spread(np.concatenate([[0], np.cumsum(sizes)]), codes, counts)
    else:
        found = Spread(starts, codes, counts).take(rows)
    if len(codes) and (int(np.abs(codes).max()) > code_max or int(counts.min()) <= 0):
        raise UnusableFileError("it has buckets that are none")
    return found
