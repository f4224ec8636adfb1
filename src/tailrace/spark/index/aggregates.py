"""`agg` index files: for every rollup, interval, window and group, the partial state of each measure.

There are nearly as many groups by all dimensions as records, and most queries group by one dimension or none:
so each rollup is also stored by each dimension alone, and by none (a `DimensionCut`).

Members, the records of a rollup, are collected in compact form and grouped once, by all dimensions and the
shortest interval. Levels of longer intervals and fewer dimensions are combined from smaller levels instead of
from members. States are computed by the code that serves aggregate queries, so merging partial states gives
the same result as one state over all records.

The `include` query of a rollup or measure is evaluated on columns: once per distinct value, by the reference
evaluator. A clause holds for a row if it holds for one of the row's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple, cast

from tailrace.common.timestamps import TIMESTAMP_MS_MAX, TIMESTAMP_MS_MIN
from tailrace.schema.json_values import parse_pointer
from tailrace.schema.lenses import value_text
from tailrace.schema.search_config import Measure, Rollup, SearchConfig, parse_interval_ms
from tailrace.search.aggregates.keyed_states import group_ids
from tailrace.search.aggregates.measures import Summary, SummaryParts, SummaryPartsReader
from tailrace.search.aggregates.summary_arrays import (
    PartialSummaries,
    SummaryArray,
    build_number_array,
    concat_partial_summaries,
    concat_summaries,
    partial_summaries_by_group,
    sum_counts,
    summarise_by_group,
)
from tailrace.search.index_files.format import (
    AGG,
    COUNT,
    DIMENSIONS,
    HISTOGRAM,
    INTERVAL_MS,
    MEASURE,
    ROLLUP,
    SKETCH,
    SUM_REST,
    UNPLACED,
    WINDOW_START,
    partial_rollup_name,
)
from tailrace.search.matching import evaluate_values
from tailrace.search.query_language import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    HasValue,
    Negation,
    bind_rollup_include,
)
from tailrace.search.records import INT64_MAX, Value
from tailrace.spark.index import aggregate_states
from tailrace.spark.index.arrays import build_list_array, from_numpy, list_type, np, to_numpy
from tailrace.spark.index.file_writer import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.spark.index.segment_batches import PointerTokens, SegmentBatch, distinct_values
from tailrace.storage.segments.parquet import INT64, STRING, pa

_DENSE_FACTOR: Final = 8  # up to this many possible ids per member, a bitmap is faster than sorting


class MemberGroups(NamedTuple):
    """Members by group; groups are numbered in the order of their ids."""

    group_of_member: Any
    group_count: int
    members: Any  # one member of each group


def group_members(ids: Any) -> MemberGroups:
    """Group members by id. There is at least one member."""
    low = int(ids.min())
    width = int(ids.max()) - low + 1
    if width <= _DENSE_FACTOR * len(ids):
        marks = np.zeros(width, bool)
        marks[ids - low] = True
        group_of_member = (np.cumsum(marks) - 1)[ids - low]
    else:
        group_of_member = np.unique(ids, return_inverse=True)[1]
    members = np.empty(int(group_of_member.max()) + 1, np.int64)
    members[group_of_member] = np.arange(len(ids))
    return MemberGroups(group_of_member, len(members), members)


class RollupLevel(NamedTuple):
    """The groups by one interval and a set of dimensions."""

    span_ms: int
    members: Any  # one member of each group
    states: list[Any]  # by measure: counts, partial summaries, or summaries, which cannot be combined

    @property
    def group_count(self) -> int:
        return len(self.members)

    def can_combine_to(self, span_ms: int) -> bool:
        """Whether the groups of a longer interval can be combined from these."""
        additive = all(isinstance(state, PartialSummaries | np.ndarray) for state in self.states)
        return additive and span_ms % self.span_ms == 0


def build_level(
    span_ms: int,
    ids: Callable[[Any], Any],
    smaller: Sequence[RollupLevel],
    states: Callable[[MemberGroups], list[Any]],
) -> RollupLevel:
    """The level of an interval: combined from the last usable smaller level, else computed from members.

    `ids` returns the group ids of the given members; `states` computes the states of groups of members.
    """
    for level in reversed(smaller):
        if level.can_combine_to(span_ms):
            groups = group_members(ids(level.members))
            combined = [_combine_states(state, groups) for state in level.states]
            return RollupLevel(span_ms, level.members[groups.members], combined)
    groups = group_members(ids(slice(None)))
    return RollupLevel(span_ms, groups.members, states(groups))


def _combine_states(state: Any, groups: MemberGroups) -> Any:
    if isinstance(state, PartialSummaries):
        return state.by(groups.group_of_member, groups.group_count)
    return sum_counts(state, groups.group_of_member, groups.group_count)


def join_states(levels: Sequence[RollupLevel]) -> list[Any]:
    """Counts and summaries by measure, with those of all levels concatenated."""
    return [
        _to_summaries(_join_parts(parts)) for parts in zip(*(level.states for level in levels), strict=True)
    ]


def _join_parts(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], PartialSummaries):
        return concat_partial_summaries(parts)
    return concat_summaries(parts) if isinstance(parts[0], SummaryArray) else np.concatenate(parts)


def _to_summaries(found: Any) -> Any:
    return found.summaries() if isinstance(found, PartialSummaries) else found


def match_batch(query: BoundQuery, batch: SegmentBatch) -> Any:
    """Whether each row of the batch matches, as a numpy array."""
    match query:
        case All(clauses):
            found = np.ones(batch.count, dtype=bool)
            for clause in clauses:
                found &= match_batch(clause, batch)
            return found
        case AnyOf(clauses) | Anywhere(clauses):
            found = np.zeros(batch.count, dtype=bool)
            for clause in clauses:
                found |= match_batch(clause, batch)
            return found
        case Negation(clause):
            return ~match_batch(clause, batch)
        case HasValue(field):
            return batch.column(field).counts > 0
        case _:
            column = batch.column(query.field)
            values, which = distinct_values(column)
            matches = np.array([_clause_holds(query, value) for value in values], dtype=bool)
            found = np.zeros(batch.count, dtype=bool)
            if len(which):
                found[column.rows[matches[which]]] = True
            return found


def _clause_holds(clause: BoundQuery, value: Value) -> bool:
    return evaluate_values(clause, lambda _field: [value])


def bound_query_fields(query: BoundQuery) -> set[str]:
    """The fields that a query uses."""
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {name for clause in clauses for name in bound_query_fields(clause)}
        case Negation(clause):
            return bound_query_fields(clause)
        case _:
            return {query.field}


GROUP_ROWS: Final = 16_384
GROUPS_AT_ONCE: Final = 4096  # small levels are converted together until they have this many groups
GROUP_ROWS_MIN: Final = 512  # with this many rows, a section gets row groups of its own

AGGREGATE_SCHEMA: Final = pa.schema(
    [
        pa.field(ROLLUP, STRING, nullable=False),
        pa.field(INTERVAL_MS, INT64, nullable=False),
        pa.field(WINDOW_START, INT64, nullable=False),
        pa.field(DIMENSIONS, list_type(STRING, nullable=True), nullable=False),
        pa.field(MEASURE, STRING, nullable=False),
        *aggregate_states.STATE_SCHEMA,
    ]
)
# Counts are small numbers, mostly 1. The bucket numbers of a sketch ascend.
DICTIONARY_COLUMNS: Final = [
    *(ROLLUP, f"{DIMENSIONS}.list.element", MEASURE, COUNT, SUM_REST, UNPLACED),
    *(f"{HISTOGRAM}.key_value.key", f"{HISTOGRAM}.key_value.value", f"{SKETCH}.key_value.value"),
]
DELTA_COLUMNS: Final = [INTERVAL_MS, WINDOW_START, f"{SKETCH}.key_value.key"]

STATISTICS_COLUMNS: Final = [ROLLUP, INTERVAL_MS, WINDOW_START]  # row groups are selected by these

# The parts of a measure as members of a small record, which replaces the pointers of the measure.
_PART_POINTERS: Final = ("/0", "/1", "/2", "/3", "/4", "/5")


class _MeasureValues(NamedTuple):
    """Collected values of a measure, numbers or summaries, and the member of each."""

    members: Any
    values: Any  # numpy, or a number array after gathering


class _RollupBuilder:
    """Collects the members of one rollup and builds its tables."""

    def __init__(self, name: str, rollup: Rollup, config: SearchConfig) -> None:
        self.name = name
        self._timestamp = cast("str", rollup.timestamp_field or config.primary_timestamp_field)
        self._dimensions = rollup.dimensions
        path = f"search.rollups.{name}"
        self._include = _bind_optional_include(rollup.include, config, path)
        self._measures = dict(sorted(rollup.measures.items()))
        self._includes = {
            called: _bind_optional_include(measure.include, config, f"{path}.measures.{called}")
            for called, measure in self._measures.items()
        }
        self._intervals = sorted({cast("int", parse_interval_ms(text)) for text in rollup.intervals})
        self._makes = {
            called: _summary_factory(measure)
            for called, measure in self._measures.items()
            if measure.kind == "summary_parts"
        }
        self._readers = {
            called: (SummaryPartsReader(_parts_measure(measure)), parts_pointers(measure))
            for called, measure in self._measures.items()
            if measure.kind == "summary_parts"
        }
        self._times: list[Any] = []
        self._codes: list[list[Any]] = [[] for _ in self._dimensions]
        self._texts: list[dict[str, int]] = [{} for _ in self._dimensions]
        self._counted: dict[str, list[Any]] = {name: [] for name in self._measures}
        self._values: dict[str, list[_MeasureValues]] = {name: [] for name in self._measures}
        self._members = 0

    def fields(self) -> set[str]:
        found = {self._timestamp, *self._dimensions}
        for query in (self._include, *self._includes.values()):
            found |= bound_query_fields(query) if query is not None else set()
        return found | {measure.field for measure in self._measures.values() if measure.field is not None}

    def pointers(self) -> list[PointerTokens]:
        return [tokens for _, pointers in self._readers.values() for tokens in pointers if tokens]

    def add(self, batch: SegmentBatch) -> None:
        times = batch.column(self._timestamp)
        inside = times.counts == 1
        at = np.zeros(batch.count, dtype=np.int64)
        single = inside[times.rows]
        at[times.rows[single]] = to_numpy(times.values)[single]
        inside &= (at >= TIMESTAMP_MS_MIN) & (at <= TIMESTAMP_MS_MAX)
        if self._include is not None:
            inside &= match_batch(self._include, batch)
        codes: list[Any] = []
        for name, texts in zip(self._dimensions, self._texts, strict=True):
            code, several = _dimension_codes(batch, name, texts)
            inside &= ~several
            codes.append(code)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return
        member = np.full(batch.count, -1, dtype=np.int64)
        member[rows] = np.arange(self._members, self._members + len(rows))
        self._members += len(rows)
        self._times.append(at[rows])
        for collected, code in zip(self._codes, codes, strict=True):
            collected.append(code[rows])
        for name, measure in self._measures.items():
            self._measure(name, measure, batch, rows, member)

    def _measure(self, name: str, measure: Measure, batch: SegmentBatch, rows: Any, member: Any) -> None:
        if measure.kind == "count":
            include = self._includes[name]
            counted = np.ones(len(rows), bool) if include is None else match_batch(include, batch)[rows]
            self._counted[name].append(counted)
        elif measure.kind == "summary":
            column = batch.column(cast("str", measure.field))
            members = member[column.rows]
            inside = members >= 0
            self._values[name].append(_MeasureValues(members[inside], to_numpy(column.values)[inside]))
        else:
            reader, pointers = self._readers[name]
            found = [batch.leaves(tokens) if tokens else None for tokens in pointers]
            members, parts = list[int](), list[SummaryParts]()
            for row in rows.tolist():
                small = {str(place): leaves[row] for place, leaves in enumerate(found) if leaves is not None}
                read = reader.read(small)
                if read is not None:
                    members.append(member[row])
                    parts.append(read)
            values = np.empty(len(parts), dtype=object)
            for place, read in enumerate(parts):
                values[place] = read
            self._values[name].append(_MeasureValues(np.array(members, dtype=np.int64), values))

    # -- groups ------------------------------------------------------------------------------------------

    @property
    def cuts(self) -> list[DimensionCut]:
        """The cut by all dimensions, and those by none and by each alone unless they are the same."""
        places = tuple(range(len(self._dimensions)))
        partial_cuts = {(), *((place,) for place in places)} - {places}
        return [
            DimensionCut(self.name, self, places),
            *(DimensionCut(partial_rollup_name(self.name, one), self, one) for one in partial_cuts),
        ]

    def gather(self) -> GatheredMembers:
        """All members, ready to be grouped."""
        ranked = [_rank_texts(codes, texts) for codes, texts in zip(self._codes, self._texts, strict=True)]
        measured: dict[str, _MeasureValues] = {}
        for name, collected in self._values.items():
            measure = self._measures[name]
            if measure.kind == "count":
                continue
            members, values = (np.concatenate([piece[place] for piece in collected]) for place in (0, 1))
            if measure.kind == "summary":
                values = build_number_array(values, histogram=measure.histogram is not None)
            measured[name] = _MeasureValues(members, values)
        counted = {name: np.concatenate(flags) for name, flags in self._counted.items() if flags}
        times = np.concatenate(self._times)
        windows = {span_ms: group_members(times // span_ms) for span_ms in self._intervals}
        return GatheredMembers(times, windows, ranked, counted, measured, [])

    @property
    def is_empty(self) -> bool:
        return not self._members

    def tables(
        self, gathered: GatheredMembers, cuts: Iterable[DimensionCut]
    ) -> Iterator[tuple[Section, Any]]:
        """The rows of the cuts in order, interval by interval. The cut by all dimensions must come first."""
        pending = list[tuple[DimensionCut, RollupLevel]]()
        for cut in cuts:
            if self._makes:
                yield from self._tables_with_parts(gathered, cut)
                continue
            for level in self._levels(gathered, cut):
                pending.append((cut, level))
                if sum(one.group_count for _, one in pending) >= GROUPS_AT_ONCE:
                    yield from self._tables(gathered, pending)
                    pending.clear()
        if pending:
            yield from self._tables(gathered, pending)

    def _levels(self, gathered: GatheredMembers, cut: DimensionCut) -> Iterator[RollupLevel]:
        group_of_member, count = gathered.group_by(cut.places)
        levels = gathered.levels if len(cut.places) == len(self._dimensions) else list(gathered.levels)
        states = partial(self._states, gathered)
        for span_ms, windows in gathered.windows.items():
            ids = partial(_window_group_ids, windows.group_of_member, group_of_member, count)
            levels.append(build_level(span_ms, ids, levels, states))
            yield levels[-1]

    def _tables(
        self, gathered: GatheredMembers, cut_levels: list[tuple[DimensionCut, RollupLevel]]
    ) -> Iterator[tuple[Section, Any]]:
        """Convert small levels together: most of their cost does not depend on their size."""
        count = len(self._measures)
        levels = [level for _, level in cut_levels]
        whole = aggregate_states.state_table_from_groups(
            join_states(levels), sum(level.group_count for level in levels)
        )
        at = 0
        for cut, level in cut_levels:
            rows, which = np.repeat(level.members, count), np.tile(np.arange(count), level.group_count)
            yield self._table(gathered, cut, level.span_ms, (rows, which, whole.slice(at, len(rows))))
            at += len(rows)

    def _table(
        self, gathered: GatheredMembers, cut: DimensionCut, span_ms: int, found: tuple[Any, Any, Any]
    ) -> tuple[Section, Any]:
        """`found` has, for each row, a member of its group, the measure and the state."""
        rows, which, states = found
        columns = [
            pa.repeat(pa.scalar(cut.name, STRING), len(rows)),
            pa.repeat(pa.scalar(span_ms, INT64), len(rows)),
            from_numpy(gathered.times[rows] // span_ms * span_ms, INT64),
            _dimension_lists([gathered.ranked[place] for place in cut.places], rows),
            pa.array(list(self._measures), STRING).take(pa.array(which)),
            *states.columns,
        ]
        return (cut.name, span_ms), pa.Table.from_arrays(columns, schema=AGGREGATE_SCHEMA)

    def _tables_with_parts(
        self, gathered: GatheredMembers, cut: DimensionCut
    ) -> Iterator[tuple[Section, Any]]:
        group_of_member, count = gathered.group_by(cut.places)
        for span_ms, windows in gathered.windows.items():
            groups = group_members(
                _window_group_ids(windows.group_of_member, group_of_member, count, slice(None))
            )
            yield self._table(gathered, cut, span_ms, self._rows_with_parts(gathered, groups))

    def _rows_with_parts(self, gathered: GatheredMembers, groups: MemberGroups) -> tuple[Any, Any, Any]:
        """Rows of a rollup with a `summary_parts` measure: a group has several if a count exceeds 64 bits."""
        tables, group_numbers = list[Any](), list[Any]()
        for name, measure in self._measures.items():
            if measure.kind == "summary_parts":
                numbers, table = self._parts(gathered.measured[name], groups, self._makes[name])
            else:
                found = join_states([RollupLevel(0, groups.members, [self._state(gathered, name, groups)])])
                numbers, table = (
                    np.arange(groups.group_count),
                    aggregate_states.state_table_from_groups(found, groups.group_count),
                )
            tables.append(table)
            group_numbers.append(numbers)
        group = np.concatenate(group_numbers)
        order = np.argsort(group, kind="stable")
        which = np.repeat(np.arange(len(self._measures)), [len(numbers) for numbers in group_numbers])
        whole = pa.concat_tables(tables).combine_chunks().take(pa.array(order))
        return groups.members[group[order]], which[order], whole.combine_chunks()

    def _states(self, gathered: GatheredMembers, groups: MemberGroups) -> list[Any]:
        return [self._state(gathered, name, groups) for name in self._measures]

    def _state(self, gathered: GatheredMembers, name: str, groups: MemberGroups) -> Any:
        """The count or summary of each group; as partial summaries, which can be combined, if possible."""
        if self._measures[name].kind == "count":
            return np.bincount(groups.group_of_member[gathered.counted[name]], minlength=groups.group_count)
        members, values = gathered.measured[name]
        group_of_value = groups.group_of_member[members]
        partials = partial_summaries_by_group(values, group_of_value, groups.group_count)
        return (
            summarise_by_group(values, group_of_value, groups.group_count) if partials is None else partials
        )

    def _parts(
        self, measured: _MeasureValues, groups: MemberGroups, make: Callable[[], Summary]
    ) -> tuple[Any, Any]:
        """The group of each state, and the states."""
        found: list[list[SummaryParts]] = [[] for _ in range(groups.group_count)]
        group_of_value = cast("list[int]", groups.group_of_member[measured.members].tolist())
        for group, parts in zip(group_of_value, measured.values.tolist(), strict=True):
            found[group].append(parts)
        summed = [(group, one) for group, parts in enumerate(found) for one in _sum_parts(parts, make)]
        rows = [aggregate_states.summary_row(summary) for _, summary in summed]
        return np.array([group for group, _ in summed]), aggregate_states.state_table_from_rows(rows)


Section = tuple[str, int]  # the name that a cut of a rollup is stored under, and the interval


class GatheredMembers(NamedTuple):
    """All members of a rollup, as arrays."""

    times: Any
    windows: dict[int, MemberGroups]  # by interval
    ranked: list[tuple[Any, list[str | None]]]  # by dimension, the codes of members and the texts by code
    counted: dict[str, Any]  # by measure, which members are counted
    measured: dict[str, _MeasureValues]
    levels: list[RollupLevel]  # by all dimensions; other levels are combined from these

    def group_by(self, places: tuple[int, ...]) -> tuple[Any, int]:
        """The group number of each member by the given dimensions, and an upper bound of the numbers."""
        if len(places) == 1:
            codes, texts = self.ranked[places[0]]
            return codes, len(texts)
        groups = group_members(group_ids([self.ranked[place][0] for place in places], len(self.times)))
        return groups.group_of_member, groups.group_count


class DimensionCut(NamedTuple):
    """A rollup by a subset of its dimensions, and the name that it is stored under."""

    name: str
    rollup: _RollupBuilder
    places: tuple[int, ...]


class AggregateBuilder:
    def __init__(self, covers: IndexedRange, config: SearchConfig, rollups: tuple[str, ...]) -> None:
        self._covers = covers
        self._rollups = [_RollupBuilder(name, config.rollups[name], config) for name in sorted(rollups)]

    def fields(self) -> set[str]:
        return {name for rollup in self._rollups for name in rollup.fields()}

    def pointers(self) -> list[PointerTokens]:
        return [tokens for rollup in self._rollups for tokens in rollup.pointers()]

    def add(self, batch: SegmentBatch) -> None:
        for rollup in self._rollups:
            rollup.add(batch)

    def finish(self) -> list[BuiltIndexFile]:
        gathered = {rollup.name: rollup.gather() for rollup in self._rollups if not rollup.is_empty}
        cuts = sorted((cut for rollup in self._rollups for cut in rollup.cuts), key=_name_bytes)
        found = (
            section
            for rollup, rollup_cuts in groupby(cuts, lambda cut: cut.rollup)
            if rollup.name in gathered
            for section in rollup.tables(gathered[rollup.name], rollup_cuts)
        )
        data, count = write_aggregates(found, build_file_facts(AGG, self._covers))
        return [BuiltIndexFile(AGG, data, self._covers.rows, {"groups": count})]


def write_aggregates(
    found: Iterable[tuple[Section, Any]], facts: dict[str, str], sink: Any = None
) -> tuple[bytes, int]:
    """Write sorted rows. Returns the file and the number of rows.

    Row groups depend on the rows only, not on how sections are cut into tables.
    """
    with IndexFileWriter(
        AGGREGATE_SCHEMA,
        facts,
        dictionary=DICTIONARY_COLUMNS,
        delta=DELTA_COLUMNS,
        page_rows=GROUP_ROWS,
        statistics=STATISTICS_COLUMNS,
        sink=sink,
    ) as writer:
        pending: list[Any] = []
        rows, previous = 0, None
        for section, table in found:
            if section != previous and rows >= GROUP_ROWS_MIN:
                writer.write(pa.concat_tables(pending).combine_chunks())
                pending, rows = [], 0
            previous = section
            at = 0
            while at < table.num_rows:
                piece = table.slice(at, GROUP_ROWS - rows)
                pending.append(piece)
                rows += piece.num_rows
                at += piece.num_rows
                if rows == GROUP_ROWS:
                    writer.write(pa.concat_tables(pending).combine_chunks())
                    pending, rows = [], 0
        if pending:
            writer.write(pa.concat_tables(pending).combine_chunks())
        return writer.finish(), writer.rows


def split_sections(tables: Iterable[Any]) -> Iterator[tuple[Section, Any]]:
    """Split tables by section: one rollup and interval each."""
    for table in tables:
        if not table.num_rows:
            continue
        spans = to_numpy(table.column(INTERVAL_MS))
        rollups = to_numpy(table.column(ROLLUP).combine_chunks().dictionary_encode().indices)
        changes = np.flatnonzero((np.diff(spans) != 0) | (np.diff(rollups) != 0)) + 1
        edges: list[int] = [0, *changes.tolist(), table.num_rows]
        for first, last in pairwise(edges):
            section = (table.column(ROLLUP)[first].as_py(), int(spans[first]))
            yield section, table.slice(first, last - first)


def _dimension_lists(ranked: list[tuple[Any, list[str | None]]], rows: Any) -> Any:
    """The dimension values of the given members, as lists."""
    texts: list[str | None] = []
    places: list[Any] = []
    for codes, values in ranked:
        places.append(codes[rows] + len(texts))
        texts += values
    offsets = np.arange(len(rows) + 1) * len(ranked)
    flat = np.stack(places, axis=1).reshape(-1) if places else np.zeros(0, np.int64)
    values = pa.array(texts, STRING).take(pa.array(flat, INT64))
    return build_list_array(AGGREGATE_SCHEMA.field(DIMENSIONS).type, offsets, values)


def _window_group_ids(windows: Any, group_of_member: Any, count: int, members: Any) -> Any:
    """A unique id of window and group for the given members."""
    return windows[members] * count + group_of_member[members]


def _name_bytes(cut: DimensionCut) -> bytes:
    return cut.name.encode()


def _bind_optional_include(text: str | None, config: SearchConfig, path: str) -> BoundQuery | None:
    return None if text is None else bind_rollup_include(text, config, f"{path}.include")


def _dimension_codes(batch: SegmentBatch, name: str, texts: dict[str, int]) -> tuple[Any, Any]:
    """The code of each row's text, -1 if it has none; and which rows have different values."""
    column = batch.column(name)
    code = np.full(batch.count, -1, dtype=np.int64)
    several = np.zeros(batch.count, dtype=bool)
    if not len(column.rows):
        return code, several
    values, which = distinct_values(column)
    known = np.array([texts.setdefault(value_text(value), len(texts)) for value in values])
    # In reverse, so that the first value of a row wins.
    code[column.rows[::-1]] = known[which][::-1]
    if len(column.rows) > len(column.present):
        first = np.full(batch.count, -1, dtype=np.int64)
        first[column.rows[::-1]] = which[::-1]
        several[column.rows[which != first[column.rows]]] = True
    return code, several


