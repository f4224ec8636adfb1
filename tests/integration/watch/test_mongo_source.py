"""MongoDB as a source: the real driver against a stand-in that speaks the wire protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Decimal128, Int64, ObjectId

from support.calls import Caller
from support.cli import tailrace
from support.mongo_server import MongoServer
from support.mongo_store import MongoStore, Refusal
from support.server import ServerProcess
from support.sources import (
    BASE,
    QUICK,
    add_mongo,
    changes,
    check_log,
    count,
    documents,
    status,
    wait_phase,
    wait_until,
)
from support.watch_client import Live

PASSWORD = "nobody-may-know-this"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def mongo() -> Iterator[MongoServer]:
    server = MongoServer().start()
    yield server
    server.crash()


@pytest.fixture(scope="module")
def following(mongo: MongoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    secrets = str(tmp_path_factory.getbasetemp())
    env = {**QUICK, "MONGO_DSN": mongo.dsn, "TAILRACE_SOURCE_DIRECTORIES": secrets}
    server = ServerProcess(tmp_path_factory.mktemp("following") / "data", env=env).start()
    yield server
    server.stop()


@pytest.fixture
def call(following: ServerProcess) -> Caller:
    return Caller(following)


@pytest.fixture
def store(mongo: MongoServer) -> MongoStore:
    return mongo.store


@pytest.fixture
def name() -> str:
    """Of a collection, there and here, and of a source that no other test uses."""
    return f"t{next(_numbers)}"


def follow(call: Caller, name: str, **more: Any) -> None:
    add_mongo(call, name, {f"shop.{name}": {"collection": name, **more.pop("mapped", {})}}, **more)
    wait_phase(call, name, "live")


def until_equal(call: Caller, store: MongoStore, name: str) -> None:
    wait_until(lambda: documents(call, name) == store.documents(f"shop.{name}"), bool)


def followed(log: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What was not copied, in the order of the source."""
    found = [one for entries in log for one in entries if one["kind"] == "change"]
    return sorted(
        (one for one in found if one["txn"]["id"] != "load"),
        key=lambda one: (one["lsn"], one["txn"]["index"]),
    )


def generation(call: Caller, name: str) -> int:
    return call("GET", f"{BASE}/collections/{name}").body["generation"]


def test_what_there_is_and_what_comes(call: Caller, mongo: MongoServer, store: MongoStore, name: str) -> None:
    there = f"shop.{name}"
    store.insert(there, *({"_id": f"k{n}", "n": n} for n in range(30)))
    store.collections[there].keeps_before = True
    follow(call, name)
    assert documents(call, name) == store.documents(there)
    store.insert(there, {"_id": "new", "n": 1})
    until_equal(call, store, name)
    store.update(there, "k1", n=100)
    until_equal(call, store, name)
    with store.transaction() as one:
        one.replace(there, {"_id": "k2", "whole": True})
        one.delete(there, "k3")
    until_equal(call, store, name)
    log = changes(call, name)
    check_log(log)
    told = followed(log)
    assert [(one["op"], one["documentKey"]) for one in told] == [
        ("insert", "new"),
        ("update", "k1"),
        ("replace", "k2"),
        ("delete", "k3"),
    ]
    assert [tuple(one["images"].values()) for one in told] == [
        ("none", "full"),
        ("full", "lookup"),
        ("full", "full"),
        ("full", "none"),
    ]
    assert [one["txn"]["index"] for one in told] == [0, 0, 0, 1]
    assert told[0]["txn"]["id"] is None
    assert told[2]["txn"]["id"] == told[3]["txn"]["id"] is not None
    assert told[2]["lsn"] == told[3]["lsn"]
    assert [one["source"]["token"] for one in told] == [
        entry.token for entry in store.oplog if entry.namespace == there
    ][30:]
    assert {one["source"]["kind"] for one in told} == {"mongo"}
    assert status(call, name)["tokens"].keys() == {name}
    controls = [entry["control"] for entry in log[0] if entry["kind"] == "control"]
    assert controls == ["load-begin", "load-end", "live"]


