"""Subscriptions: of a session, or of an actor that may be away."""

from __future__ import annotations

import msgspec

from tailrace.hub.addresses import TopicFilter
from tailrace.hub.session import Session


class TopicSubscription(msgspec.Struct, eq=False):
    """Ends with its session, unless it is durable: then it is its owner's, and waits for it."""

    id: str
    owner: str  # path of the address that copies go to
    filter: TopicFilter
    name: str | None = None
    group: str | None = None
    durable: bool = False
    session: Session | None = None  # None while the owner of a durable one is away
    logged_ms: int = 0  # when a durable one was last written down, as far as this process knows

    @property
    def key(self) -> str:
        """What makes a durable one the same again."""
        return self.name or self.filter.text


class SubscriptionRecord(msgspec.Struct, rename="camel"):
    """What the log keeps of a durable one."""

    owner: str
    topic: str
    subscription_id: str
    name: str | None = None
    group: str | None = None


class SubscriberGroup:
    """Members that share the work; each message goes to one of them."""

    __slots__ = ("members", "turn")

    def __init__(self) -> None:
        self.members: list[TopicSubscription] = []
        self.turn = 0

    def choose(self) -> TopicSubscription | None:
        """The one with the fewest unsent messages, then in turn."""
        living = [one for one in self.members if one.session is not None and one.session.alive]
        if not living:
            return None
        self.turn += 1
        start = self.turn % len(living)
        order = living[start:] + living[:start]
        return min(order, key=_member_load)


def _member_load(member: TopicSubscription) -> int:
    session = member.session
    return 0 if session is None else session.outbox.messages + len(session.waiting or ())
