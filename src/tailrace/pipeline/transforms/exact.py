"""What retention leaves of the values of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tailrace.query.family_format import ENTRIES, FIELD, VALUE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DDL: Final = f"{FIELD} string, {VALUE} binary, {ENTRIES} array<bigint>"


def from_entry(values: DataFrame, earliest: int) -> DataFrame:
    """Without entries that retention has taken, and without values that had no others."""
    from pyspark.sql import functions as f

    kept = f.filter(ENTRIES, lambda entry: entry >= earliest)
    return values.withColumn(ENTRIES, kept).where(f.size(ENTRIES) > 0)
