"""Verifies bearer tokens and turns them into identities.

A token cannot choose its algorithm: HS256 is verified with the shared secret only, RS256, ES256 and EdDSA
with a public key bound to that algorithm, all others are rejected. Verified tokens are cached until they
expire or something is revoked, so the signature of a busy client is verified once.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any, Final

import msgspec
from jwt.exceptions import PyJWTError

from tailrace.auth import api_keys, jwks, tokens
from tailrace.auth.identities import IDENTITY_FILE_NAME, IdentityFile, IdentityStore
from tailrace.auth.tokens import (
    ANONYMOUS,
    JWS,
    LEEWAY_S,
    GrantStore,
    HubReadPolicy,
    Identity,
    check_secret,
    invalid_token_error,
    parse_bearer,
    read_claims,
    read_header,
    reject_token,
    strip_address_brackets,
    token_databases,
    token_required_error,
    token_scopes,
)
from tailrace.common.caches import LruCache
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

CACHED_TOKENS_MAX: Final = 10_000
CACHED_TOKEN_BYTES_MAX: Final = 8 * 1024 * 1024


class TokenVerifier:
    """Turns an Authorization header into an identity. Owned by the event loop; never blocks."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
        grants: GrantStore | None = None,
        hub: HubReadPolicy | None = None,
    ) -> None:
        """`hub` has the rules for reading streams of the hub."""
        self._clock = clock
        self._issuer = settings.auth_issuer
        self._audience = settings.auth_audience
        self._secret = settings.auth_jwt_secret.encode()
        if self._secret:
            check_secret(settings.auth_jwt_secret)
        # Changes with the secret, and reveals no more about it than a token does.
        self._secret_fingerprint = hmac.digest(self._secret, b"vouched by", "sha256")[:16].hex()
        self._ring = _open_key_ring(settings, clock)
        self.grants = GrantStore(clock) if grants is None else grants
        self.book = IdentityStore(IdentityFile(identity_path(settings)), clock)
        self._public = _public_reader(settings)
        self._hub = hub
        self._verified: LruCache[bytes, Identity] = LruCache(
            entries_max=CACHED_TOKENS_MAX,
            size_max=CACHED_TOKEN_BYTES_MAX,
            size_of=lambda authorization, _: len(authorization),
        )
        self._verified_versions = (0, 0)
        self._rechecked_versions = (0, 0)
        self.enabled = settings.auth_configured
        if self.enabled:
            # If API keys are the only way to authenticate, there must be some.
            self.book.load(required=not self._secret and self._ring is None)
            self._rechecked_versions = self._versions

    def start(self) -> None:
        """Start refreshing the key set, if there is one."""
        if self._ring is not None:
            self._ring.start()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

    def wait_keys(self, timeout_s: float) -> bool:
        """Wait for a key refresh in progress. For start-up and tests, not for requests."""
        return self._ring is None or self._ring.wait_idle(timeout_s)

    # -- verification ----------------------------------------------------------------------------------

    def verify(self, authorization: bytes | None) -> Identity:
        """The identity behind an Authorization header, or `unauthorized`."""
        if not self.enabled:
            return ANONYMOUS
        if authorization is None:
            if self._public is not None:
                return self._public
            raise token_required_error()
        seen_ring, seen_book = self._verified_versions
        ring = self._ring
        if self.book.version != seen_book or (ring is not None and ring.version != seen_ring):
            # Keys changed or something was revoked: cached tokens must be verified again.
            self._clear_cache()
        identity = self._verified.get(authorization)
        if identity is not None:
            if identity.expires_at is not None and self._now_s() >= identity.expires_at + LEEWAY_S:
                self._verified.pop(authorization)
                reject_token("the token has expired")
            return identity
        token = parse_bearer(authorization)
        if token.startswith(tokens.GRANT_PREFIX.encode()):
            return self._verify_grant(token)
        identity = self._verify_api_key(token) if api_keys.is_api_key(token) else self._verify_jwt(token)
        self.check_valid(identity)
        identity = msgspec.structs.replace(identity, hub=self._hub)
        self._verified.put(authorization, identity)
        return identity

    def is_valid(self, identity: Identity) -> bool:
        """Whether the credential of an identity still exists and is not revoked; expiry is not checked."""
        kind, _, fingerprint = identity.credential.partition(" ")
        if kind == "grant":
            return self.grants.has(fingerprint)
        if kind == "key" and not self.book.has_key(fingerprint):
            return False
        if kind == "secret" and fingerprint != self._secret_fingerprint:
            return False
        if kind == "jwks" and (self._ring is None or not self._ring.has(fingerprint)):
            return False
        return not self.book.is_revoked(identity)

    def check_valid(self, identity: Identity) -> None:
        if not self.is_valid(identity):
            reject_token("the token was revoked")

    # -- changes ---------------------------------------------------------------------------------------

    @property
    def _versions(self) -> tuple[int, int]:
        return (0 if self._ring is None else self._ring.version, self.book.version)

    def poll_changes(self) -> bool:
        """Check the identity file and the keys; True if anything changed since the last call."""
        self.book.refresh()
        before, self._rechecked_versions = self._rechecked_versions, self._versions
        if before == self._rechecked_versions:
            return False
        self.grants.revoke_orphans(self.is_valid)
        return True

    def reload(self) -> None:
        """Refresh the key set now, in the background, because an operator requested it."""
        if self._ring is not None:
            self._ring.reload()

    # -- internal --------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9

    def _verify_grant(self, token: bytes) -> Identity:
        found = self.grants.find(token)
        if found is None:
            reject_token("the token has expired or was revoked")
        return found

    def _verify_api_key(self, token: bytes) -> Identity:
        key_id, secret = api_keys.split_api_key(token)
        key = self.book.find_key(key_id)
        if key is None and self.book.refresh():
            key = self.book.find_key(key_id)  # created since the last check of the file
        if key is None or not key.verify_secret(secret):
            reject_token("unknown API key")
        identity = key.identity()
        if identity.expires_at is not None and self._now_s() >= identity.expires_at + LEEWAY_S:
            reject_token("the API key has expired")
        return identity

    def _verify_jwt(self, token: bytes) -> Identity:
        header = read_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or not (key_id is None or isinstance(key_id, str)):
            reject_token("the token header is malformed")
        if "crit" in header:
            reject_token("the token requires an extension that this server does not support")
        key: Any
        if algorithm == "HS256" and self._secret:
            key, credential = self._secret, f"secret {self._secret_fingerprint}"
        elif algorithm in jwks.ALGORITHMS and self._ring is not None:
            bound = self._find_key(self._ring, algorithm, key_id)
            key, credential = bound.key, f"jwks {bound.fingerprint}"
        else:
            reject_token("the token's signature algorithm is not accepted")
        try:
            payload: bytes = JWS.decode_complete(token, key, algorithms=[algorithm])["payload"]
        except (PyJWTError, ValueError, TypeError):
            reject_token("the token signature is invalid")
        return self._identity(payload, credential)

    def _find_key(self, ring: jwks.KeyRing, algorithm: str, key_id: str | None) -> jwks.BoundKey:
        key = ring.find(algorithm, key_id)
        if key is not None:
            return key
        if ring.request_refresh() or not ring.loaded:
            # The issuer may have rotated its keys; clients retry after a 503.
            raise TailraceError("unavailable", "the keys that verify tokens are being fetched, retry later")
        raise invalid_token_error("the token is signed with an unknown key")

    def _identity(self, payload: bytes, credential: str) -> Identity:
        claims = read_claims(payload)
        now_s = self._now_s()
        if claims.exp is not msgspec.UNSET and now_s >= claims.exp + LEEWAY_S:
            reject_token("the token has expired")
        if claims.nbf is not msgspec.UNSET and now_s < claims.nbf - LEEWAY_S:
            reject_token("the token is not valid yet")
        if claims.iat is not msgspec.UNSET and now_s < claims.iat - LEEWAY_S:
            reject_token("the token was issued in the future")
        if self._issuer and claims.iss != self._issuer:
            reject_token("the token is from another issuer")
        audience = [claims.aud] if isinstance(claims.aud, str) else claims.aud
        if self._audience and self._audience not in audience:
            reject_token("the token is for another audience")
        scopes = token_scopes(claims)
        if not credential.startswith("secret "):
            # `system` is issued by the server only, never by an identity provider.
            scopes -= {"system"}
        elif claims.vouched:
            credential = claims.vouched  # the server exchanged another token for this one
        actor_id = claims.sub if claims.actor_id is msgspec.UNSET else claims.actor_id
        return Identity(
            sub=claims.sub,
            scopes=scopes,
            streams=None if claims.streams is msgspec.UNSET else tuple(claims.streams),
            dbs=token_databases(claims),
            actor_id=strip_address_brackets(actor_id),
            expires_at=None if claims.exp is msgspec.UNSET else float(claims.exp),
            claims=payload,
            token_id=claims.jti,
            origin_id=claims.origin,
            issued_at=None if claims.iat is msgspec.UNSET else float(claims.iat),
            credential=credential,
        )

    def _clear_cache(self) -> None:
        self._verified.clear()
        self._verified_versions = self._versions


