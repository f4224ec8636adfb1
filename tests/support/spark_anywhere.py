"""The same small job wherever Spark runs: reads a stream, copies it with a query, tells what it saw.

python spark_anywhere.py <master or sc://... or connect> <endpoint> <source> <target> <directory> [staging]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def session(master: str, directory: Path) -> Any:
    from pyspark.sql import SparkSession

    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("anywhere")
    if master == "connect":
        builder = builder.remote("local[2]")  # a Connect server in a process of its own, and a client of it
    elif master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    else:
        builder = builder.master(master)
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(
    master: str, endpoint: str, source: str, target: str, place: str, staging: str | None = None
) -> None:
    from tailrace.spark import read_stream_history, register

    directory = Path(place)
    spark = session(master, directory)
    register(spark)
    read = spark.read.format("tailrace").options(endpoint=endpoint, sealedEntriesMin="1", minPartitions="4")
    rows = read.load(source)
    found = sorted(row.entry for row in rows.select("entry").collect())
    history = read_stream_history(spark, source, endpoint=endpoint).count()
    query = (
        spark.readStream.format("tailrace")
        .options(endpoint=endpoint, stream=source, startingOffsets="earliest", maxOffsetsPerTrigger="60")
        .load()
        .selectExpr("value", "key")
        .writeStream.format("tailrace")
        .options(endpoint=endpoint, stream=target)
        .option("checkpointLocation", str(directory / "checkpoint"))
    )
    if staging is not None:
        query = query.option("stagingLocation", staging)
    query.trigger(availableNow=True).start().awaitTermination()
    print(json.dumps({"entries": found, "history": history, "copied": read.load(target).count()}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
