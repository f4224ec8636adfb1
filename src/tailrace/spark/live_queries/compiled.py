"""Subscriptions as matchers. Nothing here needs Spark, a server or a store."""

from __future__ import annotations

from typing import Final

import msgspec

from tailrace.watch.document import Change
from tailrace.watch.external_matching import DeliveredMatch, SubscriptionSummary, interest_from_summary
from tailrace.watch.matcher import Matcher

SCAN_MAX: Final = 1 << 30  # the gateway has refused what is too much for it


class MatcherMismatchError(RuntimeError):
    """The subscriptions mean something else here than on the server: the versions differ."""


class SubscriptionSet(msgspec.Struct, frozen=True):
    """Subscriptions by key: `<connection>/<subscription>`."""

    subs: dict[str, SubscriptionSummary]
    v: int = 1

    def encode(self) -> bytes:
        """The same for the same subscriptions, wherever they have got to meanwhile."""
        settled = {
            key: msgspec.structs.replace(self.subs[key], position=[], expires=0) for key in sorted(self.subs)
        }
        return msgspec.json.encode(SubscriptionSet(settled))


def decode_subscription_set(data: bytes) -> SubscriptionSet:
    return msgspec.json.decode(data, type=SubscriptionSet)


class CompiledSubscriptions:
    """A set as matchers, one for each collection."""

    def __init__(self, subscriptions: SubscriptionSet, *, strict: bool = True) -> None:
        self.subscriptions = subscriptions
        self.matchers: dict[str, Matcher[str]] = {}
        for key, summary in subscriptions.subs.items():
            interest = interest_from_summary(summary)
            if strict and interest.whole.hash.hex() != summary.predicateHash:
                raise MatcherMismatchError(
                    "a subscription means something else here than on the server; "
                    "driver, executors and server need the same version of this package"
                )
            matcher = self.matchers.get(summary.collection)
            if matcher is None:
                matcher = self.matchers[summary.collection] = Matcher(SCAN_MAX)
            matcher.add(interest, key)

    def close(self) -> None:
        """Nothing to let go of."""


def match_change(matcher: Matcher[str] | None, change: Change) -> list[DeliveredMatch]:
    """What a change is to whom, in the order of their keys."""
    if matcher is None:
        return []
    found = matcher.found(change)
    told = [
        DeliveredMatch(key, op, reason) for subscribers, op, reason in found.matches for key in subscribers
    ]
    told += [DeliveredMatch(key, "resync", "cost-exceeded") for key in found.too_costly]
    return sorted(told, key=lambda one: one.key)