def test_what_is_asked_of_the_server(call: Caller, mongo: MongoServer, store: MongoStore, name: str) -> None:
    store.insert(f"shop.{name}", {"_id": "a"})
    follow(call, name)
    asked = [one for one in mongo.commands if name in (one.get("find"), one.get("aggregate"))]
    assert len(asked) >= 3, "a token first, then the copy, then what has changed"
    assert "aggregate" in asked[0]
    assert asked[0]["cursor"] == {"batchSize": 0}
    assert {one["readConcern"]["level"] for one in asked} == {"majority"}
    stream = asked[-1]["pipeline"][0]["$changeStream"]
    assert stream["fullDocument"] == "updateLookup"
    assert stream["fullDocumentBeforeChange"] == "whenAvailable"


def test_an_older_server_has_no_images_of_before(tmp_path: Path) -> None:
    mongo = MongoServer(wire=9).start()
    server = ServerProcess(tmp_path / "data", env={**QUICK, "MONGO_DSN": mongo.dsn})
    try:
        call = Caller(server.start())
        mongo.store.insert("shop.c", {"_id": "a", "n": 1})
        follow(call, "c")
        mongo.store.update("shop.c", "a", n=2)
        until_equal(call, mongo.store, "c")
        (told,) = followed(changes(call, "c"))
        assert (told["before"], told["images"]["before"]) == ({"n": 1}, "view")
        asked = [one["pipeline"][0]["$changeStream"] for one in mongo.commands if "aggregate" in one]
        assert not any("fullDocumentBeforeChange" in one for one in asked)
    finally:
        server.stop()
        mongo.crash()


def test_a_subscription_sees_the_database_change(
    call: Caller, store: MongoStore, following: ServerProcess, name: str
) -> None:
    store.insert(f"shop.{name}", {"_id": "1", "n": 10}, {"_id": "2", "n": 1})
    follow(call, name)
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name, "where": "doc.n > 5"}, sendSnapshot=True)
    live.take_until("snapshot-end")
    store.update(f"shop.{name}", "2", n=20)
    store.update(f"shop.{name}", "1", n=0)
    seen = {}
    while len(seen) < 2:
        event = live.take_until("event")[-1]
        delta = event["payload"]["delta"]
        seen[delta["doc"]["id"]] = (delta["op"], delta["reason"])
        assert len(event["lsn"]) == 16
    assert seen == {"2": ("insert", "entered"), "1": ("delete", "left")}
    live.close()


def test_types_are_the_same_copied_and_followed(call: Caller, store: MongoStore, name: str) -> None:
    values = {
        "i": Int64(2**53 + 1),
        "d": Decimal128("0.10"),
        "t": datetime(2026, 1, 2, tzinfo=UTC),
        "o": ObjectId("65a1b2c3d4e5f60718293a4b"),
        "b": b"\1",
        "l": [{"x": None}],
        "f": float("nan"),
    }
    one, two = ObjectId(), ObjectId()
    store.insert(f"shop.{name}", {"_id": one, **values})
    follow(call, name)
    store.insert(f"shop.{name}", {"_id": two, **values})
    found = wait_until(lambda: documents(call, name), lambda seen: len(seen) == 2)
    assert found[str(one)] == found[str(two)]
    assert found[str(one)] == {
        "i": 2**53 + 1,
        "d": "0.10",
        "t": "2026-01-02T00:00:00.000Z",
        "o": "65a1b2c3d4e5f60718293a4b",
        "b": "AQ==",
        "l": [{"x": None}],
        "f": {"$numberDouble": "NaN"},
    }


