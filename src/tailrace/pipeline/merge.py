"""The merge job: adjacent companions of one family become one, of which queries see all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.pipeline.kernels.parquet import WRITER
from tailrace.pipeline.merge_worker import (
    FILE_DDL,
    MERGED,
    MergeExact,
    MergeKeys,
    MergeOrder,
    MergeSplits,
    WriteStates,
    read_companions,
)
from tailrace.pipeline.model import MergeWork, StreamPlan
from tailrace.pipeline.transforms import agg
from tailrace.query.family_format import EXACT, FTS, ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON
from tailrace.store.offers import AddedObject, InputObject, Offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What is sorted already is read side by side by one task.
_SIDE_BY_SIDE: Final = {
    ROUTING_KEY_INDEX: MergeKeys,
    ROUTING_KEY_LEXICON: MergeKeys,
    EXACT: MergeExact,
    FTS: MergeSplits,
}
NATIVE: Final = ("file://",)  # stores that Spark reads without further libraries


class MergeJob:
    def __init__(self, spark: SparkSession, store: str) -> None:
        self._spark: Any = spark
        self._store = store

    def run(self, stream: StreamPlan, work: MergeWork) -> Offer:
        """Builds the merged companion; it is in the store, and not yet listed."""
        if work.family not in MERGED:
            raise ValueError(f"companions of {work.family} are never merged")
        order = MergeOrder(
            work.family, self._store, stream.stream_id, work.first, work.last, stream.plan.hash, work.inputs
        )
        (row,) = self._merged(order).collect()
        return publication_of(stream, work, row)

    def _merged(self, order: MergeOrder) -> DataFrame:
        if order.family in _SIDE_BY_SIDE:
            one: Any = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
            return one.mapInArrow(_SIDE_BY_SIDE[order.family](order), FILE_DDL)
        states: Any = agg.merge_agg(self._states(order))
        return states.repartition(1).sortWithinPartitions(*agg.KEYS).mapInArrow(WriteStates(order), FILE_DDL)

    def _states(self, order: MergeOrder) -> DataFrame:
        """Spark's own reader where it can see the files, else ours."""
        if order.store.startswith(NATIVE):
            paths = [f"{order.store.rstrip('/')}/{key}" for key in order.inputs]
            return self._spark.read.schema(agg.DDL).parquet(*paths)
        rows = [(order.store, key) for key in order.inputs]
        objects = self._spark.createDataFrame(rows, "store string, object string")
        return objects.repartition(len(rows)).mapInArrow(read_companions, agg.DDL)


def publication_of(stream: StreamPlan, work: MergeWork, row: Any) -> Offer:
    stats = msgspec.json.decode(row["stats"], type=dict[str, int])
    added = AddedObject(
        work.family, work.first, work.last, row["rows"], row["object"], row["bytes"], row["sha256"], stats
    )
    return Offer(
        stream_id=stream.stream_id,
        job="merge",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[InputObject(*pair) for pair in zip(work.inputs, work.input_sha256, strict=True)],
        add=[added],
        replace=list(work.inputs),
    )
