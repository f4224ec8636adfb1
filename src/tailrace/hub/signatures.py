"""HMAC-SHA256 message signatures over the fixed-order or the canonical (RFC 8785) form.

The secret is shared between an identity and the hub. Version 1 signs the members in a fixed order;
version 2 signs the canonical form of the whole envelope, and names its key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec
import rfc8785

from tailrace.hub.envelope import compact_json, refuse_constant, scan_members
from tailrace.hub.errors import HubError


def canonical_json(text: bytes, *, without: str | None = None) -> bytes:
    """The canonical form of a JSON text, optionally without one top-level member.

    ValueError for what has no such form: names that come twice, half a surrogate pair, numbers too great.
    """
    value = _decoder.decode(text.decode())
    if without is not None and isinstance(value, dict):
        cast("dict[str, object]", value).pop(without, None)
    return rfc8785.dumps(cast("Any", value))


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate member name")
    return found


# Every number is read as a double, as JavaScript does.
_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_int=float, parse_float=float, parse_constant=refuse_constant
)


SECRET_BYTES: Final = 32
VALID_MS: Final = 90 * 24 * 3600 * 1000
RETIRED_VALID_MS: Final = 24 * 3600 * 1000
_SIGNED_MEMBERS: Final = (
    *("id", "from", "to", "type", "payload"),
    *("pattern", "correlationId", "timestamp", "metadata", "ttl"),
)
_V2: Final = "v2:"


class SignatureKey(msgspec.Struct, frozen=True):
    """A secret of an identity. A retired one is valid for one more day."""

    id: str
    secret: bytes
    created_ms: int
    retired_ms: int | None = None

    def is_valid(self, now_ms: int) -> bool:
        if now_ms >= self.created_ms + VALID_MS:
            return False
        return self.retired_ms is None or now_ms < self.retired_ms + RETIRED_VALID_MS

    def __repr__(self) -> str:
        return f"Key({self.id!r})"  # the secret stays out of logs


def verify_signature(frame: bytes, signature: str, keys: Iterable[SignatureKey], now_ms: int) -> None:
    """Raises if no valid key of the sender matches the signature."""
    named, mac = _parse_signature(signature)
    content = _signed_content(frame, canonically=named is not None)
    for key in keys:
        if key.is_valid(now_ms) and named in (None, key.id):
            if hmac.compare_digest(mac, _mac(key.secret, content)):
                return
    raise _invalid_signature("the signature does not fit the message")


def compute_signature(frame: bytes, secret: bytes, key_id: str | None = None) -> str:
    """The signature of a frame: version 2 if the key has a name, else version 1."""
    mac = base64.b64encode(_mac(secret, _signed_content(frame, canonically=key_id is not None))).decode()
    return mac if key_id is None else f"{_V2}{key_id}:{mac}"


def sign_frame(frame: bytes, secret: bytes, key_id: str | None = None) -> bytes:
    """Adds a signature to an unsigned frame of our encoder."""
    end = b'"signature":null}'
    assert frame.endswith(end)
    return b'%b"signature":"%b"}' % (frame[: -len(end)], compute_signature(frame, secret, key_id).encode())


def _parse_signature(signature: str) -> tuple[str | None, bytes]:
    """The key name, if any, and the MAC."""
    named: str | None = None
    text = signature
    if signature.startswith(_V2):
        named, separator, text = signature.removeprefix(_V2).rpartition(":")
        if not separator:
            raise _invalid_signature("a signature of the second version is v2:<key id>:<base64>")
    try:
        return named, base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid_signature("the signature is not base64") from None


def _signed_content(frame: bytes, *, canonically: bool) -> bytes:
    if canonically:
        try:
            return canonical_json(frame, without="signature")
        except (ValueError, RecursionError) as error:
            raise _invalid_signature(f"the message has no canonical form: {error}") from None
    found = scan_members(frame)
    texts = [
        b'"%b":%b' % (name.encode(), compact_json(bytes(found[name])))
        for name in _SIGNED_MEMBERS
        if name in found
    ]
    return b"{" + b",".join(texts) + b"}"


def _mac(secret: bytes, content: bytes) -> bytes:
    return hmac.new(secret, content, hashlib.sha256).digest()


def _invalid_signature(message: str) -> HubError:
    return HubError("invalid_signature", message)
