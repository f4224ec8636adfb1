"""The description is valid, and has the routes that the server has: no more, no fewer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openapi_spec_validator import validate

from conftest import StartServer
from support.wire import Wire
from tailrace.auth import create_token
from tailrace.common.errors import ERROR_STATUS
from tailrace.protocol.http_headers import RESPONSE_HEADERS
from tailrace.protocol.stream_names import RESERVED_LAST_SEGMENTS
from tailrace.server.openapi import build
from tailrace.server.routes import ROUTES

DOCUMENT: dict[str, Any] = orjson.loads(orjson.dumps(build(ROUTES)))
PATHS: dict[str, Any] = DOCUMENT["paths"]
SECRET = "a secret that is long enough for the server to accept it"
METHODS = frozenset({"get", "head", "put", "post", "delete", "options", "patch"})


def filled(path: str) -> str:
    path = path.replace("{db}", "default").replace("{collection}", "described")
    path = path.replace("{path}", "described/one")
    return path.replace("{name}", "described").replace("{id}", "described").replace("{key}", "k")


def test_it_is_a_valid_description() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.")
    validate(DOCUMENT)


def test_everybody_may_read_it(http: Wire, start_server: StartServer) -> None:
    answer = http.get("/openapi.json")
    assert answer.status == 200
    assert answer.json == DOCUMENT
    again = http.get("/openapi.json", {"If-None-Match": answer["ETag"]})
    assert (again.status, again.body) == (304, b"")
    assert http.call("POST", "/openapi.json").status == 405
    guarded = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    assert guarded.status("/v1/streams") == 401
    assert guarded.status("/openapi.json") == 200


def test_each_operation_asks_for_what_it_says(start_server: StartServer) -> None:
    """Without a token, and with one that allows nothing: the refusal names the scope."""
    guarded = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    nobody = Wire(guarded.port)
    powerless = Wire(guarded.port, bearer=create_token(SECRET, sub="x", scopes=()))
    for path, item in PATHS.items():
        for method in METHODS & set(item):
            security: list[dict[str, list[str]]] = item[method]["security"]
            where = (method.upper(), filled(path))
            assert (nobody.call(*where).status == 401) == bool(security), where
            if security and (scopes := security[0].get("bearer")):
                answer = powerless.call(*where)
                assert answer.status == 403, where
                assert answer["WWW-Authenticate"].endswith(f'scope="{scopes[0]}"'), where
    nobody.close()
    powerless.close()


@pytest.mark.parametrize("path", list(PATHS))
def test_each_path_takes_the_methods_it_is_described_with(path: str, http: Wire) -> None:
    described = {method.upper() for method in PATHS[path] if method in METHODS}
    answer = http.call("POST" if "PATCH" in described else "PATCH", filled(path))
    assert answer.status == 405
    assert {method.strip() for method in answer["Allow"].split(",")} == described


def test_each_route_is_described() -> None:
    described = {(path, method.upper()) for path, item in PATHS.items() for method in METHODS & set(item)}
    routes = {(route.path, method) for route in ROUTES for method in (*route.methods, "OPTIONS")}
    assert described == routes


def test_what_is_not_described_is_not_there(http: Wire) -> None:
    http.put("/v1/stream/described")
    for resource in RESERVED_LAST_SEGMENTS:
        path = f"/v1/stream/{{name}}/{resource}"
        if path not in PATHS:
            assert http.get(filled(path)).status == 404, path


def test_each_error_and_each_header_is_described() -> None:
    responses = DOCUMENT["components"]["responses"]
    assert {int(name.removeprefix("Error")) for name in responses if name.startswith("Error")} == set(
        ERROR_STATUS.values()
    )
    described = set(DOCUMENT["components"]["headers"])
    general = {"Content-Type", "Content-Encoding", "Vary", "Server-Timing", "X-Cache"}
    assert set(RESPONSE_HEADERS) - general <= described


def test_operations_have_names_of_their_own() -> None:
    names = [item[method]["operationId"] for item in PATHS.values() for method in item if method in METHODS]
    assert len(names) == len(set(names))
