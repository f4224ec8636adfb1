"""The matcher of one collection: which subscriptions a change concerns, and what it is to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from tailrace import __version__
from tailrace.watch.change import Change
from tailrace.watch.index import Index
from tailrace.watch.predicate import SEMANTICS, Predicate
from tailrace.watch.values import CostError

S = TypeVar("S")

EventOp = Literal["insert", "update", "delete"]
# The part behind the plus sign changes only when the meaning of expressions does.
VERSION: Final = f"{__version__}+{hashlib.sha256(SEMANTICS.encode()).hexdigest()[:4]}"


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
        self._shared: dict[Predicate, _Shared[S]] = {}
        self._by_hash: dict[bytes, Predicate] = {}
        self.candidates = 0
        self.hits = 0
        self.fallbacks = 0  # evaluations by the library

    def __len__(self) -> int:
        return len(self._shared)

    def counts(self) -> tuple[int, int, int]:
        return self.candidates, self.hits, self.fallbacks

    def has_room(self, predicate: Predicate) -> bool:
        return predicate.hash in self._by_hash or self.index.has_room(predicate)

    def add(self, interest: Interest, subscriber: S) -> None:
        key = interest.whole.hash
        known = self._by_hash.get(key)
        if known is None:
            known = self._by_hash[key] = interest.whole
            self.index.add(known)
            self._shared[known] = _Shared(interest)
        self._shared[known].subscribers.add(subscriber)

    def discard(self, interest: Interest, subscriber: S) -> None:
        known = self._by_hash.get(interest.whole.hash)
        if known is None:
            return
        shared = self._shared[known]
        shared.subscribers.discard(subscriber)
        if not shared.subscribers:
            self.index.discard(known)
            del self._shared[known]
            del self._by_hash[known.hash]

    def _found(self, change: Change) -> set[Predicate]:
        found: set[Predicate] = set()
        before, after = change.before, change.after
        self.index.probe(before, found)
        if after is not before:
            self.index.probe(after, found)
        return found

    def candidates_of(self, change: Change) -> list[Interest]:
        """What the index finds, without deciding anything."""
        return [self._shared[predicate].interest for predicate in self._found(change)]

    def matches(self, change: Change, too_costly: set[S]) -> Iterator[Match[S]]:
        """Every match; those whose predicate took too many steps are added to `too_costly`."""
        found, after = self._found(change), change.after
        if after is not None:
            self.index.sample.add(after)
        self.candidates += len(found)
        shared_by = self._shared
        for predicate in found:
            shared = shared_by[predicate]
            self.fallbacks += predicate.fallback
            try:
                event = shared.interest.event(change)
            except CostError:
                too_costly |= shared.subscribers
                continue
            if event is not None:
                self.hits += 1
                yield Match(shared.subscribers, *event)
