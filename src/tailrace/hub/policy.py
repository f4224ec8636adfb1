"""What an actor may do (policy rules, token claims) and how often (rate limits)."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.hub.addresses import AddressPattern, TopicFilter, is_own_path
from tailrace.hub.errors import HubError

ABILITIES: Final = frozenset(
    ("send", "broadcast", "subscribe", "publish", "register", "discover", "mailbox", "presence")
)


class AllowDeny(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    allow: list[str] | None = None
    deny: list[str] = []


class ActorRule(msgspec.Struct, forbid_unknown_fields=True):
    """Rights of matching identities. An empty list means none; a missing one all, except for `register`."""

    match: str
    send: AllowDeny = AllowDeny()
    register: list[str] | None = None
    broadcast: bool | None = None
    publish: bool | None = None
    subscribe: bool | None = None
    discover: bool | None = None
    presence: bool | None = None
    rates: dict[str, float] = {}


class TopicRule(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    topic: str
    publishers: list[str] | None = None
    subscribers: list[str] | None = None
    public_read: bool = False
    public_write: bool = False


class PolicyRules(msgspec.Struct, forbid_unknown_fields=True):
    actors: list[ActorRule] = []
    topics: list[TopicRule] = []


class HubClaims(msgspec.Struct):
    """The token claims that the hub uses."""

    capabilities: list[str] | None = None
    addresses: list[str] | None = None
    jti: str = ""
    iat: float | None = None


NO_CLAIMS: Final = HubClaims()


def read_claims(identity: Identity) -> HubClaims:
    """A malformed claim makes the token invalid here, never stronger."""
    if identity.anonymous:
        return NO_CLAIMS
    try:
        return msgspec.json.decode(identity.claims, type=HubClaims)
    except msgspec.DecodeError:
        reason = "a claim of the token is malformed"
        raise HubError("unauthorized", reason, {"action": "connect", "reason": reason}) from None


class Policy:
    """One server's rules."""

    def __init__(self, rules: PolicyRules | None = None, *, topics_open: bool = True) -> None:
        found = rules or PolicyRules()
        self._topics_open = topics_open
        self._actors = [(AddressPattern(rule.match), rule) for rule in found.actors]
        self._topics = [(TopicFilter(rule.topic), rule) for rule in found.topics]
        self.has_rules = bool(self._actors)
        self._patterns: dict[str, AddressPattern] = {}
        for rule in found.actors:
            self._learn(rule.send.allow, rule.send.deny, rule.register)
        for topic in found.topics:
            self._learn(topic.publishers, topic.subscribers)

    def _learn(self, *lists: Sequence[str] | None) -> None:
        for listed in lists:
            for text in listed or ():
                self._patterns[text] = AddressPattern(text)

    def _any(self, listed: Sequence[str], path: str) -> bool:
        return any((self._patterns.get(text) or AddressPattern(text)).matches(path) for text in listed)

    def _rule(self, path: str) -> ActorRule | None:
        """The first matching rule."""
        for pattern, rule in self._actors:
            if pattern.matches(path):
                return rule
        return None

    def rates(self, path: str) -> dict[str, float]:
        rule = self._rule(path)
        return {} if rule is None else rule.rates

    def may_send(self, actor: Principal, target: str) -> bool:
        if not actor.has("send"):
            return False
        rule = self._rule(actor.path)
        if rule is None:
            return True
        if self._any(rule.send.deny, target):
            return False
        return rule.send.allow is None or self._any(rule.send.allow, target)

    def may_register(self, actor: Principal, path: str) -> bool:
        """Also the right to take over an address, and to its mailbox."""
        if actor.open:
            return True
        if not actor.has("register"):
            return False
        if actor.addresses is not None and not self._any(actor.addresses, path):
            return False
        rule = self._rule(actor.path)
        if rule is not None and rule.register is not None:
            return self._any(rule.register, path)
        # A rule without `register` is as no rule: the own address and those below.
        return actor.addresses is not None or is_own_path(actor.path, path)

    def may(self, actor: Principal, action: str) -> bool:
        """Actions without an object: broadcast, discover, presence, publish and subscribe as such."""
        if action == "broadcast" and not actor.open:
            # Only if a rule or the token allows it.
            rule = self._rule(actor.path)
            if rule is not None and rule.broadcast is not None:
                return rule.broadcast and actor.has("broadcast")
            return actor.named is not None and "broadcast" in actor.named
        if not actor.has(action):
            return False
        rule = self._rule(actor.path)
        said = None if rule is None else getattr(rule, action, None)
        return said is not False

    def may_topic(self, actor: Principal, action: str, topic: str) -> bool:
        """`action` is publish or subscribe. A topic without a rule is open, unless that is set otherwise."""
        if not self.may(actor, action):
            return False
        for pattern, rule in self._topics:
            if pattern.matches(topic):
                if rule.public_write if action == "publish" else rule.public_read:
                    return True
                listed = rule.publishers if action == "publish" else rule.subscribers
                return listed is None or self._any(listed, actor.path)
        return self._topics_open or actor.open

    def is_open(self, topic: str) -> bool:
        """Whether no rule restricts a topic: every subscriber may receive it."""
        return (
            self._topics_open
            and not self.has_rules
            and not any(pattern.matches(topic) for pattern, _ in self._topics)
        )

    def may_filter(self, actor: Principal, topic_filter: str) -> bool:
        """A filter with wildcards is checked again for each topic it matches."""
        if "+" in topic_filter or "#" in topic_filter:
            return self.may(actor, "subscribe")
        return self.may_topic(actor, "subscribe", topic_filter)


