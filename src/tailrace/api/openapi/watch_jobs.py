"""What jobs on Spark ask of the watch part of a server."""

from __future__ import annotations

from typing import Final

from tailrace.api.openapi.parts import (
    BOOLEAN,
    COUNT,
    STRING,
    Json,
    answer,
    array,
    closed,
    counts,
    obj,
    operation,
    query,
    request,
)

TAG: Final = "watch"
_ROW: Final[Json] = obj(
    {
        "id": STRING,
        **counts("partition", "seq", "version", "createdAt", "updatedAt"),
        "deleted": BOOLEAN,
        "data": {"type": "object"},
    }
)
_CORRECTION: Final[Json] = closed(
    {
        "id": STRING,
        "seen": {"type": ["integer", "null"], "minimum": 0},
        **counts("version", "createdMs"),
        "deleted": BOOLEAN,
        "data": {"type": "object"},
    }
)
_RESULT: Final[Json] = obj({"path": STRING, "status": COUNT}, {"version": COUNT, "error": {"type": "object"}})


def watch_job_paths(database: Json) -> Json:
    return {
        "/v1/databases/{db}/summaries": {"parameters": [database], "post": _summaries()},
        "/v1/databases/{db}/view": {"parameters": [database], "get": _view()},
        "/v1/databases/{db}/corrections": {"parameters": [database], "post": _corrections()},
    }


def _summaries() -> Json:
    given = closed({}, {"seconds": {"type": "integer", "minimum": 0, "maximum": 3600}})
    shown = obj(
        {
            **dict.fromkeys(("gateway", "stream", "deliveries", "offset"), STRING),
            **counts("subscriptions", "expires"),
            "token": {"type": ["string", "null"]},
        }
    )
    return operation(
        "announceWatchJob",
        TAG,
        "Have summaries of all subscriptions written for a while",
        {"200": answer("Where they are, and up to where they are complete.", shown)},
        (404, 429, 507),
        scope="manage",
        body=request(given, {"seconds": 90}, "For how long."),
    )


def _view() -> Json:
    shown = obj(
        {
            "generation": COUNT,
            "folder": STRING,
            "purged": array(array(COUNT, minItems=2, maxItems=2)),
            "positions": array(COUNT),
            "rows": array(_ROW),
            "next": {"type": ["string", "null"]},
        }
    )
    return operation(
        "readView",
        TAG,
        "The rows of a collection as the server has them, tombstones included",
        {"200": answer("A page of them.", shown)},
        (404,),
        scope="manage",
        parameters=[
            query("collection", "The collection."),
            query("after", "The `next` of the page before."),
        ],
    )


def _corrections() -> Json:
    given = closed(
        {
            "collection": STRING,
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "corrections": array(_CORRECTION, minItems=1, maxItems=500),
        }
    )
    wrong: Json = {
        "id": "o-1",
        "seen": 7,
        "version": 3,
        "createdMs": 1767225600000,
        "deleted": False,
        "data": {"total": 5},
    }
    return operation(
        "correctView",
        TAG,
        "Put documents right that the view has otherwise than the log",
        {"200": answer("What became of each.", obj({"results": array(_RESULT)}))},
        (404, 429, 507),
        scope="manage",
        body=request(
            given, {"collection": "orders", "name": "rescan-1", "corrections": [wrong]}, "How they should be."
        ),
        more="A document that was written meanwhile is left alone. A repeat has no effect.",
    )
