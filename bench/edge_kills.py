# pyright: strict
"""Readers at an edge while the edge and its server are killed in turn: who misses an event, who sees two?

`python -m bench.edge_kills` lets 10,000 SSE readers follow one stream through an edge and kills (SIGKILL) the
edge, then the server, then the edge... while events are written. Readers come back where their last whole
event left them. `calm` are the events written while everybody was there, `all` has those of the outages too.
Exits with 1 if a reader missed an event, saw one twice, or did not see the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.error import URLError

from bench.edge import create, metric, sockets, start_edge, start_server
from bench.loadgen import Follow, Generator
from bench.processes import PeerError, Running, rss_bytes

STREAM = "killed-0"
LEAD_SECONDS = 1.0  # events so short before a kill, and so soon after everybody is back, are not calm
UPSTREAM_SOCKETS = 2  # that of the stream, and that of `__registry__`
BACK_SECONDS = 120.0
SPARE_SECONDS = 120.0


class Writer(threading.Thread):
    """Numbers in order, each there once: a number whose answer was lost is sent again by its producer."""

    def __init__(self, port: int, rate: float) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._pause_s = 1 / rate
        self._connection: http.client.HTTPConnection | None = None
        self._ended = threading.Event()
        self.calm = False
        self.count = 0

    def run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.is_set():
            message = {"n": self.count, "t": time.monotonic_ns(), "c": int(self.calm), "p": "x" * 60}
            seq = {"Producer-Seq": str(self.count)}
            self._send(json.dumps(message, separators=(",", ":")).encode(), seq)
            self.count += 1
            due_s = max(due_s + self._pause_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))

    def end(self) -> None:
        """The stream is closed behind the last event."""
        self._ended.set()
        self.join()
        self._send(b"", {"Producer-Seq": str(self.count), "Stream-Closed": "true"})

    def _send(self, body: bytes, more: dict[str, str]) -> None:
        headers = {"Content-Type": "application/json", "Producer-Id": "w", "Producer-Epoch": "0", **more}
        while True:
            try:
                self._connection = self._connection or http.client.HTTPConnection(
                    "127.0.0.1", self._port, timeout=10
                )
                self._connection.request("POST", f"/v1/stream/{STREAM}", body, headers)
                answer = self._connection.getresponse()
                answer.read()
                if answer.status in (200, 204):
                    return
                if answer.status != 503:
                    raise PeerError(f"an append was answered {answer.status}")
            except (OSError, http.client.HTTPException):
                self._connection = None
            time.sleep(0.05)


class World:
    """The server, its edge, and the ports that both keep over their lives."""

    def __init__(self, directory: Path, readers: int) -> None:
        self._directory = directory
        self._readers = readers
        self.server = start_server(directory, readers + 1000)
        self.edge = start_edge(directory, self.server)

    def kill(self, whom: str, down_seconds: float) -> None:
        victim = self.edge if whom == "edge" else self.server
        victim.stop(signal.SIGKILL)
        time.sleep(down_seconds)
        if whom == "edge":
            self.edge = start_edge(self._directory, self.server, victim.port)
        else:
            self.server = start_server(self._directory, self._readers + 1000, victim.port)

    def wait_for_all(self) -> None:
        """Until every reader is at the edge, and the edge at the server."""
        deadline = time.monotonic() + BACK_SECONDS
        clients = 0.0
        while clients < self._readers or sockets(self.server) < UPSTREAM_SOCKETS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{clients:.0f} of {self._readers} readers are back")
            time.sleep(0.2)
            clients = _clients(self.edge)

    def stop(self) -> None:
        self.edge.stop()
        self.server.stop()


def _clients(edge: Running) -> float:
    try:
        return metric(edge, 'tailrace_edge_clients{mode="sse"}')
    except (URLError, OSError, ValueError):  # too busy to say
        return 0.0


def measure(world: World, options: argparse.Namespace) -> tuple[dict[str, float], Follow]:
    create(world.server, STREAM)
    begun_s, before_bytes = time.monotonic(), rss_bytes(world.edge.process.pid)
    patience_s = (options.kills + 1) * (options.calm + BACK_SECONDS) + SPARE_SECONDS
    generator = Generator(None)
    process = generator.start(
        world.edge.port,
        mode="follow",
        path="/v1/stream/killed-%d",
        readers=options.readers,
        seconds=patience_s,
    )
    writer = Writer(world.server.port, options.rate)
    try:
        world.wait_for_all()
        per_reader = (rss_bytes(world.edge.process.pid) - before_bytes) / options.readers
        held = sockets(world.server)
        writer.start()
        outages = [_round(world, writer, options, kill) for kill in range(options.kills)]
        writer.calm = True
        time.sleep(options.calm)
        writer.end()
        found = generator.follow(process, patience_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    row = {
        "kills": float(options.kills),
        "events": float(writer.count),
        "upstream_sockets": held,
        "bytes_per_reader": per_reader,
        "longest_outage_s": max(outages, default=0.0),
        "seconds": time.monotonic() - begun_s,
    }
    return row, found


def _round(world: World, writer: Writer, options: argparse.Namespace, kill: int) -> float:
    """A calm time, and a kill; how long it took until everybody was back."""
    writer.calm = True
    time.sleep(options.calm)
    writer.calm = False
    time.sleep(LEAD_SECONDS)
    began = time.monotonic()
    whom = ("edge", "server")[kill % 2]
    world.kill(whom, options.down)
    world.wait_for_all()
    outage_s = time.monotonic() - began
    print(json.dumps({"killed": whom, "everybody_back_s": round(outage_s, 2)}), flush=True)
    time.sleep(LEAD_SECONDS)
    return outage_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=5.0, help="appends per second")
    parser.add_argument("--kills", type=int, default=6, help="the edge and the server in turn")
    parser.add_argument("--calm", type=float, default=8.0, help="seconds between one kill and the next")
    parser.add_argument(
        "--down", type=float, default=1.0, help="seconds until who was killed is started again"
    )
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, options.readers + 1000)), hard))
    directory = Path(tempfile.mkdtemp(prefix="edge-kills-"))
    world = World(directory, options.readers)
    try:
        row, found = measure(world, options)
    finally:
        world.stop()
        shutil.rmtree(directory, ignore_errors=True)
    shown = {
        **{name: round(value, 2) for name, value in row.items()},
        "readers": found.readers,
        "finished": found.finished,
        "missed": found.missed + int(row["events"]) * found.readers - found.delivered,
        "doubled": found.doubled,
        "lost_connections": found.losses,
        "refusals": found.refusals,
        "rotations": found.rotations,
        "cut_pairs": found.incomplete,
        "calm_p50_ms": found.calm_us.p50 / 1000,
        "calm_p99_ms": found.calm_us.p99 / 1000,
        "all_p99_ms": found.all_us.p99 / 1000,
        "all_max_ms": found.all_us.max / 1000,
    }
    print(json.dumps(shown), flush=True)
    return 1 if shown["missed"] or shown["doubled"] or found.finished < found.readers else 0


if __name__ == "__main__":
    sys.exit(main())
