"""Who is asking: bearer tokens (JWT) to identities.

The algorithm is never the token's choice: HS256 goes with the shared secret alone, RS256, ES256 and EdDSA
with the one key of the set that is bound to them, everything else is refused. Verified tokens are remembered
until they expire, so the signature of a busy client is checked once.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any, Final, NoReturn

import msgspec
from jwt import PyJWS
from jwt.exceptions import PyJWTError

from tailrace.auth import jwks
from tailrace.clock import SYSTEM_CLOCK, Clock
from tailrace.errors import TailraceError
from tailrace.settings import Settings

SCOPES: Final = frozenset({"read", "write", "manage", "system"})
LEEWAY_S: Final = 30.0
TOKEN_BYTES_MAX: Final = 8 * 1024
CACHE_TOKENS_MAX: Final = 10_000
CACHE_BYTES_MAX: Final = 8 * 1024 * 1024
SECRET_BYTES_MIN: Final = 32
# Beyond the year 30,000 a number is not a time; also keeps infinities and giant integers out.
TIME_S_MAX: Final = 1e12

_jws = PyJWS(algorithms=["HS256", *sorted(jwks.ALGORITHMS)])


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
    aud: str | list[str] = msgspec.field(default_factory=list[str])
    exp: int | float | msgspec.UnsetType = msgspec.UNSET
    nbf: int | float | msgspec.UnsetType = msgspec.UNSET
    iat: int | float | msgspec.UnsetType = msgspec.UNSET


_decode_claims = msgspec.json.Decoder(Claims).decode


def refuse(reason: str) -> NoReturn:
    """401 for a token that was given and is not good. The reason never quotes the token."""
    raise TailraceError(
        "unauthorized",
        reason,
        headers=(
            (
                "WWW-Authenticate",
                f'Bearer realm="tailrace", error="invalid_token", error_description="{reason}"',
            ),
        ),
    )


class TokenVerifier:
    """Turns an Authorization header into an identity. Owned by the event loop; never waits."""

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._issuer = settings.auth_issuer
        self._audience = settings.auth_audience
        self._secret = settings.auth_jwt_secret.encode()
        if self._secret:
            check_secret(settings.auth_jwt_secret)
        self._ring = _key_ring(settings, clock)
        self._verified: OrderedDict[bytes, Identity] = OrderedDict()
        self._verified_bytes = 0
        self._granted: dict[bytes, Identity] = {}
        self._verified_version = 0
        self.enabled = settings.auth_configured

    def start(self) -> None:
        """Begins to keep the key set fresh, if there is one."""
        if self._ring is not None:
            self._ring.start()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

    def wait_keys(self, timeout_s: float) -> bool:
        """Waits for a look at the key set that is under way. For start-up and tests, not for requests."""
        return self._ring is None or self._ring.wait_idle(timeout_s)

    def verify(self, authorization: bytes | None) -> Identity:
        """The identity behind an Authorization header, or `unauthorized`."""
        if not self.enabled:
            return ANONYMOUS
        if authorization is None:
            raise TailraceError(
                "unauthorized",
                "this server needs a bearer token in the Authorization header",
                headers=(("WWW-Authenticate", 'Bearer realm="tailrace"'),),
            )
        if self._ring is not None and self._ring.version != self._verified_version:
            # Keys changed: what an old key vouched for has to be vouched for again.
            self._forget_all()
        identity = self._verified.get(authorization) or self._granted.get(authorization)
        if identity is not None:
            if identity.expires_at is not None and self._now_s() >= identity.expires_at + LEEWAY_S:
                self._forget(authorization)
                refuse("the token has expired")
            if authorization in self._verified:
                self._verified.move_to_end(authorization)
            return identity
        identity = self._check(parse_bearer(authorization))
        self._remember(authorization, identity)
        return identity

    def grant(self, identity: Identity, seconds: float) -> str:
        """A token for a child of this very server: no key vouches for it, and it ends with the process."""
        now_s = self._now_s()
        for known, held in list(self._granted.items()):
            if held.expires_at is not None and held.expires_at + LEEWAY_S <= now_s:
                del self._granted[known]
        token = secrets.token_urlsafe(32)
        self._granted[f"Bearer {token}".encode()] = msgspec.structs.replace(
            identity, expires_at=now_s + seconds
        )
        return token

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9

    def _check(self, token: bytes) -> Identity:
        header = read_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or not (key_id is None or isinstance(key_id, str)):
            refuse("the token header is malformed")
        if "crit" in header:
            refuse("the token needs an extension that this server does not know")
        key: Any
        if algorithm == "HS256" and self._secret:
            key = self._secret
        elif algorithm in jwks.ALGORITHMS and self._ring is not None:
            key = self._find_key(self._ring, algorithm, key_id)
        else:
            refuse("the token is signed with an algorithm that this server does not accept")
        try:
            payload: bytes = _jws.decode_complete(token, key, algorithms=[algorithm])["payload"]
        except (PyJWTError, ValueError, TypeError):
            refuse("the token signature is not valid")
        return self._identity(payload, own=algorithm == "HS256")

    def _find_key(self, ring: jwks.KeyRing, algorithm: str, key_id: str | None) -> Any:
        key = ring.find(algorithm, key_id)
        if key is not None:
            return key
        if ring.ask_refresh() or not ring.loaded:
            # Not known to be bad: the issuer may have changed its keys. Clients come back after a 503.
            raise TailraceError("unavailable", "the keys that tokens are checked with are being fetched")
        refuse("the token is signed with an unknown key")

    def _identity(self, payload: bytes, *, own: bool) -> Identity:
        claims = read_claims(payload)
        now_s = self._now_s()
        if claims.exp is not msgspec.UNSET and now_s >= claims.exp + LEEWAY_S:
            refuse("the token has expired")
        if claims.nbf is not msgspec.UNSET and now_s < claims.nbf - LEEWAY_S:
            refuse("the token is not valid yet")
        if claims.iat is not msgspec.UNSET and now_s < claims.iat - LEEWAY_S:
            refuse("the token was issued in the future")
        if self._issuer and claims.iss != self._issuer:
            refuse("the token is from another issuer")
        audience = [claims.aud] if isinstance(claims.aud, str) else claims.aud
        if self._audience and self._audience not in audience:
            refuse("the token is for another audience")
        scopes = scopes_of(claims)
        if not own:
            # `system` is issued by the server only; an identity provider cannot hand it out.
            scopes -= {"system"}
        actor_id = claims.sub if claims.actor_id is msgspec.UNSET else claims.actor_id
        return Identity(
            sub=claims.sub,
            scopes=scopes,
            streams=None if claims.streams is msgspec.UNSET else tuple(claims.streams),
            dbs=databases_of(claims),
            actor_id=_unwrap(actor_id),
            expires_at=None if claims.exp is msgspec.UNSET else float(claims.exp),
            claims=payload,
        )

    def _remember(self, authorization: bytes, identity: Identity) -> None:
        self._verified[authorization] = identity
        self._verified_bytes += len(authorization)
        while len(self._verified) > CACHE_TOKENS_MAX or self._verified_bytes > CACHE_BYTES_MAX:
            oldest, _ = self._verified.popitem(last=False)
            self._verified_bytes -= len(oldest)

    def _forget(self, authorization: bytes) -> None:
        if self._verified.pop(authorization, None) is not None:
            self._verified_bytes -= len(authorization)

    def _forget_all(self) -> None:
        assert self._ring is not None
        self._verified.clear()
        self._verified_bytes = 0
        self._verified_version = self._ring.version


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
        refuse("the Authorization header is not of the form 'Bearer <token>'")
    if len(token) > TOKEN_BYTES_MAX:
        refuse(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
    return token


def read_header(token: bytes) -> dict[str, Any]:
    """The token's header, unverified: good for choosing a key and for nothing else."""
    try:
        return _jws.get_unverified_header(token)
    except (PyJWTError, ValueError, TypeError):
        refuse("the token is not a JWT")


