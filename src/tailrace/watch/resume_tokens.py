"""Resume tokens and tickets: signing, verification and key rotation.

Tokens are opaque to clients and signed per kind. The newest key signs; earlier keys still verify for a while,
so clients that were offline can resume. A token names its key by one byte. Keys are stored in the log, since
tokens must survive a crash.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction

MAC_BYTES: Final = 16
KEY_BYTES: Final = 32
KEYS_MAX: Final = 8  # maximum, regardless of age
TOKEN_CHARS_MAX: Final = 64 * 1024
_POSITION: Final = b"position:"
_TICKET: Final = b"ticket:"
T = TypeVar("T")


class ResumePosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of a subscription: everything up to `seqs` was sent."""

    database: str
    collection: str
    generation: int
    query: bytes
    seqs: list[int]
    sub_id: str = ""  # empty in tokens of older versions


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A stored request with its identity, for clients that cannot send headers."""

    expires_s: float
    sub: str
    scopes: list[str]
    dbs: list[str] | None
    anonymous: bool
    claims: bytes
    token_expires_s: float | None
    request: bytes
    token_id: str = ""
    issued_at: float | None = None
    vouched_by: str = ""
    origin_id: str = ""


class SigningKey(msgspec.Struct, frozen=True, array_like=True):
    """One key; signs from `since_ms` until the next key."""

    id: int  # 0 to 255, wraps around
    secret: bytes
    since_ms: int


class KeyRing(msgspec.Struct, frozen=True, array_like=True):
    """All valid keys, the newest last."""

    keys: tuple[SigningKey, ...]

    @classmethod
    def first(cls, now_ms: int) -> KeyRing:
        return cls((SigningKey(0, secrets.token_bytes(KEY_BYTES), now_ms),))

    def is_due(self, now_ms: int, life_ms: int) -> bool:
        return now_ms - self.keys[-1].since_ms >= life_ms

    def rotated(self, now_ms: int, verify_ms: int) -> KeyRing:
        """With a new key, and without keys that stopped signing more than `verify_ms` ago."""
        newest = self.keys[-1]
        fresh = SigningKey((newest.id + 1) % 256, secrets.token_bytes(KEY_BYTES), now_ms)
        # A key stopped signing when the next one started.
        ended = [later.since_ms for later in (*self.keys[1:], fresh)]
        retained = [key for key, end_ms in zip(self.keys, ended, strict=True) if now_ms - end_ms < verify_ms]
        return KeyRing((*retained[-(KEYS_MAX - 1) :], fresh))

    def find_valid(self, key_id: int, now_ms: int, verify_ms: int) -> SigningKey | None:
        """The key with this id, unless it stopped signing too long ago."""
        for index, key in enumerate(self.keys):
            if key.id == key_id:
                later = self.keys[index + 1 :]
                return key if not later or now_ms - later[0].since_ms < verify_ms else None
        return None


def encode_key_ring(ring: KeyRing) -> bytes:
    return msgspec.msgpack.encode(ring)


def decode_key_ring(raw: bytes) -> KeyRing:
    return msgspec.msgpack.decode(raw, type=KeyRing)


_encode = msgspec.msgpack.Encoder().encode


class TokenSigner:
    """Signs and reads tokens; the kind is part of the signature, so kinds cannot be confused."""

    def __init__(self, ring: KeyRing, verify_ms: int, now_ms: Callable[[], int]) -> None:
        self.ring = ring
        self._verify_ms = verify_ms
        self._now_ms = now_ms

    def position(self, position: ResumePosition) -> str:
        return self.sign(_POSITION, position)

    def read_position(self, token: object) -> ResumePosition | None:
        """None if this server did not sign it."""
        return self.read(_POSITION, token, ResumePosition)

    def ticket(self, ticket: Ticket) -> str:
        return self.sign(_TICKET, ticket)

    def read_ticket(self, token: object) -> Ticket | None:
        return self.read(_TICKET, token, Ticket)

    def sign(self, kind: bytes, value: object) -> str:
        key = self.ring.keys[-1]
        raw = bytes((key.id,)) + _encode(value)
        return base64.urlsafe_b64encode(raw + _mac(key.secret, kind, raw)).rstrip(b"=").decode()

    def read(self, kind: bytes, token: object, form: type[T]) -> T | None:
        """The value of a valid token of this kind, else None."""
        if not isinstance(token, str) or len(token) > TOKEN_CHARS_MAX:
            return None
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(raw) <= 1 + MAC_BYTES:
            return None
        body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        key = self.ring.find_valid(body[0], self._now_ms(), self._verify_ms)
        if key is None or not hmac.compare_digest(mac, _mac(key.secret, kind, body)):
            return None
        try:
            return msgspec.msgpack.decode(body[1:], type=form)
        except msgspec.MsgspecError:
            return None


def describe_token(token: str) -> dict[str, object] | None:
    """Decode a resume token without verification; None if it is not one."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        position = msgspec.msgpack.decode(raw[1:-MAC_BYTES], type=ResumePosition)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
    return {
        "database": position.database,
        "collection": position.collection,
        "generation": position.generation,
        "positions": position.seqs,
        "query": position.query.hex(),
        "subscription": position.sub_id or None,
        "key": raw[0],
    }


def _mac(secret: bytes, kind: bytes, raw: bytes) -> bytes:
    return hmac.digest(secret, kind + raw, hashlib.sha256)[:MAC_BYTES]


logger = logging.getLogger("tailrace.watch")

TOKEN_KEYS_FACT: Final = "secret/watch-token-keys"  # noqa: S105 - a key, not a password


class TokenKeys:
    """The key ring in the log. A key signs only once it is durable. Owned by the loop thread."""

    def __init__(self, log: Log, clock: Clock, limits: Limits) -> None:
        self._log = log
        self._clock = clock
        self._life_ms = limits.watch_key_ms
        self._verify_ms = limits.watch_key_verify_ms
        self.signer: TokenSigner | None = None
        self._writing = False
        self._settled = asyncio.Event()  # no write is pending

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def start(self) -> None:
        raw = self._log.streams.meta.get(TOKEN_KEYS_FACT)
        if raw is not None:
            self._use(decode_key_ring(raw))
        self.rotate_if_due()

    async def wait_settled(self) -> None:
        """Wait until a pending write is durable or failed."""
        if self._writing:
            await self._settled.wait()

    def rotate_if_due(self) -> None:
        """Create the first key, or the next one when it is due."""
        if self._writing or self._log.refusal is not None:
            return
        now_ms = self._now_ms()
        if self.signer is None:
            self._write(KeyRing.first(now_ms))
        elif self.signer.ring.is_due(now_ms, self._life_ms):
            self._write(self.signer.ring.rotated(now_ms, self._verify_ms))
            logger.info("rotated realtime token key")

    def _write(self, ring: KeyRing) -> None:
        self._writing = True
        self._settled.clear()

        def durable(_: Transaction, error: TailraceError | None) -> None:
            self._writing = False
            if error is None:
                self._use(ring)
            self._settled.set()

        self._log.put_meta(TOKEN_KEYS_FACT, encode_key_ring(ring), durable)

    def _use(self, ring: KeyRing) -> None:
        if self.signer is None:
            self.signer = TokenSigner(ring, self._verify_ms, self._now_ms)
        else:
            self.signer.ring = ring
