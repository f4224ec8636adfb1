"""Replication over HTTP: pull, push and stream below `/replication/v1/databases/{db}`."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator
from typing import Any, Final, cast
from urllib.parse import parse_qs

import orjson

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import wait_event
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.routing import responses
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Component,
    Json,
    answer,
    array,
    closed,
    nullable,
    obj,
    query,
    request,
)
from tailrace.routing.table import Route, route_group
from tailrace.watch import document, names
from tailrace.watch.document import Document
from tailrace.watch.rxdb.feed import POLL_S, DocumentShape, ReplicationFeed, ReplicationTransport
from tailrace.watch.rxdb.protocol import (
    DELETED_FIELD,
    Checkpoint,
    check_deleted_field,
    read_checkpoint,
    read_push_rows,
)
from tailrace.watch.rxdb.replication import LIMIT_DEFAULT, LIMIT_MAX, PullRequest, Replication

logger = logging.getLogger("tailrace.watch")

HEARTBEAT_S: Final = 15.0
UNSENT_BYTES_MAX: Final = 1024 * 1024
_NUMBER: Final = re.compile(r"[0-9]{1,4}\Z")
_PULL: Final = frozenset({"collection", "checkpoint", "limit", "deletedField", "stamps"})
_STREAM: Final = (_PULL - {"limit"}) | {"client"}
_PUSH: Final = frozenset({"client", "collection", "rows", "deletedField", "stamps"})
CLIENT_CHARS_MAX: Final = 64
_EVENTS: Final = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


class ReplicationSseTransport(ReplicationTransport):
    """Server-sent events with one feed."""

    def __init__(self, replication: Replication, identity: Identity, outlet: ResponseStream) -> None:
        self._outlet = outlet
        super().__init__(replication, identity)
        self.task: asyncio.Task[None] | None = None
        self._beat_at = self.opened_at
        outlet.on_gone = self.on_gone
        outlet.on_drain = self.on_drain

    def begin(self, pos: str | None) -> None:
        """Send the position first, so that a browser can resume even before the first event."""
        event_id = b"" if pos is None else b"id: %b\n" % pos.encode()
        retry_ms = random.randint(1000, 3000)  # noqa: S311 - spreads load
        self._write(b": connected\nretry: %d\n%b\n" % (retry_ms, event_id))

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes

    def _write(self, data: bytes) -> None:
        self._outlet.write(data)
        self.count_sent(len(data))
        self._beat_at = self.replication.context.loop.time()

    async def send(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None:
        # An empty id clears the browser's last event id: it must not resume from there.
        self._write(b"id: %b\ndata: %b\n\n" % ((pos or "").encode(), result))

    def fail(self, error: TailraceError) -> None:
        self.close(1011, error.code)

    def close(self, code: int, reason: str) -> None:
        self._outlet.end()
        self.on_gone()

    def on_gone(self) -> None:
        super().on_gone()
        if self.task is not None:
            self.task.cancel()

    def on_tick(self, now: float) -> None:
        super().on_tick(now)
        if not self.ended and now - self._beat_at >= HEARTBEAT_S:
            self._write(b": heartbeat\n\n")


class ReplicationRoutes:
    def __init__(self, replication: Replication) -> None:
        self._replication = replication
        self._limits = replication.limits

    # -- pull ------------------------------------------------------------------------------------------

    def pull(self, exchange: Exchange, identity: Identity, database: str) -> None:
        params = read_params(exchange, _PULL)
        name = self._collection(database, params)
        limit, shape = read_limit(params.get("limit", str(LIMIT_DEFAULT))), read_shape(params)
        raw, checkpoint = self._checkpoint(params.get("checkpoint"))
        request = PullRequest(database, name, raw, checkpoint, limit, shape)

        async def run() -> None:
            try:
                pulled = await self._replication.pull(identity, request)
                await _respond(exchange, pulled.pieces)
            except TailraceError as error:
                responses.respond_error(exchange, error)
            except Exception:
                logger.exception("pull failed")
                responses.respond_error(exchange, TailraceError("internal", "the pull failed"))

        task = self._replication.tasks.start(run())

        def gone() -> None:
            task.cancel()

        exchange.on_gone = gone

    def _collection(self, database: str, params: dict[str, Any]) -> str:
        name = params.get("collection")
        if not isinstance(name, str):
            raise TailraceError("invalid_request", "collection is required")
        self._replication.registry.database(database)
        return names.check_collection(name)

    def _checkpoint(self, text: str | None) -> tuple[Any, Checkpoint | None]:
        """The checkpoint as JSON and parsed."""
        if not text:
            return None, None
        try:
            raw: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise TailraceError("invalid_checkpoint", "checkpoint must be JSON") from None
        return raw, read_checkpoint(raw, self._replication.signer)

    # -- push ------------------------------------------------------------------------------------------

    def push(self, exchange: Exchange, identity: Identity, database: str) -> None:
        kind = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise TailraceError("unsupported_media_type", "Content-Type must be application/json")
        body = document.parse_json(exchange.body or b"{}", self._limits.watch_push_bytes)
        if not isinstance(body, dict):
            raise TailraceError("invalid_request", "the body must be a JSON object")
        request = cast("Document", body)
        if unknown := sorted(set(request) - _PUSH):
            raise TailraceError("invalid_request", f"unknown member {unknown[0]!r}")
        name, shape = self._collection(database, request), read_shape(request)
        rows = read_push_rows(request.get("rows"), self._limits.watch_batch_writes, shape.deleted_field)

        def on_pushed(conflicts: list[Document], error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
                return
            head = responses.JSON_TYPE + responses.NO_STORE
            exchange.respond(200, head, orjson.dumps({"conflicts": conflicts}))

        client = read_client(identity, request.get("client"))
        self._replication.push(identity, database, name, rows, shape, client, on_pushed)

    # -- stream ----------------------------------------------------------------------------------------

    def stream(self, exchange: Exchange, identity: Identity, database: str) -> None:
        params = read_params(exchange, _STREAM)
        name, shape = self._collection(database, params), read_shape(params)
        replication = self._replication
        _, checkpoint = self._checkpoint(params.get("checkpoint"))
        collection = replication.find(database, name)
        resumed = exchange.headers.get(b"last-event-id")
        must_resync = False
        if resumed:
            # A reconnecting browser; if its position is not valid any more, it is sent RESYNC.
            try:
                pos = {"updatedAt": 0, "id": "", "pos": resumed.decode("latin-1")}
                checkpoint = read_checkpoint(pos, replication.signer)
                cursor = None if collection is None else replication.cursor(identity, collection, checkpoint)
            except TailraceError as error:
                if error.code not in ("invalid_checkpoint", "checkpoint_expired"):
                    raise
                cursor, must_resync = None, True
        elif checkpoint is None or collection is None:
            cursor = None
        else:
            cursor = replication.cursor(identity, collection, checkpoint)
        replication.check_room()
        outlet = exchange.open_stream(200, _EVENTS)
        if exchange.is_head:
            outlet.end()
            return
        transport = ReplicationSseTransport(replication, identity, outlet)
        client = read_client(identity, params.get("client"))
        feed = ReplicationFeed(
            replication, transport, database, name, shape, LIMIT_DEFAULT, cursor, client=client
        )
        feed.must_resync = must_resync
        transport.begin(
            None
            if must_resync or feed.cursor is None
            else replication.checkpoint_json(feed.cursor, (0, ""))["pos"]
        )
        transport.task = replication.follow(feed)


async def _respond(exchange: Exchange, pieces: AsyncIterator[bytes]) -> None:
    """A small page is sent at once; a large one is streamed at the pace of the client."""
    head = responses.JSON_TYPE + responses.NO_STORE
    first = await anext(pieces)
    second = None if exchange.is_head else await anext(pieces, None)
    if second is None:
        exchange.respond(200, head, first)
        return
    exchange.on_gone = None
    outlet = exchange.open_stream(200, head)
    drained = asyncio.Event()
    outlet.on_drain = drained.set
    outlet.on_gone = drained.set
    try:
        outlet.write(first)
        piece: bytes | None = second
        while piece is not None and not outlet.closed:
            while outlet.unsent_bytes > UNSENT_BYTES_MAX:
                drained.clear()
                await wait_event(drained, POLL_S)
            outlet.write(piece)
            piece = await anext(pieces, None)
    except BaseException:
        # A truncated page must not look complete.
        exchange.connection.transport.abort()
        raise
    outlet.end()


def read_params(exchange: Exchange, known: frozenset[str]) -> dict[str, str]:
    try:
        params = parse_qs(exchange.query.decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise TailraceError("invalid_request", "the query string is invalid") from None
    if unknown := sorted(set(params) - known):
        raise TailraceError("invalid_request", f"unknown parameter {unknown[0]!r}")
    return {name: values[-1] for name, values in params.items()}


def read_client(identity: Identity, value: object) -> tuple[str, str] | None:
    """The client id, unique within its identity."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= CLIENT_CHARS_MAX:
        raise TailraceError(
            "invalid_request", f"client must be a string of 1 to {CLIENT_CHARS_MAX} characters"
        )
    return identity.sub, value


