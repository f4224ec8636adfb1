"""The matcher of one collection: which subscriptions a change concerns, and what it is to them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from tailrace import __version__
from tailrace.watch.batch import NO_ROW, Rows, has_arrays
from tailrace.watch.change import Change
from tailrace.watch.index import Index
from tailrace.watch.predicate import SEMANTICS, Condition, Predicate
from tailrace.watch.values import CostError

S = TypeVar("S")

EventOp = Literal["insert", "update", "delete"]
FEW_MAX: Final = 8  # subscribers of one predicate that are kept in a tuple
SURE: Final = -2  # instead of a row: what the index finds is all there is to decide
BATCH_MIN: Final = 32  # changes that are worth an array
TEXTS_SPARE: Final = 10_000
# The part behind the plus sign changes only when the meaning of expressions does.
VERSION: Final = f"{__version__}+{hashlib.sha256(SEMANTICS.encode()).hexdigest()[:4]}"


class Interest:
    """What somebody watches: a predicate with the read rule worked in, and both of them apart."""

    __slots__ = ("rule", "whole")

    def __init__(self, whole: Predicate, rule: Predicate | None) -> None:
        self.whole = whole
        self.rule = rule  # None: everybody with the scope may read

    def event(
        self, change: Change, was: bool | None = None, now: bool | None = None
    ) -> tuple[EventOp, str] | None:
        """What the change is to whoever watches this; raises CostError if it cannot be afforded.

        Whether the images match may be known already.
        """
        before, after = change.before, change.after
        if was is None:
            was = before is not None and self.whole.matches(before)
        if now is None:
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
    subscribers: Collection[S]
    op: EventOp
    reason: str


class Found(NamedTuple, Generic[S]):
    """Whom a change concerns, and those whose predicate took too many steps to tell."""

    matches: list[Match[S]]
    too_costly: set[S]


class Shared(Generic[S]):
    """A predicate and all who watch it: one, most of the time."""

    __slots__ = ("interest", "row", "subscribers")

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.subscribers: tuple[S, ...] | set[S] = ()
        self.row: int | None = None  # where it is decided together with others; None: not asked yet

    @property
    def branches(self) -> Sequence[tuple[Condition, ...]]:
        return self.interest.whole.branches

    def add(self, subscriber: S) -> None:
        known = self.subscribers
        if isinstance(known, set):
            known.add(subscriber)
        elif subscriber not in known:
            self.subscribers = (*known, subscriber) if len(known) < FEW_MAX else {*known, subscriber}

    def discard(self, subscriber: S) -> None:
        known = self.subscribers
        if isinstance(known, set):
            known.discard(subscriber)
        else:
            self.subscribers = tuple(one for one in known if one != subscriber)


class Matcher(Generic[S]):
    """Equal predicates are decided once, whoever asked for them."""

    def __init__(self, scan_max: int) -> None:
        self.index: Index[Shared[S]] = Index(scan_max)
        self._by_hash: dict[bytes, Shared[S]] = {}
        self._rows: Rows | None = None
        self.candidates = 0
        self.hits = 0
        self.fallbacks = 0  # evaluations by the library

    def __len__(self) -> int:
        return len(self._by_hash)

    def counts(self) -> tuple[int, int, int]:
        return self.candidates, self.hits, self.fallbacks

    def has_room(self, predicate: Predicate) -> bool:
        return predicate.hash in self._by_hash or self.index.has_room(predicate)

    def add(self, interest: Interest, subscriber: S) -> None:
        key = interest.whole.hash
        shared = self._by_hash.get(key)
        if shared is None:
            shared = self._by_hash[key] = Shared(interest)
            self.index.add(shared)
        shared.add(subscriber)

    def discard(self, interest: Interest, subscriber: S) -> None:
        key = interest.whole.hash
        shared = self._by_hash.get(key)
        if shared is None:
            return
        shared.discard(subscriber)
        if not shared.subscribers:
            self.index.discard(shared)
            del self._by_hash[key]
            if self._rows is not None and shared.row is not None:
                self._rows.discard(shared.row)

    def _probed(self, change: Change) -> tuple[set[Shared[S]], set[Shared[S]]]:
        """What may match the document before the change, and what the one after it."""
        was: set[Shared[S]] = set()
        now: set[Shared[S]] = set()
        self.index.probe_both(change.before, change.after, was, now)
        return was, now

    def candidates_of(self, change: Change) -> list[Interest]:
        """What the index finds, without deciding anything."""
        was, now = self._probed(change)
        return [shared.interest for shared in was | now]

    def matches(self, change: Change, too_costly: set[S]) -> Iterator[Match[S]]:
        """Every match; those whose predicate took too many steps are added to `too_costly`."""
        was, now = self._probed(change)
        candidates = was | now
        self._seen(change, len(candidates))
        for shared in candidates:
            found = self._decided(shared, change, shared in was, shared in now, too_costly)
            if found is not None:
                yield found

    def _seen(self, change: Change, candidates: int) -> None:
        self.candidates += candidates
        if change.after is not None:
            self.index.sample.add(change.after)

    def _decided(
        self, shared: Shared[S], change: Change, before: bool, after: bool, too_costly: set[S]
    ) -> Match[S] | None:
        interest = shared.interest
        self.fallbacks += interest.whole.fallback
        # What the index does not find does not match; what it finds does, if that is all there is to it.
        sure = True if interest.whole.is_found else None
        try:
            event = interest.event(change, sure if before else False, sure if after else False)
        except CostError:
            too_costly.update(shared.subscribers)
            return None
        if event is None:
            return None
        self.hits += 1
        return Match(shared.subscribers, *event)

    # -- many at once ----------------------------------------------------------------------------------

    def matches_of(self, changes: Sequence[Change]) -> list[Found[S]]:
        """As `matches`, for several changes: most of it is decided in arrays, where there are any."""
        if len(changes) <= BATCH_MIN or not has_arrays():
            return [self.found(change) for change in changes]
        if self._rows is None or self._rows.texts > 2 * len(self._by_hash) + TEXTS_SPARE:
            # Anew: texts that nobody compares with any more are forgotten.
            self._rows = Rows()
            for shared in self._by_hash.values():
                shared.row = None
        return self._together(self._rows, changes)

    def found(self, change: Change) -> Found[S]:
        """All of it at once."""
        too_costly: set[S] = set()
        return Found(list(self.matches(change, too_costly)), too_costly)

    def _together(self, rows: Rows, changes: Sequence[Change]) -> list[Found[S]]:
        documents: list[dict[str, Any]] = []  # two for each change
        asked: list[Shared[S]] = []  # those with a row
        asked_rows: list[int] = []
        asked_on: list[int] = []  # the document to decide it on
        hits: list[set[Shared[S]]] = []  # of each document
        apart: list[dict[Shared[S], tuple[bool, bool]]] = []  # those that have no row
        for change in changes:
            was, now = self._probed(change)
            alone: dict[Shared[S], tuple[bool, bool]] = {}
            for image, candidates in ((change.before, was), (change.after, now)):
                found: set[Shared[S]] = set()
                for shared in candidates:
                    row = shared.row if shared.row is not None else _given_row(rows, shared)
                    if row == SURE:
                        found.add(shared)
                    elif row == NO_ROW:
                        alone[shared] = (shared in was, shared in now)
                    else:
                        asked.append(shared)
                        asked_rows.append(row)
                        asked_on.append(len(documents))
                documents.append({} if image is None else image)
                hits.append(found)
            apart.append(alone)
            self._seen(change, len(was | now))
        for place in rows.holding(documents, asked_rows, asked_on):
            hits[asked_on[place]].add(asked[place])
        return [
            self._sorted_out(change, hits[2 * number], hits[2 * number + 1], apart[number])
            for number, change in enumerate(changes)
        ]

    def _sorted_out(
        self,
        change: Change,
        was: set[Shared[S]],
        now: set[Shared[S]],
        apart: dict[Shared[S], tuple[bool, bool]],
    ) -> Found[S]:
        """What a change is to those who matched before it or after it."""
        entered = "created" if change.before is None else "entered"
        left = "deleted" if change.after is None else "left"
        found = [Match(shared.subscribers, "update", "changed") for shared in was & now]
        found += [Match(shared.subscribers, "insert", entered) for shared in now - was]
        found += [Match(shared.subscribers, "delete", left) for shared in was - now]
        self.hits += len(found)
        too_costly: set[S] = set()
        for shared, (before, after) in apart.items():
            match = self._decided(shared, change, before, after, too_costly)
            if match is not None:
                found.append(match)
        return Found(found, too_costly)


def _given_row(rows: Rows, shared: Shared[Any]) -> int:
    """With a read rule there are more reasons than a row can tell apart."""
    interest = shared.interest
    if interest.rule is not None or not interest.whole.is_plain:
        row = NO_ROW
    else:
        row = SURE if interest.whole.is_found else rows.add(interest.whole.branches[0])
    shared.row = row
    return row
