"""The routes `/v1/databases/{db}/sources`: list, create, change, remove and resync sources."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.protocol import stream_names
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
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
        self._tasks = TaskSet()

    def match_path(self, raw: bytes) -> tuple[str, str] | None:
        """The database and what follows `sources`, if the path matches."""
        path = stream_names.decode_name(raw)
        database, _, rest = ("", "", "") if path is None else path.partition("/")
        kind, _, name = rest.partition("/")
        return (database, name) if kind == "sources" else None

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, database: str, rest: str) -> None:
        authorise(identity, Action.MANAGE_DATABASE, db=database)
        names.check_database(database)
        reading = method in (b"GET", b"HEAD")
        name, _, verb = rest.partition("/")
        if not rest:
            if not reading:
                raise responses.method_not_allowed("GET, HEAD, OPTIONS")
            listed = [one.to_json() for one in self._sources.list_sources(database)]
            exchange.respond(200, _HEAD, orjson.dumps({"sources": listed}))
            return
        if verb == "resync":
            if method != b"POST":
                raise responses.method_not_allowed("POST, OPTIONS")
            self._spawn(exchange, self._resync(database, check_source_name(name)))
        elif verb:
            raise TailraceError("not_found", "path not found")
        elif reading:
            found = self._sources.find(database, check_source_name(name))
            exchange.respond(200, _HEAD, orjson.dumps(found.to_json()))
        elif method == b"PUT":
            body = document.load(exchange.body, BODY_BYTES)
            if isinstance(stream := body.get("stream"), str):
                authorise(identity, Action.READ_STREAM, stream=stream)
            self._spawn(exchange, self._put(database, check_source_name(name), body))
        elif method == b"DELETE":
            keep = parse_query(exchange.query).get("keepSlot") == "1"
            self._spawn(exchange, self._remove(database, check_source_name(name), keep))
        else:
            raise responses.method_not_allowed("GET, PUT, DELETE, HEAD, OPTIONS")

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

        self._tasks.start(run())
