"""How much one identity may ask: requests, and bytes in their bodies. Unless that is set, anything."""

from __future__ import annotations

from typing import Final, Protocol

from tailrace.auth import Identity
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.http.exchange import Exchange
from tailrace.http.relay import ALONE_HEADER
from tailrace.http.server import HttpServer
from tailrace.routing.proxies import client_network
from tailrace.routing.vouched import ClientResolver

BUCKETS_MAX: Final = 20_000
AT_ONCE: Final = 2  # seconds' worth, after a rest


class RateCounter(Protocol):
    """Who has taken how much: of this process, or of all workers."""

    def take(self, identity: str, kind: str, now_ns: int, count: int = 1) -> int: ...
    def give_back(self, identity: str, kind: str, count: int = 1) -> None: ...


class IdentityRateLimiter:
    """Owned by the event loop."""

    def __init__(self, limits: Limits, clock: Clock, vouching: ClientResolver) -> None:
        self._clock = clock
        self._vouching = vouching
        per_s = {"ops": limits.identity_ops_per_s, "bytes": limits.identity_bytes_per_s}
        self.rates = {kind: Rate(rate, AT_ONCE * rate) for kind, rate in per_s.items() if rate}
        self.buckets: RateCounter = TokenBuckets(self.rates, buckets_max=BUCKETS_MAX)
        self.any = bool(self.rates)
        # Where other workers ask for parts of an answer: the request they do it for was counted there.
        self.inside: HttpServer | None = None
        self.refused = 0

    def take(self, identity: Identity, exchange: Exchange) -> None:
        """Counts a request, or refuses it and says when to come back."""
        if not self._counts(identity, exchange):
            return
        who = self._name(identity, exchange)
        now_ns = self._clock.now_ns()
        wait_ms = self.buckets.take(who, "ops", now_ns) if "ops" in self.rates else 0
        size = len(exchange.body)
        if not wait_ms and size and "bytes" in self.rates:
            wait_ms = self.buckets.take(who, "bytes", now_ns, size)
            if wait_ms and "ops" in self.rates:
                self.buckets.give_back(who, "ops")
        if wait_ms:
            self.refused += 1
            raise TailraceError(
                "overloaded", "this identity asks too much at once", retry_after_s=-(-wait_ms // 1000)
            )

    def give_back(self, identity: Identity, exchange: Exchange) -> None:
        """What was taken for a request that is counted where it goes from here."""
        if self._counts(identity, exchange):
            who = self._name(identity, exchange)
            for kind, count in (("ops", 1), ("bytes", len(exchange.body))):
                if kind in self.rates:
                    self.buckets.give_back(who, kind, count)

    def _counts(self, identity: Identity, exchange: Exchange) -> bool:
        """A part of this server does not, nor a part of a request that another worker counted."""
        if identity.vouched_by.startswith("grant "):
            return False
        return ALONE_HEADER not in exchange.headers or exchange.connection.server is not self.inside

    def _name(self, identity: Identity, exchange: Exchange) -> str:
        """Whoever has no name is known by the token, and whoever has no token by the address."""
        if identity.public:
            return "peer " + client_network(self._vouching.address_of(exchange))
        return f"sub {identity.sub}" if identity.sub else f"token {identity.token_id}"
