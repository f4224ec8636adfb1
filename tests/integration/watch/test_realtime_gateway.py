"""The realtime gateway: messages, snapshots, resumes, limits and refusals, on both wires."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import Any

import jwt
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from conftest import StartServer
from support.calls import Caller, eventually
from support.server import ServerProcess
from support.watch_client import Live
from support.watch_events import Events
from tailrace.auth import create_token

BASE = "/v1/databases/default"
LARGE_ONES = 40  # of 900 KB: more than the buffers of both sockets ever hold
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place() -> str:
    return f"watched{next(_numbers)}"


def put(call: Caller, path: str, data: Any) -> None:
    assert call("PUT", f"{BASE}/docs/{path}", data).status in (200, 201)


def deltas(live: Live, count: int) -> list[tuple[str, str, str]]:
    """The next events: what happens to which document, and why."""
    found: list[tuple[str, str, str]] = []
    for _ in range(count):
        envelope = live.take()
        assert envelope["type"] == "event", envelope
        delta = envelope["payload"]["delta"]
        assert ("data" in delta["doc"]) == (delta["op"] != "delete")
        found.append((delta["doc"]["id"], delta["op"], delta["reason"]))
    return found


def test_documents_enter_change_and_leave(server: ServerProcess, call: Caller, place: str) -> None:
    put(call, f"{place}/a", {"n": 5})
    put(call, f"{place}/b", {"n": 1})
    live = Live(server)
    live.send("subscribe", "s", query={"collection": place, "where": "doc.n > 2"}, sendSnapshot=True)
    acknowledged, page, end = live.take_until("snapshot-end")
    assert acknowledged["payload"]["token"] is None
    assert [row["id"] for row in page["payload"]["documents"]] == ["a"]
    assert (end["payload"]["count"], end["payload"]["pages"]) == (1, 1)
    put(call, f"{place}/b", {"n": 3})
    put(call, f"{place}/b", {"n": 4})
    put(call, f"{place}/c", {"n": 0})
    put(call, f"{place}/c", {"n": 9})
    put(call, f"{place}/b", {"n": 0})
    call("DELETE", f"{BASE}/docs/{place}/a")
    call("DELETE", f"{BASE}/docs/{place}/b")
    put(call, f"{place}/a", {"n": 6})
    assert deltas(live, 6) == [
        ("b", "insert", "entered"),
        ("b", "update", "changed"),
        ("c", "insert", "entered"),
        ("b", "delete", "left"),
        ("a", "delete", "deleted"),
        ("a", "insert", "created"),
    ]
    live.close()


def test_a_resume_goes_on_behind_its_token(server: ServerProcess, call: Caller, place: str) -> None:
    query = {"collection": place, "filters": [{"field": "n", "op": ">=", "value": 0}]}
    live = Live(server)
    live.send("auth", "a", tokens="each")
    live.send("subscribe", "s", query=query)
    acknowledged = live.take_until("subscribe_ack")[-1]["payload"]
    assert acknowledged["positions"] == [0] * 16
    put(call, f"{place}/a", {"n": 1})
    token = live.take()["payload"]["token"]
    live.close()
    put(call, f"{place}/b", {"n": 2})
    put(call, f"{place}/a", {"n": 3})
    for given in (query, None):
        live = Live(server)
        live.send("resume", "r", subId="s", token=token, query=given)
        assert live.take()["payload"]["status"] == "ok"
        assert sorted(deltas(live, 2)) == [("a", "update", "changed"), ("b", "insert", "created")]
        live.send("heartbeat")
        assert list(live.take()["payload"]["tokens"]) == ["s"]
        live.close()
    put(call, f"{place}/c", {"n": -1})
    live = Live(server)
    live.send("resume", "r", subId="s", token=_token_now(server, query), query=query)
    assert live.take()["payload"]["replaying"] is False
    put(call, f"{place}/c", {"n": 1})
    assert deltas(live, 1) == [("c", "insert", "entered")]
    live.close()


def _token_now(server: ServerProcess, query: dict[str, Any]) -> str:
    live = Live(server)
    live.send("subscribe", "s", query=query)
    token = live.take()["payload"]["token"]
    live.close()
    return token


def test_tokens_that_are_not_for_this(server: ServerProcess, call: Caller, place: str) -> None:
    query = {"collection": place, "where": "doc.n > 1"}
    token = _token_now(server, query)
    live = Live(server)

    def reason(**payload: Any) -> str:
        live.send("resume", "r", subId="s", **payload)
        answer, told = live.take(), live.take()
        assert (answer["type"], answer["payload"]["status"]) == ("resume-ack", "resync-required")
        assert (told["type"], told["payload"]["subId"]) == ("resync-required", "s")
        assert answer["payload"]["reason"] == told["payload"]["reason"]
        return told["payload"]["reason"]

    assert reason(token=token[:-4] + "AAAA", query=query) == "token-invalid"
    assert reason(token="", query=query) == "token-invalid"
    assert reason(token=token, query={"collection": place, "where": "doc.n > 2"}) == "query-changed"
    assert reason(token=token, query=query, positions={"3": 7}) == "token-invalid", "past the tail"
    live.send("resume", "r", subId="s", token=token, query=query, positions={"16": 1})
    assert live.take()["payload"]["code"] == "invalid_partition"
    live.send("resume", "r", subId="s", token=token, query={"collection": place, "where": " doc.n>1 "})
    assert live.take()["payload"]["status"] == "ok", "it is the same query, said differently"
    live.close()


def test_one_frame_for_all_that_a_change_is_the_same_to(
    server: ServerProcess, call: Caller, place: str
) -> None:
    live = Live(server)
    live.send("auth", "a", checksum=True)
    for name, data in (("one", True), ("two", True), ("bare", False)):
        live.send("subscribe", name, query={"collection": place}, includeData=data)
    for _ in range(4):
        live.take()
    put(call, f"{place}/a", {"n": 1})
    events = [live.take() for _ in range(2)]
    assert sorted(sorted(event["subIds"]) for event in events) == [["bare"], ["one", "two"]]
    assert all(len(event["checksum"]) == 8 for event in events)
    assert [("data" in event["payload"]["delta"]["doc"]) for event in events].count(True) == 1
    live.send("unsubscribe", "u", id="one")
    assert live.take()["type"] == "unsubscribe_ack"
    put(call, f"{place}/a", {"n": 2})
    assert {tuple(live.take()["subIds"]) for _ in range(2)} == {("two",), ("bare",)}
    live.send("unsubscribe", "u", id="one")
    assert live.take()["payload"]["code"] == "not_found"
    live.close()


def test_unacknowledged_events_hold_back_the_next(server: ServerProcess, call: Caller, place: str) -> None:
    live = Live(server)
    live.send("subscribe", "s", query={"collection": place}, maxUnacked=2)
    live.take()
    for number in range(5):
        put(call, f"{place}/a", {"n": number})
    first = [live.take() for _ in range(2)]
    live.send("heartbeat")
    assert live.take()["type"] == "heartbeat", "nothing else comes before an ack"
    partition = str(first[0]["partition"])
    live.send("ack", subId="s", positions={partition: first[1]["seq"]})
    rest = [live.take() for _ in range(2)]
    live.send("ack", subId="s", positions={partition: rest[1]["seq"]})
    assert [event["seq"] for event in (*first, *rest, live.take())] == [1, 2, 3, 4, 5]
    live.close()


def test_a_large_snapshot_comes_in_pages(server: ServerProcess, call: Caller, place: str) -> None:
    for begin in range(0, 1001, 500):
        writes = [
            {"op": "put", "path": f"{place}/d{number:04}", "data": {"n": number}}
            for number in range(begin, min(1001, begin + 500))
        ]
        assert call("POST", f"{BASE}/batch", {"writes": writes}).status == 200
    live = Live(server)
    order = [{"field": "n", "direction": "desc"}]
    for name, query in (("s", {"collection": place}), ("o", {"collection": place, "orderBy": order})):
        live.send("subscribe", name, query=query, sendSnapshot=True)
        envelopes = live.take_until("snapshot-end")
        pages = [envelope["payload"] for envelope in envelopes if envelope["type"] == "snapshot"]
        assert [page["page"] for page in pages] == [0, 1, 2]
        ids = [row["id"] for page in pages for row in page["documents"]]
        assert sorted(ids) == [f"d{number:04}" for number in range(1001)]
        assert envelopes[-1]["payload"]["count"] == 1001
    assert ids == sorted(ids, reverse=True)
    live.close()


@pytest.mark.parametrize(
    ("kind", "payload", "code"),
    [
        ("subscribe", {}, "invalid_query"),
        ("subscribe", {"query": {"collection": "a/b"}}, "invalid_path"),
        ("subscribe", {"query": {"collection": "a", "where": "doc.x +"}}, "invalid_query"),
        ("subscribe", {"query": {"collection": "a", "limit": 5}}, "unsupported_query"),
        ("subscribe", {"query": {"collection": "a", "where": "x" * 5000}}, "query_too_complex"),
        ("subscribe", {"query": {"collection": "a"}, "priority": "top"}, "bad_message"),
        ("unsubscribe", {"id": "none"}, "not_found"),
        ("ack", {"subId": "none"}, "not_found"),
        ("resume", {}, "bad_message"),
        ("stranger", {}, "bad_message"),
        ("auth", {"database": "nowhere"}, "not_found"),
    ],
)
def test_messages_that_are_refused(
    server: ServerProcess, kind: str, payload: dict[str, Any], code: str
) -> None:
    live = Live(server)
    live.send(kind, "m", **payload)
    answer = live.take()
    assert (answer["type"], answer["id"], answer["payload"]["code"]) == ("error", "m", code)
    live.send("heartbeat")
    assert live.take()["type"] == "heartbeat", "the connection goes on"
    live.close()


def test_connections_that_are_ended(server: ServerProcess) -> None:
    live = Live(server)
    for _ in range(3):
        live.socket.send("nonsense")
    assert live.closed() == 4400
    live = Live(server)
    live.socket.send(json.dumps({"type": "subscribe", "version": 2}))
    assert live.closed() == 4400
    live = Live(server)
    live.socket.send("x" * 70_000)
    assert live.closed() == 1009
    live = Live(server)
    with suppress(ConnectionClosed):  # the server may end it before the last one is sent
        for _ in range(400):
            live.socket.send('{"type":"heartbeat"}')
    assert live.closed() == 4429
    live = Live(server)
    live.send("subscribe", "s", query={"collection": "c"})
    live.take()
    live.send("subscribe", "s", query={"collection": "c"})
    assert live.take()["payload"]["code"] == "duplicate_id"
    live.close()
    for path in ("/realtime/ws?token=x", "/realtime/ws?database=nowhere"):
        with pytest.raises(InvalidStatus):
            Live(server, path=path)


def token(scopes: tuple[str, ...], dbs: list[str] | None, **claims: Any) -> str:
    made = create_token(SECRET, sub="ada", scopes=scopes, dbs=dbs)
    payload = jwt.decode(made, options={"verify_signature": False})
    return jwt.encode({**payload, **claims}, SECRET, algorithm="HS256")


def test_who_may_watch_what(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_WATCH_AUTH_MS": "4000"})
    admin = Caller(process, token(("manage",), None))
    admin("PUT", "/v1/databases/app")
    rule = {"readRule": "doc.org == request.auth.claims.org"}
    admin("PUT", "/v1/databases/app/collections/orders", rule)
    live = Live(process)
    live.send("subscribe", "s", query={"collection": "orders"})
    assert live.take()["payload"]["code"] == "unauthorized"
    assert live.closed() == 4401
    assert Live(process).closed() == 4401, "authentication timed out"
    live = Live(process)
    live.send("auth", "a", token="nonsense", database="app")
    assert live.take()["payload"]["code"] == "invalid_auth"
    assert live.closed() == 4401
    live = Live(process)
    for scopes, dbs in ((("write",), ["app"]), (("read",), ["other"]), (("read",), None)):
        live.send("auth", "a", token=token(scopes, dbs, org="one"), database="app")
        assert live.take()["payload"]["code"] == "forbidden"
    live.close()
    one = Live(process, token=token(("read",), ["app"], org="one"))
    two = Live(process)
    two.send("auth", "a", token=token(("read",), ["app"], org="two"))
    assert two.take()["payload"]["database"] == "app"
    for live in (one, two):
        live.send("subscribe", "s", query={"collection": "orders"})
        live.take()
    path = "/v1/databases/app/docs/orders/a"
    admin("PUT", path, {"org": "one"})
    admin("PUT", path, {"org": "two"})
    admin("PUT", path, {"org": "two", "n": 1})
    assert deltas(one, 2) == [("a", "insert", "created"), ("a", "delete", "hidden")]
    assert deltas(two, 2) == [("a", "insert", "visible"), ("a", "update", "changed")]
    two.send("auth", "a", token=token(("read",), ["app"], org="one"))
    assert two.take()["type"] == "auth_ack"
    assert two.take()["payload"]["reason"] == "auth-changed"
    admin("PUT", "/v1/databases/app/collections/orders", {"readRule": None})
    told = one.take()
    assert (told["type"], told["payload"]["reason"]) == ("resync-required", "rule-changed")
    one.close()
    two.close()


def test_w32_a_client_that_does_not_read_is_demoted_and_misses_nothing(start_server: StartServer) -> None:
    """Nothing may come in between, however long a loaded machine takes; sockets must not hold it all."""
    process = start_server(
        env={
            "TAILRACE_WATCH_OUTBOUND_BYTES": "20000",
            "TAILRACE_WATCH_STALL_MS": "600000",
            "TAILRACE_WATCH_OVERFLOW_MS": "600000",
            "TAILRACE_WATCH_HEARTBEAT_MS": "600000",
            "TAILRACE_WS_DEAD_MS": "600000",
        }
    )
    call = Caller(process)
    live = Live(process, window_bytes=64 * 1024)
    live.send("subscribe", "s", query={"collection": "big"})
    live.take()
    text = "x" * 900_000
    for number in range(LARGE_ONES):
        put(call, "big/a", {"n": number, "text": text})
    assert _metric(call, "tailrace_watch_demotions_total") > 0
    seqs = [envelope.get("seq", envelope) for envelope in (live.take() for _ in range(LARGE_ONES))]
    assert seqs == list(range(1, LARGE_ONES + 1))
    live.close()


def test_w32_one_that_never_reads_again_is_told_to_begin_anew(start_server: StartServer) -> None:
    process = start_server(
        env={
            "TAILRACE_WATCH_OUTBOUND_BYTES": "20000",
            "TAILRACE_WATCH_STALL_MS": "600000",
            "TAILRACE_WATCH_OVERFLOW_MS": "500",
            "TAILRACE_WS_DEAD_MS": "600000",
        }
    )
    call = Caller(process)
    live = Live(process, window_bytes=64 * 1024)
    live.send("subscribe", "s", query={"collection": "big"})
    live.take()
    for number in range(LARGE_ONES):
        put(call, "big/a", {"n": number, "text": "x" * 900_000})
    name = 'tailrace_watch_resync_required_total{reason="overflow"}'
    eventually(lambda: _metrics(call).get(name, 0), lambda count: count == 1)
    reasons = [one["payload"].get("reason") for one in live.take_until("resync-required")]
    assert reasons[-1] == "overflow"
    live.close()


def _metrics(call: Caller) -> dict[str, float]:
    lines = call("GET", "/metrics").raw.decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def _metric(call: Caller, name: str) -> float:
    return _metrics(call)[name]


def test_server_sent_events(server: ServerProcess, call: Caller, place: str) -> None:
    put(call, f"{place}/a", {"n": 1})
    path = f"/realtime/sse?collection={place}&where=doc.n%20%3E%200&snapshot=1"
    events = Events(server, path)
    assert events.answer.getheader("content-type") == "text/event-stream"
    kinds = [events.take() for _ in range(3)]
    assert [envelope["type"] for _, envelope in kinds] == ["subscribe_ack", "snapshot", "snapshot-end"]
    assert [mark is None for mark, _ in kinds] == [True, True, False], "no token before its end"
    put(call, f"{place}/b", {"n": 2})
    mark, envelope = events.take()
    assert envelope["payload"]["delta"]["doc"]["id"] == "b"
    events.close()
    put(call, f"{place}/a", {"n": 0})
    assert mark is not None
    events = Events(server, path, Last_Event_ID=mark)
    assert events.take()[1]["type"] == "resume-ack"
    _, envelope = events.take()
    delta = envelope["payload"]["delta"]
    assert (delta["doc"]["id"], delta["reason"]) == ("a", "left")
    events.close()
    events = Events(server, path, Last_Event_ID="nonsense")
    assert events.take()[1]["payload"]["status"] == "resync-required"
    mark, envelope = events.take()
    assert (mark, envelope["type"]) == ("", "resync-required"), "the browser forgets what it kept"
    with pytest.raises(EOFError):
        events.take()
    events.close()


def test_tickets_for_browsers(server: ServerProcess, call: Caller, place: str) -> None:
    wanted = {"subscriptions": [{"id": "one", "query": {"collection": place}, "sendSnapshot": True}]}
    events = Events(server, "/realtime/sse", wanted, Accept="text/event-stream")
    assert events.take()[1]["id"] == "one"
    events.close()
    given = call("POST", "/realtime/sse", wanted, headers={"Accept": "application/json"}).body
    for _ in range(2):
        events = Events(server, f"/realtime/sse?ticket={given['ticket']}")
        assert events.take()[1]["payload"]["subId"] == "one"
        events.close()
    assert call("GET", f"/realtime/sse?ticket={given['ticket'][:-4]}AAAA").status == 401
    assert call("GET", "/realtime/sse?token=x").status == 400
    assert call("GET", "/realtime/sse?collection=a&strange=1").status == 400
    assert call("POST", "/realtime/sse", {"subscriptions": []}).status == 400
