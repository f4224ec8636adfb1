"""What PySpark looks for by itself, so that `format("tailrace")` works wherever this package is installed."""

from __future__ import annotations

from tailrace.spark.source import TailraceSource as DefaultSource

__all__ = ["DefaultSource"]
