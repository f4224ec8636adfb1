"""Replication over WebSocket: `/replication/ws`, and `stream` on `/realtime/ws`.

`/replication/ws` implements the protocol of RxDB's WebSocket plugin. Requests are
`{"id", "collection", "method", "params"}`, responses `{"id", "collection", "result"}`. There is no error
message: an error closes the connection, and the client reconnects.

`stream` starts replication on a realtime connection next to its subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, cast

import orjson

from tailrace.auth import ANONYMOUS, Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import wait_event
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange
from tailrace.http.websocket import WebSocketConnection
from tailrace.protocol.websocket_frames import CONTINUATION, TEXT, encode_frame
from tailrace.routing.openapi import answer, query
from tailrace.routing.table import Auth, Identify, Route, route_group
from tailrace.watch import document, names
from tailrace.watch.document import Document
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.envelopes import Envelope
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import MessageRefusedError, check_subscription_id, default_database
from tailrace.watch.rxdb.feed import POLL_S, DocumentShape, ReplicationFeed, ReplicationTransport
from tailrace.watch.rxdb.http_routes import SHAPE_PARAMS, read_limit, read_params, read_shape
from tailrace.watch.rxdb.protocol import read_checkpoint, read_push_rows
from tailrace.watch.rxdb.replication import LIMIT_DEFAULT, LIMIT_MAX, PullRequest, Replication, single_piece

logger = logging.getLogger("tailrace.watch")

ID_CHARS_MAX: Final = 256
COLLECTIONS_MAX: Final = 100  # per connection
WAITING_MAX: Final = 64  # frames; above it the socket is not read
AUTH_BYTES_MAX: Final = 64 * 1024
HELD_BYTES_MAX: Final = 64 * 1024 * 1024  # from all clients that are not authenticated
DRAIN_QUIET_S: Final = 0.25  # silence after which a stopping server expects no more frames
DRAIN_QUIET_S_MAX: Final = 1.5  # at most this long
_PARAMS: Final = frozenset({"database", "deletedField", "stamps"})
_CLOSES: Final = {
    "unauthorized": 4401,
    "forbidden": 4403,
    "read_only_collection": 4403,
    "checkpoint_expired": 4410,
    "overloaded": 1013,
    "unavailable": 1013,
    "insufficient_storage": 1013,
    "append_timeout": 1013,
    "request_timeout": 1013,
    "internal": 1011,
}


class ReplicationCall(NamedTuple):
    """A request of a client."""

    id: str
    collection: str
    method: str
    params: list[Any]


class ReplicationSocket(ReplicationTransport):
    """One client's connection; its requests are handled one after the other."""

    def __init__(
        self, replication: Replication, identity: Identity | None, database: str | None, shape: DocumentShape
    ) -> None:
        self.connection: WebSocketConnection | None = None
        super().__init__(replication, identity)
        self._database = database
        self._shape = shape
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._held_bytes = 0
        self._worker: asyncio.Task[None] | None = None
        self._feeds: dict[str, tuple[ReplicationFeed, asyncio.Task[None]]] = {}
        # The frames of one message must not be interleaved with those of another.
        self._send_lock = asyncio.Lock()
        self._draining = False
        self._heard = asyncio.Event()
        self._held_responses: list[bytes] = []  # while draining: sent together with the close
        self._held_responses_bytes = 0

    # -- the connection --------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.connection is None else self.connection.unsent_bytes

    def close(self, code: int, reason: str) -> None:
        if self.connection is not None:
            self.connection.close(code, reason)
        self.on_gone()

    def drain(self) -> None:
        """Answer all requests before closing: the plugin never retries a request lost with its connection.

        The plugin sends its next request as soon as it has a response. So responses are held back until no
        more requests arrive, and are sent in one write with the close; later requests wait for the client's
        next connection.
        """
        if self.authenticated is None:
            super().drain()
        elif not self._draining:
            self._draining = True
            self._end_feeds()
            self.replication.tasks.start(self._drain())

    async def _drain(self) -> None:
        loop = self.replication.context.loop
        until = loop.time() + DRAIN_QUIET_S_MAX
        while not self.ended and loop.time() < until:
            self._heard.clear()
            if not await wait_event(self._heard, DRAIN_QUIET_S) and self._worker is None:
                break
        if self._worker is not None:
            await asyncio.wait((self._worker,))
        if not self.ended:
            self._flush_held_responses()
            super().drain()

    def _flush_held_responses(self) -> None:
        assert self.connection is not None
        for frame in self._held_responses:
            self.connection.send_encoded(frame)
            self.count_sent(len(frame))
        self._held_responses.clear()
        self.replication.held_bytes -= self._held_responses_bytes
        self._held_responses_bytes = 0

    def _end_feeds(self) -> None:
        for _, task in self._feeds.values():
            task.cancel()
        self._feeds.clear()

    def on_gone(self) -> None:
        super().on_gone()
        self._release_waiting()
        self.replication.held_bytes -= self._held_responses_bytes
        self._held_responses_bytes = 0
        self._held_responses.clear()
        self._waiting.clear()
        self._end_feeds()
        if self._worker is not None and self._worker is not asyncio.current_task():
            self._worker.cancel()

    def on_message(self, data: bytes, is_text: bool) -> None:
        if self.ended:
            return
        self._heard.set()
        if not is_text:
            self.close(4400, "a message must be a JSON object in a text frame")
            return
        if self.authenticated is None and self._must_wait_for_auth(data):
            return
        if self.authenticated is None:
            self._waiting.appendleft(data)  # before the requests that wait for it
        else:
            self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._process_next()

    def on_tick(self, now: float) -> None:
        super().on_tick(now)
        for feed, _ in self._feeds.values():
            feed.send_resync_reminder(now)

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        self.close(1009, f"a message must have at most {self.replication.limits.watch_push_bytes} bytes")

    def on_silence(self) -> None:
        """Nothing to do: `on_close` follows."""

    def on_close(self, code: int, reason: str) -> None:
        self.on_gone()

    def fail(self, error: TailraceError) -> None:
        self.close(_CLOSES.get(error.code, 4400), f"{error.code}: {error.message}")

    def _must_wait_for_auth(self, data: bytes) -> bool:
        """Whether a frame must wait until the client is authenticated.

        A client that reconnects sends its unsent requests first and `auth` last.
        """
        if len(data) <= AUTH_BYTES_MAX and _is_auth_frame(data):
            return False
        self._held_bytes += len(data)
        self.replication.held_bytes += len(data)
        self._waiting_bytes += len(data)
        if (
            len(self._waiting) >= WAITING_MAX
            or self._held_bytes > self.replication.limits.watch_push_bytes + AUTH_BYTES_MAX
            or self.replication.held_bytes > HELD_BYTES_MAX
        ):
            self.close(4401, "not authenticated, send auth first")
        else:
            self._waiting.append(data)
        return True

    def _release_waiting(self) -> None:
        self.replication.held_bytes -= self._held_bytes
        self._held_bytes = 0

    # -- frames ----------------------------------------------------------------------------------------

    def _process_next(self) -> None:
        assert self.connection is not None
        bytes_max = self.replication.limits.watch_push_bytes
        if len(self._waiting) >= WAITING_MAX or self._waiting_bytes >= bytes_max:
            self.connection.pause_reading()
        if self._worker is None:
            self._worker = self.replication.tasks.start(self._process())

    async def _process(self) -> None:
        try:
            while self._waiting and not self.ended:
                data = self._waiting.popleft()
                self._waiting_bytes -= len(data)
                await self._handle(self._read(data))
                if self.authenticated is None:
                    break
        except TailraceError as error:
            self.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("replication request failed")
            self.close(1011, "internal error")
        finally:
            self._worker = None
        if self.ended:
            return
        assert self.connection is not None
        self.connection.resume_reading()

    def _read(self, data: bytes) -> ReplicationCall:
        found = document.parse_json(data, self.replication.limits.watch_push_bytes)
        frame = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        call_id, name = frame.get("id"), frame.get("collection")
        method, params = frame.get("method"), frame.get("params")
        if (
            not (isinstance(call_id, str) and isinstance(name, str) and isinstance(method, str))
            or len(call_id) > ID_CHARS_MAX
            or not isinstance(params, list)
        ):
            raise TailraceError("invalid_request", "a message must have id, collection, method and params")
        return ReplicationCall(call_id, name, method, cast("list[Any]", params))

    async def _handle(self, call: ReplicationCall) -> None:
        if call.method == "auth":
            self._authenticate(call.params)
            return
        if self.authenticated is None:
            raise TailraceError("unauthorized", "not authenticated, send auth first")
        name = names.check_collection(call.collection)
        if call.method == "masterChangesSince":
            await self._pull(call, name)
        elif call.method == "masterWrite":
            await self._push(call, name)
        elif call.method == "masterChangeStream$":
            self._follow(name)
        else:
            raise TailraceError("invalid_request", f"unknown method {call.method[:40]!r}")

    def _authenticate(self, params: list[Any]) -> None:
        verifier = self.replication.gateway.verifier
        if verifier is None:
            return
        headers = cast("dict[str, Any]", params[0]) if params and isinstance(params[0], dict) else {}
        token = next((value for name, value in headers.items() if name.lower() == "authorization"), None)
        if not isinstance(token, str):
            raise TailraceError("unauthorized", "auth must have the header authorization")
        identity = verifier.verify(token.encode("utf-8", "replace"))
        self._database = self._database or default_database(identity)
        self.authenticated = identity
        self._authorised_database(Action.REPLICATION_PULL)
        self._release_waiting()
        for feed, _ in self._feeds.values():
            feed.woken.set()  # the new identity may read other documents

    def _authorised_database(self, action: Action) -> str:
        """The database of the connection; raises unless the action is allowed."""
        if self._database is None:
            raise TailraceError("invalid_request", "database is required")
        authorise(self.identity, action, db=self._database)
        self.replication.registry.database(self._database)
        return self._database

    # -- methods ---------------------------------------------------------------------------------------

    async def _pull(self, call: ReplicationCall, name: str) -> None:
        database = self._authorised_database(Action.REPLICATION_PULL)
        raw = call.params[0] if call.params else None
        limit = read_limit(call.params[1] if len(call.params) > 1 else LIMIT_DEFAULT)
        checkpoint = read_checkpoint(raw, self.replication.signer)
        request = PullRequest(database, name, raw, checkpoint, limit, self._shape)
        pulled = await self.replication.pull(self.identity, request, _response_head(call), b"}")
        await self._send_message(pulled.pieces)
        feed = self._feeds.get(name)
        if feed is not None:
            feed[0].pulled, feed[0].joined = pulled.cursor, True

    async def _push(self, call: ReplicationCall, name: str) -> None:
        database = self._authorised_database(Action.REPLICATION_PUSH)
        limits = self.replication.limits
        raw = call.params[0] if call.params else None
        rows = read_push_rows(raw, limits.watch_batch_writes, self._shape.deleted_field)
        settled: asyncio.Future[list[Document]] = self.replication.context.loop.create_future()

        def on_pushed(conflicts: list[Document], error: TailraceError | None) -> None:
            if settled.done():
                return  # the client disconnected
            if error is None:
                settled.set_result(conflicts)
            else:
                settled.set_exception(error)

        # The response must precede feed messages about the same documents.
        async with self._send_lock:
            await self.replication.registry.log.backpressure_queue.submit(
                lambda: self.replication.push(
                    self.identity, database, name, rows, self._shape, self, on_pushed
                )
            )
            conflicts = await settled
            await self._send_pieces(single_piece(_response_head(call) + orjson.dumps(conflicts) + b"}"))

    def _follow(self, name: str) -> None:
        """Start the feed of a collection; repeating it has no effect."""
        database = self._authorised_database(Action.REPLICATION_PULL)
        if name in self._feeds or self._draining:
            return
        if len(self._feeds) >= COLLECTIONS_MAX:
            raise TailraceError(
                "overloaded", f"a connection may follow at most {COLLECTIONS_MAX} collections"
            )
        feed = ReplicationFeed(
            self.replication, self, database, name, self._shape, LIMIT_DEFAULT, joined=False, client=self
        )
        self._feeds[name] = (feed, self.replication.follow(feed))

    async def send(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None:
        head = b'{"id":"stream","collection":%b,"result":' % orjson.dumps(feed.name)
        await self._send_message(single_piece(head + result + b"}"))

    async def _send_message(self, pieces: AsyncIterator[bytes]) -> None:
        """Send one message, a frame per piece, at the pace of the client."""
        async with self._send_lock:
            await self._send_pieces(pieces)

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        opcode, piece = TEXT, await anext(pieces)
        while True:
            following = await anext(pieces, None)
            if not await self.wait_for_room():
                return
            self._send_frame(encode_frame(opcode, piece, fin=following is None))
            if following is None:
                return
            opcode, piece = CONTINUATION, following

    def _send_frame(self, frame: bytes) -> None:
        assert self.connection is not None
        if self._draining and self.replication.held_bytes + len(frame) <= HELD_BYTES_MAX:
            self._held_responses.append(frame)
            self._held_responses_bytes += len(frame)
            self.replication.held_bytes += len(frame)
            return
        self._flush_held_responses()  # no room to hold more: send everything in order
        self.connection.send_encoded(frame)
        self.count_sent(len(frame))


def _is_auth_frame(data: bytes) -> bool:
    try:
        frame: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return True  # invalid: rejected when it is handled
    return not isinstance(frame, dict) or cast("dict[str, Any]", frame).get("method") == "auth"


def _response_head(call: ReplicationCall) -> bytes:
    return b'{"id":%b,"collection":%b,"result":' % (orjson.dumps(call.id), orjson.dumps(call.collection))


class ReplicationSocketRoute:
    def __init__(self, replication: Replication) -> None:
        self._replication = replication
        self._origins = AllowedOrigins(replication.context.settings)

    def websocket(self, exchange: Exchange, identify: Identify) -> None:
        """Authentication is in the upgrade request or in an `auth` message."""
        replication = self._replication
        params = read_params(exchange, _PARAMS)
        shape = read_shape(params)
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required",
                "this path requires a WebSocket upgrade",
                headers=(("Upgrade", "websocket"),),
            )
        self._origins.check_websocket(exchange)
        replication.check_room()
        identity: Identity | None = None
        if replication.gateway.verifier is None:
            identity = ANONYMOUS
        elif b"authorization" in exchange.headers:
            identity = identify(exchange)
        database = params.get("database")
        if identity is not None:
            database = database or default_database(identity)
            authorise(identity, Action.REPLICATION_PULL, db=database or "")
        if database is not None:
            names.check_database(database)
            if identity is not None:
                replication.registry.database(database)
        socket = ReplicationSocket(replication, identity, database, shape)
        try:
            socket.connection = exchange.upgrade_websocket(
                socket, message_bytes=replication.limits.watch_push_bytes
            )
        except BaseException:
            socket.on_gone()
            raise
        socket.connection.drains_itself = True


