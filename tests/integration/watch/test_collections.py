"""Collections as a whole: set by several at once, deleted and made again, bounded, looked at."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import jwt
import pytest

from conftest import StartServer
from support.calls import Caller, Reply, eventually
from support.cli import tailrace
from support.server import ServerProcess
from support.watch_client import Live
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place() -> str:
    return f"whole{next(_numbers)}"


def at_once(*requests: Any) -> list[Reply]:
    """Made by as many threads, which begin together."""
    gate = threading.Barrier(len(requests))
    found: list[Reply | None] = [None] * len(requests)

    def run(number: int) -> None:
        gate.wait()
        found[number] = requests[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reply for reply in found if reply is not None]


def test_rules_that_are_set_at_once_all_hold(call: Caller, place: str) -> None:
    for turn in range(12):
        where = f"{BASE}/collections/{place}x{turn}"
        assert call("PUT", where, {}).status == 201
        replies = at_once(
            lambda where=where: call("PUT", where, {"readRule": "doc.n < 5"}),
            lambda where=where: call("PUT", where, {"writeRule": "doc.n < 6"}),
            lambda where=where: call("PUT", where, {"retention": "9d"}),
        )
        assert [reply.status for reply in replies] == [200, 200, 200]
        shown = call("GET", where).body
        assert (shown["readRule"], shown["writeRule"]) == ("doc.n < 5", "doc.n < 6")
        assert (shown["ruleVersion"], shown["retention"]) == (2, "9d")


def test_one_of_two_that_make_a_collection_decides_how(call: Caller, place: str) -> None:
    for turn in range(8):
        where = f"{BASE}/collections/{place}x{turn}"
        replies = at_once(
            lambda where=where: call("PUT", where, {"partitions": 2}),
            lambda where=where: call("PUT", where, {"partitions": 3}),
        )
        assert sorted(reply.status for reply in replies) == [201, 409]
        (made,) = [reply.body["partitions"] for reply in replies if reply.status == 201]
        assert call("GET", where).body["partitions"] == made


def test_a_collection_is_deleted_and_made_again(server: ServerProcess, call: Caller, place: str) -> None:
    where = f"{BASE}/collections/{place}"
    assert call("DELETE", where).status == 404
    for number in range(5):
        call("PUT", f"{BASE}/docs/{place}/d{number}", {"n": number})
    query = {"collection": place}
    live = Live(server)
    live.send("subscribe", "s", query=query)
    token = live.take()["payload"]["token"]
    live.send("subscribe", "again", query=query, autoResync=True)
    live.take()
    assert call("GET", where).body["generation"] == 1
    assert call("DELETE", where).status == 204
    told = {live.take()["payload"]["subId"]: None for _ in range(2)}
    assert set(told) == {"s", "again"}
    page, end = live.take_until("snapshot-end")[-2:]
    assert (page["payload"]["documents"], end["payload"]["count"]) == ([], 0), "it begins again by itself"
    assert call("GET", where).status == 404
    assert call("GET", f"{BASE}/docs/{place}/d1").status == 404
    assert call("POST", f"{BASE}/query", query).body["documents"] == []
    assert call("GET", f"/v1/stream/__changes__/default/{place}/0?offset=-1").status == 404
    assert call("PUT", f"{BASE}/docs/{place}/d1", {"n": 10}).body["version"] == 1
    assert live.take()["payload"]["delta"]["reason"] == "created"
    assert call("GET", where).body["generation"] == 2
    live.send("resume", "r", subId="s", token=token, query=query)
    assert live.take()["payload"]["reason"] == "generation"
    live.close()


def test_w6_generations_are_remembered_over_restarts(start_server: StartServer) -> None:
    process = start_server()
    call = Caller(process)
    where = f"{BASE}/collections/kept"
    for turn in range(3):
        assert call("PUT", f"{BASE}/docs/kept/a", {"turn": turn}).status == 201
        assert call("GET", where).body["generation"] == turn + 1
        process.kill()
        process.start()
        shown = call("GET", where).body
        assert (shown["generation"], shown["documents"]) == (turn + 1, 1)
        assert call("DELETE", where).status == 204
        process.kill()
        process.start()
        assert call("GET", where).status == 404
    assert call("GET", f"{BASE}/docs/kept/a").status == 404


def test_what_can_be_set_and_what_cannot(call: Caller, place: str) -> None:
    where = f"{BASE}/collections/{place}"
    shown = call("PUT", where, {"partitions": 1, "slo": {"deliveryMs": 100}}).body
    assert (shown["retention"], shown["tombstoneTtl"], shown["lag"]) == ("7d", "30d", [0])
    assert (shown["view"], shown["storeBefore"], shown["state"]) == ("full", True, "live")
    assert call("PUT", where, {"retention": "0", "tombstoneTtl": "90m"}).body["retention"] == "0"
    assert call("GET", where).body["tombstoneTtl"] == "90m"
    for given, code in (
        ({"retention": 7}, "invalid_request"),
        ({"retention": "soon"}, "invalid_request"),
        ({"view": "none"}, "before_image_required"),
        ({"storeBefore": "no"}, "invalid_request"),
        ({"source": "pg1"}, "invalid_request"),
        ({"slo": {"deliveryMs": 0}}, "invalid_request"),
        ({"slo": {"other": 1}}, "invalid_request"),
        ({"slo": 5}, "invalid_request"),
        ({"slo": {"bloomRatio": 0}}, "invalid_request"),
        ({"slo": {"resumeRatio": 1.5}}, "invalid_request"),
        ({"partitions": 0}, "invalid_request"),
        ({"partitions": 257}, "invalid_request"),
        ({"partitions": 2}, "collection_exists"),
        ({"writeRule": 5}, "invalid_request"),
        ({"other": 1}, "invalid_request"),
    ):
        assert call("PUT", where, given).code == code, given


def test_the_status_of_a_database(server: ServerProcess, call: Caller, place: str) -> None:
    call("PUT", f"/v1/databases/{place}")
    call("PUT", f"/v1/databases/{place}/docs/orders/a", {"n": 1})
    shown = call("GET", f"/v1/databases/{place}/status").body
    assert (shown["database"], shown["connections"]) == (place, 0)
    (orders,) = shown["collections"]
    assert (orders["collection"], orders["state"], orders["documents"]) == ("orders", "live", 1)
    assert orders["targets"] == {
        "deliveryMs": 250,
        "resumeRatio": 0.999,
        "lagMs": 5000,
        "bloomRatio": 0.01,
    }
    assert set(orders["burn"]) == {"delivery", "resume", "lag", "bloom"}
    assert orders["reason"]
    assert call("GET", "/v1/databases/nowhere/status").status == 404
    assert call("POST", f"/v1/databases/{place}/status", {}).status == 405


def test_how_collections_do_on_the_command_line(server: ServerProcess, call: Caller, place: str) -> None:
    call("PUT", f"/v1/databases/{place}")
    call("PUT", f"/v1/databases/{place}/docs/orders/a", {"n": 1})
    address = {"TAILRACE_ENDPOINT": server.base_url}
    shown = tailrace("watch", "top", place, env=address)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("orders  live  documents=1")
    assert tailrace("watch", "top", place, "--json", env=address).rows[0]["collection"] == "orders"
    live = Live(server, path=f"/realtime/ws?database={place}")
    live.send("subscribe", "s", query={"collection": "orders"})
    given = live.take()["payload"]["token"]
    live.close()
    (said,) = tailrace("inspect", "token", given, "--json").rows
    assert (said["database"], said["collection"], sum(said["positions"])) == (place, "orders", 1)
    assert tailrace("inspect", "token", "nonsense").code != 0


def token(**claims: Any) -> str:
    made = create_token(SECRET, sub=claims.pop("sub", "ada"), scopes=("manage",), dbs=["default"])
    payload = jwt.decode(made, options={"verify_signature": False})
    return jwt.encode({**payload, **claims}, SECRET, algorithm="HS256")


def test_w48_w50_limits_of_somebody_and_what_is_written_down(start_server: StartServer) -> None:
    process = start_server(
        env={
            "TAILRACE_AUTH_JWT_SECRET": SECRET,
            "TAILRACE_WATCH_SUBSCRIPTIONS": "3",
            "TAILRACE_WATCH_PRINCIPAL_SUBSCRIPTIONS": "4",
            "TAILRACE_WATCH_SCAN_PREDICATES": "2",
        }
    )
    call = Caller(process, token())
    one, two, other = (Live(process, token=token(sub=sub)) for sub in ("ada", "ada", "bob"))

    def ask(live: Live, name: str, where: str) -> str:
        live.send("subscribe", name, query={"collection": "c", "where": where})
        answer = live.take()
        return answer["payload"].get("limit", answer["type"])

    assert [ask(one, f"s{n}", f"doc.secret == 'zebra{n}'") for n in range(4)] == [
        *["subscribe_ack"] * 3,
        "subscriptions",
    ]
    assert ask(two, "s", "doc.n == 1") == "subscribe_ack"
    assert ask(two, "t", "doc.n == 2") == "principal"
    one.send("unsubscribe", "u", id="s0")
    one.take()
    assert ask(two, "t", "doc.n == 2") == "subscribe_ack", "somebody gave one up"
    assert ask(other, "a", "1 + doc.n == 2") == "subscribe_ack"
    assert ask(other, "b", "1 + doc.n == 3") == "subscribe_ack"
    assert ask(other, "c", "1 + doc.n == 4") == "scanPredicates"
    assert ask(other, "c", "1 + doc.n == 3") == "subscribe_ack", "it is looked at already"
    call("PUT", f"{BASE}/collections/c", {"readRule": "doc.secret != 'zebra'"})
    one.send("resume", "r", subId="x", token="bad")
    for live in (one, two, other):
        live.close()

    def audit() -> list[dict[str, Any]]:
        reply = call("GET", "/v1/stream/__audit__?offset=-1")
        return reply.body if reply.status == 200 else []

    events = eventually(
        audit, lambda found: {"rule.changed", "resume.failed"} <= {event["event"] for event in found}
    )
    created = [event for event in events if event["event"] == "subscription.created"]
    assert {event["principal"] for event in created} == {"ada", "bob"}
    assert all(
        set(event) == {"ts", "event", "principal", "database", "collection", "subId", "details"}
        for event in events
    )
    assert created[0]["details"]["shape"] == '_==_((doc)["secret"],?)'
    raw = call("GET", "/v1/stream/__audit__?offset=-1").raw + call("GET", "/metrics").raw
    assert b"zebra" not in raw, "no literal of anybody's query"
    assert (
        Caller(process, create_token(SECRET, sub="eve", scopes=("read",), dbs=["default"]))(
            "GET", "/v1/stream/__audit__?offset=-1"
        ).status
        == 403
    )


def test_a_query_that_is_refused_has_the_code_of_the_server(server: ServerProcess) -> None:
    for place, where, code in (
        ("nowhere/orders", "true", "not_found"),
        ("default/orders", "doc.n >", "invalid_query"),
    ):
        address = {"TAILRACE_ENDPOINT": server.base_url}
        done = tailrace("watch", place, "--where", where, "--json", env=address)
        assert (done.code, json.loads(done.err)["error"]["code"]) == (1, code), done.err
