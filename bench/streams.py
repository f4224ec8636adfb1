# pyright: strict
"""A great many streams: created, listed, appended to at random, and there again after restarts.

`python -m bench.streams --streams 1000000` prints what each step took and what the server held in memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.loadgen import Generator, Load
from bench.places import DATA
from bench.processes import PeerError, Running, free_port, launch

PAGE = 1000
START_PATIENCE_S = 600.0
CREATE_PATIENCE_S = 3600.0
OCTETS = "application/octet-stream"


def start(directory: Path) -> Running:
    port = free_port()
    argv = [sys.executable, "-m", "tailrace", "serve", "--data-dir", str(directory / "data")]
    argv += ["--port", str(port), "--pipeline", "off"]
    return launch(argv, {}, port, "/readyz", directory / "server.log", None, START_PATIENCE_S)


def checked(load: Load) -> dict[str, float]:
    if load.errors:
        raise PeerError(f"not all was well: {load.status}")
    latency = load.latency_us
    return {"per_s": load.ops_per_s, "p50_us": latency.p50, "p99_us": latency.p99, "max_us": latency.max}


def create(generator: Generator, server: Running, streams: int) -> dict[str, float]:
    options = {"mode": "append", "method": "PUT", "path": "/v1/stream/many-%d", "content_type": OCTETS}
    load = generator.start(server.port, **options, unique=True, count=streams, warmup=0)
    return checked(generator.finish(load, CREATE_PATIENCE_S))


def append(generator: Generator, server: Running, streams: int, seconds: float) -> dict[str, float]:
    options = {"mode": "append", "path": "/v1/stream/many-%d", "content_type": OCTETS}
    return checked(generator.run(server.port, **options, scatter=True, streams=streams, seconds=seconds))


def pages(server: Running) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """How long each page of the list took, and what stands in it."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as connection:
        path = f"/v1/streams?prefix=many-&limit={PAGE}"
        while path:
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            listed = json.loads(answer.read())
            yield time.perf_counter() - began, listed
            link = answer.headers.get("link", "")
            path = link[link.index("<") + 1 : link.index(">")] if link else ""


def walk(server: Running, streams: int) -> dict[str, float]:
    times_s: list[float] = []
    names: list[str] = []
    for took_s, listed in pages(server):
        times_s.append(took_s)
        names += [stream["name"] for stream in listed]
    if len(names) != streams or len(set(names)) != streams:
        raise PeerError(f"{len(names):,} names listed, {len(set(names)):,} of them different")
    times_s.sort()
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {
        "seconds": sum(times_s),
        **{name: times_s[int(share * (len(times_s) - 1))] * 1e3 for name, share in at.items()},
    }


def show(step: str, server: Running, figures: dict[str, float]) -> None:
    held = {"rss_mb": server.rss_bytes() / 1e6}
    print(json.dumps({"step": step, **{k: round(v, 2) for k, v in (figures | held).items()}}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of appends to streams at random (20)")
    given = parser.parse_args()
    directory = DATA / "many-streams"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    generator = Generator(None)
    server = start(directory)
    try:
        show("empty", server, {"start_s": server.ready_seconds})
        show("create", server, create(generator, server, given.streams))
        show("list", server, walk(server, given.streams))
        show("append", server, append(generator, server, given.streams, given.seconds))
        for word, how in (("stop", signal.SIGTERM), ("kill", signal.SIGKILL)):
            stop_s = server.stop(how, patience_s=600)
            server = start(directory)
            show(f"restart after a {word}", server, {"stop_s": stop_s, "start_s": server.ready_seconds})
            show("append", server, append(generator, server, given.streams, given.seconds))
        show("list", server, walk(server, given.streams))
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
