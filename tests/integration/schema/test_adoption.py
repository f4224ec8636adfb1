"""A first schema or profile on a stream that has entries: all are checked, then it holds for all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, Reply, eventually
from support.edge import StartEdge
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from support.wire import Connection, fresh, request_bytes
from tailrace.protocol.offsets import encode_offset

JSON = "application/json"
LINES = {"Accept": "application/x-ndjson"}
SCHEMA = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}}
FIELD = {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/id"}], "exact": True}
UPDATE = {"schema": SCHEMA, "search": {"fields": {"id": FIELD}}}
PAGES = 3000  # entries of a stream that is read in several pages


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


def filled(call: Caller, count: int, name: str | None = None) -> str:
    name = name or fresh("adopted")
    assert (
        call("PUT", name, [{"id": f"id{number}", "pad": "x" * 200} for number in range(count)]).status == 201
    )
    return name


def adopt(call: Caller, name: str, update: Any = UPDATE, resource: str = "_schema") -> Reply:
    return call("POST", f"{name}/{resource}?adopt=true", update)


def lines(reply: Reply) -> list[Any]:
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in reply.raw.splitlines()]


def found(call: Caller, name: str, query: str) -> list[str]:
    answer = call("POST", f"{name}/_search", {"q": query}).body
    assert answer["coverage"]["complete"], answer
    return [hit["source"]["id"] for hit in answer["hits"]]


def test_a_refusal_says_how_a_schema_is_adopted(call: Caller) -> None:
    name = filled(call, 2)
    refused = call("POST", f"{name}/_schema", UPDATE)
    assert "?adopt=true" in refused.body["error"]["message"]
    assert (
        "?adopt=true"
        in call("POST", f"{name}/_profile", {"profile": {"kind": "evlog"}}).body["error"]["message"]
    )


def test_entries_that_fit_are_adopted_from_the_first_on(call: Caller) -> None:
    name = filled(call, PAGES)
    before = call("GET", f"{name}?offset=-1").raw
    adopted = adopt(call, name)
    assert adopted.status == 200, adopted.body
    assert adopted.body["boundaries"] == [{"offset": 0, "version": 1}]
    assert adopted.body == call("GET", f"{name}/_schema").body
    assert found(call, name, "id:id7") == ["id7"]
    assert call("GET", f"{name}?offset=-1").raw == before
    assert call("POST", name, [{"id": 5}]).code == "invalid_request"
    assert adopt(call, name).body == adopted.body, "the same again changes nothing"


def test_the_first_entry_that_does_not_fit_is_named_and_nothing_is_changed(call: Caller) -> None:
    name = filled(call, 700)
    assert call("POST", name, [{"id": 5}, {"no": "id"}]).status == 204
    before = call("GET", f"{name}/_schema").raw
    refused = adopt(call, name)
    assert (refused.status, refused.code) == (400, "invalid_request")
    error = refused.body["error"]
    assert error["offset"] == encode_offset(0, 701)
    assert error["message"].startswith(
        f"entry at offset {encode_offset(0, 701)} does not fit: /id value is not of type"
    )
    assert call("GET", f"{name}/_schema").raw == before
    assert call("POST", name, [1]).status == 204, "appends are as free as before"


def test_progress_is_told_line_by_line(call: Caller) -> None:
    name = filled(call, PAGES)
    *progress, last = lines(call("POST", f"{name}/_schema?adopt=true", UPDATE, headers=LINES))
    assert last["result"]["boundaries"] == [{"offset": 0, "version": 1}]
    assert progress[0] == {"checked": 0, "total": PAGES}
    other = filled(call, 1)
    assert call("POST", other, [5]).status == 204
    assert lines(call("POST", f"{other}/_schema?adopt=true", UPDATE, headers=LINES))[-1]["error"][
        "offset"
    ] == encode_offset(0, 2)
    refused = call("POST", f"{other}/_schema?adopt=true", {"schema": {"type": 5}}, headers=LINES)
    assert refused.status == 400, "what can be refused before the check has its status"


def test_a_check_that_takes_too_long_changes_nothing(start_server: StartServer) -> None:
    call = Caller(start_server(env={"TAILRACE_ADOPT_MS": "1"}))
    name = filled(call, 20_000)
    last = lines(call("POST", f"{name}/_schema?adopt=true", UPDATE, headers=LINES))[-1]
    assert last["error"]["code"] == "request_timeout"
    assert call("GET", f"{name}/_schema").body["currentVersion"] == 0
    assert adopt(call, name).status == 200, "without progress the limit of all requests holds"


@contextmanager
def appending(call: Caller, name: str, record: Any) -> Iterator[list[int]]:
    """Appends as fast as it can from several connections; gives the statuses."""
    statuses: list[int] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            statuses.append(call("POST", name, [record]).status)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(statuses), lambda count: count > 20)
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_entries_appended_during_the_check_are_checked_too(call: Caller) -> None:
    """S-3: every entry, from the first on, is valid under the schema that is installed."""
    name = filled(call, PAGES)
    with appending(call, name, {"id": "late"}) as statuses:
        adopted = adopt(call, name)
        assert adopted.status == 200, adopted.body
    assert set(statuses) == {204}
    assert adopted.body["boundaries"] == [{"offset": 0, "version": 1}]
    other = filled(call, PAGES)
    with appending(call, other, {"id": 5}) as statuses:
        refused = adopt(call, other)
        assert refused.status == 400, refused.body
    assert set(statuses) == {204}, "an append is not refused for a schema that is not installed"
    assert call("GET", f"{other}/_schema").body["currentVersion"] == 0


def test_history_in_the_bucket_is_checked_and_searched(start_server: StartServer) -> None:
    call = Caller(start_server(env=SEALING_ENV))
    name = filled(call, 2500, "sealed")
    eventually(
        lambda: int(call("GET", f"{name}/_details").body["stream"]["uploaded_through"]), lambda end: end > 0
    )
    assert adopt(call, name).status == 200
    assert found(call, name, "id:id3") == ["id3"]


def test_a_fork_adopts_what_it_inherits(call: Caller) -> None:
    source = filled(call, 5)
    fork = fresh("fork")
    assert call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"}).status == 201
    assert call("POST", fork, [{"id": "own"}]).status == 204
    assert adopt(call, fork).body["boundaries"] == [{"offset": 0, "version": 1}]
    assert found(call, fork, "id:id2") == ["id2"]
    assert call("GET", f"{source}/_schema").body["currentVersion"] == 0


EVENT = {"timestamp": "2026-01-01T00:00:00Z", "service": "checkout", "message": "paid", "user": "u7"}


def test_a_profile_adopts_what_it_would_have_stored(call: Caller) -> None:
    profile = {"profile": {"kind": "evlog"}}
    model, name = fresh("model"), fresh("events")
    assert call("PUT", model, headers={"Content-Type": JSON}).status == 201
    assert call("POST", f"{model}/_profile", profile).status == 200
    assert call("POST", model, [EVENT, {**EVENT, "status": 500}]).status == 204
    stored = call("GET", f"{model}?offset=-1").body
    assert call("PUT", name, stored).status == 201
    assert adopt(call, name, profile, "_profile").body["profile"] == {"kind": "evlog"}
    assert call("GET", f"{name}/_schema").body["boundaries"] == [{"offset": 0, "version": 1}]
    answer = call("POST", f"{name}/_search", {"q": "service:checkout"}).body
    assert answer["total"] == {"value": 2, "relation": "eq"}
    raw = fresh("raw")
    assert call("PUT", raw, [stored[0], EVENT]).status == 201
    refused = adopt(call, raw, profile, "_profile").body["error"]
    assert refused["offset"] == encode_offset(0, 2)
    assert "/user is not in the form that the evlog profile stores" in refused["message"]
    assert call("GET", f"{raw}/_profile").body["profile"] == {"kind": "generic"}


def test_a_profile_without_a_schema_checks_too(call: Caller) -> None:
    name = fresh("changes")
    change = {"type": "t", "key": "1", "value": {}, "headers": {"operation": "insert"}}
    assert call("PUT", name, [change, {"type": "t"}]).status == 201
    profile = {"profile": {"kind": "state-protocol"}}
    assert adopt(call, name, profile, "_profile").body["error"]["offset"] == encode_offset(0, 2)
    other = fresh("changes")
    assert call("PUT", other, [change]).status == 201
    assert adopt(call, other, profile, "_profile").status == 200


def test_what_adopt_is_not(call: Caller) -> None:
    name = filled(call, 1)
    assert (
        call("POST", f"{name}/_schema?adopt=yes", UPDATE).body["error"]["message"]
        == "adopt must be true or false"
    )
    text = fresh("text")
    assert call("PUT", text, b"x", headers={"Content-Type": "text/plain"}).status == 201
    assert "application/json" in adopt(call, text).body["error"]["message"]
    empty = fresh("empty")
    assert call("PUT", empty, headers={"Content-Type": JSON}).status == 201
    assert adopt(call, empty).status == 200


def test_a_client_that_leaves_ends_the_check(call: Caller, server: ServerProcess) -> None:
    name = filled(call, PAGES)
    body = json.dumps(UPDATE).encode()
    with Connection(server.port) as connection:
        connection.send(request_bytes("POST", f"/v1/stream/{name}/_schema?adopt=true", (), body))
    eventually(lambda: adopt(call, name), lambda reply: reply.status == 200)


def test_through_an_edge(call: Caller, server: ServerProcess, start_edge: StartEdge) -> None:
    name = filled(call, PAGES)
    edge = Caller(start_edge(f"http://127.0.0.1:{server.port}"))
    last = lines(edge("POST", f"{name}/_schema?adopt=true", UPDATE, headers=LINES))[-1]
    assert last["result"]["currentVersion"] == 1
