"""What holds of documents and live queries whoever asks: order, wholeness, closed doors, both wires alike."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from contextlib import suppress
from typing import Any

import jwt
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import Live
from support.watch_events import Events
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place() -> str:
    return f"held{next(_numbers)}"


def together(count: int, work: Any) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_w7_concurrent_writers_of_one_document_take_turns(server: ServerProcess, place: str) -> None:
    path = f"{BASE}/docs/{place}/counter"
    Caller(server)("PUT", path, {"n": 0})
    successes: list[int] = []

    def count(number: int) -> None:
        call = Caller(server)
        for _ in range(10):
            seen = call("GET", path)
            tag = seen.headers["etag"]
            body = {"n": seen.body["data"]["n"] + 1, "by": number}
            answer = call("PUT", path, body, headers={"If-Match": tag})
            assert answer.status in (200, 412)
            if answer.status == 200:
                assert answer.body["version"] == int(tag.strip('"')) + 1
                successes.append(number)

    together(4, count)
    final = Caller(server)("GET", path).body
    assert final["data"]["n"] == len(successes), "no increment is lost, none is made twice"
    assert final["version"] == len(successes) + 1


def test_w9_an_atomic_batch_is_seen_whole(server: ServerProcess, place: str) -> None:
    ids = [f"d{number}" for number in range(6)]

    def batch(call: Caller, value: int) -> None:
        writes = [{"op": "put", "path": f"{place}/{one}", "data": {"n": value}} for one in ids]
        assert call("POST", f"{BASE}/batch", {"atomic": True, "writes": writes}).status == 200

    batch(Caller(server), 0)
    done = threading.Event()
    seen: list[set[int]] = []

    def look(number: int) -> None:
        call = Caller(server)
        if number == 0:
            for value in range(1, 25):
                batch(call, value)
            done.set()
            return
        while not done.is_set():
            found = call("POST", f"{BASE}/query", {"collection": place}).body["documents"]
            seen.append({one["data"]["n"] for one in found})

    together(3, look)
    assert seen
    assert all(len(values) == 1 for values in seen)


def test_w24_any_bytes_get_an_answer_and_disturb_nobody(
    server: ServerProcess, call: Caller, place: str
) -> None:
    chance = random.Random(4)
    good = Live(server)
    good.send("subscribe", "s", query={"collection": place})
    good.take()
    words = [
        "type",
        "subscribe",
        "payload",
        "query",
        "collection",
        "id",
        "resume",
        "token",
        "auth",
        "filters",
    ]

    def junk(depth: int = 3) -> Any:
        kind = chance.randrange(8 if depth else 5)
        if kind < 5:
            return chance.choice([None, True, -1, 2**70, 1e300, "", "x" * 300, "\u0000", place, *words])
        if kind == 5:
            return [junk(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(words): junk(depth - 1) for _ in range(chance.randrange(5))}

    for turn in range(16):
        bad = Live(server)
        with suppress(ConnectionClosed, TimeoutError):
            for _ in range(6):
                kind = chance.randrange(4)
                if kind == 0:
                    bad.socket.send(chance.randbytes(chance.randrange(60)))
                elif kind == 1:
                    bad.socket.send(json.dumps(junk()))
                else:
                    known = chance.choice(["subscribe", "resume", "ack", "unsubscribe", "auth", "heartbeat"])
                    bad.socket.send(json.dumps({"type": known, "id": "x", "payload": junk()}))
            for _ in range(4):
                answer = json.loads(bad.socket.recv(timeout=0.2))
                assert answer.get("payload", {}).get("code") != "internal", answer
        with suppress(ConnectionClosed, TimeoutError):
            bad.close()
        if turn % 4 == 0:
            call("PUT", f"{BASE}/docs/{place}/a", {"turn": turn})
            assert good.take_until("event")[-1]["payload"]["delta"]["doc"]["data"] == {"turn": turn}
    good.close()


def test_w31_both_wires_say_the_same(server: ServerProcess, call: Caller, place: str) -> None:
    call("PUT", f"{BASE}/docs/{place}/a", {"n": 1})
    where = "doc.n > 0"
    live = Live(server)
    live.send("subscribe", "default", query={"collection": place, "where": where}, sendSnapshot=True)
    events = Events(server, f"/realtime/sse?collection={place}&where=doc.n%20%3E%200&snapshot=1")
    one = live.take_until("snapshot-end")
    two = [events.take()[1] for _ in range(len(one))]
    for number in (2, 0, 5):
        call("PUT", f"{BASE}/docs/{place}/b", {"n": number})
    call("DELETE", f"{BASE}/docs/{place}/a")
    one += [live.take() for _ in range(4)]
    two += [events.take()[1] for _ in range(4)]

    def bare(envelope: dict[str, Any]) -> dict[str, Any]:
        payload = {key: value for key, value in envelope["payload"].items() if key != "token"}
        return {**{key: value for key, value in envelope.items() if key != "token"}, "payload": payload}

    assert [bare(envelope) for envelope in one] == [bare(envelope) for envelope in two]
    live.close()
    events.close()


def token(scopes: tuple[str, ...], dbs: list[str] | None, **claims: Any) -> str:
    made = create_token(SECRET, sub="ada", scopes=scopes, dbs=dbs)
    payload = jwt.decode(made, options={"verify_signature": False})
    return jwt.encode({**payload, **claims}, SECRET, algorithm="HS256")


ROUTES = [
    ("GET", "collections/c", None, "read"),
    ("PUT", "collections/c", {}, "manage"),
    ("DELETE", "collections/c", None, "manage"),
    ("GET", "status", None, "read"),
    ("GET", "docs/c/a", None, "read"),
    ("PUT", "docs/c/a", {}, "write"),
    ("PATCH", "docs/c/a", {}, "write"),
    ("DELETE", "docs/c/a", None, "write"),
    ("POST", "batch", {"writes": [{"op": "put", "path": "c/a", "data": {}}]}, "write"),
    ("POST", "query", {"collection": "c"}, "read"),
]


def test_w46_every_door_is_closed_to_those_who_may_not_enter(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    admin = Caller(process, token(("manage",), ["app"]))
    assert admin("PUT", "/v1/databases/app").status == 201
    others = {"read": "write", "write": "read", "manage": "read"}
    for method, path, body, scope in [*ROUTES, ("PUT", "", None, "manage")]:
        where = f"/v1/databases/app/{path}".rstrip("/")
        assert Caller(process)(method, where, body).status == 401, (method, path)
        expired = token((scope,), ["app"], exp=int(time.time()) - 3600)
        assert Caller(process, expired)(method, where, body).status == 401, (method, path)
        for bad in (token((scope,), ["other"]), token((others[scope],), ["app"])):
            answer = Caller(process, bad)(method, where, body)
            assert (answer.status, answer.code) == (403, "forbidden"), (method, path)
        missing = Caller(process, token((scope,), ["nowhere-else"]))(
            method, where.replace("app", "gone"), body
        )
        assert missing.status == 403, "nobody learns what there is"
    for path in ("/realtime/sse?database=app&collection=c",):
        assert Caller(process)("GET", path).status == 401
        for bad in (token(("read",), ["other"]), token(("write",), ["app"])):
            assert Caller(process, bad)("GET", path).status == 403
            with pytest.raises(InvalidStatus):
                Live(process, token=bad, path="/realtime/ws?database=app")
    for kind in ("subscribe", "resume", "unsubscribe", "ack", "heartbeat"):
        live = Live(process)
        live.send(kind, "x", query={"collection": "c"}, subId="x", id="x")
        assert live.take()["payload"]["code"] == "unauthorized", kind
        assert live.closed() == 4401
