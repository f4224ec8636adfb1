"""The merge job: adjacent companions of one family become one, of which queries see all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.pipeline.kernels.parquet import WRITER
from tailrace.pipeline.merge_worker import (
    FILE_DDL,
    MERGED,
    MergeExact,
    MergeOrder,
    MergeSplits,
    WriteRun,
    read_companions,
)
from tailrace.pipeline.model import MergeWork, StreamPlan
from tailrace.pipeline.transforms import agg, keys
from tailrace.query.family_format import AGG, EXACT, FTS, ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON
from tailrace.store.offers import AddedObject, InputObject, Offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DDL: Final = {
    ROUTING_KEY_INDEX: keys.INDEX_DDL,
    ROUTING_KEY_LEXICON: keys.LEXICON_DDL,
    AGG: agg.DDL,
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
        if order.family in (FTS, EXACT):
            one: Any = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
            kernel = MergeSplits(order) if order.family == FTS else MergeExact(order)
            return one.mapInArrow(kernel, FILE_DDL)
        frame: Any = transformed(order.family, self._read(order))
        frame = frame.repartition(1).sortWithinPartitions(*_order(order.family))
        return frame.mapInArrow(WriteRun(order), FILE_DDL)

    def _read(self, order: MergeOrder) -> DataFrame:
        """Spark's own reader where it can see the files, else ours."""
        ddl = _DDL[order.family]
        if order.store.startswith(NATIVE):
            paths = [f"{order.store.rstrip('/')}/{key}" for key in order.inputs]
            return self._spark.read.schema(ddl).parquet(*paths)
        rows = [(order.store, key) for key in order.inputs]
        objects = self._spark.createDataFrame(rows, "store string, object string")
        return objects.repartition(len(rows)).mapInArrow(read_companions, ddl)


def transformed(family: str, rows: DataFrame) -> DataFrame:
    """What a merge makes of the rows of its inputs; writing puts them in order."""
    if family == ROUTING_KEY_INDEX:
        return rows.transform(keys.merge_key_runs)
    if family == ROUTING_KEY_LEXICON:
        return rows.transform(keys.merge_lexicon)
    if family == AGG:
        return rows.transform(agg.merge_agg)
    return rows


def _order(family: str) -> Sequence[Any]:
    orders = {ROUTING_KEY_INDEX: keys.INDEX_ORDER, ROUTING_KEY_LEXICON: keys.LEXICON_ORDER, AGG: agg.KEYS}
    return orders[family]


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