def test_w13_what_is_looked_up_is_later_than_the_change(
    call: Caller, store: MongoStore, following: ServerProcess, name: str
) -> None:
    """Null, newer, and of another document with the same id."""
    there = f"shop.{name}"
    store.insert(there, *({"_id": key, "n": 1} for key in ("gone", "newer", "again")))
    follow(call, name)
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name}, sendSnapshot=True)
    live.take_until("snapshot-end")
    with store.writing() as one:
        one.update(there, "gone", n=2)
        one.delete(there, "gone")
        one.update(there, "newer", n=2)
        one.update(there, "newer", n=3)
        one.update(there, "again", n=2)
        one.delete(there, "again")
        one.insert(there, {"_id": "again", "n": 9})
        one.insert(there, {"_id": "last"})
    until_equal(call, store, name)
    log = changes(call, name)
    check_log(log)
    told = {key: [one for one in followed(log) if one["documentKey"] == key] for key in ("gone", "again")}
    assert [(one["op"], one["images"]["after"], one["after"]) for one in told["gone"]] == [
        ("update", "missing", None),
        ("delete", "none", None),
    ]
    assert [(one["op"], one["images"]["after"]) for one in told["again"]] == [
        ("update", "lookup"),
        ("delete", "none"),
        ("insert", "full"),
    ]
    events: list[tuple[str, str]] = []
    while not events or events[-1][0] != "last":
        delta = live.take_until("event")[-1]["payload"]["delta"]
        events.append((delta["doc"]["id"], delta["op"]))
    live.close()
    assert [op for key, op in events if key == "gone"] == ["delete"], "what nobody knows is told to nobody"
    following.restart(kill=True)
    until_equal(call, store, name)


def test_a_dropped_collection_begins_another_generation(
    call: Caller, store: MongoStore, following: ServerProcess, name: str
) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "old", "n": 1})
    follow(call, name)
    before = generation(call, name)
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name}, sendSnapshot=True)
    live.take_until("snapshot-end")
    store.drop(there)
    assert live.take_until("resync-required")[-1]["payload"]["reason"] == "generation"
    live.close()
    wait_until(lambda: count(call, name), lambda seen: seen == 0)
    wait_phase(call, name, "live")
    assert generation(call, name) == before + 1
    following.restart(kill=True)  # the token is that of the end
    store.insert(there, {"_id": "new", "n": 2})
    until_equal(call, store, name)
    store.drop(there)
    store.insert(there, {"_id": "third"})
    until_equal(call, store, name)
    assert wait_phase(call, name, "live")["gaps"] == 0
    check_log(changes(call, name))


def test_another_collection_takes_the_name(call: Caller, store: MongoStore, name: str) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "a", "n": 1}, {"_id": "b", "n": 1})
    follow(call, name)
    store.insert(f"{there}_new", {"_id": "b", "n": 2}, {"_id": "c", "n": 2})
    store.rename(f"{there}_new", there)
    store.update(there, "c", n=3)
    until_equal(call, store, name)
    store.rename(there, f"{there}_away")
    wait_until(lambda: count(call, name), lambda seen: seen == 0)
    check_log(changes(call, name))


@pytest.mark.parametrize("how", ["hold", "rescan"])
def test_w11_a_lost_token_is_a_gap(
    call: Caller, store: MongoStore, following: ServerProcess, name: str, how: str
) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "stays", "n": 1}, {"_id": "goes", "n": 2})
    follow(call, name, onGap=how)
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name}, sendSnapshot=True)
    token = live.take_until("snapshot-end")[-1]["payload"]["token"]
    with store.lock:  # nobody reads until it is too late
        store.delete(there, "goes")
        store.insert(there, {"_id": "new", "n": 3})
        store.trim()
    told = live.take_until("resync-required")
    assert told[-1]["payload"]["reason"] == "stale"
    assert not [one for one in told if one["type"] == "event"], "nothing is said that may be wrong"
    if how == "hold":
        assert "no longer be in the oplog" in wait_phase(call, name, "stale")["reason"]
        assert call("POST", f"{BASE}/sources/{name}/resync").status == 202
    seen = wait_phase(call, name, "live")
    assert how == "hold" or seen["gaps"] == 1
    until_equal(call, store, name)
    live.send("resume", "r", subId="t", token=token, query={"collection": name})
    answer = live.take_until("resume-ack")[-1]["payload"]
    assert (answer["status"], answer["reason"]) == ("resync-required", "generation")
    live.close()
    log = changes(call, name)
    check_log(log)
    compared = [one for entries in log for one in entries if one["kind"] == "change"]
    assert sum(one["documentKey"] == "stays" for one in compared) == 1, "what is the same is no change"