class Principal(msgspec.Struct, frozen=True):
    """The identity that policy rules apply to."""

    path: str
    open: bool = False  # no authentication on this server: everything is allowed
    admin: bool = False
    named: frozenset[str] | None = None  # abilities named by the token; None: all that the rules allow
    addresses: tuple[str, ...] | None = None

    def has(self, ability: str) -> bool:
        return self.open or self.named is None or ability in self.named


def principal_from_identity(identity: Identity, path: str) -> Principal:
    if identity.anonymous:
        return Principal(path, open=True, admin=True)
    claims = read_claims(identity)
    named = None if claims.capabilities is None else frozenset(claims.capabilities) & ABILITIES
    addresses = None if claims.addresses is None else tuple(claims.addresses)
    return Principal(path, admin="manage" in identity.scopes, named=named, addresses=addresses)


def load_policy(path: str, *, topics_open: bool) -> Policy:
    """The rules of a file, TOML or JSON."""
    if not path:
        return Policy(topics_open=topics_open)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            rules = msgspec.json.decode(text, type=PolicyRules)
        else:
            rules = msgspec.convert(tomllib.loads(text), PolicyRules)
        return Policy(rules, topics_open=topics_open)
    except (OSError, ValueError, HubError) as error:
        raise TailraceError("invalid_request", f"hub policy {path}: {error}") from None


# Rate kinds by message type; heartbeat, disconnect, ping and commit are free.
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

SEND_RATE_KINDS: Final = frozenset(("send", "bytes"))  # the buckets of a send


class RateLimiter:
    """Token buckets per identity; an error has the time to wait."""

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
        self.consume(identity, kind, 1, now_ms)
        if kind in ("send", "broadcast"):
            self.consume(identity, "bytes", size, now_ms)

    def may_send(self, identity: str, size: int, now_ms: int) -> bool:
        """Consumes the tokens of one send. False, with nothing consumed, if there are too few or the identity
        has rates of its own.
        """
        if self.policy.has_rules and not SEND_RATE_KINDS.isdisjoint(self.policy.rates(identity)):
            return False
        now_ns = now_ms * 1_000_000
        sends, sizes = self._buckets.pair(identity, "send", "bytes", now_ns)
        return sends.take_with(sizes, now_ns, size)

    def consume(self, identity: str, kind: str, count: int, now_ms: int) -> None:
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
