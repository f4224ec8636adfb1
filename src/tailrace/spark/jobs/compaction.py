"""The compaction job: adjacent small segments become one, and readers never notice."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index.parquet import WRITER
from tailrace.spark.index.worker import BUILT, UNDECODABLE, worker_stores
from tailrace.spark.jobs.compact import compact_segments
from tailrace.spark.jobs.messages import CompactionWork, StreamPlan
from tailrace.storage.segments.index_files import (
    SEGMENT_FAMILY,
    PublishedObject,
    PublishInput,
    PublishRequest,
    UnbuildableInput,
)
from tailrace.storage.segments.model import CorruptSegmentError, stream_prefix
from tailrace.storage.segments.parquet import pa
from tailrace.storage.segments.reader import file_footer, read_all_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTED_DDL: Final = (
    "object string, rows bigint, bytes bigint, sha256 string, stats string, status string, error string"
)
COMPACTED_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("stats", pa.string()),
        pa.field("status", pa.string()),
        pa.field("error", pa.string()),
    ]
)


class CompactionTask(NamedTuple):
    store: str
    stream_id: str
    inputs: tuple[tuple[str, str], ...]  # object and SHA-256, oldest first


class CompactionKernel(NamedTuple):
    """For `mapInArrow` over one row: joins segments and puts the result, one row about it out."""

    order: CompactionTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            yield pa.RecordBatch.from_pylist([self._row()], schema=COMPACTED_SCHEMA)

    def _row(self) -> dict[str, object]:
        """A segment that is not what was recorded is told apart: it is given up, the others are not."""
        try:
            raws = [_fetch_segment(self.order.store, *one) for one in self.order.inputs]
            hit_failpoint("after_fetch", "worker")
            return self._joined(raws)
        except _BadInputError as error:
            return _quarantine_row(error.key, error)
        except CorruptSegmentError as error:
            # Each is sound, and they do not belong together: without the first one others may.
            return _quarantine_row(self.order.inputs[0][0], error)

    def _joined(self, raws: list[bytes]) -> dict[str, object]:
        with tempfile.TemporaryDirectory(prefix="tailrace-compact-") as directory:
            path = Path(directory) / "segment.parquet"
            info = compact_segments(raws, path, secrets.token_hex(8))
            hit_failpoint("after_write", "worker")
            key = stream_prefix(self.order.stream_id) + info.key
            worker_stores().put(self.order.store, key, path.read_bytes())
        hit_failpoint("after_put", "worker")
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
            "status": BUILT,
            "error": "",
        }


class _BadInputError(Exception):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _fetch_segment(store: str, key: str, sha256: str) -> bytes:
    raw = worker_stores().get(store, key)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise _BadInputError(key, "the segment does not have its SHA-256")
    try:
        for _ in read_all_rows(raw, file_footer(raw)):
            pass  # every page has its checksum
    except CorruptSegmentError as error:
        raise _BadInputError(key, str(error)) from None
    return raw


def _quarantine_row(key: str, error: Exception) -> dict[str, object]:
    return {
        "object": key,
        "rows": 0,
        "bytes": 0,
        "sha256": "",
        "stats": "{}",
        "status": UNDECODABLE,
        "error": str(error),
    }


class CompactionJob:
    def __init__(self, spark: SparkSession, store: str) -> None:
        self._spark: Any = spark
        self._store = store

    def run(self, stream: StreamPlan, work: CompactionWork) -> PublishRequest:
        """Joins the segments; the result is in the store, and not yet listed."""
        inputs = tuple((one.object, one.sha256) for one in work.segments)
        order = CompactionTask(self._store, stream.stream_id, inputs)
        frame = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        (row,) = frame.mapInArrow(CompactionKernel(order), COMPACTED_DDL).collect()
        return compaction_publish_request(stream, work, row)


def compaction_publish_request(stream: StreamPlan, work: CompactionWork, row: Any) -> PublishRequest:
    """The joined segment in the place of the others; or which of them cannot be joined."""
    added: list[PublishedObject] = []
    given_up: list[UnbuildableInput] = []
    if row["status"] == BUILT:
        stats = msgspec.json.decode(row["stats"], type=dict[str, int])
        sha256, size = row["sha256"], row["bytes"]
        added.append(
            PublishedObject(
                SEGMENT_FAMILY, work.first, work.last, row["rows"], row["object"], size, sha256, stats
            )
        )
    else:
        given_up.append(UnbuildableInput(row["object"], row["status"], row["error"]))
    return PublishRequest(
        stream_id=stream.stream_id,
        job="compact",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(one.object, one.sha256) for one in work.segments],
        add=added,
        replace=[one.object for one in work.segments] if added else [],
        quarantine=given_up,
    )
