# pyright: strict
"""Appends of one worker and of several, each with the same CPU quota: `python -m bench.workers`.

The machine may have fewer cores than workers: what is compared is what the same CPU time gives. Every worker
is put into a control group of its own with that quota (v1 or v2, which needs the right to make one); the load
runs beside them without one. Clients are not told which worker has what. Each writes to a stream of its own,
and all workers have as many; with `--mixed` all write to all streams in turn, so that most requests reach a
worker that does not own theirs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.loadgen import Generator as Load
from bench.loadgen import Load as Result
from bench.loadgen import append_options
from bench.places import DATA
from bench.processes import Running, free_port, launch
from tailrace.cluster.peers import Placement

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000
WARM_SECONDS = 8.0  # until the helpers of every worker run: starting them costs half a second of its core
STREAMS = 8
CHILD = b"tailrace.cluster.worker_process"


def is_unified() -> bool:
    return (CGROUPS / "cgroup.controllers").exists()


@contextmanager
def capped(pids: list[int], share: float) -> Generator[None]:
    """Each process, with all its threads, in a group of its own that gets this share of one core."""
    unified = is_unified()
    parent = CGROUPS if unified else CGROUPS / "cpu"
    groups: list[Path] = []
    try:
        for pid in pids:
            group = parent / f"tailrace-bench-{pid}"
            group.mkdir()
            groups.append(group)
            quota_us = int(share * PERIOD_US)
            if unified:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in groups:
            while inside := (group / "cgroup.procs").read_text().split():  # what they started is in there too
                for pid in inside:
                    with suppress(ProcessLookupError):
                        (parent / "cgroup.procs").write_text(pid)
            group.rmdir()


def working(server: Running) -> list[int]:
    """The processes that serve: the workers, or the server itself."""
    found: list[int] = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if CHILD in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found or [server.process.pid]


def cpu_seconds(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in _threads(pids))


def _threads(pids: list[int]) -> list[str]:
    return [f"{pid}/task/{task.name}" for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]


def writers(workers: int, connections: int, mixed: bool) -> list[dict[str, str | int | float | bool]]:
    """The options of each load program: one for all streams, or one for each."""
    options = append_options("http") | {"body_bytes": 100}
    if mixed:
        return [options | {"connections": connections, "streams": STREAMS}]
    found: list[list[str]] = [[] for _ in range(workers)]
    for number in range(100 * STREAMS):
        name = f"bench-{number}"
        found[Placement(workers).owner(name)].append(name)
    names = [name for names in found for name in names[: STREAMS // workers]]
    each = connections // len(names)
    return [options | {"connections": each, "streams": 1, "path": f"/v1/stream/{name}"} for name in names]


def run(port: int, programs: list[dict[str, str | int | float | bool]], seconds: float) -> list[Result]:
    """All programs at once, and what they say."""
    generator = Load(None)
    started = [generator.start(port, **options, seconds=seconds) for options in programs]
    return [generator.finish(one) for one in started]


def measure(workers: int, share: float, connections: int, seconds: float, mixed: bool) -> dict[str, float]:
    directory = DATA / f"workers-{workers}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "tailrace",
        "serve",
        "--port",
        str(port),
        "--data-dir",
        str(directory / "data"),
    ]
    argv += ["--workers", str(workers), "--pipeline", "off"]
    server = launch(argv, {}, port, "/readyz", directory / "log", None)
    try:
        programs = writers(workers, connections, mixed)
        run(port, programs, WARM_SECONDS)
        pids = working(server)
        with capped(pids, share):
            before_s, began = cpu_seconds(pids), time.monotonic()
            results = run(port, programs, seconds)
            used_s, took_s = cpu_seconds(pids) - before_s, time.monotonic() - began
        if any(result.errors for result in results):
            raise SystemExit(f"errors: {[result.status for result in results]}")
        appends = sum(result.ops_per_s for result in results)
        return {
            "workers": workers,
            "appends_per_s": appends,
            "p99_us": max(result.latency_us.p99 for result in results),
            "cores_used": used_s / took_s,
            "appends_per_cpu_s": appends / (used_s / took_s),
        }
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--share", type=float, default=0.3, help="of a core, for each worker")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed", action="store_true", help="every connection writes to all streams")
    given = parser.parse_args()
    quota = "cpu.max of cgroup v2" if is_unified() else "cpu.cfs_quota_us of cgroup v1"
    print(f"each worker has {given.share:.0%} of a core, by {quota}", flush=True)
    best: dict[int, dict[str, float]] = {}
    for _ in range(given.rounds):
        for workers in given.workers:
            row = measure(workers, given.share, given.connections, given.seconds, given.mixed)
            best[workers] = max(best.get(workers, row), row, key=lambda one: one["appends_per_s"])
            print("  ".join(f"{name} {value:,.2f}" for name, value in row.items()), flush=True)
    first = given.workers[0]
    for workers, row in best.items():
        appends, per_cpu_s = row["appends_per_s"], row["appends_per_cpu_s"]
        times = appends / best[first]["appends_per_s"]
        told = f"{workers} workers: {appends:,.0f}/s, {times:.2f} times {first}"
        print(f"{told}, {per_cpu_s:,.0f} for a second of CPU")


if __name__ == "__main__":
    main()
