"""Matching on Spark: changes a second of `tailrace pipeline match`, beside the same matcher in one process.

    python -m bench.watch_spark [--changes 200000] [--subscriptions 1000]

Documents and filters are those of `bench.watch matching`. The first, small job starts the workers; the second
one is timed from its call until all deliveries are durable in the log.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench import watch_matching
from support.server import ServerProcess  # pyright: ignore[reportMissingImports]
from support.watch_client import Live  # pyright: ignore[reportMissingImports]
from tailrace.spark.live_queries.match_job import MatchOptions, run_match
from tailrace.spark.live_queries.watch_client import WatchClient
from tailrace.spark.session import open_session

BASE = "/v1/databases/default"
PAGE = 100
EACH = 100  # subscriptions of a connection
PARTITIONS = 4
WARMING = 2000


def call(server: Any, method: str, path: str, body: object) -> None:
    asked = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()


def write(server: Any, collection: str, count: int) -> None:
    """Documents that come, and change a few fields now and then."""
    chance = random.Random(1)
    call(server, "PUT", f"{BASE}/collections/{collection}", {"partitions": PARTITIONS})
    for first in range(0, count, PAGE):
        writes = [
            {
                "op": "put",
                "path": f"{collection}/d{chance.randrange(count // 4)}",
                "data": watch_matching.document(chance, watch_matching.USERS),
            }
            for _ in range(min(PAGE, count - first))
        ]
        call(server, "POST", f"{BASE}/batch", {"writes": writes})


def subscribe(server: Any, collection: str, count: int) -> list[Any]:
    chance = random.Random(2)
    lives: list[Any] = []
    for number in range(count):
        if number % EACH == 0:
            lives.append(Live(server))
            lives[-1].send("auth", "a")
            lives[-1].take_until("auth_ack")
        query = {"collection": collection, "filters": watch_matching.filters(chance, watch_matching.USERS)}
        lives[-1].send("subscribe", f"s{number}", query=query)
        lives[-1].take_until("subscribe_ack")
    return lives


def main() -> None:
    parser = argparse.ArgumentParser(description="Matching on Spark.")
    parser.add_argument("--changes", type=int, default=200_000)
    parser.add_argument("--subscriptions", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data").start()
        lives: list[Any] = []
        try:
            write(server, "warm", WARMING)
            write(server, "orders", given.changes)
            lives = subscribe(server, "orders", given.subscriptions)
            spark = open_session("local[*]", Path(directory) / "spark")
            place = WatchClient({"endpoint": server.base_url})
            run_match(spark, place, MatchOptions("default", "warm"))
            begun = time.perf_counter()
            report = run_match(spark, place, MatchOptions("default", "orders"))
            taken_s = time.perf_counter() - begun
            spark.stop()
        finally:
            for live in lives:
                with suppress(OSError):
                    live.close()
            server.stop()
    assert (report.changes, report.subscriptions) == (given.changes, given.subscriptions), report
    alone = watch_matching.run(given.subscriptions, 2000, broad=False)
    print(f"{report.changes:,} changes, {report.subscriptions:,} subscriptions")
    print(f"on Spark, from log to log: {report.changes / taken_s:,.0f} changes/s ({taken_s:.1f} s)")
    print(f"the matcher alone, one core, changes at hand: {alone.together_per_s:,.0f} changes/s")


if __name__ == "__main__":
    main()
