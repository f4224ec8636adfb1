"""The data source that Spark knows as `tailrace`.

Spark imports this module in many short-lived processes, most of which only need the class: other modules are
imported inside the methods that use them.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from tailrace.spark.options import OptionError, ReadOptions, parse_read_options, parse_write_options


class TailraceSource(DataSource):
    """Streams as tables: `spark.read.format("tailrace").option("stream", "orders").load()`."""

    @classmethod
    def name(cls) -> str:
        return "tailrace"

    def schema(self) -> StructType:
        from tailrace.spark.columns import source_schema

        # The schema is the same for batch reads and streaming reads; which one this is, is not known here.
        options = parse_read_options(self._without_bounds(), streaming=False)
        return source_schema(options, _resolve_value_format(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from tailrace.spark.batch_reader import BatchReader, FilteringReader

        options = parse_read_options(self.options, streaming=False)
        return FilteringReader(options, schema) if options.pushdown else BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from tailrace.spark.stream_reader import StreamReader

        return StreamReader(parse_read_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tailrace.spark.sink import BatchSink

        return BatchSink(parse_write_options(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from tailrace.spark.sink import StreamSink

        return StreamSink(parse_write_options(self.options, streaming=True), schema, overwrite)

    def _without_bounds(self) -> dict[str, str]:
        limits = ("maxoffsetspertrigger", "maxbytespertrigger")
        return {name: value for name, value in self.options.items() if name.lower() not in limits}


def _resolve_value_format(options: ReadOptions) -> str:
    """The `valueFormat` option; by default string if all streams are JSON, else binary."""
    if options.value_format is not None:
        return options.value_format
    from tailrace.spark.catalogue import StreamCatalogue

    states = StreamCatalogue(options).list_states()
    missing = [name for name in options.streams if name not in states]
    if missing:
        raise OptionError(f"stream not found: {', '.join(missing)} at {options.connection.endpoint}")
    return "string" if all(state.json for state in states.values()) else "binary"
