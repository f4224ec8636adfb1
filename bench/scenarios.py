# pyright: strict
"""What is measured. A scenario starts one peer on a clean directory and returns named rows of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import floor
from bench.loadgen import Fanout, Generator, Load, append_options
from bench.peers import Peer
from bench.places import SLOWSYNC
from bench.processes import PeerError, Running

Numbers = dict[str, float]
Rows = dict[str, Numbers]


@dataclass(frozen=True, slots=True)
class Bench:
    """The conditions of one run."""

    directory: Path
    server_cpus: frozenset[int] | None
    load_cpus: frozenset[int] | None
    seconds: float
    warmup_seconds: float
    read_mib: int
    history_mib: int
    idle_streams: int
    fanout_readers: int

    @property
    def generator(self) -> Generator:
        return Generator(self.load_cpus)

    def data(self, peer: Peer) -> Path:
        return self.directory / peer.name


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    group: str
    title: str
    metric: str  # the number that ratios are made of
    unit: str
    higher_is_better: bool
    peers: tuple[str, ...]
    measure: Callable[[Bench, Peer], Rows]
    rounds_max: int = 99  # fewer for those that take minutes


def numbers(load: Load, server_cpu_share: float) -> Numbers:
    return {
        "ops_per_s": load.ops_per_s,
        "messages_per_s": load.messages_per_s,
        "bytes_per_s": load.bytes_per_s,
        "p50_us": load.latency_us.p50,
        "p90_us": load.latency_us.p90,
        "p99_us": load.latency_us.p99,
        "p999_us": load.latency_us.p999,
        "errors": float(load.errors),
        "load_cpu_share": load.load_cpu_share,
        "server_cpu_share": server_cpu_share,
    }


def timed(bench: Bench, server: Running, **options: str | int | float | bool) -> Numbers:
    """One load on a running server, with the server's share of a core while it ran."""
    before = server.cpu_seconds()
    load = bench.generator.run(server.port, seconds=bench.seconds, warmup=bench.warmup_seconds, **options)
    used = server.cpu_seconds() - before
    if load.ops == 0:
        raise PeerError(f"no successful reply; statuses {load.status}")
    return numbers(load, used / (load.seconds + bench.warmup_seconds))


def appends(connections: int, streams: int) -> Callable[[Bench, Peer], Rows]:
    def measure(bench: Bench, peer: Peer) -> Rows:
        with peer.running(bench.data(peer), bench.server_cpus) as server:
            options = append_options(peer.wire)
            row = timed(bench, server, connections=connections, streams=streams, body_bytes=100, **options)
        return {f"{connections} connections, {streams} stream{'s' if streams > 1 else ''}": row}

    return measure


def latency(bench: Bench, peer: Peer) -> Rows:
    """The floor is measured again beside each reading: disks and neighbours change from minute to minute."""
    with peer.running(bench.data(peer), bench.server_cpus) as server:
        row = timed(bench, server, connections=1, body_bytes=100, **append_options(peer.wire))
    part = bench.seconds / 4
    sync, _ = floor.disk(bench.directory, part, bench.server_cpus)
    row["floor_us"] = (
        sync.latency_us.p50 + floor.ping(part, bench.server_cpus, bench.load_cpus).latency_us.p50
    )
    row["over_floor"] = row["p50_us"] / row["floor_us"]
    return {"1 connection": row}


def json_arrays(bench: Bench, peer: Peer) -> Rows:
    with peer.running(bench.data(peer), bench.server_cpus) as server:
        options = append_options(peer.wire)
        row = timed(
            bench,
            server,
            connections=64,
            content_type="application/json",
            array=100,
            body_bytes=100,
            **options,
        )
    return {"64 connections, arrays of 100 messages of 100 B": row}


def reads(kind: str) -> Callable[[Bench, Peer], Rows]:
    """Catch-up: each connection pages from the start to the tail, again and again."""

    def measure(bench: Bench, peer: Peer) -> Rows:
        messages = bench.read_mib * 1024
        redis = peer.wire == "redis"
        fill = {**append_options(peer.wire, "history"), "body_bytes": 1024}
        if kind == "json":
            fill |= {
                "content_type": "application/json",
                "array": 64,
                "count": messages // 64,
                "connections": 4,
            }
        else:
            fill |= {"count": messages, "connections": 256}
        rows: Rows = {}
        with peer.running(bench.data(peer), bench.server_cpus) as server:
            filled = bench.generator.run(server.port, **fill)
            if filled.errors:
                raise PeerError(f"filling the stream failed: {filled.status}")
            for connections in (1, 16):
                mode, path = ("redis-page", "history-%d") if redis else ("read", "/v1/stream/history-%d")
                row = timed(bench, server, mode=mode, path=path, connections=connections, body_bytes=1024)
                row["page_bytes"] = row["bytes_per_s"] / row["ops_per_s"]
                rows[f"{connections} connection{'s' if connections > 1 else ''}"] = row
        return rows

    return measure


def fanout(bench: Bench, peer: Peer) -> Rows:
    with peer.running(bench.data(peer), bench.server_cpus) as server:
        before = server.cpu_seconds()
        result: Fanout = bench.generator.fanout(
            server.port,
            path="/v1/stream/live-%d",
            content_type="application/json",
            create=True,
            readers=bench.fanout_readers,
            rate=100,
            seconds=max(bench.seconds, 5.0),
        )
        used = server.cpu_seconds() - before
    offered = result.offered * result.readers
    row = {
        "p50_us": result.delivery_us.p50,
        "p90_us": result.delivery_us.p90,
        "p99_us": result.delivery_us.p99,
        "max_us": result.delivery_us.max,
        "delivered_share": result.delivered / offered,
        "duplicates": float(result.duplicates),
        "reconnects": float(result.reconnects),
        "append_p99_us": result.append_us.p99,
        "errors": float(result.append_errors),
        "server_cpu_share": used / result.seconds,
        "load_cpu_share": result.load_cpu_share,
    }
    return {f"{result.readers} readers, 100 messages/s": row}


def slow_disk(serial: bool, connections: int) -> Callable[[Bench, Peer], Rows]:
    """5 ms added to every sync; appends and, beside them, reads of the newest entry of another stream."""

    def measure(bench: Bench, peer: Peer) -> Rows:
        env = {"LD_PRELOAD": str(SLOWSYNC), "SLOWSYNC_MS": "5", "SLOWSYNC_SERIAL": "1" if serial else "0"}
        generator = bench.generator
        with peer.running(bench.data(peer), bench.server_cpus, env) as server:
            generator.run(server.port, count=8, connections=1, **append_options(peer.wire, "beside"))
            append = generator.start(
                server.port,
                connections=connections,
                seconds=bench.seconds,
                warmup=bench.warmup_seconds,
                **append_options(peer.wire),
            )
            mode, path = (
                ("redis-read", "beside-%d") if peer.wire == "redis" else ("read", "/v1/stream/beside-%d")
            )
            beside = generator.start(
                server.port,
                mode=mode,
                path=path,
                connections=4,
                seconds=bench.seconds,
                warmup=bench.warmup_seconds,
            )
            appended, read = generator.finish(append), generator.finish(beside)
        row = numbers(appended, 0.0)
        del row["server_cpu_share"]
        row |= {
            "reads_per_s": read.ops_per_s,
            "read_p50_us": read.latency_us.p50,
            "read_p99_us": read.latency_us.p99,
        }
        row["errors"] += float(read.errors)
        kind = "one sync after the other" if serial else "overlapping syncs"
        return {f"{connections} connections, {kind}": row}

    return measure