def identity_path(settings: Settings) -> Path:
    """The file of API keys and revocations."""
    return (
        Path(settings.auth_keys_file) if settings.auth_keys_file else settings.data_dir / IDENTITY_FILE_NAME
    )


def _public_reader(settings: Settings) -> Identity | None:
    """The identity of requests without a token, if there are public streams."""
    prefixes = settings.auth_public_prefixes
    if not prefixes:
        return None
    return Identity(sub="", scopes=frozenset({"read"}), streams=prefixes, dbs=(), public=True)


def _open_key_ring(settings: Settings, clock: Clock) -> jwks.KeyRing | None:
    path, url = settings.auth_jwks_file, settings.auth_jwks_url
    if path and url:
        raise TailraceError(
            "invalid_request",
            "auth_jwks_file and auth_jwks_url cannot be combined: set one of them",
        )
    if url:
        jwks.check_url(url, insecure=settings.insecure)
        return jwks.KeyRing(lambda: jwks.fetch(url), url.partition("?")[0], clock)
    if not path:
        return None
    ring = jwks.KeyRing(lambda: jwks.read_file(path), path, clock)
    try:
        ring.load_now()
    except (OSError, ValueError) as error:
        raise TailraceError("invalid_request", f"key set {path}: {error}") from None
    return ring
