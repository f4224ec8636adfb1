"""What jobs ask of a server: summaries of subscriptions, rows of a view, corrections; and who may ask."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.server import ServerProcess
from support.watch_client import Live
from support.watch_jobs import metric
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


def announced(call: Caller, **body: Any) -> dict[str, Any]:
    answer = call("POST", f"{BASE}/summaries", body)
    assert answer.status == 200, answer.raw
    return answer.body


def messages(call: Caller, stream: str) -> list[dict[str, Any]]:
    return call("GET", f"/v1/stream/{stream}?offset=-1").body


def test_summaries_are_written_when_somebody_asks(server: ServerProcess, call: Caller) -> None:
    assert call("GET", "/v1/streams?system=true&prefix=__subs__/").body == []
    live = Live(server)
    live.send("auth", "a")
    connection = live.take_until("auth_ack")[-1]["payload"]["connectionId"]
    for name in ("one", "two"):
        live.send("subscribe", name, query={"collection": "c", "where": f"doc.n == '{name}'"})
        live.take_until("subscribe_ack")
    found = announced(call, seconds=60)
    assert found["subscriptions"] == 2
    assert found["token"], (
        "deliveries are appended with it, also where nobody needs a token for anything else"
    )
    written = messages(call, found["stream"])
    assert written[0]["headers"]["control"] == "reset"
    keys = {one["key"] for one in written if one.get("type") == "sub"}
    assert keys == {f"{connection}/one", f"{connection}/two"}
    assert written[-1]["type"] == "gateway"
    live.send("unsubscribe", "u", id="two")
    live.take_until("unsubscribe_ack")
    assert announced(call, seconds=60)["subscriptions"] == 1
    last = messages(call, found["stream"])[len(written) :]
    assert [one["headers"]["operation"] for one in last] == ["delete", "update"], "only what has changed"
    live.close()
    eventually(lambda: announced(call, seconds=60)["subscriptions"], lambda count: count == 0)
    announced(call, seconds=0)


def test_deliveries_are_appended_by_jobs_only(server: ServerProcess, call: Caller) -> None:
    told = announced(call)
    stream, entry = told["deliveries"], [{"v": 1, "kind": "control"}]
    assert call("POST", f"/v1/stream/{stream}", entry).code == "read_only_stream"
    assert call("POST", f"/v1/stream/{stream}", entry, token="trg_made-up").code == "read_only_stream"
    assert call("HEAD", f"/v1/stream/{stream}", token=told["token"]).status == 200
    assert call("POST", f"/v1/stream/{stream}", entry, token=told["token"]).status == 204
    assert call("POST", "/v1/stream/__registry__", entry, token=told["token"]).code == "read_only_stream"
    for name in ("__subs__/x", "__changes__/default/c/0", "__deliveries__/new"):
        assert call("POST", f"/v1/stream/{name}", [{}]).status in (404, 405)
        assert call("PUT", f"/v1/stream/{name}").status != 201
    assert call("DELETE", f"/v1/stream/{stream}").status == 405


def test_jobs_need_the_scope_manage(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    reader = create_token(SECRET, sub="r", scopes=["read", "write"], dbs=["default"])
    manager = create_token(SECRET, sub="m", scopes=["manage"], dbs=["default"])
    elsewhere = create_token(SECRET, sub="e", scopes=["manage"], dbs=["other"])
    call = Caller(server)
    asked = (("POST", "summaries"), ("GET", "view?collection=c"), ("POST", "corrections"))
    for method, path in asked:
        body = {} if method == "POST" else None
        assert call(method, f"{BASE}/{path}", body).status == 401
        for token in (reader, elsewhere):
            assert call(method, f"{BASE}/{path}", body, token=token).status == 403
    answer = call("POST", f"{BASE}/summaries", {"seconds": 30}, token=manager)
    assert answer.status == 200
    stream, granted = answer.body["deliveries"], answer.body["token"]
    entry = [{"v": 1, "kind": "control"}]
    assert call("POST", f"/v1/stream/{stream}", entry, token=manager).status == 405
    assert call("POST", f"/v1/stream/{stream}", entry, token=granted).status == 204
    assert call("GET", f"/v1/stream/{stream}", token=reader).status == 403
    done = call("POST", f"{BASE}/summaries", {"seconds": 0}, token=manager)
    assert done.body["token"] is None


def test_how_good_a_bloom_filter_is_can_be_told(call: Caller) -> None:
    call("PUT", f"{BASE}/docs/blooming/one", {"n": 1})
    path, bloom = f"{BASE}/statistics", {"keys": 100, "absent": 1000, "wrong": 25}
    labels = '{collection="blooming",database="default"}'
    for number in (1, 2):
        told = call("POST", path, {"collection": "blooming", "bloom": bloom})
        assert (told.status, told.body["bloomRatio"]) == (200, 0.025)
        assert metric(call, f"tailrace_watch_bloom_rebuilds_total{labels}") == number
    assert metric(call, f"tailrace_watch_bloom_fp_ratio{labels}") == 0.025
    (shown,) = [
        one for one in call("GET", f"{BASE}/status").body["collections"] if one["collection"] == "blooming"
    ]
    assert (shown["targets"]["bloomRatio"], shown["burn"]["bloom"]) == (0.01, 2.5)
    assert shown["reason"] == "The Bloom filter has more than 1.00% false positives."
    unasked = call("POST", path, {"collection": "blooming", "bloom": {"keys": 0, "absent": 0, "wrong": 0}})
    assert unasked.body["bloomRatio"] == 0
    for wrong in (bloom | {"wrong": 1001}, bloom | {"keys": -1}, bloom | {"more": 1}, {}):
        assert call("POST", path, {"collection": "blooming", "bloom": wrong}).code == "invalid_request"
    assert call("POST", path, {"collection": "nowhere", "bloom": bloom}).status == 404
    assert call("GET", path).status == 405


def test_the_rows_of_a_view_have_no_rules(call: Caller) -> None:
    call("PUT", f"{BASE}/collections/rows", {"readRule": "false", "partitions": 2})
    for name in ("a", "b", "c"):
        assert call("PUT", f"{BASE}/docs/rows/{name}", {"name": name}).status == 201
    assert call("DELETE", f"{BASE}/docs/rows/b").status == 204
    assert call("POST", f"{BASE}/query", {"collection": "rows"}).body["documents"] == []
    page = call("GET", f"{BASE}/view?collection=rows").body
    assert [(row["id"], row["version"], row["deleted"]) for row in page["rows"]] == [
        ("a", 1, False),
        ("b", 2, True),
        ("c", 1, False),
    ]
    assert page["rows"][1]["data"] == {"name": "b"}, "a tombstone knows what there was"
    assert sum(page["positions"]) == 4
    assert page["next"] is None
    assert call("GET", f"{BASE}/view?collection=rows&after=b").body["rows"][0]["id"] == "c"
    assert call("GET", f"{BASE}/view?collection=nothing").code == "not_found"
    assert call("POST", f"{BASE}/view?collection=rows", {}).status == 405


def test_corrections_leave_alone_what_was_written_meanwhile(call: Caller) -> None:
    for name in ("a", "b"):
        assert call("PUT", f"{BASE}/docs/mend/{name}", {"n": 1}).status == 201
    seen = {row["id"]: row["seq"] for row in call("GET", f"{BASE}/view?collection=mend").body["rows"]}
    assert call("PUT", f"{BASE}/docs/mend/b", {"n": 2}).status == 200

    def one(name: str, **more: Any) -> dict[str, Any]:
        base = {"id": name, "seen": seen.get(name), "version": 5, "createdMs": 1, "deleted": False}
        return {**base, "data": {"n": 9}, **more}

    body = {"collection": "mend", "name": "r-1", "corrections": [one("a"), one("b"), one("new")]}
    answer = call("POST", f"{BASE}/corrections", body)
    results = answer.body["results"]
    assert [result["status"] for result in results] == [200, 412, 200], answer.raw
    assert [result.get("version") for result in results] == [6, None, 6], "versions only grow"
    assert call("GET", f"{BASE}/docs/mend/a").body["data"] == {"n": 9}
    assert call("GET", f"{BASE}/docs/mend/b").body["data"] == {"n": 2}
    again = call("POST", f"{BASE}/corrections", body)
    assert again.status == 200
    assert call("GET", f"{BASE}/docs/mend/a").body["version"] == 6, "a repeat has no effect"
    assert call("POST", f"{BASE}/corrections", {"collection": "mend"}).code == "invalid_request"
    assert call("POST", f"{BASE}/corrections", {**body, "corrections": [{"id": "a"}]}).status == 400
