"""Batch reads: `spark.read.format("tailrace")`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from tailrace.spark.catalogue import StreamCatalogue, StreamState
from tailrace.spark.columns import check_schema
from tailrace.spark.filters import RowFilter, to_condition
from tailrace.spark.options import OptionError, ReadOptions
from tailrace.spark.partitions import PartitionPlanner, StreamPartition, StreamRange
from tailrace.spark.reading import PartitionReader
from tailrace.spark.starts import PositionResolver

TIME_US_MAX = 2**63 // 1000 - 1  # beyond, a time has no nanoseconds in 64 bits


class BatchReader(DataSourceReader):
    """One snapshot of the streams: what is appended after it was planned is not read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._filter = RowFilter()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        catalogue = StreamCatalogue(options)
        states = catalogue.states()
        missing = [name for name in options.streams if name not in states]
        if missing:
            raise OptionError(f"there is no stream {', '.join(missing)} at {options.connection.endpoint}")
        wanted = [state for state in states.values() if self._filter.wants_stream(state.name)]
        starts = PositionResolver(catalogue, options)
        ranges = [self._range(starts, state) for state in wanted]
        planner = PartitionPlanner(
            catalogue,
            sealed_min=options.sealed_entries_min,
            partitions_min=options.partitions_min,
            keyed=options.key is not None,
            whole_streams=options.whole_streams,
        )
        return planner.partitions(ranges, with_versions="headers" in self._schema.fieldNames())

    def _range(self, starts: PositionResolver, state: StreamState) -> StreamRange:
        start = starts.checked(state, starts.starting(state, "earliest"))
        end = min(state.tail, starts.ending(state))
        after, upto = start.entry, end.entry
        entries, times = self._filter.bounds("entry"), self._filter.bounds("timestamp")
        after, upto = max(after, entries.low - 1), min(upto, entries.high)
        # Times never go back within a stream, so a span of time is a range of entries.
        if after < upto and times.low > 0:
            after = max(after, starts.at_time(state, times.low * 1000).entry)
        if after < upto and 0 <= times.high < TIME_US_MAX:
            upto = min(upto, starts.at_time(state, (times.high + 1) * 1000).entry)
        return StreamRange(state, after, max(after, upto))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, StreamPartition):
            return iter(())  # Spark plans one task for a read without partitions
        row_filter = self._filter if self._filter else None
        return PartitionReader(self._options, self._schema, partition, row_filter).batches()


class FilteringReader(BatchReader):
    """With `pushdown`: a class of its own, as Spark takes every reader with this method at its word."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        conditions = list(self._filter.conditions)
        back: list[Filter] = []
        for given in filters:
            condition = to_condition(given)
            if condition is None:
                back.append(given)
            else:
                conditions.append(condition)
        self._filter = RowFilter(conditions)
        key = self._filter.single_key()
        if key is not None and self._options.key is None:
            self._options = msgspec.structs.replace(self._options, key=key)
        return back
