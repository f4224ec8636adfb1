"""What jobs on Spark ask of the watch part of a server."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.objects import array, closed, counts, obj
from tailrace.server.openapi.operations import answer, operation, query, request
from tailrace.server.openapi.shared import DATABASE
from tailrace.server.openapi.values import BOOLEAN, COUNT, OBJECT, STRING, Json, nullable

TAG: Final = "watch"
_ROW: Final[Json] = obj(
    {
        "id": STRING,
        **counts("partition", "seq", "version", "createdAt", "updatedAt"),
        "deleted": BOOLEAN,
        "data": OBJECT,
    }
)
_CORRECTION: Final[Json] = closed(
    {
        "id": STRING,
        "seen": nullable(COUNT),
        **counts("version", "createdMs"),
        "deleted": BOOLEAN,
        "data": OBJECT,
    }
)
_RESULT: Final[Json] = obj({"path": STRING, "status": COUNT}, {"version": COUNT, "error": OBJECT})


def watch_job_paths() -> Json:
    return {
        "/v1/databases/{db}/summaries": {"parameters": [DATABASE], "post": _summaries()},
        "/v1/databases/{db}/view": {"parameters": [DATABASE], "get": _view()},
        "/v1/databases/{db}/corrections": {"parameters": [DATABASE], "post": _corrections()},
        "/v1/databases/{db}/statistics": {"parameters": [DATABASE], "post": _statistics()},
    }


def _summaries() -> Json:
    given = closed({}, {"seconds": {"type": "integer", "minimum": 0, "maximum": 3600}})
    shown = obj(
        {
            **dict.fromkeys(("gateway", "stream", "deliveries", "offset"), STRING),
            **counts("subscriptions", "expires"),
            "token": nullable(STRING),
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
            "next": nullable(STRING),
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


def _statistics() -> Json:
    given = closed({"collection": STRING, "bloom": closed(counts("keys", "absent", "wrong"))})
    example = {"collection": "orders", "bloom": {"keys": 1000, "absent": 50_000, "wrong": 410}}
    shown = obj({"collection": STRING, "bloomRatio": {"type": "number"}})
    return operation(
        "noteWatchStatistics",
        TAG,
        "Tell how good the Bloom filter is that a job has made",
        {"200": answer("It is noted.", shown)},
        (404, 429, 507),
        scope="manage",
        body=request(given, example, "What was found."),
    )
