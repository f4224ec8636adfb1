"""The routes `/v1/databases/{db}/sources`: list, create, change, remove and resync sources."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.table import Route
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
        self._tasks: set[asyncio.Task[None]] = set()

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
        self._spawn(exchange, self._put(database, check_source_name(name), body))

    def delete(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        names.check_database(database)
        keep = parse_query(exchange.query).get("keepSlot") == "1"
        self._spawn(exchange, self._remove(database, check_source_name(name), keep))

    def resync(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        names.check_database(database)
        self._spawn(exchange, self._resync(database, check_source_name(name)))

    async def _put(self, database: str, name: str, body: Json) -> tuple[int, Json]:
        source, is_new = await self._sources.put(database, name, body)
        return 201 if is_new else 200, source.to_json()

    async def _remove(self, database: str, name: str, keep: bool) -> tuple[int, Json]:
        return 200, await self._sources.remove(database, name, keep_slot=keep)

    async def _resync(self, database: str, name: str) -> tuple[int, Json]:
        return 202, (await self._sources.resync(database, name)).to_json()

    def _spawn(self, exchange: Exchange, work: Coroutine[None, None, tuple[int, Json]]) -> None:
        async def run() -> None:
            # Without a time-out: an interrupted change of a source would have to be undone.
            try:
                status, result = await work
            except TailraceError as error:
                responses.respond_error(exchange, error)
            else:
                exchange.respond(status, _HEAD, orjson.dumps(result))

        task = self._context.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_LISTED: Final = "/v1/databases/{db}/sources"
_ONE: Final = f"{_LISTED}/{{source}}"
_MANAGE: Final = Action.MANAGE_DATABASE
ROUTES: Final = (
    Route("GET", _LISTED, _MANAGE, SourceRoutes.list, "listSources", place="first"),
    Route("GET", _ONE, _MANAGE, SourceRoutes.show, "getSource", place="first"),
    Route("PUT", _ONE, _MANAGE, SourceRoutes.put, "putSource", place="first"),
    Route("DELETE", _ONE, _MANAGE, SourceRoutes.delete, "removeSource", place="first"),
    Route("POST", f"{_ONE}/resync", _MANAGE, SourceRoutes.resync, "resyncSource", place="first"),
)
