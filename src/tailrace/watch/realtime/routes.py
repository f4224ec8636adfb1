"""The routes `/realtime/ws` and `/realtime/sse`: the two transports of realtime sessions."""

from __future__ import annotations

import random
import time
from typing import Any, Final, TypedDict, cast
from urllib.parse import parse_qs

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.common.token_bucket import Rate, TokenBucket
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.http.websocket import WebSocketConnection
from tailrace.routing import responses
from tailrace.routing.openapi import STRING, Count, Json, answer, array, obj, query, request
from tailrace.routing.table import Auth, Identify, Route, route_group
from tailrace.watch.query import read_query
from tailrace.watch.query_execution import DOCUMENT_QUERY
from tailrace.watch.realtime.envelopes import Envelope
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.realtime.session import RealtimeSession, authenticate
from tailrace.watch.realtime.subscription import (
    MessageRefusedError,
    acknowledge,
    default_database,
    resume,
    subscribe,
    unsubscribe,
)
from tailrace.watch.resume_tokens import Ticket
from tailrace.watch.rxdb.websocket import stop_stream

SUBPROTOCOL: Final = b"tailrace.v1"
MESSAGE_RATE: Final = Rate(per_s=50, burst=200)
BAD_IN_A_ROW: Final = 3
LIMITED_IN_A_ROW: Final = 20
SSE_SUBSCRIPTIONS_MAX: Final = 20
HEARTBEAT: Final = b": heartbeat\n\n"
TICKET_S_MAX: Final = 3600
_SECRET_PARAMS: Final = frozenset({"token", "access_token", "authorization", "jwt"})


class WebSocketTransport:
    name = "ws"
    each_token = False

    def __init__(self) -> None:
        self.connection: WebSocketConnection | None = None

    def send(self, envelope: Envelope, token: str | None) -> int:
        assert self.connection is not None
        encoded = envelope.websocket
        self.connection.send_encoded(encoded)
        return len(encoded)

    def keep_alive(self) -> int:
        return 0  # the connection sends pings itself

    def close(self, code: int, reason: str) -> None:
        if self.connection is not None:
            self.connection.close(code, reason)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.connection is None else self.connection.unsent_bytes


class SseTransport:
    name = "sse"
    each_token = True

    def __init__(self, outlet: ResponseStream) -> None:
        self._outlet = outlet

    def send(self, envelope: Envelope, token: str | None) -> int:
        """An empty token clears the last event id stored by the browser."""
        head = b"" if token is None else b"id: %b\n" % token.encode()
        data = b"%bdata: %b\n\n" % (head, envelope.body)
        self._outlet.write(data)
        return len(data)

    def keep_alive(self) -> int:
        self._outlet.write(HEARTBEAT)
        return len(HEARTBEAT)

    def close(self, code: int, reason: str) -> None:
        self._outlet.end()

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes


