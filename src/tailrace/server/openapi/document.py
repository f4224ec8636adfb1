"""The parts put together, and the route that shows them."""

from __future__ import annotations

from functools import cache
from typing import Final, cast

import orjson
import xxhash

from tailrace import __version__
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import if_none_match
from tailrace.routing import responses
from tailrace.server.openapi import (
    components,
    hub,
    identities,
    inspection,
    pipeline,
    registry,
    replication,
    search,
    server,
    streams,
    subscriptions,
    touch,
    traces,
    watch,
)
from tailrace.server.openapi.components import Json, answer, error_responses, headers, operation, without_body

OPENAPI_PATH: Final = b"/openapi.json"
_PARTS: Final = (
    components,
    streams,
    registry,
    search,
    inspection,
    touch,
    traces,
    subscriptions,
    server,
    identities,
    watch,
    replication,
    hub,
    pipeline,
)
_ABOUT: Final = (
    "A durable stream server: append-only logs over HTTP, fsynced before they are acknowledged. "
    "Every error has the same shape. OPTIONS is answered on every path."
)


def build() -> Json:
    """The whole document."""
    paths: Json = {
        **streams.stream_paths(),
        **registry.registry_paths(),
        **search.search_paths(),
        **inspection.inspection_paths(),
        **touch.touch_paths(),
        **traces.trace_paths(),
        **subscriptions.subscription_paths(),
        **server.server_paths(),
        **identities.identity_paths(),
        **watch.watch_paths(),
        **replication.replication_paths(),
        **hub.hub_paths(),
        **pipeline.pipeline_paths(),
    }
    schemas: Json = {}
    for part in _PARTS:
        schemas |= part.SCHEMAS
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
        "paths": {path: _completed(cast("dict[str, Json]", item)) for path, item in paths.items()},
        "components": {
            "schemas": schemas,
            "parameters": components.PARAMETERS,
            "headers": components.header_components(),
            "responses": error_responses(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT or API key",
                    "description": _BEARER,
                },
                "wake": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token that came with a wake.",
                },
            },
        },
    }


_BEARER: Final = "Wanted by servers with authentication. The scope is named with each operation."
_TAGS: Final = {
    "streams": "Create, append, read, describe, delete, list.",
    "registry": "What a stream's records look like and mean.",
    "search": "Questions about a stream's records.",
    "inspection": "What the server can tell about one stream.",
    "touch": "Waiting for changes of what a client has shown.",
    "traces": "Spans from OpenTelemetry.",
    "subscriptions": "Webhooks and pull-wake.",
    "server": "Health, metrics, memory, sealing.",
    "identities": "API keys, and tokens that are good no more.",
    "pipeline": "What is to be built beside the server, and its publication.",
    "watch": "Documents in collections, and queries that stay true.",
    "replication": "Clients that hold documents themselves, such as RxDB.",
    "hub": "Actors that find each other, send, publish and keep mailboxes.",
}


def _completed(item: dict[str, Json]) -> Json:
    """HEAD goes wherever GET goes, and browsers ask OPTIONS first."""
    found = dict(item)
    get = item.get("get")
    if get is not None and "head" not in item:
        found["head"] = without_body(get, f"{get['operationId']}Head")
    first = next(method for method in item if method != "parameters")
    identifier = f"{item[first]['operationId']}Options"
    shown = headers(
        always=("Access-Control-Allow-Methods", "Access-Control-Allow-Headers", "Access-Control-Max-Age")
    )
    tag = cast("list[str]", item[first]["tags"])[0]
    found["options"] = operation(
        identifier, tag, "What a browser asks before it calls", {"204": answer("What it may do.", head=shown)}
    )
    return cast("Json", found)


@cache
def rendered() -> tuple[str, bytes]:
    """Tag and bytes, made once."""
    document = orjson.dumps(build())
    return f'"{xxhash.xxh3_128_hexdigest(document)}"', document


def serve_openapi(exchange: Exchange) -> None:
    """GET /openapi.json, for everybody."""
    tag, document = rendered()
    head = b"Cache-Control: no-cache\r\nETag: %b\r\n" % tag.encode()
    known = exchange.headers.get(b"if-none-match")
    if known is not None and if_none_match(known.decode("latin-1"), tag):
        exchange.respond(304, head)
    else:
        exchange.respond(200, responses.JSON_TYPE + head, document)
