# pyright: strict
"""A load that lasts: appends, reads, live readers and seals at a share of the measured maximum.

`python -m bench.soak --minutes 30` measures the maximum with the whole mix running, the pipeline
included, and holds appends at 70 % of it. The programs that load the server run throughout: if they began
anew with each interval, clients that all connect at once would be what is measured. Every interval rates,
latencies, errors and memory are noted; at the end they are drawn and judged: no errors, memory flat, p99
stable.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from bench import install
from bench.chart import Panel, draw_png, draw_svg
from bench.loadgen import Fanout, Generator, Load
from bench.machine import commit, cpu_model
from bench.peers import ALL, US
from bench.places import DATA, RESULTS
from bench.processes import TICKS_PER_S, PeerError, Running, rss_bytes
from tailrace.common import process

MIB = 1024 * 1024
OCTETS = "application/octet-stream"
# Small segments and journal files, so that checkpoints, seals and trims go on all the while.
ENV = {
    "TAILRACE_SEAL_BYTES": "4MiB",
    "TAILRACE_SEAL_AGE_MS": "30s",
    "TAILRACE_SEAL_INTERVAL_MS": "5s",
    "TAILRACE_JOURNAL_FILE_BYTES": "16MiB",
}
# The pipeline starts with the first segments instead of waiting for more.
PIPELINE = {"TAILRACE_PIPELINE": "auto", "TAILRACE_PIPELINE_START_BYTES": "256KiB"}
RETENTION_BYTES = 64 * MIB  # of each stream that is appended to: the disk stays as full as it is
HISTORY_MESSAGES = 20_000
MEMORY_GROWTH_MAX = 1.10  # of the last third over the middle one
P99_GROWTH_MAX = 1.5
# Of all processors in an interval. What is due while they stand still waits, and makes what follows wait.
STOLEN_MS_MAX = 10.0
WARMUP_S = 2.0  # connections are made, and nothing is counted yet
LONG_S = 3600.0  # for what is ended by its block
MAXIMUM_READINGS = 6
PUBLISHED = "tailrace_pipeline_publish_total"
PIPELINE_S_MAX = 300.0
# Clients elsewhere would not share their cores with Spark: it is the server's waiting that is measured.
TURN_US = 100

Reported = TypeVar("Reported")
Loading = AbstractContextManager[Iterator[Reported]]


class Row(msgspec.Struct, frozen=True):
    """One interval."""

    minutes: float
    appends_per_s: float
    append_p50_ms: float
    append_p99_ms: float
    reads_per_s: float
    read_p99_ms: float
    delivery_p99_ms: float
    errors: int
    stolen_ms: float  # in which the machine's own host gave its processors to others
    server_mb: float
    all_mb: float  # with the processes it has started
    segments: int
    publications: int


class Soak(msgspec.Struct, frozen=True):
    """A whole run."""

    commit: str
    cpu: str
    share: float
    max_per_s: float
    missed: int  # messages that live readers did not get, or got twice
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Mix:
    """What runs at once, besides what the server does by itself."""

    generator: Generator
    connections: int
    streams: int
    readers: int
    live_rate: int
    read_rate: int

    def appends(self, port: int, seconds: float, every: float, rate: int = 0) -> Loading[Load]:
        options = {"rate": rate} if rate else {}
        return self.generator.reporting(
            Load,
            port,
            every,
            mode="append",
            path="/v1/stream/soak-%d",
            streams=self.streams,
            connections=self.connections,
            seconds=seconds,
            warmup=WARMUP_S,
            **options,
        )

    def reads(self, port: int, seconds: float, every: float) -> Loading[Load]:
        return self.generator.reporting(
            Load,
            port,
            every,
            mode="read",
            path="/v1/stream/history-%d",
            streams=4,
            connections=4,
            seconds=seconds,
            warmup=WARMUP_S,
            rate=self.read_rate,
        )

    def live(self, port: int, seconds: float, every: float, name: str) -> Loading[Fanout]:
        """On a stream of its own each time: readers count what they see from its start."""
        return self.generator.reporting(
            Fanout,
            port,
            every,
            mode="fanout",
            path=f"/v1/stream/{name}",
            content_type="application/json",
            create=True,
            readers=self.readers,
            rate=self.live_rate,
            seconds=seconds,
            drain=5,
        )


def call(port: int, method: str, name: str, body: bytes | None = None, **headers: str) -> None:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/stream/{name}", body, named, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def prepare(port: int, mix: Mix, *, pipeline: bool) -> None:
    for number in range(mix.streams):
        kept = str(RETENTION_BYTES)
        call(
            port,
            "PUT",
            f"soak-{number}",
            Content_Type=OCTETS,
            Stream_Retention_Bytes=kept,
        )
    for number in range(4):
        call(port, "PUT", f"history-{number}", Content_Type=OCTETS)
    filled = mix.generator.run(
        port, mode="append", path="/v1/stream/history-%d", streams=4, body_bytes=1000, count=HISTORY_MESSAGES
    )
    if filled.errors:
        raise PeerError(f"filling failed: {filled.status}")
    if pipeline:
        call(port, "PUT", "events", Content_Type="application/json")
        profile = msgspec.json.encode({"profile": {"kind": "evlog"}})
        call(port, "POST", "events/_profile", profile, Content_Type="application/json")


class Events:
    """Wide events at a modest rate, so that the pipeline has something to index."""

    def __init__(self, port: int, per_s: int = 200) -> None:
        self._port = port
        self._per_s = per_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._end.wait(1.0):
            batch = [
                {"service": f"service-{one % 7}", "message": f"request {one} served", "status": 200 + one % 3}
                for one in range(number, number + self._per_s)
            ]
            number += self._per_s
            try:
                call(
                    self._port, "POST", "events", msgspec.json.encode(batch), Content_Type="application/json"
                )
            except OSError:
                self.errors += 1


def await_publication(port: int) -> None:
    """The pipeline works from now on: what it takes is part of the mix, for the maximum as for the rest."""
    deadline = time.monotonic() + PIPELINE_S_MAX
    while not metric(port, PUBLISHED):
        if time.monotonic() > deadline:
            raise PeerError(f"the pipeline has published nothing in {PIPELINE_S_MAX:.0f} s")
        time.sleep(1)


def metric(port: int, name: str) -> int:
    """The sum of a counter over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
    )


