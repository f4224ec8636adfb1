"""Resume tokens and tickets: opaque to clients, signed, good for exactly what they were made for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final, TypeVar

import msgspec

MAC_BYTES: Final = 16
TOKEN_CHARS_MAX: Final = 8192
T = TypeVar("T")


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far a subscription has come: everything up to these numbers was written to its socket."""

    database: str
    collection: str
    generation: int
    query: bytes
    seqs: list[int]


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A request that may be made again without a header, by whoever holds it."""

    expires_s: float
    sub: str
    scopes: list[str]
    dbs: list[str] | None
    anonymous: bool
    claims: bytes
    token_expires_s: float | None
    request: bytes


_encode = msgspec.msgpack.Encoder().encode


class Signer:
    """One key for every gateway; kind by kind, so that no token passes for a ticket."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _mac(self, kind: bytes, raw: bytes) -> bytes:
        return hmac.digest(self._key, kind + raw, hashlib.sha256)[:MAC_BYTES]

    def position(self, position: Position) -> str:
        return self._sign(b"position:", position)

    def read_position(self, token: object) -> Position | None:
        """None for whatever this server did not sign."""
        return self._read(b"position:", token, Position)

    def ticket(self, ticket: Ticket) -> str:
        return self._sign(b"ticket:", ticket)

    def read_ticket(self, token: object) -> Ticket | None:
        return self._read(b"ticket:", token, Ticket)

    def _sign(self, kind: bytes, value: object) -> str:
        raw = _encode(value)
        return base64.urlsafe_b64encode(raw + self._mac(kind, raw)).rstrip(b"=").decode()

    def _read(self, kind: bytes, token: object, form: type[T]) -> T | None:
        if not isinstance(token, str) or len(token) > TOKEN_CHARS_MAX * 8:
            return None
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(kind, body)):
            return None
        try:
            return msgspec.msgpack.decode(body, type=form)
        except msgspec.MsgspecError:
            return None
