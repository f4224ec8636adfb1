"""The touch API on a real server: cursors, waits, templates, restarts and shutdown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conftest import StartServer
from support.calls import eventually
from support.wire import Answer, Connection, Wire, fresh, request_bytes
from tailrace.schema.profiles import touch_keys

JSON = "application/json"
ENTITY = "public.todos"
TEMPLATE = touch_keys.template_id(ENTITY, ["tenant"])
NAMED = [touch_keys.format_key(TEMPLATE)]
QUICK = (
    "--request-ms",
    "1000",
    "--long-poll-max-ms",
    "1000",
    "--long-poll-default-ms",
    "1000",
    "--details-max-wait-ms",
    "1000",
)
DECLARED = {"entity": ENTITY, "fields": [{"name": "tenant", "encoding": "string"}]}


def key(tenant: str) -> str:
    return touch_keys.format_key(touch_keys.watch_key(TEMPLATE, [tenant]))


def stream(http: Wire, **config: Any) -> str:
    name = fresh("touch")
    http.put(name, JSON)
    switch(http, name, enabled=True, **config)
    return name


def switch(http: Wire, name: str, **touch: Any) -> None:
    body = {"profile": {"kind": "state-protocol", "touch": touch}}
    assert http.post(f"{name}/_profile", JSON, json.dumps(body)).status == 200


def change(http: Wire, name: str, tenant: str, count: int = 1) -> None:
    record = {"type": ENTITY, "key": "1", "value": {"tenant": tenant}, "headers": {"operation": "insert"}}
    assert http.post(name, JSON, json.dumps([record] * count)).status == 204


def activate(http: Wire, name: str) -> Any:
    answer = http.post(f"{name}/touch/templates/activate", JSON, json.dumps({"templates": [DECLARED]}))
    assert answer.status == 200, answer.body
    return answer.json


def meta(http: Wire, name: str, query: str = "?settle=flush") -> Any:
    answer = http.get(f"{name}/touch/meta{query}")
    assert answer.status == 200, answer.body
    return answer.json


def wait_bytes(name: str, **body: Any) -> bytes:
    body = {"cursor": "now", "keys": [key("t1")], "timeoutMs": 0, **body}
    headers = {"Content-Type": JSON}
    return request_bytes("POST", f"/v1/stream/{name}/touch/wait", headers, json.dumps(body).encode())


def wait(http: Wire, name: str, **body: Any) -> Answer:
    with http.connect() as connection:
        connection.send(wait_bytes(name, **body))
        return connection.read_answer("POST")


def waiting(http: Wire, name: str, connection: Connection, **body: Any) -> None:
    """Begins a wait and returns when the server has it."""
    before = meta(http, name, "")["activeWaiters"]
    connection.send(wait_bytes(name, **{"timeoutMs": 60_000, **body}))
    eventually(lambda: meta(http, name, "")["activeWaiters"], lambda count: count > before)


def test_without_touch_there_is_nothing(http: Wire) -> None:
    name = fresh("touch")
    http.put(name, JSON)
    for path in ("meta", "wait", "templates/activate"):
        answer = (
            http.get(f"{name}/touch/{path}")
            if path == "meta"
            else http.post(f"{name}/touch/{path}", JSON, "{}")
        )
        assert (answer.status, answer.json["error"]["message"]) == (404, "touch not enabled")
    assert http.get(f"{name}/touch/other").status == 404
    switch(http, name, enabled=False)
    assert http.get(f"{name}/touch/meta").status == 404
    switch(http, name, enabled=True)
    assert http.get(f"{name}/touch/meta").status == 200
    assert http.get(f"{name}/touch/wait").status == 405
    assert http.get(f"{fresh()}/touch/meta").status == 404


def test_t2_t3_a_change_is_settled_and_reported_to_the_first_wait(http: Wire) -> None:
    name = stream(http)
    first = meta(http, name, "")
    activated = activate(http, name)
    assert activated["denied"] == []
    assert activated["activated"][0]["templateId"] == NAMED[0]
    assert activated["limits"] == {"maxActiveTemplatesPerStream": 2048, "maxActiveTemplatesPerEntity": 256}
    change(http, name, "t1", 3)
    settled = meta(http, name)
    assert (settled["settled"], settled["generation"], settled["lagSourceOffsets"]) == (True, 3, 0)
    assert settled["cursor"] == f"{first['epoch']}:3"
    assert (settled["mode"], settled["touchMode"], settled["activeTemplates"]) == ("memory", "fine", 1)
    answer = wait(http, name, cursor=first["cursor"]).json
    assert (answer["touched"], answer["cursor"], answer["effectiveWaitKind"]) == (
        True,
        settled["cursor"],
        "fineKey",
    )
    assert answer["bucketMaxSourceOffsetSeq"] == "2"
    assert wait(http, name, cursor=answer["cursor"]).json["touched"] is False
    assert wait(http, name, cursor=first["cursor"], keys=[key("t2")], exact=True).json["touched"] is False
    by_id = wait(http, name, cursor=first["cursor"], keys=[], keyIds=[int(key("t1"), 16) & 0xFFFFFFFF]).json
    assert by_id["touched"] is True
    coarse = wait(http, name, cursor=first["cursor"], interestMode="coarse", templateIdsUsed=NAMED).json
    assert (coarse["touched"], coarse["effectiveWaitKind"]) == (True, "tableKey")


def test_t7_a_wait_is_woken_by_its_key_and_by_nothing_else(http: Wire) -> None:
    name = stream(http, touchCoalesceWindowMs=1)
    activate(http, name)
    with http.connect() as connection:
        waiting(http, name, connection, exact=True)
        change(http, name, "t2")
        assert meta(http, name)["activeWaiters"] == 1
        change(http, name, "t1")
        answer = connection.read_answer("POST").json
    assert answer["touched"] is True
    assert answer["cursor"].endswith(":2")


def test_t5_waits_are_exempt_from_the_limit_of_requests(start_server: StartServer) -> None:
    http = Wire(start_server(*QUICK).port)
    name = stream(http)
    answer = wait(http, name, timeoutMs=1500)
    assert (answer.status, answer.json["touched"]) == (200, False)
    http.close()


@pytest.mark.parametrize("kill", [False, True])
def test_t4_cursors_and_templates_outlive_a_restart(start_server: StartServer, kill: bool) -> None:
    process = start_server("--touch-replay-max", "5")
    http = Wire(process.port)
    name = stream(http)
    change(http, name, "t0", 3)
    activate(http, name)
    cursor = meta(http, name)["cursor"]
    change(http, name, "t2", 2)
    http.close()
    process.restart(kill=kill)
    assert wait(http, name, cursor=cursor, exact=True, templateIdsUsed=NAMED).json["touched"] is False
    change(http, name, "t1")
    assert wait(http, name, cursor=cursor, exact=True).json["touched"] is True
    change(http, name, "t2", 3)
    http.close()
    process.restart(kill=kill)
    stale = wait(http, name, cursor=cursor).json
    assert (stale["stale"], stale["error"]["code"], stale["generation"]) == (True, "stale", 9)
    assert wait(http, name, cursor=stale["cursor"]).json["touched"] is False
    http.close()


def test_what_is_unknown_is_stale(http: Wire) -> None:
    name = stream(http, touchCoalesceWindowMs=1)
    cursor = meta(http, name)["cursor"]
    unknown = wait(http, name, cursor=cursor, templateIdsUsed=["00" * 8]).json
    assert unknown["stale"] is True
    assert "0000000000000000" in unknown["error"]["message"]
    other = wait(http, name, cursor="0123456789abcdef:0").json
    assert other["error"]["message"] == "cursor epoch mismatch; rerun/re-subscribe and start from cursor"
    assert wait(http, name, cursor=cursor.replace(":0", ":7")).json["stale"] is True
    switch(http, name, enabled=False)
    switch(http, name, enabled=True)
    assert wait(http, name, cursor=cursor).json["stale"] is True


def test_templates_can_be_declared_by_a_wait(http: Wire) -> None:
    name = stream(http)
    cursor = meta(http, name)["cursor"]
    declared = {"declareTemplates": [DECLARED], "templateIdsUsed": NAMED, "inactivityTtlMs": 60_000}
    assert wait(http, name, cursor=cursor, **declared).json["touched"] is False
    change(http, name, "t1")
    assert wait(http, name, cursor=cursor).json["touched"] is True
    assert wait(http, name, inactivityTtlMs=0).status == 400


def test_waits_end_with_the_stream_the_profile_and_the_server(start_server: StartServer) -> None:
    process = start_server("--touch-max-waiters", "1")
    http = Wire(process.port)
    name = stream(http)
    with http.connect() as connection:
        waiting(http, name, connection)
        refused = wait(http, name)
        assert (refused.code, "retry-after" in refused) == ("overloaded", True)
        assert http.delete(name).status == 204
        assert connection.read_answer("POST").status == 404
    name = stream(http)
    with http.connect() as connection:
        waiting(http, name, connection)
        switch(http, name, enabled=True, touchCoalesceWindowMs=5)
        assert connection.read_answer("POST").json["touched"] is True
    with http.connect() as connection:
        waiting(http, name, connection)
        http.close()
        process.stop()
        assert connection.read_answer("POST").code == "unavailable"


def test_a_client_that_leaves_is_forgotten(http: Wire) -> None:
    name = stream(http)
    with http.connect() as connection:
        waiting(http, name, connection)
    eventually(lambda: meta(http, name, "")["activeWaiters"], lambda count: count == 0)


@pytest.mark.parametrize("query", ["?settle=all", "?settle=flush&timeoutMs=120001", "?timeoutMs=-1"])
def test_meta_is_refused(http: Wire, query: str) -> None:
    assert http.get(f"{stream(http)}/touch/meta{query}").code == "invalid_request"
