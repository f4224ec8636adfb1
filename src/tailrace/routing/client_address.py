"""The client behind trusted proxies and edges: its address, the forwarded host, and its identity at an edge.

Forwarding headers are used only if they come from a configured proxy or carry a valid edge signature.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

from tailrace.auth import EdgeSignature, ForwardedClient
from tailrace.auth.edge_signature import EDGE_HEADER
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.settings import Settings, parse_networks
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import LogFields

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_CACHED_ADDRESSES_MAX: Final = 1024


class TrustedProxies:
    """The setting `trusted_proxies`. Headers are parsed only on demand."""

    def __init__(self, trusted: str) -> None:
        self._networks = parse_networks(trusted)

    def address_of(self, exchange: Exchange) -> str:
        """The client's address without port: the last one in X-Forwarded-For that is not a trusted proxy."""
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
        """The client's address for logs: with its port, unless it came through a proxy."""
        client = self.address_of(exchange)
        return exchange.peer if exchange.peer.startswith(client + ":") else client

    def base_of(self, exchange: Exchange) -> tuple[str, str]:
        """Scheme and host by which the client reached the server or its proxy."""
        scheme = exchange.scheme.decode()
        host = exchange.headers.get(b"host", b"localhost").decode("latin-1")
        if self._networks and self._trusts(exchange.peer.rpartition(":")[0]):
            # The last of several: earlier ones may come from the client.
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
    """The network by which anonymous clients are counted: an IPv6 client has a whole /64."""
    parsed = _parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address if parsed is None else str(parsed)


def _forwarded_value(exchange: Exchange, name: bytes) -> list[str]:
    value = exchange.headers.get(name, b"").decode("latin-1")
    return [one.strip() for one in value.split(",")] if value else []


@lru_cache(_CACHED_ADDRESSES_MAX)
def _parse_address(text: str) -> Address | None:
    """Parse an address with or without port; IPv4-mapped IPv6 becomes IPv4."""
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
    """Resolves clients from edge signatures and trusted proxies."""

    def __init__(self, key: str, clock: Clock = SYSTEM_CLOCK, proxies: TrustedProxies = NO_PROXIES) -> None:
        self._signature = EdgeSignature(key) if key else None
        self.proxies = proxies
        self._clock = clock

    @classmethod
    def from_settings(cls, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> ClientResolver:
        return cls(settings.edge_signing_key, clock, load_trusted_proxies(settings.trusted_proxies))

    def client_of(self, exchange: Exchange) -> ForwardedClient | None:
        """The client that an edge forwarded for, verified on demand; None if there is none."""
        value = exchange.headers.get(EDGE_HEADER)
        if self._signature is None or value is None:
            return None
        target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
        return self._signature.verify(value, exchange.method, target, self._clock.now_ns() / 1e9)

    def log_fields(self, exchange: Exchange) -> LogFields:
        """The fields of the request log about a client behind an edge or a proxy."""
        forwarded = self.client_of(exchange)
        if forwarded is not None:
            return {"client": forwarded.ip, "sub": forwarded.sub, "edge": forwarded.edge_id}
        client = self.proxies.remote_of(exchange)
        return {} if client == exchange.peer else {"client": client}

    def address_of(self, exchange: Exchange) -> str:
        """The client's address without port."""
        forwarded = self.client_of(exchange)
        return self.proxies.address_of(exchange) if forwarded is None else forwarded.ip
