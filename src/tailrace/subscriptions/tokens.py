"""Callback tokens: what a worker shows to answer a wake. Signed, good for one subscription and generation."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError

TOKEN_KEY_BYTES: Final = 32
# Fencing by generation is what ends a wake. The expiry only bounds how long a leaked token means anything,
# and has to outlast a worker that keeps its lease by heartbeats.
TOKEN_LIFETIME_MS: Final = 24 * 3600 * 1000
TOKEN_BYTES_MAX: Final = 1024
_TOKEN_CONTEXT: Final = b"tailrace wake token 1\n"


class WakeToken(msgspec.Struct, frozen=True, array_like=True):
    subscription: str
    generation: int
    expires_ms: int


def new_token_key() -> bytes:
    return secrets.token_bytes(TOKEN_KEY_BYTES)


def issue_wake_token(key: bytes, subscription: str, generation: int, now_ms: int) -> str:
    payload = msgspec.msgpack.encode(WakeToken(subscription, generation, now_ms + TOKEN_LIFETIME_MS))
    return f"{_encode(payload)}.{_encode(_token_mac(key, payload))}"


def read_wake_token(key: bytes, token: bytes, subscription: str) -> WakeToken:
    """The token's content if it is genuine for this subscription. Expiry is for the caller, after fencing."""
    payload_text, _, mac_text = token.partition(b".")
    try:
        if len(token) > TOKEN_BYTES_MAX:
            raise invalid_wake_token()
        payload, mac = _decode_base64url(payload_text), _decode_base64url(mac_text)
    except (binascii.Error, ValueError):
        raise invalid_wake_token() from None
    if not hmac.compare_digest(mac, _token_mac(key, payload)):
        raise invalid_wake_token()
    content = msgspec.msgpack.decode(payload, type=WakeToken)
    if content.subscription != subscription:
        raise invalid_wake_token()
    return content


def read_bearer_token(key: bytes, authorization: bytes | None, subscription: str) -> WakeToken:
    """As `read`, from an Authorization header: a token anywhere else does not count."""
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise invalid_wake_token("the wake's token belongs in the Authorization header: Bearer <token>")
    return read_wake_token(key, token.strip(b" "), subscription)


def invalid_wake_token(reason: str = "the token is not one of this subscription's") -> TailraceError:
    return TailraceError(
        "TOKEN_INVALID", reason, headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake"'),)
    )


def expired_wake_token() -> TailraceError:
    return TailraceError(
        "TOKEN_EXPIRED",
        "the token has expired; the next wake brings a new one",
        headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake", error="invalid_token"'),),
    )


def _token_mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _TOKEN_CONTEXT + payload, hashlib.sha256)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode_base64url(text: bytes) -> bytes:
    # Strict: one token has one spelling.
    raw = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(raw).encode() != text:
        raise ValueError("not canonical")
    return raw
