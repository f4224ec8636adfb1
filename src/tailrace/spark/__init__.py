"""Streams in Apache Spark: a source and a sink called `tailrace`, history as native Parquet, and SQL.

Needs the `spark` extra. PySpark finds the source by itself; see docs/spark.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.spark.history import read_stream_history
from tailrace.spark.lag import StreamLag, lag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["StreamLag", "lag", "read_stream_history", "register"]


def register(spark: SparkSession) -> None:
    """Makes `format("tailrace")` known to a session, for engines that do not look for it themselves."""
    from tailrace.spark.source import TailraceSource

    spark.dataSource.register(TailraceSource)
