"""The facts about the pinned Spark that the source, the sink and the pipeline rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_session_counts(spark: SparkSession) -> None:
    assert spark.range(1000).repartition(4).count() == 1000


def test_the_session_is_the_one_that_was_asked_for(spark: SparkSession) -> None:
    assert spark.version == pyspark.__version__
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"


def test_python_workers_run_this_interpreter(spark: SparkSession) -> None:
    def versions(batches):
        import sys

        import pyarrow

        for _ in batches:
            yield pyarrow.RecordBatch.from_pydict({"version": [sys.version]})

    import sys

    found = spark.range(1).mapInArrow(versions, "version string").collect()
    assert {row.version for row in found} == {sys.version}
