"""The description of the server, ready to ask and to judge answers by."""

from __future__ import annotations

from typing import Any

import orjson
import requests
import schemathesis
from schemathesis import checks
from schemathesis.core.result import Ok

from support.wire import Wire
from tailrace.server.openapi import build
from tailrace.server.routes import ROUTES

JSON = "application/json"
APPEND = "POST /v1/stream/{name}"
WAIT_MS = 20
# A server whose waits are short.
SHORT_WAITS = {
    f"TAILRACE_{name}_MS": str(WAIT_MS)
    for name in ("LONG_POLL_DEFAULT", "LONG_POLL_MAX", "DETAILS_MAX_WAIT", "SSE_ROTATION")
}
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]

DOCUMENT: dict[str, Any] = orjson.loads(orjson.dumps(build(ROUTES)))
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)}


class Described:
    """Sends requests and holds every answer against the description."""

    def __init__(self, port: int) -> None:
        self._base_url = f"http://127.0.0.1:{port}"
        self._session = requests.Session()
        self._session.trust_env = False

    def close(self) -> None:
        self._session.close()

    def send(self, case: Any) -> Any:
        answer = case.call(base_url=self._base_url, session=self._session, timeout=30)
        told = CHECKS
        if case.operation.label == APPEND and answer.status_code == 200 and not answer.content:
            # A description cannot say that a status has a body now and then.
            told = [checks.not_a_server_error, checks.response_headers_conformance]
        case.validate_response(answer, checks=told)
        return answer

    def call(self, label: str, body: Any = None, headers: dict[str, str] | None = None, **values: Any) -> Any:
        """One request: what the path has goes there, the rest into the query."""
        operation = OPERATIONS[label]
        path = {name: value for name, value in values.items() if f"{{{name}}}" in operation.path}
        query = {name: value for name, value in values.items() if name not in path}
        given: dict[str, Any] = {} if body is None else {"body": body, "media_type": JSON}
        return self.send(
            operation.Case(path_parameters=path, query=query, headers=dict(headers or {}), **given)
        )


def example_of(label: str) -> Any:
    """The request that the description shows."""
    method, path = label.split(" ")
    return DOCUMENT["paths"][path][method.lower()]["requestBody"]["content"][JSON]["example"]


def prepare(http: Wire, base: str) -> list[str]:
    """Streams of every kind with these names, and a subscription. The last name is of none."""
    at = "2026-01-01T10:00:00Z"
    records = orjson.dumps(
        [{"at": at, "service": "a", "status": 200}, {"at": at, "service": "b", "status": 500}]
    )
    update = orjson.dumps(example_of("POST /v1/stream/{name}/_schema"))
    profile = orjson.dumps(example_of("POST /v1/stream/{name}/_profile"))
    change = {"type": "orders", "key": "1", "value": {"a": 1}, "headers": {"operation": "insert"}}
    for name in ("json", "plain", "state", "closed", "wakes", "spans"):
        assert http.put(f"{base}/{name}", "text/plain" if name == "plain" else JSON).status == 201
    assert http.post(f"{base}/json/_schema", JSON, update).status == 200
    assert http.post(f"{base}/json", JSON, records).status == 204
    assert http.post(f"{base}/plain", "text/plain", "a line\n").status == 204
    assert http.post(f"{base}/state/_profile", JSON, profile).status == 200
    assert http.post(f"{base}/state", JSON, orjson.dumps(change)).status == 204
    assert http.post(f"{base}/spans/_profile", JSON, '{"profile":{"kind":"otel-traces"}}').status == 200
    assert http.post(f"{base}/closed", JSON, "[1]", Stream_Closed="true").status == 204
    source = f"/v1/stream/{base}/plain"
    assert http.put(f"{base}/fork", Stream_Forked_From=source, Stream_TTL="1h").status == 201
    subscription = {"type": "pull-wake", "streams": [f"{base}/json"], "wake_stream": f"{base}/wakes"}
    made = http.put(f"/v1/stream/__ds/subscriptions/{base}", JSON, orjson.dumps(subscription))
    assert made.status == 201
    return [f"{base}/{name}" for name in ("json", "plain", "state", "closed", "fork", "spans", "none")]
