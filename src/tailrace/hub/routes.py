"""`/hub/ws`, `/hub/messages`, `/hub/health`, `/hub/shards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
import orjson

from tailrace.api import answers
from tailrace.api.proxies import proxies_of
from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import ERROR_STATUS, TailraceError
from tailrace.common.settings import Settings
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange
from tailrace.hub import connecting, decide
from tailrace.hub.addresses import parse_address
from tailrace.hub.admission import ConnectionAdmission, ConnectionRefusal
from tailrace.hub.errors import HubError
from tailrace.hub.ids import new_id
from tailrace.hub.policy import principal_from_identity
from tailrace.hub.runner import EffectRunner
from tailrace.hub.session import CONNECTED, Session
from tailrace.hub.socket import HubSocket, RefusedSocket

WS_PATH: Final = b"/hub/ws"
MESSAGES_PATH: Final = b"/hub/messages"
HEALTH_PATH: Final = b"/hub/health"
SHARDS_PATH: Final = b"/hub/shards"
PATHS: Final = frozenset((WS_PATH, MESSAGES_PATH, HEALTH_PATH, SHARDS_PATH))
# With `hub_root`: the same path without its prefix, and the root itself.
ROOT_PATHS: Final = frozenset((b"/", WS_PATH.removeprefix(b"/hub")))
SUBPROTOCOL: Final = b"signal-hub"
CLOSE_OVERLOADED: Final = 1013
# A connection that is refused is not listened to: its `hub:connect`, and little more, is read past.
REFUSED_MESSAGE_BYTES: Final = 16 * 1024

Identify = Callable[[Exchange], Identity]


class HubRoutes:
    def __init__(self, runner: EffectRunner, settings: Settings) -> None:
        self._runner = runner
        self._settings = settings
        self._admission = ConnectionAdmission(settings.limits)
        self._origins = AllowedOrigins(settings)
        self._proxies = proxies_of(settings.trusted_proxies)

    def handles(self, exchange: Exchange, path: bytes) -> bool:
        if path in PATHS:
            return True
        return self._settings.hub_root and path in ROOT_PATHS and exchange.wants_websocket()

    def serve(self, exchange: Exchange, method: bytes, path: bytes, identify: Identify) -> None:
        if path == HEALTH_PATH:
            _check_method(method)
            exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, orjson.dumps(self.health()))
        elif path == SHARDS_PATH:
            _check_method(method)
            self._shards(exchange, identify)
        elif path == MESSAGES_PATH:
            if method != b"POST":
                raise answers.not_allowed("POST, OPTIONS")
            self._message(exchange, identify(exchange))
        else:
            _check_method(method)
            self._upgrade(exchange)

    def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "service": "signal-hub",
            "version": connecting.PROTOCOL_VERSION,
            "timestamp": self._runner.now_ms(),
        }

    def _shards(self, exchange: Exchange, identify: Identify) -> None:
        authorise(identify(exchange), Action.HUB_SHARDS)
        base = answers.base_url(exchange, self._settings)
        url = "ws" + base.removeprefix("http") + WS_PATH.decode()
        body = {"epoch": 1, "shards": [{"id": "0", "url": url}]}
        exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, orjson.dumps(body))

    # -- sockets ---------------------------------------------------------------------------------------

    def _upgrade(self, exchange: Exchange) -> None:
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required", "this path takes WebSockets", headers=(("Upgrade", "websocket"),)
            )
        self._check_open()
        self._origins.check(exchange)
        address = self._proxies.address_of(exchange).strip("[]")
        now_ns = self._runner.now_ms() * 1_000_000
        refusal = self._admission.decide(address, len(self._runner.wires), now_ns)
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
            raise TailraceError("forbidden", "without authentication the hub works on loopback only")
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

    # -- messages by HTTP ------------------------------------------------------------------------------

    def _message(self, exchange: Exchange, identity: Identity) -> None:
        """The same checks and limits, no session: the answer is the reply envelope."""
        self._check_open()
        authorise(identity, Action.HUB_CONNECT)
        runner = self._runner
        limits = self._settings.limits
        if len(exchange.body) > limits.hub_message_bytes:
            raise TailraceError(
                "payload_too_large", f"a message has at most {limits.hub_message_bytes} bytes"
            )
        now_ms = runner.now_ms()
        session = self._passing(exchange, identity, now_ms)
        said: list[bytes] = []

        def end() -> None:
            connecting.end_session(runner.hub, session, runner.now_ms())

        def answer(frame: bytes) -> None:
            said.append(frame)
            _respond(exchange, frame)
            end()

        session.answer = answer
        exchange.on_gone = end
        is_ask = _is_ask(exchange.body)
        runner.run(decide.decide(runner.hub, session, exchange.body, now_ms))
        if not said and not is_ask:
            exchange.respond(202, answers.NO_STORE)
            end()

    def _passing(self, exchange: Exchange, identity: Identity, now_ms: int) -> Session:
        """Who sends one message and is gone."""
        session = Session(f"http-{new_id(now_ms)}", now_ms)
        path = identity.actor_id
        if identity.anonymous:
            path = _claimed_sender(exchange.body) or "anonymous/http"
        try:
            path = parse_address(f"@({path})")
        except HubError:
            raise TailraceError("forbidden", "actorId or sub of the token is no address") from None
        session.identity, session.actor = identity, principal_from_identity(identity, path)
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


def _claimed_sender(body: bytes) -> str | None:
    head = _head(body)
    if head is None or head.from_ is None:
        return None
    try:
        return parse_address(head.from_)
    except HubError:
        return None


def _is_ask(body: bytes) -> bool:
    """Whether something comes back, now or later."""
    head = _head(body)
    if head is None or head.type != "hub:send" or head.pattern == "ask":
        return True
    payload = cast("object", head.payload)
    given = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
    wants = given.get("requireAck") is True or given.get("expectReply") is True
    return wants or given.get("ack") not in (None, "none")


def _respond(exchange: Exchange, frame: bytes) -> None:
    """The reply as it is; a refusal in the one form that errors have over HTTP."""
    if not frame:
        exchange.respond(202, answers.NO_STORE)
        return
    found = msgspec.json.decode(frame, type=_ReplyPayload)
    code, message = found.payload.get("code"), found.payload.get("message")
    if not isinstance(code, str) or code not in ERROR_STATUS or "retryable" not in found.payload:
        exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, frame)
        return
    details = cast("dict[str, object]", found.payload["details"])
    answers.refuse(exchange, HubError(code, str(message), details))


def _check_method(method: bytes) -> None:
    if method not in (b"GET", b"HEAD"):
        raise answers.not_allowed("GET, HEAD, OPTIONS")


def _subprotocol(exchange: Exchange) -> bytes | None:
    offered = exchange.headers.get(b"sec-websocket-protocol", b"").split(b",")
    return SUBPROTOCOL if SUBPROTOCOL in [one.strip() for one in offered] else None
