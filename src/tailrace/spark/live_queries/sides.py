"""Two matchers at work on the same changes: each in a Python of its own, fed by one task."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from tailrace.spark.live_queries.matcher_process import read_frame, write_frame
from tailrace.spark.live_queries.versions import unpack_archive
from tailrace.storage.segments.parquet import INT32, INT64, STRING, pa

MATCH_ROWS_MAX: Final = 200  # sent at once, so that neither side waits for a full pipe
BUCKET_GROWTH: Final = 1.05  # from one bucket of times to the next
SIDES: Final = ("baseline", "candidate")
EXIT_S_MAX: Final = 10

COMPARISON_SCHEMA: Final = pa.schema(
    [
        ("kind", STRING),  # changes, matches, latency, differs
        ("side", STRING),
        ("bucket", INT32),
        ("count", INT64),
        ("partition", INT32),
        ("seq", INT64),
        ("subscription", STRING),
        ("baseline", STRING),
        ("candidate", STRING),
    ]
)
COMPARISON_DDL: Final = (
    "kind string, side string, bucket int, count bigint, partition int, seq bigint, subscription string, "
    "baseline string, candidate string"
)

ComparisonRow = dict[str, Any]
MatchesByKey = dict[str, str]  # by subscription: what it is told


class MatcherProcessError(RuntimeError):
    """A matcher that cannot be run, or has ended."""


class ShadowTask(msgspec.Struct, frozen=True):
    store: str
    archives: tuple[str, str]
    subscriptions: bytes


class MatcherProcess:
    """One version's matcher process."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self._given = cast("BinaryIO", process.stdin)
        self._answers = cast("BinaryIO", process.stdout)

    def begin(self, subscriptions: bytes, directory: Path) -> None:
        about = msgspec.json.decode(self._ask(subscriptions))
        if not Path(about["path"]).is_relative_to(directory):
            raise MatcherProcessError(f"the {self._name} runs another package than its own: {about['path']}")

    def match(self, rows: list[tuple[int, int, int, bytes]]) -> list[tuple[int, MatchesByKey]]:
        answer: list[Any] = msgspec.msgpack.decode(self._ask(msgspec.msgpack.encode(rows)))
        return [(ns, {key: f"{op} {reason}" for key, op, reason in told}) for ns, told in answer]

    def _ask(self, frame: bytes) -> bytes:
        try:
            write_frame(self._given, frame)
            answer = read_frame(self._answers)
        except BrokenPipeError:
            answer = None
        if answer is None:
            code = self._process.wait(EXIT_S_MAX)
            raise MatcherProcessError(f"the matcher of the {self._name} has ended with {code}")
        return answer


@contextmanager
def run_matchers(task: ShadowTask) -> Generator[list[MatcherProcess]]:
    """Both matchers, for as long as they are needed."""
    with ExitStack() as stack:
        sides: list[MatcherProcess] = []
        for name, archive in zip(SIDES, task.archives, strict=True):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-shadow-")))
            unpack_archive(task.store, archive, directory)
            environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "tailrace.spark.live_queries.matcher_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    cwd=directory,
                )
            )
            stack.callback(process.kill)
            side = MatcherProcess(process, name)
            side.begin(task.subscriptions, directory)
            sides.append(side)
        yield sides


def compare_changes(task: ShadowTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: changes in; out come counts, times, and whatever the two do not agree on."""
    tally = _ComparisonTally()
    with run_matchers(task) as sides:
        for batch in batches:
            names = ("stream", "entry", "timestamp_ns", "value")
            columns: list[list[Any]] = [batch.column(name).to_pylist() for name in names]
            rows = [
                (int(stream.rpartition("/")[2]), entry, time_ns, value)
                for stream, entry, time_ns, value in zip(*columns, strict=True)
            ]
            differing: list[ComparisonRow] = []
            for start in range(0, len(rows), MATCH_ROWS_MAX):
                differing += _compare_batch(sides, rows[start : start + MATCH_ROWS_MAX], tally)
            if differing:
                yield pa.RecordBatch.from_pylist(differing, schema=COMPARISON_SCHEMA)
    yield pa.RecordBatch.from_pylist(tally.rows(), schema=COMPARISON_SCHEMA)


def _compare_batch(
    sides: list[MatcherProcess], rows: list[tuple[int, int, int, bytes]], tally: _ComparisonTally
) -> list[ComparisonRow]:
    # Whoever comes second finds warm caches: they take turns.
    turn = tally.changes // MATCH_ROWS_MAX % 2
    second = sides[1 - turn]
    first_found = sides[turn].match(rows)
    second_found = second.match(rows)
    baseline, candidate = (first_found, second_found) if turn == 0 else (second_found, first_found)
    differing: list[ComparisonRow] = []
    for row, (one_ns, one), (other_ns, other) in zip(rows, baseline, candidate, strict=True):
        tally.add(0, one_ns, len(one))
        tally.add(1, other_ns, len(other))
        if one != other:
            differing += [
                {
                    "kind": "differs",
                    "count": 1,
                    "partition": row[0],
                    "seq": row[1],
                    "subscription": key,
                    "baseline": one.get(key),
                    "candidate": other.get(key),
                }
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
    tally.changes += len(rows)
    return differing


class _ComparisonTally:
    """What a task has counted."""

    def __init__(self) -> None:
        self.changes = 0
        self._matches = [0, 0]
        self._times: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def add(self, side: int, ns: int, matches: int) -> None:
        self._matches[side] += matches
        bucket = latency_bucket(ns)
        self._times[side][bucket] = self._times[side].get(bucket, 0) + 1

    def rows(self) -> list[ComparisonRow]:
        found: list[ComparisonRow] = [{"kind": "changes", "count": self.changes}]
        for place, side in enumerate(SIDES):
            found.append({"kind": "matches", "side": side, "count": self._matches[place]})
            found += [
                {"kind": "latency", "side": side, "bucket": bucket, "count": count}
                for bucket, count in sorted(self._times[place].items())
            ]
        return found


def latency_bucket(ns: int) -> int:
    return int(math.log(max(ns, 1)) / math.log(BUCKET_GROWTH))


def bucket_midpoint_us(bucket: int) -> float:
    """The middle of a bucket, in microseconds."""
    return BUCKET_GROWTH ** (bucket + 0.5) / 1000
