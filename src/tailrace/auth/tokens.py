"""Bearer tokens (JWT): claims and identities, creating and inspecting tokens, and grants.

Grants are random tokens that a server issues to its own child processes and jobs; they are not signed and end
with the process.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import jwt
import msgspec
from jwt import PyJWS
from jwt.exceptions import PyJWTError
from jwt.utils import base64url_decode

from tailrace.auth import jwks
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

SCOPES: Final = frozenset({"read", "write", "manage", "system"})
LEEWAY_S: Final = 30.0
TOKEN_BYTES_MAX: Final = 8 * 1024
SECRET_BYTES_MIN: Final = 32
# Larger numbers are not a time in seconds; also excludes infinities and giant integers.
TIME_S_MAX: Final = 1e12

JWS: Final = PyJWS(algorithms=["HS256", *sorted(jwks.ALGORITHMS)])


class HubReadPolicy(Protocol):
    """The hub's rules for reading streams under `hub/` without the hub."""

    def may_read(self, identity: Identity, name: str) -> bool: ...


class Identity(msgspec.Struct, frozen=True):
    """The identity of a request. `streams` and `dbs` are None if the claim is absent."""

    sub: str
    scopes: frozenset[str]
    streams: tuple[str, ...] | None = None
    dbs: tuple[str, ...] | None = None
    actor_id: str = ""
    expires_at: float | None = None
    anonymous: bool = False
    claims: bytes = b"{}"  # the whole payload, for rules that use custom claims
    token_id: str = ""  # by which the token can be revoked
    origin_id: str = ""  # of the token that was exchanged for this one
    issued_at: float | None = None
    credential: str = ""  # kind and fingerprint of the secret, public key, API key or grant; "" if none
    public: bool = False  # a request without a token, for public streams
    hub: HubReadPolicy | None = None  # None where the hub's rules are not known, as on an edge

    @property
    def until_s(self) -> float | None:
        """When a connection that was opened with this identity must end."""
        return None if self.expires_at is None else self.expires_at + LEEWAY_S


ANONYMOUS: Final = Identity(sub="", scopes=frozenset({"read", "write", "manage"}), anonymous=True)


class Claims(msgspec.Struct, frozen=True):
    """The claims in use, strictly typed: a claim of another type makes the token invalid, never weaker."""

    sub: str = ""
    actor_id: str | msgspec.UnsetType = msgspec.field(name="actorId", default=msgspec.UNSET)
    scope: str | list[str] = ""
    streams: list[str] | msgspec.UnsetType = msgspec.UNSET
    db: list[str] | msgspec.UnsetType = msgspec.UNSET
    databases: list[str] | msgspec.UnsetType = msgspec.UNSET
    database: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    iss: str = ""
    jti: str = ""
    origin: str = msgspec.field(name="trOrigin", default="")  # id of the token exchanged for this one
    vouched: str = msgspec.field(name="trVouched", default="")  # credential of that token
    aud: str | list[str] = msgspec.field(default_factory=list[str])
    exp: int | float | msgspec.UnsetType = msgspec.UNSET
    nbf: int | float | msgspec.UnsetType = msgspec.UNSET
    iat: int | float | msgspec.UnsetType = msgspec.UNSET


_decode_claims = msgspec.json.Decoder(Claims).decode


def token_required_error() -> TailraceError:
    """401 for a request without a token."""
    return TailraceError(
        "unauthorized",
        "missing bearer token in the Authorization header",
        headers=(("WWW-Authenticate", 'Bearer realm="tailrace"'),),
    )


def reject_token(reason: str) -> NoReturn:
    raise invalid_token_error(reason)


def invalid_token_error(reason: str) -> TailraceError:
    """401 for an invalid token. The reason never quotes the token."""
    return TailraceError(
        "unauthorized",
        reason,
        headers=(
            (
                "WWW-Authenticate",
                f'Bearer realm="tailrace", error="invalid_token", error_description="{reason}"',
            ),
        ),
    )


def check_secret(secret: str) -> None:
    """Reject a short secret, which could be guessed offline from any token."""
    if len(secret.encode()) < SECRET_BYTES_MIN:
        raise TailraceError(
            "invalid_request",
            f"the shared secret of tokens must have at least {SECRET_BYTES_MIN} bytes; "
            "create one with: openssl rand -base64 48",
        )


