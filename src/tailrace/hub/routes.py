"""HTTP and WebSocket routes of the hub, with connection admission.

A browser cannot read the status or headers of a failed upgrade. So a connection over the rate is upgraded,
sent `hub:rate_limited` and closed. That costs more than an HTTP response, so these refusals have rates of
their own; beyond them the response is 429.
"""

from __future__ import annotations

import ipaddress
import random
from time import perf_counter
from typing import Any, Final, Literal, TypedDict, cast

import msgspec
import orjson

from tailrace.auth import Action, Identity
from tailrace.common.errors import ERROR_STATUS, TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange
from tailrace.http.websocket import WebSocketConnection
from tailrace.hub import decide, session_lifecycle
from tailrace.hub.envelope import new_id
from tailrace.hub.errors import HubError
from tailrace.hub.policy import principal_from_identity
from tailrace.hub.runner import EffectRunner
from tailrace.hub.sender_identity import identity_path
from tailrace.hub.session import CONNECTED, Session
from tailrace.routing import responses
from tailrace.routing.client_address import client_network, load_trusted_proxies
from tailrace.routing.openapi import (
    COUNT,
    OBJECT,
    STRING,
    Component,
    Count,
    Json,
    answer,
    nullable,
    obj,
    request,
)
from tailrace.routing.table import Auth, Identify, Route, route_group

ALL_ADDRESSES: Final = ""  # the bucket key of all addresses together
PER_ADDRESS_PER_S: Final = 20
PER_ADDRESS_BURST: Final = 100
# Refusals over a WebSocket: per address, and in total. Each is open for 2 s at most.
REFUSED_PER_ADDRESS: Final = 20
REFUSED_BURST: Final = 100
# Spreads the retries of clients that were refused together.
RETRY_MS: Final = 1000
FULL_RETRY_MS: Final = 5000


class ConnectionRefusal(msgspec.Struct, frozen=True):
    message: str
    reason: str
    retry_after_ms: int
    over_socket: bool  # sent over the WebSocket; else as the HTTP response


class ConnectionAdmission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        per_s = max(1, limits.hub_connects_per_s)
        self._buckets = TokenBuckets(
            {
                "address": Rate(PER_ADDRESS_PER_S, PER_ADDRESS_BURST),
                "server": Rate(per_s, per_s),
                "refused_address": Rate(REFUSED_PER_ADDRESS, REFUSED_PER_ADDRESS),
                "refused": Rate(REFUSED_BURST, REFUSED_BURST),
            }
        )

    def decide(self, address: str, connections: int, now_ns: int) -> ConnectionRefusal | None:
        """None if the connection is accepted. `connections` is the number of open ones."""
        limits = self._limits
        network = None if _is_loopback(address) else client_network(address)
        if connections >= limits.hub_connections:
            message = f"limit of {limits.hub_connections} connections reached"
            return self._refusal(message, "connections", network, FULL_RETRY_MS, now_ns)
        if not limits.hub_connects_per_s:
            return None
        # The address first: one that floods must not use up the server's bucket.
        if network is not None and (wait_ms := self._buckets.take(network, "address", now_ns)):
            message = f"more than {PER_ADDRESS_PER_S} new connections per second from one address"
            return self._refusal(message, "address", network, wait_ms, now_ns)
        wait_ms = self._buckets.take(ALL_ADDRESSES, "server", now_ns)
        if not wait_ms:
            return None
        if network is not None:
            self._buckets.give_back(network, "address")
        message = f"more than {limits.hub_connects_per_s} new connections per second"
        return self._refusal(message, "server", network, wait_ms, now_ns)

    def _refusal(
        self, message: str, reason: str, network: str | None, wait_ms: int, now_ns: int
    ) -> ConnectionRefusal:
        buckets = self._buckets
        has_used_up = network is not None and buckets.take(network, "refused_address", now_ns) > 0
        over_socket = not has_used_up and not buckets.take(ALL_ADDRESSES, "refused", now_ns)
        spread_ms = random.randint(0, RETRY_MS)  # noqa: S311 - spreads load
        return ConnectionRefusal(message, reason, max(RETRY_MS, wait_ms) + spread_ms, over_socket)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


MEASURE_INTERVAL: Final = 16
CLOSE_HEARTBEAT_TIMEOUT: Final = 4408


