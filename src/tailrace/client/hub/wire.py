"""Requests to the hub as values, their frames, and the errors in responses. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tailrace.client.errors import CONNECTION_LOST, ClientError
from tailrace.client.hub.model import Message
from tailrace.client.transport import retry_after_s
from tailrace.hub.envelope import HUB_ADDRESS, encode_envelope
from tailrace.hub.errors import ERROR_TYPES
from tailrace.hub.signatures import sign_frame

PROTOCOL_VERSION: Final = "0.1.0"
PATH: Final = "/hub/ws"
# Optional message kinds that the hub sends only to clients that support them, as this one does.
FEATURES: Final = ("resume", "delivery-notices", "token-refresh", "mailbox")
# After these codes the client must not reconnect by itself.
FATAL_CODES: Final = frozenset({"unauthorized", "version_mismatch", "duplicate_connection"})
TIMEOUT: Final = "timeout"
_encode_json: Final = msgspec.json.Encoder().encode


class SigningKey(msgspec.Struct, frozen=True):
    """A secret shared with the hub. With an id, signatures name it and cover the canonical form."""

    secret: bytes
    id: str | None = None

    def __repr__(self) -> str:
        return f"SigningKey(id={self.id!r})"


class OutgoingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One message to the hub. A retry has the same id, so that it has no second effect."""

    id: str
    type: str
    payload: Mapping[str, Any]
    ask: bool = True
    sender: str | None = None
    correlation_id: str | None = None
    metadata: Mapping[str, Any] = {}
    ttl_ms: int | None = None

    def frame(self, sender: str, now_ms: int, key: SigningKey | None = None) -> bytes:
        text = encode_envelope(
            id=self.id,
            from_=self.sender or sender,
            to=HUB_ADDRESS,
            type=self.type,
            payload=_encode_json(self.payload),
            timestamp=now_ms,
            pattern="ask" if self.ask else "tell",
            correlation_id=self.correlation_id,
            metadata=_encode_json(self.metadata),
            ttl=self.ttl_ms,
        )
        return text if key is None else sign_frame(text, key.secret, key.id)


def without_none(**members: Any) -> dict[str, Any]:
    """The members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def to_payload_data(value: Any) -> Any:
    """Application data: bytes are JSON text and are sent unchanged."""
    return msgspec.Raw(value) if isinstance(value, bytes) else value


def socket_url(base_url: str) -> str:
    """The WebSocket URL of a server's hub, from its base URL or a WebSocket URL."""
    if base_url.startswith(("ws://", "wss://")):
        return base_url
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must start with http://, https://, ws:// or wss://: {base_url!r}")
    return "ws" + base_url.rstrip("/").removeprefix("http") + PATH


def connect_request(
    identifier: str,
    *,
    token: str | None,
    capabilities: tuple[str, ...],
    resume_token: str | None,
    ttl_ms: int,
) -> OutgoingRequest:
    metadata = without_none(
        protocolVersion=PROTOCOL_VERSION,
        authToken=None if token is None else f"bearer {token}",
        capabilities=[*capabilities, *FEATURES],
        resumeToken=resume_token,
    )
    return OutgoingRequest(id=identifier, type="hub:connect", payload={}, metadata=metadata, ttl_ms=ttl_ms)


def error_from_message(message: Message) -> ClientError | None:
    """The error in a response, in the generic or a typed form."""
    if message.type not in ERROR_TYPES:
        return None
    payload: dict[str, Any] = message.data or {}
    details = payload.get("details")
    extra: dict[str, Any] = {**payload, **(details if isinstance(details, dict) else {})}
    extra.pop("details", None)
    code = extra.pop("code", message.type.removeprefix("hub:"))
    text = extra.pop("message", None)
    return ClientError(
        str(code), str(text or code), extra=extra, outcome_unknown=extra.get("outcome") == "unknown"
    )


def retry_after_from(error: ClientError) -> float:
    """How long a server that refused a connection wants the client to wait, before or after the upgrade."""
    requested_ms = error.extra.get("retryAfter")
    if isinstance(requested_ms, int | float):
        return requested_ms / 1000
    return retry_after_s(error.answer_headers) or 0.0


def reply_data(message: Message) -> Any:
    """The data of a reply, or the error that it contains."""
    payload: dict[str, Any] = message.data
    if payload.get("ok") is not False:
        return payload.get("data")
    failure: dict[str, Any] = payload.get("error") or {}
    code, text = str(failure.get("code", "failed")), str(failure.get("message", "the actor failed"))
    further = {name: value for name, value in failure.items() if name not in ("code", "message")}
    raise ClientError(code, text, extra={**further, "from": message.sender})


def timeout_error(what: str, seconds: float) -> ClientError:
    return ClientError(
        TIMEOUT, f"{what} got no response in {seconds:g} s", extra={"retryable": True}, outcome_unknown=True
    )


def connection_lost(reason: str, *, sent: bool) -> ClientError:
    return ClientError(CONNECTION_LOST, reason, extra={"retryable": True}, outcome_unknown=sent)
