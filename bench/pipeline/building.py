# pyright: strict
"""Companions of the whole stream, built by `tailrace pipeline run` beside the server; then under load."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from bench.evlog.target import STREAM, Json, Target
from bench.pipeline.appends import Appends
from bench.pipeline.place import Figures, Place, StageError
from bench.processes import Peak, Running
from bench.run import say

IDLE_S = 20.0
# As a server starts its own: where the system schedules by session, only a session's niceness counts.
NICELY = 'echo 10 > /proc/self/autogroup; exec ionice -c 3 nice -n 10 "$@"'


def index_files(place: Place) -> Figures:
    loaded = place.figures("load")
    with place.server() as target:
        _forget(target)
        built = build(target, place, "companions")
        sizes = family_bytes(target)
        merged = build(target, place, "merge")
        after = family_bytes(target)
    total = sum(sizes.values())
    return {
        **built,
        "family_bytes": sizes,
        "per_raw_byte": total / cast("int", loaded["raw_bytes"]),
        "per_segment_byte": total / cast("int", loaded["segment_bytes"]),
        "merge_s": merged["wall_s"],
        "merge_peak_spark_mb": merged["peak_spark_mb"],
        "merged_bytes": sum(after.values()),
    }


def appends(place: Place) -> Figures:
    """Appends to another stream: with nothing beside them, and during a rebuild of everything."""
    with place.server() as target:
        with Appends(target.server.port) as idle:
            time.sleep(IDLE_S)
        _forget(target)
        with Appends(target.server.port) as busy:
            built = build(target, place, "companions")
    return {
        "idle": idle.figures,
        "busy": busy.figures,
        "rows_per_s": built["rows_per_s"],
        "p99_ratio": busy.figures["p99_ms"] / idle.figures["p99_ms"],
    }


def build(target: Target, place: Place, jobs: str) -> Figures:
    """One run to the end. Rates begin with the first publication: a session that is up is what counts."""
    home = place.directory / "pipeline"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    process = Running(_start(target, home, jobs), 0, home / "log")
    rows_before = _published_rows(target)
    first: tuple[float, int] | None = None
    begun = time.monotonic()
    last, cpu_s, told = (begun, 0), 0.0, begun
    with Peak(process) as spark, Peak(target.server) as server:
        while process.process.poll() is None:
            time.sleep(0.5)
            cpu_s = max(cpu_s, process.cpu_seconds())
            now, rows = time.monotonic(), _published_rows(target) - rows_before
            if rows and first is None:
                first = (now, rows)
            if rows > last[1]:
                last = (now, rows)
            if now - told > 15:
                told = now
                say(f"{jobs}: {rows:,} of {place.events:,} events, {now - begun:.0f} s")
    wall_s = time.monotonic() - begun
    if process.process.returncode != 0:
        raise StageError(f"the pipeline ended with {process.process.returncode}: {process.log_tail()}")
    rows = _published_rows(target) - rows_before
    if jobs == "companions" and rows != place.events:
        raise StageError(f"companions of {rows:,} events were published instead of {place.events:,}")
    warm = None if first is None or last[0] <= first[0] else (last[1] - first[1]) / (last[0] - first[0])
    return {
        "rows": rows,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "to_first_s": None if first is None else first[0] - begun,
        "rows_per_s": warm if warm else rows / wall_s,
        "warm": warm is not None and warm > 0,
        "peak_spark_mb": spark.all_bytes / 1e6,
        "peak_server_mb": server.bytes / 1e6,
    }


def _start(target: Target, home: Path, jobs: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tailrace", "pipeline", "run", "--once", "--jobs", jobs]
    command += ["--endpoint", f"http://127.0.0.1:{target.server.port}", "--checkpoint", str(home / "spark")]
    with (home / "log").open("ab") as log:
        nicely = ["sh", "-c", NICELY, "sh", *command]
        return subprocess.Popen(nicely, cwd=home, stdout=log, stderr=log, start_new_session=True)


def _forget(target: Target) -> None:
    """Everything is to be built again."""
    target.must("POST", "/v1/pipeline/plan", {"stream": STREAM})


def _published_rows(target: Target) -> int:
    details = target.must("GET", "/v1/server/_details").body
    runtime = cast("Mapping[str, Json]", details["runtime"])
    return int(cast("str", cast("Json", runtime["pipeline"]["totals"])["rows"]))


def family_bytes(target: Target) -> dict[str, int]:
    """Of all companions that are listed."""
    status = target.must("GET", f"/v1/stream/{STREAM}/_index_status").body
    found = {
        str(one["family"]): int(cast("str", one["bytes_at_rest"]))
        for one in cast("list[Json]", status["search_families"])
    }
    for one in cast("list[Json]", status["exact_indexes"])[:1]:  # all fields share its files
        found["exact"] = int(cast("str", one["bytes_at_rest"]))
    for name in ("routing_key_index", "routing_key_lexicon"):
        size = int(cast("str", cast("Json", status[name])["bytes_at_rest"]))
        if size:
            found[name] = size
    return found