class HubSocket:
    """Callbacks of one hub WebSocket."""

    __slots__ = ("_runner", "_unmeasured", "session")

    def __init__(self, runner: EffectRunner, upgrade_token: str | None) -> None:
        self._runner = runner
        self._unmeasured = 0
        now_ms = runner.now_ms()
        self.session = Session(f"session-{new_id(now_ms)}", now_ms)
        self.session.upgrade_token = upgrade_token

    def opened(self, connection: WebSocketConnection) -> None:
        limits = self._runner.hub.limits
        connection.ping_s = limits.hub_heartbeat_ms / 1000
        connection.dead_s = 3 * connection.ping_s
        # The deadline was set for the default ping interval, which may be longer.
        connection.deadline = connection.server.now + connection.ping_s
        connection.silence_code = CLOSE_HEARTBEAT_TIMEOUT
        connection.drains_itself = True
        session = self.session
        session.peer = connection.peer
        session.outbox.connection = connection
        self._runner.connections[session] = connection
        self._runner.hub.count("connections", "opened")
        decide.on_opened(self._runner.hub, session)

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Binary messages of UTF-8 JSON are accepted; responses are always text."""
        runner, session = self._runner, self.session
        hub = runner.hub
        self._unmeasured += 1
        if self._unmeasured < MEASURE_INTERVAL:
            runner.run(decide.decide(hub, session, data, runner.now_ns() // 1_000_000))
        else:
            self._unmeasured = 0
            begun_s = perf_counter()
            runner.run(decide.decide(hub, session, data, runner.now_ms()))
            runner.relay_seconds.observe(perf_counter() - begun_s)
        # Pauses reading from a client that sends faster than it reads its responses.
        outbox, bytes_max = session.outbox, hub.limits.hub_pause_bytes
        if session.held_frames or (
            outbox.connection.unsent_bytes_most > bytes_max and outbox.bytes > bytes_max
        ):
            connection = runner.connections.get(session)
            if connection is not None:
                connection.pause_reading()

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        runner = self._runner
        runner.run(decide.on_too_large(runner.hub, self.session, prefix, size_bytes, runner.now_ms()))

    def on_drain(self) -> None:
        runner, session = self._runner, self.session
        runner.run(decide.on_drained(runner.hub, session, runner.now_ms()))
        connection = runner.connections.get(session)
        if connection is not None and not session.held_frames:
            connection.resume_reading()

    def on_silence(self) -> None:
        """Heartbeat timeout: notifies the client and ends its session, whose messages are not written to the
        socket from here on."""
        runner = self._runner
        runner.run(decide.on_silence(runner.hub, self.session, runner.now_ms()))
        self.on_close(CLOSE_HEARTBEAT_TIMEOUT, "")

    def on_close(self, code: int, reason: str) -> None:
        runner = self._runner
        if runner.connections.pop(self.session, None) is None:
            return
        runner.hub.count("connections", "closed")
        runner.run(decide.on_closed(runner.hub, self.session, code, runner.now_ms()))


class RefusedSocket:
    """A WebSocket that was opened to send a refusal. Its input is ignored."""

    __slots__ = ()

    def on_message(self, data: bytes, is_text: bool) -> None:
        return

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        return

    def on_drain(self) -> None:
        return

    def on_silence(self) -> None:
        return

    def on_close(self, code: int, reason: str) -> None:
        return


WS_PATH: Final = b"/hub/ws"
MESSAGES_PATH: Final = b"/hub/messages"
# With `hub_root`: the same path without its prefix, and the root.
ROOT_PATHS: Final = frozenset((b"/", WS_PATH.removeprefix(b"/hub")))
SUBPROTOCOL: Final = b"signal-hub"
CLOSE_OVERLOADED: Final = 1013
# Input of a refused connection is discarded: its `hub:connect`, and little more.
REFUSED_MESSAGE_BYTES: Final = 16 * 1024


class HubHealth(TypedDict):
    status: Literal["ok"]
    service: Literal["signal-hub"]
    version: str
    timestamp: Count


class HubShard(TypedDict):
    id: str
    url: str


class HubShards(TypedDict):
    epoch: Count
    shards: list[HubShard]


class HubRoutes:
    def __init__(self, runner: EffectRunner, settings: Settings) -> None:
        self._runner = runner
        self._settings = settings
        self._admission = ConnectionAdmission(settings.limits)
        self._origins = AllowedOrigins(settings)
        self._proxies = load_trusted_proxies(settings.trusted_proxies)

    def accepts_at_root(self, exchange: Exchange) -> bool:
        """Whether the request is a WebSocket of the hub at a path without its prefix (`hub_root`)."""
        return self._settings.hub_root and exchange.path in ROOT_PATHS and exchange.wants_websocket()

    def respond_health(self, exchange: Exchange, _: Identify) -> None:
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(self.health()))

    def health(self) -> HubHealth:
        return {
            "status": "ok",
            "service": "signal-hub",
            "version": session_lifecycle.PROTOCOL_VERSION,
            "timestamp": self._runner.now_ms(),
        }

    def shards(self, exchange: Exchange, _: Identity) -> None:
        base = responses.base_url(exchange, self._settings)
        url = "ws" + base.removeprefix("http") + WS_PATH.decode()
        body: HubShards = {"epoch": 1, "shards": [{"id": "0", "url": url}]}
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    # -- sockets ---------------------------------------------------------------------------------------

    def websocket(self, exchange: Exchange, _: Identify) -> None:
        """Authentication is in the first message."""
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required", "this path needs a WebSocket upgrade", headers=(("Upgrade", "websocket"),)
            )
        self._check_open()
        self._origins.check_websocket(exchange)
        address = self._proxies.address_of(exchange).strip("[]")
        now_ns = self._runner.now_ms() * 1_000_000
        refusal = self._admission.decide(address, len(self._runner.connections), now_ns)
        if refusal is not None:
            self._refuse(exchange, refusal)
            return
        given = exchange.headers.get(b"authorization", b"").decode("latin-1")
        token = given[7:].strip() if given[:7].lower() == "bearer " else None
        limits = self._settings.limits
        client = HubSocket(self._runner, token)
        connection = exchange.upgrade_websocket(
            client,
            subprotocol=_subprotocol(exchange),
            deflate=self._settings.hub_deflate,
            message_bytes=limits.hub_message_bytes,
            discard_bytes=limits.hub_skip_bytes,
        )
        client.opened(connection)
        client.session.peer = self._proxies.remote_of(exchange)

    def _check_open(self) -> None:
        settings = self._settings
        if not settings.auth_configured and not settings.loopback_only:
            raise TailraceError("forbidden", "without authentication the hub is available on loopback only")
        if self._runner.hub.draining:
            raise TailraceError("unavailable", "the server is stopping")

    def _refuse(self, exchange: Exchange, refusal: ConnectionRefusal) -> None:
        hub, now_ms = self._runner.hub, self._runner.now_ms()
        hub.count("rate_limited", "connect")
        if not refusal.over_socket:
            after_s = -(-refusal.retry_after_ms // 1000)
            raise TailraceError("overloaded", refusal.message, retry_after_s=after_s)
        details = {"retryAfter": refusal.retry_after_ms, "kind": "connect", "reason": refusal.reason}
        frame = hub.error_frame("anonymous", HubError("rate_limited", refusal.message, details), now_ms)
        connection = exchange.upgrade_websocket(
            RefusedSocket(),
            subprotocol=_subprotocol(exchange),
            message_bytes=REFUSED_MESSAGE_BYTES,
            discard_bytes=REFUSED_MESSAGE_BYTES,
        )
        connection.send_text(frame)
        connection.close(CLOSE_OVERLOADED, refusal.message)

    # -- messages over HTTP----------------------------------------------------------------------------

    def message(self, exchange: Exchange, identity: Identity) -> None:
        """One message without a session, with the same checks and limits: the response is the reply."""
        self._check_open()
        runner = self._runner
        limits = self._settings.limits
        if len(exchange.body) > limits.hub_message_bytes:
            raise TailraceError(
                "payload_too_large", f"a message must have at most {limits.hub_message_bytes} bytes"
            )
        now_ms = runner.now_ms()
        session = self._passing(exchange, identity, now_ms)
        said: list[bytes] = []

        def end() -> None:
            session_lifecycle.end_session(runner.hub, session, runner.now_ms())

        def answer(frame: bytes) -> None:
            said.append(frame)
            _respond(exchange, frame)
            end()

        session.on_http_answer = answer
        exchange.on_gone = end
        is_ask = _is_ask(exchange.body)
        runner.run(decide.decide(runner.hub, session, exchange.body, now_ms))
        if not said and not is_ask:
            exchange.respond(202, responses.NO_STORE)
            end()

    def _passing(self, exchange: Exchange, identity: Identity, now_ms: int) -> Session:
        """A session for one HTTP request."""
        session = Session(f"http-{new_id(now_ms)}", now_ms)
        verified, head = (None, _head(exchange.body)) if identity.anonymous else (identity, None)
        try:
            path = identity_path(verified, None if head is None else head.from_, "anonymous/http")
        except HubError:
            raise TailraceError("forbidden", "actorId or sub of the token is not a valid address") from None
        session.identity, session.principal = identity, principal_from_identity(identity, path)
        session.peer = self._proxies.remote_of(exchange)
        session.state = CONNECTED
        return session


class _RequestHead(msgspec.Struct):
    type: str = ""
    pattern: str = "tell"
    from_: str | None = msgspec.field(name="from", default=None)
    payload: Any = None


class _ReplyPayload(msgspec.Struct):
    type: str
    payload: dict[str, Any] = {}


def _head(body: bytes) -> _RequestHead | None:
    try:
        return msgspec.json.decode(body, type=_RequestHead)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_ask(body: bytes) -> bool:
    """Whether a response follows, now or later."""
    head = _head(body)
    if head is None or head.type != "hub:send" or head.pattern == "ask":
        return True
    payload = cast("object", head.payload)
    given = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
    wants = given.get("requireAck") is True or given.get("expectReply") is True
    return wants or given.get("ack") not in (None, "none")


def _respond(exchange: Exchange, frame: bytes) -> None:
    """The reply unchanged; an error in the format of HTTP errors."""
    if not frame:
        exchange.respond(202, responses.NO_STORE)
        return
    found = msgspec.json.decode(frame, type=_ReplyPayload)
    code, message = found.payload.get("code"), found.payload.get("message")
    if not isinstance(code, str) or code not in ERROR_STATUS or "retryable" not in found.payload:
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, frame)
        return
    details = cast("dict[str, object]", found.payload["details"])
    responses.respond_error(exchange, HubError(code, str(message), details))


def _subprotocol(exchange: Exchange) -> bytes | None:
    offered = exchange.headers.get(b"sec-websocket-protocol", b"").split(b",")
    return SUBPROTOCOL if SUBPROTOCOL in [one.strip() for one in offered] else None


# By hand: a message is decoded in steps, and its fields depend on its type.
_ADDRESS: Final[Json] = {"type": "string", "pattern": r"^@\([A-Za-z0-9_.:~/-]+\)$", "maxLength": 256}
_NAME: Final[Json] = {"type": "string", "minLength": 1, "maxLength": 128}
_MILLIS: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_TYPES: Final = (
    *("hub:send", "hub:publish", "hub:broadcast", "hub:discover", "hub:list_actors"),
    *("hub:mailbox_read", "hub:mailbox_commit"),
)
_HUB_MESSAGE: Final = Component(
    "HubMessage",
    obj(
        {"id": _NAME, "type": {"enum": list(_TYPES)}, "timestamp": _MILLIS},
        {
            "from": nullable(STRING),
            "to": nullable(STRING),
            "payload": nullable(OBJECT),
            "pattern": {"enum": ["tell", "ask"]},
            "correlationId": nullable(STRING),
            "metadata": nullable(OBJECT),
            "ttl": {"type": ["integer", "null"], "minimum": 1},
            "signature": nullable(STRING),
        },
    ),
)
_HUB_REPLY: Final = Component(
    "HubReply",
    obj(
        {
            "id": STRING,
            "from": _ADDRESS,
            "to": _ADDRESS,
            "type": STRING,
            "payload": OBJECT,
            "pattern": {"const": "tell"},
            "correlationId": STRING,
            "timestamp": COUNT,
            "metadata": OBJECT,
        }
    ),
)
_MESSAGE_EXAMPLE: Final[Json] = {
    "id": "0197f3c2-5a10-7c44-9b1e-0d5f6a7b8c90",
    "type": "hub:publish",
    "timestamp": 1767225600000,
    "payload": {"topic": "orders/eu/created", "type": "order", "data": {"id": 1}},
}
ROUTES: Final = route_group(
    "hub",
    Route(
        *("GET", "/hub/ws", Action.PUBLIC, HubRoutes.websocket, "connectActor"),
        "Actors over a WebSocket",
        {101: answer("The connection is a WebSocket now.")},
        errors=(403, 426, 429),
        auth=Auth.BY_HANDLER,
    ),
    Route(
        *("POST", "/hub/messages", Action.HUB_CONNECT, HubRoutes.message, "sendHubMessage"),
        "Send one message as an actor, without a session",
        {
            200: answer("The reply.", _HUB_REPLY),
            202: answer("The message was accepted; there is no reply."),
        },
        errors=(404, 409, 410),
        body=request(_HUB_MESSAGE, _MESSAGE_EXAMPLE, "One envelope."),
    ),
    Route(
        *("GET", "/hub/health", Action.PUBLIC, HubRoutes.respond_health, "readHubHealth"),
        "Health of the hub",
        {200: answer("The hub is running.", HubHealth)},
        auth=Auth.BY_HANDLER,
    ),
    Route(
        *("GET", "/hub/shards", Action.HUB_SHARDS, HubRoutes.shards, "listHubShards"),
        "The shards to connect to",
        {200: answer("The shards that own addresses.", HubShards)},
    ),
    place="first",
)
