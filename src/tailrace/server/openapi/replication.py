"""Replication with clients that store documents."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    DATABASE,
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    closed,
    nullable,
    obj,
    operation,
    query,
    request,
    schema,
)

TAG: Final = "replication"
_NAME: Final[Json] = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}
_FLAG: Final[Json] = {"enum": ["0", "1", "true", "false"]}
_COLLECTION: Final = query("collection", "The collection, such as `orders`.", required=True)
_CHECKPOINT: Final = query("checkpoint", "The checkpoint of the last page, as JSON. Default: the beginning.")
_SHAPE: Final = (
    query("deletedField", "The field that marks deleted documents, `_deleted` by default.", _NAME),
    query("stamps", "`0`: without `collection`, `version`, `createdAt` and `updatedAt`.", _FLAG),
)
_CLIENT: Final[Json] = {"type": "string", "minLength": 1, "maxLength": 64}
_OF_CLIENT: Final = query(
    "client", "The client id: changes pushed by the same `client` are not sent.", _CLIENT
)
_DOCUMENT: Final[Json] = obj({"id": STRING})

SCHEMAS: Final[Json] = {
    "Checkpoint": obj({"updatedAt": COUNT, "id": STRING}, {"pos": STRING}),
    "ReplicationPage": obj(
        {
            "documents": array(_DOCUMENT),
            "checkpoint": {"anyOf": [schema("Checkpoint"), {"type": "null"}]},
        }
    ),
    "ReplicationPush": closed(
        {
            "collection": STRING,
            "rows": array(
                obj(
                    {"newDocumentState": _DOCUMENT},
                    {"assumedMasterState": nullable(OBJECT)},
                ),
                maxItems=500,
            ),
        },
        {"client": _CLIENT, "deletedField": _NAME, "stamps": BOOLEAN},
    ),
    "ReplicationConflicts": obj({"conflicts": array(_DOCUMENT)}),
}


_PAGE_TEXT = "A page of documents; one with fewer than `limit` is the last."
_CONFLICTS_TEXT = "The current state of documents that were not written."
_LIMIT: Json = {"type": "integer", "minimum": 1, "maximum": 1000}


def replication_paths() -> Json:
    return {
        "/replication/ws": {
            "get": operation(
                "replicateByWebSocket",
                TAG,
                "The WebSocket protocol of RxDB's replication",
                {"101": answer("The connection is a WebSocket now.")},
                (401, 403, 404, 426, 429),
                parameters=[query("database", "The database, if there are several."), *_SHAPE],
            )
        },
        "/replication/v1/databases/{db}/pull": {
            "parameters": [DATABASE],
            "get": operation(
                "pullDocuments",
                TAG,
                "Documents that changed since a checkpoint",
                {"200": answer(_PAGE_TEXT, schema("ReplicationPage"))},
                (404, 410, 429, 501),
                scope="read",
                parameters=[
                    _COLLECTION,
                    _CHECKPOINT,
                    query("limit", "Maximum documents, 100 by default.", _LIMIT),
                    *_SHAPE,
                ],
            ),
        },
        "/replication/v1/databases/{db}/push": {
            "parameters": [DATABASE],
            "post": operation(
                "pushDocuments",
                TAG,
                "Write documents, except for those that were changed in the meantime",
                {"200": answer(_CONFLICTS_TEXT, schema("ReplicationConflicts"))},
                (404, 405, 415, 429, 501, 507),
                scope="write",
                body=request(
                    schema("ReplicationPush"),
                    {
                        "collection": "orders",
                        "rows": [{"newDocumentState": {"id": "o-1", "total": 5}, "assumedMasterState": None}],
                    },
                    "The new state of each document, and the state the client assumes.",
                ),
            ),
        },
        "/replication/v1/databases/{db}/stream": {
            "parameters": [DATABASE],
            "get": operation(
                "followDocuments",
                TAG,
                "Changed documents as server-sent events",
                {
                    "200": {
                        "description": "Pages of documents, or `RESYNC`.",
                        "content": {"text/event-stream": {}},
                    }
                },
                (404, 410, 429, 501),
                scope="read",
                parameters=[_COLLECTION, _CHECKPOINT, _OF_CLIENT, *_SHAPE],
            ),
        },
    }
