"""Generates the OpenAPI document from the routing table, and serves it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, cast

import msgspec
import orjson
import xxhash

from tailrace import __version__
from tailrace.auth import Action
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import if_none_match
from tailrace.routing import responses
from tailrace.routing.openapi import (
    OBJECT,
    PARAMETERS,
    STRING,
    Component,
    Json,
    Schema,
    answer,
    error_responses,
    header_components,
    headers,
    obj,
    params,
    ref,
    refusals,
)
from tailrace.routing.table import Auth, Identify, Route, route_group

_ABOUT: Final = (
    "A durable stream server: append-only logs over HTTP, fsynced before they are acknowledged. "
    "All errors have the same shape. Every path supports OPTIONS."
)
_BEARER: Final = "Required by servers with authentication. Each operation names its scope."
_TAGS: Final = {
    "streams": "Create, append, read, describe, delete, list.",
    "registry": "The schema, search configuration and profile of a stream.",
    "search": "Searches and aggregates over the records of a stream.",
    "inspection": "Details, index status and routing keys of one stream.",
    "touch": "Waiting for changes of keys that a client depends on.",
    "traces": "Ingestion of OpenTelemetry spans.",
    "subscriptions": "Webhooks and pull-wake.",
    "server": "Health, metrics, memory, sealing.",
    "identities": "API keys and revoked tokens.",
    "pipeline": "Plan and publication of index files, merges and compactions.",
    "watch": "Documents in collections, and live queries.",
    "replication": "Replication with clients that store documents, such as RxDB.",
    "hub": "Actors that discover each other, send, publish and have mailboxes.",
}
_SECURITY_SCHEMES: Final[Json] = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT or API key",
        "description": _BEARER,
    },
    "wake": {"type": "http", "scheme": "bearer", "description": "The token of a wake."},
}
# Errors that any request may get, and those of routes that require a token: 429 is the rate of an identity.
_ERRORS: Final = (400, 408, 413, 500, 503)
_TOKEN_ERRORS: Final = (401, 403, 429)
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_PREFLIGHT_HEADERS: Final = (
    *("Access-Control-Allow-Methods", "Access-Control-Allow-Headers", "Access-Control-Max-Age"),
)


def build(routes: Iterable[Route]) -> Json:
    """The whole document."""
    by_path: dict[str, list[Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, []).append(route)
    schemas: Json = {}
    paths = {path: _resolve(_path_item(path, rows), schemas) for path, rows in by_path.items()}
    errors = _resolve(error_responses(), schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tailrace",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag, "description": about} for tag, about in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "parameters": PARAMETERS,
            "headers": header_components(),
            "responses": errors,
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _path_item(path: str, routes: list[Route]) -> Json:
    item: Json = {}
    if names := _PATH_PARAMETER.findall(path):
        item["parameters"] = params(*names)
    methods = {route.method for route in routes}
    for route in routes:
        item[route.method.lower()] = operation = _operation(route)
        if route.method == "GET" and "HEAD" not in methods:
            item["head"] = _without_body(operation)
    item["options"] = _preflight(routes[0])
    return item


def _operation(route: Route) -> Json:
    security = _security(route)
    statuses = {*_ERRORS, *route.errors, *(_TOKEN_ERRORS if security else ())}
    shown: Json = {
        "operationId": route.operation,
        "tags": [route.tag],
        "summary": route.summary,
        "responses": refusals(statuses) | {str(status): one for status, one in route.responses.items()},
    }
    if route.description:
        shown["description"] = route.description
    if route.parameters:
        shown["parameters"] = list(route.parameters)
    if route.body is not None:
        shown["requestBody"] = route.body
    shown["security"] = security
    return shown


def _security(route: Route) -> list[dict[str, list[str]]]:
    if route.action is Action.PUBLIC:
        return []
    if route.action is Action.ANSWER_WAKE:
        return [{"wake": []}]
    scope = route.action.required_scopes.split(" ")[0]
    # A server without authentication requires nothing.
    return [{"bearer": [scope] if scope else []}, {}]


def _without_body(get: Json) -> Json:
    """The HEAD operation of a GET: the same statuses and headers, no body."""
    bare: Json = {}
    for status, given in cast("dict[str, Json]", get["responses"]).items():
        reference = given.get("$ref")
        if reference is None:
            bare[status] = {key: value for key, value in given.items() if key != "content"}
        else:
            bare[status] = ref("responses", f"Bare{str(reference).rpartition('/')[2]}")
    identifier, summary = f"{get['operationId']}Head", f"{get['summary']}, headers only"
    return {**get, "operationId": identifier, "summary": summary, "responses": bare}


def _preflight(route: Route) -> Json:
    allowed = answer("The allowed methods and headers.", head=headers(always=_PREFLIGHT_HEADERS))
    return {
        "operationId": f"{route.operation}Options",
        "tags": [route.tag],
        "summary": "CORS preflight request of browsers",
        "responses": refusals(_ERRORS) | {"204": allowed},
        "security": list[object](),
    }


def _resolve(tree: Schema, schemas: Json) -> Schema:
    """Replace types and components by references, and add their schemas."""
    if tree is None or isinstance(tree, str | int | float | bool):
        return tree
    if isinstance(tree, Mapping):
        return {key: _resolve(value, schemas) for key, value in cast("Mapping[str, Schema]", tree).items()}
    if isinstance(tree, list | tuple):
        return [_resolve(value, schemas) for value in cast("list[Schema]", tree)]
    if isinstance(tree, Component):
        if tree.name not in schemas:
            schemas[tree.name] = {}  # a schema may refer to itself
            schemas[tree.name] = _resolve(tree.schema, schemas)
        return ref("schemas", tree.name)
    (shown,), named = msgspec.json.schema_components([tree], ref_template="#/components/schemas/{name}")
    for name, schema in named.items():
        assert schemas.setdefault(name, schema) == schema, f"two types are called {name}"
    return shown


class OpenApiRoutes:
    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes = routes
        self._rendered: tuple[bytes, bytes] | None = None  # ETag and body, built by the first request

    def show(self, exchange: Exchange, _: Identify) -> None:
        if self._rendered is None:
            document = orjson.dumps(build(self._routes))
            self._rendered = b'"%b"' % xxhash.xxh3_128_hexdigest(document).encode(), document
        tag, document = self._rendered
        head = b"Cache-Control: no-cache\r\nETag: %b\r\n" % tag
        known = exchange.headers.get(b"if-none-match")
        if known is not None and if_none_match(known.decode("latin-1"), tag.decode()):
            exchange.respond(304, head)
        else:
            exchange.respond(200, responses.JSON_TYPE + head, document)


_TAGGED: Final = headers(always=("ETag",))
ROUTES: Final = route_group(
    "server",
    Route(
        *("GET", "/openapi.json", Action.PUBLIC, OpenApiRoutes.show, "readDescription"),
        "The OpenAPI document",
        {
            200: answer("OpenAPI 3.1.", obj({"openapi": STRING, "paths": OBJECT}), _TAGGED),
            304: answer("Not modified.", head=_TAGGED),
        },
        parameters=params("if-none-match"),
        auth=Auth.BY_HANDLER,
    ),
)
