"""The merge job: adjacent companions of one family become one, of which queries see all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.search.index_files.format import AGG, EXACT, FTS, ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON
from tailrace.spark.index.parquet import WRITER
from tailrace.spark.jobs.merge_worker import MERGED_DDL, MergeSortedRuns, MergeTask, MergeTextSplits
from tailrace.spark.jobs.messages import IndexMergeWork, StreamPlan
from tailrace.storage.segments.index_files import PublishedObject, PublishInput, PublishRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What is sorted already is read side by side by one task, and never enters the JVM.
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
        """Builds the merged companion; it is in the store, and not yet listed."""
        if work.family not in _MERGE_KERNELS:
            raise ValueError(f"companions of {work.family} are never merged")
        order = MergeTask(
            work.family, self._store, stream.stream_id, work.first, work.last, stream.plan.hash, work.inputs
        )
        (row,) = self._merged(order).collect()
        return merge_publish_request(stream, work, row)

    def _merged(self, order: MergeTask) -> DataFrame:
        one: Any = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        return one.mapInArrow(_MERGE_KERNELS[order.family](order), MERGED_DDL)


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