class StreamListener:
    """A stream on a realtime connection; ends with the connection or with resync-required."""

    def __init__(self, replication: Replication, session: RealtimeSession, stream_id: str) -> None:
        self._replication = replication
        self._session = session
        self._id = stream_id
        self._ended = False

    @property
    def identity(self) -> Identity:
        assert self._session.identity is not None
        return self._session.identity

    async def wait_for_room(self) -> bool:
        session = self._session
        while not session.ended and not self._ended:
            if session.has_room and not self._replication.is_overloaded:
                return True
            session.drained.clear()
            await wait_event(session.drained, POLL_S)
        return False

    async def send(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None:
        database = feed.database
        if pos is None:
            self._end()
            payload = {
                "subId": self._id,
                "reason": "gap",
                "generation": None,
                "retryAfterMs": 0,
                "autoResync": False,
            }
            self._session.send(
                envelopes.subscription_notice("resync-required", database, [self._id], payload)
            )
            return
        event = b'{"streamId":%b,%b,"upToDate":%b}' % (
            orjson.dumps(self._id),
            result[1:-1],
            b"true" if feed.is_up_to_date else b"false",
        )
        self._session.send(
            Envelope(
                b'{"type":"stream-event","version":1,"database":%b,"payload":%b,"extensions":{}}'
                % (orjson.dumps(database), event)
            )
        )

    def fail(self, error: TailraceError) -> None:
        self._end()
        self._session.send_error(self._id, error.code, error.message, sub_id=self._id)

    def _end(self) -> None:
        self._ended = True
        self._session.streams.pop(self._id, None)


class RealtimeStreams:
    """Starts streams on realtime connections."""

    def __init__(self, replication: Replication) -> None:
        self._replication = replication

    def start(self, session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
        replication = self._replication
        stream_id = check_subscription_id(message_id, "the id of the stream message")
        assert session.identity is not None
        assert session.database is not None
        authorise(session.identity, Action.REPLICATION_PULL, db=session.database)
        name, limit = payload.get("collection"), payload.get("batchSize", LIMIT_DEFAULT)
        if not isinstance(name, str):
            raise MessageRefusedError("bad_message", "collection is required")
        if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
            raise MessageRefusedError("bad_message", f"batchSize must be 1 to {LIMIT_MAX}")
        self._admit(session, stream_id)
        names.check_collection(name)
        checkpoint = read_checkpoint(payload.get("checkpoint"), replication.signer)
        collection = replication.find(session.database, name)
        cursor = None if collection is None else replication.cursor(session.identity, collection, checkpoint)
        listener = StreamListener(replication, session, stream_id)
        feed = ReplicationFeed(replication, listener, session.database, name, DocumentShape(), limit, cursor)
        generation = 1 if feed.cursor is None else feed.cursor.generation
        acknowledged = {"status": "ok", "subId": stream_id, "kind": "stream", "generation": generation}
        session.send(envelopes.reply("subscribe_ack", message_id, acknowledged))
        session.streams[stream_id] = replication.follow(feed)

    def _admit(self, session: RealtimeSession, stream_id: str) -> None:
        known = session.subscriptions.get(stream_id)
        if stream_id in session.streams or (known is not None and known.state != "invalid"):
            raise MessageRefusedError("duplicate_id", f"subscription {stream_id!r} already exists")
        count = len(session.streams) + len(session.subscriptions)
        if count >= self._replication.limits.watch_subscriptions:
            raise MessageRefusedError(
                "limit_exceeded",
                f"a connection may have at most {self._replication.limits.watch_subscriptions} subscriptions",
                limit="subscriptions",
            )


def stop_stream(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> bool:
    """End a stream; False if it does not exist."""
    stream_id = payload.get("id")
    task = session.streams.pop(stream_id, None) if isinstance(stream_id, str) else None
    if task is None:
        return False
    task.cancel()
    session.send(envelopes.reply("unsubscribe_ack", message_id, {"status": "ok"}))
    return True


ROUTES: Final = route_group(
    "replication",
    Route(
        *("GET", "/replication/ws", Action.PUBLIC, ReplicationSocketRoute.websocket, "replicateByWebSocket"),
        "The WebSocket protocol of RxDB's replication",
        {101: answer("The connection is a WebSocket now.")},
        errors=(401, 403, 404, 426, 429),
        parameters=[query("database", "The database, if there are several."), *SHAPE_PARAMS],
        auth=Auth.BY_HANDLER,
    ),
    place="first",
)
