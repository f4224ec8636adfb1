"""OpenAPI: documents, collections, live queries, watch jobs and sources."""

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
    counts,
    headers,
    nullable,
    obj,
    operation,
    param,
    params,
    query,
    request,
    schema,
)

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
        "Enable summaries of all subscriptions for some time",
        {"200": answer("Their stream, and the offset up to which they are complete.", shown)},
        (404, 429, 507),
        scope="manage",
        body=request(given, {"seconds": 90}, "The duration."),
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
        "The rows of a collection view, including tombstones",
        {"200": answer("One page.", shown)},
        (404,),
        scope="manage",
        parameters=[
            query("collection", "The collection."),
            query("after", "The `next` of the previous page."),
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
        "Correct documents of a view that differ from the log",
        {"200": answer("The result of each write.", obj({"results": array(_RESULT)}))},
        (404, 429, 507),
        scope="manage",
        body=request(
            given,
            {"collection": "orders", "name": "rescan-1", "corrections": [wrong]},
            "The documents as in the log.",
        ),
        more="A document that was written in the meantime is not changed. Idempotent.",
    )


def _statistics() -> Json:
    given = closed({"collection": STRING, "bloom": closed(counts("keys", "absent", "wrong"))})
    example = {"collection": "orders", "bloom": {"keys": 1000, "absent": 50_000, "wrong": 410}}
    shown = obj({"collection": STRING, "bloomRatio": {"type": "number"}})
    return operation(
        "noteWatchStatistics",
        TAG,
        "Report the quality of a Bloom filter that a job has built",
        {"200": answer("The ratio is stored.", shown)},
        (404, 429, 507),
        scope="manage",
        body=request(given, example, "The measured counts."),
    )


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
                "List the sources of a database",
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
                "Configuration and status of a source",
                {"200": answer("The source.", _SOURCE)},
                (404,),
                scope="manage",
            ),
            "put": _put(),
            "delete": operation(
                "removeSource",
                TAG,
                "Remove a source and drop its replication slot",
                {"200": answer("Whether the slot was dropped.", _removed())},
                (404, 429, 507),
                scope="manage",
                parameters=[query("keepSlot", "`1`: do not drop the slot.", {"enum": ["0", "1"]})],
            ),
        },
        "/v1/databases/{db}/sources/{source}/resync": {
            "parameters": [DATABASE, _NAME],
            "post": operation(
                "resyncSource",
                TAG,
                "Reload everything from the source",
                {"202": answer("The reload has started.", _SOURCE)},
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
        {"201": answer("Created.", _SOURCE), "200": answer("Changed, or unchanged.", _SOURCE)},
        (404, 409, 429, 501, 507),
        scope="manage",
        body=request(given, _EXAMPLE, "The source. Secrets are referenced, never included."),
    )


def _removed() -> Json:
    return obj({"removed": STRING, "slot": _TEXT, "slotDropped": BOOLEAN, "reason": _TEXT})


_COLLECTION: Final = param("path", "collection", "An odd number of segments, such as `orders`.")
_PATH: Final = param("path", "path", "An even number of segments, such as `orders/o-1`.")
_WRITE_ID: Final = param(
    "header",
    "Idempotency-Key",
    "A repeat within ten minutes gets the first response; another request with the same key gets 409.",
    {"type": "string", "minLength": 1, "maxLength": 128},
)
_IF_MATCH: Final = param("header", "If-Match", "The required version, in quotes, or `*`.")
_IF_NONE: Final = param("header", "If-None-Match", "`*`: only if it does not exist.", {"const": "*"})
_RULE: Final[Json] = {"type": ["string", "null"], "maxLength": 4096}
_WINDOW: Final[Json] = {"type": ["string", "null"], "pattern": "^(0|[1-9][0-9]{0,8})[smhd]?$"}
_VALUE: Final[Json] = {"type": ["null", "boolean", "number", "string", "array"]}
_FIELD: Final[dict[str, Json]] = {
    "field": STRING,
    "fieldPath": array(STRING, minItems=1, maxItems=20),
}

_PAGE: Final = [
    query("after", "Only names after this one."),
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
                    "Status of the collections of a database, with reasons",
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
                    {"200": answer("The result of each write.", schema("DocumentResults"))},
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
                    {"200": answer("One page.", schema("DocumentPage"))},
                    (404, 415, 429, 501),
                    scope="read",
                    body=request(
                        schema("DocumentQuery"),
                        {"collection": "orders", "where": "doc.total > 3", "limit": 10},
                        "The query.",
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
            "Configuration and progress of a collection",
            {"200": answer("The collection.", schema("Collection"))},
            (404,),
            scope="read",
        ),
        "put": _put_collection(),
        "delete": operation(
            "deleteCollection",
            TAG,
            "Delete a collection with all its documents and changes",
            {"204": answer("Deleted.")},
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
                    query("database", "The database, if there are several."),
                    query("collection", "The collection; not with a ticket."),
                    query("filters", "A JSON array of filters."),
                    query("where", "An expression."),
                    query("snapshot", "`1`: first send all matching documents.", {"enum": ["0", "1"]}),
                    query("includeData", "`0`: events without data.", {"enum": ["0", "1"]}),
                    query("autoResync", "`1`: resynchronise automatically.", {"enum": ["0", "1"]}),
                    query("cursor", "The `id` to continue from, as `Last-Event-ID`."),
                    query("ticket", "The ticket of a POST."),
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
                body=request(given, example, "The queries."),
            ),
        },
    }


def _list_databases() -> Json:
    return operation(
        "listDatabases",
        TAG,
        "List the databases that the caller may read, by name",
        {"200": answer("One page.", array(schema("DatabaseListed")), headers("Link"))},
        scope="read",
        parameters=_PAGE,
    )


def _list_collections() -> Json:
    return operation(
        "listCollections",
        TAG,
        "List the collections of a database, by name",
        {"200": answer("One page.", array(schema("CollectionListed")), headers("Link"))},
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
        {"201": answer("Created.", shown), "200": answer("The database exists.", shown)},
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
        {"201": answer("Created.", shown), "200": answer("Changed, or unchanged.", shown)},
        (404, 409, 429, 501, 507),
        scope="manage",
        body=request(given, {"partitions": 4, "readRule": "doc.public == true"}, "The configuration."),
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
                "304": answer("Not modified.", head=tagged),
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
                "201": answer("Created.", written, tagged),
                "200": answer("Replaced.", written, tagged),
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
            {"200": answer("Changed.", written, tagged)},
            errors,
            scope="write",
            parameters=[_WRITE_ID, _IF_MATCH],
            body=patch,
        ),
        "delete": operation(
            "deleteDocument",
            TAG,
            "Delete a document",
            {"204": answer("Deleted.", head=tagged)},
            errors,
            scope="write",
            parameters=[_WRITE_ID, _IF_MATCH],
        ),
    }
