"""Micro-batches as Spark's driver runs them, without its JVM: the same logs, source and sink, killed at will.

    python spark_batches.py <endpoint> <source> <target> <directory>

A driver is a fork of this process, which has imported everything once: so it starts in no time. Each line of
the input starts one, with the line as its seed; it goes on until it is killed, or has copied all there is.
What it says goes to the output: its process id, each step of each batch, and `ended`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa

from support.spark_rows import columns
from tailrace.spark.options import parse_read_options, parse_write_options
from tailrace.spark.sink import BatchCommitter, PartitionWriter
from tailrace.spark.stream_reader import StreamReader

QUERY = "copied"
PARTITIONS_MAX = 3


class Logs:
    """What a batch reads is written down before it runs; that it is done, after."""

    def __init__(self, directory: Path) -> None:
        self._planned, self._done = directory / "offsets", directory / "commits"
        for one in (self._planned, self._done):
            one.mkdir(parents=True, exist_ok=True)

    @property
    def batch(self) -> int:
        """The first one that is not done."""
        return len(list(self._done.glob("[0-9]*")))

    def end(self, batch: int) -> dict[str, str] | None:
        path = self._planned / str(batch)
        return json.loads(path.read_text()) if path.exists() else None

    def plan(self, batch: int, end: dict[str, str]) -> None:
        _write(self._planned / str(batch), json.dumps(end))

    def done(self, batch: int) -> None:
        _write(self._done / str(batch), "")


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.rename(path)


def copy(endpoint: str, source: str, target: str, directory: Path, seed: int) -> None:
    """Batch after batch, each attempt cut into partitions in a way of its own."""
    generator = random.Random(seed)
    given = {"stream": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    reader = StreamReader(
        parse_read_options({"endpoint": endpoint, **given}, streaming=True), columns("value")
    )
    given = {"stream": target, "batchRows": "4", "checkpointLocation": str(directory)}
    options = parse_write_options({"endpoint": endpoint, **given}, streaming=True)
    logs = Logs(directory)
    while True:
        batch = logs.batch
        start, end = logs.end(batch - 1) or reader.initialOffset(), logs.end(batch)
        if end is None:
            end = reader.latestOffset(start, reader.getDefaultReadLimit())
            if end == start:
                return
            logs.plan(batch, end)
        _say(f"planned {batch}")
        values: list[Any] = [
            row["value"]
            for partition in reader.partitions(start, end)
            for rows in reader.read(partition)
            for row in rows.to_pylist()
        ]
        parts: list[list[Any]] = [[] for _ in range(generator.randint(1, PARTITIONS_MAX))]
        for value in values:
            generator.choice(parts).append(value)
        written = [
            PartitionWriter(options, QUERY, batch, number).write(iter([pa.record_batch({"value": part})]))
            for number, part in enumerate(parts)
            if part
        ]
        _say(f"written {batch}")
        BatchCommitter(options).commit([*written], batch)
        _say(f"committed {batch}")
        logs.done(batch)


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(endpoint: str, source: str, target: str, directory: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                _say(f"pid {os.getpid()}")
                copy(endpoint, source, target, Path(directory), int(line))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


class Drivers:
    """One driver after the other, for a test."""

    def __init__(self, endpoint: str, source: str, target: str, directory: Path) -> None:
        arguments = [sys.executable, __file__, endpoint, source, target, str(directory)]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)

    def run(self, seed: int, steps_max: int | None = None) -> tuple[int, str]:
        """Starts one, and kills it right after so many steps; how it ended, and its last step."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{seed}\n")
        pid, steps, last = 0, 0, ""
        for line in stdout:
            word, _, rest = line.partition(" ")
            if word == "ended":
                return int(rest), last
            if word == "pid":
                pid = int(rest)
                continue
            steps, last = steps + 1, word
            if steps == steps_max:
                os.kill(pid, signal.SIGKILL)
        raise AssertionError("the process that starts drivers is gone")


if __name__ == "__main__":
    main(*sys.argv[1:])
