"""`agg`: for every rollup, interval, window and group, the partial state of each measure.

Groups by all dimensions are nearly as many as records, and most questions are about one dimension or none:
each rollup is also kept by each dimension alone, and by none.

States are made by the same code that answers aggregates, so that merging them is the same as never having
split them. Rows are collected in a compact form; groups are made one after the other, in the order of the
file, and written as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast

from tailrace.pipeline.kernels.arrays import BINARY, DOUBLE, INT32, INT64, STRING, list_of, np, pa, to_numpy
from tailrace.pipeline.kernels.batch import Batch
from tailrace.pipeline.kernels.columns import distinct
from tailrace.pipeline.kernels.decoding import Tokens
from tailrace.pipeline.kernels.matching import fields_of, matching
from tailrace.pipeline.kernels.parquet import Built, CompanionWriter, Range, facts_of
from tailrace.pipeline.kernels.states import count_row, summary_row
from tailrace.query.bind import Bound
from tailrace.query.family_format import (
    AGG,
    COUNT,
    DIMENSIONS,
    HISTOGRAM,
    INTERVAL_MS,
    MAX,
    MAX_WHOLE,
    MEASURE,
    MIN,
    MIN_WHOLE,
    ROLLUP,
    SKETCH,
    SUM,
    SUM_EXACT,
    UNPLACED,
    WINDOW_START,
    cut_name,
)
from tailrace.query.includes import bind_include
from tailrace.query.measures import Number, Parts, PartsReader, Summary
from tailrace.query.values import INT64_MAX
from tailrace.schema.convert import text_of
from tailrace.schema.instants import FIRST_MS, LAST_MS
from tailrace.schema.pointer import parse_pointer
from tailrace.schema.search_config import Measure, Rollup, SearchConfig, interval_ms

GROUP_ROWS: Final = 4096
KNOWN_MAX: Final = 65_536  # states of few numbers that are kept, by the numbers
KNOWN_NUMBERS_MAX: Final = 8

SCHEMA: Final = pa.schema(
    [
        pa.field(ROLLUP, STRING, nullable=False),
        pa.field(INTERVAL_MS, INT64, nullable=False),
        pa.field(WINDOW_START, INT64, nullable=False),
        pa.field(DIMENSIONS, list_of(STRING, nullable=True), nullable=False),
        pa.field(MEASURE, STRING, nullable=False),
        pa.field(COUNT, INT64, nullable=False),
        pa.field(SUM, DOUBLE),
        pa.field(SUM_EXACT, BINARY),
        pa.field(MIN, DOUBLE),
        pa.field(MAX, DOUBLE),
        pa.field(MIN_WHOLE, INT64),
        pa.field(MAX_WHOLE, INT64),
        pa.field(HISTOGRAM, pa.map_(INT32, pa.field("value", INT64, nullable=False))),
        pa.field(UNPLACED, INT64),
        pa.field(SKETCH, BINARY),
    ]
)
REPEATED: Final = [ROLLUP, f"{DIMENSIONS}.list.element", MEASURE]
PACKED: Final = [INTERVAL_MS, WINDOW_START, COUNT]

Row = tuple[object, ...]
# A measure's own pointers, as members of a small record made of what lies at them.
_PLACES: Final = ("/0", "/1", "/2", "/3", "/4", "/5")


class _Numbers(NamedTuple):
    """What waits for a measure: numbers or summaries, and the member each belongs to."""

    members: Any
    values: Any


class _RollupRows:
    """The members of one rollup so far."""

    def __init__(self, name: str, rollup: Rollup, config: SearchConfig) -> None:
        self.name = name
        self._timestamp = cast("str", rollup.timestamp_field or config.primary_timestamp_field)
        self._dimensions = rollup.dimensions
        path = f"search.rollups.{name}"
        self._include = _bound(rollup.include, config, path)
        self._measures = dict(sorted(rollup.measures.items()))
        self._includes = {
            called: _bound(measure.include, config, f"{path}.measures.{called}")
            for called, measure in self._measures.items()
        }
        self.intervals = sorted({cast("int", interval_ms(text)) for text in rollup.intervals})
        self._makes = {
            called: _maker(measure, config)
            for called, measure in self._measures.items()
            if measure.kind != "count"
        }
        self._readers = {
            called: (PartsReader(_small(measure)), parts_pointers(measure))
            for called, measure in self._measures.items()
            if measure.kind == "summary_parts"
        }
        self._times: list[Any] = []
        self._codes: list[list[Any]] = [[] for _ in self._dimensions]
        self._texts: list[dict[str, int]] = [{} for _ in self._dimensions]
        self._counted: dict[str, list[Any]] = {name: [] for name in self._measures}
        self._waiting: dict[str, list[_Numbers]] = {name: [] for name in self._measures}
        self._members = 0
        self._known: dict[str, dict[tuple[Number, ...], Row]] = {}

    def fields(self) -> set[str]:
        found = {self._timestamp, *self._dimensions}
        for query in (self._include, *self._includes.values()):
            found |= fields_of(query) if query is not None else set()
        return found | {measure.field for measure in self._measures.values() if measure.field is not None}

    def pointers(self) -> list[Tokens]:
        return [tokens for _, wanted in self._readers.values() for tokens in wanted if tokens]

    def add(self, batch: Batch) -> None:
        times = batch.column(self._timestamp)
        inside = times.counts == 1
        at = np.zeros(batch.count, dtype=np.int64)
        single = inside[times.rows]
        at[times.rows[single]] = to_numpy(times.values)[single]
        inside &= (at >= FIRST_MS) & (at <= LAST_MS)
        if self._include is not None:
            inside &= matching(self._include, batch)
        codes: list[Any] = []
        for name, texts in zip(self._dimensions, self._texts, strict=True):
            code, several = _dimension(batch, name, texts)
            inside &= ~several
            codes.append(code)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return
        member = np.full(batch.count, -1, dtype=np.int64)
        member[rows] = np.arange(self._members, self._members + len(rows))
        self._members += len(rows)
        self._times.append(at[rows])
        for held, code in zip(self._codes, codes, strict=True):
            held.append(code[rows])
        for name, measure in self._measures.items():
            self._measure(name, measure, batch, rows, member)

    def _measure(self, name: str, measure: Measure, batch: Batch, rows: Any, member: Any) -> None:
        if measure.kind == "count":
            include = self._includes[name]
            counted = np.ones(len(rows), bool) if include is None else matching(include, batch)[rows]
            self._counted[name].append(counted)
        elif measure.kind == "summary":
            column = batch.column(cast("str", measure.field))
            of = member[column.rows]
            self._waiting[name].append(_Numbers(of[of >= 0], to_numpy(column.values)[of >= 0]))
        else:
            reader, pointers = self._readers[name]
            found = [batch.leaves(tokens) if tokens else None for tokens in pointers]
            of, parts = list[int](), list[Parts]()
            for row in rows.tolist():
                small = {str(place): leaves[row] for place, leaves in enumerate(found) if leaves is not None}
                read = reader.read(small)
                if read is not None:
                    of.append(member[row])
                    parts.append(read)
            held = np.empty(len(parts), dtype=object)
            for place, read in enumerate(parts):
                held[place] = read
            self._waiting[name].append(_Numbers(np.array(of, dtype=np.int64), held))

    # -- groups ------------------------------------------------------------------------------------------

    @property
    def cuts(self) -> list[Cut]:
        """All dimensions together; and none, and each alone, where that is something else."""
        places = tuple(range(len(self._dimensions)))
        kept = {(), *((place,) for place in places)} - {places}
        return [Cut(self.name, self, places), *(Cut(cut_name(self.name, one), self, one) for one in kept)]

    def rows(self, name: str, places: tuple[int, ...], span_ms: int) -> Iterator[Row]:
        """The rows of one interval, in order, by the dimensions at some places."""
        if not self._members:
            return
        times = np.concatenate(self._times)
        windows = times - times % span_ms
        ranked = [_ranked(self._codes[place], self._texts[place]) for place in places]
        order = np.lexsort([codes for codes, _ in reversed(ranked)] + [windows])
        change = np.zeros(len(order), dtype=bool)
        change[0] = True
        for key in (windows, *(codes for codes, _ in ranked)):
            change[1:] |= np.diff(key[order]) != 0
        starts = np.flatnonzero(change)
        group_of = np.empty(len(order), dtype=np.int64)
        group_of[order] = np.cumsum(change) - 1
        states = {
            called: self._states(called, measure, group_of, len(starts))
            for called, measure in self._measures.items()
        }
        leads = order[starts]
        starts_ms: list[int] = windows[leads].tolist()
        dims = [_looked_up(texts, codes[leads].tolist()) for codes, texts in ranked]
        for group, start_ms in enumerate(starts_ms):
            values = [column[group] for column in dims]
            for measure, states_of in states.items():
                for state in states_of(group):
                    yield name, span_ms, start_ms, values, measure, *state

    def _states(self, name: str, measure: Measure, group_of: Any, groups: int) -> Callable[[int], list[Row]]:
        """What a measure's columns are in each group: one row, or more if a count would not fit."""
        if measure.kind == "count":
            counted = np.concatenate(self._counted[name])
            counts = np.bincount(group_of[counted], minlength=groups).tolist()
            return lambda group: [count_row(counts[group])]
        waiting = self._waiting[name]
        members = np.concatenate([piece.members for piece in waiting])
        of = group_of[members]
        order = np.argsort(of, kind="stable")
        values: list[Any] = np.concatenate([piece.values for piece in waiting])[order].tolist()
        offsets = np.searchsorted(of[order], np.arange(groups + 1)).tolist()
        make, known = self._makes[name], self._known.setdefault(name, {})

        def states_of(group: int) -> list[Row]:
            found = values[offsets[group] : offsets[group + 1]]
            if measure.kind == "summary":
                return [_summary_row(found, make, known)]
            return [summary_row(summary) for summary in _summed(found, make)]

        return states_of


