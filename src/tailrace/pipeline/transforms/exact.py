"""Values of several files in one order. What continues what is joined when the file is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tailrace.query.family_format import ENTRIES, FIELD, VALUE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DDL: Final = f"{FIELD} string, {VALUE} binary, {ENTRIES} array<bigint>"


def order() -> list[Column]:
    from pyspark.sql import functions as f

    return [f.col(FIELD).asc(), f.col(VALUE).asc_nulls_first(), f.col(ENTRIES)[0].asc()]


def from_entry(values: DataFrame, earliest: int) -> DataFrame:
    """Without entries that retention has taken, and without values that had no others."""
    from pyspark.sql import functions as f

    kept = f.filter(ENTRIES, lambda entry: entry >= earliest)
    return values.withColumn(ENTRIES, kept).where(f.size(ENTRIES) > 0)
