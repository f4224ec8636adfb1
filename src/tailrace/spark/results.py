"""The rows of a query as a file on this machine, wherever Spark runs.

What Spark itself writes ends up where its executors are. So they send their rows as batches of Arrow, and the
driver writes these as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.storage.segments.parquet import BINARY, pa, pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESULT_FILE = "part-00000.parquet"
_BATCH_COLUMN = "batch"


def write_local_parquet(found: DataFrame, directory: Path) -> None:
    """One Parquet file in a new directory. Of each partition one batch is in memory at a time."""
    directory.mkdir(parents=True)
    frame: Any = found  # the library is half typed
    schema = frame.limit(0).toArrow().schema
    packed = frame.mapInArrow(serialize_batches, f"{_BATCH_COLUMN} binary")
    with pq.ParquetWriter(directory / RESULT_FILE, schema, compression="zstd") as writer:
        for row in packed.toLocalIterator():
            with pa.ipc.open_stream(row[0]) as batches:
                for batch in batches:
                    writer.write_batch(batch.cast(schema))


def serialize_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """On executors: each batch as the bytes of a stream of its own."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        packed = pa.array([sink.getvalue().to_pybytes()], BINARY)
        yield pa.RecordBatch.from_arrays([packed], names=[_BATCH_COLUMN])
