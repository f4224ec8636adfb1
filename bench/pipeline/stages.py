# pyright: strict
"""The stages of the bench: each one is a process of its own with a time limit, and keeps what it found."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import msgspec

from bench import machine
from bench.pipeline.place import Figures, Place, Record, read_record
from bench.places import ROOT
from bench.processes import descendants
from bench.run import say

END_S_MAX = 30.0
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class Stage(NamedTuple):
    name: str
    module: str  # the function has the name of the stage
    limit_s: float
    limit_s_per_million: float
    help: str

    def limit_of(self, events: int) -> float:
        return self.limit_s + self.limit_s_per_million * events / 1e6


ALL = (
    Stage("kernels", "kernels", 300, 0, "events a second of one core, without Spark; each family's share"),
    Stage("load", "load", 300, 600, "write the events, append and seal them"),
    Stage("companions", "building", 300, 120, "build all companions, merge; memory and bytes"),
    Stage(
        "appends", "building", 400, 120, "appends while nothing happens, and during a rebuild of everything"
    ),
    Stage("truth", "asking", 120, 180, "count what the answers to all questions should be"),
    Stage("queries", "asking", 900, 60, "every class of searches and aggregates, each answer checked"),
    Stage("fresh", "asking", 300, 30, "from the acknowledgement of an append until a search finds it"),
    Stage("engines", "engines", 300, 240, "DuckDB and Polars on the same files"),
    Stage("spark", "io", 400, 240, "source, sink and history in Spark"),
    Stage("live", "live", 900, 0, "how long sealed segments wait for companions; a pipeline at rest"),
    Stage("peer", "peer", 1200, 0, "the Prisma server with these events, as far as it gets"),
)
BY_NAME = {stage.name: stage for stage in ALL}


def run(stage: Stage, place: Place, limit_s: float | None = None, *, adopting: bool = False) -> Record:
    """In a process of its own, which is ended with all it started when its time is up.

    `adopting`: whoever outlives its parent is a child of this process, and is waited for (see `adopt`).
    """
    limit_s = limit_s or stage.limit_of(place.events)
    place.results.mkdir(parents=True, exist_ok=True)
    path = place.results / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.pipeline", "--inside", stage.name]
    command += ["--events", str(place.events), "--data", str(place.directory.parent)]
    command += ["--out", str(place.results.parent.parent)]
    say(f"{place.events:,} events, {stage.name}: {stage.help} (at most {limit_s:,.0f} s)")
    begun, busy, own = time.monotonic(), machine.busy_seconds(), machine.own_seconds()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    failed: str | None = None
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        failed = f"not done after {limit_s:,.0f} s"
    finally:
        _end(process)
        if adopting:
            _reap()
    seconds = time.monotonic() - begun
    found = read_record(path)
    if found is None:
        failed = failed or f"ended with {process.returncode}"
        found = record(stage.name, {}, failed)
    others = (machine.busy_seconds() - busy) - (machine.own_seconds() - own)
    found = msgspec.structs.replace(found, seconds=seconds, other_cores=max(0.0, others / seconds))
    write(path, found)
    say(f"{stage.name}: {found.failed or 'done'}, {seconds:,.0f} s")
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """The stage, and whatever it has left behind in its group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            continue


def adopt() -> None:
    """Whoever outlives its parent becomes a child of this process, so that its processor time is counted."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Waits for those that outlived their stage, and ends whoever does not end by itself."""
    asked = time.monotonic() + END_S_MAX / 2
    deadline = asked + END_S_MAX
    while time.monotonic() < deadline:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if found:
            continue
        if time.monotonic() > asked:
            for pid in descendants(os.getpid())[1:]:
                _signal(pid, signal.SIGKILL)
        time.sleep(0.1)


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        pass


def inside(stage: Stage, place: Place) -> int:
    """What the process of a stage does."""
    function: Callable[[Place], Figures] = getattr(
        import_module(f"bench.pipeline.{stage.module}"), stage.name
    )
    try:
        found = record(stage.name, function(place))
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = record(stage.name, {}, f"{type(error).__name__}: {error}"[:500])
    write(place.results / f"{stage.name}.json", found)
    return 0 if found.failed is None else 1


def record(stage: str, figures: Figures, failed: str | None = None) -> Record:
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return Record(stage, date, machine.commit(), 0.0, 0.0, figures, failed)


def write(path: os.PathLike[str], found: Record) -> None:
    fresh = f"{os.fspath(path)}.new"
    with open(fresh, "wb") as file:  # noqa: PTH123
        file.write(msgspec.json.format(msgspec.json.encode(found), indent=1))
    os.replace(fresh, path)  # noqa: PTH105
