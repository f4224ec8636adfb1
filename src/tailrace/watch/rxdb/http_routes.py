"""`/replication/v1/databases/{db}/...`: pull, push and stream over HTTP."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, cast
from urllib.parse import parse_qs

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.protocol import stream_names
from tailrace.routing import responses
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

REPLICATION_PREFIX: Final = b"/replication/v1/databases/"
HEARTBEAT_S: Final = 15.0
UNSENT_BYTES_MAX: Final = 1024 * 1024
_NUMBER: Final = re.compile(r"[0-9]{1,4}\Z")
_PULL: Final = frozenset({"collection", "checkpoint", "limit", "deletedField", "stamps"})
_STREAM: Final = (_PULL - {"limit"}) | {"client"}
_PUSH: Final = frozenset({"client", "collection", "rows", "deletedField", "stamps"})
CLIENT_CHARS_MAX: Final = 64
_EVENTS: Final = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


class ReplicationSseTransport(ReplicationTransport):
    """A stream of server-sent events that carries one feed."""

    def __init__(self, replication: Replication, identity: Identity, outlet: ResponseStream) -> None:
        self._outlet = outlet
        super().__init__(replication, identity)
        self.task: asyncio.Task[None] | None = None
        self._beat_at = self.opened_at
        outlet.on_gone = self.gone
        outlet.on_drain = self.on_drain

    def begin(self, pos: str | None) -> None:
        """The place first: a browser that is cut off before anything happens goes on from there."""
        place = b"" if pos is None else b"id: %b\n" % pos.encode()
        retry_ms = random.randint(1000, 3000)  # noqa: S311 - spreads load
        self._write(b": connected\nretry: %d\n%b\n" % (retry_ms, place))

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes

    def _write(self, data: bytes) -> None:
        self._outlet.write(data)
        self.counted(len(data))
        self._beat_at = self.replication.context.loop.time()

    async def tell(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None:
        # An empty id makes a browser forget the one it has: what it would go on from is in doubt.
        self._write(b"id: %b\ndata: %b\n\n" % ((pos or "").encode(), result))

    def fail(self, refusal: TailraceError) -> None:
        self.close(1011, refusal.code)

    def close(self, code: int, reason: str) -> None:
        self._outlet.end()
        self.gone()

    def gone(self) -> None:
        super().gone()
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

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, raw: bytes) -> None:
        """`raw` is what follows the prefix, percent-encoded."""
        path = stream_names.decode_name(raw)
        if path is None:
            raise TailraceError("invalid_path", "a path is UTF-8")
        database, _, verb = path.partition("/")
        if verb == "push":
            if method != b"POST":
                raise responses.method_not_allowed("POST, OPTIONS")
            authorise(identity, Action.REPLICATION_PUSH, db=database)
            self._push(exchange, identity, database)
            return
        if verb not in ("pull", "stream"):
            raise TailraceError("not_found", "there is nothing at this path")
        if method not in (b"GET", b"HEAD"):
            raise responses.method_not_allowed("GET, HEAD, OPTIONS")
        authorise(identity, Action.REPLICATION_PULL, db=database)
        if verb == "pull":
            self._pull(exchange, identity, database)
        else:
            self._stream(exchange, identity, database)

    # -- pull ------------------------------------------------------------------------------------------

    def _pull(self, exchange: Exchange, identity: Identity, database: str) -> None:
        given = read_params(exchange, _PULL)
        name = self._collection(database, given)
        limit, shape = read_limit(given.get("limit", str(LIMIT_DEFAULT))), read_shape(given)
        raw, checkpoint = self._checkpoint(given.get("checkpoint"))
        asked = PullRequest(database, name, raw, checkpoint, limit, shape)

        async def run() -> None:
            try:
                pulled = await self._replication.pull(identity, asked)
                await _respond(exchange, pulled.pieces)
            except TailraceError as refusal:
                responses.respond_error(exchange, refusal)
            except Exception:
                logger.exception("a pull failed")
                responses.respond_error(exchange, TailraceError("internal", "the pull failed"))

        task = self._replication.spawn(run())

        def gone() -> None:
            task.cancel()

        exchange.on_gone = gone

    def _collection(self, database: str, given: dict[str, Any]) -> str:
        name = given.get("collection")
        if not isinstance(name, str):
            raise TailraceError("invalid_request", "the request names its collection")
        self._replication.book.database(database)
        return names.check_collection(name)

    def _checkpoint(self, text: str | None) -> tuple[Any, Checkpoint | None]:
        """As it was given, and what it says."""
        if not text:
            return None, None
        try:
            raw: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise TailraceError("invalid_checkpoint", "the checkpoint is JSON") from None
        return raw, read_checkpoint(raw, self._replication.signer)

    # -- push ------------------------------------------------------------------------------------------

    def _push(self, exchange: Exchange, identity: Identity, database: str) -> None:
        kind = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise TailraceError("unsupported_media_type", "the body is application/json")
        body = document.parse_json(exchange.body or b"{}", self._limits.watch_push_bytes)
        if not isinstance(body, dict):
            raise TailraceError("invalid_request", "the body is a JSON object")
        given = cast("Document", body)
        if unknown := sorted(set(given) - _PUSH):
            raise TailraceError("invalid_request", f"unknown member {unknown[0]!r}")
        name, shape = self._collection(database, given), read_shape(given)
        rows = read_push_rows(given.get("rows"), self._limits.watch_batch_writes, shape.deleted_field)

        def told(conflicts: list[Document], refusal: TailraceError | None) -> None:
            if refusal is not None:
                responses.respond_error(exchange, refusal)
                return
            head = responses.JSON_TYPE + responses.NO_STORE
            exchange.respond(200, head, orjson.dumps({"conflicts": conflicts}))

        client = read_client(identity, given.get("client"))
        self._replication.push(identity, database, name, rows, shape, client, told)

    # -- stream ----------------------------------------------------------------------------------------

    def _stream(self, exchange: Exchange, identity: Identity, database: str) -> None:
        given = read_params(exchange, _STREAM)
        name, shape = self._collection(database, given), read_shape(given)
        replication = self._replication
        _, checkpoint = self._checkpoint(given.get("checkpoint"))
        collection = replication.find(database, name)
        resumed = exchange.headers.get(b"last-event-id")
        doubt = False
        if resumed:
            # A browser that comes back: it knows nothing better than to be told that it has to pull.
            try:
                pos = {"updatedAt": 0, "id": "", "pos": resumed.decode("latin-1")}
                checkpoint = read_checkpoint(pos, replication.signer)
                walk = None if collection is None else replication.walk(identity, collection, checkpoint)
            except TailraceError as refusal:
                if refusal.code not in ("invalid_checkpoint", "checkpoint_expired"):
                    raise
                walk, doubt = None, True
        elif checkpoint is None or collection is None:
            walk = None
        else:
            walk = replication.walk(identity, collection, checkpoint)
        replication.check_room()
        outlet = exchange.open_stream(200, _EVENTS)
        if exchange.is_head:
            outlet.end()
            return
        wire = ReplicationSseTransport(replication, identity, outlet)
        client = read_client(identity, given.get("client"))
        feed = ReplicationFeed(replication, wire, database, name, shape, LIMIT_DEFAULT, walk, client=client)
        feed.doubtful = doubt
        wire.begin(None if doubt or feed.walk is None else replication.shown(feed.walk, (0, ""))["pos"])
        wire.task = replication.follow(feed)


async def _respond(exchange: Exchange, pieces: AsyncIterator[bytes]) -> None:
    """A small page is an answer like others; a large one is streamed as the client takes it."""
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
                with suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), POLL_S)
            outlet.write(piece)
            piece = await anext(pieces, None)
    except BaseException:
        # Half a page must not look like a whole one.
        exchange.connection.transport.abort()
        raise
    outlet.end()


def read_params(exchange: Exchange, known: frozenset[str]) -> dict[str, str]:
    try:
        given = parse_qs(exchange.query.decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise TailraceError("invalid_request", "the query string cannot be read") from None
    if unknown := sorted(set(given) - known):
        raise TailraceError("invalid_request", f"unknown parameter {unknown[0]!r}")
    return {name: values[-1] for name, values in given.items()}


def read_client(identity: Identity, given: object) -> tuple[str, str] | None:
    """Who a client says it is, among those of the same identity."""
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= CLIENT_CHARS_MAX:
        raise TailraceError("invalid_request", f"client is a text of 1 to {CLIENT_CHARS_MAX} characters")
    return identity.sub, given


def read_limit(given: object) -> int:
    """Documents in a page, as a number or as text."""
    text = str(given) if type(given) is int else given
    if isinstance(text, str) and _NUMBER.match(text) and 1 <= int(text) <= LIMIT_MAX:
        return int(text)
    raise TailraceError("invalid_request", f"limit is a number from 1 to {LIMIT_MAX}")


def read_shape(given: dict[str, Any]) -> DocumentShape:
    stamps = given.get("stamps", True)
    if stamps not in (True, False, "0", "1", "true", "false"):
        raise TailraceError("invalid_request", "stamps is true or false")
    return DocumentShape(
        check_deleted_field(given.get("deletedField", DELETED_FIELD)), stamps in (True, "1", "true")
    )
