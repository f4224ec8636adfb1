"""One Spark session for a whole test run: local, small, quiet, and gone without a trace."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

# Four attempts for each task: plain local mode never tries again.
MASTER = "local[2,4]"
HEAP = "1g"

SETTINGS: Mapping[str, str] = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": HEAP,
    # A worker that is slow to start on a busy machine is not a failure.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    # A query keeps nothing that a test would look at after it.
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.executorEnv.POLARS_MAX_THREADS": "1",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
    # Classes are compiled as the first tests run; the second compiler would only take their cores.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def open_session(directory: Path, *, settings: Mapping[str, str] | None = None) -> SparkSession:
    """The session of this process. Everything it leaves on disk lies in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    # The host's name is never looked up: a machine without a network runs the tests, too.
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYSPARK_PYTHON"] = str(launcher(directory))
    builder = SparkSession.builder.master(MASTER).appName("tailrace-tests")
    places = {
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
    }
    for name, value in {**SETTINGS, **places, **(settings or {})}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def launcher(directory: Path) -> Path:
    """How workers are started: with the installed package instead of the archive that Spark puts before it.

    The archive holds no compiled modules, so each worker would compile all of PySpark: 1.2 s of processor
    time instead of 0.4. Spark gives the worker of a streaming source ten seconds to come up, which cannot be
    set; with a dozen busy processes to a core that is too little.
    """
    path = directory / "python"
    known = shlex.quote(os.environ.get("PYTHONPATH", ""))
    path.write_text(f'#!/bin/sh\nPYTHONPATH={known} exec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def clean(session: SparkSession) -> None:
    """Ends what a test left behind, so that the next one begins with an empty session."""
    for query in session.streams.active:
        query.stop()
    session.catalog.clearCache()
    for table in session.catalog.listTables():
        if table.isTemporary:
            session.catalog.dropTempView(table.name)


def quick_start(directory: Path) -> dict[str, str]:
    """Environment for a process that starts a Spark of its own: all it does is over in seconds."""
    return {
        "PYSPARK_PYTHON": str(launcher(directory)),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
