"""Documents, collections and live queries."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.objects import array, closed, counts, obj
from tailrace.server.openapi.operations import (
    answer,
    headers,
    operation,
    param,
    params,
    query,
    request,
    schema,
)
from tailrace.server.openapi.shared import DATABASE
from tailrace.server.openapi.values import BOOLEAN, COUNT, OBJECT, STRING, Json, nullable
from tailrace.server.openapi.watch_jobs import watch_job_paths
from tailrace.server.openapi.watch_sources import watch_source_paths

TAG: Final = "watch"
_COLLECTION: Final = param("path", "collection", "An odd number of segments, such as `orders`.")
_PATH: Final = param("path", "path", "An even number of segments, such as `orders/o-1`.")
_WRITE_ID: Final = param(
    "header",
    "Idempotency-Key",
    "A repeat within ten minutes gets the first answer; another request under it is 409.",
    {"type": "string", "minLength": 1, "maxLength": 128},
)
_IF_MATCH: Final = param("header", "If-Match", "The version it has to have, in quotes, or `*`.")
_IF_NONE: Final = param("header", "If-None-Match", "`*`: only if it does not exist.", {"const": "*"})
_RULE: Final[Json] = {"type": ["string", "null"], "maxLength": 4096}
_WINDOW: Final[Json] = {"type": ["string", "null"], "pattern": "^(0|[1-9][0-9]{0,8})[smhd]?$"}
_VALUE: Final[Json] = {"type": ["null", "boolean", "number", "string", "array"]}
_FIELD: Final[dict[str, Json]] = {
    "field": STRING,
    "fieldPath": array(STRING, minItems=1, maxItems=20),
}

_PAGE: Final = [
    query("after", "Only names behind this one."),
    query("limit", "Rows on a page.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
]
_STATE: Final[Json] = {"enum": ["live", "loading", "lagging", "stale"]}

SCHEMAS: Final[Json] = {
    "DatabaseListed": obj({"database": STRING, "collections": COUNT}),
    "CollectionListed": obj(
        {
            "collection": STRING,
            "source": STRING,
            "state": _STATE,
            **counts("partitions", "generation", "documents"),
        }
    ),
    "Document": obj(
        {
            "path": STRING,
            "id": STRING,
            "collection": STRING,
            "data": OBJECT,
            **counts("version", "createdAt", "updatedAt"),
        }
    ),
    "DocumentWritten": obj({"path": STRING, **counts("version", "updatedAt")}),
    "DocumentBatch": closed(
        {
            "writes": array(
                closed(
                    {"op": {"enum": ["put", "patch", "delete"]}, "path": STRING},
                    {"data": OBJECT, "ifVersion": COUNT, "ifAbsent": BOOLEAN},
                ),
                minItems=1,
                maxItems=500,
            )
        },
        {"atomic": BOOLEAN},
    ),
    "DocumentResults": obj(
        {"results": array(obj({"path": STRING, "status": COUNT}, {"version": COUNT, "error": OBJECT}))}
    ),
    "DocumentQuery": closed(
        {"collection": STRING},
        {
            "filters": array(
                closed(
                    {"op": {"enum": ["==", "!=", ">", ">=", "<", "<=", "in", "contains"]}, "value": _VALUE},
                    _FIELD,
                ),
                maxItems=32,
            ),
            "where": {"type": "string", "maxLength": 4096},
            "documents": array(STRING, maxItems=100),
            "orderBy": array(closed({}, {**_FIELD, "direction": {"enum": ["asc", "desc"]}}), maxItems=8),
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "cursor": STRING,
        },
    ),
    "DocumentPage": obj(
        {
            "documents": array(schema("Document")),
            "cursor": nullable(STRING),
            "positions": array(COUNT),
        }
    ),
    "DatabaseStatus": obj(
        {
            "database": STRING,
            "connections": COUNT,
            "watermark": {"type": "number"},
            "collections": array(
                obj(
                    {
                        "collection": STRING,
                        "state": _STATE,
                        "targets": OBJECT,
                        "burn": OBJECT,
                        "reason": STRING,
                        **counts("generation", "documents", "lag", "subscriptions", "predicates"),
                    }
                )
            ),
        }
    ),
    "Collection": obj(
        {
            "collection": STRING,
            "database": STRING,
            "source": STRING,
            "state": _STATE,
            "view": {"const": "full"},
            "storeBefore": BOOLEAN,
            "retention": STRING,
            "tombstoneTtl": STRING,
            "positions": array(COUNT),
            "lag": array(COUNT),
            "readRule": _RULE,
            "writeRule": _RULE,
            "slo": nullable(OBJECT),
            **counts("partitions", "generation", "ruleVersion", "documents"),
        }
    ),
}


def watch_paths() -> Json:
    return (
        _realtime()
        | watch_job_paths()
        | watch_source_paths()
        | {
            "/v1/databases": {"get": _list_databases()},
            "/v1/databases/{db}/collections": {"parameters": [DATABASE], "get": _list_collections()},
            "/v1/databases/{db}": {"parameters": [DATABASE], "put": _create_database()},
            "/v1/databases/{db}/collections/{collection}": _collection(),
            "/v1/databases/{db}/status": {
                "parameters": [DATABASE],
                "get": operation(
                    "getDatabaseStatus",
                    TAG,
                    "How the collections of a database do, and why",
                    {"200": answer("The database.", schema("DatabaseStatus"))},
                    (404,),
                    scope="read",
                ),
            },
            "/v1/databases/{db}/docs/{path}": _document(),
            "/v1/databases/{db}/batch": {
                "parameters": [DATABASE],
                "post": operation(
                    "writeDocuments",
                    TAG,
                    "Write several documents with one commit",
                    {"200": answer("What became of each.", schema("DocumentResults"))},
                    (404, 409, 415, 429, 501, 507),
                    scope="write",
                    parameters=[_WRITE_ID],
                    body=request(
                        schema("DocumentBatch"),
                        {
                            "atomic": True,
                            "writes": [{"op": "put", "path": "orders/o-1", "data": {"total": 5}}],
                        },
                        "The writes, in order.",
                    ),
                ),
            },
            "/v1/databases/{db}/query": {
                "parameters": [DATABASE],
                "post": operation(
                    "queryDocuments",
                    TAG,
                    "Documents that match now",
                    {"200": answer("A page of them.", schema("DocumentPage"))},
                    (404, 415, 429, 501),
                    scope="read",
                    body=request(
                        schema("DocumentQuery"),
                        {"collection": "orders", "where": "doc.total > 3", "limit": 10},
                        "What to look for.",
                    ),
                ),
            },
        }
    )


def _collection() -> Json:
    return {
        "parameters": [DATABASE, _COLLECTION],
        "get": operation(
            "getCollection",
            TAG,
            "What is set about a collection, and how far it is",
            {"200": answer("The collection.", schema("Collection"))},
            (404,),
            scope="read",
        ),
        "put": _put_collection(),
        "delete": operation(
            "deleteCollection",
            TAG,
            "Delete a collection with all its documents and changes",
            {"204": answer("It is gone.")},
            (404, 409, 429, 507),
            scope="manage",
        ),
    }


def _realtime() -> Json:
    stream: Json = {
        "description": "Envelopes as server-sent events.",
        "content": {"text/event-stream": {}},
    }
    errors = (404, 429, 501)
    one = obj({"id": STRING, "query": schema("DocumentQuery")})
    given = obj({"subscriptions": array(one, minItems=1, maxItems=20)}, {"database": STRING})
    example = {"subscriptions": [{"id": "one", "query": {"collection": "orders"}, "sendSnapshot": True}]}
    return {
        "/realtime/ws": {
            "get": operation(
                "watchByWebSocket",
                TAG,
                "Live queries over a WebSocket",
                {"101": answer("The connection is a WebSocket now.")},
                (401, 403, 404, 426, 429),
                parameters=[query("database", "The database, unless `auth` names it.")],
            )
        },
        "/realtime/sse": {
            "get": operation(
                "watchByEvents",
                TAG,
                "One live query as server-sent events",
                {"200": stream},
                errors,
                scope="read",
                parameters=[
                    query("database", "The database, if there is a choice."),
                    query("collection", "The collection; left out with a ticket."),
                    query("filters", "A JSON array of filters."),
                    query("where", "An expression."),
                    query("snapshot", "`1`: send what there is first.", {"enum": ["0", "1"]}),
                    query("includeData", "`0`: events without data.", {"enum": ["0", "1"]}),
                    query("autoResync", "`1`: begin again by itself.", {"enum": ["0", "1"]}),
                    query("cursor", "An `id` to go on from, as `Last-Event-ID`."),
                    query("ticket", "What a POST gave."),
                ],
            ),
            "post": operation(
                "watchSeveralByEvents",
                TAG,
                "Several live queries as server-sent events, or a ticket for them",
                {
                    "200": {
                        **stream,
                        "content": {
                            "text/event-stream": {},
                            "application/json": {"schema": obj({"ticket": STRING, "expiresAt": COUNT})},
                        },
                    }
                },
                errors,
                scope="read",
                body=request(given, example, "What to watch."),
            ),
        },
    }


def _list_databases() -> Json:
    return operation(
        "listDatabases",
        TAG,
        "List the databases that the caller may read, by name",
        {"200": answer("A page of them.", array(schema("DatabaseListed")), headers("Link"))},
        scope="read",
        parameters=_PAGE,
    )


def _list_collections() -> Json:
    return operation(
        "listCollections",
        TAG,
        "List the collections of a database, by name",
        {"200": answer("A page of them.", array(schema("CollectionListed")), headers("Link"))},
        (404,),
        scope="read",
        parameters=_PAGE,
    )


def _create_database() -> Json:
    shown = obj({"database": STRING})
    return operation(
        "createDatabase",
        TAG,
        "Create a database",
        {"201": answer("It is new.", shown), "200": answer("It was there.", shown)},
        (429, 507),
        scope="manage",
    )


def _put_collection() -> Json:
    given = closed(
        {},
        {
            "partitions": {"type": "integer", "minimum": 1, "maximum": 256},
            "source": {"const": "native"},
            "readRule": _RULE,
            "writeRule": _RULE,
            "replication": {
                "type": ["object", "null"],
                "properties": {"tombstoneFields": OBJECT},
            },
            "view": {"const": "full"},
            "storeBefore": BOOLEAN,
            "retention": _WINDOW,
            "tombstoneTtl": _WINDOW,
            "slo": {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {
                    "deliveryMs": {"type": "integer", "minimum": 1},
                    "resumeRatio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    "lagMs": {"type": "integer", "minimum": 1},
                    "bloomRatio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                },
            },
        },
    )
    shown = schema("Collection")
    return operation(
        "setCollection",
        TAG,
        "Create a collection, or change its rules",
        {"201": answer("It is new.", shown), "200": answer("It is as asked.", shown)},
        (404, 409, 429, 501, 507),
        scope="manage",
        body=request(given, {"partitions": 4, "readRule": "doc.public == true"}, "What to set."),
    )


def _document() -> Json:
    tagged = headers(always=("ETag",))
    written = schema("DocumentWritten")
    errors = (404, 409, 412, 415, 429, 501, 507)
    data = request(OBJECT, {"total": 5}, "The document.")
    patch: Json = {
        "description": "A merge patch (RFC 7396).",
        "required": True,
        "content": {"application/merge-patch+json": {"schema": OBJECT, "example": {"total": 6}}},
    }
    return {
        "parameters": [DATABASE, _PATH],
        "get": operation(
            "getDocument",
            TAG,
            "A document",
            {
                "200": answer("The document.", schema("Document"), tagged),
                "304": answer("It has not changed.", head=tagged),
            },
            (404, 501),
            scope="read",
            parameters=params("if-none-match"),
        ),
        "put": operation(
            "putDocument",
            TAG,
            "Create or replace a document",
            {
                "201": answer("It is new.", written, tagged),
                "200": answer("It was replaced.", written, tagged),
            },
            errors,
            scope="write",
            parameters=[_WRITE_ID, _IF_MATCH, _IF_NONE],
            body=data,
        ),
        "patch": operation(
            "patchDocument",
            TAG,
            "Change some fields of a document",
            {"200": answer("It was changed.", written, tagged)},
            errors,
            scope="write",
            parameters=[_WRITE_ID, _IF_MATCH],
            body=patch,
        ),
        "delete": operation(
            "deleteDocument",
            TAG,
            "Delete a document",
            {"204": answer("It is gone.", head=tagged)},
            errors,
            scope="write",
            parameters=[_WRITE_ID, _IF_MATCH],
        ),
    }
