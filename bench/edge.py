# pyright: strict
"""Readers at an edge beside the same readers at the server: how late events are, and what a reader costs.

`python -m bench.edge` follows one stream with 10,000 readers, first directly, then through an edge. The load
makes the same numbers in both; memory is that of the process that holds the readers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from bench.loadgen import Generator
from bench.processes import Running, free_port, launch

SAMPLE_S = 0.2


class Watch:
    """The most memory that a process has had."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.before = self.most = running.rss_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.most = max(self.most, self._running.rss_bytes())

    def end(self) -> int:
        """Bytes by which it grew."""
        self._over.set()
        self._thread.join()
        return self.most - self.before


def start_server(directory: Path, readers: int) -> Running:
    port = free_port()
    bound = str(readers + 1000)
    argv = [sys.executable, "-m", "tailrace", "serve", "--data-dir", str(directory / "data")]
    argv += ["--port", str(port), "--pipeline", "off", "--connections", bound, "--live-connections", bound]
    return launch(argv, {}, port, "/readyz", directory / "server.log", None)


def start_edge(directory: Path, server: Running) -> Running:
    port = free_port()
    argv = [sys.executable, "-m", "tailrace", "edge", "--listen", f"127.0.0.1:{port}"]
    argv += ["--upstream", f"http://127.0.0.1:{server.port}"]
    return launch(argv, {}, port, "/readyz", directory / "edge.log", None)


def sockets(server: Running) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (row,) = [line for line in lines if line.startswith('tailrace_live_connections{mode="ws"}')]
    return float(row.rpartition(" ")[2])


def measure(
    generator: Generator, holder: Running, server: Running, name: str, options: argparse.Namespace
) -> dict[str, float]:
    watch = Watch(holder)
    cpu_before, server_before = holder.cpu_seconds(), server.cpu_seconds()
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
    grown_bytes = watch.end()
    return {
        "readers": float(result.readers),
        "p50_us": result.delivery_us.p50,
        "p99_us": result.delivery_us.p99,
        "max_us": result.delivery_us.max,
        "delivered_share": result.delivered / (result.offered * result.readers),
        "duplicates": float(result.duplicates),
        "reconnects": float(result.reconnects),
        "upstream_sockets": upstream_sockets,
        "bytes_per_reader": grown_bytes / result.readers,
        "holder_cpu_share": (holder.cpu_seconds() - cpu_before) / result.seconds,
        "server_cpu_share": (server.cpu_seconds() - server_before) / result.seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=10.0, help="appends per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, options.readers + 1000)), hard))
    generator = Generator(None)
    for way in ("direct", "edge"):
        directory = Path(tempfile.mkdtemp(prefix="edge-bench-", dir=os.environ.get("BENCH_DIR")))
        server = start_server(directory, options.readers)
        holder = server if way == "direct" else start_edge(directory, server)
        try:
            row = measure(generator, holder, server, way, options)
            print(
                json.dumps({"way": way, **{key: round(value, 3) for key, value in row.items()}}), flush=True
            )
        finally:
            holder.stop()
            server.stop()
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
