"""The client behind a request that came through an edge or a proxy, where their word can be believed."""

from __future__ import annotations

from typing import Final

from tailrace.auth import EdgeSignature, ForwardedClient
from tailrace.auth.edge_signature import EDGE_HEADER
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.http.exchange import Exchange
from tailrace.routing.proxies import TrustedProxies

NO_PROXIES: Final = TrustedProxies("")


class ClientResolver:
    """Believes edges that have the key, proxies that are trusted, and nobody else."""

    def __init__(self, key: str, clock: Clock = SYSTEM_CLOCK, proxies: TrustedProxies = NO_PROXIES) -> None:
        self._mark = EdgeSignature(key) if key else None
        self.proxies = proxies
        self._clock = clock

    def client_of(self, exchange: Exchange) -> ForwardedClient | None:
        """Looked at only when somebody wants to know: most requests are never asked about."""
        value = exchange.headers.get(EDGE_HEADER)
        if self._mark is None or value is None:
            return None
        target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
        return self._mark.read(value, exchange.method, target, self._clock.now_ns() / 1e9)

    def address_of(self, exchange: Exchange) -> str:
        """Of the client, without its port."""
        vouched = self.client_of(exchange)
        return self.proxies.address_of(exchange) if vouched is None else vouched.ip
