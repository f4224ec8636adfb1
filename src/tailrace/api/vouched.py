"""The client behind a request that came through an edge, where the edge's word can be checked."""

from __future__ import annotations

from tailrace.auth import EdgeMark, Vouched
from tailrace.auth.edge_mark import HEADER
from tailrace.clock import SYSTEM_CLOCK, Clock
from tailrace.net.http1 import Exchange


class Vouching:
    """Believes edges that have the key, and nobody else. Without a key it believes nobody."""

    def __init__(self, key: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._mark = EdgeMark(key) if key else None
        self._clock = clock

    def client_of(self, exchange: Exchange) -> Vouched | None:
        """Looked at only when somebody wants to know: most requests are never asked about."""
        value = exchange.headers.get(HEADER)
        if self._mark is None or value is None:
            return None
        target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
        return self._mark.read(value, exchange.method, target, self._clock.now_ns() / 1e9)

    def address_of(self, exchange: Exchange) -> str:
        """Of the client, without its port."""
        vouched = self.client_of(exchange)
        return exchange.peer.rpartition(":")[0] if vouched is None else vouched.ip
