"""The matcher of one collection: which subscriptions a change concerns, and what it is to them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from tailrace import __version__
from tailrace.watch.batch import NO_ROW, ComparisonMatrix, has_numpy
from tailrace.watch.change import Change
from tailrace.watch.document import Document
from tailrace.watch.evaluation_cost import CostExceededError, EvaluationPostponedError, StepBudget
from tailrace.watch.index import PredicateIndex, ProbeResult
from tailrace.watch.predicate import EITHER, SEMANTICS, UNDECIDED, Condition, Predicate
from tailrace.watch.sample import DOCUMENT_BYTES_MAX

S = TypeVar("S")

MatchOp = Literal["insert", "update", "delete"]
MatchEvent = tuple[MatchOp, str]  # and the reason
KnownTruth = tuple[bool | None, bool | None]  # whether something matched before, and after; None: not known
SUBSCRIBER_TUPLE_MAX: Final = 8  # subscribers of one predicate that are kept in a tuple
BATCH_MIN: Final = 32  # changes that are worth an array
TEXTS_SPARE: Final = 10_000
# The part behind the plus sign changes only when the meaning of expressions does.
MATCHER_VERSION: Final = f"{__version__}+{hashlib.sha256(SEMANTICS.encode()).hexdigest()[:4]}"


class Interest:
    """What somebody watches: a predicate with the read rule worked in, and both of them apart."""

    __slots__ = ("rule", "whole")

    def __init__(self, whole: Predicate, rule: Predicate | None) -> None:
        self.whole = whole
        self.rule = rule  # None: everybody with the scope may read

    @property
    def is_metered(self) -> bool:
        return self.whole.is_metered or (self.rule is not None and self.rule.is_metered)

    def event(self, change: Change) -> MatchEvent | None:
        """What the change is to whoever watches this; raises CostError if it cannot be afforded."""
        return self.event_of(change.before, change.after, None, None)

    def event_of(
        self, before: Document | None, after: Document | None, was: bool | None, now: bool | None
    ) -> MatchEvent | None:
        """As `event`, from both images; whether they match may be known already."""
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
    """All to whom a change is the same."""

    subscribers: Collection[S]
    op: MatchOp
    reason: str


class MatchResult(NamedTuple, Generic[S]):
    """Whom a change concerns, and those whose predicate took too many steps to tell."""

    matches: list[Match[S]]
    too_costly: set[S]  # more than an evaluation may take
    postponed: set[S]  # more than was left of this turn; not decided


class SharedPredicate(Generic[S]):
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
            self.subscribers = (
                (*known, subscriber) if len(known) < SUBSCRIBER_TUPLE_MAX else {*known, subscriber}
            )

    def discard(self, subscriber: S) -> None:
        known = self.subscribers
        if isinstance(known, set):
            known.discard(subscriber)
        else:
            self.subscribers = tuple(one for one in known if one != subscriber)


class Matcher(Generic[S]):
    """Equal predicates are decided once, whoever asked for them."""

    def __init__(self, scan_max: int, turn: StepBudget | None = None) -> None:
        """`turn` bounds what matching takes at once; without it only each evaluation is bounded."""
        self.index: PredicateIndex[SharedPredicate[S]] = PredicateIndex(scan_max)
        self._turn = turn
        self._by_hash: dict[bytes, SharedPredicate[S]] = {}
        self._rows: ComparisonMatrix | None = None
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
            shared = self._by_hash[key] = SharedPredicate(interest)
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

    def _probed(
        self, change: Change
    ) -> tuple[ProbeResult[SharedPredicate[S]], ProbeResult[SharedPredicate[S]], list[SharedPredicate[S]]]:
        """What may match the document before the change, what the one after it, and what matches both."""
        was: ProbeResult[SharedPredicate[S]] = ProbeResult()
        now: ProbeResult[SharedPredicate[S]] = ProbeResult()
        both: list[SharedPredicate[S]] = []
        self.index.probe_both(change.before, change.after, was, now, both)
        return was, now, both

    def candidates_of(self, change: Change) -> list[Interest]:
        """What the index finds, without deciding or counting anything."""
        was, now, both = self._probed(change)
        return [shared.interest for shared in (*both, *_all(was, now))]

    def found(self, change: Change) -> MatchResult[S]:
        """Every match."""
        was, now, both = self._probed(change)
        apart: dict[SharedPredicate[S], KnownTruth] = {}
        if was.maybe or now.maybe:
            self.candidates += len(both) + len(_all(was, now))
            for probed in (was, now):
                for shared in probed.maybe:
                    if shared.lookups == EITHER:
                        probed.sure.add(shared)
                    elif shared not in apart:
                        apart[shared] = _known(shared, was), _known(shared, now)
        else:
            self.candidates += len(both) + len(was.sure | now.sure)
        return self._sorted_out(change, was.sure, now.sure, both, apart)

    def _sorted_out(
        self,
        change: Change,
        was: set[SharedPredicate[S]],
        now: set[SharedPredicate[S]],
        both: list[SharedPredicate[S]],
        apart: Mapping[SharedPredicate[S], KnownTruth],
    ) -> MatchResult[S]:
        """What a change is to those who matched before it or after it, and to those who have to be asked."""
        if change.after is not None and len(change.entry.after) <= DOCUMENT_BYTES_MAX:
            self.index.sample.add(change.after)
        told: dict[MatchEvent, list[SharedPredicate[S]]] = {}
        too_costly: set[S] = set()
        postponed: set[S] = set()
        if apart:
            was -= apart.keys()
            now -= apart.keys()
            told = self._decided(change, apart, too_costly, postponed)
        stayed = was & now
        if stayed or both:
            told.setdefault(("update", "changed"), []).extend((*both, *stayed))
        if len(now) > len(stayed):
            entered = "created" if change.before is None else "entered"
            told.setdefault(("insert", entered), []).extend(now - stayed)
        if len(was) > len(stayed):
            left = "deleted" if change.after is None else "left"
            told.setdefault(("delete", left), []).extend(was - stayed)
        self.hits += sum(map(len, told.values()))
        return MatchResult(
            [Match(_subscribers(who), *what) for what, who in told.items()], too_costly, postponed
        )

    def _decided(
        self,
        change: Change,
        apart: Mapping[SharedPredicate[S], KnownTruth],
        too_costly: set[S],
        postponed: set[S],
    ) -> dict[MatchEvent, list[SharedPredicate[S]]]:
        """One by one."""
        before, after = change.before, change.after
        told: dict[MatchEvent, list[SharedPredicate[S]]] = {}
        for shared, (was, now) in apart.items():
            interest = shared.interest
            self.fallbacks += interest.whole.fallback
            turn = self._turn if interest.is_metered else None
            spent = turn.allow() if turn is not None else 0
            try:
                event = interest.event_of(before, after, was, now)
            except CostExceededError:
                too_costly.update(shared.subscribers)
                continue
            except EvaluationPostponedError:
                postponed.update(shared.subscribers)
                continue
            finally:
                if turn is not None:
                    turn.account(spent)
            if event is not None:
                told.setdefault(event, []).append(shared)
        return told

    # -- many at once ----------------------------------------------------------------------------------

    def matches_of(self, changes: Sequence[Change]) -> list[MatchResult[S]]:
        """As `found`, for several changes: most of it is decided in arrays, where there are any."""
        if len(changes) <= BATCH_MIN or not has_numpy():
            return [self.found(change) for change in changes]
        if self._rows is None or self._rows.texts > 2 * len(self._by_hash) + TEXTS_SPARE:
            # Anew: texts that nobody compares with any more are forgotten.
            self._rows = ComparisonMatrix()
            for shared in self._by_hash.values():
                shared.row = None
        return self._together(self._rows, changes)

    def _together(self, rows: ComparisonMatrix, changes: Sequence[Change]) -> list[MatchResult[S]]:
        documents: list[dict[str, Any]] = []  # two for each change
        asked: list[SharedPredicate[S]] = []  # those with a row
        asked_rows: list[int] = []
        asked_on: list[int] = []  # the document to decide it on
        hits: list[set[SharedPredicate[S]]] = []  # of each document
        stayed: list[list[SharedPredicate[S]]] = []  # of each change: those that match both of its documents
        apart: list[dict[SharedPredicate[S], KnownTruth]] = []  # those that have no row
        for change in changes:
            was, now, both = self._probed(change)
            self.candidates += len(both) + len(_all(was, now))
            alone: dict[SharedPredicate[S], KnownTruth] = {}
            for image, probed in ((change.before, was), (change.after, now)):
                for shared in probed.maybe:
                    if shared.lookups == EITHER:
                        probed.sure.add(shared)
                        continue
                    row = shared.row if shared.row is not None else _given_row(rows, shared)
                    if row == NO_ROW:
                        alone[shared] = _known(shared, was), _known(shared, now)
                    else:
                        asked.append(shared)
                        asked_rows.append(row)
                        asked_on.append(len(documents))
                documents.append({} if image is None else image)
                hits.append(probed.sure)
            stayed.append(both)
            apart.append(alone)
        for place in rows.holding(documents, asked_rows, asked_on):
            hits[asked_on[place]].add(asked[place])
        sides = zip(changes, hits[::2], hits[1::2], stayed, apart, strict=True)
        return [self._sorted_out(*one) for one in sides]


def _all(
    was: ProbeResult[SharedPredicate[S]], now: ProbeResult[SharedPredicate[S]]
) -> set[SharedPredicate[S]]:
    return was.sure | was.maybe | now.sure | now.maybe


def _known(shared: SharedPredicate[S], found: ProbeResult[SharedPredicate[S]]) -> bool | None:
    """Whether it matches, as far as looking it up tells; what was not found does not."""
    return None if shared in found.maybe else shared in found.sure


def _subscribers(who: list[SharedPredicate[S]]) -> Collection[S]:
    if len(who) == 1:
        return who[0].subscribers
    return [subscriber for shared in who for subscriber in shared.subscribers]


def _given_row(rows: ComparisonMatrix, shared: SharedPredicate[Any]) -> int:
    """A row can tell the reasons apart no better than looking up."""
    interest = shared.interest
    if interest.rule is not None or not interest.whole.is_plain:
        row = NO_ROW
    else:
        row = rows.add(interest.whole.branches[0])
    shared.row = row
    return row
