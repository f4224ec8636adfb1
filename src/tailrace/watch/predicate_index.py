"""The predicate index: finds the predicates that may match a document, without visiting the others.

Every predicate is indexed by its most selective condition, estimated from a sample of recent documents. A
large bucket is indexed again by the next condition of its predicates. The result of a probe is a superset of
the matches: predicates must still be evaluated, unless all their conditions were looked up on the way. Those
are stored separately, and returned as `sure`.

Most values are used by a single predicate, which is stored in the table itself; a bucket is created for the
second one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Sequence
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from tailrace.watch.evaluator import MISSING, field_getter
from tailrace.watch.interval_index import IntervalIndex
from tailrace.watch.predicate import LOOKUP_TABLES, Condition, FieldPath, Range, equality_class

SAMPLE_MAX: Final = 2000
SAMPLE_MIN: Final = 32
STALE_AFTER: Final = 500  # documents added since the columns were built
COLUMNS_MAX: Final = 200
# Estimates are sufficient: large documents are skipped, and of long lists only some elements count.
DOCUMENT_BYTES_MAX: Final = 16 * 1024
ELEMENTS_MAX: Final = 64
# The assumed share of matching documents while there is no sample.
DEFAULT_SELECTIVITY: Final = {
    "equal": 0.01,
    "among": 0.05,
    "prefix": 0.05,
    "contains": 0.1,
    "range": 0.3,
    "has": 0.9,
}


class SampleColumn:
    """The values of one field in the sample, prepared for fast counting."""

    __slots__ = ("classes", "elements", "numbers", "present", "texts")

    def __init__(self, path: FieldPath, documents: list[dict[str, Any]]) -> None:
        get = field_getter(path)
        values = [value for document in documents if (value := get(document)) is not MISSING]
        self.present = len(values)
        self.classes = Counter(found for value in values if (found := equality_class(value)) is not None)
        self.numbers = sorted(float(value) for value in values if type(value) in (int, float))
        self.texts = sorted(value for value in values if type(value) is str)
        self.elements: Counter[Any] = Counter()
        for value in values:
            self.elements.update(set(container_elements(value, ELEMENTS_MAX)))

    def count(self, condition: Condition) -> int:
        kind, value = condition.kind, condition.value
        if kind == "equal":
            return self.classes[value]
        if kind == "among":
            return sum(self.classes[one] for one in value)
        if kind == "range":
            low, high = value.closed
            return max(0, bisect_right(self.numbers, high) - bisect_left(self.numbers, low))
        if kind == "prefix":
            return bisect_left(self.texts, value + "\U0010ffff") - bisect_left(self.texts, value)
        if kind == "contains":
            return self.elements[value]
        return self.present


class DocumentSample:
    """A reservoir sample of recent documents, slightly biased to later ones."""

    def __init__(self) -> None:
        self._documents: list[dict[str, Any]] = []
        self._seen = 0
        self._new = 0
        self._columns: dict[FieldPath, SampleColumn] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, document: dict[str, Any]) -> None:
        self._seen += 1
        if len(self._documents) < SAMPLE_MAX:
            self._documents.append(document)
        elif self._seen % 16 == 0:
            # A fixed stride through the reservoir: as good as random, and deterministic.
            self._documents[(self._seen // 16 * 617) % SAMPLE_MAX] = document
        else:
            return
        self._new += 1
        if self._new >= min(STALE_AFTER, len(self._documents)):
            self._new = 0
            self._columns.clear()

    def share(self, condition: Condition) -> float:
        """The estimated share of documents that satisfy the condition."""
        guess = DEFAULT_SELECTIVITY[condition.kind]
        if len(self._documents) < SAMPLE_MIN:
            return guess
        column = self._columns.get(condition.path)
        if column is None:
            if len(self._columns) >= COLUMNS_MAX:
                self._columns.clear()
            column = self._columns[condition.path] = SampleColumn(condition.path, self._documents)
        return (column.count(condition) + guess) / len(self._documents)


def container_elements(value: Any, count_max: int | None = None) -> list[Any]:
    """The elements of a list or keys of a map that `in` finds, at most `count_max`."""
    if type(value) is list:
        listed = cast("list[Any]", value)[:count_max]
        return [found for item in listed if (found := equality_class(item)) is not None]
    return list(islice(cast("dict[str, Any]", value), count_max)) if type(value) is dict else []


BUCKET_MAX: Final = 8
LIST_MAX: Final = 16  # larger buckets are sets
DEPTH_MAX: Final = 4
MISESTIMATE_FACTOR: Final = 4  # another condition must be this much better for a move

# Intervals are not subdivided, while a bucket can be split by the next condition, possibly that interval. For
# narrow intervals the sample cannot estimate the width.
_WEIGHTS: Final = {"range": 200}

Getter = Callable[[Any], Any]
UsedConditions = tuple[tuple[str, FieldPath], ...]  # kinds and fields on the way to a bucket


class Indexable(Protocol):
    """An item with conditions: a predicate, or a predicate with its subscribers."""

    @property
    def branches(self) -> Sequence[tuple[Condition, ...]]: ...
    @property
    def lookups(self) -> int:
        """It is true for documents for which this many conditions were found."""
        ...


T = TypeVar("T", bound=Indexable)


def _condition_cost(condition: Condition, sample: DocumentSample) -> float:
    return sample.share(condition) * _WEIGHTS.get(condition.kind, 1)


class ProbeResult(Generic[T]):
    """The result of a probe for one document."""

    __slots__ = ("_elements", "maybe", "sure")

    def __init__(self) -> None:
        self.sure: set[T] = set()  # known to match
        self.maybe: set[T] = set()  # must be evaluated
        self._elements: dict[FieldPath, set[Any]] | None = None

    def matching_keys(self, path: FieldPath, value: Any, keys: KeysView[Any]) -> set[Any]:
        """The keys that a list or map of the document contains.

        Called for every bucket on the way: elements are cached, and the smaller of both sets is iterated.
        """
        if self._elements is None:
            self._elements = {}
        known = self._elements.get(path)
        if known is None:
            known = self._elements[path] = set(container_elements(value))
        return keys & known

    def add(self, item: T, depth: int) -> None:
        """Add an item that was found by `depth` conditions."""
        if item.lookups == depth:
            self.sure.add(item)
        else:
            self.maybe.add(item)

    def add_all(self, items: list[T], depth: int) -> None:
        for item in items:
            if item.lookups == depth:
                self.sure.add(item)
            else:
                self.maybe.add(item)


class _Bucket(Generic[T]):
    """Items that share a condition."""

    __slots__ = ("_used", "below", "maybe", "sure")

    def __init__(self, used: UsedConditions) -> None:
        self._used = used
        self.sure: Sequence[T] | set[T] = ()  # all conditions were looked up on the way
        self.maybe: Sequence[T] | set[T] = ()
        self.below: _Level[T] | None = None

    def _rest(self, item: T) -> tuple[Condition, ...]:
        """Conditions not used on the way; items with several branches are not indexed any further."""
        if len(item.branches) != 1:
            return ()
        used = self._used
        return tuple(
            one for one in item.branches[0] if (LOOKUP_TABLES.get(one.kind, one.kind), one.path) not in used
        )

    def add(self, item: T, sample: DocumentSample) -> None:
        rest = self._rest(item)
        if self.below is not None and rest:
            self.below.add(item, rest, sample)
            return
        self._insert(item)
        size = len(self.sure) + len(self.maybe)
        if rest and size > BUCKET_MAX and len(self._used) <= DEPTH_MAX:
            self._split(sample)

    def _insert(self, item: T) -> None:
        if item.lookups == len(self._used):
            self.sure = _add_item(self.sure, item)
        else:
            self.maybe = _add_item(self.maybe, item)

    def _split(self, sample: DocumentSample) -> None:
        below: _Level[T] = _Level(self._used)
        retained = (*self.sure, *self.maybe)
        self.sure, self.maybe = (), ()
        for item in retained:
            rest = self._rest(item)
            if rest:
                below.add(item, rest, sample)
            else:
                self._insert(item)
        self.below = below

    def discard(self, item: T) -> None:
        self.sure, self.maybe = _remove_item(self.sure, item), _remove_item(self.maybe, item)
        if self.below is not None:
            self.below.discard(item, self._rest(item))
            if self.below.is_empty:
                self.below = None

    @property
    def is_empty(self) -> bool:
        return not self.sure and not self.maybe and self.below is None

    def collect(self, document: Any, found: ProbeResult[T]) -> None:
        if self.sure:
            found.sure.update(self.sure)
        if self.maybe:
            found.maybe.update(self.maybe)
        if self.below is not None:
            self.below.probe(document, found)

    def collect_both(
        self, old: Any, new: Any, was: ProbeResult[T], now: ProbeResult[T], both: list[T]
    ) -> None:
        both += self.sure
        if self.maybe:
            was.maybe.update(self.maybe)
            now.maybe.update(self.maybe)
        if self.below is not None:
            self.below.probe_both(old, new, was, now, both)


def _add_item(items: Sequence[T] | set[T], item: T) -> Sequence[T] | set[T]:
    """Add an item once; large lists become sets."""
    if isinstance(items, set):
        items.add(item)
        return items
    if item in items:
        return items
    return [*items, item] if len(items) < LIST_MAX else {*items, item}


def _remove_item(items: Sequence[T] | set[T], item: T) -> Sequence[T] | set[T]:
    if isinstance(items, set):
        items.discard(item)
        return items
    return [one for one in items if one is not item] if item in items else items


class _Level(Generic[T]):
    """Items by condition: alone, or in a bucket."""

    __slots__ = ("_depth", "_used", "contains", "equal", "gets", "has", "prefix", "ranges")

    def __init__(self, used: UsedConditions) -> None:
        self._used = used
        self._depth = len(used) + 1  # conditions used by items found here
        self.gets: dict[FieldPath, Getter] = {}
        self.equal: dict[FieldPath, dict[Any, T | _Bucket[T]]] = {}
        self.contains: dict[FieldPath, dict[Any, T | _Bucket[T]]] = {}
        self.prefix: dict[FieldPath, dict[int, dict[str, T | _Bucket[T]]]] = {}
        self.ranges: dict[FieldPath, IntervalIndex[T]] = {}
        self.has: dict[FieldPath, T | _Bucket[T]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.equal or self.contains or self.prefix or self.ranges or self.has)

    def add(self, item: T, conditions: Sequence[Condition], sample: DocumentSample) -> Condition:
        """Index the item by the best of these conditions; returns that condition."""
        best = (
            min(conditions, key=lambda one: _condition_cost(one, sample))
            if len(conditions) > 1
            else conditions[0]
        )
        path = best.path
        if path not in self.gets:
            self.gets[path] = field_getter(path)
        if best.kind == "range":
            self.ranges.setdefault(path, IntervalIndex()).add(*_ends(best), item)
            return best
        for table, key in self._tables(best, make=True):
            self._put(table, key, item, best, sample)
        return best

    def _put(
        self,
        table: dict[Any, T | _Bucket[T]],
        key: Any,
        item: T,
        condition: Condition,
        sample: DocumentSample,
    ) -> None:
        known = table.get(key)
        if known is None:
            table[key] = item
        elif isinstance(known, _Bucket):
            known.add(item, sample)
        elif known is not item:
            kind = LOOKUP_TABLES.get(condition.kind, condition.kind)
            bucket: _Bucket[T] = _Bucket((*self._used, (kind, condition.path)))
            bucket.add(known, sample)
            bucket.add(item, sample)
            table[key] = bucket

    def discard(self, item: T, conditions: Sequence[Condition]) -> None:
        """Remove an item; all its conditions are tried, since estimates change."""
        for condition in conditions:
            if condition.kind == "range":
                ranges = self.ranges.get(condition.path)
                if ranges is not None:
                    ranges.discard(*_ends(condition), item)
                    if not len(ranges):
                        del self.ranges[condition.path]
                continue
            for table, key in self._tables(condition, make=False):
                known = table.get(key)
                if known is item:
                    del table[key]
                elif isinstance(known, _Bucket):
                    known.discard(item)
                    if known.is_empty:
                        del table[key]
        self._tidy(conditions)

    def _tidy(self, conditions: Sequence[Condition]) -> None:
        """Drop tables of fields that are not used any more."""
        for path in {condition.path for condition in conditions}:
            by_length = self.prefix.get(path)
            if by_length is not None:
                for length in [length for length, table in by_length.items() if not table]:
                    del by_length[length]
            for tables in (self.equal, self.contains, self.prefix):
                if path in tables and not tables[path]:
                    del tables[path]

    def _tables(self, condition: Condition, *, make: bool) -> list[tuple[dict[Any, T | _Bucket[T]], Any]]:
        """The tables and keys of a condition."""
        kind, path, value = condition.kind, condition.path, condition.value
        if kind == "has":
            return [(self.has, path)]
        if kind == "prefix":
            by_length = self.prefix.setdefault(path, {}) if make else self.prefix.get(path, {})
            size = len(value)
            return [(by_length.setdefault(size, {}) if make else by_length.get(size, {}), value)]
        tables = self.contains if kind == "contains" else self.equal
        table = tables.setdefault(path, {}) if make else tables.get(path, {})
        return [(table, one) for one in value] if kind == "among" else [(table, value)]

    def probe(self, document: Any, found: ProbeResult[T]) -> None:
        gets, depth = self.gets, self._depth
        for path, table in self.equal.items():
            _collect(table.get(_key(gets[path](document))), depth, document, found)
        for path, ranges in self.ranges.items():
            value = gets[path](document)
            if type(value) is float or type(value) is int:
                found.add_all(ranges.containing(float(value)), depth)
        for path, by_length in self.prefix.items():
            _collect_prefixes(by_length, gets[path](document), depth, document, found)
        if self.contains or self.has:
            self._probe_rare(document, found)

    def _probe_rare(self, document: Any, found: ProbeResult[T]) -> None:
        gets, depth = self.gets, self._depth
        for path, table in self.contains.items():
            for element in found.matching_keys(path, gets[path](document), table.keys()):
                _collect(table[element], depth, document, found)
        for path, known in self.has.items():
            if gets[path](document) is not MISSING:
                _collect(known, depth, document, found)

    def probe_both(self, old: Any, new: Any, was: ProbeResult[T], now: ProbeResult[T], both: list[T]) -> None:
        """As `probe` for both images of a change, optimized for fields that did not change."""
        gets, depth = self.gets, self._depth
        for path, table in self.equal.items():
            get = gets[path]
            one, other = get(old), get(new)
            if type(one) is not str or type(other) is not str:
                one, other = equality_class(one), equality_class(other)
            if one != other:
                _collect(table.get(one), depth, old, was)
                _collect(table.get(other), depth, new, now)
            elif (known := table.get(one)) is not None:
                _collect_both(known, depth, old, new, was, now, both)
        for path, ranges in self.ranges.items():
            get = gets[path]
            one, other = get(old), get(new)
            held: list[T] = []
            if type(one) is float or type(one) is int:
                held = ranges.containing(float(one))
                was.add_all(held, depth)
            if type(other) is float or type(other) is int:
                if other != one or type(one) is bool:
                    held = ranges.containing(float(other))
                now.add_all(held, depth)
        for path, by_length in self.prefix.items():
            get = gets[path]
            one, other = get(old), get(new)
            if type(one) is str and one == other:
                for length, table in by_length.items():
                    if (known := table.get(one[:length])) is not None:
                        _collect_both(known, depth, old, new, was, now, both)
            else:
                _collect_prefixes(by_length, one, depth, old, was)
                _collect_prefixes(by_length, other, depth, new, now)
        if self.contains or self.has:
            self._probe_rare(old, was)
            self._probe_rare(new, now)


def _ends(condition: Condition) -> tuple[float, float]:
    """The ends of a range; those of inexact conditions stay inclusive, since large integers are rounded."""
    found: Range = condition.value
    return found.closed if condition.exact else (found.low, found.high)


def _key(value: Any) -> Any:
    """The lookup key of a value; missing values have a key that is never stored."""
    return value if type(value) is str else equality_class(value)


def _collect(known: T | _Bucket[T] | None, depth: int, document: Any, found: ProbeResult[T]) -> None:
    if known is not None:
        if isinstance(known, _Bucket):
            known.collect(document, found)
        else:
            found.add(known, depth)


def _collect_both(
    known: T | _Bucket[T],
    depth: int,
    old: Any,
    new: Any,
    was: ProbeResult[T],
    now: ProbeResult[T],
    both: list[T],
) -> None:
    if isinstance(known, _Bucket):
        known.collect_both(old, new, was, now, both)
    elif known.lookups == depth:
        both.append(known)
    else:
        was.maybe.add(known)
        now.maybe.add(known)


def _collect_prefixes(
    by_length: dict[int, dict[str, T | _Bucket[T]]],
    value: Any,
    depth: int,
    document: Any,
    found: ProbeResult[T],
) -> None:
    if type(value) is str:
        for length, table in by_length.items():
            _collect(table.get(value[:length]), depth, document, found)


class PredicateIndex(Generic[T]):
    """The index of the predicates of one collection."""

    def __init__(self, scan_max: int) -> None:
        self._scan_max = scan_max
        self._top: _Level[T] = _Level(())
        self.scan: set[T] = set()  # without any indexable condition
        self.sample = DocumentSample()
        self.kinds: Counter[str] = Counter()  # predicates by kind of their index condition
        self._filed: dict[T, tuple[Condition, ...]] = {}
        self._rebalance_queue: Iterator[T] = iter(())
        self.rebalanced = 0

    def __len__(self) -> int:
        return len(self._filed)

    def has_room(self, item: Indexable) -> bool:
        """Whether the item can be added: predicates without index condition are limited."""
        return bool(item.branches) or len(self.scan) < self._scan_max

    def add(self, item: T) -> None:
        """Add an item once; effective from the next probe."""
        if not item.branches:
            self.scan.add(item)
        filed = tuple(self._top.add(item, conditions, self.sample) for conditions in item.branches)
        # Most have one condition: share its tuple instead of creating another.
        self._filed[item] = item.branches[0] if filed in item.branches[:1] else filed
        self.kinds.update(condition.kind for condition in filed)

    def discard(self, item: T) -> None:
        self.scan.discard(item)
        for conditions in item.branches:
            self._top.discard(item, conditions)
        self.kinds.subtract(condition.kind for condition in self._filed.pop(item, ()))

    def probe(self, document: dict[str, Any] | None, found: ProbeResult[T]) -> None:
        """Add all items that may match the document."""
        if document is not None:
            for item in self.scan:
                found.add(item, 0)
            self._top.probe(document, found)

    def probe_both(
        self,
        old: dict[str, Any] | None,
        new: dict[str, Any] | None,
        was: ProbeResult[T],
        now: ProbeResult[T],
        both: list[T],
    ) -> None:
        """Add all items that may match the document before (`was`) and after (`now`) a change.

        Items in `both` match both images, and are in neither of the others.
        """
        if old is None or new is None:
            self.probe(old, was)
            self.probe(new, now)
            return
        for item in self.scan:
            _collect_both(item, 0, old, new, was, now, both)
        self._top.probe_both(old, new, was, now, both)

    def rebalance(self, limit: int) -> int:
        """Check some predicates, and move those whose condition is no longer the most selective.

        A move is atomic with respect to probes.
        """
        moved = 0
        for _ in range(min(limit, len(self._filed))):
            item = self._next()
            if item is not None and self._is_misplaced(item):
                self.discard(item)
                self.add(item)
                moved += 1
        self.rebalanced += moved
        return moved

    def _next(self) -> T | None:
        try:
            return next(self._rebalance_queue)
        except StopIteration:
            self._rebalance_queue = iter(tuple(self._filed))
            return next(self._rebalance_queue, None)

    def _is_misplaced(self, item: T) -> bool:
        for conditions, filed in zip(item.branches, self._filed.get(item, ()), strict=False):
            if len(conditions) > 1:
                best = min(_condition_cost(one, self.sample) for one in conditions)
                if best * MISESTIMATE_FACTOR <= _condition_cost(filed, self.sample):
                    return True
        return False
