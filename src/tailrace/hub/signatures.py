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
import math
import re
from collections.abc import Iterable
from typing import Final, NoReturn, cast

import msgspec

from tailrace.hub.envelope import compact_json, scan_members
from tailrace.hub.errors import HubError

_PLAIN_POWER_MIN: Final = -6  # ECMAScript writes 0.000001, but 1e-7
_PLAIN_POWER_MAX: Final = 21
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')
_SHORT: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def canonical_json(text: bytes, *, without: str | None = None) -> bytes:
    """The canonical form of a JSON text, optionally without one top-level member.

    ValueError for what has no such form: names that come twice, half a surrogate pair, numbers too great.
    """
    value = _decoder.decode(text.decode())
    if without is not None and isinstance(value, dict):
        cast("dict[str, object]", value).pop(without, None)
    parts: list[str] = []
    _write(cast("object", value), parts)
    return "".join(parts).encode()


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate member name")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# Every number is read as a double, as JavaScript does.
_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_int=float, parse_float=float, parse_constant=_refuse_constant
)


def _write(value: object, parts: list[str]) -> None:
    if value is None or isinstance(value, bool):
        parts.append("null" if value is None else "true" if value else "false")
    elif isinstance(value, str):
        parts.append(_format_string(value))
    elif isinstance(value, float):
        parts.append(format_number(value))
    elif isinstance(value, dict):
        _write_object(cast("dict[str, object]", value), parts)
    else:
        parts.append("[")
        for position, item in enumerate(cast("Iterable[object]", value)):
            parts.append("," if position else "")
            _write(item, parts)
        parts.append("]")


def _write_object(value: dict[str, object], parts: list[str]) -> None:
    parts.append("{")
    # By UTF-16 units, as JavaScript compares.
    for position, name in enumerate(
        sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    ):
        parts.append("," if position else "")
        parts.append(_format_string(name))
        parts.append(":")
        _write(value[name], parts)
    parts.append("}")


def _format_string(value: str) -> str:
    def escape(found: re.Match[str]) -> str:
        return _SHORT.get(found[0]) or f"\\u{ord(found[0]):04x}"

    return f'"{_ESCAPED.sub(escape, value)}"'


def format_number(value: float) -> str:
    """A number as ECMAScript writes it: the shortest digits that parse to the same number."""
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent_text = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    digits = (whole + fraction).lstrip("0")
    # The value is 0.<digits> times ten to this power.
    leading = len(whole + fraction) - len(digits)
    power = len(whole) - leading + int(exponent_text or "0")
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= power <= _PLAIN_POWER_MAX:
        return f"{sign}{digits}{'0' * (power - count)}"
    if 0 < power <= _PLAIN_POWER_MAX:
        return f"{sign}{digits[:power]}.{digits[power:]}"
    if _PLAIN_POWER_MIN < power <= 0:
        return f"{sign}0.{'0' * -power}{digits}"
    rest = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{rest}e{power - 1:+d}"


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
