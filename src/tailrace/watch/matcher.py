"""The matcher of one collection: which subscriptions a change concerns, and what it is to them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from tailrace import __version__
from tailrace.watch.batch import NO_ROW, Rows, has_arrays
from tailrace.watch.change import Change
from tailrace.watch.index import Index
from tailrace.watch.predicate import SEMANTICS, UNDECIDED, Condition, Predicate
from tailrace.watch.values import CostError

S = TypeVar("S")

EventOp = Literal["insert", "update", "delete"]
Knowledge = tuple[bool | None, bool | None]  # whether something matched before, and after; None: not known
FEW_MAX: Final = 8  # subscribers of one predicate that are kept in a tuple
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

    __slots__ = ("interest", "lookups", "row", "subscribers")

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.subscribers: tuple[S, ...] | set[S] = ()
        # With a read rule there are more reasons than looking up can tell apart.
        self.lookups = interest.whole.lookups if interest.rule is None else UNDECIDED
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

    def _probed(self, change: Change) -> tuple[dict[Shared[S], int], dict[Shared[S], int]]:
        """What may match the document before the change, and what the one after it."""
        was: dict[Shared[S], int] = {}
        now: dict[Shared[S], int] = {}
        self.index.probe_both(change.before, change.after, was, now)
        return was, now

    def candidates_of(self, change: Change) -> list[Interest]:
        """What the index finds, without deciding or counting anything."""
        was, now = self._probed(change)
        return [shared.interest for shared in was | now]

    def found(self, change: Change) -> Found[S]:
        """Every match."""
        was, now = self._probed(change)
        self.candidates += len(was | now)
        apart = {
            shared: (_known(shared, was), _known(shared, now))
            for found in (was, now)
            for shared, lookups in found.items()
            if lookups != shared.lookups
        }
        return self._sorted_out(change, _certain(was), _certain(now), apart)

    def _decided(
        self, shared: Shared[S], change: Change, was: bool | None, now: bool | None, too_costly: set[S]
    ) -> Match[S] | None:
        interest = shared.interest
        self.fallbacks += interest.whole.fallback
        try:
            event = interest.event(change, was, now)
        except CostError:
            too_costly.update(shared.subscribers)
            return None
        if event is None:
            return None
        self.hits += 1
        return Match(shared.subscribers, *event)

    def _sorted_out(
        self, change: Change, was: set[Shared[S]], now: set[Shared[S]], apart: Mapping[Shared[S], Knowledge]
    ) -> Found[S]:
        """What a change is to those who matched before it or after it, and to those who have to be asked."""
        if change.after is not None:
            self.index.sample.add(change.after)
        matches: list[Match[S]] = []
        too_costly: set[S] = set()
        for shared, (before, after) in apart.items():
            was.discard(shared)
            now.discard(shared)
            match = self._decided(shared, change, before, after, too_costly)
            if match is not None:
                matches.append(match)
        if was or now:
            entered = "created" if change.before is None else "entered"
            left = "deleted" if change.after is None else "left"
            self.hits += len(was | now)
            matches += [Match(shared.subscribers, "update", "changed") for shared in was & now]
            matches += [Match(shared.subscribers, "insert", entered) for shared in now - was]
            matches += [Match(shared.subscribers, "delete", left) for shared in was - now]
        return Found(matches, too_costly)

    # -- many at once ----------------------------------------------------------------------------------

    def matches_of(self, changes: Sequence[Change]) -> list[Found[S]]:
        """As `found`, for several changes: most of it is decided in arrays, where there are any."""
        if len(changes) <= BATCH_MIN or not has_arrays():
            return [self.found(change) for change in changes]
        if self._rows is None or self._rows.texts > 2 * len(self._by_hash) + TEXTS_SPARE:
            # Anew: texts that nobody compares with any more are forgotten.
            self._rows = Rows()
            for shared in self._by_hash.values():
                shared.row = None
        return self._together(self._rows, changes)

    def _together(self, rows: Rows, changes: Sequence[Change]) -> list[Found[S]]:
        documents: list[dict[str, Any]] = []  # two for each change
        asked: list[Shared[S]] = []  # those with a row
        asked_rows: list[int] = []
        asked_on: list[int] = []  # the document to decide it on
        hits: list[set[Shared[S]]] = []  # of each document
        apart: list[dict[Shared[S], Knowledge]] = []  # those that have no row
        for change in changes:
            was, now = self._probed(change)
            self.candidates += len(was | now)
            alone: dict[Shared[S], Knowledge] = {}
            for image, candidates in ((change.before, was), (change.after, now)):
                certain: set[Shared[S]] = set()
                for shared, lookups in candidates.items():
                    if lookups == shared.lookups:
                        certain.add(shared)
                        continue
                    row = shared.row if shared.row is not None else _given_row(rows, shared)
                    if row == NO_ROW:
                        alone[shared] = (_known(shared, was), _known(shared, now))
                    else:
                        asked.append(shared)
                        asked_rows.append(row)
                        asked_on.append(len(documents))
                documents.append({} if image is None else image)
                hits.append(certain)
            apart.append(alone)
        for place in rows.holding(documents, asked_rows, asked_on):
            hits[asked_on[place]].add(asked[place])
        return [
            self._sorted_out(change, hits[2 * number], hits[2 * number + 1], apart[number])
            for number, change in enumerate(changes)
        ]


def _certain(found: Mapping[Shared[S], int]) -> set[Shared[S]]:
    """Those of which all was looked up."""
    return {shared for shared, lookups in found.items() if lookups == shared.lookups}


def _known(shared: Shared[S], found: Mapping[Shared[S], int]) -> bool | None:
    """Whether it matches, as far as looking it up tells; what was not found does not."""
    lookups = found.get(shared)
    return False if lookups is None else True if lookups == shared.lookups else None


def _given_row(rows: Rows, shared: Shared[Any]) -> int:
    """A row can tell the reasons apart no better than looking up."""
    interest = shared.interest
    if interest.rule is not None or not interest.whole.is_plain:
        row = NO_ROW
    else:
        row = rows.add(interest.whole.branches[0])
    shared.row = row
    return row