def test_a_token_moves_with_time_when_nothing_happens(
    call: Caller, store: MongoStore, following: ServerProcess, name: str
) -> None:
    """The log is thrown away while we are gone, but not what comes after our token."""
    store.insert(f"shop.{name}", {"_id": "a"})
    follow(call, name)
    was = status(call, name)["tokens"][name]
    store.noop()  # at the very time of the token, perhaps
    store.noop()
    wait_until(lambda: status(call, name)["tokens"][name], lambda seen: seen != was)
    following.kill()
    with store.lock:
        store.trimmed = len(store.oplog) - 1
    store.insert(f"shop.{name}", {"_id": "b"})
    following.start()
    until_equal(call, store, name)
    assert status(call, name)["gaps"] == 0


def test_broken_connections_and_a_new_primary_are_no_gap(
    call: Caller, mongo: MongoServer, store: MongoStore, name: str
) -> None:
    store.insert(f"shop.{name}", {"_id": 0})
    follow(call, name)
    resumable = "ResumableChangeStreamError"
    for number in range(1, 13):
        with store.writing() as one:
            one.insert(f"shop.{name}", {"_id": f"k{number}"})
        if number % 3 == 0:
            mongo.cut()
        elif number % 3 == 1:
            mongo.fail_next("getMore", Refusal(10107, "NotWritablePrimary", "not primary", resumable))
        else:
            mongo.fail_next("getMore", Refusal(43, "CursorNotFound", "cursor id 1 not found"))
        wait_until(lambda: count(call, name), lambda seen, number=number: seen == number + 1)
    assert status(call, name)["gaps"] == 0
    check_log(changes(call, name))


def test_a_huge_transaction_spans_many_commits(
    call: Caller, store: MongoStore, following: ServerProcess, name: str
) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "first"})
    follow(call, name, batch={"maxChanges": 100}, mapped={"partitions": 2})
    with store.transaction() as one:
        for number in range(3000):
            one.insert(there, {"_id": f"k{number}", "n": number})
    wait_until(lambda: count(call, name), lambda seen: seen > 200)
    following.restart(kill=True)  # in the middle of it, or not: it goes on where it was
    wait_until(lambda: count(call, name), lambda seen: seen == 3001)
    log = changes(call, name, 2)
    check_log(log)
    assert [one["txn"]["index"] for one in followed(log)] == list(range(3000))


def test_several_collections_of_several_databases(call: Caller, store: MongoStore, name: str) -> None:
    tables = {f"shop.{name}": "a", f"shop.{name}.lines": "b", f"other.{name}": "c"}
    for table in tables:
        store.insert(table, {"_id": "1"})
    add_mongo(call, name, {table: {"collection": f"{name}{one}"} for table, one in tables.items()})
    wait_phase(call, name, "live")
    for number in range(2, 12):
        with store.transaction() as one:
            for table in tables:
                one.insert(table, {"_id": str(number)})
    for table, letter in tables.items():
        wanted = store.documents(table)
        wait_until(lambda letter=letter: documents(call, f"{name}{letter}"), lambda seen, w=wanted: seen == w)
        check_log(changes(call, f"{name}{letter}"))
    with store.lock:  # at once: neither may be forgotten over the other
        store.drop(f"shop.{name}.lines")
        store.drop(f"other.{name}")
    for letter in "bc":
        wait_until(lambda letter=letter: count(call, f"{name}{letter}"), lambda seen: seen == 0)
    wait_phase(call, name, "live")
    assert count(call, f"{name}a") == 11
    store.insert(f"other.{name}", {"_id": "again"})
    wait_until(lambda: count(call, f"{name}c"), lambda seen: seen == 1)


def test_only_what_happens_from_now_on(call: Caller, store: MongoStore, name: str) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "old", "n": 1}, {"_id": "touched", "n": 1})
    follow(call, name, initial="now")
    store.update(there, "touched", n=2)
    store.delete(there, "old")
    store.insert(there, {"_id": "new", "n": 3})
    wait_until(lambda: documents(call, name), lambda seen: sorted(seen) == ["new", "touched"])
    check_log(changes(call, name))


