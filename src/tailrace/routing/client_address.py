"""The client behind trusted proxies and edges: address, forwarded host, and the identity an edge vouches for.

What proxies say of the clients behind them, believed of those alone that the operator has named.

The client behind a request that came through an edge or a proxy, where their word can be believed.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

from tailrace.auth import EdgeSignature, ForwardedClient
from tailrace.auth.edge_signature import EDGE_HEADER
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.settings import parse_networks
from tailrace.http.exchange import Exchange

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_ADDRESSES_KEPT: Final = 1024


class TrustedProxies:
    """The setting `trusted_proxies`. Headers are looked at only when somebody wants to know."""

    def __init__(self, trusted: str) -> None:
        self._networks = parse_networks(trusted)

    def address_of(self, exchange: Exchange) -> str:
        """Of the client, without its port: the last one in X-Forwarded-For that is no proxy of ours."""
        peer = exchange.peer.rpartition(":")[0]
        if not self._networks or not self._trusts(peer):
            return peer
        found = peer
        for text in reversed(_forwarded_value(exchange, b"x-forwarded-for")):
            address = _parse_address(text)
            if address is None:
                break
            found = str(address)
            if not self._trusts(found):
                break
        return found

    def remote_of(self, exchange: Exchange) -> str:
        """The client as it is written down: with its port, unless a proxy stands between."""
        client = self.address_of(exchange)
        return exchange.peer if exchange.peer.startswith(client + ":") else client

    def base_of(self, exchange: Exchange) -> tuple[str, str]:
        """Scheme and host by which the client reached us, or the proxy that it reached instead."""
        scheme = exchange.scheme.decode()
        host = exchange.headers.get(b"host", b"localhost").decode("latin-1")
        if self._networks and self._trusts(exchange.peer.rpartition(":")[0]):
            # Of several the last one: what comes before it was said to the proxy, by anybody.
            schemes, hosts = (
                _forwarded_value(exchange, b"x-forwarded-proto"),
                _forwarded_value(exchange, b"x-forwarded-host"),
            )
            if schemes and schemes[-1] in ("http", "https"):
                scheme = schemes[-1]
            if hosts and _HOST.fullmatch(hosts[-1]):
                host = hosts[-1]
        return scheme, host

    def _trusts(self, text: str) -> bool:
        address = _parse_address(text)
        return address is not None and any(address in network for network in self._networks)


@lru_cache(16)
def load_trusted_proxies(trusted: str) -> TrustedProxies:
    return TrustedProxies(trusted)


def client_network(address: str) -> str:
    """By which a client without a name is counted: of IPv6 everybody has as many addresses as they like."""
    parsed = _parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address if parsed is None else str(parsed)


def _forwarded_value(exchange: Exchange, name: bytes) -> list[str]:
    given = exchange.headers.get(name, b"").decode("latin-1")
    return [one.strip() for one in given.split(",")] if given else []


@lru_cache(_ADDRESSES_KEPT)
def _parse_address(text: str) -> Address | None:
    """Without the port that some proxies add; IPv4 also if it comes in the clothes of IPv6."""
    bare = text.strip("[]").partition("%")[0]
    if text.startswith("["):
        bare = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        bare = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


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
        return self._mark.verify(value, exchange.method, target, self._clock.now_ns() / 1e9)

    def address_of(self, exchange: Exchange) -> str:
        """Of the client, without its port."""
        vouched = self.client_of(exchange)
        return self.proxies.address_of(exchange) if vouched is None else vouched.ip
