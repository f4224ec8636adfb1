# pyright: strict
"""The physical floor: syncs and loopback round trips per second, and a C program of the same system calls."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

from bench import install, peers
from bench.loadgen import Generator, Latency, Load
from bench.places import BARE, DATA
from bench.processes import free_port, launch, pinned

RECORD_BYTES, BATCH_BYTES = 150, 16 * 1024
REQUEST_BYTES, REPLY_BYTES = 250, 250


class Bare(msgspec.Struct, frozen=True):
    per_s: float
    latency_us: Latency


class Floor(msgspec.Struct, frozen=True):
    sync_record: Bare
    sync_batch: Bare
    round_trip: Bare
    append: dict[int, Load]  # by connections: HTTP append answered after fdatasync, group commit, in C
    answer: dict[int, Load]  # by connections: HTTP answer without any disk, in C

    @property
    def sync_plus_round_trip_us(self) -> float:
        return self.sync_record.latency_us.p50 + self.round_trip.latency_us.p50


def _bare(*arguments: str, cpus: frozenset[int] | None = None) -> Bare:
    done = subprocess.run(pinned([str(BARE), *arguments], cpus), capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Bare)


def disk(directory: Path, seconds: float, cpus: frozenset[int] | None) -> tuple[Bare, Bare]:
    """One write and fdatasync at a time, of one record and of one batch."""
    directory.mkdir(parents=True, exist_ok=True)
    file = str(directory / "floor")
    record = _bare("sync", file, str(RECORD_BYTES), str(seconds), cpus=cpus)
    return record, _bare("sync", file, str(BATCH_BYTES), str(seconds), cpus=cpus)


def ping(seconds: float, server_cpus: frozenset[int] | None, load_cpus: frozenset[int] | None) -> Bare:
    """Blocking round trips between two processes, of about the size of an append and its answer."""
    pins = [str(min(server_cpus)), str(min(load_cpus))] if server_cpus and load_cpus else []
    return _bare("ping", str(REQUEST_BYTES), str(REPLY_BYTES), str(seconds), *pins)


def measure(
    directory: Path, seconds: float, server_cpus: frozenset[int] | None, load_cpus: frozenset[int] | None
) -> Floor:
    record, batch = disk(directory, seconds, server_cpus)
    round_trip = ping(seconds, server_cpus, load_cpus)
    generator = Generator(load_cpus)
    append: dict[int, Load] = {}
    answer: dict[int, Load] = {}
    for connections in (1, 64, 256):
        with peers.ALL["bare"].running(directory / "bare", server_cpus) as server:
            append[connections] = generator.run(
                server.port, connections=connections, seconds=seconds, warmup=0.3
            )
        port = free_port()
        plain = launch([str(BARE), "serve", str(port)], {}, port, "", directory / "log", server_cpus)
        try:
            answer[connections] = generator.run(port, connections=connections, seconds=seconds, warmup=0.3)
        finally:
            plain.stop()
    return Floor(record, batch, round_trip, append, answer)


def lines(floor: Floor) -> list[str]:
    """Markdown table."""
    rows: list[tuple[str, float, Latency, float | None]] = [
        ("write + fdatasync, 150 B", floor.sync_record.per_s, floor.sync_record.latency_us, None),
        ("write + fdatasync, 16 KiB", floor.sync_batch.per_s, floor.sync_batch.latency_us, None),
        (
            "bare loopback round trip, 250 B each way",
            floor.round_trip.per_s,
            floor.round_trip.latency_us,
            None,
        ),
    ]
    for connections, load in floor.answer.items():
        title = f"C server, HTTP answer, no disk, {connections} conn."
        rows.append((title, load.ops_per_s, load.latency_us, load.load_cpu_share))
    for connections, load in floor.append.items():
        title = f"C server, HTTP append, group fdatasync, {connections} conn."
        rows.append((title, load.ops_per_s, load.latency_us, load.load_cpu_share))
    out = ["| floor | per s | p50 µs | p99 µs | load's core busy |", "|---|---:|---:|---:|---:|"]
    for title, per_s, latency, share in rows:
        busy = "" if share is None else f"{share:.0%}"
        out.append(f"| {title} | {per_s:,.0f} | {latency.p50:,.0f} | {latency.p99:,.0f} | {busy} |")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="measure the physical floor")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-pin", action="store_true", help="let the system place the processes")
    options = parser.parse_args()
    install.tools()
    pinned = not options.no_pin
    floor = measure(
        DATA, options.seconds, frozenset({0}) if pinned else None, frozenset({1}) if pinned else None
    )
    print("\n".join(lines(floor)))
    print(f"\none fdatasync plus one round trip, p50: {floor.sync_plus_round_trip_us:,.0f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
