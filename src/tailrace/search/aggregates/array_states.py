"""Array states of one aggregate: filled from rollup files and spans, encoded as windows of JSON.

States from index files are arrays, without an object for each group. Rows of spans are collected and summed
when there are many, because numpy takes hardly longer for thousands of rows than for ten. States from records
and from the tail index are in `Groups`; at the end groups that are in both become objects and are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import orjson

from tailrace.common.timestamps import format_rfc3339_ms
from tailrace.schema.lenses import value_text
from tailrace.search.aggregates.exact_sums import SumArray
from tailrace.search.aggregates.groups import Groups, aggregate_timeout, check_bytes, check_groups
from tailrace.search.aggregates.keyed_states import (
    DimensionValues,
    GroupKey,
    KeyedStates,
    StatePiece,
    StoredStates,
    group_ids,
    join_texts,
)
from tailrace.search.aggregates.summary_arrays import (
    CODE_MAX,
    BucketArray,
    SummaryArray,
    build_number_array,
    summarise_by_group,
)
from tailrace.search.index_files import format as names
from tailrace.search.index_files.column_file import ArrowColumn
from tailrace.search.index_files.file_cache import UnusableFileError
from tailrace.search.index_files.parquet_file import column_array
from tailrace.search.index_files.rollup_files import RollupFile, RollupSelection
from tailrace.search.index_files.span_source import SpanSource
from tailrace.search.numpy_arrays import np, row_array_from_bits, to_numpy
from tailrace.search.query_language import BoundQuery
from tailrace.search.records import RecordView
from tailrace.search.requests import AggregateRequest
from tailrace.storage.segments.parquet import BINARY, pa, pc

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
    """Add the selected states of a file, all or nothing. Returns the number of groups."""
    found, rows = states.empty_copy(), 0
    try:
        for stored, is_kept in _stored_states(file, wanted, tuple(counted), tuple(measured)):
            look_at_clock()
            chosen = stored.chosen(wanted.from_ms, wanted.to_ms, wanted.having)
            piece = stored.piece(chosen, wanted.grouped, states.texts)
            rows += len(piece.windows)
            found.add(piece if is_kept else piece.arrays())
    except (pa.ArrowException, IndexError) as error:
        raise UnusableFileError(f"agg file cannot be decoded: {error}") from error
    states.merge(found)
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
        raise UnusableFileError("agg file has a group without each measure once")
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
        raise UnusableFileError("agg file has an invalid sketch")
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
        raise UnusableFileError("agg file has a summary without minimum and maximum")
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
        raise UnusableFileError("agg file has buckets without a state")
    sizes = np.diff(starts)[rows]
    if int(sizes.sum()) == len(codes):
        found = BucketArray(np.concatenate([[0], np.cumsum(sizes)]), codes, counts)
    else:
        found = BucketArray(starts, codes, counts).take(rows)
    if len(codes) and (int(np.abs(codes).max()) > code_max or int(counts.min()) <= 0):
        raise UnusableFileError("agg file has invalid buckets")
    return found


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
    rows = source.rows_in_range(field, ">=", request.from_ms) & source.rows_in_range(
        field, "<", request.to_ms
    )
    rows &= ~source.rows_with_several(field)
    for query in (request.query, request.include):
        if query is not None and rows:
            rows &= _matching_rows(source, query)
    for name in request.rollup.dimensions:
        several = rows & source.rows_with_several(name)
        if several:
            rows &= ~_ambiguous_rows(source, name, several)
    return rows


def _matching_rows(source: SpanSource, query: BoundQuery) -> int:
    verdict = source.match_rows(query)
    if not verdict.is_final:
        raise UnusableFileError("col file cannot decide every row")
    return verdict.certain


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


# A window mostly ends where the next one starts, and is asked for again.
_shown_at = lru_cache(16_384)(format_rfc3339_ms)


def encode_windows(
    states: KeyedStates,
    group_by: Sequence[str],
    interval_ms: int,
    others: Sequence[tuple[GroupKey, bytes]],
    look_at_clock: Callable[[], None],
) -> list[bytes | memoryview]:
    """All windows with their groups, in order, as one text in pieces, not to copy it once more.

    `others` are groups that were made elsewhere, as JSON.
    """
    keys = _WindowKeys(states, group_by, others)
    if not len(keys.windows):
        return [b"[]"]
    texts: list[Any] = []
    for piece in states.pieces:
        look_at_clock()
        texts.append(piece.texts())
    texts.append(pa.array([shown for _, shown in others], BINARY))
    order = np.lexsort([keys.ranks, keys.windows])
    found = pa.concat_arrays(texts)
    if (order[1:] < order[:-1]).any():
        found = found.take(pa.array(order))
    look_at_clock()
    return _wrap_groups(found, keys, order, interval_ms, len(others))


class _WindowKeys:
    """The window of every group, its name as JSON, and how the names of a window are ordered."""

    def __init__(
        self, states: KeyedStates, group_by: Sequence[str], others: Sequence[tuple[GroupKey, bytes]]
    ) -> None:
        pieces, texts = states.pieces, states.texts
        columns: list[Any] = []
        for place, values in enumerate(texts):
            coded = values.coded([key[1][place] for key, _ in others])
            columns.append(np.concatenate([*(piece.codes[place] for piece in pieces), coded]))
        windows = [*(piece.windows for piece in pieces), np.array([key[0] for key, _ in others], np.int64)]
        self.windows = np.concatenate(windows)
        ids = group_ids(columns, len(self.windows))
        _, leads, which = np.unique(ids, return_index=True, return_inverse=True)
        listed = [values.listed() for values in texts]
        self.names = [
            orjson.dumps(
                {name: of[column[row]] for name, of, column in zip(group_by, listed, columns, strict=True)}
            )
            for row in leads.tolist()
        ]
        rank = np.empty(len(self.names), np.int64)
        rank[sorted(range(len(self.names)), key=self.names.__getitem__)] = np.arange(len(self.names))
        self.ranks = rank[which]
        self.which = which  # the place of each group's name


def _wrap_groups(
    texts: Any, keys: _WindowKeys, order: Any, interval_ms: int, others: int
) -> list[bytes | memoryview]:
    """Groups in their windows. What lies between them, and the name of each, is written in front of it."""
    windows = keys.windows[order]
    is_first = np.concatenate([[True], windows[1:] != windows[:-1]])
    between = [b","]
    for start_ms in windows[is_first].tolist():
        start, end = _shown_at(start_ms), _shown_at(start_ms + interval_ms)
        before = b"]}," if len(between) > 1 else b"["
        between.append(b'%b{"start":"%b","end":"%b","groups":[' % (before, start.encode(), end.encode()))
    named = [b'{"key":%b,"measures":' % name for name in keys.names] + [b""]
    behind = [b"}", b""]
    which = keys.which.copy()
    which[len(which) - others :] = len(named) - 1  # these are whole as they are
    is_other = (which == len(named) - 1).astype(np.int64)
    found = join_texts(
        [
            pa.array(between, BINARY).take(pa.array(np.where(is_first, np.cumsum(is_first), 0))),
            pa.array(named, BINARY).take(pa.array(which[order])),
            texts,
            pa.array(behind, BINARY).take(pa.array(is_other[order])) if others else b"}",
        ]
    )
    offsets = np.frombuffer(found.buffers()[1], np.int32, len(found) + 1)
    return [memoryview(found.buffers()[2])[offsets[0] : offsets[-1]], b"]}]"]


class ArrayStates:
    """Of one aggregate, whose measures are counts and summaries of fields."""

    def __init__(self, view: RecordView, request: AggregateRequest, deadline: float) -> None:
        self._request = request
        self._deadline = deadline
        measures = request.measures.items()
        self._counted = [name for name, measure in measures if measure.kind == "count"]
        self._measured = [
            SummaryMeasure(
                name,
                view.config.fields[cast("str", measure.field)].kind == "integer",
                measure.histogram is not None,
            )
            for name, measure in measures
            if measure.kind == "summary"
        ]
        self._states = KeyedStates([DimensionValues() for _ in request.group_by])
        self._waiting: list[SpanRows] = []  # of spans, until there are enough of them

    def add_file(self, file: RollupFile, wanted: RollupSelection) -> int:
        """Adds whole windows of a rollup, all or nothing; answers how many states that were."""
        found = add_rollup_file(
            file, wanted, self._counted, self._measured, self._states, self._check_deadline
        )
        self._check()
        return found

    def add_span(self, source: SpanSource, request: AggregateRequest) -> None:
        """Adds the rows of a span that lie in the time of a request, all or nothing."""
        found = self._states.empty_copy()
        waiting: list[SpanRows] = []
        for rows in read_span_rows(source, request, self._counted, self._measured, self._states.texts):
            self._check_deadline()
            if waiting:  # so many in one span that they need not wait for those of others
                found.add(build_piece(waiting, self._measured))
            waiting = [rows]
        self._states.merge(found)
        self._waiting += waiting
        if sum(rows.size for rows in self._waiting) > ROWS_AT_ONCE:
            self._add_waiting()
        self._check()

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._states.add(build_piece(waiting, self._measured))

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise aggregate_timeout()

    def _check(self) -> None:
        self._states.check(check_groups, check_bytes)

    def to_json(self, groups: Groups) -> list[bytes | memoryview]:
        """All windows as JSON, with those groups that were made elsewhere; a text in pieces."""
        self._add_waiting()
        states = self._states
        states.combine_groups()
        for keys, piece in states.pop_groups(groups.groups):
            for row, key in enumerate(keys):
                group = groups.at(key)
                for index, name in enumerate(groups.counted):
                    group.counts[index] += int(piece.counts[name][row])
                for name, found in piece.summaries.items():
                    groups.merge(key, name, found.summary(row))
        groups.flush_pending()
        check_groups(states.rows + len(groups.groups))
        others = groups.shown_each()
        groups.groups.clear()
        request = self._request
        return encode_windows(states, request.group_by, request.interval_ms, others, self._check_deadline)
