"""How much one identity may ask: requests, and bytes in their bodies. Unless that is set, anything."""

from __future__ import annotations

from typing import Final

from tailrace.auth import Identity
from tailrace.clock import Clock
from tailrace.errors import TailraceError
from tailrace.hub.buckets import Buckets, Rate
from tailrace.limits import Limits
from tailrace.net.http1 import Exchange

BUCKETS_MAX: Final = 20_000
AT_ONCE: Final = 2  # seconds' worth, after a rest


class IdentityRates:
    """Owned by the event loop."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._clock = clock
        per_s = {"ops": limits.identity_ops_per_s, "bytes": limits.identity_bytes_per_s}
        self._rates = {kind: Rate(rate, AT_ONCE * rate) for kind, rate in per_s.items() if rate}
        self._buckets = Buckets(self._rates, buckets_max=BUCKETS_MAX)
        self.any = bool(self._rates)
        self.refused = 0

    def take(self, identity: Identity, exchange: Exchange) -> None:
        """Counts a request, or refuses it and says when to come back."""
        if identity.vouched_by.startswith("grant "):
            return  # a part of this server
        who = _name(identity, exchange)
        now_ns = self._clock.now_ns()
        wait_ms = self._buckets.take(who, "ops", now_ns) if "ops" in self._rates else 0
        size = len(exchange.body)
        if not wait_ms and size and "bytes" in self._rates:
            wait_ms = self._buckets.take(who, "bytes", now_ns, size)
            if wait_ms and "ops" in self._rates:
                self._buckets.give_back(who, "ops")
        if wait_ms:
            self.refused += 1
            raise TailraceError(
                "overloaded", "this identity asks too much at once", retry_after_s=-(-wait_ms // 1000)
            )


def _name(identity: Identity, exchange: Exchange) -> str:
    """Whoever has no name is known by the token, and whoever has no token by the address."""
    if identity.public:
        return "peer " + exchange.peer.rpartition(":")[0]
    return f"sub {identity.sub}" if identity.sub else f"token {identity.token_id}"
