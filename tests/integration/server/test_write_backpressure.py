"""Writes of every kind wait for room in the log as appends do, and are refused after `append_wait_ms`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.full_log import PATIENT, SMALL, fill, metric, no_checkpoints, start_checkpoints
from support.hub_client import Actor, registered
from support.replica import Frames
from support.server import ServerProcess
from support.wire import Wire

BASE = "/v1/databases/default"
PUSH = "/replication/v1/databases/default/push"
JSON = {"Content-Type": "application/json"}
FILLED = "filled"
SPAN = {
    "traceId": "0123456789abcdef0123456789abcdef",
    "spanId": "0123456789abcdef",
    "name": "a span",
    "startTimeUnixNano": "1700000000000000000",
    "endTimeUnixNano": "1700000000000000001",
}
SPANS = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}
TEMPLATE = {"entity": "users", "fields": [{"name": "tenant", "encoding": "string"}]}


class Request(NamedTuple):
    method: str
    path: str
    body: Any
    status: int


# Each writes to another place, so that they may be made in any order.
REQUESTS = {
    "append": Request("POST", "plain", {"n": 1}, 204),
    "create a stream": Request("PUT", "created", None, 201),
    "put a document": Request("PUT", f"{BASE}/docs/things/put", {"n": 2}, 200),
    "put into a new collection": Request("PUT", f"{BASE}/docs/fresh/one", {"n": 2}, 201),
    "patch a document": Request("PATCH", f"{BASE}/docs/things/patched", {"n": 2}, 200),
    "delete a document": Request("DELETE", f"{BASE}/docs/things/deleted", None, 204),
    "batch": Request(
        "POST",
        f"{BASE}/batch",
        {"atomic": True, "writes": [{"op": "put", "path": "things/batched", "data": {"n": 2}}]},
        200,
    ),
    "push": Request(
        "POST",
        PUSH,
        {"collection": "things", "rows": [{"newDocumentState": {"id": "pushed", "_deleted": False}}]},
        200,
    ),
    "create a database": Request("PUT", "/v1/databases/other", None, 201),
    "configure a collection": Request("PUT", f"{BASE}/collections/things", {"storeBefore": False}, 200),
    "create a collection": Request("PUT", f"{BASE}/collections/empty", {}, 201),
    "delete a collection": Request("DELETE", f"{BASE}/collections/unused", None, 204),
    "create a source": Request(
        "PUT",
        f"{BASE}/sources/state",
        {"kind": "stream", "stream": "state", "collections": {"thing": {"collection": "mirror"}}},
        201,
    ),
    "schema": Request("POST", "typed/_schema", {"schema": {"type": "object"}}, 200),
    "adopted schema": Request("POST", "adopted/_schema?adopt=true", {"schema": {"type": "object"}}, 200),
    "profile": Request("POST", "profiled/_profile", {"profile": {"kind": "evlog"}}, 200),
    "touch templates": Request("POST", "state/touch/templates/activate", {"templates": [TEMPLATE]}, 200),
    "spans": Request("POST", "spans/_otlp/v1/traces", SPANS, 200),
}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def prepare(call: Caller) -> None:
    """The streams and documents that `REQUESTS` are about."""
    for name in ("plain", "typed", "adopted", "profiled", "state", "spans"):
        assert call("PUT", name, headers=JSON).status == 201
    assert call("POST", "adopted", {"n": 1}).status == 204
    touch = {"kind": "state-protocol", "touch": {"enabled": True}}
    assert call("POST", "state/_profile", {"profile": touch}).status == 200
    assert call("POST", "spans/_profile", {"profile": {"kind": "otel-traces"}}).status == 200
    for path in ("things/put", "things/patched", "things/deleted", "unused/one"):
        assert call("PUT", f"{BASE}/docs/{path}", {"n": 1}).status == 201


def send(actor: Actor, to: str) -> str:
    return actor.ask("hub:send", {"to": to, "type": "t", "data": 1, "ack": "accepted"}, ttl=60_000)["type"]


def test_every_kind_of_write_waits_for_room(start_server: StartServer, opened: ExitStack) -> None:
    server = start_server(*SMALL, env=PATIENT)
    call, http = Caller(server), Wire(server.port)
    opened.callback(http.close)
    prepare(call)
    recipient = registered(server, "@(room/recipient)", durable=True)
    sender = registered(server, "@(room/sender)")
    frames = Frames(server)
    for one in (recipient, sender, frames):
        opened.callback(one.close)
    writes: dict[str, Callable[[], object]] = {
        name: lambda asked=asked: call(asked.method, asked.path, asked.body).status
        for name, asked in REQUESTS.items()
    }
    writes["hub message"] = lambda: send(sender, "@(room/recipient)")
    row = {"newDocumentState": {"id": "socket", "_deleted": False}}
    writes["push over a WebSocket"] = lambda: frames.call("masterWrite", "things", [row])
    wanted = {name: asked.status for name, asked in REQUESTS.items()} | {
        "hub message": "hub:delivery_ack",
        "push over a WebSocket": [],
    }
    start_checkpoints(http, FILLED)
    with ThreadPoolExecutor(len(writes)) as threads, no_checkpoints(server):
        fill(http, FILLED)
        made = {name: threads.submit(write) for name, write in writes.items()}
        eventually(
            lambda: (
                metric(http, "append_waiting_requests"),
                {name: future.result() for name, future in made.items() if future.done()},
            ),
            lambda seen: seen[0] >= len(writes) or seen[1],
        )
        assert {name: future.result() for name, future in made.items() if future.done()} == {}
    assert {name: future.result() for name, future in made.items()} == wanted
    assert recipient.of("t")["payload"] == 1
    assert metric(http, "append_waiting_requests") == metric(http, "append_waiting_bytes") == 0


def test_messages_of_an_actor_that_wait_keep_their_order(
    start_server: StartServer, opened: ExitStack
) -> None:
    server = start_server(*SMALL, env=PATIENT)
    http = Wire(server.port)
    opened.callback(http.close)
    recipient = registered(server, "@(room/recipient)", durable=True)
    sender = registered(server, "@(room/sender)")
    opened.callback(recipient.close)
    opened.callback(sender.close)
    start_checkpoints(http, FILLED)
    with no_checkpoints(server):
        fill(http, FILLED)
        for number in range(20):
            message = {"to": "@(room/recipient)", "type": "t", "data": number}
            sender.write("hub:send", message, ttl=60_000)
        eventually(lambda: metric(http, "append_waiting_requests"), lambda found: found >= 20)
    assert [recipient.of("t")["payload"] for _ in range(20)] == list(range(20))


def refused_late(server: ServerProcess, call: Caller, asked: Request) -> None:
    begun = time.monotonic()
    answer = call(asked.method, asked.path, asked.body)
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "overloaded", "1")
    assert time.monotonic() - begun >= 0.3


def test_a_write_that_waited_too_long_is_refused_and_changes_nothing(
    start_server: StartServer, opened: ExitStack
) -> None:
    server = start_server(*SMALL, env=PATIENT | {"TAILRACE_APPEND_WAIT_MS": "300ms"})
    call, http = Caller(server), Wire(server.port)
    opened.callback(http.close)
    prepare(call)
    start_checkpoints(http, FILLED)
    with no_checkpoints(server):
        fill(http, FILLED)
        for asked in REQUESTS.values():
            refused_late(server, call, asked)
        assert call("GET", f"{BASE}/docs/things/put").body["data"] == {"n": 1}
        assert call("GET", f"{BASE}/docs/fresh/one").status == 404
        assert call("GET", "created").status == 404
    for name, asked in REQUESTS.items():
        answer = eventually(
            lambda asked=asked: call(asked.method, asked.path, asked.body).status, lambda found: found != 429
        )
        assert answer == asked.status, name
