"""Streams in Apache Spark: a source and a sink called `tailrace`, history as native Parquet, and SQL.

Needs the `spark` extra. PySpark discovers the source itself; see docs/spark.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.history import read_stream_history
    from tailrace.spark.live_queries.column_predicates import matching
    from tailrace.spark.stream_reader import StreamLag, lag

__all__ = ["StreamLag", "lag", "matching", "read_stream_history", "register"]

# Spark starts a process for every step of a read or a write, and each imports this package: a step loads only
# the modules that it uses.
_LAZY_EXPORTS = {
    "StreamLag": "stream_reader",
    "lag": "stream_reader",
    "matching": "live_queries.column_predicates",
    "read_stream_history": "history",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_LAZY_EXPORTS[name]}"), name)
    globals()[name] = found
    return found


def register(spark: SparkSession) -> None:
    """Register `format("tailrace")` in a session, for engines that do not discover it themselves."""
    from tailrace.spark.source import TailraceSource

    spark.dataSource.register(TailraceSource)
