"""The routes `/v1/databases/{db}/sources`: list, create, change, remove and resync sources."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.http.exchange import Exchange
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    answer,
    array,
    closed,
    counts,
    nullable,
    obj,
    query,
    request,
)
from tailrace.routing.table import Route, route_group
from tailrace.watch import document, names
from tailrace.watch.sources.config import check_source_name
from tailrace.watch.sources.manager import SourceManager

BODY_BYTES: Final = 64 * 1024
_HEAD: Final = responses.JSON_TYPE + responses.NO_STORE

Json = dict[str, Any]


class SourceRoutes:
    """Requires the right to manage the database."""

    def __init__(self, context: Context, sources: SourceManager) -> None:
        self._context = context
        self._sources = sources
        # Without a time-out: an interrupted change of a source would have to be undone.
        self._deferred = DeferredResponses()

    def list(self, exchange: Exchange, _: Identity, database: str) -> None:
        names.check_database(database)
        listed = [one.to_json() for one in self._sources.list_sources(database)]
        exchange.respond(200, _HEAD, orjson.dumps({"sources": listed}))

    def show(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        names.check_database(database)
        found = self._sources.find(database, check_source_name(name))
        exchange.respond(200, _HEAD, orjson.dumps(found.to_json()))

    def put(self, exchange: Exchange, identity: Identity, database: str, name: str) -> None:
        names.check_database(database)
        body = document.load(exchange.body, BODY_BYTES)
        if isinstance(stream := body.get("stream"), str):
            authorise(identity, Action.READ_STREAM, stream=stream)
        self._deferred.respond(exchange, self._put(database, check_source_name(name), body))

    def delete(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        names.check_database(database)
        keep = parse_query(exchange.query).get("keepSlot") == "1"
        self._deferred.respond(exchange, self._remove(database, check_source_name(name), keep))

    def resync(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        names.check_database(database)
        self._deferred.respond(exchange, self._resync(database, check_source_name(name)))

    async def _put(self, database: str, name: str, body: Json) -> Response:
        source, is_new = await self._sources.put(database, name, body)
        return 201 if is_new else 200, _HEAD, orjson.dumps(source.to_json())

    async def _remove(self, database: str, name: str, keep: bool) -> Response:
        return 200, _HEAD, orjson.dumps(await self._sources.remove(database, name, keep_slot=keep))

    async def _resync(self, database: str, name: str) -> Response:
        return 202, _HEAD, orjson.dumps((await self._sources.resync(database, name)).to_json())


class RemovedSource(TypedDict):
    removed: str
    slot: str | None
    slotDropped: bool
    reason: str | None


# By hand: a configuration is read member by member, with the rules of its kind.
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
_SOURCE_STATUS: Final[Json] = obj(
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
        "status": _SOURCE_STATUS,
    },
    {
        **dict.fromkeys(("publication", "slot", "stream", "initial", "numeric"), STRING),
        "dsn": OBJECT,
    },
)
_MAPPING: Final = closed(
    {"collection": STRING},
    {"key": array(STRING, maxItems=32), "partitions": {"type": "integer", "minimum": 1, "maximum": 256}},
)
_SOURCE_CONFIG: Final = closed(
    {
        "kind": {"enum": ["postgres", "mongo", "stream"]},
        "collections": {"type": "object", "minProperties": 1, "additionalProperties": _MAPPING},
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
_LISTED: Final = "/v1/databases/{db}/sources"
_ONE: Final = f"{_LISTED}/{{source}}"
ROUTES: Final = route_group(
    "watch",
    Route(
        *("GET", _LISTED, Action.MANAGE_DATABASE, SourceRoutes.list, "listSources"),
        "List the sources of a database",
        {200: answer("The sources.", obj({"sources": array(_SOURCE)}))},
        errors=(404,),
    ),
    Route(
        *("GET", _ONE, Action.MANAGE_DATABASE, SourceRoutes.show, "getSource"),
        "Configuration and status of a source",
        {200: answer("The source.", _SOURCE)},
        errors=(404,),
    ),
    Route(
        *("PUT", _ONE, Action.MANAGE_DATABASE, SourceRoutes.put, "putSource"),
        "Follow a PostgreSQL or MongoDB database, or a stream",
        {201: answer("Created.", _SOURCE), 200: answer("Changed, or unchanged.", _SOURCE)},
        errors=(404, 409, 501, 507),
        body=request(_SOURCE_CONFIG, _EXAMPLE, "The source. Secrets are referenced, never included."),
    ),
    Route(
        *("DELETE", _ONE, Action.MANAGE_DATABASE, SourceRoutes.delete, "removeSource"),
        "Remove a source and drop its replication slot",
        {200: answer("Whether the slot was dropped.", RemovedSource)},
        errors=(404, 507),
        parameters=[query("keepSlot", "`1`: do not drop the slot.", {"enum": ["0", "1"]})],
    ),
    Route(
        *("POST", f"{_ONE}/resync", Action.MANAGE_DATABASE, SourceRoutes.resync, "resyncSource"),
        "Reload everything from the source",
        {202: answer("The reload has started.", _SOURCE)},
        errors=(404, 507),
    ),
    place="first",
)
