"""Errors of the hub: one type, with what the hub protocol adds to each code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError

NOT_APPLIED: Final = "not_applied"
APPLIED: Final = "applied"
UNKNOWN: Final = "unknown"
GENERIC_ERROR_TYPE: Final = "hub:error"


class ErrorSpec(msgspec.Struct, frozen=True):
    """What a code means in a session. Some codes have a message type and members of their own."""

    retryable: bool
    resolution: str
    typed: str | None = None
    members: tuple[str, ...] = ()
    outcome: str = NOT_APPLIED


HUB_CODES: Final[dict[str, ErrorSpec]] = {
    "version_mismatch": ErrorSpec(
        False,
        "use a client of a supported version",
        "hub:version_mismatch",
        ("clientVersion", "serverVersion", "supportedVersions"),
    ),
    "unauthorized": ErrorSpec(
        False, "use a token that allows this", "hub:unauthorized", ("action", "reason")
    ),
    "invalid_token": ErrorSpec(False, "get a new token, or register again"),
    "rate_limited": ErrorSpec(
        True, "wait retryAfter ms, then send again", "hub:rate_limited", ("retryAfter",)
    ),
    "unknown_actor": ErrorSpec(
        False, "discover who is there, or wait until it registers", "hub:unknown_actor", ("actorAddress",)
    ),
    "message_too_large": ErrorSpec(
        False, "send less at once", "hub:message_too_large", ("messageSize", "maxSize")
    ),
    "message_expired": ErrorSpec(False, "send it with a longer ttl and a new timestamp"),
    "timeout": ErrorSpec(True, "ask again with the same id", outcome=UNKNOWN),
    "invalid_message": ErrorSpec(False, "send one JSON envelope per message"),
    "invalid_request": ErrorSpec(False, "correct the field that details name"),
    "unknown_type": ErrorSpec(False, "use a type of the protocol, or address an actor"),
    "invalid_signature": ErrorSpec(False, "sign with the current secret"),
    "replay_detected": ErrorSpec(False, "send it again with a new timestamp"),
    "clock_skew": ErrorSpec(False, "set the clock; details have the server's time"),
    "producer_gap": ErrorSpec(False, "send the missing messages first"),
    "producer_fenced": ErrorSpec(False, "stop: a newer producer has taken over"),
    "unknown_correlation": ErrorSpec(False, "reply once, in time, to a request that was delivered here"),
    "mailbox_full": ErrorSpec(True, "wait until the recipient has caught up"),
    "consumer_slow": ErrorSpec(True, "wait until the recipient has caught up"),
    "invalid_offset": ErrorSpec(False, "use an offset that was delivered or read"),
    "offset_gone": ErrorSpec(False, "begin at earliestOffset"),
    "unavailable": ErrorSpec(True, "wait, then send again"),
    "internal_error": ErrorSpec(True, "report it with its id, then send again", outcome=UNKNOWN),
}

ERROR_TYPES: Final = frozenset((GENERIC_ERROR_TYPE, *(one.typed for one in HUB_CODES.values() if one.typed)))

# Error codes of the lower layers as hub codes.
_HUB_CODE_BY_SERVER_CODE: Final = {
    "stale_epoch": "producer_fenced",
    "offset_beyond_tail": "invalid_offset",
    "append_timeout": "timeout",
    "request_timeout": "timeout",
    "forbidden": "unauthorized",
    "payload_too_large": "message_too_large",
    "overloaded": "unavailable",
    "insufficient_storage": "unavailable",
    "invalid_name": "invalid_request",
    "invalid_json": "invalid_message",
}


class HubError(TailraceError):
    """An error with details, which are further fields of the error over HTTP."""

    def __init__(
        self,
        code: str,
        message: str,
        details: Mapping[str, object] | None = None,
        *,
        retryable: bool | None = None,
    ) -> None:
        meaning = HUB_CODES[code]
        after_ms = None if details is None else details.get("retryAfter")
        # Whole seconds for the header, never less than the milliseconds of the details.
        after_s = max(1, -(-after_ms // 1000)) if isinstance(after_ms, int) else None
        super().__init__(code, message, retry_after_s=after_s)
        self.extra = {**(details or {})}
        self.extra.setdefault("outcome", meaning.outcome)
        self.retryable = meaning.retryable if retryable is None else retryable

    @property
    def details(self) -> dict[str, object]:
        return self.extra

    def __repr__(self) -> str:
        return f"HubError({self.code!r}, {self.message!r}, {self.extra!r})"


class DeniedError(HubError):
    """A denial by policy. It is sent after its `record` is in the audit stream."""

    def __init__(self, message: str, details: Mapping[str, object], record: bytes) -> None:
        super().__init__("unauthorized", message, details)
        self.record = record


def to_hub_error(error: TailraceError) -> HubError:
    """The error as a hub code. An unexpected code is a bug: its text is not disclosed."""
    if isinstance(error, HubError):
        return error
    code = _HUB_CODE_BY_SERVER_CODE.get(error.code, error.code)
    if code not in HUB_CODES:
        return HubError("internal_error", "the hub failed to process this message")
    details = {"reason": error.message, **error.extra} if code == "unauthorized" else error.extra
    return HubError(code, error.message, details)


def error_payload(error: HubError) -> tuple[str, dict[str, object]]:
    """The message type and payload of an error: typed where the protocol has a type for its code.

    A typed error has its own members first, null where they are not known, and then those that every error
    has: a client that reads `code` and `details` understands it too.
    """
    meaning = HUB_CODES[error.code]
    return meaning.typed or GENERIC_ERROR_TYPE, {
        **{name: error.extra.get(name) for name in meaning.members},
        "code": error.code,
        "message": error.message,
        "resolution": meaning.resolution,
        "details": error.extra,
        "retryable": error.retryable,
    }


def encode_error(error: HubError) -> tuple[str, bytes]:
    """As `error_payload`, ready to be spliced into an envelope."""
    kind, payload = error_payload(error)
    return kind, msgspec.json.encode(payload)


def field_error(field: str, message: str) -> HubError:
    """An invalid field of the payload."""
    return HubError("invalid_request", message, {"field": field})
