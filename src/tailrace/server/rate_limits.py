"""Rate limits by identity: requests and body bytes, counted in one process or shared between workers.

Workers share the counts in mapped memory. A slot of an identity stores the time up to which it has used its
rate; consuming advances that time. There is no lock: two workers that consume for the same identity at the
same moment may count only once, so the limit of a very busy identity is exact to a few per cent, and no
worker ever waits for another.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import xxhash

from tailrace.auth import Identity
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.http.exchange import Exchange
from tailrace.http.relay import ALONE_HEADER
from tailrace.http.server import HttpServer
from tailrace.routing.client_address import ClientResolver, client_network

BUCKETS_MAX: Final = 20_000
BURST_S: Final = 2  # seconds of the rate that may be used at once


class RateCounter(Protocol):
    """Counts of one process, or of all workers together."""

    def take(self, identity: str, kind: str, now_ns: int, count: int = 1) -> int: ...
    def give_back(self, identity: str, kind: str, count: int = 1) -> None: ...


MakeBuckets = Callable[[dict[str, Rate]], RateCounter]


def own_buckets(rates: dict[str, Rate]) -> RateCounter:
    return TokenBuckets(rates, buckets_max=BUCKETS_MAX)


class IdentityRateLimiter:
    """Limits the requests and body bytes per second of each identity. Used on the event loop only."""

    def __init__(
        self,
        limits: Limits,
        clock: Clock,
        clients: ClientResolver,
        make_buckets: MakeBuckets = own_buckets,
    ) -> None:
        self._clock = clock
        self._clients = clients
        per_s = {"ops": limits.identity_ops_per_s, "bytes": limits.identity_bytes_per_s}
        self.rates = {kind: Rate(rate, BURST_S * rate) for kind, rate in per_s.items() if rate}
        self._buckets = make_buckets(self.rates) if self.rates else own_buckets(self.rates)
        self.any = bool(self.rates)
        # Listener for requests of other workers, which have counted the client's request already.
        self.peer_listener: HttpServer | None = None
        self.refused = 0

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.identity_limited.read = lambda: self.refused

    def consume(self, identity: Identity, exchange: Exchange) -> None:
        """Count a request, or refuse it with a retry time."""
        if not self._counts(identity, exchange):
            return
        who = self._name(identity, exchange)
        now_ns = self._clock.now_ns()
        wait_ms = self._buckets.take(who, "ops", now_ns) if "ops" in self.rates else 0
        size = len(exchange.body)
        if not wait_ms and size and "bytes" in self.rates:
            wait_ms = self._buckets.take(who, "bytes", now_ns, size)
            if wait_ms and "ops" in self.rates:
                self._buckets.give_back(who, "ops")
        if wait_ms:
            self.refused += 1
            raise TailraceError(
                "overloaded", "rate limit of this identity exceeded", retry_after_s=-(-wait_ms // 1000)
            )

    def refund(self, identity: Identity, exchange: Exchange) -> None:
        """Refund a request that is counted again by the process it is forwarded to."""
        if self._counts(identity, exchange):
            who = self._name(identity, exchange)
            for kind, count in (("ops", 1), ("bytes", len(exchange.body))):
                if kind in self.rates:
                    self._buckets.give_back(who, kind, count)

    def _counts(self, identity: Identity, exchange: Exchange) -> bool:
        """False for parts of this server, and for requests that another worker has counted."""
        if identity.credential.startswith("grant "):
            return False
        return ALONE_HEADER not in exchange.headers or exchange.connection.server is not self.peer_listener

    def _name(self, identity: Identity, exchange: Exchange) -> str:
        """The subject, else the token, else the network of the client."""
        if identity.public:
            return "peer " + client_network(self._clients.address_of(exchange))
        return f"sub {identity.sub}" if identity.sub else f"token {identity.token_id}"


KINDS: Final = ("ops", "bytes")
SLOTS: Final = 65_536
CELLS: Final = 1 + len(KINDS)  # of a slot: hash of the identity, and a time for each kind
CELL_BYTES: Final = 8
PROBES: Final = 32  # consecutive slots that are tried for an identity
SECOND_NS: Final = 1_000_000_000
MILLI_NS: Final = 1_000_000


class SharedTokenBuckets:
    """As `TokenBuckets`, shared by workers that map the same file. The file must not shrink."""

    def __init__(self, path: Path, rates: Mapping[str, Rate]) -> None:
        self._rates = rates
        size_bytes = SLOTS * CELLS * CELL_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            memory = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self._cells = memoryview(memory).cast("Q")

    def take(self, identity: str, kind: str, now_ns: int, count: int = 1) -> int:
        """Consume `count` units. Returns 0, or how many milliseconds to wait if they exceed the rate.

        More than the burst can be consumed by an identity that was idle; it has to wait afterwards.
        """
        rate = self._rates[kind]
        full_ns = rate.burst * SECOND_NS // rate.per_s
        cost_ns = count * SECOND_NS // rate.per_s
        cell = self._slot(identity, now_ns) + 1 + KINDS.index(kind)
        used_ns = max(self._cells[cell], now_ns)
        over_ns = used_ns - now_ns + min(cost_ns, full_ns) - full_ns
        if over_ns > 0:
            return -(-over_ns // MILLI_NS)
        self._cells[cell] = used_ns + cost_ns
        return 0

    def give_back(self, identity: str, kind: str, count: int = 1) -> None:
        """Refund units of a request that was refused for another reason, or is counted elsewhere."""
        cell = self._slot(identity, 0) + 1 + KINDS.index(kind)
        self._cells[cell] = max(0, self._cells[cell] - count * SECOND_NS // self._rates[kind].per_s)

    def _slot(self, identity: str, now_ns: int) -> int:
        """The first cell of the identity's slot. Slots of identities with nothing used are reused."""
        cells = self._cells
        mark = xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass")) or 1
        home = mark % SLOTS * CELLS
        free = -1
        for step in range(PROBES):
            slot = (home + step * CELLS) % (SLOTS * CELLS)
            owner = cells[slot]
            if owner == mark:
                return slot
            if free < 0 and (not owner or max(cells[slot + 1], cells[slot + 2]) <= now_ns):
                free = slot
            if not owner:
                break
        if free < 0:
            free = home  # too many identities: one loses its count
        cells[free + 1] = cells[free + 2] = 0
        cells[free] = mark
        return free
