"""Following PostgreSQL: changes per second into collections, beside a plain consumer of wal2json.

    python -m bench.watch_postgres [--rows 50000] [--transaction 100]

The same rows are inserted, updated and deleted. The plain consumer takes lines from `pg_recvlogical`, parses
their JSON and throws it away: what anybody pays who reads a slot, before storing or telling anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench.install import debian_postgres, wal2json
from support.postgres import PostgresServer  # pyright: ignore[reportMissingImports]
from support.server import ServerProcess  # pyright: ignore[reportMissingImports]

TABLE = """CREATE TABLE orders (
    id int PRIMARY KEY, customer text, status text, total numeric, placed timestamptz, lines jsonb)"""
ROW = """n, 'customer ' || n % 1000, 'open', n * 1.25, now(),
    '[{"sku": "a", "count": 1}, {"sku": "b", "count": 2}]'"""
BASE = "/v1/databases/default"


def call(server: Any, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(
        server.base_url + path, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())


def write(postgres: Any, rows: int, transaction: int) -> int:
    """Three changes for each row; tells how many."""
    with postgres.connect() as connection:
        for first in range(1, rows + 1, transaction):
            last = min(rows, first + transaction - 1)
            between = f"BETWEEN {first} AND {last}"
            connection.execute(f"INSERT INTO orders SELECT {ROW} FROM generate_series({first}, {last}) n")
            connection.execute(f"UPDATE orders SET status = 'paid' WHERE id {between}")
            connection.execute(f"DELETE FROM orders WHERE id {between}")
    return 3 * rows


def cpu_s(server: Any) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(look: Callable[[], bool]) -> float:
    begun = time.perf_counter()
    while not look():
        time.sleep(0.05)
    return time.perf_counter() - begun


def follow(postgres: Any, rows: int, transaction: int) -> None:
    """A backlog is read, then the same again while it is written."""
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data", env={"PG_DSN": postgres.dsn}).start()
        try:
            given = {
                "kind": "postgres",
                "dsn": {"env": "PG_DSN"},
                "collections": {"public.orders": {"collection": "orders"}},
            }
            path = f"{BASE}/sources/pg"
            call(server, "PUT", path, given)
            until(lambda: call(server, "GET", path)["status"]["phase"] == "live")
            server.stop()
            count = write(postgres, rows, transaction)
            server.start()
            backlog_s = until(lambda: call(server, "GET", path)["status"]["changes"] >= count)
            each_us = cpu_s(server) / count * 1e6
            print(
                f"backlog of {count:,}: {count / backlog_s:,.0f} changes/s, {each_us:,.0f} us of a core each"
            )
            begun = time.perf_counter()
            write(postgres, rows, transaction)
            writing_s = time.perf_counter() - begun
            until(lambda: call(server, "GET", path)["status"]["changes"] >= 2 * count)
            total_s = time.perf_counter() - begun
            print(
                f"while it is written ({count / writing_s:,.0f} changes/s): {count / total_s:,.0f} changes/s"
            )
            call(server, "DELETE", path)
        finally:
            if server.running:
                server.stop()


def plain(postgres: Any, rows: int, transaction: int) -> float:
    postgres.run("SELECT pg_create_logical_replication_slot('plain', 'wal2json')")
    count = write(postgres, rows, transaction)
    ((end,),) = postgres.run("SELECT pg_current_wal_lsn()")
    command = [str(debian_postgres() / "bin/pg_recvlogical"), "-d", postgres.dsn, "-S", "plain", "--start"]
    command += ["-o", "format-version=2", "--endpos", str(end), "--no-loop", "-f", "-"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = sum(json.loads(line)["action"] in "IUD" for line in process.stdout)
    taken_s = time.perf_counter() - begun
    assert found == count, (found, count)
    print(f"wal2json, parsed and thrown away: {count / taken_s:,.0f} changes/s")
    postgres.run("SELECT pg_drop_replication_slot('plain')")
    return count / taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Following PostgreSQL.")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--transaction", type=int, default=100)
    given = parser.parse_args()
    postgres = PostgresServer(
        fsync="on",
        full_page_writes="on",
        shared_buffers="256MB",
        dynamic_library_path=f"{wal2json().parent}:$libdir",
    ).start()
    try:
        postgres.run(TABLE)
        postgres.run("CREATE PUBLICATION tailrace FOR TABLE orders")
        plain(postgres, given.rows, given.transaction)
        follow(postgres, given.rows, given.transaction)
    finally:
        postgres.stop()


if __name__ == "__main__":
    main()