def stolen_ms() -> float:
    """Since the machine runs, of all its processors; 0 where it is nobody's guest."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        return int(lines.readline().split()[8]) * 1000 / TICKS_PER_S


def resident_mb(server: Running) -> float:
    return rss_bytes(server.process.pid) / 1e6


def row_of(server: Running, began: float, stolen_ms: float, appended: Load, read: Load, seen: Fanout) -> Row:
    return Row(
        minutes=(time.monotonic() - began) / 60,
        appends_per_s=appended.ops_per_s,
        append_p50_ms=appended.latency_us.p50 / 1000,
        append_p99_ms=appended.latency_us.p99 / 1000,
        reads_per_s=read.ops_per_s,
        read_p99_ms=read.latency_us.p99 / 1000,
        delivery_p99_ms=seen.delivery_us.p99 / 1000,
        errors=appended.errors + read.errors + seen.append_errors,
        stolen_ms=stolen_ms,
        server_mb=resident_mb(server),
        all_mb=server.rss_bytes() / 1e6,
        segments=metric(server.port, "tailrace_sealed_segments_total"),
        publications=metric(server.port, PUBLISHED),
    )


def maximum(server: Running, mix: Mix, every: float) -> float:
    """Appends a second when they go as fast as they can, everything else going on as it will later."""
    port = server.port
    with (
        mix.live(port, LONG_S, every, "live-before"),
        mix.reads(port, LONG_S, every),
        mix.appends(port, MAXIMUM_READINGS * every, every) as appends,
    ):
        found = statistics.median(appended.ops_per_s for appended in appends)
    call(port, "DELETE", "live-before")
    return found


def run(server: Running, mix: Mix, minutes: float, every: float, share: float) -> Soak:
    max_per_s = maximum(server, mix, every)
    rate = max(1, int(share * max_per_s))
    print(
        f"at most {max_per_s:,.0f} appends/s with the mix; holding {rate:,} for {minutes:g} minutes",
        flush=True,
    )
    port, seconds, began = server.port, minutes * 60, time.monotonic()
    rows: list[Row] = []
    missed, stolen = 0, stolen_ms()
    with (
        mix.live(port, seconds, every, "live") as live,
        mix.reads(port, seconds, every) as reads,
        mix.appends(port, seconds, every, rate) as appends,
    ):
        for appended, read, seen in zip(appends, reads, live, strict=False):
            before, stolen = stolen, stolen_ms()
            rows.append(row := row_of(server, began, stolen - before, appended, read, seen))
            missed += seen.expected - seen.delivered + seen.duplicates
            print(
                f"{row.minutes:6.1f} min  {row.appends_per_s:8,.0f}/s  p99 {row.append_p99_ms:7.2f} ms  "
                f"live p99 {row.delivery_p99_ms:7.2f} ms  {row.server_mb:6.0f} MB  errors {row.errors}  "
                f"stolen {row.stolen_ms:3.0f} ms",
                flush=True,
            )
        # What was on its way at the end of an interval came in the next one; the last word is after the last.
        missed += sum(seen.expected - seen.delivered + seen.duplicates for seen in live)
    return Soak(commit=commit(), cpu=cpu_model(), share=share, max_per_s=max_per_s, missed=missed, rows=rows)


def verdict(soak: Soak) -> list[str]:
    """What is wrong with the run; nothing if it held."""
    rows = soak.rows
    found: list[str] = []
    if errors := sum(row.errors for row in rows):
        found.append(f"{errors} requests failed")
    if soak.missed:
        found.append(f"live readers missed, or saw twice, {soak.missed} messages")
    third = len(rows) // 3
    if third:
        middle, last = rows[third : 2 * third], rows[-third:]
        grown = _median([row.server_mb for row in last]) / _median([row.server_mb for row in middle])
        if grown > MEMORY_GROWTH_MAX:
            found.append(f"memory grew by {grown - 1:.0%} from the middle third to the last")
        slower = _median([row.append_p99_ms for row in last]) / _median([row.append_p99_ms for row in middle])
        if slower > P99_GROWTH_MAX:
            found.append(f"p99 of appends grew {slower:.1f}-fold from the middle third to the last")
    return found


def summary(rows: Sequence[Row]) -> str:
    """The p99 of appends by thirds: of all intervals, and of those in which the machine stood by."""
    third = max(1, len(rows) // 3)
    lines = ["append p99, median of intervals: all, and those without stolen time"]
    for part in (rows[:third], rows[third : 2 * third], rows[-third:]):
        undisturbed = [row.append_p99_ms for row in part if row.stolen_ms <= STOLEN_MS_MAX]
        calm = f"{_median(undisturbed):.1f} ms ({len(undisturbed)})" if undisturbed else "none"
        lines.append(f"  {_median([row.append_p99_ms for row in part]):.1f} ms ({len(part)}), {calm}")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return max(statistics.median(values), 1e-9)


def panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        Panel("Appends", "per second", {"appends": [row.appends_per_s for row in rows]}),
        Panel(
            "Latency, p99",
            "ms",
            {
                "append": [row.append_p99_ms for row in rows],
                "read": [row.read_p99_ms for row in rows],
                "live delivery": [row.delivery_p99_ms for row in rows],
            },
        ),
        Panel(
            "Memory",
            "MB",
            {"server": [row.server_mb for row in rows], "with its processes": [row.all_mb for row in rows]},
        ),
        Panel("Stolen by the host", "ms in an interval", {"stolen": [row.stolen_ms for row in rows]}),
        Panel("Errors", "in an interval", {"errors": [float(row.errors) for row in rows]}),
        Panel("Segments sealed", "since the start", {"segments": [float(row.segments) for row in rows]}),
    ]


def write(soak: Soak, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(soak)))
    title = (
        f"{soak.commit} at {soak.share:.0%} of {soak.max_per_s:,.0f} appends/s, with reads and live readers"
    )
    minutes, drawn = [row.minutes for row in soak.rows], panels(soak.rows)
    draw_svg(out / "soak.svg", title, minutes, drawn)
    files = [out / "soak.json", out / "soak.svg"]
    if draw_png(out / "soak.png", title, minutes, drawn):
        files.append(out / "soak.png")
    return files


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds of each reading (10)")
    parser.add_argument("--share", type=float, default=0.7, help="of the measured maximum (0.7)")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--readers", type=int, default=200, help="live readers (200)")
    parser.add_argument("--live-rate", type=int, default=50, help="messages/s to them (50)")
    parser.add_argument("--read-rate", type=int, default=200, help="catch-up reads/s (200)")
    parser.add_argument("--pipeline", action="store_true", help="let the server run its pipeline on events")
    parser.add_argument("--server-cpus", default="0", help="cores of the server, any for all (0)")
    parser.add_argument("--load-cpus", default="1", help="cores of the load, any for all (1)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def cores(text: str) -> frozenset[int] | None:
    return None if text == "any" else frozenset(int(core) for core in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    install.tools()
    mix = Mix(
        generator=Generator(cores(options.load_cpus)),
        connections=options.connections,
        streams=options.streams,
        readers=options.readers,
        live_rate=options.live_rate,
        read_rate=options.read_rate,
    )
    env = {**ENV, **(PIPELINE if options.pipeline else {"TAILRACE_PIPELINE": "off"})}
    with ALL[US].running(DATA / "soak", cores(options.server_cpus), env) as server:
        process.set_time_slice(TURN_US)  # from now on: for the load, not for the server
        prepare(server.port, mix, pipeline=options.pipeline)
        events = Events(server.port)
        if options.pipeline:
            events.start()
            await_publication(server.port)
        soak = run(server, mix, options.minutes, options.interval, options.share)
        if options.pipeline:
            events.stop()
    found = verdict(soak) + ([f"{events.errors} batches of events failed"] if events.errors else [])
    for file in write(soak, options.out):
        print(f"wrote {file}")
    print(summary(soak.rows))
    print("\n".join(found) or "held: no errors, memory flat, p99 stable")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
