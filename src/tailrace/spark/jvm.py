"""The JVM behind a Spark session: what it prints goes through our log, and it can be ended without noise."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import Any, BinaryIO, Final, NoReturn

logger = logging.getLogger("tailrace.spark")

EXIT_S_MAX: Final = 5.0  # for the JVM to delete its temporary files
_LINE_BYTES_MAX: Final = 8192
# 26/11/17 22:13:32 WARN NativeCodeLoader: Unable to load native-hadoop library ...
_LOG4J_LINE: Final = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d ([A-Z]+) ([^:\s]+): (.*)")
_ERROR_LEVELS: Final = frozenset({"ERROR", "FATAL"})


def log_child_output() -> None:
    """From here on, what child processes write to standard error becomes lines of our log.

    The JVM and the Python workers inherit descriptor 2, which is a pipe from now on. Ours are written to a
    copy of what it was.
    """
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    pipe = os.fdopen(reading, "rb")
    threading.Thread(target=_log_lines, args=(pipe,), name="spark-log", daemon=True).start()


def _log_lines(pipe: BinaryIO) -> None:
    failing = False  # the lines of a stack trace are as severe as the line before them
    while raw := pipe.readline(_LINE_BYTES_MAX):
        line = raw.decode(errors="replace").rstrip()
        if not line:
            continue
        fields: dict[str, object] = {"line": line}
        if (match := _LOG4J_LINE.fullmatch(line)) is not None:
            level, source, text = match.groups()
            failing = level in _ERROR_LEVELS
            fields = {"spark_level": level, "spark_logger": source, "line": text}
        # Spark tries a failed task again: what counts as an error, the pipeline says itself.
        logger.log(logging.WARNING if failing else logging.INFO, "Spark output", extra={"fields": fields})


def exit_quietly() -> NoReturn:
    """End this process and its JVM at once, whatever they are doing, without a word.

    Threads that wait for the JVM would fail and print tracebacks. No job needs a clean end.
    """
    logging.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process has ended
    with suppress(Exception):
        _stop_jvm()
    os._exit(0)


def _stop_jvm() -> None:
    """The JVM leaves when its standard input ends, and deletes its temporary files first."""
    context: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is not None:
        process.stdin.close()
        with suppress(TimeoutExpired):
            process.wait(EXIT_S_MAX)
