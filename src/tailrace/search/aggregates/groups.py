"""Groups of an aggregate with their measures, filled from decoded records and from columns; runs on threads.

A record counts for a rollup if it is an object, the rollup's include matches, the timestamp field has exactly
one value, and no dimension has two different ones. Each measure then reads its own values, if there are any.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import orjson

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import invalid_request
from tailrace.schema.lenses import value_text
from tailrace.search.aggregates.measures import (
    STATE_BYTES,
    Json,
    Number,
    Summary,
    SummaryParts,
    SummaryPartsReader,
    summary_pointers,
)
from tailrace.search.chunks import Chunk, build_columns
from tailrace.search.columns import Column, rows_from_bits
from tailrace.search.index_files.format import MBLK_POINTERS
from tailrace.search.matching import Matcher
from tailrace.search.query_language import BoundQuery
from tailrace.search.records import FieldExtractor, RecordDecoder, RecordView, Value
from tailrace.search.requests import AggregateRequest
from tailrace.search.scan import query_fields

GROUPS_MAX: Final = 100_000
HELD_BYTES_MAX: Final = 256 << 20
ROWS_PER_CLOCK_CHECK: Final = 128  # between two checks of the deadline

_GROUP_BYTES: Final = 500

Payload = bytes | memoryview
GroupKey = tuple[int, tuple[str | None, ...]]  # the start of the window, and the values of `group_by`


class Group:
    """The state of one group. Numbers are buffered until a batch of rows is finished."""

    __slots__ = ("bytes", "counts", "parts", "summaries", "waiting")

    def __init__(self, counts: int, summaries: Mapping[str, Callable[[], Summary]]) -> None:
        self.counts = [0] * counts
        self.summaries = {name: make() for name, make in summaries.items()}
        self.waiting: dict[str, list[Number]] = {}
        self.parts: list[tuple[str, SummaryParts]] = []
        self.bytes = len(summaries) * STATE_BYTES  # of its summaries, when last measured


class Groups:
    """All groups of one aggregate, bounded in number and bytes."""

    def __init__(self, view: RecordView, request: AggregateRequest) -> None:
        self.counted = [name for name, measure in request.measures.items() if measure.kind == "count"]
        self._makes = {
            name: _key_maker(view, request, name)
            for name, measure in request.measures.items()
            if measure.kind != "count"
        }
        self._view = view
        self._request = request
        self.groups: dict[GroupKey, Group] = {}
        self._touched: dict[GroupKey, Group] = {}
        self._held_bytes = 0

    def at(self, key: GroupKey) -> Group:
        group = self._touched.get(key)
        if group is not None:
            return group
        group = self.groups.get(key)
        if group is None:
            group = Group(len(self.counted), self._makes)
            self._add(key, group)
        self._touched[key] = group
        return group

    def _add(self, key: GroupKey, group: Group) -> None:
        check_groups(len(self.groups) + 1)
        self.groups[key] = group
        self._held_bytes += _GROUP_BYTES + group.bytes

    def _measure(self, group: Group) -> None:
        size = sum([summary.memory_bytes for summary in group.summaries.values()])
        self._held_bytes += size - group.bytes
        group.bytes = size

    def merge(self, key: GroupKey, name: str, summary: Summary) -> None:
        """Merge a summary into a group."""
        group = self.at(key)
        group.summaries[name].merge(summary)
        self._measure(group)

    def empty_copy(self) -> Groups:
        """The same aggregate without groups, to collect what is added as a whole or not at all."""
        return Groups(self._view, self._request)

    def merge_all(self, others: Groups) -> None:
        """Merge settled groups, which must not be used afterwards."""
        for key, its in others.groups.items():
            mine = self.groups.get(key)
            if mine is None:
                self._add(key, its)
                continue
            mine.counts = [one + other for one, other in zip(mine.counts, its.counts, strict=True)]
            for name, summary in its.summaries.items():
                mine.summaries[name].merge(summary)
            self._measure(mine)
        self._check_bytes()

    def flush_pending(self) -> None:
        """Add buffered numbers to their summaries."""
        for group in self._touched.values():
            if not group.waiting and not group.parts:
                continue
            for name, numbers in group.waiting.items():
                group.summaries[name].add_all(numbers)
            for name, parts in group.parts:
                group.summaries[name].add_parts(parts)
            group.waiting.clear()
            group.parts.clear()
            self._measure(group)
        self._touched.clear()
        self._check_bytes()

    def _check_bytes(self) -> None:
        check_bytes(self._held_bytes)

    def to_json(self, deadline: float) -> list[tuple[int, orjson.Fragment]]:
        """The groups of each window as one piece of JSON.

        As objects tens of thousands of groups would be a hundred megabytes, and as many small pieces of JSON
        twice that: each is written into a buffer of some kilobytes, most of which stays unused behind it.
        """
        windows: dict[int, list[GroupKey]] = {}
        for key in self.groups:
            windows.setdefault(key[0], []).append(key)
        return [
            (start_ms, orjson.Fragment(self._shown_window(windows[start_ms], deadline)))
            for start_ms in sorted(windows)
        ]

    def _shown_window(self, keys: Sequence[GroupKey], deadline: float) -> bytes:
        """Groups in the order of the JSON text of their keys."""
        listed: list[tuple[bytes, bytes]] = []
        for index, key in enumerate(keys):
            if not index % ROWS_PER_CLOCK_CHECK and time.monotonic() >= deadline:
                raise aggregate_timeout()
            listed.append(self._shown_group(key))
        return b"[%b]" % b",".join([shown for _, shown in sorted(listed)])

    def _shown_group(self, key: GroupKey) -> tuple[bytes, bytes]:
        """Its name and all of it."""
        name = orjson.dumps(dict(zip(self._request.group_by, key[1], strict=True)))
        measures = orjson.dumps(self._shown_measures(self.groups[key]))
        return name, b'{"key":%b,"measures":%b}' % (name, measures)

    def shown_each(self) -> list[tuple[GroupKey, bytes]]:
        """All groups as JSON in any order, to be merged with others."""
        return [(key, self._shown_group(key)[1]) for key in self.groups]

    def _shown_measures(self, group: Group) -> Json:
        """In the order of their names, as the request has them."""
        counts, summaries = iter(group.counts), group.summaries
        return {
            name: {"count": next(counts)}
            if measure.kind == "count"
            else summaries[name].to_json(method=measure.kind == "summary_parts")
            for name, measure in self._request.measures.items()
        }


def check_groups(count: int) -> None:
    if count > GROUPS_MAX:
        raise invalid_request(
            f"aggregate result exceeds {GROUPS_MAX} groups; narrow the range, q or group_by"
        )


def check_bytes(held: int) -> None:
    if held > HELD_BYTES_MAX:
        raise invalid_request(
            "aggregate result takes too much memory; narrow the range, q, group_by or measures"
        )


def aggregate_timeout() -> TailraceError:
    return TailraceError("request_timeout", "request timed out")


def _key_maker(view: RecordView, request: AggregateRequest, name: str) -> Callable[[], Summary]:
    measure = request.measures[name]
    if measure.kind == "summary_parts":
        declared = measure.histogram_json_pointer is not None
        return lambda: Summary(histogram=declared, whole=False)
    whole = view.config.fields[cast("str", measure.field)].kind == "integer"
    return lambda: Summary(histogram=measure.histogram is not None, whole=whole)


class AggregateScan(NamedTuple):
    """How many payloads a scan decided, and their timestamp bounds."""

    decided: int
    primary_max: int | None
    times: tuple[int, int] | None  # the smallest and the largest


class AggregateScanner:
    """Adds stored payloads to groups by decoding records."""

    def __init__(self, view: RecordView, request: AggregateRequest, groups: Groups) -> None:
        self._view = view
        self._request = request
        self._groups = groups
        self._first_current = view.first_current()
        names = [request.timestamp_field]
        self._primary: int | None = None
        if view.primary is not None:
            if view.primary not in names:
                names.append(view.primary)
            self._primary = names.index(view.primary)
        # Of rows outside the requested time only the timestamps are read.
        self._narrow = FieldExtractor(view, names)
        first = len(names)
        names += request.rollup.dimensions
        self._dimensions = range(first, len(names))
        self._grouped = [names.index(name, first) for name in request.group_by]
        self._summaries: list[tuple[str, int]] = []
        self._parts: list[tuple[str, SummaryPartsReader]] = []
        for name, measure in request.measures.items():
            if measure.kind == "summary":
                self._summaries.append((name, len(names)))
                names.append(cast("str", measure.field))
            elif measure.kind == "summary_parts":
                self._parts.append((name, SummaryPartsReader(measure)))
        self._wide = FieldExtractor(view, names)
        self._mostly_inside = True
        wanted = [query for query in (request.query, request.include) if query is not None]
        self._tests = [self._matcher(query) for query in wanted]
        includes = [request.measure_includes.get(name) for name in groups.counted]
        self._counted = [None if query is None else self._matcher(query) for query in includes]

    def _matcher(self, query: BoundQuery) -> Matcher:
        return Matcher(query, self._view.config, self._view.version)

    def scan(self, first: int, payloads: Sequence[Payload], deadline: float) -> AggregateScan:
        """Add payloads of consecutive entries. Returns how many before the deadline."""
        primaries: list[int] = []
        seen: list[int] = []
        from_ms, to_ms, primary = self._request.from_ms, self._request.to_ms, self._primary
        # Usually adjacent rows are alike, inside or outside: then each is decoded once.
        wide = self._mostly_inside
        row_of = (self._wide if wide else self._narrow).row
        decided = inside = 0
        for index, payload in enumerate(payloads):
            if not index % ROWS_PER_CLOCK_CHECK and time.monotonic() >= deadline:
                break
            row = row_of(first + index, payload)
            if primary is not None:
                primaries += cast("Sequence[int]", row[primary])
            times = cast("Sequence[int]", row[0])
            seen += times
            if len(times) == 1 and from_ms <= times[0] < to_ms:
                inside += 1
                entry = first + index
                self._consume(entry, payload, row if wide else self._wide.row(entry, payload))
            decided = index + 1
        self._mostly_inside = inside * 2 > decided
        self._groups.flush_pending()
        return AggregateScan(decided, max(primaries, default=None), (min(seen), max(seen)) if seen else None)

    def _consume(self, entry: int, payload: Payload, row: Sequence[Sequence[Value]]) -> None:
        for index in self._dimensions:
            if len(row[index]) > 1 and len(set(row[index])) > 1:
                return
        matches = self._decider(entry, payload)
        for test in self._tests:
            if not matches(test):
                return
        at_ms = cast("int", row[0][0])
        values = tuple([value_text(row[index][0]) if row[index] else None for index in self._grouped])
        group = self._groups.at((at_ms - at_ms % self._request.interval_ms, values))
        for index, include in enumerate(self._counted):
            if include is None or matches(include):
                group.counts[index] += 1
        for name, index in self._summaries:
            if row[index]:
                group.waiting.setdefault(name, []).extend(cast("Sequence[Number]", row[index]))
        if self._parts:
            record = self._view.record(entry, payload)
            for name, reader in self._parts:
                parts = reader.read(record)
                if parts is not None:
                    group.parts.append((name, parts))

    def _decider(self, entry: int, payload: Payload) -> Callable[[Matcher], bool]:
        if entry >= self._first_current or self._view.is_current(entry):
            return lambda matcher: matcher.matches(payload)
        record = self._view.record(entry, payload)
        return lambda matcher: matcher.matches_record(record)


ROWS_AT_ONCE = 1024  # between two checks of the deadline
SummaryPartsLookup = Callable[[Sequence[int]], Sequence[SummaryParts | None]]  # of some entries


def columns_suffice(request: AggregateRequest) -> bool:
    """Whether columns have all measures. Summaries in records are not in columns."""
    return all(measure.kind != "summary_parts" for measure in request.measures.values())


def columns_and_blocks_suffice(request: AggregateRequest) -> bool:
    """Whether columns and metric blocks have all measures; blocks hold summaries of one form."""
    return all(
        measure.kind != "summary_parts" or summary_pointers(measure) == MBLK_POINTERS
        for measure in request.measures.values()
    )


class ColumnAggregator:
    """Adds chunks to groups. `trimmed` is the last entry that retention has removed."""

    def __init__(self, view: RecordView, request: AggregateRequest, groups: Groups, trimmed: int) -> None:
        self._view = view
        self._request = request
        self._groups = groups
        self._trimmed = trimmed
        self._summaries = [
            (name, cast("str", measure.field))
            for name, measure in request.measures.items()
            if measure.kind == "summary"
        ]
        self._parts = [name for name, one in request.measures.items() if one.kind == "summary_parts"]

    def add(self, chunk: Chunk, parts_of: SummaryPartsLookup | None = None) -> int:
        """Add a chunk. Returns how many rows were read. `parts_of` looks up summaries of records."""
        rows = rows_from_bits(self._members(chunk))
        if not rows:
            return 0
        columns, request = chunk.columns, self._request
        grouped = [self._texts(columns[name], name, rows) for name in request.group_by]
        found: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for key, row in zip(zip(self._windows(chunk, rows), *grouped, strict=True), rows, strict=True):
            found[key].append(row)
        includes = [request.measure_includes.get(name) for name in self._groups.counted]
        counted = [None if query is None else set(rows_from_bits(chunk.match(query))) for query in includes]
        summaries = [(name, _numbers(columns[field])) for name, field in self._summaries]
        brought: dict[int, SummaryParts | None] = {}
        if parts_of is not None:
            brought = dict(zip(rows, parts_of([chunk.entries[row] for row in rows]), strict=True))
        for (start_ms, *values), own in found.items():
            group = self._groups.at((start_ms, tuple(values)))
            for index, included in enumerate(counted):
                group.counts[index] += len(own) if included is None else sum(map(included.__contains__, own))
            for name, numbers_of in summaries:
                if numbers := numbers_of(own):
                    group.waiting.setdefault(name, []).extend(numbers)
            for name in self._parts if brought else ():
                found_parts = (brought[row] for row in own)
                group.parts += [(name, parts) for parts in found_parts if parts is not None]
        self._groups.flush_pending()
        return len(rows)

    def _windows(self, chunk: Chunk, rows: Sequence[int]) -> list[int]:
        """The window start of each row; all rows have exactly one timestamp."""
        times = chunk.columns[self._request.timestamp_field]
        interval_ms = self._request.interval_ms
        starts = [at_ms - at_ms % interval_ms for at_ms in cast("Sequence[int]", times.terms.all())]
        return [starts[rank] for rank in _first_ranks(times, rows)]

    def primary_max(self, chunk: Chunk) -> int | None:
        """The largest primary timestamp of the rows that are not trimmed."""
        primary = self._view.primary
        if primary is None:
            return None
        if chunk.first > self._trimmed:
            bounds = chunk.bounds(primary)
            return None if bounds is None else cast("int", bounds[1])
        found = (
            chunk.extreme_value(primary, row, True) for row in rows_from_bits(chunk.rows_after(self._trimmed))
        )
        return max((cast("int", value) for value in found if value is not None), default=None)

    def _members(self, chunk: Chunk) -> int:
        """The rows that contribute."""
        request, rows = self._request, self.within_time(chunk)
        for query in (request.query, request.include):
            if query is not None and rows:
                rows &= chunk.match(query)
        for name in request.rollup.dimensions:
            column = chunk.columns[name]
            for row in rows_from_bits(rows & column.multiple):
                if len(set(column.ranks_of(row))) > 1:
                    rows &= ~(1 << row)
        return rows

    def within_time(self, chunk: Chunk) -> int:
        """The rows that are not trimmed, with one timestamp within the requested time."""
        request, field = self._request, self._request.timestamp_field
        bounds = cast("tuple[int, int] | None", chunk.bounds(field))
        if bounds is None or bounds[0] >= request.to_ms or bounds[1] < request.from_ms:
            return 0
        rows = chunk.columns[field].present & ~chunk.columns[field].multiple
        if bounds[0] < request.from_ms:
            rows &= chunk.rows_in_range(field, ">=", request.from_ms)
        if bounds[1] >= request.to_ms:
            rows &= chunk.rows_in_range(field, "<", request.to_ms)
        if chunk.first <= self._trimmed:
            rows &= chunk.rows_after(self._trimmed)
        return rows

    def _texts(self, column: Column, name: str, rows: Sequence[int]) -> list[str | None]:
        """The value of a dimension in each row, as groups are named."""
        terms: Sequence[Value] = column.terms.all()
        if self._view.config.fields[name].kind == "bool":
            terms = [bool(term) for term in terms]  # columns have them as numbers
        texts: list[str | None] = [value_text(term) for term in terms]
        if column.starts is not None:
            texts.append(None)  # has the rank of those without a value
        return [texts[rank] for rank in _first_ranks(column, rows)]


class ColumnScanner:
    """Adds stored payloads to groups, by columns built for this scan."""

    def __init__(self, view: RecordView, request: AggregateRequest, adder: ColumnAggregator) -> None:
        self._view = view
        self._request = request
        self._adder = adder
        times = {request.timestamp_field: None}
        if view.primary is not None:
            times[view.primary] = None
        measured = [cast("str", one.field) for one in request.measures.values() if one.kind == "summary"]
        queries = (request.query, request.include, *request.measure_includes.values())
        asked = [name for query in queries if query is not None for name in sorted(query_fields(query))]
        # Of rows outside the requested time only the timestamps are read.
        self._narrow = RecordDecoder(view, list(times))
        self._wide = RecordDecoder(
            view, list(dict.fromkeys([*times, *request.rollup.dimensions, *measured, *asked]))
        )
        self._mostly_inside = True

    def scan(self, first: int, payloads: Sequence[Payload], deadline: float) -> AggregateScan:
        """Add payloads of consecutive entries. Returns how many before the deadline."""
        primaries: list[int] = []
        seen: list[int] = []
        decided = 0
        while decided < len(payloads) and time.monotonic() < deadline:
            batch = payloads[decided : decided + ROWS_AT_ONCE]
            chunk = self._add(range(first + decided, first + decided + len(batch)), batch)
            primary = self._adder.primary_max(chunk)
            primaries += () if primary is None else (primary,)
            seen += cast("tuple[int, int] | None", chunk.bounds(self._request.timestamp_field)) or ()
            decided += len(batch)
        return AggregateScan(decided, max(primaries, default=None), (min(seen), max(seen)) if seen else None)

    def _add(self, entries: Sequence[int], payloads: Sequence[Payload]) -> Chunk:
        """Add one batch. Returns the timestamps of all its payloads."""
        if self._mostly_inside:
            chunk = self._chunk(self._wide, entries, payloads)
            self._mostly_inside = self._adder.add(chunk) * 2 > len(entries)
            return chunk
        chunk = self._chunk(self._narrow, entries, payloads)
        inside = rows_from_bits(self._adder.within_time(chunk))
        if inside:
            some = [entries[row] for row in inside], [payloads[row] for row in inside]
            self._adder.add(self._chunk(self._wide, *some))
            self._mostly_inside = len(inside) * 2 > len(entries)
        return chunk

    def _chunk(self, decoder: RecordDecoder, entries: Sequence[int], payloads: Sequence[Payload]) -> Chunk:
        members = decoder.all_members(entries, payloads)
        return Chunk(entries, build_columns(self._view.config, decoder.gets, members, lists=False))


def _first_ranks(column: Column, rows: Sequence[int]) -> Sequence[int]:
    """The first rank of each row, or -1."""
    ranks, starts = column.ranks, column.starts
    if starts is None:
        return [ranks[row] for row in rows] if len(rows) < column.count else ranks
    return [ranks[at] if (at := starts[row]) < starts[row + 1] else -1 for row in rows]


def _numbers(column: Column) -> Callable[[Sequence[int]], list[Number]]:
    """All values that some rows have."""
    terms = cast("Sequence[Number]", column.terms.all())
    if column.starts is None:
        numbers = [terms[rank] for rank in column.ranks]
        return lambda rows: [numbers[row] for row in rows]
    return lambda rows: [terms[rank] for row in rows for rank in column.ranks_of(row)]