def test_what_is_missing_is_named(call: Caller, store: MongoStore, name: str) -> None:
    add_mongo(call, name, {f"shop.{name}": {"collection": name}})
    wanted = f"collection shop.{name} not found"
    wait_until(lambda: status(call, name)["error"] or "", lambda seen: seen == wanted)
    store.insert(f"shop.{name}", {"_id": "a"})
    wait_phase(call, name, "live")
    until_equal(call, store, name)
    assert status(call, name)["error"] is None


def test_a_server_without_an_oplog_is_refused(call: Caller, name: str, tmp_path: Path) -> None:
    alone = MongoServer(replicates=False).start()
    place = tmp_path / "dsn"
    place.write_text(alone.dsn)
    add_mongo(call, name, {f"shop.{name}": {"collection": name}}, dsn={"file": str(place)})
    seen = wait_until(lambda: status(call, name)["error"] or "", bool)
    assert "start it with --replSet" in seen
    assert call("DELETE", f"{BASE}/sources/{name}").body["slot"] is None
    alone.crash()


@pytest.mark.parametrize("dsn", ["mongodb://user:{0}@127.0.0.1:{1}/", "user:{0}@127.0.0.1:{1}", "{0}"])
def test_secrets_are_told_to_nobody(
    call: Caller, mongo: MongoServer, following: ServerProcess, name: str, tmp_path: Path, dsn: str
) -> None:
    place = tmp_path / "dsn"
    place.write_text(dsn.format(PASSWORD, mongo.port))
    add_mongo(call, name, {f"shop.{name}": {"collection": name}}, dsn={"file": str(place)})
    seen = wait_until(lambda: status(call, name)["error"] or "", bool)
    assert "Authentication failed" in seen or "connection string must begin" in seen
    told = call("GET", f"{BASE}/sources").raw + call("GET", "/metrics").raw
    assert PASSWORD not in told.decode() + following.log
    assert call("DELETE", f"{BASE}/sources/{name}").status == 200


def test_the_life_of_a_source(
    call: Caller, mongo: MongoServer, store: MongoStore, following: ServerProcess, name: str
) -> None:
    there = f"shop.{name}"
    store.insert(there, {"_id": "1"})
    url, source = ("--url", following.base_url), f"default/{name}"
    added = tailrace(
        "source", "add", source, "--kind", "mongo", "--dsn-env", "MONGO_DSN",
        "--table", f"{there}={name}", *url,
    )  # fmt: skip
    assert (added.code, added.err) == (0, "")
    wait_phase(call, name, "live")
    shown = tailrace("source", "status", source, *url)
    assert "phase        live" in shown.out
    assert mongo.dsn not in shown.out
    assert f"{name}\tmongo\tlive\n" in tailrace("source", "ls", *url).out
    assert tailrace("source", "resync", source, *url).code == 0
    wait_phase(call, name, "live")
    given = call("GET", f"{BASE}/sources/{name}").body
    del given["status"], given["database"]
    assert call("PUT", f"{BASE}/sources/{name}", given).status == 200
    assert call("PUT", f"{BASE}/sources/{name}", {**given, "onGap": "hold"}).body["onGap"] == "hold"
    other = {**given, "collections": {f"shop.{name}x": {"collection": name}}}
    assert call("PUT", f"{BASE}/sources/{name}", other).code == "conflict"
    assert call("PUT", f"{BASE}/docs/{name}/1", {}).code == "read_only_collection"
    following.restart(kill=True)
    store.insert(there, {"_id": "2"})
    until_equal(call, store, name)
    assert tailrace("source", "rm", source, *url).err == ""
    assert call("GET", f"{BASE}/sources/{name}").status == 404
    assert call("GET", f"{BASE}/collections/{name}").body["state"] == "stale"
    store.delete(there, "1")
    assert call("PUT", f"{BASE}/sources/{name}", given).status == 201
    wait_phase(call, name, "live")
    until_equal(call, store, name)
    check_log(changes(call, name))
