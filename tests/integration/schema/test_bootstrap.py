"""A registry is on the object store with the entries it is about, and comes back from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from conftest import StartServer
from support.calls import Caller
from support.cli import tailrace
from support.loss import ENV, JSON, bootstrap, destroy, post, put, seal
from support.schema_versions import RENAME, V1, V2
from support.server import ServerProcess


def lens(name: str) -> dict[str, Any]:
    return {"apiVersion": "durable.lens/v1", "schema": name, "from": 1, "to": 2, "ops": [RENAME]}


def update(call: Caller, name: str, body: Any) -> Any:
    answer = call("POST", f"{name}/_schema", json.dumps(body).encode(), headers=JSON)
    assert answer.status == 200, answer
    return answer.body


def facts_of(path: Path) -> dict[bytes, bytes]:
    return pq.read_schema(path).metadata or {}


def test_the_registry_comes_back_with_the_entries(start_server: StartServer, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env=ENV)
    call = Caller(server)
    for name in ("orders", "empty", "keys"):
        put(call, name, JSON)
    update(call, "orders", {"schema": V1, "routingKey": {"jsonPointer": "/ts", "required": True}})
    update(call, "empty", {"schema": V1})
    update(call, "keys", {"routingKey": {"jsonPointer": "/k", "required": False}})
    post(call, "orders", json.dumps([{"ts": str(number)} for number in range(100)]).encode(), JSON)
    update(
        call,
        "orders",
        {"schema": V2, "lens": lens("orders"), "routingKey": {"jsonPointer": "/at", "required": True}},
    )
    post(call, "orders", b'[{"at":"new"},{"at":"newer"}]', JSON)
    seal(call)
    before = {name: call("GET", f"{name}/_schema").raw for name in ("orders", "empty", "keys")}
    entries = call("GET", "orders?offset=-1").body
    assert entries[99:101] == [{"at": "99"}, {"at": "new"}]
    segments = sorted((tmp_path / "bucket").glob("streams/*/*/segments/*.parquet"))
    of_orders = [facts for facts in map(facts_of, segments) if facts[b"tailrace.name"] == b"orders"]
    versions = [facts[b"tailrace.schema_versions"] for facts in of_orders]
    assert versions == [b"[[1,1]]", b"[[41,1]]", b"[[81,1],[101,2]]"]
    checked = tailrace("verify", "--object-store", url)
    assert checked.code == 0, checked.out + checked.err
    destroy(server)
    swept = tailrace("gc", "--object-store", url, "--json", "--grace", "1ms", "--offline").rows[-1]["summary"]
    assert swept["orphans"] == swept["unclaimed"] == 0

    after = bootstrap(tmp_path / "after", url)
    call = Caller(after.start())
    assert {name: call("GET", f"{name}/_schema").raw for name in before} == before
    assert call("GET", "orders?offset=-1").body == entries
    assert call("GET", "orders?offset=-1&key=7").body == [{"at": "7"}]
    assert call("POST", "orders", b'{"ts":"old form"}', headers=JSON).status == 400
    post(call, "orders", b'{"at":"after"}', JSON)
    after.kill()
    after = ServerProcess(tmp_path / "after", args=("--object-store", url), env=ENV).start()
    call = Caller(after)
    assert {name: call("GET", f"{name}/_schema").raw for name in before} == before
    after.stop()
