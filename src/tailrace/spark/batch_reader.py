"""Batch reads, `spark.read.format("tailrace")`, with filter pushdown.

With `pushdown`, the source applies filters itself, so that fewer segments, row groups and rows are read. It
accepts only filters that it can decide exactly and returns the others to Spark. As in Spark, a comparison
with a missing key is NULL, and a row passes only if every condition is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from tailrace.spark.catalogue import StreamCatalogue, StreamState
from tailrace.spark.columns import check_schema
from tailrace.spark.options import OptionError, ReadOptions
from tailrace.spark.partitions import (
    PartitionPlanner,
    PartitionReader,
    PositionResolver,
    StreamPartition,
    StreamRange,
)
from tailrace.storage.segments.parquet import BINARY, INT64, MICROS, pa, pc
from tailrace.storage.segments.reader import Footer

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LOW, _HIGH = -(2**63), 2**63 - 1

_OPERATORS: dict[type[Filter], str] = {
    EqualTo: "in",
    In: "in",
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
}
_COMPARE = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}


class Condition(NamedTuple):
    """`column operator values`; times are microseconds. `in` is true if any of the values is equal."""

    column: str
    operator: str
    values: tuple[Any, ...]


class ValueBounds(NamedTuple):
    """An inclusive range. Empty if `low` is greater than `high`."""

    low: int = _LOW
    high: int = _HIGH

    def narrowed(self, condition: Condition) -> ValueBounds:
        values: tuple[int, ...] = condition.values
        match condition.operator:
            case "in":
                return ValueBounds(max(self.low, min(values)), min(self.high, max(values)))
            case "<":
                return ValueBounds(self.low, min(self.high, values[0] - 1))
            case "<=":
                return ValueBounds(self.low, min(self.high, values[0]))
            case ">":
                return ValueBounds(max(self.low, values[0] + 1), self.high)
            case _:
                return ValueBounds(max(self.low, values[0]), self.high)


def to_condition(pushed: Filter) -> Condition | None:
    """The filter in a form that the source can apply; None if Spark has to apply it."""
    operator = _OPERATORS.get(type(pushed))
    attribute: Any = getattr(pushed, "attribute", None)
    if operator is None or attribute is None or len(attribute) != 1:
        return None
    column: str = attribute[0]
    raw: Any = getattr(pushed, "value", None)
    many: Iterable[Any] = raw if isinstance(pushed, In) else (raw,)
    values = [_to_column_value(column, value) for value in many if value is not None]
    if not values or None in values:
        return None
    return Condition(column, operator, tuple(values))


def _to_column_value(column: str, value: Any) -> Any:
    """A literal in the representation of the column; None if its type differs."""
    match column:
        case "entry" | "epoch":
            return value if type(value) is int and _LOW < value < _HIGH else None
        case "timestamp":
            if not isinstance(value, datetime) or value.tzinfo is None:
                return None
            return (value - _EPOCH) // _MICROSECOND
        case "key":
            return bytes(value) if isinstance(value, bytes | bytearray) else None
        case "stream":
            return value if isinstance(value, str) else None
        case _:
            return None


class RowFilter:
    """The conjunction of all conditions. Pickled to executors."""

    def __init__(self, conditions: Sequence[Condition] = ()) -> None:
        self.conditions = tuple(conditions)

    def __bool__(self) -> bool:
        return bool(self.conditions)

    # -- planning --------------------------------------------------------------------------------------

    def bounds(self, column: str) -> ValueBounds:
        """The range of values that a row may have."""
        bounds = ValueBounds()
        for condition in self.conditions:
            if condition.column == column:
                bounds = bounds.narrowed(condition)
        return bounds

    def includes_stream(self, name: str) -> bool:
        return all(_text_matches(one, name.encode()) for one in _conditions_on(self.conditions, "stream"))

    def single_key(self) -> str | None:
        """The key, if the conditions allow only one and a request can name it."""
        for condition in _conditions_on(self.conditions, "key"):
            if condition.operator == "in" and len(set(condition.values)) == 1:
                try:
                    return condition.values[0].decode() or None
                except UnicodeDecodeError:
                    return None
        return None

    # -- reading ---------------------------------------------------------------------------------------

    def select_row_groups(self, footer: Footer, indices: Sequence[int]) -> list[int]:
        """The row groups that may contain matching rows, by entry range and by the Bloom filter of keys."""
        bounds = self.bounds("entry")
        selected = [
            index
            for index in indices
            if footer.group(index).last >= bounds.low and footer.group(index).first <= bounds.high
        ]
        for condition in _conditions_on(self.conditions, "key"):
            if condition.operator == "in":
                candidates = {index for key in condition.values for index in footer.groups_with_key(key)}
                selected = [index for index in selected if index in candidates]
        return selected

    def filter_rows(self, rows: Any) -> Any:
        """The rows for which every condition is true (`stream` is applied when planning)."""
        for condition in self.conditions:
            if condition.column != "stream" and rows.num_rows:
                rows = rows.filter(_mask(condition, rows))
        return rows


def _conditions_on(conditions: Iterable[Condition], column: str) -> list[Condition]:
    return [condition for condition in conditions if condition.column == column]


def _text_matches(condition: Condition, value: bytes) -> bool:
    """Text compares by its bytes, as in Spark."""
    values = [one.encode() for one in condition.values]
    match condition.operator:
        case "in":
            return value in values
        case "<":
            return value < values[0]
        case "<=":
            return value <= values[0]
        case ">":
            return value > values[0]
        case _:
            return value >= values[0]


def _mask(condition: Condition, rows: Any) -> Any:
    name, kind = {
        "entry": ("entry", INT64),
        "epoch": ("epoch", INT64),
        "timestamp": ("append_time", MICROS),
        "key": ("key", BINARY),
    }[condition.column]
    column = rows.column(name)
    values = pa.array(condition.values, INT64 if kind == MICROS else kind)
    if kind == MICROS:
        column = column.cast(MICROS).view(INT64)
    if condition.operator == "in":
        return pc.is_in(column, value_set=values)
    return _COMPARE[condition.operator](column, values[0])


TIME_US_MAX = 2**63 // 1000 - 1  # greater times do not fit in 64 bits as nanoseconds


class BatchReader(DataSourceReader):
    """Reads a snapshot of the streams: entries appended after planning are not read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._filter = RowFilter()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        catalogue = StreamCatalogue(options)
        states = catalogue.list_states()
        missing = [name for name in options.streams if name not in states]
        if missing:
            raise OptionError(f"stream not found: {', '.join(missing)} at {options.connection.endpoint}")
        positions = PositionResolver(catalogue, options)
        ranges = [
            self._range(positions, state)
            for state in states.values()
            if self._filter.includes_stream(state.name)
        ]
        planner = PartitionPlanner(
            catalogue,
            sealed_min=options.sealed_entries_min,
            partitions_min=options.partitions_min,
            keyed=options.key is not None,
            whole_streams=options.whole_streams,
        )
        return planner.partitions(ranges, with_versions="headers" in self._schema.fieldNames())

    def _range(self, positions: PositionResolver, state: StreamState) -> StreamRange:
        start = positions.check_retained(state, positions.resolve_start(state, "earliest"))
        end = min(state.tail, positions.resolve_end(state))
        after, through = start.entry, end.entry
        entries, times = self._filter.bounds("entry"), self._filter.bounds("timestamp")
        after, through = max(after, entries.low - 1), min(through, entries.high)
        # Append times never decrease within a stream, so a time range is a range of entries.
        if after < through and times.low > 0:
            after = max(after, positions.resolve_time(state, times.low * 1000).entry)
        if after < through and 0 <= times.high < TIME_US_MAX:
            through = min(through, positions.resolve_time(state, (times.high + 1) * 1000).entry)
        return StreamRange(state, after, max(after, through))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, StreamPartition):
            return iter(())  # Spark starts one task even for a read without partitions
        row_filter = self._filter if self._filter else None
        return PartitionReader(self._options, self._schema, partition, row_filter).batches()


class FilteringReader(BatchReader):
    """A reader with `pushdown`.

    A separate class: Spark pushes filters to every reader that has this method.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        conditions = list(self._filter.conditions)
        not_applied: list[Filter] = []
        for pushed in filters:
            condition = to_condition(pushed)
            if condition is None:
                not_applied.append(pushed)
            else:
                conditions.append(condition)
        self._filter = RowFilter(conditions)
        key = self._filter.single_key()
        if key is not None and self._options.key is None:
            self._options = msgspec.structs.replace(self._options, key=key)
        return not_applied
