"""The index merge job (`merge`): adjacent index files of one family become one.

`IndexMergeJob` runs on the driver; a merge is one task, which reads the inputs from the object store and
stores the merged file there. The server replaces the inputs by it in one step when it is published.
"""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tailrace.search.index_files.format import (
    AGG,
    EXACT,
    FACT_ROWS,
    FTS,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
    index_file_key,
)
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index import aggregate_merge, aggregates, exact, full_text, routing_keys
from tailrace.spark.index.exact import write_exact
from tailrace.spark.index.file_writer import (
    WRITER,
    IndexedRange,
    IndexFileWriter,
    build_file_facts,
    cut_row_groups,
)
from tailrace.spark.index.segment_build import ObjectFile, release_memory, verify_index_file, worker_stores
from tailrace.spark.jobs.messages import IndexMergeWork, StreamPlan
from tailrace.storage.segments.index_files import PublishedObject, PublishInput, PublishRequest
from tailrace.storage.segments.model import stream_prefix
from tailrace.storage.segments.parquet import pa, pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MERGED_DDL: Final = "object string, rows bigint, bytes bigint, sha256 string, stats string"
MERGED_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("stats", pa.string()),
    ]
)


class MergeTask(NamedTuple):
    """The index files of one merge."""

    family: str
    store: str
    stream_id: str
    first: int
    last: int
    plan_hash: str
    inputs: tuple[str, ...]


class MergeSortedRuns(NamedTuple):
    """For `mapInArrow` over one row: a k-way merge of files whose rows are sorted.

    A few rows of each input and one row group of the output are in memory; the output is a temporary file.
    """

    task: MergeTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            files = [pq.ParquetFile(ObjectFile(self.task.store, key)) for key in self.task.inputs]
            covers = _merged_range(self.task, sum(map(_recorded_rows, files)))
            facts = build_file_facts(self.task.family, covers)
            with tempfile.TemporaryFile(prefix="tailrace-merge-") as sink:
                stats = _WRITERS[self.task.family](self.task.family, files, facts, sink)
                sink.flush()
                data = memoryview(mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ))
                verify_index_file(self.task.family, data, covers.rows)
                row = _put_file(self.task, data, covers.rows, stats)
            del files, data
            release_memory()
            yield row


class MergeTextSplits(NamedTuple):
    """For `mapInArrow` over one row: merges full-text splits, one field after the other."""

    task: MergeTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            data = [worker_stores().get(self.task.store, key) for key in self.task.inputs]
            covers = _merged_range(self.task, sum(map(full_text.split_row_count, data)))
            built = full_text.merge_splits(data, covers)
            row = _put_file(self.task, built.data, built.rows, built.stats)
            del data, built
            release_memory()
            yield row


def _write_merged_aggregates(
    _: str, files: Sequence[Any], facts: dict[str, str], sink: Any
) -> dict[str, int]:
    states = aggregate_merge.merge_states(aggregate_merge.merge_aggregate_runs(files))
    groups = aggregates.write_aggregates(aggregates.split_sections(states), facts, sink)[1]
    return {"groups": groups}


def _write_merged_exact(_: str, files: Sequence[Any], facts: dict[str, str], sink: Any) -> dict[str, int]:
    write_exact(exact.merge_exact_runs(files), facts, sink)
    return {}


def _write_merged_keys(family: str, files: Sequence[Any], facts: dict[str, str], sink: Any) -> dict[str, int]:
    schema, encoding = _KEY_FILE_SCHEMAS[family]
    size = routing_keys.GROUP_ROWS
    with IndexFileWriter(schema, facts, bloom_values=size, sink=sink, **encoding) as writer:
        for table in cut_row_groups(routing_keys.merge_key_runs(files, schema), size):
            writer.write(table)
        writer.finish()
    return {"keys": writer.rows}


def _merged_range(task: MergeTask, rows: int) -> IndexedRange:
    return IndexedRange(task.stream_id, task.first, task.last, rows, task.plan_hash)


def _recorded_rows(file: Any) -> int:
    return int(file.metadata.metadata[FACT_ROWS.encode()])


def _put_file(task: MergeTask, data: bytes | memoryview, rows: int, stats: dict[str, int]) -> Any:
    sha256 = hashlib.sha256(data).hexdigest()
    name = index_file_key(task.plan_hash, task.family, task.first, task.last, sha256)
    key = stream_prefix(task.stream_id) + name
    hit_failpoint("after_write", "worker")
    worker_stores().put(task.store, key, data)
    hit_failpoint("after_put", "worker")
    row: dict[str, object] = {
        "object": key,
        "rows": rows,
        "bytes": len(data),
        "sha256": sha256,
        "stats": msgspec.json.encode(stats).decode(),
    }
    return pa.RecordBatch.from_pylist([row], schema=MERGED_SCHEMA)


# Schema and column encodings.
_KEY_FILE_SCHEMAS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    ROUTING_KEY_INDEX: (routing_keys.INDEX_SCHEMA, routing_keys.INDEX_ENCODING),
    ROUTING_KEY_LEXICON: (routing_keys.LEXICON_SCHEMA, routing_keys.LEXICON_ENCODING),
}
# Each returns the stats of the merged file.
_WRITERS: Final[dict[str, Callable[[str, Sequence[Any], dict[str, str], Any], dict[str, int]]]] = {
    ROUTING_KEY_INDEX: _write_merged_keys,
    ROUTING_KEY_LEXICON: _write_merged_keys,
    EXACT: _write_merged_exact,
    AGG: _write_merged_aggregates,
}


# Families of sorted files are merged in one task; rows never pass through the JVM.
_MERGE_KERNELS: Final = {
    ROUTING_KEY_INDEX: MergeSortedRuns,
    ROUTING_KEY_LEXICON: MergeSortedRuns,
    EXACT: MergeSortedRuns,
    AGG: MergeSortedRuns,
    FTS: MergeTextSplits,
}


class IndexMergeJob:
    def __init__(self, spark: SparkSession, store: str) -> None:
        self._spark: Any = spark
        self._store = store

    def run(self, stream: StreamPlan, work: IndexMergeWork) -> PublishRequest:
        """Build the merged file. It is stored, and must be published to become visible."""
        if work.family not in _MERGE_KERNELS:
            raise ValueError(f"index files of family {work.family} cannot be merged")
        task = MergeTask(
            work.family, self._store, stream.stream_id, work.first, work.last, stream.plan.hash, work.inputs
        )
        (row,) = self._merge(task).collect()
        return merge_publish_request(stream, work, row)

    def _merge(self, task: MergeTask) -> DataFrame:
        one: Any = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        return one.mapInArrow(_MERGE_KERNELS[task.family](task), MERGED_DDL)


def merge_publish_request(stream: StreamPlan, work: IndexMergeWork, row: Any) -> PublishRequest:
    stats = msgspec.json.decode(row["stats"], type=dict[str, int])
    added = PublishedObject(
        work.family, work.first, work.last, row["rows"], row["object"], row["bytes"], row["sha256"], stats
    )
    return PublishRequest(
        stream_id=stream.stream_id,
        job="merge",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(*pair) for pair in zip(work.inputs, work.input_sha256, strict=True)],
        add=[added],
        replace=list(work.inputs),
    )
