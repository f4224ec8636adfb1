"""A declarative pipeline: clicks of one stream, counted live, into another.

The transform is a plain function, so that it can be tested and used elsewhere; what is decorated is thin.
"""

# ruff: noqa: INP001
from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql.functions import from_json, struct, to_json, upper

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE, TARGET = "clicks", "clicks/loud"


def loud(clicks: DataFrame) -> DataFrame:
    """What was clicked, in capital letters."""
    parsed = clicks.select("entry", from_json("value", "user string, page string").alias("click"))
    return parsed.select(
        to_json(struct("entry", "click.user", upper("click.page").alias("page"))).alias("value")
    )


@dp.temporary_view
def clicks() -> DataFrame:
    spark = SparkSession.active()
    reader = spark.readStream.format("tailrace").option("startingOffsets", "earliest")
    return reader.load(SOURCE)


dp.create_sink("loud", format="tailrace", options={"stream": TARGET, "delivery": "direct"})


@dp.append_flow(target="loud")
def shout() -> DataFrame:
    return loud(SparkSession.active().readStream.table("clicks"))
