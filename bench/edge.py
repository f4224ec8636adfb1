# pyright: strict
"""Readers at an edge beside the same readers at the server: how late events are, and what a reader costs.

`python -m bench.edge` follows one stream with 10,000 readers, first directly, then through an edge. The load
makes the same numbers in both; memory is that of the process that holds the readers. `--stuck` adds readers
that never take anything. `--idle` follows so many streams instead, each by one reader at an edge, and shows
what they cost their server while nobody writes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.loadgen import Generator
from bench.processes import Peak, Running, free_port, launch, rss_bytes

SETTLE_SECONDS = 3.0
PATIENCE_SECONDS = 120.0


def start_server(directory: Path, connections: int, port: int = 0) -> Running:
    port = port or free_port()
    bound = str(connections)
    argv = [sys.executable, "-m", "tailrace", "serve", "--data-dir", str(directory / "data")]
    argv += ["--port", str(port), "--pipeline", "off", "--connections", bound, "--live-connections", bound]
    return launch(argv, {}, port, "/readyz", directory / "server.log", None)


def start_edge(directory: Path, server: Running, port: int = 0) -> Running:
    port = port or free_port()
    argv = [sys.executable, "-m", "tailrace", "edge", "--listen", f"127.0.0.1:{port}"]
    argv += ["--upstream", f"http://127.0.0.1:{server.port}"]
    return launch(argv, {}, port, "/readyz", directory / "edge.log", None)


def metric(of: Running, row: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{of.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (found,) = [line for line in lines if line.startswith(f"{row} ")]
    return float(found.rpartition(" ")[2])


def sockets(server: Running) -> float:
    return metric(server, 'tailrace_live_connections{mode="ws"}')


def create(server: Running, name: str) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/stream/{name}"
    request = urllib.request.Request(url, method="PUT", headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request):
        pass


def reader(holder: Running, name: str) -> socket.socket:
    """A live reader of which nobody looks at what it gets."""
    found = socket.create_connection(("127.0.0.1", holder.port))
    found.sendall(f"GET /v1/stream/{name}?offset=-1&live=sse HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    return found


def measure(
    generator: Generator, holder: Running, server: Running, name: str, options: argparse.Namespace
) -> dict[str, float]:
    stream = f"{name}-0"
    create(server, stream)
    stuck = [reader(holder, stream) for _ in range(options.stuck)]
    before_bytes = rss_bytes(holder.process.pid)
    cpu_before, server_before = holder.cpu_seconds(), server.cpu_seconds()
    with Peak(holder, alone=True) as peak:
        result = generator.fanout(
            holder.port,
            path=f"/v1/stream/{name}-%d",
            content_type="application/json",
            create=True,
            readers=options.readers,
            rate=options.rate,
            seconds=options.seconds,
        )
        upstream_sockets = sockets(server)
    for each in stuck:
        each.close()
    return {
        "readers": float(result.readers),
        "stuck": float(options.stuck),
        "p50_us": result.delivery_us.p50,
        "p99_us": result.delivery_us.p99,
        "max_us": result.delivery_us.max,
        "delivered_share": result.delivered / (result.offered * result.readers),
        "duplicates": float(result.duplicates),
        "reconnects": float(result.reconnects),
        "upstream_sockets": upstream_sockets,
        "bytes_per_reader": (peak.bytes - before_bytes) / result.readers,
        "holder_cpu_share": (holder.cpu_seconds() - cpu_before) / result.seconds,
        "server_cpu_share": (server.cpu_seconds() - server_before) / result.seconds,
    }


def measure_idle(edge: Running, server: Running, streams: int, seconds: float) -> dict[str, float]:
    names = [f"idle-{number}" for number in range(streams)]
    for name in names:
        create(server, name)
    time.sleep(SETTLE_SECONDS)
    before_bytes = rss_bytes(server.process.pid)
    readers = [reader(edge, name) for name in names]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while metric(edge, "tailrace_edge_channels") < streams:
        if time.monotonic() > deadline:
            raise TimeoutError("not all streams are followed")
        time.sleep(0.2)
    time.sleep(SETTLE_SECONDS)
    cpu_before = server.cpu_seconds()
    time.sleep(seconds)
    row = {
        "streams": float(streams),
        "upstream_sockets": sockets(server),
        "server_cpu_share": (server.cpu_seconds() - cpu_before) / seconds,
        "server_bytes_per_stream": (rss_bytes(server.process.pid) - before_bytes) / streams,
    }
    for each in readers:
        each.close()
    return row


def show(way: str, row: dict[str, float]) -> None:
    print(json.dumps({"way": way, **{key: round(value, 4) for key, value in row.items()}}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=10.0, help="appends per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stuck", type=int, default=0, help="readers that take nothing, beside the others")
    parser.add_argument("--idle", type=int, default=0, help="followed streams that nobody writes, instead")
    options = parser.parse_args()
    connections = max(options.readers + options.stuck, options.idle) + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, connections)), hard))
    for way in ("idle",) if options.idle else ("direct", "edge"):
        directory = Path(tempfile.mkdtemp(prefix="edge-bench-", dir=os.environ.get("BENCH_DIR")))
        server = start_server(directory, connections)
        holder = server if way == "direct" else start_edge(directory, server)
        try:
            if options.idle:
                show(way, measure_idle(holder, server, options.idle, options.seconds))
            else:
                show(way, measure(Generator(None), holder, server, way, options))
        finally:
            holder.stop()
            server.stop()
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