def read_limit(value: object) -> int:
    """The page size, as a number or a string."""
    text = str(value) if type(value) is int else value
    if isinstance(text, str) and _NUMBER.match(text) and 1 <= int(text) <= LIMIT_MAX:
        return int(text)
    raise TailraceError("invalid_request", f"limit must be 1 to {LIMIT_MAX}")


def read_shape(params: dict[str, Any]) -> DocumentShape:
    stamps = params.get("stamps", True)
    if stamps not in (True, False, "0", "1", "true", "false"):
        raise TailraceError("invalid_request", "stamps must be true or false")
    return DocumentShape(
        check_deleted_field(params.get("deletedField", DELETED_FIELD)), stamps in (True, "1", "true")
    )


_FIELD_NAME: Final[Json] = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}
_CLIENT: Final[Json] = {"type": "string", "minLength": 1, "maxLength": CLIENT_CHARS_MAX}
_ANY_DOCUMENT: Final = obj({"id": STRING})
_CHECKPOINT: Final = Component("Checkpoint", obj({"updatedAt": COUNT, "id": STRING}, {"pos": STRING}))
_PAGE: Final = Component(
    "ReplicationPage",
    obj(
        {
            "documents": array(_ANY_DOCUMENT),
            "checkpoint": {"anyOf": [_CHECKPOINT, {"type": "null"}]},
        }
    ),
)
_PUSH_REQUEST: Final = Component(
    "ReplicationPush",
    closed(
        {
            "collection": STRING,
            "rows": array(
                obj(
                    {"newDocumentState": _ANY_DOCUMENT},
                    {"assumedMasterState": nullable(OBJECT)},
                ),
                maxItems=500,
            ),
        },
        {"client": _CLIENT, "deletedField": _FIELD_NAME, "stamps": BOOLEAN},
    ),
)
_CONFLICTS: Final = Component("ReplicationConflicts", obj({"conflicts": array(_ANY_DOCUMENT)}))
_COLLECTION_PARAM: Final = query("collection", "The collection, such as `orders`.", required=True)
_CHECKPOINT_PARAM: Final = query(
    "checkpoint", "The checkpoint of the last page, as JSON. Default: the beginning."
)
SHAPE_PARAMS: Final = (
    query("deletedField", "The field that marks deleted documents, `_deleted` by default.", _FIELD_NAME),
    query(
        "stamps",
        "`0`: without `collection`, `version`, `createdAt` and `updatedAt`.",
        {"enum": ["0", "1", "true", "false"]},
    ),
)
_DATABASE: Final = "/replication/v1/databases/{db}"
ROUTES: Final = route_group(
    "replication",
    Route(
        *("GET", f"{_DATABASE}/pull", Action.REPLICATION_PULL, ReplicationRoutes.pull, "pullDocuments"),
        "Documents that changed since a checkpoint",
        {200: answer("A page of documents; one with fewer than `limit` is the last.", _PAGE)},
        errors=(404, 410, 501),
        parameters=[
            _COLLECTION_PARAM,
            _CHECKPOINT_PARAM,
            query(
                "limit",
                "Maximum documents, 100 by default.",
                {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
            ),
            *SHAPE_PARAMS,
        ],
    ),
    Route(
        *("POST", f"{_DATABASE}/push", Action.REPLICATION_PUSH, ReplicationRoutes.push, "pushDocuments"),
        "Write documents, except for those that were changed in the meantime",
        {200: answer("The current state of documents that were not written.", _CONFLICTS)},
        errors=(404, 405, 415, 501, 507),
        body=request(
            _PUSH_REQUEST,
            {
                "collection": "orders",
                "rows": [{"newDocumentState": {"id": "o-1", "total": 5}, "assumedMasterState": None}],
            },
            "The new state of each document, and the state the client assumes.",
        ),
    ),
    Route(
        *("GET", f"{_DATABASE}/stream", Action.REPLICATION_PULL, ReplicationRoutes.stream, "followDocuments"),
        "Changed documents as server-sent events",
        {200: {"description": "Pages of documents, or `RESYNC`.", "content": {"text/event-stream": {}}}},
        errors=(404, 410, 501),
        parameters=[
            _COLLECTION_PARAM,
            _CHECKPOINT_PARAM,
            query("client", "The client id: changes pushed by the same `client` are not sent.", _CLIENT),
            *SHAPE_PARAMS,
        ],
    ),
    place="first",
)
