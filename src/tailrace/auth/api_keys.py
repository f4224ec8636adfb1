"""API keys: credentials for programs, valid until they expire or are removed.

A key is `trk_<id>_<secret>`. The id finds its record, the secret proves it. Only the SHA-256 of the secret is
stored: the secret has 256 random bits, so a slow hash is not needed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from tailrace.auth.tokens import SCOPES, TIME_S_MAX, Identity, strip_address_brackets
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

API_KEY_PREFIX: Final = "trk_"
API_KEYS_MAX: Final = 10_000
KEY_PREFIXES_MAX: Final = 100  # prefixes, or databases, of one key
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
# `system` is issued by the server only.
GRANTABLE_SCOPES: Final = SCOPES - {"system"}

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Names = Annotated[list[Name], msgspec.Meta(max_length=KEY_PREFIXES_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=int(TIME_S_MAX))]


class ApiKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The stored record of a key."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    sub: Name
    scopes: list[str]
    created_at: Seconds
    streams: Names | None = None
    databases: Names | None = None
    actor_id: Name | None = None
    expires_at: Seconds | None = None

    @property
    def fingerprint(self) -> str:
        """Changes whenever anything about the key changes."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    @property
    def token_id(self) -> str:
        return API_KEY_PREFIX + self.id

    def verify_secret(self, secret: bytes) -> bool:
        return hmac.compare_digest(hash_secret(secret), self.hash)

    def identity(self) -> Identity:
        """The identity of a request with this key. Its claims are those that a token would have."""
        claims: dict[str, Any] = {"sub": self.sub, "scope": " ".join(self.scopes), "jti": self.token_id}
        optional = {"streams": self.streams, "db": self.databases, "actorId": self.actor_id}
        claims |= {name: value for name, value in optional.items() if value is not None}
        return Identity(
            sub=self.sub,
            scopes=frozenset(self.scopes) & GRANTABLE_SCOPES,
            streams=None if self.streams is None else tuple(self.streams),
            dbs=None if self.databases is None else tuple(self.databases),
            actor_id=strip_address_brackets(self.actor_id or self.sub),
            expires_at=None if self.expires_at is None else float(self.expires_at),
            claims=msgspec.json.encode(claims),
            token_id=self.token_id,
            issued_at=float(self.created_at),
            credential=f"key {self.fingerprint}",
        )

    def to_public(self) -> dict[str, Any]:
        """All fields except the hash."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        del found["hash"]
        return found


def create_api_key(
    *,
    sub: str,
    scopes: Sequence[str],
    streams: Sequence[str] | None = None,
    dbs: Sequence[str] | None = None,
    actor_id: str | None = None,
    lifetime_s: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[ApiKey, str]:
    """A new key: its record, and the text that is shown only once."""
    wrong = sorted(set(scopes) - GRANTABLE_SCOPES)
    if wrong or not scopes:
        problem = f"a key cannot have the scope {wrong[0]!r}" if wrong else "a key needs a scope"
        raise TailraceError("invalid_request", f"{problem}: use read, write or manage")
    if lifetime_s is not None and not 0 < lifetime_s < TIME_S_MAX:
        raise TailraceError("invalid_request", "the lifetime of a key must be at least one second")
    now_s = clock.now_ns() // 1_000_000_000
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    fields = {
        "id": key_id,
        "hash": hash_secret(secret.encode()),
        "sub": sub,
        "scopes": sorted(set(scopes)),
        "createdAt": now_s,
        "streams": None if streams is None else list(streams),
        "databases": None if dbs is None else list(dbs),
        "actorId": actor_id,
        "expiresAt": None if lifetime_s is None else now_s + lifetime_s,
    }
    try:
        key = msgspec.convert(fields, ApiKey)
    except msgspec.ValidationError as error:
        raise TailraceError("invalid_request", f"invalid API key: {error}") from None
    return key, f"{API_KEY_PREFIX}{key_id}_{secret}"


def is_api_key(token: bytes) -> bool:
    return token.startswith(API_KEY_PREFIX.encode())


def split_api_key(token: bytes) -> tuple[str, bytes]:
    """Id and secret of a text with the prefix of a key."""
    key_id, _, secret = token[len(API_KEY_PREFIX) :].partition(b"_")
    return key_id.decode("latin-1"), secret


def hash_secret(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
