"""Bearer tokens (JWT) as they are read: identity, claims, and what is refused before any key is asked."""

from __future__ import annotations

from typing import Any, Final, NoReturn, Protocol

import msgspec
from jwt import PyJWS
from jwt.exceptions import PyJWTError
from jwt.utils import base64url_decode

from tailrace.auth import jwks
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
