"""What a session has to be told again: addresses and subscriptions, and when they are renewed."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from tailrace.client.hub.model import Registration, Subscription

# Half of the time to live: one renewal may be lost, and the address is still ours.
_RENEW_AT_FRACTION: Final = 0.5
RETRY_S: Final = 5.0


class HeldRegistration(msgspec.Struct):
    """An address of ours."""

    payload: dict[str, Any]
    registration: Registration
    renew_at: float = 0.0

    def renewed(self, registration: Registration) -> None:
        self.registration = registration
        # What was given, which the hub bounds; a hub that does not tell gave what was asked for.
        ttl_s = registration.ttl_seconds or float(self.payload["ttlSeconds"])
        self.renew_at = time.monotonic() + _RENEW_AT_FRACTION * ttl_s

    def postponed(self) -> None:
        self.renew_at = time.monotonic() + RETRY_S


class HeldSubscription(msgspec.Struct):
    """A subscription of ours. Its id changes when a new session makes it again."""

    payload: dict[str, Any]
    sender: str | None
    subscription: Subscription


class PausedTargets:
    """Whom the hub has asked us not to write to for now."""

    __slots__ = ("_everybody", "_targets")

    def __init__(self) -> None:
        self._targets: set[str] = set()
        self._everybody = False

    def pause(self, targets: list[str] | None) -> None:
        self._everybody = self._everybody or targets is None
        self._targets.update(targets or ())

    def resume(self, targets: list[str] | None) -> None:
        if targets is None:
            self.clear()
        self._targets.difference_update(targets or ())

    def clear(self) -> None:
        self._targets.clear()
        self._everybody = False

    def __contains__(self, target: str) -> bool:
        return self._everybody or target in self._targets
