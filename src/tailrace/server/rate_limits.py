"""Rate limits by identity: requests and body bytes, counted in one process or shared between workers.

How much one identity may ask: requests, and bytes in their bodies. Unless that is set, anything.

Rates of identities that hold for all workers together: what was taken is in memory that they share.

A slot of an identity says up to which moment it has used up what it may have; taking moves that moment on,
and time catches up with it. There is no lock: two workers that take for the same identity at the very same
moment may count one for both. So the bound holds to within a few per cent of a very busy identity, and nobody
ever waits for another worker.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import xxhash

from tailrace.auth import Identity
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.http.exchange import Exchange
from tailrace.http.relay import ALONE_HEADER
from tailrace.http.server import HttpServer
from tailrace.routing.client_address import ClientResolver, client_network

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
        if identity.credential.startswith("grant "):
            return False
        return ALONE_HEADER not in exchange.headers or exchange.connection.server is not self.inside

    def _name(self, identity: Identity, exchange: Exchange) -> str:
        """Whoever has no name is known by the token, and whoever has no token by the address."""
        if identity.public:
            return "peer " + client_network(self._vouching.address_of(exchange))
        return f"sub {identity.sub}" if identity.sub else f"token {identity.token_id}"


KINDS: Final = ("ops", "bytes")
SLOTS: Final = 65_536
CELLS: Final = 1 + len(KINDS)  # of a slot: whose it is, and a moment for each kind
CELL_BYTES: Final = 8
TRIES: Final = 32  # slots that an identity may have, one after the other
SECOND_NS: Final = 1_000_000_000
MILLI_NS: Final = 1_000_000


class SharedTokenBuckets:
    """As `Buckets`, for the workers that open the same file. It is never made smaller while one has it."""

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
        """0 if so many were taken, else the milliseconds after which they could be.

        What is more than is given at once needs a rest before, and is paid for by one afterwards.
        """
        rate = self._rates[kind]
        full_ns = rate.burst * SECOND_NS // rate.per_s
        wanted_ns = count * SECOND_NS // rate.per_s
        cell = self._slot(identity, now_ns) + 1 + KINDS.index(kind)
        used_ns = max(self._cells[cell], now_ns)
        over_ns = used_ns - now_ns + min(wanted_ns, full_ns) - full_ns
        if over_ns > 0:
            return -(-over_ns // MILLI_NS)
        self._cells[cell] = used_ns + wanted_ns
        return 0

    def give_back(self, identity: str, kind: str, count: int = 1) -> None:
        """What was taken for something that was refused for another reason, or is counted elsewhere."""
        cell = self._slot(identity, 0) + 1 + KINDS.index(kind)
        self._cells[cell] = max(0, self._cells[cell] - count * SECOND_NS // self._rates[kind].per_s)

    def _slot(self, identity: str, now_ns: int) -> int:
        """The first cell of the identity's slot. One that has all its rights back may lose its slot."""
        cells = self._cells
        mark = xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass")) or 1
        home = mark % SLOTS * CELLS
        free = -1
        for step in range(TRIES):
            slot = (home + step * CELLS) % (SLOTS * CELLS)
            owner = cells[slot]
            if owner == mark:
                return slot
            if free < 0 and (not owner or max(cells[slot + 1], cells[slot + 2]) <= now_ns):
                free = slot
            if not owner:
                break
        if free < 0:
            free = home  # there are that many at once: what one of them has used up is forgotten
        cells[free + 1] = cells[free + 2] = 0
        cells[free] = mark
        return free