def parse_bearer(authorization: bytes) -> bytes:
    """The token of `Bearer <token>`; the scheme is case-insensitive."""
    scheme, _, token = authorization.partition(b" ")
    token = token.strip(b" ")
    if scheme.lower() != b"bearer" or not token:
        reject_token("the Authorization header must be 'Bearer <token>'")
    if len(token) > TOKEN_BYTES_MAX:
        reject_token(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
    return token


def read_header(token: bytes) -> dict[str, Any]:
    """The unverified header of a token; use it only to select a key."""
    try:
        return JWS.get_unverified_header(token)
    except (PyJWTError, ValueError, TypeError):
        reject_token("the token is not a JWT")


def read_claims(payload: bytes) -> Claims:
    try:
        claims = _decode_claims(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        reject_token("a claim of the token is malformed")
    times = [moment for moment in (claims.exp, claims.nbf, claims.iat) if moment is not msgspec.UNSET]
    prefixes = [] if claims.streams is msgspec.UNSET else claims.streams
    # An empty prefix would cover everything; omitting the claim does that.
    if not all(abs(moment) < TIME_S_MAX for moment in times) or not all(prefixes):
        reject_token("a claim of the token is malformed")
    return claims


def is_exchanged_token(authorization: bytes) -> bool:
    """Whether an unverified token claims to be exchanged for one with another credential (API key, JWKS).

    Only a server that knows that credential can check it.
    """
    try:
        payload = base64url_decode(authorization.split(b".")[1])
        return read_claims(payload).vouched.startswith(("key ", "jwks "))
    except (IndexError, ValueError, TailraceError):
        return False


def token_scopes(claims: Claims) -> frozenset[str]:
    """The known scopes of a token; other words, which identity providers add, grant nothing."""
    words = claims.scope.split(" ") if isinstance(claims.scope, str) else claims.scope
    return frozenset(words) & SCOPES


def token_databases(claims: Claims) -> tuple[str, ...] | None:
    """`db` or its two synonyms; if several are present, their intersection."""
    named = [claim for claim in (claims.db, claims.databases, claims.database) if claim is not msgspec.UNSET]
    if not named:
        return None
    lists = [[claim] if isinstance(claim, str) else claim for claim in named]
    allowed = [name for name in lists[0] if all(name in other for other in lists[1:])]
    return tuple(allowed)


def strip_address_brackets(address: str) -> str:
    """`@(a/b)` and `a/b` are the same hub address."""
    return address[2:-1] if address.startswith("@(") and address.endswith(")") else address


TOKEN_LIFETIME_S_DEFAULT: Final = 3600


def create_token(
    secret: str,
    *,
    sub: str,
    scopes: Sequence[str] = ("read",),
    streams: Sequence[str] | None = None,
    dbs: Sequence[str] | None = None,
    actor_id: str | None = None,
    lifetime_s: int | None = TOKEN_LIFETIME_S_DEFAULT,
    issuer: str = "",
    audience: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> str:
    """Create an HS256 token with a unique id; it never expires if `lifetime_s` is None."""
    check_secret(secret)
    if not sub:
        # Most likely an unset variable; such a token could not be attributed or revoked by subject.
        raise TailraceError("invalid_request", "the subject of a token must not be empty")
    unknown = sorted(set(scopes) - SCOPES)
    if unknown:
        raise TailraceError(
            "invalid_request", f"unknown scope {unknown[0]!r}; scopes are {', '.join(sorted(SCOPES))}"
        )
    if streams is not None and not all(streams):
        raise TailraceError(
            "invalid_request", "a stream prefix must not be empty; omit the prefixes to allow all streams"
        )
    if lifetime_s is not None and lifetime_s <= 0:
        raise TailraceError("invalid_request", "the lifetime of a token must be at least one second")
    now_s = clock.now_ns() // 1_000_000_000
    claims: dict[str, Any] = {"sub": sub, "scope": " ".join(scopes), "iat": now_s}
    claims["jti"] = secrets.token_hex(8)
    optional: dict[str, Any] = {
        "exp": None if lifetime_s is None else now_s + lifetime_s,
        "streams": None if streams is None else list(streams),
        "db": None if dbs is None else list(dbs),
        "actorId": actor_id,
        "iss": issuer or None,
        "aud": audience or None,
    }
    claims.update({name: value for name, value in optional.items() if value is not None})
    return jwt.encode(claims, secret.encode(), algorithm="HS256")


class TokenReport(msgspec.Struct, frozen=True):
    """The content of a token and problems with its times and claims. The signature is not verified."""

    header: dict[str, Any]
    claims: dict[str, Any]
    scopes: list[str]
    streams: list[str] | None
    dbs: list[str] | None
    expires_in_s: float | None
    problems: list[str]


def inspect_token(token: str, *, clock: Clock = SYSTEM_CLOCK) -> TokenReport:
    """Read a token (with or without `Bearer`) without a key; TailraceError if it is not a JWT."""
    text = token.strip()
    raw = parse_bearer(text.encode() if text[:7].lower() == "bearer " else b"Bearer " + text.encode())
    header = read_header(raw)
    try:
        payload = jwt.decode_complete(raw, options={"verify_signature": False})["payload"]
    except jwt.PyJWTError:
        raise TailraceError("unauthorized", "the token is not a JWT") from None
    problems: list[str] = []
    identity = Identity(sub="", scopes=frozenset())
    expires_in_s: float | None = None
    now_s = clock.now_ns() / 1e9
    try:
        claims = read_claims(msgspec.json.encode(payload))
    except TailraceError as error:
        problems.append(error.message)
    else:
        identity = Identity(
            sub=claims.sub,
            scopes=token_scopes(claims),
            streams=None if claims.streams is msgspec.UNSET else tuple(claims.streams),
            dbs=token_databases(claims),
        )
        if claims.exp is not msgspec.UNSET:
            expires_in_s = claims.exp - now_s
            if expires_in_s <= -LEEWAY_S:
                problems.append("the token has expired")
        if claims.nbf is not msgspec.UNSET and now_s < claims.nbf - LEEWAY_S:
            problems.append("the token is not valid yet")
        if not identity.scopes:
            problems.append("the token has no known scope")
    return TokenReport(
        header=header,
        claims=payload,
        scopes=sorted(identity.scopes),
        streams=None if identity.streams is None else list(identity.streams),
        dbs=None if identity.dbs is None else list(identity.dbs),
        expires_in_s=expires_in_s,
        problems=problems,
    )


GRANT_PREFIX: Final = "trg_"
GRANTS_MAX: Final = 1000


class Grant(NamedTuple):
    identity: Identity
    giver: Identity | None  # on whose behalf; the grant ends when that identity is revoked


class GrantStore:
    """The valid grants, owned by the event loop. Also used when authentication is off."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._grants: dict[str, Grant] = {}  # by the hash of the token, oldest first

    def issue(self, identity: Identity, seconds: float, giver: Identity | None = None) -> str:
        """Issue a token for `seconds`, but not beyond the expiry of the giver's token."""
        now_s = self._now_s()
        self._grants = {
            token_hash: one
            for token_hash, one in self._grants.items()
            if _is_valid_grant(one.identity, now_s)
        }
        while len(self._grants) >= GRANTS_MAX:
            del self._grants[next(iter(self._grants))]
        until = now_s + seconds
        if giver is not None and giver.expires_at is not None:
            until = min(until, giver.expires_at)
        token = GRANT_PREFIX + secrets.token_urlsafe(32)
        token_hash = _grant_hash(token.encode())
        granted = msgspec.structs.replace(identity, expires_at=until, credential=f"grant {token_hash}")
        self._grants[token_hash] = Grant(granted, giver)
        return token

    def find(self, token: bytes) -> Identity | None:
        found = self._grants.get(_grant_hash(token))
        return None if found is None or not _is_valid_grant(found.identity, self._now_s()) else found.identity

    def has(self, token_hash: str) -> bool:
        return token_hash in self._grants

    def revoke_orphans(self, is_valid: Callable[[Identity], bool]) -> None:
        """Revoke grants that were issued on behalf of an identity that is no longer valid."""
        self._grants = {
            token_hash: one
            for token_hash, one in self._grants.items()
            if one.giver is None or is_valid(one.giver)
        }

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9


def _is_valid_grant(identity: Identity, now_s: float) -> bool:
    return identity.expires_at is not None and now_s < identity.expires_at + LEEWAY_S


def _grant_hash(token: bytes) -> str:
    """Tokens are looked up by hash, so that timing reveals nothing about them."""
    return hashlib.sha256(token).hexdigest()
