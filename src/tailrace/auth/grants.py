"""Tokens that a server gives to its own children and jobs. Nobody signs them; they end with the process."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from tailrace.auth.tokens import LEEWAY_S, Identity
from tailrace.common.clock import SYSTEM_CLOCK, Clock

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