class Cut(NamedTuple):
    """A rollup by some of its dimensions, and the name under which that is stored."""

    name: str
    rollup: _RollupRows
    places: tuple[int, ...]

    def rows(self) -> Iterator[Row]:
        for span_ms in self.rollup.intervals:
            yield from self.rollup.rows(self.name, self.places, span_ms)


class AggBuilder:
    def __init__(self, covers: Range, config: SearchConfig, rollups: tuple[str, ...]) -> None:
        self._covers = covers
        self._rollups = [_RollupRows(name, config.rollups[name], config) for name in sorted(rollups)]

    def fields(self) -> set[str]:
        return {name for rollup in self._rollups for name in rollup.fields()}

    def pointers(self) -> list[Tokens]:
        return [tokens for rollup in self._rollups for tokens in rollup.pointers()]

    def add(self, batch: Batch) -> None:
        for rollup in self._rollups:
            rollup.add(batch)

    def finish(self) -> list[Built]:
        cuts = sorted((cut for rollup in self._rollups for cut in rollup.cuts), key=_name_bytes)
        rows = (row for cut in cuts for row in cut.rows())
        data, count = write_agg(rows, facts_of(AGG, self._covers))
        return [Built(AGG, data, self._covers.rows, {"groups": count})]


def write_agg(rows: Iterator[Row], facts: dict[str, str]) -> tuple[bytes, int]:
    """Rows in order as a file, and how many they were."""
    with CompanionWriter(SCHEMA, facts, repeated=REPEATED, packed=PACKED) as writer:
        held: list[Row] = []
        for row in rows:
            held.append(row)
            if len(held) == GROUP_ROWS:
                writer.write(table_of(held))
                held.clear()
        writer.write(table_of(held))
        return writer.finish(), writer.rows


