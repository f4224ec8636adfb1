"""The compaction job: adjacent small segments become one, and readers never notice."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tailrace.pipeline.failpoints import reached
from tailrace.pipeline.kernels.arrays import pa
from tailrace.pipeline.kernels.compact import compact
from tailrace.pipeline.kernels.parquet import WRITER
from tailrace.pipeline.merge_worker import FILE, FILE_DDL
from tailrace.pipeline.model import AddedObject, CompactWork, InputObject, Publication, StreamPlan
from tailrace.pipeline.worker import stores
from tailrace.store.segments import CorruptSegmentError, stream_prefix

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENT: Final = "segment"  # in the place of a family: what is added is a segment itself


class CompactOrder(NamedTuple):
    store: str
    stream_id: str
    inputs: tuple[tuple[str, str], ...]  # object and SHA-256, oldest first


class Compact(NamedTuple):
    """For `mapInArrow` over one row: joins segments and puts the result, one row about it out."""

    order: CompactOrder

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            yield pa.RecordBatch.from_pylist([self._joined()], schema=FILE)

    def _joined(self) -> dict[str, object]:
        raws = [_fetched(self.order.store, *one) for one in self.order.inputs]
        reached("after_fetch", "worker")
        with tempfile.TemporaryDirectory(prefix="tailrace-compact-") as directory:
            path = Path(directory) / "segment.parquet"
            info = compact(raws, path)
            reached("after_write", "worker")
            key = stream_prefix(self.order.stream_id) + info.key
            stores().put(self.order.store, key, path.read_bytes())
        reached("after_put", "worker")
        stats = {
            "epoch": info.epoch,
            "raw_bytes": info.payload_bytes,
            "first_ns": info.first_ns,
            "last_ns": info.last_ns,
        }
        return {
            "object": key,
            "rows": info.rows,
            "bytes": info.bytes,
            "sha256": info.sha256,
            "stats": msgspec.json.encode(stats).decode(),
        }


def _fetched(store: str, key: str, sha256: str) -> bytes:
    raw = stores().get(store, key)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise CorruptSegmentError("the segment does not have its SHA-256")
    return raw


class CompactJob:
    def __init__(self, spark: SparkSession, store: str) -> None:
        self._spark: Any = spark
        self._store = store

    def run(self, stream: StreamPlan, work: CompactWork) -> Publication:
        """Joins the segments; the result is in the store, and not yet listed."""
        inputs = tuple((one.object, one.sha256) for one in work.segments)
        order = CompactOrder(self._store, stream.stream_id, inputs)
        frame = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        (row,) = frame.mapInArrow(Compact(order), FILE_DDL).collect()
        return publication_of(stream, work, row)


def publication_of(stream: StreamPlan, work: CompactWork, row: Any) -> Publication:
    stats = msgspec.json.decode(row["stats"], type=dict[str, int])
    added = AddedObject(
        SEGMENT, work.first, work.last, row["rows"], row["object"], row["bytes"], row["sha256"], stats
    )
    return Publication(
        stream_id=stream.stream_id,
        job="compact",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[InputObject(one.object, one.sha256) for one in work.segments],
        add=[added],
        replace=[one.object for one in work.segments],
    )
