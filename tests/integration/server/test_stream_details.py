"""`_details` and `_index_status`: what they show, when they differ, and who is woken."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from conftest import StartServer
from support.calls import eventually
from support.sealing import SEALING_ENV
from support.wire import Answer, Wire, fresh, request_bytes

JSON, TEXT = "application/json", "text/plain"
ENDPOINTS = ("_details", "_index_status")


def waiting(http: Wire) -> float:
    text = http.get("/metrics").body.decode()
    found = re.search(r'^tailrace_live_connections\{mode="long-poll"\} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def woken(http: Wire, name: str, endpoint: str, change: Callable[[], object], patience: str = "4s") -> Answer:
    """What somebody is answered who waits while the change is made."""
    tag = http.get(f"{name}/{endpoint}")["etag"]
    path = f"/v1/stream/{name}/{endpoint}?live=true&timeout={patience}"
    before = waiting(http)
    with http.connect() as connection:
        connection.send(request_bytes("GET", path, {"If-None-Match": tag}))
        # It waits, or what it waits for has come by itself.
        eventually(lambda: waiting(http) > before or connection.was_left(), bool)
        change()
        answer = connection.read_answer()
    if answer.status == 200:
        assert answer["etag"] != tag
    return answer


def test_the_fields_of_details(http: Wire) -> None:
    name = fresh("details")
    http.put(name, JSON, "[1,22]", stream_ttl="1h", stream_seq="07")
    http.post(name, JSON, "[333]")
    answer = http.get(f"{name}/_details")
    assert answer["cache-control"] == "no-store"
    assert answer["content-type"] == "application/json; charset=utf-8"
    shown = answer.json
    assert list(shown) == ["stream", "profile", "schema", "index_status", "storage", "object_store_requests"]
    stream = shown["stream"]
    times = {key: stream.pop(key) for key in ("created_at", "updated_at", "expires_at", "last_append_at")}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text) for text in times.values())
    assert stream == {
        "name": name,
        "content_type": JSON,
        "profile": "generic",
        "ttl_seconds": 3600,
        "stream_seq": stream["stream_seq"],
        "closed": False,
        "epoch": 0,
        "next_offset": "3",
        "sealed_through": "-1",
        "uploaded_through": "-1",
        "segment_count": 0,
        "uploaded_segment_count": 0,
        "pending_rows": "3",
        "pending_bytes": "6",
        "total_size_bytes": "6",
        "wal_rows": "3",
        "wal_bytes": "6",
        "last_segment_cut_at": None,
    }
    local = shown["storage"]["local_storage"]
    assert int(local["sqlite_shared_total_bytes"]) > 0
    assert local["pending_tail_bytes"] == local["wal_retained_bytes"] == "6"
    assert len(shown["object_store_requests"]["by_artifact"]) == 7
    status = http.get(f"{name}/_index_status").json
    assert status["segments"] == {"total_count": 0, "uploaded_count": 0}
    assert status["exact_indexes"] == status["search_families"] == []
    assert status["routing_key_index"]["configured"] is False
    assert list(status["routing_key_lexicon"])[1:3] == ["indexed_segment_count", "lag_segments"]
    assert status["tail_index"] == {"rows": 0, "bytes": 0, "dropped_rows": 0, "building": False}


def test_n3_parts_are_what_their_own_endpoints_show(http: Wire) -> None:
    name = fresh("details")
    http.put(name, JSON, "[1]")
    shown = http.get(f"{name}/_details").json
    assert shown["index_status"] == http.get(f"{name}/_index_status").json
    for part, endpoint in (("schema", "_schema"), ("profile", "_profile")):
        own = http.get(f"{name}/{endpoint}")
        if own.status == 200:  # as far as this server has it
            assert shown[part] == own.json


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_n1_other_streams_change_nothing(http: Wire, endpoint: str) -> None:
    name, other = fresh("details"), fresh("details")
    http.put(name, JSON, "[1]")
    http.put(other, JSON)
    tag = http.get(f"{name}/{endpoint}")["etag"]
    kind = endpoint.removeprefix("_")
    assert re.fullmatch(rf'W/"{kind}:[0-9a-f]{{32}}"', tag)
    for number in range(5):
        http.post(other, JSON, f"[{number}]")
        http.get(f"{name}?offset=-1")
        answer = http.get(f"{name}/{endpoint}", {"If-None-Match": tag})
        assert (answer.status, answer["etag"], answer.body) == (304, tag, b"")
    waited = http.get(f"{name}/{endpoint}?live=long-poll&timeout_ms=1", {"If-None-Match": tag})
    assert waited.status == 304


def test_n2_every_change_wakes(http: Wire) -> None:
    name = fresh("details")
    http.put(name, JSON, "[1]")
    appended = woken(http, name, "_details", lambda: http.post(name, JSON, "[2]"))
    assert appended.json["stream"]["next_offset"] == "2"
    closed = woken(http, name, "_details", lambda: http.post(name, stream_closed="true"))
    assert closed.json["stream"]["closed"] is True
    deleted = woken(http, name, "_details", lambda: http.delete(name))
    assert (deleted.status, deleted.code) == (404, "not_found")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_n2_schema_and_profile_wake(http: Wire, endpoint: str) -> None:
    name = fresh("details")
    http.put(name, JSON)
    routing = '{"routingKey":{"jsonPointer":"/k","required":false}}'
    answer = woken(http, name, endpoint, lambda: http.post(f"{name}/_schema", JSON, routing))
    status = answer.json if endpoint == "_index_status" else answer.json["index_status"]
    assert status["routing_key_index"]["configured"] is True
    profile = '{"profile":{"kind":"state-protocol"}}'
    answer = woken(http, name, endpoint, lambda: http.post(f"{name}/_profile", JSON, profile))
    status = answer.json if endpoint == "_index_status" else answer.json["index_status"]
    assert status["profile"] == "state-protocol"


def test_n2_expiry_wakes(http: Wire) -> None:
    name = fresh("details")
    http.put(name, JSON, "[1]", stream_ttl="2")
    answer = woken(http, name, "_index_status", lambda: None)
    assert (answer.status, answer.code) == (404, "not_found")


def test_n2_sealing_wakes_and_is_counted(start_server: StartServer) -> None:
    # The first segment waits for a process to start, which may take a while.
    server = start_server("--seal-entries", "4", "--seal-interval-ms", "20", "--details-max-wait-ms", "50000")
    http = Wire(server.port)
    http.put("ev", JSON)
    for number in range(3):
        http.post("ev", JSON, f"[{number},{number}]")

    def seal() -> None:
        assert http.call("POST", "/v1/server/_seal?stream=ev").status in (200, 202)

    def done() -> Any:
        shown = http.get("ev/_details").json
        return shown if shown["stream"]["pending_rows"] == "0" else None

    answer = woken(http, "ev", "_index_status", seal, patience="50s")
    assert answer.status == 200
    assert answer.json["segments"]["uploaded_count"] >= 1
    assert answer.json["manifest"]["generation"] >= 1
    shown = eventually(done, lambda found: found is not None)
    stream, stored = shown["stream"], shown["storage"]["object_storage"]
    assert stream["uploaded_through"] == "5"
    assert stream["segment_count"] == stored["segment_object_count"] == 2
    assert int(stored["segments_bytes"]) > 0
    assert stream["last_segment_cut_at"] is not None
    assert shown["storage"]["local_storage"]["pending_tail_bytes"] == "0"
    assert shown["index_status"]["manifest"]["last_uploaded_etag"]
    assert int(stored["manifest_bytes"]) > 0
    requests = {row["artifact"]: row for row in shown["object_store_requests"]["by_artifact"]}
    assert requests["segment"]["puts"] == "2"
    assert int(requests["manifest"]["puts"]) >= 1
    assert shown["object_store_requests"]["puts"] == str(sum(int(row["puts"]) for row in requests.values()))
    assert len(http.get("ev?offset=-1").json) == 6
    http.close()
    server.restart()
    again = http.get("ev/_details").json
    assert again["stream"]["segment_count"] == 2
    generation = shown["index_status"]["manifest"]["generation"]
    assert again["index_status"]["manifest"]["generation"] >= generation
    assert len(http.get("ev?offset=-1").json) == 6
    read = http.get("ev/_details").json["object_store_requests"]["by_artifact"][0]
    assert (read["artifact"], int(read["gets"]) >= 1) == ("segment", True)
    http.close()


def test_segments_that_retention_took_are_not_counted(start_server: StartServer) -> None:
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    http.put("ev", JSON, stream_retention_bytes="40")
    for number in range(60):
        http.post("ev", JSON, f"[{number}]")

    def settled() -> Any:
        shown = http.get("ev/_details").json
        sealed = shown["stream"]["pending_rows"] == "0"
        # Whole segments of at most three entries of two bytes each, and no more of them than the bound needs.
        return shown if sealed and int(shown["stream"]["total_size_bytes"]) < 40 + 6 else None

    shown = eventually(settled, lambda found: found is not None)
    stream, stored = shown["stream"], shown["storage"]["object_storage"]
    kept = len(http.get("ev?offset=-1").json)
    assert kept < 60
    assert -(-kept // 3) <= stream["segment_count"] == stored["segment_object_count"] <= kept
    assert int(stored["segments_bytes"]) > 0
    http.close()
    server.restart()
    assert http.get("ev/_details").json["stream"]["segment_count"] == stream["segment_count"]
    http.close()


def test_a_name_that_is_used_again_is_another_stream(http: Wire) -> None:
    name = fresh("details")
    http.put(name, JSON, "[1]")
    tag = http.get(f"{name}/_index_status")["etag"]
    http.delete(name)
    http.put(name, JSON, "[1]")
    assert http.get(f"{name}/_index_status", {"If-None-Match": tag}).status == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_refusals(http: Wire, endpoint: str) -> None:
    name = fresh("details")
    assert http.get(f"{name}/{endpoint}").code == "not_found"
    http.put(name, TEXT)
    assert http.head(f"{name}/{endpoint}").status == 200
    assert http.post(f"{name}/{endpoint}", JSON, "{}").code == "method_not_allowed"
    assert http.get(f"{name}/{endpoint}?live=sse").code == "invalid_request"
    assert http.get(f"{name}/{endpoint}?timeout=x").code == "invalid_timeout"
    assert http.get(f"/v1/stream/{endpoint}").code == "not_found"


def test_a_wait_is_cut_down_and_ends_with_304(start_server: StartServer) -> None:
    server = start_server("--details-max-wait-ms", "50")
    http = Wire(server.port)
    http.put("quiet", TEXT)
    tag = http.get("quiet/_details")["etag"]
    assert http.get("quiet/_details?live=true&timeout=1h", {"If-None-Match": tag}).status == 304
    http.close()
