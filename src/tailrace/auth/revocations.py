"""Tokens that are good no more: one by its id, or all that a subject was given so far."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from tailrace.auth.tokens import LEEWAY_S, TIME_S_MAX, Identity
from tailrace.common.errors import TailraceError

REVOKED_MAX: Final = 50_000
REVOCATION_HASH_DIGITS: Final = 32
# A token may have been exchanged for a newer one at the hub, which is good for at most so long.
EXCHANGED_TOKEN_S_MAX: Final = 3600

Seconds = Annotated[int, msgspec.Meta(ge=0, le=int(TIME_S_MAX))]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class RevokedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By `jti`. After `until` the token has expired anyway, and need not be remembered."""

    jti: Text
    at: Seconds
    until: Seconds | None = None


class RevokedSubject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was issued to a subject up to `at`, and everything that does not say when it was."""

    sub: Text
    at: Seconds


class RevokedHashes(msgspec.Struct, frozen=True):
    """The same for whoever checks tokens elsewhere: hashes, which name nobody and prove nothing."""

    tokens: frozenset[str] = frozenset()
    subjects: Mapping[str, Seconds] = msgspec.field(default_factory=dict[str, int])

    def concern(self, identity: Identity) -> bool:
        ids = (identity.token_id, identity.origin_id)
        if any(revocation_hash(one) in self.tokens for one in ids if one):
            return True
        return _issued_before_revocation(identity, self.subjects.get(revocation_hash(identity.sub)))


class Revocations:
    """All of them, ready to ask."""

    def __init__(self, tokens: Iterable[RevokedToken] = (), subjects: Iterable[RevokedSubject] = ()) -> None:
        self._tokens = frozenset(one.jti for one in tokens)
        self._subjects = {one.sub: one.at for one in subjects}

    def __len__(self) -> int:
        return len(self._tokens) + len(self._subjects)

    def concern(self, identity: Identity) -> bool:
        if identity.token_id in self._tokens or identity.origin_id in self._tokens:
            return True
        return _issued_before_revocation(identity, self._subjects.get(identity.sub))

    def marks(self) -> RevokedHashes:
        subjects = {revocation_hash(sub): at for sub, at in self._subjects.items()}
        return RevokedHashes(frozenset(map(revocation_hash, self._tokens)), subjects)


def revocation_hash(text: str) -> str:
    """What stands for the id of a token, or for a subject."""
    return hashlib.sha256(text.encode()).hexdigest()[:REVOCATION_HASH_DIGITS]


def _issued_before_revocation(identity: Identity, at: int | None) -> bool:
    """Whether a token was there when its subject lost everything; if it does not say, it counts as that."""
    return at is not None and (identity.issued_at is None or identity.issued_at < at + 1)


def add_revoked_token(
    known: tuple[RevokedToken, ...], jti: str, now_s: int, expires_s: int | None
) -> tuple[RevokedToken, ...]:
    """With one more; those that have expired by themselves are left out."""
    until = None if expires_s is None else max(expires_s, now_s + EXCHANGED_TOKEN_S_MAX) + 2 * int(LEEWAY_S)
    kept = [one for one in known if one.jti != jti and (one.until is None or one.until > now_s)]
    _check_room(len(kept))
    return (*kept, RevokedToken(jti, now_s, until))


def add_revoked_subject(
    known: tuple[RevokedSubject, ...], sub: str, now_s: int
) -> tuple[RevokedSubject, ...]:
    kept = [one for one in known if one.sub != sub]
    _check_room(len(kept))
    return (*kept, RevokedSubject(sub, now_s))


def _check_room(count: int) -> None:
    if count >= REVOKED_MAX:
        raise TailraceError(
            "insufficient_storage",
            f"{REVOKED_MAX} revocations are remembered already; change the secret they were signed with",
        )
