"""Whether a new connection is accepted; if not, when to try again, and in which form that is said.

A browser cannot read the status or the headers of an upgrade that failed. So a connection over the rate is
upgraded, sent `hub:rate_limited` and closed. That costs more than an HTTP answer, therefore it has rates of
its own: beyond them the answer is 429.
"""

from __future__ import annotations

import ipaddress
import random
from typing import Final

import msgspec

from tailrace.api.proxies import network_of
from tailrace.common.limits import Limits
from tailrace.common.token_bucket import Rate, TokenBuckets

ALL_ADDRESSES: Final = ""  # the key of what all addresses share
PER_ADDRESS_PER_S: Final = 20
PER_ADDRESS_BURST: Final = 100
# Connections that are upgraded to be refused: of one address, and of all. Each is open for 2 s at most.
REFUSED_PER_ADDRESS: Final = 20
REFUSED_BURST: Final = 100
# Clients that were refused together do not come back together.
RETRY_MS: Final = 1000
FULL_RETRY_MS: Final = 5000


class ConnectionRefusal(msgspec.Struct, frozen=True):
    message: str
    reason: str
    retry_after_ms: int
    over_socket: bool  # the refusal is sent over the WebSocket; else it is the answer to the upgrade


class ConnectionAdmission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        per_s = max(1, limits.hub_connects_per_s)
        self._buckets = TokenBuckets(
            {
                "address": Rate(PER_ADDRESS_PER_S, PER_ADDRESS_BURST),
                "server": Rate(per_s, per_s),
                "refused_address": Rate(REFUSED_PER_ADDRESS, REFUSED_PER_ADDRESS),
                "refused": Rate(REFUSED_BURST, REFUSED_BURST),
            }
        )

    def decide(self, address: str, connections: int, now_ns: int) -> ConnectionRefusal | None:
        """None if the connection is accepted. `connections` are open already."""
        limits = self._limits
        network = None if _is_loopback(address) else network_of(address)
        if connections >= limits.hub_connections:
            message = f"there are {limits.hub_connections} connections already"
            return self._refusal(message, "connections", network, FULL_RETRY_MS, now_ns)
        if not limits.hub_connects_per_s:
            return None
        # The address first: one that floods must not use up what all share.
        if network is not None and (wait_ms := self._buckets.take(network, "address", now_ns)):
            message = f"more than {PER_ADDRESS_PER_S} new connections per second from one address"
            return self._refusal(message, "address", network, wait_ms, now_ns)
        wait_ms = self._buckets.take(ALL_ADDRESSES, "server", now_ns)
        if not wait_ms:
            return None
        if network is not None:
            self._buckets.give_back(network, "address")
        message = f"more than {limits.hub_connects_per_s} new connections per second"
        return self._refusal(message, "server", network, wait_ms, now_ns)

    def _refusal(
        self, message: str, reason: str, network: str | None, wait_ms: int, now_ns: int
    ) -> ConnectionRefusal:
        buckets = self._buckets
        has_used_up = network is not None and buckets.take(network, "refused_address", now_ns) > 0
        over_socket = not has_used_up and not buckets.take(ALL_ADDRESSES, "refused", now_ns)
        spread_ms = random.randint(0, RETRY_MS)  # noqa: S311 - spreads load
        return ConnectionRefusal(message, reason, max(RETRY_MS, wait_ms) + spread_ms, over_socket)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