def read_claims(payload: bytes) -> Claims:
    try:
        claims = _decode_claims(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        refuse("a claim of the token is malformed")
    times = [moment for moment in (claims.exp, claims.nbf, claims.iat) if moment is not msgspec.UNSET]
    prefixes = [] if claims.streams is msgspec.UNSET else claims.streams
    # An empty prefix would cover everything, which is what leaving the claim out says.
    if not all(abs(moment) < TIME_S_MAX for moment in times) or not all(prefixes):
        refuse("a claim of the token is malformed")
    return claims


def scopes_of(claims: Claims) -> frozenset[str]:
    """Our scopes among the token's; identity providers add words of their own, which grant nothing here."""
    words = claims.scope.split(" ") if isinstance(claims.scope, str) else claims.scope
    return frozenset(words) & SCOPES


def databases_of(claims: Claims) -> tuple[str, ...] | None:
    """`db`, or one of its two synonyms; a token that names several must mean all of them."""
    named = [claim for claim in (claims.db, claims.databases, claims.database) if claim is not msgspec.UNSET]
    if not named:
        return None
    lists = [[claim] if isinstance(claim, str) else claim for claim in named]
    allowed = [name for name in lists[0] if all(name in other for other in lists[1:])]
    return tuple(allowed)


def _unwrap(address: str) -> str:
    """`@(a/b)` and `a/b` are the same hub address."""
    return address[2:-1] if address.startswith("@(") and address.endswith(")") else address


def _key_ring(settings: Settings, clock: Clock) -> jwks.KeyRing | None:
    path, url = settings.auth_jwks_file, settings.auth_jwks_url
    if path and url:
        raise TailraceError(
            "invalid_request",
            "give the key set as a file or as a URL, not both (auth_jwks_file, auth_jwks_url)",
        )
    if url:
        jwks.check_url(url, insecure=settings.insecure)
        return jwks.KeyRing(lambda: jwks.fetch(url), url, clock)
    if not path:
        return None
    ring = jwks.KeyRing(lambda: jwks.read_file(path), path, clock)
    try:
        ring.load_now()
    except (OSError, ValueError) as error:
        raise TailraceError("invalid_request", f"key set {path}: {error}") from None
    return ring
