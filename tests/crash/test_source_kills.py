"""A PostgreSQL source while the server and the database are killed: no change is lost, none is there twice.

Every transaction also writes down what it does, in a table that nobody follows. At the end the log has to say
the same, change by change.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.calls import Caller
from support.postgres import PostgresServer
from support.server import ServerProcess
from support.sources import (
    QUICK,
    add_source,
    changes,
    check_log,
    count,
    documents,
    rows,
    wait_phase,
    wait_until,
)
from support.watch_client import Follower, Live

SMALL = {**QUICK, "TAILRACE_WATCH_PARTITIONS": "2", "TAILRACE_JOURNAL_FILE_BYTES": "200000"}
TABLES = ("orders", "lines")
SCHEMA = """
CREATE TABLE orders (id int PRIMARY KEY, n int, note text);
CREATE TABLE lines (id int PRIMARY KEY, n int, note text);
ALTER TABLE lines REPLICA IDENTITY FULL;
ALTER TABLE orders ALTER note SET STORAGE EXTERNAL;
ALTER TABLE lines ALTER note SET STORAGE EXTERNAL;
CREATE TABLE done (n serial, tab text, op text, id int);
CREATE PUBLICATION pg FOR TABLE orders, lines;
"""


class Writer:
    """Writes transactions, whatever happens to the database; knows nothing of the server."""

    def __init__(self, postgres: PostgresServer, seed: int) -> None:
        self._postgres = postgres
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self.committed = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _write(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    with self._postgres.connect() as connection:
                        while not self._ended.is_set():
                            with connection.transaction():
                                self._transaction(connection)
                            self.committed += 1
                            self._ended.wait(self._random.random() * 0.01)
                except psycopg.OperationalError:
                    self._ended.wait(0.05)  # it was killed; it comes back
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def _transaction(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        chance = self._random
        if chance.random() < 0.03:
            table = chance.choice(TABLES)
            gone = f"WITH gone AS (DELETE FROM {table} WHERE id < 1000 RETURNING id)"
            noted = f"INSERT INTO done(tab, op, id) SELECT '{table}', 'delete', id FROM gone"
            connection.execute(f"{gone} {noted}".encode())
            return
        for _ in range(chance.choice((1, 1, 2, 5, 25))):
            self._step(connection, chance.choice(TABLES), chance.randrange(40))

    def _step(self, connection: psycopg.Connection[tuple[Any, ...]], table: str, number: int) -> None:
        chance = self._random
        there = connection.execute(f"SELECT 1 FROM {table} WHERE id = {number}".encode()).fetchone()
        if there is None:
            note = "x" * chance.choice((1, 100, 9000))
            statement = f"INSERT INTO {table} VALUES ({number}, {chance.randrange(9)}, '{note}')"
            op = "insert"
        elif chance.random() < 0.75:
            # The large column stays as it is.
            statement, op = f"UPDATE {table} SET n = n + 1 WHERE id = {number}", "update"
        else:
            statement, op = f"DELETE FROM {table} WHERE id = {number}", "delete"
        connection.execute(statement.encode())
        connection.execute("INSERT INTO done(tab, op, id) VALUES (%s, %s, %s)", (table, op, number))


def written(postgres: PostgresServer, table: str) -> dict[str, list[str]]:
    """What was committed, by document."""
    found: dict[str, list[str]] = {}
    for number, op in postgres.run("SELECT id, op FROM done WHERE tab = %s ORDER BY n", table):
        found.setdefault(str(number), []).append(op)
    return found


def followed(log: list[list[dict[str, Any]]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entries in log:
        for entry in entries:
            if entry["kind"] == "change":
                found.setdefault(entry["documentKey"], []).append(entry["op"])
    return found


def undergo(directory: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    postgres = PostgresServer().start()
    server = ServerProcess(directory / "data", env={**SMALL, "PG_DSN": postgres.dsn})
    try:
        with postgres.connect() as connection:
            connection.execute(SCHEMA.encode())
        call = Caller(server.start())
        tables = {f"public.{name}": {"collection": name} for name in TABLES}
        add_source(call, "pg", tables, batch={"maxChanges": 20})
        wait_phase(call, "pg", "live")
        followers = [Follower(server, {"collection": name}, patient=lambda: True) for name in TABLES]
        for follower in followers:
            follower.open()
        writer = Writer(postgres, seed)
        for number in range(kills):
            goal = writer.committed + chance.randrange(10, 40)
            wait_until(
                lambda: (writer.committed, writer.failure), lambda seen, goal=goal: seen[0] >= goal or seen[1]
            )
            if number % 3 != 1:
                server.restart(kill=True)
            else:
                postgres.crash()
                postgres.start()
            for follower in followers:
                if not follower.connected:
                    follower.open()
        writer.end()
        settle(call, postgres, followers)
    finally:
        if server.running:
            server.stop()
        postgres.stop()


def settle(call: Caller, postgres: PostgresServer, followers: list[Follower]) -> None:
    """When all is quiet, the table, the view, the log and whoever follows say the same."""
    for table, follower in zip(TABLES, followers, strict=True):
        wanted = rows(postgres, table)
        wait_until(lambda table=table: documents(call, table), lambda seen, wanted=wanted: seen == wanted)
        log = changes(call, table, 2)
        check_log(log)
        assert followed(log) == written(postgres, table)

        def held(follower: Follower = follower) -> set[str]:
            if not follower.connected:
                follower.open()
            if follower.failure is not None:
                raise follower.failure
            return set(follower.held)

        wait_until(held, lambda seen, wanted=wanted: seen == set(wanted))
        assert follower.resyncs == [], "nothing was missing at any time"
        follower.cut()


def test_w3_w10_nothing_is_lost_and_nothing_is_there_twice(tmp_path: Path) -> None:
    undergo(tmp_path, 1, 3)


def test_w12_a_copy_races_with_writes(tmp_path: Path) -> None:
    """Copied while it changes, and killed meanwhile; nobody is told anything before it is live."""
    postgres = PostgresServer().start()
    server = ServerProcess(tmp_path / "data", env={**SMALL, "PG_DSN": postgres.dsn})
    try:
        with postgres.connect() as connection:
            connection.execute(SCHEMA.encode())
            connection.execute("INSERT INTO orders SELECT n, n, 'x' FROM generate_series(1000, 1999) n")
        writer = Writer(postgres, 3)
        wait_until(lambda: (writer.committed, writer.failure), lambda seen: seen[0] >= 20 or seen[1])
        call = Caller(server.start())
        tables = {f"public.{name}": {"collection": name} for name in TABLES}
        slowly = {"eventsPerSecond": 1000}
        add_source(call, "pg", tables, batch={"maxChanges": 50}, limits=slowly)
        wait_until(lambda: count(call, "orders"), lambda seen: seen > 100)
        server.restart(kill=True)
        live = Live(server)
        live.send("subscribe", "s", query={"collection": "orders"}, sendSnapshot=True)
        assert live.take()["payload"]["state"] == "loading"
        first = live.take_until("snapshot-end")
        assert first[0]["type"] == "snapshot"
        assert first[-1]["payload"]["count"] >= 1000, "whole, or not at all"
        live.close()
        wait_phase(call, "pg", "live")
        writer.end()
        for table in TABLES:
            wanted = rows(postgres, table)
            wait_until(lambda table=table: documents(call, table), lambda seen, wanted=wanted: seen == wanted)
            check_log(changes(call, table, 2))
    finally:
        if server.running:
            server.stop()
        postgres.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 8))
def test_w3_w10_nothing_is_lost_however_often_it_is_killed(tmp_path: Path, seed: int) -> None:
    undergo(tmp_path, seed, 40)
