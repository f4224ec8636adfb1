"""Tokens made and read by hand: what `tailrace token create` and `tailrace token inspect` do."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import jwt
import msgspec

from tailrace.auth.tokens import (
    LEEWAY_S,
    SCOPES,
    Identity,
    check_secret,
    parse_bearer,
    read_claims,
    read_header,
    token_databases,
    token_scopes,
)
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

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
