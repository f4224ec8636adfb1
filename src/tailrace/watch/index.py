"""The index of predicates: from a document to those that may match it, without looking at the others.

Every predicate is filed under the conjunct that the fewest documents satisfy. A bucket that grows is indexed
again by the next conjunct of its predicates. What comes out of a probe is a superset of what matches; the
predicates themselves decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from tailrace.watch.intervals import Intervals
from tailrace.watch.lower import MISSING, getter
from tailrace.watch.predicate import Condition, Path, Predicate, class_of
from tailrace.watch.sample import Sample, elements

BUCKET_MAX: Final = 8
DEPTH_MAX: Final = 4
MISJUDGED: Final = 4  # times that another conjunct has to be better for a predicate to be moved

# What is filed under an interval is not divided further; a bucket is divided by the next conjunct, which
# may be that very interval.
_WEIGHTS: Final = {"range": 50}

Get = Callable[[Any], Any]


def _weight(condition: Condition, sample: Sample) -> float:
    return sample.share(condition) * _WEIGHTS.get(condition.kind, 1)


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
            if self.below.is_empty:
                self.below = None

    @property
    def is_empty(self) -> bool:
        return not self.entries and self.below is None

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

    @property
    def is_empty(self) -> bool:
        return not (self.equal or self.contains or self.prefix or self.ranges or self.has)

    def add(self, predicate: Predicate, conditions: list[Condition], sample: Sample) -> Condition:
        """Files the predicate under the best of its conjuncts, and tells which that is."""
        best = min(conditions, key=lambda one: _weight(one, sample)) if len(conditions) > 1 else conditions[0]
        path = best.path
        if path not in self.gets:
            self.gets[path] = getter(path)
        if best.kind == "range":
            self.ranges.setdefault(path, Intervals()).add(best.value.low, best.value.high, predicate)
            return best
        rest = [condition for condition in conditions if condition is not best]
        for bucket in self._buckets(best):
            bucket.add(predicate, rest, sample)
        return best

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
                    if ranges.is_empty:
                        del self.ranges[condition.path]
            else:
                for table, key in self._tables(condition):
                    bucket = table.get(key)
                    if bucket is not None:
                        bucket.discard(predicate, rest)
                        if bucket.is_empty:
                            del table[key]
        self._tidy(conditions)

    def _tidy(self, conditions: list[Condition]) -> None:
        """Fields that nobody asks for any more are not looked at any more."""
        for path in {condition.path for condition in conditions}:
            by_length = self.prefix.get(path)
            if by_length is not None:
                for length in [length for length, table in by_length.items() if not table]:
                    del by_length[length]
            for tables in (self.equal, self.contains, self.prefix):
                if path in tables and not tables[path]:
                    del tables[path]

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
            for element in elements(gets[path](document)):
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
        self.kinds: Counter[str] = Counter()  # predicates by what finds them
        self._filed: dict[Predicate, tuple[Condition, ...]] = {}
        self._turn: Iterator[Predicate] = iter(())
        self.refiled = 0

    def __len__(self) -> int:
        return len(self._filed)

    def has_room(self, predicate: Predicate) -> bool:
        """Whether one more predicate may be looked at for every change, if that is what it needs."""
        return bool(predicate.branches) or len(self.scan) < self._scan_max

    def add(self, predicate: Predicate) -> None:
        """In force from the next probe on. Each predicate is added once."""
        if not predicate.branches:
            self.scan.add(predicate)
        filed = tuple(self._top.add(predicate, conditions, self.sample) for conditions in predicate.branches)
        self._filed[predicate] = filed
        self.kinds.update(condition.kind for condition in filed)

    def discard(self, predicate: Predicate) -> None:
        self.scan.discard(predicate)
        for conditions in predicate.branches:
            self._top.discard(predicate, conditions)
        self.kinds.subtract(condition.kind for condition in self._filed.pop(predicate, ()))

    def probe(self, document: dict[str, Any] | None, found: set[Predicate]) -> None:
        """Adds all that may match the document."""
        if document is not None:
            found |= self.scan
            self._top.probe(document, found)

    def refile(self, limit: int) -> int:
        """Looks at some predicates, and moves those that were filed before it was known how documents are.

        A predicate is moved from one bucket to another without a probe in between.
        """
        moved = 0
        for _ in range(min(limit, len(self._filed))):
            predicate = self._next()
            if predicate is not None and self._is_misjudged(predicate):
                self.discard(predicate)
                self.add(predicate)
                moved += 1
        self.refiled += moved
        return moved

    def _next(self) -> Predicate | None:
        try:
            return next(self._turn)
        except StopIteration:
            self._turn = iter(tuple(self._filed))
            return next(self._turn, None)

    def _is_misjudged(self, predicate: Predicate) -> bool:
        for conditions, filed in zip(predicate.branches, self._filed.get(predicate, ()), strict=False):
            if len(conditions) > 1:
                best = min(_weight(one, self.sample) for one in conditions)
                if best * MISJUDGED <= _weight(filed, self.sample):
                    return True
        return False
