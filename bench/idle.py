# pyright: strict
"""Many streams created and idle: memory, restart after a clean stop and after a kill."""

from __future__ import annotations

import shutil
import signal
import time

from bench.loadgen import Load
from bench.peers import Peer
from bench.processes import PeerError, Running
from bench.scenarios import Bench, Rows

# Idle, not just created: what is done once a minute has been done, and what that began has come to its end.
SETTLE_SECONDS = 75.0
REST_SECONDS = 20.0  # longer than helper processes are kept without work
REST_SHARE = 0.02  # of a core
REST_PATIENCE_SECONDS = 600.0
CREATE_PATIENCE_SECONDS = 900.0


def _create(bench: Bench, peer: Peer, server: Running) -> Load:
    generator, count = bench.generator, bench.idle_streams
    if peer.wire == "redis":
        return generator.run(server.port, mode="redis", path="idle-%d", streams=count, count=count)
    load = generator.start(
        server.port, mode="append", method="PUT", path="/v1/stream/idle-%d", unique=True, count=count
    )
    return generator.finish(load, CREATE_PATIENCE_SECONDS)


def _last_is_there(bench: Bench, peer: Peer, server: Running) -> bool:
    last = bench.idle_streams - 1
    if peer.wire == "redis":
        answer = bench.generator.run(
            server.port, mode="redis-read", path=f"idle-{last}", count=1, connections=1
        )
        return answer.bytes > len("*0\r\n")
    path = f"/v1/stream/idle-{last}?offset=-1"
    answer = bench.generator.run(server.port, mode="append", method="GET", path=path, count=1, connections=1)
    return answer.status == {"200": 1}


def _come_to_rest(server: Running) -> float:
    """How long it took until the server and its helpers had nothing left to do."""
    begun = time.monotonic()
    time.sleep(SETTLE_SECONDS)
    while time.monotonic() - begun < REST_PATIENCE_SECONDS:
        used = server.cpu_seconds()
        time.sleep(REST_SECONDS)
        if server.cpu_seconds() - used < REST_SHARE * REST_SECONDS:
            break
    return time.monotonic() - begun


def idle_streams(bench: Bench, peer: Peer) -> Rows:
    directory = bench.data(peer)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    server = peer.start(directory, bench.server_cpus)
    try:
        empty_bytes = server.rss_bytes()
        created = _create(bench, peer, server)
        if created.errors:
            raise PeerError(f"creating streams failed: {created.status}")
        rest_s = _come_to_rest(server)
        row = {
            "rest_s": rest_s,
            "rss_mb": server.rss_bytes() / 1e6,
            "empty_rss_mb": empty_bytes / 1e6,
            "creates_per_s": created.ops_per_s,
            "create_p99_us": created.latency_us.p99,
            "stop_s": server.stop(),
        }
        server = peer.start(directory, bench.server_cpus)
        row |= {"restart_s": server.ready_seconds, "restarted_rss_mb": server.rss_bytes() / 1e6}
        server.stop(signal.SIGKILL)
        server = peer.start(directory, bench.server_cpus)
        row["restart_after_kill_s"] = server.ready_seconds
        if not _last_is_there(bench, peer, server):
            raise PeerError("the last stream is gone after the restarts")
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return {f"{bench.idle_streams:,} streams": row}