class WebSocketHandler:
    """Callbacks of the WebSocket layer: reads and dispatches client messages."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.session: RealtimeSession | None = None
        self._bad = 0
        self._limited = 0
        self._message_rate = TokenBucket(MESSAGE_RATE, time.monotonic_ns())

    def on_message(self, data: bytes, is_text: bool) -> None:
        session = self.session
        assert session is not None
        if session.ended or not self._within_rate(session):
            return
        message_id: str | None = None
        try:
            message = self._read(data, is_text)
            message_id = cast("str | None", message.get("id"))
            self._handle(session, message_id, message)
            self._bad = 0
        except MessageRefusedError as refused:
            more = dict(refused.more)
            close = more.pop("close", None)
            session.send_error(message_id, refused.code, refused.message, **more)
            if refused.code == "bad_message":
                self._bad += 1
                close = 4400 if self._bad >= BAD_IN_A_ROW else close
            if close is not None:
                session.close(close, refused.code)
        except TailraceError as error:
            retry = None if error.retry_after_s is None else error.retry_after_s * 1000
            session.send_error(message_id, error.code, error.message, retry_after_ms=retry)

    def _within_rate(self, session: RealtimeSession) -> bool:
        if not self._message_rate.take(time.monotonic_ns()):
            self._limited = 0
            return True
        self._limited += 1
        if self._limited >= LIMITED_IN_A_ROW:
            session.close(4429, "rate_limited")
        elif self._limited == 1:
            session.send_error(None, "rate_limited", "too many messages", retry_after_ms=1000)
        return False

    def _read(self, data: bytes, is_text: bool) -> dict[str, Any]:
        try:
            message: Any = orjson.loads(data) if is_text else None
        except orjson.JSONDecodeError:
            message = None
        if not isinstance(message, dict):
            raise MessageRefusedError("bad_message", "a message must be a JSON object in a text frame")
        found = cast("dict[str, Any]", message)
        if found.get("version", 1) != 1:
            raise MessageRefusedError("unsupported_version", "version must be 1", close=4400)
        message_id = found.get("id")
        if message_id is not None and (not isinstance(message_id, str) or len(message_id) > 256):
            found["id"] = None
            raise MessageRefusedError("bad_message", "id must be a string of at most 256 characters")
        return found

    def _handle(self, session: RealtimeSession, message_id: str | None, message: dict[str, Any]) -> None:
        kind, payload = message.get("type"), message.get("payload", {})
        if kind == "resume" and "payload" not in message:
            payload = {key: value for key, value in message.items() if key not in ("id", "type", "version")}
        if not isinstance(payload, dict):
            raise MessageRefusedError("bad_message", "payload must be an object")
        params = cast("dict[str, Any]", payload)
        if kind == "auth":
            authenticate(session, message_id, params)
            return
        if kind not in ("subscribe", "unsubscribe", "resume", "ack", "heartbeat", "stream"):
            raise MessageRefusedError("bad_message", f"unknown message type {str(kind)[:40]!r}")
        if session.identity is None:
            raise MessageRefusedError("unauthorized", "not authenticated, send auth first", close=4401)
        if session.database is None:
            raise MessageRefusedError("invalid_auth", "auth must name the database", close=4401)
        if kind == "subscribe":
            subscribe(session, message_id, params)
        elif kind == "unsubscribe":
            if not stop_stream(session, message_id, params):
                unsubscribe(session, message_id, params)
        elif kind == "stream" and self._gateway.on_stream is not None:
            self._gateway.on_stream(session, message_id, params)
        elif kind == "resume":
            resume(session, message_id, params, flat_form="payload" not in message)
        elif kind == "ack":
            acknowledge(session, params)
        else:
            session.send_tokens()

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        assert self.session is not None
        bytes_max = self._gateway.limits.watch_message_bytes
        self.session.send_error(None, "message_too_large", f"a message must have at most {bytes_max} bytes")
        self.session.close(1009, "message_too_large")

    def on_drain(self) -> None:
        if self.session is not None:
            self.session.on_drain()

    def on_silence(self) -> None:
        """Nothing to do: `on_close` follows."""

    def on_close(self, code: int, reason: str) -> None:
        if self.session is not None:
            self.session.on_gone()


class RealtimeRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._origins = AllowedOrigins(gateway.context.settings)

    def websocket(self, exchange: Exchange, identify: Identify) -> None:
        """Authentication is in the upgrade request or in the first message."""
        query = self._query(exchange)
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required",
                "this path requires a WebSocket upgrade",
                headers=(("Upgrade", "websocket"),),
            )
        self._origins.check_websocket(exchange)
        self._check_room()
        identity: Identity | None = None
        if self._gateway.verifier is None or b"authorization" in exchange.headers:
            identity = self._identify(exchange, identify)
        database = query.get("database")
        if identity is not None:
            database = database or default_database(identity)
            if database is not None:
                authorise(identity, Action.WATCH, db=database)
                self._gateway.registry.database(database)
        client, transport = WebSocketHandler(self._gateway), WebSocketTransport()
        offered = exchange.headers.get(b"sec-websocket-protocol", b"").split(b",")
        chosen = SUBPROTOCOL if SUBPROTOCOL in [one.strip() for one in offered] else None
        transport.connection = exchange.upgrade_websocket(
            client, subprotocol=chosen, message_bytes=self._gateway.limits.watch_message_bytes
        )
        client.session = RealtimeSession(self._gateway, transport, identity, database)

    def _identify(self, exchange: Exchange, identify: Identify) -> Identity:
        try:
            return identify(exchange)
        except TailraceError as error:
            self._gateway.count_auth_failure(error.code)
            raise

    def events(self, exchange: Exchange, identify: Identify) -> None:
        """204 stops an EventSource that reconnects to something it may no longer read."""
        try:
            self._events(exchange, identify)
        except TailraceError as error:
            reconnects = exchange.method == b"GET" and b"last-event-id" in exchange.headers
            if not reconnects or error.code not in ("forbidden", "not_found"):
                raise
            exchange.respond(204, responses.NO_STORE)

    def _events(self, exchange: Exchange, identify: Identify) -> None:
        posted = exchange.method == b"POST"
        query = {} if posted else self._query(exchange)
        if "ticket" in query:
            identity, request = self._redeem_ticket(query["ticket"])
        else:
            identity = self._identify(exchange, identify)
            _check_scope(identity)
            request = self._read_body(exchange) if posted else _request_from_query(query)
        database = request.get("database") or default_database(identity)
        if not isinstance(database, str):
            authorise(identity, Action.WATCH, db="")
            raise TailraceError("invalid_request", "database is required")
        authorise(identity, Action.WATCH, db=database)
        self._gateway.registry.database(database)
        listed = _read_subscriptions(request)
        for one in listed:
            read_query(one.get("query"), live=True)  # reject invalid queries before the response starts
        accepts = exchange.headers.get(b"accept", b"")
        if posted and b"application/json" in accepts and b"text/event-stream" not in accepts:
            self._issue_ticket(exchange, identity, {**request, "database": database})
            return
        self._check_room()
        cursor = exchange.headers.get(b"last-event-id", b"").decode("latin-1") or request.get("cursor")
        self._stream(exchange, identity, database, listed, cursor)

    def _stream(
        self, exchange: Exchange, identity: Identity, database: str, listed: list[dict[str, Any]], cursor: Any
    ) -> None:
        head = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
        outlet = exchange.open_stream(200, head)
        if exchange.is_head:
            outlet.end()
            return
        session = RealtimeSession(self._gateway, SseTransport(outlet), identity, database)
        outlet.on_gone = session.on_gone
        outlet.on_drain = session.on_drain
        outlet.write(b": connected\nretry: %d\n\n" % random.randint(1000, 3000))  # noqa: S311 - spreads load
        tokens = _cursor_tokens(cursor)
        for one in listed:
            if session.ended:
                return
            sub_id = one["id"]
            try:
                if cursor:
                    # Without its own token a subscription cannot resume and gets resync-required.
                    resume(session, sub_id, {**one, "subId": sub_id, "token": tokens.get(sub_id, "")})
                else:
                    subscribe(session, sub_id, one)
            except MessageRefusedError as refused:
                more = {key: value for key, value in refused.more.items() if key != "close"}
                session.send_error(sub_id, refused.code, refused.message, **more)
                session.close(1000, refused.code)
            except TailraceError as error:
                session.send_error(sub_id, error.code, error.message, sub_id=sub_id)
                session.close(1000, error.code)
        if cursor and not any(one.state != "invalid" for one in session.subscriptions.values()):
            session.close(1000, "no subscription could be resumed")

    def _read_body(self, exchange: Exchange) -> dict[str, Any]:
        bytes_max = self._gateway.limits.watch_message_bytes
        if len(exchange.body) > bytes_max:
            raise TailraceError("payload_too_large", f"the body must have at most {bytes_max} bytes")
        try:
            params = orjson.loads(exchange.body)
        except orjson.JSONDecodeError:
            raise TailraceError("invalid_json", "the body must be a JSON object") from None
        if not isinstance(params, dict):
            raise TailraceError("invalid_request", "the body must be a JSON object")
        return cast("dict[str, Any]", params)

    def _issue_ticket(self, exchange: Exchange, identity: Identity, request: dict[str, Any]) -> None:
        """For browsers, whose EventSource cannot set headers."""
        signer = self._gateway.signer
        if signer is None:
            raise TailraceError("unavailable", "the token signing key is not available yet, retry")
        expires_s = self._gateway.now_s() + TICKET_S_MAX
        if identity.expires_at is not None:
            expires_s = min(expires_s, identity.expires_at)
        ticket = Ticket(
            expires_s,
            identity.sub,
            sorted(identity.scopes),
            None if identity.dbs is None else list(identity.dbs),
            identity.anonymous,
            identity.claims,
            identity.expires_at,
            orjson.dumps(request),
            identity.token_id,
            identity.issued_at,
            identity.credential,
            identity.origin_id,
        )
        body = {"ticket": signer.ticket(ticket), "expiresAt": int(expires_s * 1000)}
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    def _redeem_ticket(self, text: str) -> tuple[Identity, dict[str, Any]]:
        signer = self._gateway.signer
        ticket = None if signer is None else signer.read_ticket(text)
        verifier = self._gateway.verifier
        # Tickets issued while authentication was off are invalid once it is on.
        unauthenticated = ticket is not None and verifier is not None and not ticket.vouched_by
        if ticket is None or unauthenticated or ticket.expires_s <= self._gateway.now_s():
            raise TailraceError(
                "unauthorized",
                "the ticket is invalid or expired",
                headers=(("WWW-Authenticate", 'Bearer realm="tailrace"'),),
            )
        identity = Identity(
            sub=ticket.sub,
            scopes=frozenset(ticket.scopes),
            dbs=None if ticket.dbs is None else tuple(ticket.dbs),
            expires_at=ticket.token_expires_s,
            anonymous=ticket.anonymous,
            claims=ticket.claims,
            token_id=ticket.token_id,
            issued_at=ticket.issued_at,
            credential=ticket.vouched_by,
            origin_id=ticket.origin_id,
        )
        if verifier is not None:
            verifier.check_valid(identity)
        return identity, orjson.loads(ticket.request)

    def _query(self, exchange: Exchange) -> dict[str, str]:
        """The query parameters; secrets are rejected because URLs appear in logs."""
        try:
            params = parse_qs(exchange.query.decode(), keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise TailraceError("invalid_request", "the query string is invalid") from None
        if _SECRET_PARAMS & {name.lower() for name in params}:
            raise TailraceError("invalid_request", "send the token in a header or a message, not in the URL")
        return {name: values[-1] for name, values in params.items()}

    def _check_room(self) -> None:
        if len(self._gateway.sessions) >= self._gateway.limits.watch_connections:
            raise TailraceError("overloaded", "too many realtime connections, retry later")


def _check_scope(identity: Identity) -> None:
    """Checked before the request is parsed, so that unauthorized clients learn nothing."""
    if identity.public or not identity.scopes & Action.WATCH.scopes:
        authorise(identity, Action.WATCH, db="")


def _request_from_query(query: dict[str, str]) -> dict[str, Any]:
    """The request of a URL with one subscription."""
    known = {"database", "collection", "filters", "where", "snapshot", "includeData", "autoResync", "cursor"}
    if unknown := sorted(set(query) - known):
        raise TailraceError("invalid_request", f"unknown parameter {unknown[0]!r}")
    selection: dict[str, Any] = {"collection": query.get("collection")}
    if "where" in query:
        selection["where"] = query["where"]
    if "filters" in query:
        try:
            selection["filters"] = orjson.loads(query["filters"])
        except orjson.JSONDecodeError:
            raise TailraceError("invalid_query", "filters must be a JSON array") from None
    one = {
        "id": "default",
        "query": selection,
        "sendSnapshot": _read_flag(query, "snapshot", "0"),
        "includeData": _read_flag(query, "includeData", "1"),
        "autoResync": _read_flag(query, "autoResync", "0"),
    }
    return {"database": query.get("database"), "cursor": query.get("cursor"), "subscriptions": [one]}


def _read_flag(query: dict[str, str], name: str, default: str) -> bool:
    params = query.get(name, default)
    if params not in ("0", "1", "true", "false"):
        raise TailraceError("invalid_request", f"{name} must be 0 or 1")
    return params in ("1", "true")


def _read_subscriptions(request: dict[str, Any]) -> list[dict[str, Any]]:
    listed = request.get("subscriptions")
    if not isinstance(listed, list) or not 1 <= len(cast("list[Any]", listed)) <= SSE_SUBSCRIPTIONS_MAX:
        raise TailraceError(
            "invalid_request", f"subscriptions must be a list of 1 to {SSE_SUBSCRIPTIONS_MAX} objects"
        )
    found: list[dict[str, Any]] = []
    for item in cast("list[Any]", listed):
        one = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        if not isinstance(one.get("id"), str):
            raise TailraceError("invalid_request", "a subscription must have an id and a query")
        found.append(one)
    return found


def _cursor_tokens(cursor: Any) -> dict[str, str]:
    """The tokens by subscription of a `connection_token`."""
    try:
        found: Any = orjson.loads(bytes.fromhex(cursor))
    except (ValueError, TypeError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}


class IssuedTicket(TypedDict):
    ticket: str
    expiresAt: Count


_EVENTS: Final[Json] = {"text/event-stream": {}}
_SUBSCRIPTIONS: Final = obj(
    {
        "subscriptions": array(
            obj({"id": STRING, "query": DOCUMENT_QUERY}), minItems=1, maxItems=SSE_SUBSCRIPTIONS_MAX
        )
    },
    {"database": STRING},
)
_FLAG: Final[Json] = {"enum": ["0", "1"]}
ROUTES: Final = route_group(
    "watch",
    Route(
        *("GET", "/realtime/ws", Action.PUBLIC, RealtimeRoutes.websocket, "watchByWebSocket"),
        "Live queries over a WebSocket",
        {101: answer("The connection is a WebSocket now.")},
        errors=(401, 403, 404, 426, 429),
        parameters=[query("database", "The database, unless `auth` names it.")],
        auth=Auth.BY_HANDLER,
    ),
    Route(
        *("GET", "/realtime/sse", Action.WATCH, RealtimeRoutes.events, "watchByEvents"),
        "One live query as server-sent events",
        {200: {"description": "Envelopes as server-sent events.", "content": _EVENTS}},
        errors=(404, 501),
        parameters=[
            query("database", "The database, if there are several."),
            query("collection", "The collection; not with a ticket."),
            query("filters", "A JSON array of filters."),
            query("where", "An expression."),
            query("snapshot", "`1`: first send all matching documents.", _FLAG),
            query("includeData", "`0`: events without data.", _FLAG),
            query("autoResync", "`1`: resynchronise automatically.", _FLAG),
            query("cursor", "The `id` to continue from, as `Last-Event-ID`."),
            query("ticket", "The ticket of a POST."),
        ],
        auth=Auth.BY_HANDLER,
    ),
    Route(
        *("POST", "/realtime/sse", Action.WATCH, RealtimeRoutes.events, "watchSeveralByEvents"),
        "Several live queries as server-sent events, or a ticket for them",
        {
            200: {
                "description": "Envelopes as server-sent events.",
                "content": {**_EVENTS, "application/json": {"schema": IssuedTicket}},
            }
        },
        errors=(404, 501),
        body=request(
            _SUBSCRIPTIONS,
            {"subscriptions": [{"id": "one", "query": {"collection": "orders"}, "sendSnapshot": True}]},
            "The queries.",
        ),
        auth=Auth.BY_HANDLER,
    ),
    place="first",
)
