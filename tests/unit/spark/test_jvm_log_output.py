"""What processes below a pipeline print is in its log, and an end without noise is one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

BEGIN = """
import logging, subprocess, sys, threading
from tailrace.common.logging_setup import configure_logging
from tailrace.spark import session
configure_logging("info", "json")
session.log_child_output()
"""
PRINTED = (
    """26/11/17 22:13:32 WARN NativeCodeLoader: Unable to load
26/11/17 22:13:33 ERROR Executor: Exception in task 0.0
java.lang.IllegalStateException: no
\tat org.example.Main(Main.java:7)

26/11/17 22:13:34 INFO SparkContext: going on
"""
    + "x" * 20_000
)
SPEAKING = f"""
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", {PRINTED!r}], check=True)
import os
os.close(2)  # the last writer has left: the reader comes to the end
[thread.join() for thread in threading.enumerate() if thread.name == "spark-log"]
logging.getLogger("tailrace.pipeline").info("ours")
"""
# `cat` ends with its input, as the JVM of PySpark does; a thread that depends on it fails then.
LEAVING = """
import types
process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
gateway = types.SimpleNamespace(proc=process)
sys.modules["pyspark"] = types.SimpleNamespace(SparkContext=types.SimpleNamespace(_gateway=gateway))

def depend():
    subprocess.run(["tail", "--pid", str(process.pid), "-f", "/dev/null"], check=True)
    raise ConnectionError("the JVM is gone")

threading.Thread(target=depend).start()
session.exit_quietly()
"""


def _run(program: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == ""
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_lines_of_spark_are_lines_of_the_log() -> None:
    code, lines = _run(SPEAKING)
    assert code == 0
    assert lines.pop()["event"] == "ours"
    assert {(line["event"], line["logger"]) for line in lines} == {("Spark output", "tailrace.spark")}
    seen = [(line["level"], line.get("spark_logger"), line["line"]) for line in lines[:5]]
    assert seen == [
        ("info", "NativeCodeLoader", "Unable to load"),
        ("warning", "Executor", "Exception in task 0.0"),
        ("warning", None, "java.lang.IllegalStateException: no"),
        ("warning", None, "\tat org.example.Main(Main.java:7)"),
        ("info", "SparkContext", "going on"),
    ]
    assert [len(line["line"]) for line in lines[5:]] == [8192, 8192, 20_000 - 2 * 8192], "bounded lines"


def test_an_exit_is_quiet_although_threads_fail() -> None:
    assert _run(LEAVING) == (0, [])
