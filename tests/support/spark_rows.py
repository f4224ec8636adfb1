"""Streams with a known content, and what a reader of the source hands out, without Spark in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from support.sealing import SEALING_ENV, wait_sealed
from support.server import ServerProcess
from support.wire import Wire
from tailrace.client import Client
from tailrace.spark.batch_reader import BatchReader, FilteringReader
from tailrace.spark.columns import COLUMN_TYPES, VALUE_TYPES
from tailrace.spark.options import parse_read_options
from tailrace.spark.source import TailraceSource

JSON, BYTES = "application/json", "application/octet-stream"
Row = dict[str, Any]


class Filled(NamedTuple):
    """A server, and its streams `ev` (JSON, some keys, appends of several entries) and `by` (bytes)."""

    server: ServerProcess

    @property
    def url(self) -> str:
        return self.server.base_url


def fill(server: ServerProcess, numbers: Iterable[int]) -> Filled:
    with Client(server.base_url) as client:
        events = client.stream("ev", content_type=JSON)
        events.create()
        plain = client.stream("by", content_type=BYTES)
        plain.create()
        for number in numbers:
            key = None if number % 5 == 0 else f"k{number % 4}"
            events.append([{"n": number, "i": index} for index in range(1 + number % 4)], key=key)
            if number % 2:
                plain.append(b"\xff" * (number % 7) + str(number).encode(), key=key)
    return Filled(server)


@contextmanager
def seamed_server(directory: Path, store: Mapping[str, str]) -> Iterator[Filled]:
    """A server whose streams are half in small segments on the store, and half in memory."""
    server = ServerProcess(directory / "data", env={**SEALING_ENV, **store}).start()
    try:
        fill(server, range(60))
        wait_sealed(server.data_dir)
        server.stop()
        # Nothing is sealed any more, so what comes now stays where it is.
        server.env = dict(store)
        server.start()
        yield fill(server, range(60, 120))
    finally:
        server.stop()


def served(server: ServerProcess, stream: str) -> list[Row]:
    """Every entry as the server tells it over HTTP."""
    http = Wire(server.port)
    rows: list[Row] = []
    offset = "-1"
    while True:
        page = http.get(f"{stream}?format=arrow&offset={offset}")
        assert page.status == 200
        rows += pa.ipc.open_stream(page.body).read_all().to_pylist()
        offset = page["stream-next-offset"]
        if "stream-up-to-date" in page:
            http.close()
            return rows


def columns(names: str, value: str = "string") -> StructType:
    """A schema of these columns. (Spark's own way to write one needs a session.)"""
    kinds = {**COLUMN_TYPES, "value": VALUE_TYPES[value]}
    return StructType([StructField(name, kinds[name]) for name in names.split()])


def reader_of(url: str, names: str | None = None, **options: str) -> BatchReader:
    """What Spark gets from the source for a batch read of these columns."""
    given = {"endpoint": url, **options}
    wanted = TailraceSource(given).schema() if names is None else columns(names)
    parsed = parse_read_options(given, streaming=False)
    return FilteringReader(parsed, wanted) if parsed.pushdown else BatchReader(parsed, wanted)


def by_partition(reader: BatchReader) -> list[list[Row]]:
    """The rows of each partition, in the order in which they come."""
    return [
        [row for batch in reader.read(partition) for row in batch.to_pylist()]
        for partition in reader.partitions()
    ]


def rows_of(reader: BatchReader) -> list[Row]:
    return [row for part in by_partition(reader) for row in part]
