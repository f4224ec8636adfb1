"""`_profile` on a real server: installation, appends by profile, routing keys, restarts and secrets."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from conftest import StartServer
from support.wire import Answer, Wire, fresh

JSON = "application/json"
SECRET = "hunter2-planted-secret"
INTERVAL = {"metric": "cpu", "unit": "ms", "windowStart": 1000, "windowEnd": 2000, "count": 1, "sum": 2}
INSERT = {"type": "todos", "key": "1", "value": {"a": 1.0}, "headers": {"operation": "insert"}}


def profile(http: Wire, name: str, kind: str, **config: Any) -> Answer:
    return http.post(f"{name}/_profile", JSON, json.dumps({"profile": {"kind": kind, **config}}))


def created(http: Wire, kind: str = "generic", **config: Any) -> str:
    name = fresh("profile")
    assert http.put(name, JSON).status == 201
    if kind != "generic":
        assert profile(http, name, kind, **config).status == 200
    return name


def message(answer: Answer) -> tuple[int, str, str]:
    error = answer.json["error"]
    return answer.status, error["code"], error["message"]


def refused(text: str) -> tuple[int, str, str]:
    return 400, "invalid_request", text


def test_every_stream_has_a_profile(http: Wire) -> None:
    name = created(http)
    answer = http.get(f"{name}/_profile")
    assert answer.json == {"apiVersion": "durable.streams/profile/v1", "profile": {"kind": "generic"}}
    assert answer["cache-control"] == "no-store"
    assert http.get(f"{fresh()}/_profile").status == 404
    assert http.delete(f"{name}/_profile").code == "method_not_allowed"
    assert profile(http, fresh(), "generic").status == 404


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"profile": {"kind": "logs"}},
            "profile.kind must be evlog|generic|metrics|otel-traces|state-protocol",
        ),
        ({"profile": []}, "profile must be an object"),
        ({}, "profile must be an object"),
        ({"apiVersion": "v2", "profile": {"kind": "generic"}}, "invalid profile apiVersion"),
        ({"profile": {"kind": "generic"}, "schema": {}}, "profileUpdate.schema is not supported"),
        ({"profile": {"kind": "generic", "touch": {}}}, "profile.touch is not supported"),
        (
            {"profile": {"kind": "evlog", "redactKeys": ["x"] * 65}},
            "profile.redactKeys must have at most 64 items",
        ),
        ({"profile": {"kind": "evlog", "redactKeys": [1]}}, "profile.redactKeys[0] must be a string"),
        (
            {"profile": {"kind": "evlog", "correlation": {"requestIdFields": ["traceId"]}}},
            "profile.correlation.requestIdFields[0] must be a path into the event or its context",
        ),
        (
            {"profile": {"kind": "state-protocol", "touch": {"memory": {"filterPow2": 31}}}},
            "profile.touch.memory.filterPow2: expected `int` <= 30",
        ),
    ],
)
def test_profiles_are_refused_without_effect(http: Wire, body: Any, text: str) -> None:
    name = created(http)
    assert message(http.post(f"{name}/_profile", JSON, json.dumps(body))) == refused(text)
    assert http.get(f"{name}/_profile").json["profile"] == {"kind": "generic"}


def test_profiles_need_a_json_stream(http: Wire) -> None:
    name = fresh("profile")
    http.put(name, "text/plain")
    for kind in ("evlog", "metrics", "state-protocol"):
        text = f"{kind} profile requires application/json stream content-type"
        assert message(profile(http, name, kind)) == refused(text)
    assert profile(http, name, "generic").status == 200


def test_events_are_stored_in_their_canonical_form_with_keys(http: Wire) -> None:
    name = created(http, "evlog", redactKeys=["Card"])
    assert http.get(f"{name}/_profile").json["profile"] == {"kind": "evlog", "redactKeys": ["card"]}
    events = [{"requestId": "r1", "status": "500", "card": 1}, {"traceId": "t1"}, {}]
    assert http.post(name, JSON, json.dumps(events)).status == 204
    stored = http.get(f"{name}?offset=-1").json
    assert [(one["requestId"], one["level"], one["status"]) for one in stored] == [
        ("r1", "error", 500),
        (None, "info", None),
        (None, "info", None),
    ]
    assert stored[0]["context"] == {"card": "[REDACTED]"}
    assert len(http.get(f"{name}/pk/r1?offset=-1").json) == 1
    assert len(http.get(f"{name}/pk/t1?offset=-1").json) == 1
    assert http.post(name, JSON, '{"requestId":"r2"}', stream_key="own").status == 204
    assert http.get(f"{name}/pk/own?offset=-1").json[0]["requestId"] == "r2"
    assert http.get(f"{name}/pk/r2?offset=-1").json == []


def test_one_bad_record_refuses_the_batch(http: Wire) -> None:
    for kind, good, text in (
        ("evlog", {}, "evlog record must be an object"),
        ("metrics", INTERVAL, "metrics record must be an object"),
        ("state-protocol", INSERT, "state-protocol records must be JSON objects"),
    ):
        name = created(http, kind)
        assert message(http.post(name, JSON, json.dumps([good, 5]))) == refused(f"record 1: {text}")
        assert message(http.post(name, JSON, "5")) == refused(text)
        assert http.get(f"{name}?offset=-1").json == []


def test_changes_are_stored_byte_for_byte(http: Wire) -> None:
    name = created(http, "state-protocol")
    raw = '{ "type":"t", "key":"1",  "value":1.0, "headers":{"operation":"insert"} }'
    assert http.post(name, JSON, raw).status == 204
    assert http.get(f"{name}?offset=-1").body == f"[{raw}]".encode()
    assert http.get(f"{name}/_schema").json["currentVersion"] == 0


def test_the_canonical_registry_comes_with_the_profile(http: Wire) -> None:
    name = created(http, "evlog")
    registry = http.get(f"{name}/_schema").json
    assert (registry["currentVersion"], registry["boundaries"]) == (1, [{"offset": 0, "version": 1}])
    assert registry["search"]["profile"] == "evlog"
    assert "routingKey" not in registry
    update = {"search": {"fields": {"level": registry["search"]["fields"]["level"]}}}
    assert http.post(f"{name}/_schema", JSON, json.dumps(update)).status == 200
    edited = http.get(f"{name}/_schema").body
    assert profile(http, name, "evlog", redactKeys=["x"]).status == 200
    assert profile(http, name, "evlog", redactKeys=["x"]).status == 200
    assert http.get(f"{name}/_schema").body == edited
    assert profile(http, name, "generic").json["profile"] == {"kind": "generic"}
    assert http.get(f"{name}/_schema").body == edited
    assert message(http.post(name, JSON, '{"free":1}'))[0] == 400  # the schema stays, and is closed


def test_metrics_may_come_to_a_stream_with_data_and_events_may_not(http: Wire) -> None:
    name = created(http)
    http.post(name, JSON, "[1,2]")
    assert message(profile(http, name, "evlog")) == refused(
        "evlog profile must be installed before appending data; with ?adopt=true (--adopt) the "
        "entries that are there are checked, and the profile holds from the first one on"
    )
    assert profile(http, name, "metrics").status == 200
    registry = http.get(f"{name}/_schema").json
    assert registry["boundaries"] == [{"offset": 2, "version": 1}]
    assert registry["routingKey"] == {"jsonPointer": "/seriesKey", "required": True}
    assert http.post(name, JSON, json.dumps(INTERVAL)).status == 204
    key = "summary%7Cdelta%7Ccpu%7Cms%7C%7C%7C"
    assert http.get(f"{name}/pk/{key}?offset=-1").json[0]["avg"] == 2
    assert http.post(name, JSON, json.dumps(INTERVAL), stream_key="k").code == "key_not_allowed"


def test_a_user_schema_keeps_profiles_with_their_own_away(http: Wire) -> None:
    name = created(http)
    assert http.post(f"{name}/_schema", JSON, '{"schema":{"type":"object"}}').status == 200
    for kind in ("evlog", "metrics"):
        text = f"{kind} profile requires a stream without a user schema"
        assert message(profile(http, name, kind)) == refused(text)
    assert profile(http, name, "state-protocol").status == 200


def test_records_that_grow_beyond_a_body_are_refused(start_server: StartServer) -> None:
    with closing(Wire(start_server("--append-body-bytes", "10MiB").port)) as http:
        name = created(http, "evlog")
        answer = http.post(name, JSON, "[" + ",".join(["{}"] * 60_000) + "]")
        assert answer.code == "payload_too_large"


def test_pr3_no_file_holds_a_secret_and_profiles_outlive_restarts(start_server: StartServer) -> None:
    server = start_server("--log-level", "debug")
    http = Wire(server.port)
    name = created(http, "evlog", redactKeys=["card"])
    shown = http.get(f"{name}/_profile").body, http.get(f"{name}/_schema").body
    events = [{"user": {"card": SECRET}, "items": [{"Token": SECRET}], "message": "paid"}] * 3
    assert http.post(name, JSON, json.dumps(events)).status == 204
    assert http.post(name, JSON, json.dumps({"password": {"deep": [SECRET]}, "level": 5})).status == 204
    http.close()
    server.stop()
    assert SECRET not in server.log
    for path in server.data_dir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    server.start()
    assert (http.get(f"{name}/_profile").body, http.get(f"{name}/_schema").body) == shown
    assert http.post(name, JSON, '{"card":1}').status == 204
    assert http.get(f"{name}?offset=-1").json[-1]["context"] == {"card": "[REDACTED]"}
    http.close()
