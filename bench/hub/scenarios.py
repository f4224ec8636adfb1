# pyright: strict
"""Messages between connected programs: pairs, one to many, to mailboxes, and connections that only wait."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Final

import msgspec

from bench.hub.peers import PEERS
from bench.loadgen import Latency
from bench.peers import Peer
from bench.places import HUBLOAD
from bench.processes import PeerError, Running, pinned
from bench.scenarios import Bench, Numbers, Rows, Scenario, timed

# What an operator raises who trusts his clients; everything else is as shipped.
RAISED: Final = {
    "TAILRACE_HUB_SENDS_PER_S": "10000000",
    "TAILRACE_HUB_BYTES_PER_S": "100GiB",
    "TAILRACE_HUB_BROADCASTS_PER_S": "1000000",
    "TAILRACE_HUB_RECIPIENTS_PER_S": "1000000000",
    "TAILRACE_HUB_REGISTERS_PER_S": "1000000",
    "TAILRACE_HUB_CONNECTS_PER_S": "0",
    "TAILRACE_HUB_CONNECTIONS": "50000",
    "TAILRACE_HUB_MAILBOX_ENTRIES": "100000000",
    "TAILRACE_HUB_MAILBOX_BYTES": "100GiB",
}
LIVE: Final = ("tailrace", *PEERS)
PAIRS: Final = 100
SENDERS: Final = 100
RECEIVERS: Final = 500
IDLE_SETTLE_S: Final = 3.0
# Everybody else speaks the hub's own.
WIRES: Final = {
    "nats-core": "nats",
    "redis-pubsub": "redis",
    "mosquitto": "mqtt",
}


class Heard(msgspec.Struct, frozen=True):
    """What the load client prints."""

    seconds: float
    messages: int
    messages_per_s: float
    latency_us: Latency
    refused: int
    stalled: bool
    load_cpu_share: float


class Opened(msgspec.Struct, frozen=True):
    clients: int
    seconds: float
    per_s: float


def _start(bench: Bench, peer: Peer, port: int, **options: str | int | float) -> subprocess.Popen[bytes]:
    argv = [str(HUBLOAD), "--port", str(port), "--wire", WIRES.get(peer.name, "hub")]
    for name, value in options.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    pipe = subprocess.PIPE
    return subprocess.Popen(pinned(argv, bench.load_cpus), stdin=pipe, stdout=pipe, stderr=pipe)


def _hear(bench: Bench, peer: Peer, server: Running, **options: str | int | float) -> Numbers:
    timing = {"seconds": bench.seconds, "warmup": bench.warmup_seconds}
    process = _start(bench, peer, server.port, **timing, **options)
    assert process.stdout is not None
    process.stdout.readline()  # everybody is connected
    before = server.cpu_seconds()
    try:
        out, err = process.communicate(timeout=120.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise PeerError("the load did not end") from None
    if process.returncode not in (0, 3) or not out:
        raise PeerError(err.decode(errors="replace").strip() or f"the load exited with {process.returncode}")
    heard = msgspec.json.decode(out, type=Heard)
    if heard.stalled or not heard.messages:
        raise PeerError(f"nothing was heard for a while ({heard.messages} messages, {heard.refused} refused)")
    used = server.cpu_seconds() - before
    return {
        "messages_per_s": heard.messages_per_s,
        "p50_us": heard.latency_us.p50,
        "p99_us": heard.latency_us.p99,
        "p999_us": heard.latency_us.p999,
        "errors": float(heard.refused),
        "load_cpu_share": heard.load_cpu_share,
        "server_cpu_share": used / (heard.seconds + bench.warmup_seconds),
    }


def relay(bench: Bench, peer: Peer) -> Rows:
    """Full speed, one at a time, and how late messages are at half of what was possible a moment ago."""
    rows: Rows = {}
    with peer.running(bench.data(peer), bench.server_cpus, RAISED) as server:
        for window in (8, 1):
            row = _hear(bench, peer, server, scenario="relay", clients=PAIRS, window=window)
            rows[f"{PAIRS} pairs, {window} in flight"] = row
        half = rows[f"{PAIRS} pairs, 8 in flight"]["messages_per_s"] / 2
        rows["half of that speed"] = _hear(bench, peer, server, scenario="relay", clients=PAIRS, rate=half)
    return rows


def many(scenario: str) -> Callable[[Bench, Peer], Rows]:
    def measure(bench: Bench, peer: Peer) -> Rows:
        with peer.running(bench.data(peer), bench.server_cpus, RAISED) as server:
            row = _hear(bench, peer, server, scenario=scenario, clients=RECEIVERS, window=2)
        return {f"1 sender, {RECEIVERS} receivers": row}

    return measure


def durable(bench: Bench, peer: Peer) -> Rows:
    """A message is sent when the one before is on disk; the peers append to as many streams."""
    with peer.running(bench.data(peer), bench.server_cpus, RAISED) as server:
        if peer.name == "tailrace":
            row = _hear(bench, peer, server, scenario="durable", clients=SENDERS, window=1)
        else:
            path = {"nats": "bench.%d", "redis": "bench-%d"}[peer.wire]
            options = {"mode": peer.wire, "path": path, "create": peer.wire == "nats"}
            row = timed(bench, server, connections=SENDERS, streams=SENDERS, body_bytes=350, **options)
    return {f"{SENDERS} senders": row}


def _connections(bench: Bench) -> int:
    return 10_000 if bench.seconds > 1 else 200


def waiting(bench: Bench, peer: Peer) -> Rows:
    rows: Rows = {}
    for registers in (False, True) if peer.name == "tailrace" else (False,):
        with peer.running(bench.data(peer), bench.server_cpus, RAISED) as server:
            time.sleep(1.0)
            empty_bytes = server.rss_bytes()
            more: dict[str, str | int | float] = {"register": True} if registers else {}
            load = _start(bench, peer, server.port, scenario="idle", clients=_connections(bench), **more)
            assert load.stdout is not None
            line = load.stdout.readline()
            if not line:
                raise PeerError(load.communicate()[1].decode(errors="replace").strip() or "no connections")
            opened = msgspec.json.decode(line, type=Opened)
            time.sleep(IDLE_SETTLE_S)
            used_bytes = server.rss_bytes() - empty_bytes
            load.communicate(timeout=60.0)
        what = " with an address" if registers else ""
        rows[f"{_connections(bench):,} connections{what}"] = {
            "bytes_each": used_bytes / opened.clients,
            "rss_mb": (used_bytes + empty_bytes) / 1e6,
            "opened_per_s": opened.per_s,
        }
    return rows


def _scenario(
    name: str, title: str, unit: str, peers: tuple[str, ...], measure: Callable[[Bench, Peer], Rows]
) -> Scenario:
    return Scenario(f"hub-{name}", "hub", title, "messages_per_s", unit, True, peers, measure)


SCENARIOS: Final = (
    _scenario("relay", "Hub: messages of 350 B from actor to actor", "messages/s", LIVE, relay),
    _scenario(
        "broadcast",
        "Hub: one message to everybody, each copy with its own id and address",
        "deliveries/s",
        LIVE,
        many("broadcast"),
    ),
    _scenario(
        "publish", "Hub: one message to the subscribers of a topic", "deliveries/s", LIVE, many("publish")
    ),
    _scenario(
        "durable",
        "Hub: sends to mailboxes, acknowledged when durable",
        "messages/s",
        ("tailrace", "nats", "redis"),
        durable,
    ),
    Scenario(
        "hub-idle",
        "hub-idle",
        "Hub: connections that only wait",
        "bytes_each",
        "bytes each",
        False,
        LIVE,
        waiting,
        rounds_max=3,
    ),
)
