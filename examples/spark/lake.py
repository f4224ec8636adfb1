"""A stream into a lake of Parquet files, partitioned by day. Run it from cron: each entry gets there once.

    python lake.py orders lake/orders

The checkpoint lies beside the files and says how far the last run came.
"""

# ruff: noqa: INP001, T201
from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.functions import to_date

ENDPOINT = os.environ.get("TAILRACE_ENDPOINT", "http://127.0.0.1:4437")


def fill_lake(spark: SparkSession, stream: str, directory: Path) -> int:
    """Everything that came since the last run; how many entries that were."""
    query = (
        spark.readStream.format("tailrace")
        .option("endpoint", ENDPOINT)
        .option("stream", stream)
        .option("startingOffsets", "earliest")
        .load()
        .withColumn("day", to_date("timestamp"))
        .writeStream.format("parquet")
        .partitionBy("day")
        .option("path", str(directory / "data"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(progress.numInputRows for progress in query.recentProgress)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    parser.add_argument("directory", type=Path, help="where the files go")
    given = parser.parse_args()
    session = SparkSession.builder.appName("lake").getOrCreate()
    print(fill_lake(session, given.stream, given.directory), "entries")
    session.stop()