def table_of(rows: list[Row]) -> Any:
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _name_bytes(cut: Cut) -> bytes:
    return cut.name.encode()


def _bound(text: str | None, config: SearchConfig, path: str) -> Bound | None:
    return None if text is None else bind_include(text, config, f"{path}.include")


def _dimension(batch: Batch, name: str, texts: dict[str, int]) -> tuple[Any, Any]:
    """For each row which text it has, -1 if none; and which rows have two different values."""
    column = batch.column(name)
    code = np.full(batch.count, -1, dtype=np.int64)
    several = np.zeros(batch.count, dtype=bool)
    if not len(column.rows):
        return code, several
    values, which = distinct(column)
    known = np.array([texts.setdefault(text_of(value), len(texts)) for value in values])
    # Backwards, so that the first value of a row stays.
    code[column.rows[::-1]] = known[which][::-1]
    if len(column.rows) > len(column.present):
        first = np.full(batch.count, -1, dtype=np.int64)
        first[column.rows[::-1]] = which[::-1]
        several[column.rows[which != first[column.rows]]] = True
    return code, several


def _ranked(held: list[Any], texts: dict[str, int]) -> tuple[Any, list[str | None]]:
    """Codes that compare as the texts do, none first, and the texts by code."""
    ordered = sorted(texts)
    rank = np.empty(len(texts) + 1, dtype=np.int64)
    rank[-1] = 0  # the code -1
    for place, text in enumerate(ordered):
        rank[texts[text]] = place + 1
    return rank[np.concatenate(held)], [None, *ordered]


def _looked_up(texts: list[str | None], codes: list[int]) -> list[str | None]:
    return [texts[code] for code in codes]


def _maker(measure: Measure, config: SearchConfig) -> Callable[[], Summary]:
    if measure.kind == "summary_parts":
        declared = measure.histogram_json_pointer is not None
        return lambda: Summary(histogram=declared, whole=False)
    whole = config.fields[cast("str", measure.field)].kind == "integer"
    return lambda: Summary(histogram=measure.histogram is not None, whole=whole)


def _summary_row(
    found: list[Number], make: Callable[[], Summary], known: dict[tuple[Number, ...], Row]
) -> Row:
    """The columns of some numbers. Few of them are often the whole group of the next interval, too."""
    key = tuple(found) if len(found) <= KNOWN_NUMBERS_MAX else None
    row = None if key is None else known.get(key)
    if row is None:
        summary = make()
        summary.add_all(found)
        row = summary_row(summary)
        if key is not None and len(known) < KNOWN_MAX:
            known[key] = row
    return row


def _summed(found: list[Parts], make: Callable[[], Summary]) -> list[Summary]:
    """Summaries made by others, added up. Their counts may be as large as they like."""
    sums = [make()]
    for parts in found:
        if sums[-1].count + parts.size > INT64_MAX:
            sums.append(make())
        sums[-1].add_parts(parts)
    return sums


def parts_pointers(measure: Measure) -> list[Tokens | None]:
    pointers = (
        measure.count_json_pointer,
        measure.sum_json_pointer,
        measure.min_json_pointer,
        measure.max_json_pointer,
        measure.histogram_json_pointer,
        measure.sketch_json_pointer,
    )
    return [None if pointer is None else parse_pointer(pointer) for pointer in pointers]


def _small(measure: Measure) -> Measure:
    """The measure for a record that has just its parts."""
    given = parts_pointers(measure)
    places = [place if tokens is not None else None for place, tokens in zip(_PLACES, given, strict=True)]
    return Measure("summary_parts", None, None, None, *places)
