"""Sources of changes outside the server."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.objects import array, closed, counts, obj
from tailrace.server.openapi.operations import answer, operation, param, query, request
from tailrace.server.openapi.shared import DATABASE
from tailrace.server.openapi.values import BOOLEAN, COUNT, OBJECT, STRING, Json, nullable

TAG: Final = "watch"
_NAME: Final = param(
    "path", "source", "The source.", {"type": "string", "pattern": "^[a-z][a-z0-9_-]{0,62}$"}
)
_TEXT: Final[Json] = nullable(STRING)
_SIZE: Final[Json] = {"type": ["integer", "null"]}
_DSN: Final[Json] = {"type": "object", "minProperties": 1, "maxProperties": 1}
_EXAMPLE: Final[Json] = {
    "kind": "postgres",
    "dsn": {"env": "PG_DSN"},
    "publication": "tailrace",
    "slot": "tailrace_app",
    "collections": {"public.orders": {"collection": "orders", "key": ["id"]}},
    "onGap": "rescan",
    "initial": "load",
}
_STATUS: Final[Json] = obj(
    {
        "phase": {"enum": ["new", "loading", "live", "stale"]},
        "connected": BOOLEAN,
        **dict.fromkeys(("reason", "error", "walStatus", "lastChangeAt"), _TEXT),
        **dict.fromkeys(("lagBytes", "retainedBytes"), _SIZE),
        **counts("epoch", "restarts", "gaps", "changes"),
        "token": STRING,
        **dict.fromkeys(("lagChanges", "loaded"), _SIZE),
        "lagSeconds": {"type": ["number", "null"]},
    },
    {"tokens": {"type": "object", "additionalProperties": STRING}},
)
_SOURCE: Final[Json] = obj(
    {
        **dict.fromkeys(("database", "name", "kind", "onGap"), STRING),
        **dict.fromkeys(("collections", "batch", "limits"), OBJECT),
        "status": _STATUS,
    },
    {
        **dict.fromkeys(("publication", "slot", "stream", "initial", "numeric"), STRING),
        "dsn": OBJECT,
    },
)


def watch_source_paths() -> Json:
    return {
        "/v1/databases/{db}/sources": {
            "parameters": [DATABASE],
            "get": operation(
                "listSources",
                TAG,
                "All sources of a database",
                {"200": answer("The sources.", obj({"sources": array(_SOURCE)}))},
                (404,),
                scope="manage",
            ),
        },
        "/v1/databases/{db}/sources/{source}": {
            "parameters": [DATABASE, _NAME],
            "get": operation(
                "getSource",
                TAG,
                "What a source is set to, and how it is doing",
                {"200": answer("The source.", _SOURCE)},
                (404,),
                scope="manage",
            ),
            "put": _put(),
            "delete": operation(
                "removeSource",
                TAG,
                "Follow a source no more, and drop the slot it had",
                {"200": answer("What became of the slot.", _removed())},
                (404, 429, 507),
                scope="manage",
                parameters=[query("keepSlot", "`1`: leave the slot.", {"enum": ["0", "1"]})],
            ),
        },
        "/v1/databases/{db}/sources/{source}/resync": {
            "parameters": [DATABASE, _NAME],
            "post": operation(
                "resyncSource",
                TAG,
                "Copy everything again",
                {"202": answer("It has begun.", _SOURCE)},
                (404, 429, 507),
                scope="manage",
            ),
        },
    }


def _put() -> Json:
    mapped = closed(
        {"collection": STRING},
        {"key": array(STRING, maxItems=32), "partitions": {"type": "integer", "minimum": 1, "maximum": 256}},
    )
    given = closed(
        {
            "kind": {"enum": ["postgres", "mongo", "stream"]},
            "collections": {"type": "object", "minProperties": 1, "additionalProperties": mapped},
        },
        {
            **dict.fromkeys(("name", "publication", "slot", "stream"), STRING),
            "dsn": _DSN,
            "batch": closed({}, {"maxChanges": COUNT, "maxBytes": COUNT}),
            "limits": closed({}, {"eventsPerSecond": COUNT, "bytesPerSecond": COUNT}),
            "onGap": {"enum": ["rescan", "hold"]},
            "initial": {"enum": ["load", "now"]},
            "numeric": {"enum": ["string", "double"]},
        },
    )
    return operation(
        "putSource",
        TAG,
        "Follow a PostgreSQL or MongoDB database, or a stream",
        {"201": answer("It is new.", _SOURCE), "200": answer("It is as asked.", _SOURCE)},
        (404, 409, 429, 501, 507),
        scope="manage",
        body=request(given, _EXAMPLE, "What to follow. Secrets are named, never given."),
    )


def _removed() -> Json:
    return obj({"removed": STRING, "slot": _TEXT, "slotDropped": BOOLEAN, "reason": _TEXT})
