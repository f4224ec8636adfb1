"""Bearer tokens (JWT): claims and identity, creating and inspecting tokens, and grants to the server's own
jobs.

Bearer tokens (JWT) as they are read: identity, claims, and what is refused before any key is asked.

Tokens made and read by hand: what `tailrace token create` and `tailrace token inspect` do.

Tokens that a server gives to its own children and jobs. Nobody signs them; they end with the process.
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
# Beyond the year 30,000 a number is not a time; also keeps infinities and giant integers out.
TIME_S_MAX: Final = 1e12

JWS: Final = PyJWS(algorithms=["HS256", *sorted(jwks.ALGORITHMS)])


class HubReadPolicy(Protocol):
    """The hub's rules, as far as streams under `hub/` are read past the hub."""

    def may_read(self, identity: Identity, name: str) -> bool: ...


class Identity(msgspec.Struct, frozen=True):
    """What a request may act as. `streams` and `dbs` are None where the claim is absent."""

    sub: str
    scopes: frozenset[str]
    streams: tuple[str, ...] | None = None
    dbs: tuple[str, ...] | None = None
    actor_id: str = ""
    expires_at: float | None = None
    anonymous: bool = False
    claims: bytes = b"{}"  # the whole payload, for rules that look at claims of their own
    token_id: str = ""  # by which the token can be revoked
    origin_id: str = ""  # of the token that it was exchanged for
    issued_at: float | None = None
    vouched_by: str = ""  # the shared secret, public key, API key or grant behind it; "" is nobody
    public: bool = False  # came without a token, to read what everybody may read
    hub: HubReadPolicy | None = None  # None where the hub's rules are not known, as at an edge

    @property
    def until_s(self) -> float | None:
        """When a connection that was opened with this identity has to end."""
        return None if self.expires_at is None else self.expires_at + LEEWAY_S


ANONYMOUS: Final = Identity(sub="", scopes=frozenset({"read", "write", "manage"}), anonymous=True)


class Claims(msgspec.Struct, frozen=True):
    """The claims we read, strictly typed: a claim of another form makes the token invalid, never weaker."""

    sub: str = ""
    actor_id: str | msgspec.UnsetType = msgspec.field(name="actorId", default=msgspec.UNSET)
    scope: str | list[str] = ""
    streams: list[str] | msgspec.UnsetType = msgspec.UNSET
    db: list[str] | msgspec.UnsetType = msgspec.UNSET
    databases: list[str] | msgspec.UnsetType = msgspec.UNSET
    database: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    iss: str = ""
    jti: str = ""
    origin: str = msgspec.field(name="trOrigin", default="")  # of a token that another was exchanged for
    vouched: str = msgspec.field(name="trVouched", default="")  # who stood behind that other one
    aud: str | list[str] = msgspec.field(default_factory=list[str])
    exp: int | float | msgspec.UnsetType = msgspec.UNSET
    nbf: int | float | msgspec.UnsetType = msgspec.UNSET
    iat: int | float | msgspec.UnsetType = msgspec.UNSET


_decode_claims = msgspec.json.Decoder(Claims).decode


def token_required_error() -> TailraceError:
    """401 for a request that came without a token."""
    return TailraceError(
        "unauthorized",
        "this server needs a bearer token in the Authorization header",
        headers=(("WWW-Authenticate", 'Bearer realm="tailrace"'),),
    )


def reject_token(reason: str) -> NoReturn:
    raise invalid_token_error(reason)


def invalid_token_error(reason: str) -> TailraceError:
    """401 for a token that was given and is not good. The reason never quotes the token."""
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
    """A short secret can be guessed offline from any one token."""
    if len(secret.encode()) < SECRET_BYTES_MIN:
        raise TailraceError(
            "invalid_request",
            f"the shared secret of tokens needs at least {SECRET_BYTES_MIN} bytes; "
            "make one with: openssl rand -base64 48",
        )


