"""How much an identity may do: one bucket for each kind, shared by all its sessions."""

from __future__ import annotations

from typing import Final

from tailrace.common.limits import Limits
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.hub.errors import HubError
from tailrace.hub.policy import Policy

# What goes with a message type; heartbeat, disconnect, ping and commit are free.
RATE_KIND_BY_TYPE: Final = {
    "hub:send": "send",
    "hub:reply": "send",
    "hub:publish": "send",
    "hub:broadcast": "broadcast",
    "hub:register": "register",
    "hub:renew": "register",
    "hub:unregister": "register",
    "hub:subscribe": "register",
    "hub:unsubscribe": "register",
    "hub:discover": "read",
    "hub:list_actors": "read",
    "hub:mailbox_read": "read",
    "hub:presence": "read",
    "hub:metrics": "read",
    "hub:queue_stats": "read",
}

SEND_RATE_KINDS: Final = frozenset(("send", "bytes"))  # what one send is taken from


class RateLimiter:
    """Refuses what is too much, and says when it would not be."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self._rates = {
            "send": Rate(limits.hub_sends_per_s, 2 * limits.hub_sends_per_s),
            "bytes": Rate(limits.hub_bytes_per_s, limits.hub_bytes_per_s),
            "broadcast": Rate(limits.hub_broadcasts_per_s, 4 * limits.hub_broadcasts_per_s),
            "recipients": Rate(limits.hub_recipients_per_s, limits.hub_recipients_per_s),
            "register": Rate(limits.hub_registers_per_s, 2 * limits.hub_registers_per_s),
            "read": Rate(limits.hub_reads_per_s, 2 * limits.hub_reads_per_s),
        }
        self._buckets = TokenBuckets(self._rates)
        self.policy = policy

    def check(self, identity: str, message_type: str, size: int, now_ms: int) -> None:
        kind = RATE_KIND_BY_TYPE.get(message_type)
        if kind is None or (kind == "send" and self.may_send(identity, size, now_ms)):
            return
        self.take(identity, kind, 1, now_ms)
        if kind in ("send", "broadcast"):
            self.take(identity, "bytes", size, now_ms)

    def may_send(self, identity: str, size: int, now_ms: int) -> bool:
        """Takes what one send costs, in few steps. False if it is too much, or has to be looked at closer:
        then nothing was taken.
        """
        if self.policy.has_rules and not SEND_RATE_KINDS.isdisjoint(self.policy.rates(identity)):
            return False
        now_ns = now_ms * 1_000_000
        sends, sizes = self._buckets.pair(identity, "send", "bytes", now_ns)
        return sends.take_with(sizes, now_ns, size)

    def take(self, identity: str, kind: str, count: int, now_ms: int) -> None:
        own = self.policy.rates(identity).get(kind) if self.policy.has_rules else None
        rate = self._rates[kind] if own is None else Rate(max(1, int(own)), max(1, int(2 * own)))
        wait_ms = self._buckets.take(identity, kind, now_ms * 1_000_000, count, rate=rate)
        if wait_ms:
            unit = "bytes" if kind == "bytes" else f"{kind} messages"
            raise HubError(
                "rate_limited",
                f"more than {rate.per_s} {unit} per second",
                {"retryAfter": wait_ms, "kind": kind},
            )
