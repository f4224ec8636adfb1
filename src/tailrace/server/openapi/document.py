"""Builds the OpenAPI document from its parts, and serves it."""

from __future__ import annotations

from functools import cache
from typing import Final, cast

import orjson
import xxhash

from tailrace import __version__
from tailrace.auth import Action
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import if_none_match
from tailrace.routing import responses
from tailrace.routing.table import Auth, Route
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
    "All errors have the same shape. Every path supports OPTIONS."
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
                    "description": "The token of a wake.",
                },
            },
        },
    }


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


def _completed(item: dict[str, Json]) -> Json:
    """Add HEAD to each GET, and OPTIONS for browsers."""
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
        identifier,
        tag,
        "CORS preflight request of browsers",
        {"204": answer("The allowed methods and headers.", head=shown)},
    )
    return cast("Json", found)


@cache
def rendered() -> tuple[str, bytes]:
    """ETag and body, built once."""
    document = orjson.dumps(build())
    return f'"{xxhash.xxh3_128_hexdigest(document)}"', document


class OpenApiRoutes:
    def show(self, exchange: Exchange, _: object) -> None:
        """GET /openapi.json, without authentication."""
        tag, document = rendered()
        head = b"Cache-Control: no-cache\r\nETag: %b\r\n" % tag.encode()
        known = exchange.headers.get(b"if-none-match")
        if known is not None and if_none_match(known.decode("latin-1"), tag):
            exchange.respond(304, head)
        else:
            exchange.respond(200, responses.JSON_TYPE + head, document)


ROUTES: Final = (
    Route("GET", "/openapi.json", Action.PUBLIC, OpenApiRoutes.show, "readDescription", Auth.BY_HANDLER),
)
