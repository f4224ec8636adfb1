"""The matcher of one collection: which subscriptions a change concerns, and what it is to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from tailrace.watch.change import Change
from tailrace.watch.index import Index
from tailrace.watch.predicate import Predicate
from tailrace.watch.values import CostError

S = TypeVar("S")

EventOp = Literal["insert", "update", "delete"]


class Interest:
    """What somebody watches: a predicate with the read rule worked in, and both of them apart."""

    __slots__ = ("rule", "whole")

    def __init__(self, whole: Predicate, rule: Predicate | None) -> None:
        self.whole = whole
        self.rule = rule  # None: everybody with the scope may read

    def event(self, change: Change) -> tuple[EventOp, str] | None:
        """What the change is to whoever watches this; raises CostError if it cannot be afforded."""
        before, after = change.before, change.after
        was = before is not None and self.whole.matches(before)
        now = after is not None and self.whole.matches(after)
        if now:
            if was:
                return ("update", "changed")
            if before is None:
                return ("insert", "created")
            return ("insert", "entered" if self._readable(before) else "visible")
        if was:
            if after is None:
                return ("delete", "deleted")
            return ("delete", "left" if self._readable(after) else "hidden")
        return None

    def _readable(self, document: dict[str, Any]) -> bool:
        return self.rule is None or self.rule.matches(document)


class Match(NamedTuple, Generic[S]):
    subscribers: set[S]
    op: EventOp
    reason: str


class _Shared(Generic[S]):
    __slots__ = ("interest", "subscribers")

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.subscribers: set[S] = set()


class Matcher(Generic[S]):
    """Equal predicates are decided once, whoever asked for them."""

    def __init__(self, scan_max: int) -> None:
        self.index = Index(scan_max)
        self._shared: dict[bytes, _Shared[S]] = {}
        self.candidates = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._shared)

    def add(self, interest: Interest, subscriber: S) -> None:
        key = interest.whole.hash
        shared = self._shared.get(key)
        if shared is None:
            self.index.add(interest.whole)
            shared = self._shared[key] = _Shared(interest)
        shared.subscribers.add(subscriber)

    def discard(self, interest: Interest, subscriber: S) -> None:
        shared = self._shared.get(interest.whole.hash)
        if shared is None:
            return
        shared.subscribers.discard(subscriber)
        if not shared.subscribers:
            self.index.discard(shared.interest.whole)
            del self._shared[interest.whole.hash]

    def matches(self, change: Change, too_costly: set[S]) -> Iterator[Match[S]]:
        """Every match; those whose predicate took too many steps are added to `too_costly`."""
        found: set[Predicate] = set()
        before, after = change.before, change.after
        self.index.probe(before, found)
        self.index.probe(after, found)
        if after is not None:
            self.index.sample.add(after)
        self.candidates += len(found)
        for predicate in found:
            shared = self._shared[predicate.hash]
            try:
                event = shared.interest.event(change)
            except CostError:
                too_costly |= shared.subscribers
                continue
            if event is not None:
                self.hits += 1
                yield Match(shared.subscribers, *event)
