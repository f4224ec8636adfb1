"""The matcher of a collection: finds which subscriptions a change concerns, one change or a batch at a time.

Many changes at once: comparisons of fields with values are decided for all of them together, in arrays.

A predicate that is made of a few such comparisons has a row here: for each, the column of values that it
looks at and the least and the greatest value that it takes. Texts are compared by numbers that they are given
when the first predicate asks for them.

The matcher of one collection: which subscriptions a change concerns, and what it is to them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from tailrace import __version__
from tailrace.watch.document import Change, Document
from tailrace.watch.evaluation_cost import CostExceededError, EvaluationPostponedError, StepBudget
from tailrace.watch.evaluator import field_getter
from tailrace.watch.predicate import EITHER, SEMANTICS, UNDECIDED, Condition, FieldPath, Predicate
from tailrace.watch.predicate_index import DOCUMENT_BYTES_MAX, PredicateIndex, ProbeResult

TESTS_MAX: Final = 4  # comparisons of one predicate; with more it is decided one by one
ROWS_INITIAL: Final = 1024
NO_ROW: Final = -1
_ALWAYS: Final = (0, -math.inf, math.inf)  # the first column holds nothing but zeros
_PLAIN: Final = {("b", False): 0.0, ("b", True): 1.0, ("n",): 2.0}

ColumnTest = tuple[int, float, float]


@cache
def has_numpy() -> bool:
    """Whether numbers can be worked on in arrays here."""
    return find_spec("numpy") is not None


class ComparisonMatrix:
    """The comparisons of all predicates of a collection."""

    def __init__(self) -> None:
        import numpy as np

        self._np: Any = np
        self._columns: dict[tuple[FieldPath, str], int] = {}
        self._texts: dict[str, float] = {}
        self._free: list[int] = []
        self._count = 0
        self._column: Any = np.zeros((TESTS_MAX, ROWS_INITIAL), np.intp)
        self._low: Any = np.full((TESTS_MAX, ROWS_INITIAL), -math.inf)
        self._high: Any = np.full((TESTS_MAX, ROWS_INITIAL), math.inf)

    @property
    def texts(self) -> int:
        """How many were given a number; they keep it as long as the rows last."""
        return len(self._texts)

    def add(self, conditions: Sequence[Condition]) -> int:
        """The row of a predicate that says this and no more; `NO_ROW` if it cannot be said here."""
        if len(conditions) > TESTS_MAX:
            return NO_ROW
        tests: list[ColumnTest] = []
        for condition in conditions:
            test = self._test(condition)
            if test is None:
                return NO_ROW
            tests.append(test)
        row = self._free.pop() if self._free else self._next()
        tests += [_ALWAYS] * (TESTS_MAX - len(tests))
        self._column[:, row], self._low[:, row], self._high[:, row] = zip(*tests, strict=True)
        return row

    def discard(self, row: int) -> None:
        if row >= 0:
            self._free.append(row)

    def _next(self) -> int:
        row, size = self._count, self._column.shape[1]
        self._count += 1
        if row == size:
            grow = [(0, 0), (0, size)]
            self._column = self._np.pad(self._column, grow)
            self._low, self._high = self._np.pad(self._low, grow), self._np.pad(self._high, grow)
        return row

    def _test(self, condition: Condition) -> ColumnTest | None:
        path, wanted = condition.path, condition.value
        if not condition.exact:
            return None
        if condition.kind == "range":
            return self._at(path, "number"), *wanted.closed
        if condition.kind != "equal":
            return None
        if type(wanted) is str:
            number = self._texts.setdefault(wanted, float(len(self._texts)))
            return self._at(path, "text"), number, number
        if type(wanted) is float:
            return self._at(path, "number"), wanted, wanted
        number = _PLAIN[wanted]
        return self._at(path, "plain"), number, number

    def _at(self, path: FieldPath, kind: str) -> int:
        return self._columns.setdefault((path, kind), len(self._columns) + 1)

    # -- deciding --------------------------------------------------------------------------------------

    def holding(
        self, documents: Sequence[dict[str, Any]], rows: Sequence[int], places: Sequence[int]
    ) -> list[int]:
        """Which of the predicates in `rows` are true on the documents in `places`, asked in pairs."""
        if not rows:
            return []
        np, values = self._np, self._values(documents)
        asked, beside = np.array(rows, np.intp), np.array(places, np.intp)
        holds = np.ones(len(rows), bool)
        for test in range(TESTS_MAX):
            found = values[self._column[test, asked], beside]
            holds &= (found >= self._low[test, asked]) & (found <= self._high[test, asked])
        return np.flatnonzero(holds).tolist()

    def _values(self, documents: Sequence[dict[str, Any]]) -> Any:
        """What the documents have in the columns that anybody looks at."""
        found = self._np.full((len(self._columns) + 1, len(documents)), math.nan)
        found[0] = 0.0
        for (path, kind), column in self._columns.items():
            found[column] = _column(field_getter(path), kind, self._texts, documents)
        return found


def _column(
    get: Callable[[Any], Any], kind: str, texts: dict[str, float], documents: Iterable[dict[str, Any]]
) -> list[float]:
    """One field of all documents as numbers; whatever is of another kind is no number."""
    nan = math.nan
    if kind == "text":
        number = texts.get
        return [number(found, nan) if type(found := get(one)) is str else nan for one in documents]
    if kind == "number":
        return [
            float(found) if type(found := get(one)) is float or type(found) is int else nan
            for one in documents
        ]
    return [
        2.0 if (found := get(one)) is None else float(found) if type(found) is bool else nan
        for one in documents
    ]


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
