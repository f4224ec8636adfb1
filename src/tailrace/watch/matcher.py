"""The matcher of a collection: finds the subscriptions that a change concerns, and why.

`Matcher` probes the predicate index with the document before and after the change. Predicates that the index
decides completely need no evaluation; the others are evaluated one by one, or, for large batches, with
`ComparisonMatrix`: one row per predicate holds the columns (fields) it compares and the range of values that
each may have, so that all changes of a batch are decided in array operations. Strings are compared by numbers
that are assigned when a predicate first uses them.
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

TESTS_MAX: Final = 4  # comparisons per predicate; a predicate with more is evaluated alone
ROWS_INITIAL: Final = 1024
NO_ROW: Final = -1
_ALWAYS: Final = (0, -math.inf, math.inf)  # column 0 holds only zeros
_PLAIN: Final = {("b", False): 0.0, ("b", True): 1.0, ("n",): 2.0}

ColumnTest = tuple[int, float, float]


@cache
def has_numpy() -> bool:
    """Whether array operations are available."""
    return find_spec("numpy") is not None


class ComparisonMatrix:
    """The comparisons of all predicates of a collection, one row per predicate."""

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
        """How many strings have a number; numbers are never reused within one matrix."""
        return len(self._texts)

    def add(self, conditions: Sequence[Condition]) -> int:
        """Add a predicate that is exactly these conditions; `NO_ROW` if it cannot be represented."""
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
        path, expected = condition.path, condition.value
        if not condition.exact:
            return None
        if condition.kind == "range":
            return self._at(path, "number"), *expected.closed
        if condition.kind != "equal":
            return None
        if type(expected) is str:
            number = self._texts.setdefault(expected, float(len(self._texts)))
            return self._at(path, "text"), number, number
        if type(expected) is float:
            return self._at(path, "number"), expected, expected
        number = _PLAIN[expected]
        return self._at(path, "plain"), number, number

    def _at(self, path: FieldPath, kind: str) -> int:
        return self._columns.setdefault((path, kind), len(self._columns) + 1)

    # -- evaluating ------------------------------------------------------------------------------------

    def evaluate(
        self, documents: Sequence[dict[str, Any]], rows: Sequence[int], indexes: Sequence[int]
    ) -> list[int]:
        """Indexes of the (row, document) pairs for which the predicate is true."""
        if not rows:
            return []
        np, values = self._np, self._values(documents)
        row_of, document_of = np.array(rows, np.intp), np.array(indexes, np.intp)
        holds = np.ones(len(rows), bool)
        for test in range(TESTS_MAX):
            found = values[self._column[test, row_of], document_of]
            holds &= (found >= self._low[test, row_of]) & (found <= self._high[test, row_of])
        return np.flatnonzero(holds).tolist()

    def _values(self, documents: Sequence[dict[str, Any]]) -> Any:
        """The values of all columns in use, one array row per column."""
        found = self._np.full((len(self._columns) + 1, len(documents)), math.nan)
        found[0] = 0.0
        for (path, kind), column in self._columns.items():
            found[column] = _column(field_getter(path), kind, self._texts, documents)
        return found


def _column(
    get: Callable[[Any], Any], kind: str, texts: dict[str, float], documents: Iterable[dict[str, Any]]
) -> list[float]:
    """One field of all documents as numbers; NaN for values of another type."""
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
MatchEvent = tuple[MatchOp, str]  # operation and reason
KnownTruth = tuple[bool | None, bool | None]  # matched before, matched after; None: unknown
SUBSCRIBER_TUPLE_MAX: Final = 8  # above this the subscribers of a predicate are a set
BATCH_MIN: Final = 32  # smaller batches are faster without arrays
TEXTS_SPARE: Final = 10_000
# The suffix changes only when the semantics of expressions change.
MATCHER_VERSION: Final = f"{__version__}+{hashlib.sha256(SEMANTICS.encode()).hexdigest()[:4]}"


class Interest:
    """What a subscription watches: its predicate including the read rule, and the read rule alone."""

    __slots__ = ("predicate", "rule")

    def __init__(self, whole: Predicate, rule: Predicate | None) -> None:
        self.predicate = whole
        self.rule = rule  # None: every identity with the scope may read

    @property
    def is_metered(self) -> bool:
        return self.predicate.is_metered or (self.rule is not None and self.rule.is_metered)

    def classify(self, change: Change) -> MatchEvent | None:
        """The event that subscribers see; raises CostExceededError if the evaluation is too expensive."""
        return self.classify_images(change.before, change.after, None, None)

    def classify_images(
        self, before: Document | None, after: Document | None, was: bool | None, now: bool | None
    ) -> MatchEvent | None:
        """As `classify`, from both images; `was` and `now` say whether they match, if already known."""
        if was is None:
            was = before is not None and self.predicate.matches(before)
        if now is None:
            now = after is not None and self.predicate.matches(after)
        if now:
            if was:
                return ("update", "changed")
            if before is None:
                return ("insert", "created")
            return ("insert", "entered" if self._is_readable(before) else "visible")
        if was:
            if after is None:
                return ("delete", "deleted")
            return ("delete", "left" if self._is_readable(after) else "hidden")
        return None

    def _is_readable(self, document: dict[str, Any]) -> bool:
        return self.rule is None or self.rule.matches(document)


class Match(NamedTuple, Generic[S]):
    """Subscribers that receive the same event."""

    subscribers: Collection[S]
    op: MatchOp
    reason: str


class MatchResult(NamedTuple, Generic[S]):
    """The matches of a change, and the subscribers whose predicate could not be decided."""

    matches: list[Match[S]]
    too_costly: set[S]  # exceeded the steps of one evaluation
    postponed: set[S]  # exceeded the rest of the step budget; not decided


class SharedPredicate(Generic[S]):
    """A predicate and its subscribers: usually one."""

    __slots__ = ("interest", "lookups", "row", "subscribers")

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.subscribers: tuple[S, ...] | set[S] = ()
        # With a read rule there are more reasons than index lookups can distinguish.
        self.lookups = interest.predicate.lookups if interest.rule is None else UNDECIDED
        self.row: int | None = None  # in the comparison matrix; None: not assigned yet

    @property
    def branches(self) -> Sequence[tuple[Condition, ...]]:
        return self.interest.predicate.branches

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
    """Matches changes; equal predicates are evaluated once for all their subscribers."""

    def __init__(self, scan_max: int, budget: StepBudget | None = None) -> None:
        """`budget` bounds the steps of a time slice; without it only each evaluation is bounded."""
        self.index: PredicateIndex[SharedPredicate[S]] = PredicateIndex(scan_max)
        self._budget = budget
        self._by_hash: dict[bytes, SharedPredicate[S]] = {}
        self._rows: ComparisonMatrix | None = None
        self.candidates = 0
        self.hits = 0
        self.fallbacks = 0  # evaluations by the CEL library

    def __len__(self) -> int:
        return len(self._by_hash)

    def counts(self) -> tuple[int, int, int]:
        return self.candidates, self.hits, self.fallbacks

    def has_room(self, predicate: Predicate) -> bool:
        return predicate.hash in self._by_hash or self.index.has_room(predicate)

    def add(self, interest: Interest, subscriber: S) -> None:
        key = interest.predicate.hash
        shared = self._by_hash.get(key)
        if shared is None:
            shared = self._by_hash[key] = SharedPredicate(interest)
            self.index.add(shared)
        shared.add(subscriber)

    def discard(self, interest: Interest, subscriber: S) -> None:
        key = interest.predicate.hash
        shared = self._by_hash.get(key)
        if shared is None:
            return
        shared.discard(subscriber)
        if not shared.subscribers:
            self.index.discard(shared)
            del self._by_hash[key]
            if self._rows is not None and shared.row is not None:
                self._rows.discard(shared.row)

    def _probe(
        self, change: Change
    ) -> tuple[ProbeResult[SharedPredicate[S]], ProbeResult[SharedPredicate[S]], list[SharedPredicate[S]]]:
        """Candidates for the document before the change, for the one after it, and what matches both."""
        was: ProbeResult[SharedPredicate[S]] = ProbeResult()
        now: ProbeResult[SharedPredicate[S]] = ProbeResult()
        both: list[SharedPredicate[S]] = []
        self.index.probe_both(change.before, change.after, was, now, both)
        return was, now, both

    def find_candidates(self, change: Change) -> list[Interest]:
        """The candidates of the index, without evaluating or counting them."""
        was, now, both = self._probe(change)
        return [shared.interest for shared in (*both, *_all(was, now))]

    def match(self, change: Change) -> MatchResult[S]:
        """All matches of a change."""
        was, now, both = self._probe(change)
        undecided: dict[SharedPredicate[S], KnownTruth] = {}
        if was.maybe or now.maybe:
            self.candidates += len(both) + len(_all(was, now))
            for probed in (was, now):
                for shared in probed.maybe:
                    if shared.lookups == EITHER:
                        probed.sure.add(shared)
                    elif shared not in undecided:
                        undecided[shared] = _known(shared, was), _known(shared, now)
        else:
            self.candidates += len(both) + len(was.sure | now.sure)
        return self._classify(change, was.sure, now.sure, both, undecided)

    def _classify(
        self,
        change: Change,
        was: set[SharedPredicate[S]],
        now: set[SharedPredicate[S]],
        both: list[SharedPredicate[S]],
        undecided: Mapping[SharedPredicate[S], KnownTruth],
    ) -> MatchResult[S]:
        """Group predicates by event; those in `undecided` are evaluated first."""
        if change.after is not None and len(change.entry.after) <= DOCUMENT_BYTES_MAX:
            self.index.sample.add(change.after)
        events: dict[MatchEvent, list[SharedPredicate[S]]] = {}
        too_costly: set[S] = set()
        postponed: set[S] = set()
        if undecided:
            was -= undecided.keys()
            now -= undecided.keys()
            events = self._evaluate_each(change, undecided, too_costly, postponed)
        stayed = was & now
        if stayed or both:
            events.setdefault(("update", "changed"), []).extend((*both, *stayed))
        if len(now) > len(stayed):
            entered = "created" if change.before is None else "entered"
            events.setdefault(("insert", entered), []).extend(now - stayed)
        if len(was) > len(stayed):
            left = "deleted" if change.after is None else "left"
            events.setdefault(("delete", left), []).extend(was - stayed)
        self.hits += sum(map(len, events.values()))
        return MatchResult(
            [Match(_subscribers(who), *what) for what, who in events.items()], too_costly, postponed
        )

    def _evaluate_each(
        self,
        change: Change,
        undecided: Mapping[SharedPredicate[S], KnownTruth],
        too_costly: set[S],
        postponed: set[S],
    ) -> dict[MatchEvent, list[SharedPredicate[S]]]:
        """Evaluate predicates that the index could not decide."""
        before, after = change.before, change.after
        events: dict[MatchEvent, list[SharedPredicate[S]]] = {}
        for shared, (was, now) in undecided.items():
            interest = shared.interest
            self.fallbacks += interest.predicate.fallback
            budget = self._budget if interest.is_metered else None
            spent = budget.begin() if budget is not None else 0
            try:
                event = interest.classify_images(before, after, was, now)
            except CostExceededError:
                too_costly.update(shared.subscribers)
                continue
            except EvaluationPostponedError:
                postponed.update(shared.subscribers)
                continue
            finally:
                if budget is not None:
                    budget.end(spent)
            if event is not None:
                events.setdefault(event, []).append(shared)
        return events

    # -- batches ---------------------------------------------------------------------------------------

    def match_batch(self, changes: Sequence[Change]) -> list[MatchResult[S]]:
        """As `match`, for several changes: large batches are decided in arrays if numpy is installed."""
        if len(changes) <= BATCH_MIN or not has_numpy():
            return [self.match(change) for change in changes]
        if self._rows is None or self._rows.texts > 2 * len(self._by_hash) + TEXTS_SPARE:
            # Rebuild, to drop strings that no predicate compares with any more.
            self._rows = ComparisonMatrix()
            for shared in self._by_hash.values():
                shared.row = None
        return self._match_with_arrays(self._rows, changes)

    def _match_with_arrays(self, rows: ComparisonMatrix, changes: Sequence[Change]) -> list[MatchResult[S]]:
        documents: list[dict[str, Any]] = []  # two per change
        maybe: list[SharedPredicate[S]] = []  # predicates with a row
        maybe_rows: list[int] = []
        maybe_documents: list[int] = []  # index of the document to evaluate
        hits: list[set[SharedPredicate[S]]] = []  # per document
        stayed: list[list[SharedPredicate[S]]] = []  # per change: predicates that match both images
        undecided: list[dict[SharedPredicate[S], KnownTruth]] = []  # predicates without a row
        for change in changes:
            was, now, both = self._probe(change)
            self.candidates += len(both) + len(_all(was, now))
            alone: dict[SharedPredicate[S], KnownTruth] = {}
            for image, probed in ((change.before, was), (change.after, now)):
                for shared in probed.maybe:
                    if shared.lookups == EITHER:
                        probed.sure.add(shared)
                        continue
                    row = shared.row if shared.row is not None else _assign_row(rows, shared)
                    if row == NO_ROW:
                        alone[shared] = _known(shared, was), _known(shared, now)
                    else:
                        maybe.append(shared)
                        maybe_rows.append(row)
                        maybe_documents.append(len(documents))
                documents.append({} if image is None else image)
                hits.append(probed.sure)
            stayed.append(both)
            undecided.append(alone)
        for index in rows.evaluate(documents, maybe_rows, maybe_documents):
            hits[maybe_documents[index]].add(maybe[index])
        sides = zip(changes, hits[::2], hits[1::2], stayed, undecided, strict=True)
        return [self._classify(*one) for one in sides]


def _all(
    was: ProbeResult[SharedPredicate[S]], now: ProbeResult[SharedPredicate[S]]
) -> set[SharedPredicate[S]]:
    return was.sure | was.maybe | now.sure | now.maybe


def _known(shared: SharedPredicate[S], found: ProbeResult[SharedPredicate[S]]) -> bool | None:
    """Whether it matches, as far as the index decides it; predicates not found do not match."""
    return None if shared in found.maybe else shared in found.sure


def _subscribers(who: list[SharedPredicate[S]]) -> Collection[S]:
    if len(who) == 1:
        return who[0].subscribers
    return [subscriber for shared in who for subscriber in shared.subscribers]


def _assign_row(rows: ComparisonMatrix, shared: SharedPredicate[Any]) -> int:
    """The row of a predicate; with a read rule there is none, since a row cannot distinguish the reasons."""
    interest = shared.interest
    if interest.rule is not None or not interest.predicate.is_plain:
        row = NO_ROW
    else:
        row = rows.add(interest.predicate.branches[0])
    shared.row = row
    return row
