"""A stream of state records as a source: resets, snapshots, restarts, and what is gone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import Finished, tailrace
from support.server import ServerProcess
from support.sources import BASE, QUICK, changes, check_log, documents, status, wait_phase, wait_until
from support.watch_client import Live
from tailrace.auth import create_token

SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("following") / "data", env=QUICK).start()
    yield server
    server.stop()


@pytest.fixture
def call(following: ServerProcess) -> Caller:
    return Caller(following)


@pytest.fixture
def name(call: Caller) -> str:
    """Of a stream of state records, a collection and a source."""
    found = f"s{next(_numbers)}"
    assert call("PUT", found, headers={"Content-Type": "application/json"}).status == 201
    profile = {"profile": {"kind": "state-protocol"}}
    assert call("POST", f"{found}/_profile", profile).status == 200
    return found


def record(key: str, value: Any = None, *, kind: str = "order", **headers: str) -> dict[str, Any]:
    if value is None:
        return {"type": kind, "key": key, "headers": {"operation": "delete", **headers}}
    return {"type": kind, "key": key, "value": value, "headers": {"operation": "insert", **headers}}


def control(what: str) -> dict[str, Any]:
    return {"headers": {"control": what}}


def say(call: Caller, name: str, *records: dict[str, Any]) -> None:
    assert call("POST", name, list(records)).status in (200, 204)


def follow(call: Caller, name: str) -> None:
    given = {
        "kind": "stream",
        "stream": name,
        "collections": {"order": {"collection": name, "partitions": 2}},
    }
    answer = call("PUT", f"{BASE}/sources/{name}", given)
    assert answer.status == 201, answer.raw
    wait_phase(call, name, "live")


def test_records_become_documents(call: Caller, name: str, following: ServerProcess) -> None:
    say(call, name, record("a", {"n": 1}), record("b", 5, txid="t1"), record("x", {}, kind="other"))
    follow(call, name)
    assert documents(call, name) == {"a": {"n": 1}, "b": {"value": 5}}
    status = call("GET", f"{BASE}/sources/{name}").body["status"]
    assert status["lagChanges"] == 0
    labels = f'{{collection="{name}",database="default"}}'
    metrics = call("GET", "/metrics").raw.decode()
    for lag in ("changes", "seconds"):
        assert f"tailrace_watch_source_lag_{lag}{labels} 0.0" in metrics
    say(call, name, record("a", {"n": 2}), record("b"), record("c/ü", {"n": 3}))
    wait_until(lambda: documents(call, name), lambda seen: seen == {"a": {"n": 2}, "c/ü": {"n": 3}})
    assert call("GET", f"{BASE}/docs/{name}/c%2F%C3%BC").body["data"] == {"n": 3}
    log = changes(call, name, 2)
    check_log(log)
    (entry,) = [
        one for entries in log for one in entries if one.get("op") == "insert" and one["documentKey"] == "b"
    ]
    assert entry["txn"] == {"id": "t1", "index": 0}
    assert entry["lsn"] == entry["source"]["token"]
    assert len(entry["lsn"]) == 26
    following.restart(kill=True)
    say(call, name, record("d", {"n": 4}))
    wait_until(lambda: len(documents(call, name)), lambda seen: seen == 3)
    check_log(changes(call, name, 2))


def test_a_snapshot_says_what_is_left(call: Caller, name: str, following: ServerProcess) -> None:
    say(call, name, *(record(f"k{n}", {"n": n}) for n in range(10)))
    follow(call, name)
    say(call, name, control("snapshot-start"), record("k1", {"n": 1}), record("k2", {"n": 20}))
    wait_until(lambda: documents(call, name)["k2"], lambda seen: seen == {"n": 20})
    following.restart(kill=True)
    say(call, name, record("new", {}), control("snapshot-end"))
    wanted = {"k1": {"n": 1}, "k2": {"n": 20}, "new": {}}
    wait_until(lambda: documents(call, name), lambda seen: seen == wanted)
    check_log(changes(call, name, 2))


def test_a_reset_begins_another_generation(call: Caller, name: str, following: ServerProcess) -> None:
    say(call, name, *(record(f"k{n}", {"n": n}) for n in range(5)))
    follow(call, name)
    before = call("GET", f"{BASE}/collections/{name}").body["generation"]
    live = Live(following)
    live.send("subscribe", "s", query={"collection": name}, sendSnapshot=True)
    live.take_until("snapshot-end")
    say(call, name, control("reset"), record("z", {"n": 26}))
    told = live.take_until("resync-required")
    assert told[-1]["payload"]["reason"] == "generation"
    wait_until(lambda: documents(call, name), lambda seen: seen == {"z": {"n": 26}})
    assert call("GET", f"{BASE}/collections/{name}").body["generation"] == before + 1
    check_log(changes(call, name, 2))
    live.close()


def test_another_stream_of_the_same_name_is_a_gap(call: Caller, name: str) -> None:
    say(call, name, record("a", {"n": 1}), record("b", {"n": 1}))
    follow(call, name)
    assert call("DELETE", name).status == 204
    wait_until(
        lambda: status(call, name)["error"] or "", lambda seen: "deleted" in seen or "no stream" in seen
    )
    assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
    profile = {"profile": {"kind": "state-protocol"}}
    assert call("POST", f"{name}/_profile", profile).status == 200
    say(call, name, record("b", {"n": 2}))
    wait_until(lambda: documents(call, name), lambda seen: seen == {"b": {"n": 2}})
    wait_phase(call, name, "live")


def test_a_stream_that_is_not_of_the_protocol(call: Caller, name: str) -> None:
    given = {"kind": "stream", "stream": f"no-{name}", "collections": {"order": {"collection": f"no-{name}"}}}
    assert call("PUT", f"{BASE}/sources/{name}", given).status == 201
    wait_until(lambda: status(call, name)["error"] or "", lambda seen: "not found" in seen)
    assert call("PUT", f"{BASE}/sources/{name}", {**given, "slot": "x"}).code == "invalid_request"
    assert call("DELETE", f"{BASE}/sources/{name}").body["slot"] is None
    system = {**given, "stream": "__registry__"}
    assert call("PUT", f"{BASE}/sources/{name}", system).code == "invalid_request"


def test_a_source_can_be_removed_at_any_moment_of_its_beginning(start_server: StartServer) -> None:
    """Its connector may just be raising the epoch: that is still the same source."""
    call = Caller(start_server())
    assert call("PUT", "/v1/databases/app").status == 201
    for number in range(40):
        collections = {"order": {"collection": f"orders{number}"}}
        given = {"kind": "stream", "stream": "orders/state", "collections": collections}
        assert call("PUT", "/v1/databases/app/sources/one", given).status == 201
        assert call("DELETE", "/v1/databases/app/sources/one").status == 200


def test_sources_are_for_managers(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    admin = Caller(process, create_token(SECRET, sub="root", scopes=("manage",)))
    assert admin("PUT", "/v1/databases/app").status == 201
    given = {"kind": "stream", "stream": "orders/state", "collections": {"order": {"collection": "orders"}}}
    path = "/v1/databases/app/sources/one"
    assert Caller(process)("GET", path).status == 401
    writer = Caller(process, create_token(SECRET, sub="ada", scopes=("read", "write"), dbs=["app"]))
    elsewhere = Caller(process, create_token(SECRET, sub="eve", scopes=("manage",), dbs=["other"]))
    partly = Caller(
        process, create_token(SECRET, sub="bob", scopes=("manage",), dbs=["app"], streams=["mine/"])
    )
    for who in (writer, elsewhere):
        for method, where in (("PUT", path), ("GET", path), ("DELETE", path), ("POST", f"{path}/resync")):
            assert who(method, where, given if method == "PUT" else None).code == "forbidden"
        assert who("GET", "/v1/databases/app/sources").code == "forbidden"
    assert partly("PUT", path, given).code == "forbidden", "a stream that it may not read"
    assert admin("PUT", path, given).status == 201
    assert partly("GET", path).body["stream"] == "orders/state"
    assert admin("DELETE", "/v1/databases/app/collections/orders").code == "conflict"
    assert admin("DELETE", path).status == 200
    assert admin("DELETE", "/v1/databases/app/collections/orders").status == 204


def test_a_source_uses_no_secret_that_is_not_for_sources(tmp_path: Path, start_server: StartServer) -> None:
    """Whoever manages a database does not manage the machine; a source from other times is told so."""
    place = tmp_path / "dsn"
    place.write_text("host=nowhere")
    collections = {"public.t": {"collection": "t"}}
    env = {**QUICK, "OTHER": "host=nowhere", "TAILRACE_AUTH_JWT_SECRET": SECRET}
    open_minded = {**env, "TAILRACE_SOURCE_DIRECTORIES": str(tmp_path)}
    process = start_server(env=open_minded)
    call = Caller(process, create_token(SECRET, sub="admin", scopes=("manage",), dbs=["default"]))
    for dsn in ({"env": "TAILRACE_AUTH_JWT_SECRET"}, {"env": "OTHER"}, {"file": "/etc/hostname"}):
        given = {"kind": "postgres", "dsn": dsn, "collections": collections}
        assert call("PUT", f"{BASE}/sources/wrong", given).code == "forbidden", dsn
    given = {"kind": "postgres", "dsn": {"file": str(place)}, "collections": collections}
    assert call("PUT", f"{BASE}/sources/early", given).status == 201
    process.stop()
    process = start_server(data_dir=process.data_dir, env=env)
    call = Caller(process, create_token(SECRET, sub="admin", scopes=("manage",), dbs=["default"]))
    path = f"{BASE}/sources/early"
    wait_until(
        lambda: call("GET", path).body["status"]["error"] or "", lambda told: "source_directories" in told
    )


def test_doctor_tells_of_sources_that_nobody_reads(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", env=QUICK).start()
    call = Caller(server)
    looked = ("doctor", "--port", "0", "--data-dir", str(server.data_dir), "--json")
    assert verdict(tailrace(*looked)) == ("ok", "none")
    assert call("PUT", "records", headers={"Content-Type": "application/json"}).status == 201
    assert call("POST", "records/_profile", {"profile": {"kind": "state-protocol"}}).status == 200
    follow(call, "records")
    server.stop()
    found, detail = verdict(tailrace(*looked))
    assert (found, detail.partition(";")[0]) == ("warn", "default/records live")
    server.start()
    wait_phase(call, "records", "live")
    assert verdict(tailrace(*looked))[0] == "ok"
    assert call("DELETE", f"{BASE}/sources/records").status == 200
    server.stop()
    assert verdict(tailrace(*looked)) == ("ok", "none")


def verdict(finished: Finished) -> tuple[str, str]:
    (row,) = [row for row in finished.rows if row["check"] == "sources"]
    return row["verdict"], row["detail"]
