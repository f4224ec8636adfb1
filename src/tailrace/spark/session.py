"""The Spark session of a pipeline process: its settings, its start, the log output of its JVM, and exit."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("tailrace.spark")


TASK_RETRIES: Final = 4  # attempts of a task; plain local mode does not retry
HEAP_BYTES: Final = 1 << 30
DATA_BATCH_ROWS: Final = 4096

# `build_settings` adds those that depend on the machine or on flags.
SETTINGS: Final[Mapping[str, str]] = {
    # Merges vary in size.
    "spark.sql.adaptive.enabled": "true",
    # Bounded batches; jobs over descriptors set 1, so that a task holds one segment at a time.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(DATA_BATCH_ROWS),
    "spark.sql.python.filterPushdown.enabled": "true",
    # Results must not depend on the time zone of the host, and overflow must be an error.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # With the default of 128 groups, `collect_list` falls back to sorting.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.parquet.compression.codec": "zstd",
    # No open port, quiet logs.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark owns the cores.
    "spark.executorEnv.POLARS_MAX_THREADS": "1",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
    # Workers reuse freed memory for the next segment: fresh pages from the system are most of the cost of
    # allocation. Each task releases memory at its end; Arrow's allocator does after these milliseconds.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "spark.executorEnv.MALLOC_TOP_PAD_": str(16 << 20),
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "5000",
    "spark.python.worker.reuse": "true",
    "spark.sql.pyspark.worker.logging.enabled": "true",
    # Tasks are CPU-bound: a speculative second attempt only doubles the work.
    "spark.speculation": "false",
}
# Results depend on these.
FIXED_SETTINGS: Final = frozenset({"spark.sql.session.timeZone", "spark.sql.ansi.enabled"})

_LOCAL_MASTER: Final = re.compile(r"local(?:\[(\*|\d+)\])?")


def normalize_master(text: str) -> str:
    """`local[N]` with task retries; any other master unchanged."""
    match = _LOCAL_MASTER.fullmatch(text)
    return text if match is None else f"local[{match[1] or '1'},{TASK_RETRIES}]"


def is_local(master: str) -> bool:
    return master.startswith("local")


def core_count(master: str) -> int:
    """The number of concurrent tasks according to the master URL; this machine's cores for a cluster."""
    match = re.match(r"local\[(\*|\d+)", master)
    if match is None:
        return os.cpu_count() or 1
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def build_settings(
    master: str,
    directory: Path,
    *,
    heap_bytes: int = HEAP_BYTES,
    ui: bool = False,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All settings of a session. `extra` overrides any setting but `FIXED_SETTINGS`."""
    settings = dict(SETTINGS)
    settings["spark.sql.shuffle.partitions"] = str(2 * core_count(master))
    settings["spark.driver.memory"] = f"{heap_bytes >> 20}m"
    settings["spark.sql.warehouse.dir"] = str(directory / "warehouse")
    if is_local(master):
        # No lookup of the host name: the pipeline runs without a network.
        settings["spark.driver.bindAddress"] = settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.local.dir"] = str(directory / "local")
    if ui:
        settings["spark.ui.enabled"] = "true"
    for name, value in (extra or {}).items():
        if name in FIXED_SETTINGS and value != SETTINGS[name]:
            raise ValueError(f"{name} cannot be changed: results depend on it")
        settings[name] = value
    return settings


def parse_extra_settings(text: str) -> dict[str, str]:
    """Parse `name=value` pairs, separated by spaces or commas."""
    found: dict[str, str] = {}
    for pair in re.split(r"[,\s]+", text.strip()):
        name, equals, value = pair.partition("=")
        if pair and not equals:
            raise ValueError(f"Spark setting must be name=value, got {pair!r}")
        if name:
            found[name] = value
    return found


def open_session(
    master: str,
    directory: Path,
    *,
    heap_bytes: int = HEAP_BYTES,
    ui: bool = False,
    extra: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start Spark. Takes seconds and a gigabyte of memory: once per process."""
    from pyspark.sql import SparkSession

    settings = build_settings(master, directory, heap_bytes=heap_bytes, ui=ui, extra=extra)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Driver and workers must run the same Python with the same packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("tailrace-pipeline")
    builder = builder.remote(master) if master.startswith("sc://") else builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


EXIT_S_MAX: Final = 5.0  # for the JVM to delete its temporary files
_LINE_BYTES_MAX: Final = 8192
# 26/11/17 22:13:32 WARN NativeCodeLoader: Unable to load native-hadoop library ...
_LOG4J_LINE: Final = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d ([A-Z]+) ([^:\s]+): (.*)")
_ERROR_LEVELS: Final = frozenset({"ERROR", "FATAL"})


def log_child_output() -> None:
    """Log what child processes write to standard error from now on.

    Descriptor 2, which the JVM and the Python workers inherit, becomes a pipe that a thread reads. This
    process logs to a duplicate of the old descriptor.
    """
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    pipe = os.fdopen(reading, "rb")
    threading.Thread(target=_log_lines, args=(pipe,), name="spark-log", daemon=True).start()


def _log_lines(pipe: BinaryIO) -> None:
    failing = False  # lines of a stack trace have the severity of the line before them
    while raw := pipe.readline(_LINE_BYTES_MAX):
        line = raw.decode(errors="replace").rstrip()
        if not line:
            continue
        fields: dict[str, object] = {"line": line}
        if (match := _LOG4J_LINE.fullmatch(line)) is not None:
            level, source, text = match.groups()
            failing = level in _ERROR_LEVELS
            fields = {"spark_level": level, "spark_logger": source, "line": text}
        # Never an error: Spark retries failed tasks, and the pipeline logs its own errors.
        logger.log(logging.WARNING if failing else logging.INFO, "Spark output", extra={"fields": fields})


def exit_quietly() -> NoReturn:
    """Exit this process and its JVM at once, without output.

    Threads that wait for the JVM would fail and print tracebacks. No job needs a clean shutdown.
    """
    logging.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - open until the process exits
    with suppress(Exception):
        _stop_jvm()
    os._exit(0)


def _stop_jvm() -> None:
    """Close the standard input of the JVM: it deletes its temporary files and exits."""
    context: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is not None:
        process.stdin.close()
        with suppress(TimeoutExpired):
            process.wait(EXIT_S_MAX)
