"""A PostgreSQL source while the server and the database are killed: no change is lost, none is there twice.

Every transaction also writes down what it does, in a table that nobody follows. At the end the log has to say
the same, change by change.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psycopg
import pytest

from crash.source_ordeal import SMALL, SourceWriter, reopen, settle
from support.calls import Caller
from support.postgres import PostgresServer
from support.server import ServerProcess
from support.sources import (
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


class Writer(SourceWriter):
    """Writes transactions, whatever happens to the database."""

    def __init__(self, postgres: PostgresServer, seed: int) -> None:
        self._postgres = postgres
        super().__init__(seed)

    def write(self) -> None:
        while not self.ended.is_set():
            try:
                with self._postgres.connect() as connection:
                    while not self.ended.is_set():
                        with connection.transaction():
                            self._transaction(connection)
                        self.noted()
            except psycopg.OperationalError:
                self.ended.wait(0.05)  # it was killed; it comes back

    def _transaction(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        chance = self.random
        if chance.random() < 0.03:
            table = chance.choice(TABLES)
            gone = f"WITH gone AS (DELETE FROM {table} WHERE id < 1000 RETURNING id)"
            noted = f"INSERT INTO done(tab, op, id) SELECT '{table}', 'delete', id FROM gone"
            connection.execute(f"{gone} {noted}".encode())
            return
        for _ in range(chance.choice((1, 1, 2, 5, 25))):
            self._step(connection, chance.choice(TABLES), chance.randrange(40))

    def _step(self, connection: psycopg.Connection[tuple[Any, ...]], table: str, number: int) -> None:
        chance = self.random
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
        followers = {name: Follower(server, {"collection": name}, patient=lambda: True) for name in TABLES}
        reopen(followers.values())
        writer = Writer(postgres, seed)
        for number in range(kills):
            writer.wait_for(chance.randrange(10, 40))
            if number % 3 != 1:
                server.restart(kill=True)
            else:
                postgres.crash()
                postgres.start()
            reopen(followers.values())
        writer.end()
        settle(call, followers, lambda table: rows(postgres, table), lambda table: written(postgres, table))
    finally:
        if server.running:
            server.stop()
        postgres.stop()


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
        writer.wait_for(20)
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