def _rank_texts(codes: list[Any], texts: dict[str, int]) -> tuple[Any, list[str | None]]:
    """Codes in the order of the texts, with none first, and the texts by code."""
    ordered = sorted(texts)
    rank = np.empty(len(texts) + 1, dtype=np.int64)
    rank[-1] = 0  # the code -1
    for place, text in enumerate(ordered):
        rank[texts[text]] = place + 1
    return rank[np.concatenate(codes)], [None, *ordered]


def _summary_factory(measure: Measure) -> Callable[[], Summary]:
    declared = measure.histogram_json_pointer is not None
    return lambda: Summary(histogram=declared, whole=False)


def _sum_parts(found: list[SummaryParts], make: Callable[[], Summary]) -> list[Summary]:
    """The sum of client-made summaries; several if the count would exceed 64 bits."""
    sums = [make()]
    for parts in found:
        if sums[-1].count + parts.size > INT64_MAX:
            sums.append(make())
        sums[-1].add_parts(parts)
    return sums


def parts_pointers(measure: Measure) -> list[PointerTokens | None]:
    pointers = (
        measure.count_json_pointer,
        measure.sum_json_pointer,
        measure.min_json_pointer,
        measure.max_json_pointer,
        measure.histogram_json_pointer,
        measure.sketch_json_pointer,
    )
    return [None if pointer is None else parse_pointer(pointer) for pointer in pointers]


def _parts_measure(measure: Measure) -> Measure:
    """The measure for a small record that has just its parts."""
    pointers = [
        pointer if tokens is not None else None
        for pointer, tokens in zip(_PART_POINTERS, parts_pointers(measure), strict=True)
    ]
    return Measure("summary_parts", None, None, None, *pointers)
