"""Results do not depend on how Spark is set up: names of objects tell their contents, and stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.aggregate_model import rollup_view
from support.companions import STREAM_ID, Stored, plan_of
from support.pipeline import Shelf
from support.queries import payload_of
from tailrace.spark.jobs.index_build import IndexBuildJob
from tailrace.spark.jobs.index_merge import IndexMergeJob
from tailrace.spark.jobs.messages import IndexMergeWork, StreamPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: tuple[Mapping[str, str], ...] = (
    {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
        "spark.sql.adaptive.enabled": "false",
    },
    {
        "spark.sql.shuffle.partitions": "7",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "3",
        "spark.sql.files.maxPartitionBytes": "2048",
    },
)
MERGED = ("agg",)  # the one that Spark sorts and groups: others are merged by one task


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            assert value is not None
            spark.conf.set(name, value)


def _stored(first: int, count: int) -> list[Stored]:
    return [
        Stored(
            entry,
            payload_of(
                {"id": f"id{entry % 5}", "at": entry * 700, "ratio": entry / 7, "message": f"w{entry}"}
            ),
            f"k{entry % 3}".encode(),
        )
        for entry in range(first, first + count)
    ]


def _built(spark: SparkSession, shelf: Shelf, cores: int) -> set[str]:
    """The names of all that is built of the segments, and of what that is merged into."""
    outcomes = list(IndexBuildJob(spark, shelf.url, cores=cores).run(shelf.works()))
    outcomes.sort(key=lambda outcome: outcome.work.segment.first)
    assert {outcome.status for outcome in outcomes} == {"built"}
    names = {file.object for outcome in outcomes for file in outcome.files}
    stream, merge = StreamPlan("s", STREAM_ID, 0, shelf.ref), IndexMergeJob(spark, shelf.url)
    last = outcomes[-1].work.segment.last
    for family in MERGED:
        files = [file for outcome in outcomes for file in outcome.files if file.family == family]
        inputs = tuple(file.object for file in files)
        work = IndexMergeWork(family, 1, 1, last, inputs, tuple(file.sha256 for file in files))
        names |= {added.object for added in merge.run(stream, work).add}
    return names


def test_p21_neither_cores_nor_partitions_nor_batches_change_a_byte(
    spark: SparkSession, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path / "store", plan_of(rollup_view().registry))
    for number in range(3):
        shelf.seal(_stored(1 + 20 * number, 20))
    found: list[set[str]] = []
    for cores, settings in zip((1, 9), SETTINGS, strict=True):
        with _set(spark, settings):
            found.append(_built(spark, shelf, cores))
    assert len(found[0]) == 3 * len(shelf.plan.families) + len(MERGED)
    assert found[0] == found[1]