def parse_bearer(authorization: bytes) -> bytes:
    """The token of `Bearer <token>`; the scheme in any case."""
    scheme, _, token = authorization.partition(b" ")
    token = token.strip(b" ")
    if scheme.lower() != b"bearer" or not token:
        reject_token("the Authorization header is not of the form 'Bearer <token>'")
    if len(token) > TOKEN_BYTES_MAX:
        reject_token(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
    return token


def read_header(token: bytes) -> dict[str, Any]:
    """The token's header, unverified: good for choosing a key and for nothing else."""
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
    # An empty prefix would cover everything, which is what leaving the claim out says.
    if not all(abs(moment) < TIME_S_MAX for moment in times) or not all(prefixes):
        reject_token("a claim of the token is malformed")
    return claims


def is_exchanged_token(authorization: bytes) -> bool:
    """Whether a token says, unchecked, that it was made for somebody who came with a key of their own.

    What that key is worth, a server tells that knows it.
    """
    try:
        payload = base64url_decode(authorization.split(b".")[1])
        return read_claims(payload).vouched.startswith(("key ", "jwks "))
    except (IndexError, ValueError, TailraceError):
        return False


def token_scopes(claims: Claims) -> frozenset[str]:
    """Our scopes among the token's; identity providers add words of their own, which grant nothing here."""
    words = claims.scope.split(" ") if isinstance(claims.scope, str) else claims.scope
    return frozenset(words) & SCOPES


def token_databases(claims: Claims) -> tuple[str, ...] | None:
    """`db`, or one of its two synonyms; a token that names several must mean all of them."""
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
    """An HS256 token with an id of its own; `lifetime_s` None makes one that never expires."""
    check_secret(secret)
    if not sub:
        # A variable that was never set: nobody could tell later whose token it is, or revoke it by name.
        raise TailraceError("invalid_request", "the subject of a token is empty; say whom it is for")
    unknown = sorted(set(scopes) - SCOPES)
    if unknown:
        raise TailraceError(
            "invalid_request", f"unknown scope {unknown[0]!r}; scopes are {', '.join(sorted(SCOPES))}"
        )
    if streams is not None and not all(streams):
        raise TailraceError(
            "invalid_request", "an empty stream prefix; leave the prefixes out to allow all streams"
        )
    if lifetime_s is not None and lifetime_s <= 0:
        raise TailraceError("invalid_request", "the lifetime of a token is at least one second")
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
    """What a token says, and whether its times and claims would pass. The signature is not checked."""

    header: dict[str, Any]
    claims: dict[str, Any]
    scopes: list[str]
    streams: list[str] | None
    dbs: list[str] | None
    expires_in_s: float | None
    problems: list[str]


def inspect_token(token: str, *, clock: Clock = SYSTEM_CLOCK) -> TokenReport:
    """Reads a token (with or without `Bearer`) without any key; TailraceError if it is none."""
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
            problems.append("the token has no scope that this server knows")
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
    giver: Identity | None  # on whose behalf; what ends their right ends this one


class GrantStore:
    """Owned by the event loop. There are grants also where nobody else needs a token."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._grants: dict[str, Grant] = {}  # by the hash of the token, the oldest first

    def give(self, identity: Identity, seconds: float, giver: Identity | None = None) -> str:
        """A token for so long, and no longer than the one it was asked for with."""
        now_s = self._now_s()
        self._grants = {
            mark: one for mark, one in self._grants.items() if _is_valid_grant(one.identity, now_s)
        }
        while len(self._grants) >= GRANTS_MAX:
            del self._grants[next(iter(self._grants))]
        until = now_s + seconds
        if giver is not None and giver.expires_at is not None:
            until = min(until, giver.expires_at)
        token = GRANT_PREFIX + secrets.token_urlsafe(32)
        mark = _grant_hash(token.encode())
        granted = msgspec.structs.replace(identity, expires_at=until, vouched_by=f"grant {mark}")
        self._grants[mark] = Grant(granted, giver)
        return token

    def find(self, token: bytes) -> Identity | None:
        found = self._grants.get(_grant_hash(token))
        return None if found is None or not _is_valid_grant(found.identity, self._now_s()) else found.identity

    def has(self, mark: str) -> bool:
        return mark in self._grants

    def recheck(self, stands: Callable[[Identity], bool]) -> None:
        """Takes back what was given on behalf of somebody who has lost their right."""
        self._grants = {
            mark: one for mark, one in self._grants.items() if one.giver is None or stands(one.giver)
        }

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9


def _is_valid_grant(identity: Identity, now_s: float) -> bool:
    return identity.expires_at is not None and now_s < identity.expires_at + LEEWAY_S


def _grant_hash(token: bytes) -> str:
    """Tokens are looked up by their hash: how long that takes says nothing about them."""
    return hashlib.sha256(token).hexdigest()
