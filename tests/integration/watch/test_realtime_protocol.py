"""Words of the realtime protocol that few clients use, and its bounds: at the limit, and one beyond."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

import google_crc32c
import jwt
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import WAIT_S, Live
from support.watch_events import Events
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a-shared-secret-of-more-than-32-bytes!"
_places = count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place(call: Caller) -> str:
    name = f"words{next(_places)}"
    assert call("PUT", f"{BASE}/collections/{name}", {"partitions": 1}).status == 201
    return name


def refusal(server: ServerProcess, path: str, **headers: str) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}{path}", additional_headers=headers, open_timeout=WAIT_S)
    response = refused.value.response
    return response.status_code, json.loads(bytes(response.body or b""))["error"]["code"]


def test_a_checksum_is_that_of_the_payload_as_it_was_sent(
    server: ServerProcess, call: Caller, place: str
) -> None:
    live = Live(server)
    live.send("auth", "a", checksum=True, tokens="each")
    live.take()
    live.send("subscribe", "s", query={"collection": place})
    live.take()
    call("PUT", f"{BASE}/docs/{place}/a", {"text": 'é \U0001f600 \\ "', "n": 1.50})
    raw = live.socket.recv(timeout=WAIT_S)
    assert isinstance(raw, str)
    event = json.loads(raw)
    found = re.search(r'"payload":(.*),"checksum":', raw)
    assert found is not None, raw
    assert json.loads(found[1]) == event["payload"]
    assert event["checksum"] == f"{google_crc32c.value(found[1].encode()):08x}"
    live.send("resume", "r", subId="t", token=event["payload"]["token"], query={"collection": place})
    assert live.take()["payload"]["from"] == [2], "a token of each event covers that event"
    live.close()


def test_the_token_knows_the_subscription_it_was_made_for(
    server: ServerProcess, call: Caller, place: str
) -> None:
    """`{"type": "resume", "token", "lastSeq"}` is all that a client has to say after a short absence."""
    place = f"{place}-four"
    assert call("PUT", f"{BASE}/collections/{place}", {"partitions": 4}).status == 201
    live = Live(server)
    live.send("subscribe", "orders", query={"collection": place, "where": "doc.n >= 0"})
    token = live.take()["payload"]["token"]
    live.close()
    for number in range(3):
        call("PUT", f"{BASE}/docs/{place}/a", {"n": number})
    call("PUT", f"{BASE}/docs/{place}/b", {"n": 0})
    again = Live(server)
    again.socket.send(json.dumps({"type": "resume", "token": token, "lastSeq": 0}))
    acknowledged = again.take()
    payload = acknowledged["payload"]
    assert (acknowledged["status"], payload["status"], payload["subId"]) == ("ok", "ok", "orders")
    assert acknowledged["fromSeq"] == payload["fromSeq"] == payload["from"] == [1, 1, 1, 1]
    events = [again.take() for _ in range(4)]
    assert {event["subIds"][0] for event in events} == {"orders"}
    again.close()
    last = {str(event["partition"]): event["seq"] for event in events}
    again = Live(server)
    again.socket.send(json.dumps({"type": "resume", "token": payload["token"], "lastSeq": last}))
    payload = again.take()["payload"]
    assert payload["fromSeq"] == [last.get(str(partition), 0) + 1 for partition in range(4)]
    assert payload["replaying"] is False
    again.close()


def test_a_resume_without_a_good_token_and_subscription_is_answered(server: ServerProcess) -> None:
    live = Live(server)
    live.socket.send(json.dumps({"id": "r", "type": "resume", "token": "x", "lastSeq": 3}))
    acknowledged, told = live.take(), live.take()
    assert (acknowledged["status"], acknowledged["payload"]["reason"]) == ("resync-required", "token-invalid")
    assert (acknowledged["payload"]["subId"], told["payload"]["subId"], told["subIds"]) == (None, None, [])
    assert told["type"] == "resync-required"
    live.close()


def test_tokens_and_extensions_are_where_they_always_are(
    server: ServerProcess, call: Caller, place: str
) -> None:
    live = Live(server)
    live.send("auth", "a", tokens="each")
    live.take()
    query = {"collection": place}
    live.send("subscribe", "s", query=query)
    assert live.take()["payload"]["token"]
    call("PUT", f"{BASE}/docs/{place}/a", {"n": 1})
    event = live.take()
    assert event["extensions"] == {}
    token = event["payload"]["token"]
    live.send("resume", "r", subId="t", token=token, query=query)
    assert live.take()["payload"]["token"]
    live.send("subscribe", "u", query=query, sendSnapshot=True)
    assert live.take_until("snapshot-end")[-1]["payload"]["token"]
    call("DELETE", f"{BASE}/docs/{place}/a")
    for event in (live.take(), live.take(), live.take()):
        assert (event["type"], event["extensions"]) == ("event", {})
        assert event["payload"]["token"]
        assert "token" not in event
    live.close()
    quiet = Live(server)
    quiet.send("subscribe", "s", query=query)
    quiet.take()
    quiet.send("stream", "x", collection=place, checkpoint=None)
    quiet.take_until("stream-event")
    call("PUT", f"{BASE}/docs/{place}/a", {"n": 1})
    for event in (quiet.take(), quiet.take()):
        assert event["extensions"] == {}
        assert "token" not in event["payload"], "they were not asked for with each event"
    quiet.close()


def test_a_resume_in_the_old_flat_form(server: ServerProcess, call: Caller, place: str) -> None:
    live = Live(server)
    query = {"collection": place}
    live.send("subscribe", "s", query=query)
    token = live.take()["payload"]["token"]
    for number in range(3):
        call("PUT", f"{BASE}/docs/{place}/a", {"n": number})
        live.take()
    live.close()
    again = Live(server)
    flat = {"id": "r", "type": "resume", "subId": "s", "token": token, "lastSeq": 2, "query": query}
    again.socket.send(json.dumps(flat))
    answer = again.take()
    assert (answer["status"], answer["fromSeq"]) == ("ok", 3)
    assert (answer["payload"]["status"], answer["payload"]["fromSeq"]) == ("ok", 3)
    assert again.take()["seq"] == 3
    again.send("resume", "q", subId="u", token=answer["payload"].get("token", token), query=query)
    assert again.take()["payload"]["status"] == "ok"
    again.close()


def test_a_position_before_the_tokens_own_is_no_position(
    server: ServerProcess, call: Caller, place: str
) -> None:
    call("PUT", f"{BASE}/docs/{place}/a", {"n": 1})
    live = Live(server)
    query = {"collection": place}
    live.send("subscribe", "s", query=query)
    token = live.take()["payload"]["token"]
    live.send("resume", "r", subId="t", token=token, positions={"0": 0}, query=query)
    assert live.take()["payload"]["reason"] == "token-invalid"
    live.close()


def test_secrets_in_urls_are_refused(server: ServerProcess) -> None:
    assert refusal(server, "/realtime/ws?token=abc") == (400, "invalid_request")


def test_high_priority_is_not_for_everybody(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    for scope, answer in (("read", "error"), ("manage", "subscribe_ack")):
        live = Live(process, token=create_token(SECRET, sub="ada", scopes=[scope], dbs=["default"]))
        live.send("subscribe", "s", query={"collection": "c"}, priority="high")
        told = live.take()
        assert told["type"] == answer, told
        live.close()


def test_w46_an_expired_token_opens_nothing(start_server: StartServer) -> None:
    """Neither with the upgrade nor as the first message; the kinds that name no subscription included."""
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    made = jwt.decode(create_token(SECRET, sub="ada", dbs=["default"]), options={"verify_signature": False})
    expired = jwt.encode({**made, "exp": made["iat"] - 3600}, SECRET, algorithm="HS256")
    assert refusal(process, "/realtime/ws", Authorization=f"Bearer {expired}")[0] == 401
    live = Live(process)
    live.send("auth", "a", token=expired, database="default")
    assert live.take()["payload"]["code"] in ("invalid_auth", "token_expired")
    assert live.closed() == 4401
    live = Live(process)
    live.send("stream", "x", collection="c")
    assert live.take()["payload"]["code"] == "unauthorized"
    assert live.closed() == 4401


def test_w48_what_one_request_may_hold(server: ServerProcess, call: Caller, place: str) -> None:
    writes = [{"op": "put", "path": f"{place}/x{n}", "data": {}} for n in range(501)]
    assert call("POST", f"{BASE}/batch", {"writes": writes[:500]}).status == 200
    assert call("POST", f"{BASE}/batch", {"writes": writes}).status == 413
    rows = [{"newDocumentState": {"id": f"r{n}", "_deleted": False}} for n in range(501)]
    push = "/replication/v1/databases/default/push"
    assert call("POST", push, {"collection": place, "rows": rows[:500]}).status == 200
    assert call("POST", push, {"collection": place, "rows": rows}).status == 413
    asked: list[dict[str, Any]] = [{"id": f"s{n}", "query": {"collection": place}} for n in range(21)]
    ticket = {"Accept": "application/json"}
    one, more = (
        call("POST", "/realtime/sse", {"subscriptions": asked[:size]}, headers=ticket) for size in (20, 21)
    )
    assert (one.status, more.status) == (200, 400)


def test_w48_the_size_of_documents_and_messages(start_server: StartServer) -> None:
    process = start_server(
        env={"TAILRACE_WATCH_DOCUMENT_BYTES": "1000", "TAILRACE_WATCH_MESSAGE_BYTES": "500"}
    )
    call = Caller(process)
    frame = len(json.dumps({"t": ""}, separators=(",", ":")))
    sizes = {size: json.dumps({"t": "x" * (size - frame)}, separators=(",", ":")) for size in (1000, 1001)}
    headers = {"Content-Type": "application/json"}
    statuses = [
        call("PUT", f"{BASE}/docs/c/a", text.encode(), headers=headers).status for text in sizes.values()
    ]
    assert statuses == [201, 413]
    live = Live(process)
    beat = '{"type":"heartbeat"}'
    live.socket.send(beat.ljust(500))
    assert live.take()["type"] == "heartbeat"
    live.socket.send(beat.ljust(501))
    assert live.closed() == 1009


def test_w48_as_many_connections_as_there_may_be(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_WATCH_CONNECTIONS": "2"})
    live = Live(process)
    events = Events(process, "/realtime/sse?collection=c")
    assert events.take()[1]["type"] == "subscribe_ack"
    assert refusal(process, "/realtime/ws") == (429, "overloaded")
    assert Caller(process)("GET", "/realtime/sse?collection=c").status == 429
    events.close()
    live.close()
