"""The WebSocket protocol of RxDB's plugin, frame by frame: answers, feeds, and how connections end."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
from typing import Any

import jwt
import pytest
from websockets.exceptions import InvalidStatus

from conftest import StartServer
from support.calls import Caller, eventually
from support.replica import Frames, Replica, Stream
from support.server import ServerProcess
from support.watch_client import Live
from support.wire import request_bytes
from support.ws_wire import frame
from tailrace.protocol.websocket_frames import CLOSE, TEXT

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place() -> str:
    return f"synced{next(_numbers)}"


def put(call: Caller, path: str, data: Any) -> None:
    assert call("PUT", f"{BASE}/docs/{path}", data).status in (200, 201)


def row(new: dict[str, Any], assumed: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"newDocumentState": new, "assumedMasterState": assumed}


def pushed(place: str, frames: Frames, *rows: dict[str, Any]) -> Any:
    return frames.call("masterWrite", place, list(rows))


def test_pull_push_and_conflict(server: ServerProcess, call: Caller, place: str) -> None:
    frames = Frames(server)
    assert frames.call("masterChangesSince", place, None, 10) == {"documents": [], "checkpoint": None}
    assert pushed(place, frames, row({"id": "a", "n": 1}), row({"id": "b", "n": 2})) == []
    assert pushed(place, frames, row({"id": "a", "n": 1})) == []
    put(call, f"{place}/b", {"n": 3})
    (lost,) = pushed(place, frames, row({"id": "b", "n": 4}, {"id": "b", "n": 2}), row({"id": "c"}))
    assert (lost["id"], lost["n"], lost["_deleted"]) == ("b", 3, False)
    page = frames.call("masterChangesSince", place, None, 2)
    rest = frames.call("masterChangesSince", place, page["checkpoint"], 2)
    found = page["documents"] + rest["documents"]
    assert sorted((one["id"], one.get("n")) for one in found) == [("a", 1), ("b", 3), ("c", None)]
    assert frames.call("masterChangesSince", place, rest["checkpoint"], 2) == {
        "documents": [],
        "checkpoint": rest["checkpoint"],
    }
    frames.close()


def test_a_feed_tells_what_happens_from_now_on(server: ServerProcess, call: Caller, place: str) -> None:
    put(call, f"{place}/old", {"n": 0})
    frames = Frames(server)
    frames.send("masterChangeStream$", place)
    frames.send("masterChangeStream$", place)
    pulled = frames.call("masterChangesSince", place, None, 100)
    put(call, f"{place}/a", {"n": 1})
    told = frames.take()
    assert (told["id"], told["collection"]) == ("stream", place)
    assert [(one["id"], one["n"], one["_deleted"]) for one in told["result"]["documents"]] == [
        ("a", 1, False)
    ]
    assert call("DELETE", f"{BASE}/docs/{place}/a").status == 204
    told = frames.take()["result"]
    assert [(one["id"], one["_deleted"]) for one in told["documents"]] == [("a", True)]
    assert pulled["checkpoint"] != told["checkpoint"]
    assert frames.call("masterChangesSince", place, told["checkpoint"], 100)["documents"] == []
    frames.close()


def test_a_checkpoint_of_a_feed_skips_nothing_that_is_still_to_be_pulled(
    server: ServerProcess, call: Caller, place: str
) -> None:
    for i in range(20):
        put(call, f"{place}/d{i}", {"n": i})
    frames = Frames(server)
    frames.send("masterChangeStream$", place)
    first = frames.call("masterChangesSince", place, None, 5)
    put(call, f"{place}/late", {"n": 99})
    told = frames.take()["result"]
    assert [one["id"] for one in told["documents"]] == ["late"]
    # Cut off here, the client goes on from the last checkpoint that it was given.
    rest = Replica(call, place).walk(told["checkpoint"])[0]
    ids = {one["id"] for one in [*first["documents"], *told["documents"], *rest]}
    assert ids == {"late", *(f"d{i}" for i in range(20))}
    frames.close()


def test_a_client_that_has_not_pulled_is_told_to(server: ServerProcess, call: Caller, place: str) -> None:
    """RxDB drops its own wish to pull if it still has events of the connection before."""
    put(call, f"{place}/old", {"n": 0})
    frames = Frames(server)
    frames.send("masterChangeStream$", place)
    assert frames.take()["result"] == "RESYNC", "nobody knows what it has"
    put(call, f"{place}/a", {"n": 1})
    assert [one["id"] for one in frames.take()["result"]["documents"]] == ["a"]
    frames.close()
    frames = Frames(server)
    asked = frames.send("masterChangesSince", place, None, 100)
    assert frames.take()["id"] == asked
    frames.send("masterChangeStream$", place)
    put(call, f"{place}/b", {"n": 2})
    assert frames.take()["result"] == "RESYNC", "what was pulled before may not reach up to here"
    frames.close()


def test_several_collections_on_one_connection(server: ServerProcess, call: Caller, place: str) -> None:
    frames = Frames(server, query="?stamps=0&deletedField=gone")
    for name in ("x", "y"):
        frames.send("masterChangeStream$", f"{place}{name}")
    assert frames.call("masterChangesSince", f"{place}x", None, 1)["documents"] == []
    put(call, f"{place}y/a", {"n": 1})
    put(call, f"{place}x/a", {"n": 2})
    told = [frames.take() for _ in range(2)]
    assert {one["collection"]: one["result"]["documents"] for one in told} == {
        f"{place}x": [{"id": "a", "n": 2, "gone": False}],
        f"{place}y": [{"id": "a", "n": 1, "gone": False}],
    }
    frames.close()


def test_large_pages_come_in_pieces(server: ServerProcess, call: Caller, place: str) -> None:
    """While other messages wait their turn: a message in pieces has nothing between them."""
    text = "y" * 300_000
    for i in range(15):
        put(call, f"{place}/d{i}", {"t": text})
    frames = Frames(server)
    frames.send("masterChangeStream$", place)
    asked = [frames.send("masterChangesSince", place, None, 100) for _ in range(3)]
    put(call, f"{place}/more", {"n": 1})
    answers = [frames.take() for _ in range(4)]
    assert [one["id"] for one in answers if one["id"] != "stream"] == asked
    for answer in answers:
        if answer["id"] != "stream":
            documents = answer["result"]["documents"]
            assert sum(one.get("t") == text for one in documents) == 15
    frames.close()


def test_a_client_that_does_not_read_costs_nothing(server: ServerProcess, call: Caller, place: str) -> None:
    """Everything waits in the view, not in memory, and is there when it reads again."""
    text = "z" * 200_000
    frames = Frames(server)
    frames.send("masterChangeStream$", place)
    assert frames.call("masterChangesSince", place, None, 1)["documents"] == []
    for i in range(60):
        put(call, f"{place}/d{i}", {"t": text, "n": i})
    held: dict[str, int] = {}
    while len(held) < 60:
        held |= {one["id"]: one["n"] for one in frames.take()["result"]["documents"]}
    assert held == {f"d{i}": i for i in range(60)}
    frames.close()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", 4400),
        ("[]", 4400),
        ('{"id":"1"}', 4400),
        ('{"id":1,"collection":"c","method":"masterWrite","params":[[]]}', 4400),
        ('{"id":"1","collection":"c","method":"dropEverything","params":[]}', 4400),
        ('{"id":"1","collection":"a/b","method":"masterWrite","params":[[]]}', 4400),
        ('{"id":"1","collection":"c","method":"masterWrite","params":[7]}', 4400),
        ('{"id":"1","collection":"c","method":"masterWrite","params":[[{}]]}', 4400),
        ('{"id":"1","collection":"c","method":"masterChangesSince","params":[7,1]}', 4400),
        ('{"id":"1","collection":"c","method":"masterChangesSince","params":[null,0]}', 4400),
        ('{"id":"1","collection":"c","method":"masterChangesSince","params":[null,1001]}', 4400),
        (b"\x00", 4400),
    ],
)
def test_what_cannot_be_understood_ends_the_connection(
    server: ServerProcess, message: str | bytes, code: int
) -> None:
    frames = Frames(server)
    frames.socket.send(message)
    assert frames.closed() == code


def test_w44_expired_checkpoints_and_large_messages(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_WATCH_PUSH_BYTES": "5000"})
    call = Caller(server)
    put(call, "synced/a", {})
    frames = Frames(server)
    checkpoint = frames.call("masterChangesSince", "synced", None, 10)["checkpoint"]
    assert call("DELETE", f"{BASE}/collections/synced").status == 204
    put(call, "synced/b", {})
    frames.send("masterChangesSince", "synced", checkpoint, 10)
    assert frames.closed() == 4410
    frames = Frames(server)
    frames.send("masterWrite", "synced", [row({"id": "a", "t": "x" * 5000})])
    assert frames.closed() == 1009


def test_limits_of_connections(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_WATCH_CONNECTIONS": "2"})
    call = Caller(server)
    frames = Frames(server)
    stream = Stream(server, "synced0")
    with pytest.raises(InvalidStatus) as refused:
        Frames(server)
    assert refused.value.response.status_code == 429
    assert call("GET", "/replication/v1/databases/default/stream?collection=c").code == "overloaded"
    stream.close()
    for i in range(100):
        frames.send("masterChangeStream$", f"synced{i}")
    assert frames.call("masterChangesSince", "synced0", None, 1)["documents"] == []
    frames.send("masterChangeStream$", "synced100")
    assert frames.closed() == 1013
    frames = Frames(server)
    assert pushed("synced", frames, *[row({"id": "a"})] * 500) == []
    frames.send("masterWrite", "synced", [row({"id": "a"})] * 501)
    assert frames.closed() == 4400


def test_other_rules_and_a_stop(start_server: StartServer) -> None:
    server = start_server()
    call = Caller(server)
    put(call, "synced/a", {"open": True})
    frames = Frames(server)
    frames.send("masterChangeStream$", "synced")
    assert len(frames.call("masterChangesSince", "synced", None, 10)["documents"]) == 1
    assert call("PUT", f"{BASE}/collections/synced", {"readRule": "doc.open == true"}).status == 200
    assert frames.take() == {"id": "stream", "collection": "synced", "result": "RESYNC"}
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    assert frames.closed() == 1001
    stopping.join()


def test_a_request_that_crosses_with_a_stop_is_answered(start_server: StartServer) -> None:
    """The client sends before it can know of the stop, as one far away does; the plugin asks only once."""
    server = start_server()
    asked = request_bytes(
        "GET",
        "/replication/ws",
        {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        },
    )
    call = b'{"id":"%b","collection":"c","method":"masterWrite","params":[[{"newDocumentState":{"id":"a"}}]]}'
    with socket.create_connection(("127.0.0.1", server.port), 30) as client:
        client.sendall(asked)
        assert client.recv(4096).startswith(b"HTTP/1.1 101 ")
        client.sendall(frame(TEXT, call % b"first"))
        assert b'"id":"first"' in client.recv(4096)
        server.signal(signal.SIGTERM)
        eventually(lambda: refuses(server.port), bool)
        client.sendall(frame(TEXT, call % b"crossing"))
        heard = b""
        while (piece := client.recv(4096)) and b"the server is stopping" not in heard:
            heard += piece
        heard += piece
        client.sendall(frame(CLOSE, b"\x03\xe9"))
    assert b'"id":"crossing","collection":"c","result":[]' in heard
    assert server.wait_exit() == 0


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_metrics(server: ServerProcess, call: Caller, place: str) -> None:
    def counts() -> dict[str, float]:
        lines = call("GET", "/metrics").raw.decode().splitlines()
        return {
            line.split(" ")[0]: float(line.split(" ")[1])
            for line in lines
            if line.startswith(("tailrace_watch_pu", "tailrace_watch_conflicts", "tailrace_watch_repl"))
        }

    before = counts()
    frames = Frames(server)
    pushed(place, frames, row({"id": "a", "n": 1}), row({"id": "b"}))
    pushed(place, frames, row({"id": "a", "n": 1}), row({"id": "a", "n": 2}))
    frames.call("masterChangesSince", place, None, 10)
    after = counts()
    rows = {
        result: after[name] - before[name]
        for result in ("written", "same", "conflict", "refused")
        for name in [f'tailrace_watch_push_rows_total{{result="{result}"}}']
    }
    assert rows == {"written": 2, "same": 1, "conflict": 1, "refused": 0}
    assert after["tailrace_watch_pull_total"] - before["tailrace_watch_pull_total"] == 1
    assert after["tailrace_watch_conflicts_total"] - before["tailrace_watch_conflicts_total"] == 1
    assert after["tailrace_watch_replication_connections"] >= 1
    frames.close()
    eventually(counts, lambda found: found["tailrace_watch_replication_connections"] == 0)


def _token(**claims: Any) -> str:
    return jwt.encode({"exp": 4_000_000_000, **claims}, SECRET, "HS256")


def _auth(frames: Frames, token: str, name: str = "authorization") -> None:
    frames.send("auth", "orders", {name: f"Bearer {token}"})


def test_who_may_come_in(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_WATCH_AUTH_MS": "4000"})
    manage = Caller(server, _token(sub="m", scope="manage"))
    assert manage("PUT", "/v1/databases/app").status == 201
    good = _token(sub="u", scope="read write", db=["app"])
    reader = _token(sub="r", scope="read", db=["app"])
    silent = Frames(server, query="?database=app")
    # With the upgrade, in a frame of either case, and last, as a client does that comes back.
    frames = Frames(server, query="?database=app", token=good)
    assert pushed("orders", frames, row({"id": "a", "n": 1})) == []
    frames.close()
    for name in ("authorization", "Authorization"):
        frames = Frames(server, query="?database=app")
        _auth(frames, good, name)
        assert len(frames.call("masterChangesSince", "orders", None, 10)["documents"]) == 1
        frames.close()
    frames = Frames(server)
    waiting = frames.send("masterChangesSince", "orders", None, 10)
    _auth(frames, good)
    assert frames.take()["id"] == waiting, "the only database that the token names"
    _auth(frames, reader)
    assert len(frames.call("masterChangesSince", "orders", None, 10)["documents"]) == 1
    frames.send("masterWrite", "orders", [row({"id": "b"})])
    assert frames.closed() == 4403
    for token, code in (
        ("nonsense", 4401),
        (_token(sub="u", scope="read", db=["app"], exp=1), 4401),
        (_token(sub="u", scope="write", db=["app"]), 4403),
        (_token(sub="u", scope="read", db=["other"]), 4403),
        (_token(sub="u", scope="read"), 4403),
    ):
        frames = Frames(server, query="?database=app")
        _auth(frames, token)
        assert frames.closed() == code
    frames = Frames(server, query="?database=app")
    frames.send("auth", "orders")
    assert frames.closed() == 4401
    assert silent.closed() == 4401, "authentication timed out"
    for query, status in (("?token=x", 400), ("?database=nowhere", 404)):
        with pytest.raises(InvalidStatus) as refused:
            Frames(server, query=query, token=_token(sub="u", scope="read", db=["nowhere"]))
        assert refused.value.response.status_code == status
        assert set(json.loads(refused.value.response.body or b"{}")) == {"error"}
    with pytest.raises(InvalidStatus) as refused:
        Frames(server, token=_token(sub="u", scope="write", db=["app"]))
    assert refused.value.response.status_code == 403


def test_streams_of_realtime_connections(server: ServerProcess, call: Caller, place: str) -> None:
    for i in range(5):
        put(call, f"{place}/d{i}", {"n": i})
    live = Live(server)
    live.send("stream", "s", collection=place, checkpoint=None, batchSize=2)
    acknowledged = live.take()
    assert (acknowledged["type"], acknowledged["payload"]["kind"]) == ("subscribe_ack", "stream")
    events = [live.take() for _ in range(3)]
    assert {one["type"] for one in events} == {"stream-event"}
    payloads = [one["payload"] for one in events]
    assert sorted(one["id"] for each in payloads for one in each["documents"]) == [f"d{i}" for i in range(5)]
    assert [each["upToDate"] for each in payloads] == [False, False, True]
    put(call, f"{place}/d1", {"n": 11})
    told = live.take()["payload"]
    assert [(one["id"], one["n"], one["_deleted"]) for one in told["documents"]] == [("d1", 11, False)]
    assert told["streamId"] == "s"
    live.send("stream", "s", collection=place)
    assert live.take()["payload"]["code"] == "duplicate_id"
    live.send("subscribe", "s", query={"collection": place})
    assert live.take()["payload"]["code"] == "duplicate_id"
    live.send("unsubscribe", "u", id="s")
    assert live.take()["type"] == "unsubscribe_ack"
    put(call, f"{place}/d2", {"n": 22})
    live.send("stream", "again", collection=place, checkpoint=told["checkpoint"])
    assert live.take()["type"] == "subscribe_ack"
    assert [one["id"] for one in live.take()["payload"]["documents"]] == ["d2"]
    assert call("PUT", f"{BASE}/collections/{place}", {"readRule": "doc.n > 2"}).status == 200
    over = live.take()
    assert (over["type"], over["subIds"]) == ("resync-required", ["again"])
    for wrong in ({}, {"collection": place, "batchSize": 0}, {"collection": "a/b"}):
        live.send("stream", "wrong", **wrong)
        assert live.take()["type"] == "error"
    live.send("stream", "wrong", collection=place, checkpoint=7)
    assert live.take()["payload"]["code"] == "invalid_checkpoint"
    live.close()
