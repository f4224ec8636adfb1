"""The index of predicates: from a document to those that may match it, without looking at the others.

Every predicate is filed under the conjunct that the fewest documents satisfy. A bucket that grows is indexed
again by the next conjunct of its predicates. What comes out of a probe is a superset of what matches; the
predicates themselves decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tailrace.errors import TailraceError
from tailrace.watch.intervals import Intervals
from tailrace.watch.lower import MISSING, getter
from tailrace.watch.predicate import Condition, Path, Predicate, class_of

BUCKET_MAX: Final = 8
DEPTH_MAX: Final = 4
SAMPLE_MAX: Final = 128
SAMPLE_MIN: Final = 32
# What share of documents a conjunct lets through, as long as nothing is known.
_GUESSES: Final = {"equal": 0.01, "among": 0.05, "prefix": 0.05, "contains": 0.1, "range": 0.3, "has": 0.9}

# What is filed under an interval is not divided further, so that has to be worth it.
_WEIGHTS: Final = {"range": 10}

Get = Callable[[Any], Any]


class Sample:
    """Recent documents, one in so many, to tell selective conjuncts from others."""

    def __init__(self) -> None:
        self._documents: list[dict[str, Any]] = []
        self._seen = 0
        self._shares: dict[Condition, float] = {}

    def add(self, document: dict[str, Any]) -> None:
        self._seen += 1
        if len(self._documents) < SAMPLE_MAX:
            self._documents.append(document)
        elif self._seen % SAMPLE_MAX == 0:
            self._documents[(self._seen // SAMPLE_MAX) % SAMPLE_MAX] = document
        else:
            return
        if len(self._shares) > 1000 or self._seen & (self._seen - 1) == 0:
            self._shares.clear()

    def share(self, condition: Condition) -> float:
        """About how many of the documents satisfy it."""
        guess = _GUESSES[condition.kind]
        if len(self._documents) < SAMPLE_MIN:
            return guess
        found = self._shares.get(condition)
        if found is None:
            get = getter(condition.path)
            hits = sum(1 for document in self._documents if satisfies(condition, get(document)))
            found = (hits + guess) / len(self._documents)
            self._shares[condition] = found
        return found


def satisfies(condition: Condition, value: Any) -> bool:
    """Whether a document with this value of the field is looked up under the condition."""
    if value is MISSING:
        return False
    kind = condition.kind
    if kind == "equal":
        return class_of(value) == condition.value
    if kind == "among":
        return class_of(value) in condition.value
    if kind == "range":
        if type(value) is not int and type(value) is not float:
            return False
        return condition.value.low <= float(value) <= condition.value.high
    if kind == "prefix":
        return type(value) is str and value.startswith(condition.value)
    if kind == "contains":
        return condition.value in _elements(value)
    return True


def _elements(value: Any) -> list[Any]:
    """What `in` finds in a list, or in a map."""
    if type(value) is list:
        return [found for item in value if (found := class_of(item)) is not None]  # pyright: ignore[reportUnknownVariableType]
    return list(value) if type(value) is dict else []  # pyright: ignore[reportUnknownArgumentType]


class _Bucket:
    """Predicates that share a conjunct, each with those of its conjuncts that were not used yet."""

    __slots__ = ("below", "depth", "entries")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.entries: dict[Predicate, list[Condition]] = {}
        self.below: _Level | None = None

    def add(self, predicate: Predicate, rest: list[Condition], sample: Sample) -> None:
        if self.below is not None and rest:
            self.below.add(predicate, rest, sample)
            return
        self.entries[predicate] = rest
        if len(self.entries) > BUCKET_MAX and self.depth < DEPTH_MAX and self.below is None:
            self._split(sample)

    def _split(self, sample: Sample) -> None:
        below = _Level(self.depth + 1)
        kept: dict[Predicate, list[Condition]] = {}
        for predicate, rest in self.entries.items():
            if rest:
                below.add(predicate, rest, sample)
            else:
                kept[predicate] = rest
        if len(kept) < len(self.entries):
            self.below, self.entries = below, kept

    def discard(self, predicate: Predicate, rest: list[Condition]) -> None:
        self.entries.pop(predicate, None)
        if self.below is not None:
            self.below.discard(predicate, rest)

    def collect(self, document: Any, found: set[Predicate]) -> None:
        found.update(self.entries)
        if self.below is not None:
            self.below.probe(document, found)


class _Level:
    """Buckets by conjunct."""

    __slots__ = ("_depth", "contains", "equal", "gets", "has", "prefix", "ranges")

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.gets: dict[Path, Get] = {}
        self.equal: dict[Path, dict[Any, _Bucket]] = {}
        self.contains: dict[Path, dict[Any, _Bucket]] = {}
        self.prefix: dict[Path, dict[int, dict[str, _Bucket]]] = {}
        self.ranges: dict[Path, Intervals[Predicate]] = {}
        self.has: dict[Path, _Bucket] = {}

    def add(self, predicate: Predicate, conditions: list[Condition], sample: Sample) -> None:
        best = min(conditions, key=lambda one: sample.share(one) * _WEIGHTS.get(one.kind, 1))
        rest = [condition for condition in conditions if condition is not best]
        path = best.path
        self.gets.setdefault(path, getter(path))
        if best.kind == "range":
            self.ranges.setdefault(path, Intervals()).add(best.value.low, best.value.high, predicate)
            return
        for bucket in self._buckets(best):
            bucket.add(predicate, rest, sample)

    def _buckets(self, condition: Condition) -> list[_Bucket]:
        """The buckets of a condition, made if they are not there."""
        path, value = condition.path, condition.value
        if condition.kind == "equal":
            return [self._made(self.equal.setdefault(path, {}), value)]
        if condition.kind == "among":
            return [self._made(self.equal.setdefault(path, {}), item) for item in value]
        if condition.kind == "contains":
            return [self._made(self.contains.setdefault(path, {}), value)]
        if condition.kind == "prefix":
            by_length = self.prefix.setdefault(path, {}).setdefault(len(value), {})
            return [self._made(by_length, value)]
        return [self._made(self.has, path)]

    def _made(self, table: dict[Any, _Bucket], key: Any) -> _Bucket:
        found = table.get(key)
        if found is None:
            found = table[key] = _Bucket(self._depth)
        return found

    def discard(self, predicate: Predicate, conditions: list[Condition]) -> None:
        """Wherever it may have been filed: estimates change, so all its conjuncts are looked at."""
        for condition in conditions:
            rest = [other for other in conditions if other is not condition]
            if condition.kind == "range":
                ranges = self.ranges.get(condition.path)
                if ranges is not None:
                    ranges.discard(predicate)
            else:
                for table, key in self._tables(condition):
                    bucket = table.get(key)
                    if bucket is not None:
                        bucket.discard(predicate, rest)
                        if not bucket.entries and bucket.below is None:
                            del table[key]

    def _tables(self, condition: Condition) -> list[tuple[dict[Any, _Bucket], Any]]:
        path, value = condition.path, condition.value
        if condition.kind == "equal":
            return [(self.equal.get(path, {}), value)]
        if condition.kind == "among":
            return [(self.equal.get(path, {}), item) for item in value]
        if condition.kind == "contains":
            return [(self.contains.get(path, {}), value)]
        if condition.kind == "prefix":
            return [(self.prefix.get(path, {}).get(len(value), {}), value)]
        return [(self.has, path)]

    def probe(self, document: Any, found: set[Predicate]) -> None:
        gets = self.gets
        for path, table in self.equal.items():
            value = gets[path](document)
            if value is not MISSING:
                bucket = table.get(class_of(value))
                if bucket is not None:
                    bucket.collect(document, found)
        for path, ranges in self.ranges.items():
            value = gets[path](document)
            if type(value) is int or type(value) is float:
                found.update(ranges.holding(float(value)))
        for path, by_length in self.prefix.items():
            value = gets[path](document)
            if type(value) is str:
                for length, table in by_length.items():
                    bucket = table.get(value[:length])
                    if bucket is not None:
                        bucket.collect(document, found)
        for path, table in self.contains.items():
            for element in _elements(gets[path](document)):
                bucket = table.get(element)
                if bucket is not None:
                    bucket.collect(document, found)
        for path, bucket in self.has.items():
            if gets[path](document) is not MISSING:
                bucket.collect(document, found)


class Index:
    """The predicates of one collection."""

    def __init__(self, scan_max: int) -> None:
        self._scan_max = scan_max
        self._top = _Level(0)
        self.scan: set[Predicate] = set()
        self.sample = Sample()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def check_room(self, predicate: Predicate) -> None:
        """Refuses a predicate that would have to be looked at for every change, if there are too many."""
        if not predicate.branches and len(self.scan) >= self._scan_max and predicate not in self.scan:
            raise TailraceError(
                "overloaded", f"{self._scan_max} predicates of the collection are looked at for every change"
            )

    def add(self, predicate: Predicate) -> None:
        """In force from the next probe on. Each predicate is added once."""
        if not predicate.branches:
            self.scan.add(predicate)
        for conditions in predicate.branches:
            self._top.add(predicate, conditions, self.sample)
        self._count += 1

    def discard(self, predicate: Predicate) -> None:
        self.scan.discard(predicate)
        for conditions in predicate.branches:
            self._top.discard(predicate, conditions)
        self._count -= 1

    def probe(self, document: dict[str, Any] | None, found: set[Predicate]) -> None:
        """Adds all that may match the document."""
        if document is not None:
            found |= self.scan
            self._top.probe(document, found)
