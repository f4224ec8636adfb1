"""Streams that belong to the server: readable, and closed to every write of a client."""

from __future__ import annotations

import pytest

from support.calls import eventually
from support.wire import Wire

JSON = "application/json"
# Described by the server itself when it has something to tell.
NAMES = ["__registry__", "__stream_metrics__"]
WRITES = {
    "append": ("POST", "", "[1]"),
    "create": ("PUT", "", None),
    "delete": ("DELETE", "", None),
    "schema": ("POST", "/_schema", '{"schema":{}}'),
    "profile": ("POST", "/_profile", '{"profile":{"kind":"generic"}}'),
    "spans": ("POST", "/_otlp/v1/traces", "{}"),
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory):
    from support.server import ServerProcess

    env = {"TAILRACE_METRICS_FLUSH_MS": "50"}
    process = ServerProcess(tmp_path_factory.mktemp("system") / "data", env=env).start()
    wire = Wire(process.port)
    assert wire.put("one", JSON, "[1]").status == 201
    for name in NAMES:
        path = f"{name}?offset=-1"
        eventually(lambda path=path: wire.get(path), lambda answer: answer.status == 200 and answer.json)
    yield wire
    wire.close()
    process.stop()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_clients_do_not_write_to_them(http: Wire, name: str, write: tuple[str, str, str | None]) -> None:
    method, rest, body = write
    answer = http.call(method, f"{name}{rest}", {"Content-Type": JSON} if body else {}, body)
    assert (answer.status, answer.code) == (405, "read_only_stream")
    assert "allow" in answer


@pytest.mark.parametrize("name", NAMES)
def test_they_are_read_and_inspected_like_any_stream(http: Wire, name: str) -> None:
    assert http.get(f"{name}?offset=-1").json
    details = http.get(f"{name}/_details").json
    assert details["stream"]["name"] == name
    assert http.get(f"{name}/_index_status").status == 200
    assert http.get(f"{name}/_schema").json["schema"] == name


def test_metrics_have_a_schema_and_nothing_to_search(http: Wire) -> None:
    registry = http.get("__stream_metrics__/_schema").json
    assert registry["currentVersion"] == 1
    assert not {"search", "routingKey"} & set(registry)
    assert http.get("__stream_metrics__/_profile").json["profile"] == {"kind": "metrics"}
    answer = http.post("__stream_metrics__/_search", JSON, '{"q":"x"}')
    assert answer.json["error"]["message"] == "search is not configured for this stream"
    status = http.get("__stream_metrics__/_index_status").json
    assert (status["exact_indexes"], status["search_families"]) == ([], [])
    assert status["routing_key_lexicon"]["configured"] is False


def test_no_client_takes_their_names(http: Wire) -> None:
    answer = http.put("__mine__", JSON)
    assert (answer.status, answer.code) == (400, "reserved_name")
