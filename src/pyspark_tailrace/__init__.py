"""PySpark discovers packages named `pyspark_*`; this one provides `format("tailrace")`."""

from __future__ import annotations

from tailrace.spark.source import TailraceSource as DefaultSource

__all__ = ["DefaultSource"]
