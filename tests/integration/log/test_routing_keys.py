"""`_routing_keys` on a real server, and how details follow the documents of a stream."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from conftest import StartServer
from support.calls import eventually
from support.sealing import SEALING_ENV
from support.wire import Wire, fresh

JSON, TEXT = "application/json", "text/plain"
ROUTING = {"routingKey": {"jsonPointer": "/user", "required": False}}
KEYS = ["a", "B", "á", "😀", "A", "b", "ab", *(f"user{number:03}" for number in range(30))]


def walk(http: Wire, name: str, limit: int) -> list[str]:
    found: list[str] = []
    path = f"{name}/_routing_keys?limit={limit}"
    while True:
        page = http.get(path).json
        assert page["coverage"]["complete"] is True
        found += page["keys"]
        if page["next_after"] is None:
            return found
        assert page["next_after"] == page["keys"][-1]
        path = f"{name}/_routing_keys?limit={limit}&after={quote(page['next_after'])}"


def test_k1_keys_of_records_wherever_they_are(start_server: StartServer) -> None:
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    http.put("ev", JSON)
    assert http.post("ev/_schema", JSON, json.dumps(ROUTING)).status == 200
    expected: set[str] = set()
    for key in [*KEYS, *KEYS[:5]]:
        assert http.post("ev", JSON, json.dumps([{"user": key}, {"other": 1}])).status in (200, 204)
        expected.add(key)
    ordered = sorted(expected, key=str.encode)
    for limit in (1, 7, 500):
        assert walk(http, "ev", limit) == ordered

    def sealed() -> Any:
        return http.get("ev/_routing_keys").json["coverage"]

    coverage = eventually(sealed, lambda found: found["scanned_wal_rows"] == 0)
    assert coverage["scanned_uploaded_segments"] > 1
    for limit in (3, 500):
        assert walk(http, "ev", limit) == ordered
    http.close()
    server.restart()
    assert walk(http, "ev", 100) == ordered
    http.close()


def test_the_shape_of_a_page(http: Wire) -> None:
    name = fresh("keys")
    http.put(name, JSON)
    assert http.post(f"{name}/_schema", JSON, json.dumps(ROUTING)).status == 200
    http.post(name, JSON, '[{"user":"k2"},{"user":"k1"},{}]')
    answer = http.get(f"{name}/_routing_keys?limit=1")
    assert answer["cache-control"] == "no-store"
    page = answer.json
    assert page.pop("took_ms") >= 0
    timing = page.pop("timing")
    assert list(timing) == [
        "lexicon_run_get_ms",
        "lexicon_decode_ms",
        "lexicon_enumerate_ms",
        "lexicon_merge_ms",
        "fallback_scan_ms",
        "fallback_segment_get_ms",
        "fallback_wal_scan_ms",
        "lexicon_runs_loaded",
    ]
    assert page == {
        "stream": name,
        "source": {"kind": "routing_key", "name": ""},
        "coverage": {
            "complete": True,
            "indexed_segments": 0,
            "scanned_uploaded_segments": 0,
            "scanned_local_segments": 0,
            "scanned_wal_rows": 3,
            "possible_missing_uploaded_segments": 0,
            "possible_missing_local_segments": 0,
        },
        "keys": ["k1"],
        "next_after": "k1",
    }
    assert http.get(f"{name}/_routing_keys?after=k1").json["keys"] == ["k2"]
    assert http.get(f"{name}/_routing_keys?after=zzz").json["keys"] == []


@pytest.mark.parametrize("limit", ["0", "501", "-1", "x", "", "1.5"])
def test_limits_that_are_none(http: Wire, limit: str) -> None:
    name = fresh("keys")
    http.put(name, JSON)
    answer = http.get(f"{name}/_routing_keys?limit={limit}")
    assert (answer.status, answer.json["error"]["message"]) == (400, "limit must be 1 to 500")


def test_refusals(http: Wire) -> None:
    name = fresh("keys")
    assert http.get(f"{name}/_routing_keys").code == "not_found"
    http.put(name, TEXT)
    answer = http.get(f"{name}/_routing_keys")
    assert (answer.status, answer.json["error"]["message"]) == (400, "routing key not configured")
    assert http.post(f"{name}/_routing_keys", JSON, "{}").code == "method_not_allowed"


def test_n3_details_repeat_the_documents(http: Wire) -> None:
    name = fresh("keys")
    http.put(name, JSON)
    plain = http.get(f"{name}/_details")
    assert plain.json["schema"] == http.get(f"{name}/_schema").json
    fields = {"status": {"kind": "integer", "bindings": [{"version": 1, "jsonPointer": "/status"}]}}
    fields["status"] |= {"exact": True, "column": True}
    body = {"schema": {"type": "object"}, **ROUTING, "search": {"fields": fields}}
    assert http.post(f"{name}/_schema", JSON, json.dumps(body)).status == 200
    assert http.get(f"{name}/_details", {"If-None-Match": plain["etag"]}).status == 200
    shown = http.get(f"{name}/_details").json
    assert shown["schema"] == http.get(f"{name}/_schema").json
    assert shown["profile"] == http.get(f"{name}/_profile").json
    assert int(shown["storage"]["object_storage"]["schema_registry_bytes"]) > 0
    status = shown["index_status"]
    assert status["routing_key_lexicon"]["configured"] is True
    assert [(row["name"], row["kind"]) for row in status["exact_indexes"]] == [("status", "integer")]
    assert [(row["family"], row["fields"]) for row in status["search_families"]] == [("col", ["status"])]
    assert status["desired_index_plan_generation"] == 1
