"""PostgreSQL as a source, a real one: what is committed there is in the collections, once and in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.calls import Caller
from support.cli import tailrace
from support.postgres import PostgresServer
from support.server import ServerProcess
from support.sources import (
    BASE,
    QUICK,
    add_source,
    changes,
    check_log,
    count,
    documents,
    rows,
    status,
    wait_phase,
    wait_until,
)
from support.watch_client import Live

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer().start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def following(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    secrets = str(tmp_path_factory.getbasetemp())
    env = {**QUICK, "PG_DSN": postgres.dsn, "TAILRACE_SOURCE_DIRECTORIES": secrets}
    server = ServerProcess(tmp_path_factory.mktemp("following") / "data", env=env).start()
    yield server
    server.stop()


@pytest.fixture
def call(following: ServerProcess) -> Caller:
    return Caller(following)


@pytest.fixture
def name() -> str:
    """Of a table, a collection, a publication and a source that no other test uses."""
    return f"t{next(_numbers)}"


def make(postgres: PostgresServer, name: str, columns: str = "id int PRIMARY KEY, n int, note text") -> None:
    with postgres.connect() as connection:
        for statement in (f"CREATE TABLE {name} ({columns})", f"CREATE PUBLICATION {name} FOR TABLE {name}"):
            connection.execute(statement.encode())


def do(postgres: PostgresServer, *statements: str) -> None:
    """One transaction."""
    with postgres.connect() as connection, connection.transaction():
        for statement in statements:
            connection.execute(statement.encode())


def follow(call: Caller, name: str, **more: Any) -> None:
    add_source(call, name, {f"public.{name}": {"collection": name, **more.pop("mapped", {})}}, **more)
    wait_phase(call, name, "live")


def test_what_there_is_and_what_comes(call: Caller, postgres: PostgresServer, name: str) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} SELECT n, n, 'old' FROM generate_series(1, 30) n")
    follow(call, name)
    assert documents(call, name) == rows(postgres, name)
    do(
        postgres,
        f"INSERT INTO {name} VALUES (31, 1, 'new')",
        f"UPDATE {name} SET note = 'changed' WHERE id <= 3",
        f"DELETE FROM {name} WHERE id = 4",
    )
    do(postgres, f"UPDATE {name} SET id = 100 WHERE id = 5")
    wait_until(lambda: documents(call, name), lambda seen: seen == rows(postgres, name))
    with postgres.connect() as connection:
        connection.execute("BEGIN")
        connection.execute(f"INSERT INTO {name} VALUES (77, 0, 'never')".encode())
        connection.execute("ROLLBACK")
    log = changes(call, name)
    check_log(log)
    followed = [
        one for entries in log for one in entries if one["kind"] == "change" and one["txn"]["id"] != "load"
    ]
    assert len(followed) == 7
    first = [one for one in followed if one["lsn"] == min(one["lsn"] for one in followed)]
    assert sorted(one["txn"]["index"] for one in first) == [0, 1, 2, 3, 4]
    one = first[0]
    assert one["source"]["kind"] == "postgres"
    assert one["source"]["name"] == name
    assert one["source"]["token"].startswith(one["lsn"])
    controls = [entry["control"] for entry in log[0] if entry["kind"] == "control"]
    assert controls == ["load-begin", "load-end", "live"]


def test_a_subscription_sees_the_database_change(
    call: Caller, postgres: PostgresServer, following: ServerProcess, name: str
) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} VALUES (1, 10, 'a'), (2, 1, 'b')")
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name, "where": "doc.n > 5"}, sendSnapshot=True)
    assert live.take()["payload"]["state"] == "live", "there is no such collection yet"
    live.take_until("snapshot-end")
    follow(call, name)
    loaded = live.take_until("event")[-1]
    assert (loaded["payload"]["delta"]["op"], loaded["payload"]["delta"]["doc"]["id"]) == ("insert", "1")
    do(postgres, f"UPDATE {name} SET n = 20 WHERE id = 2", f"UPDATE {name} SET n = 0 WHERE id = 1")
    seen = {}
    while len(seen) < 2:
        event = live.take_until("event")[-1]
        delta = event["payload"]["delta"]
        seen[delta["doc"]["id"]] = (delta["op"], delta["reason"])
        assert len(event["lsn"]) == 16
    assert seen == {"2": ("insert", "entered"), "1": ("delete", "left")}
    live.close()


def test_documents_of_a_source_cannot_be_written(call: Caller, postgres: PostgresServer, name: str) -> None:
    make(postgres, name)
    follow(call, name)
    refused = call("PUT", f"{BASE}/docs/{name}/1", {"n": 1})
    assert (refused.status, refused.code) == (405, "read_only_collection")
    batch = {"writes": [{"op": "put", "path": f"{name}/1", "data": {}}]}
    assert call("POST", f"{BASE}/batch", batch).body["results"][0]["status"] == 405


LARGE = "SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 2000)"
MOVE = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_large_values_that_do_not_change(
    call: Caller, postgres: PostgresServer, name: str, identity: str
) -> None:
    make(postgres, name, "id int PRIMARY KEY, n int, note text, data bytea")
    do(
        postgres,
        f"ALTER TABLE {name} REPLICA IDENTITY {identity}",
        f"ALTER TABLE {name} ALTER note SET STORAGE EXTERNAL",
    )
    do(postgres, f"INSERT INTO {name} SELECT 1, 1, ({LARGE}), NULL")
    follow(call, name)
    do(postgres, f"INSERT INTO {name} SELECT 2, 1, ({LARGE}), NULL")
    do(postgres, f"UPDATE {name} SET n = n + 1")
    do(postgres, f"UPDATE {name} SET id = 3, n = 7 WHERE id = 2", f"UPDATE {name} SET n = 8 WHERE id = 3")
    wanted = rows(postgres, name)
    assert len(wanted["3"]["note"]) == 64_000
    wait_until(lambda: documents(call, name) == wanted, bool)
    check_log(changes(call, name))


def test_truncate_and_a_table_without_a_primary_key(
    call: Caller, postgres: PostgresServer, name: str
) -> None:
    make(postgres, name, "a text, b int, n numeric")
    do(postgres, f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    follow(call, name, mapped={"key": ["a", "b"]})
    do(postgres, f"INSERT INTO {name} SELECT 'x/' || n, n, n FROM generate_series(1, 1200) n")
    wait_until(lambda: count(call, name), lambda seen: seen == 1200)
    assert documents(call, name)["x%2F7,7"] == {"a": "x/7", "b": 7, "n": "7"}
    do(
        postgres,
        f"INSERT INTO {name} VALUES ('y', 1, 1)",
        f"TRUNCATE {name}",
        f"INSERT INTO {name} VALUES ('z', 2, 0.5)",
    )
    wait_until(lambda: documents(call, name), lambda seen: seen == {"z,2": {"a": "z", "b": 2, "n": "0.5"}})
    check_log(changes(call, name))


def test_types_are_the_same_copied_and_followed(call: Caller, postgres: PostgresServer, name: str) -> None:
    do(
        postgres,
        f"CREATE TYPE mood_{name} AS ENUM ('sad', 'so so')",
        f"CREATE DOMAIN small_{name} AS int CHECK (value < 100)",
    )
    columns = f"""id uuid PRIMARY KEY, t bool, i bigint, f float8, n numeric(9,2), j jsonb, k json,
        z timestamptz, d date, b bytea, a int[], s text[], m mood_{name},
        ms mood_{name}[], o small_{name}, v interval,
        g int GENERATED ALWAYS AS (1) STORED"""
    make(postgres, name, columns)
    values = """'t', -9223372036854775808, 'NaN', 1.50, '{"a": [1, null]}', '{"b": 1, "b": 2}',
        '2026-01-02 03:04:05.6+02', '2026-01-02', '\\x00ff', '{1,NULL}', '{"a b",NULL,"NULL"}', 'so so',
        '{sad,"so so"}', 7, '1 day 2 hours'"""
    one, two = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
    do(postgres, f"INSERT INTO {name} VALUES ('{one}', {values})")
    follow(call, name)
    do(postgres, f"INSERT INTO {name} VALUES ('{two}', {values})")
    found = wait_until(lambda: documents(call, name), lambda seen: len(seen) == 2)
    assert found[one] | {"id": ""} == found[two] | {"id": ""}
    assert found[one] == {
        "id": one,
        "t": True,
        "i": -9223372036854775808,
        "f": None,
        "n": "1.50",
        "j": {"a": [1, None]},
        "k": {"b": 2},
        "z": "2026-01-02T01:04:05.6Z",
        "d": "2026-01-02",
        "b": "AP8=",
        "a": [1, None],
        "s": ["a b", None, "NULL"],
        "m": "so so",
        "ms": ["sad", "so so"],
        "o": 7,
        "v": "P1DT2H",
    }


def test_a_column_more_is_followed(call: Caller, postgres: PostgresServer, name: str) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} VALUES (1, 1, 'a')")
    follow(call, name)
    do(postgres, f"ALTER TABLE {name} ADD COLUMN more int DEFAULT 5", f"ALTER TABLE {name} DROP COLUMN note")
    do(postgres, f"UPDATE {name} SET n = 2")
    wait_until(lambda: documents(call, name), lambda seen: seen == {"1": {"id": 1, "n": 2, "more": 5}})


def test_what_is_published_is_followed_and_no_more(call: Caller, postgres: PostgresServer, name: str) -> None:
    do(
        postgres,
        f"CREATE TABLE {name} (id int PRIMARY KEY, n int, secret text)",
        f"CREATE TABLE {name}_f (id int PRIMARY KEY, n int)",
        f"ALTER TABLE {name}_f REPLICA IDENTITY FULL",
        f"CREATE PUBLICATION {name} FOR TABLE {name} (id, n), {name}_f WHERE (n > 5)",
        f"INSERT INTO {name} VALUES (1, 1, 'x')",
        f"INSERT INTO {name}_f VALUES (1, 1), (2, 10)",
    )
    tables = {f"public.{one}": {"collection": one} for one in (name, f"{name}_f")}
    add_source(call, name, tables)
    wait_phase(call, name, "live")
    assert documents(call, name) == {"1": {"id": 1, "n": 1}}
    assert list(documents(call, f"{name}_f")) == ["2"]
    do(
        postgres,
        f"INSERT INTO {name} VALUES (2, 2, 'y')",
        f"UPDATE {name}_f SET n = 11 - n",
        f"INSERT INTO {name}_f VALUES (3, 6)",
    )
    wait_until(lambda: sorted(documents(call, f"{name}_f")), lambda seen: seen == ["1", "3"])
    wait_until(lambda: documents(call, name).get("2"), lambda seen: seen == {"id": 2, "n": 2})


def test_another_primary_key_begins_another_generation(
    call: Caller, postgres: PostgresServer, name: str
) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} VALUES (1, 10, 'a'), (2, 20, 'b')")
    follow(call, name)
    before = call("GET", f"{BASE}/collections/{name}").body["generation"]
    do(postgres, f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey, ADD PRIMARY KEY (n)")
    wait_until(lambda: sorted(documents(call, name)), lambda seen: seen == ["10", "20"])
    wait_phase(call, name, "live")
    assert call("GET", f"{BASE}/collections/{name}").body["generation"] > before
    check_log(changes(call, name))


@pytest.mark.parametrize("how", ["hold", "rescan"])
def test_w11_a_slot_that_is_gone_is_a_gap(
    call: Caller, postgres: PostgresServer, following: ServerProcess, name: str, how: str
) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} VALUES (1, 1, 'kept'), (2, 2, 'goes')")
    follow(call, name, onGap=how, slot=f"slot_{name}")
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name}, sendSnapshot=True)
    token = live.take_until("snapshot-end")[-1]["payload"]["token"]
    drop_slot(postgres, f"slot_{name}")
    do(postgres, f"DELETE FROM {name} WHERE id = 2", f"INSERT INTO {name} VALUES (3, 3, 'new')")
    told = live.take_until("resync-required")
    assert told[-1]["payload"]["reason"] == "stale"
    assert not [one for one in told if one["type"] == "event"], "nothing is said that may be wrong"
    if how == "hold":
        assert wait_phase(call, name, "stale")["reason"] == f"slot slot_{name} does not exist"
        assert call("POST", f"{BASE}/sources/{name}/resync").status == 202
    wait_phase(call, name, "live")
    assert documents(call, name) == rows(postgres, name)
    live.send("resume", "r", subId="t", token=token, query={"collection": name})
    answer = live.take_until("resume-ack")[-1]["payload"]
    assert (answer["status"], answer["reason"]) == ("resync-required", "generation")
    log = changes(call, name)
    check_log(log)
    controls = [entry["control"] for entry in log[0] if entry["kind"] == "control"]
    assert [one for one in controls if one != "stale"][3:] == ["generation", "load-begin", "load-end", "live"]
    live.close()


def drop_slot(postgres: PostgresServer, slot: str) -> None:
    """As soon as nobody reads it."""
    while postgres.run("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", slot):
        with suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            postgres.run("SELECT pg_drop_replication_slot(%s)", slot)


def test_a_slot_that_somebody_else_moves_is_a_gap(call: Caller, postgres: PostgresServer, name: str) -> None:
    make(postgres, name)
    follow(call, name, onGap="hold", slot=f"slot_{name}")
    with postgres.connect() as connection:
        connection.execute(f"INSERT INTO {name} VALUES (1, 1, 'a')".encode())
        for _ in range(50):
            # Until we are faster than the server once.
            with connection.transaction():
                connection.execute("SELECT pg_logical_emit_message(true, 'x', repeat('y', 1000))")
            with suppress(psycopg.errors.ObjectInUse):
                connection.execute(MOVE, (f"slot_{name}",))
    assert "was advanced by another client" in wait_phase(call, name, "stale")["reason"]


def test_what_is_missing_is_named(call: Caller, postgres: PostgresServer, name: str, tmp_path: Path) -> None:
    """As somebody who may do nothing but what is asked for."""
    do(postgres, f"CREATE TABLE {name} (id int, n int)", f"CREATE ROLE role_{name} LOGIN REPLICATION")
    postgres.run("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", f"slot_{name}")
    place = tmp_path / "dsn"
    place.write_text(f"{postgres.dsn} user=role_{name}")
    tables = {f"public.{name}": {"collection": name, "key": ["id"]}}
    add_source(call, name, tables, dsn={"file": str(place)}, slot=f"slot_{name}")
    for wanted, statement in (
        ("run: CREATE PUBLICATION", f"CREATE PUBLICATION {name}"),
        ("run: GRANT SELECT", f"GRANT SELECT ON {name} TO role_{name}"),
        ("run: ALTER PUBLICATION", f"ALTER PUBLICATION {name} ADD TABLE {name}"),
        ("run: ALTER TABLE", f"ALTER TABLE {name} REPLICA IDENTITY FULL"),
        ("already exists", f"SELECT pg_drop_replication_slot('slot_{name}')"),
    ):
        wait_until(lambda: status(call, name)["error"] or "", lambda seen, wanted=wanted: wanted in seen)
        do(postgres, statement)
    wait_phase(call, name, "live")
    assert status(call, name)["error"] is None
    do(postgres, f"INSERT INTO {name} VALUES (1, 1)")
    wait_until(lambda: documents(call, name), lambda seen: seen == rows(postgres, name))


def test_a_huge_transaction_spans_many_commits(call: Caller, postgres: PostgresServer, name: str) -> None:
    make(postgres, name)
    follow(call, name, batch={"maxChanges": 100}, mapped={"partitions": 2})
    do(
        postgres,
        f"INSERT INTO {name} SELECT n, n, 'x' FROM generate_series(1, 3000) n",
        f"DELETE FROM {name} WHERE id > 2990",
    )
    wait_until(lambda: count(call, name), lambda seen: seen == 2990)
    log = changes(call, name, 2)
    check_log(log)
    indexes = sorted(one["txn"]["index"] for entries in log for one in entries if one["kind"] == "change")
    assert indexes == list(range(3010))


def test_the_life_of_a_source(
    call: Caller, postgres: PostgresServer, following: ServerProcess, name: str, tmp_path: Path
) -> None:
    make(postgres, name)
    do(postgres, f"INSERT INTO {name} VALUES (1, 1, 'a')")
    place = tmp_path / "dsn"
    place.write_text(postgres.dsn)
    url = ("--url", following.base_url)
    source = f"default/{name}"
    added = tailrace(
        "source", "add", source, "--dsn-file", str(place), "--table", f"public.{name}={name}:id",
        "--publication", name, "--slot", f"slot_{name}", *url,
    )  # fmt: skip
    assert (added.code, added.err) == (0, "")
    wait_phase(call, name, "live")
    shown = tailrace("source", "status", source, *url)
    assert "phase        live" in shown.out
    assert postgres.dsn not in shown.out
    assert f"{name}\tpostgres\tlive\n" in tailrace("source", "ls", *url).out
    assert tailrace("source", "resync", source, *url).code == 0
    wait_phase(call, name, "live")
    given = call("GET", f"{BASE}/sources/{name}").body
    del given["status"], given["database"]
    assert call("PUT", f"{BASE}/sources/{name}", given).status == 200
    assert call("PUT", f"{BASE}/sources/{name}", {**given, "onGap": "hold"}).body["onGap"] == "hold"
    assert call("PUT", f"{BASE}/sources/{name}", {**given, "slot": "other"}).code == "conflict"
    assert call("PUT", f"{BASE}/sources/x{name}", {**given, "name": f"x{name}"}).code == "collection_exists"
    following.restart(kill=True)
    do(postgres, f"INSERT INTO {name} VALUES (2, 2, 'b')")
    wait_until(lambda: documents(call, name), lambda seen: seen == rows(postgres, name))
    assert call("GET", f"{BASE}/sources/{name}").body["onGap"] == "hold"
    assert tailrace("source", "rm", source, *url).err == ""
    assert postgres.run("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", f"slot_{name}") == []
    assert call("GET", f"{BASE}/sources/{name}").status == 404
    assert call("GET", f"{BASE}/collections/{name}").body["state"] == "stale"
    assert call("PUT", f"{BASE}/docs/{name}/1", {}).code == "read_only_collection"
    do(postgres, f"DELETE FROM {name} WHERE id = 1")
    assert call("PUT", f"{BASE}/sources/{name}", given).status == 201
    wait_phase(call, name, "live")
    assert documents(call, name) == rows(postgres, name)
    check_log(changes(call, name))


def test_nothing_is_told_of_where_the_database_is(following: ServerProcess, postgres: PostgresServer) -> None:
    """After all other tests of this file: neither the log nor the metrics know the connection string."""
    call = Caller(following)
    metrics = call("GET", "/metrics").raw.decode()
    assert 'tailrace_watch_sources{phase="live"}' in metrics
    assert f"port={postgres.port}" not in following.log + metrics
    listed = json.dumps(call("GET", f"{BASE}/sources").body)
    assert f"port={postgres.port}" not in listed


def test_w11_a_lost_log_and_another_database_are_gaps(postgres: PostgresServer, tmp_path: Path) -> None:
    """With a database of its own, which keeps next to nothing for those who are away."""
    other, place = postgres, tmp_path / "dsn"
    postgres = PostgresServer(max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="64MB").start()
    place.write_text(postgres.dsn)
    server = ServerProcess(tmp_path / "data", env={**QUICK, "TAILRACE_SOURCE_DIRECTORIES": str(tmp_path)})
    try:
        call = Caller(server.start())
        make(postgres, "t")
        do(postgres, "INSERT INTO t VALUES (1, 1, 'before')")
        follow(call, "t", initial="now", dsn={"file": str(place)})
        do(postgres, "INSERT INTO t VALUES (2, 2, 'after')")
        wait_until(lambda: documents(call, "t"), lambda seen: list(seen) == ["2"])
        live = Live(server)
        live.send("subscribe", "s", query={"collection": "t"}, sendSnapshot=True)
        token = live.take_until("snapshot-end")[-1]["payload"]["token"]
        server.kill()
        do(postgres, "INSERT INTO t VALUES (3, 3, 'away')")
        for _ in range(4):
            postgres.run("SELECT pg_logical_emit_message(false, 'x', 'y')")
            postgres.run("SELECT pg_switch_wal()")
        postgres.run("CHECKPOINT")
        assert postgres.run("SELECT wal_status FROM pg_replication_slots") == [("lost",)]
        server.start()
        wait_until(lambda: documents(call, "t"), lambda seen: seen == rows(postgres, "t"))
        assert wait_phase(call, "t", "live")["gaps"] == 1
        live = Live(server)
        live.send("resume", "r", subId="s", token=token, query={"collection": "t"})
        assert live.take_until("resume-ack")[-1]["payload"]["reason"] == "generation"
        live.close()
        do(postgres, "DELETE FROM t WHERE id = 1")
        wait_until(lambda: documents(call, "t"), lambda seen: sorted(seen) == ["2", "3"])
        check_log(changes(call, "t"))
        make(other, "t")
        do(other, "INSERT INTO t VALUES (2, 2, 'elsewhere')")
        place.write_text(other.dsn)
        server.restart(kill=True)
        wait_until(lambda: documents(call, "t"), lambda seen: seen == rows(other, "t"))
        wait_phase(call, "t", "live")
        do(other, "INSERT INTO t VALUES (4, 4, 'there')")
        wait_until(lambda: sorted(documents(call, "t")), lambda seen: seen == ["2", "4"])
    finally:
        if server.running:
            server.stop()
        postgres.stop()
