"""Recent documents of a collection, to tell conjuncts that few documents satisfy from others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import islice
from typing import Any, Final, cast

from tailrace.watch.lower import MISSING, field_getter
from tailrace.watch.predicate import Condition, FieldPath, equality_class

SAMPLE_MAX: Final = 2000
SAMPLE_MIN: Final = 32
STALE_AFTER: Final = 500  # documents that came in since the columns were made
COLUMNS_MAX: Final = 200
# It is an estimate: large documents are left out, and of a long list some elements are enough.
DOCUMENT_BYTES_MAX: Final = 16 * 1024
ELEMENTS_MAX: Final = 64
# What share of documents a conjunct lets through, as long as nothing is known.
DEFAULT_SELECTIVITY: Final = {
    "equal": 0.01,
    "among": 0.05,
    "prefix": 0.05,
    "contains": 0.1,
    "range": 0.3,
    "has": 0.9,
}


class SampleColumn:
    """The values of one field in the sample, ready to be counted without looking at each."""

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
    """A reservoir: every document has had the same chance to be in it, later ones a little more."""

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
            # A fixed stride through the reservoir: as good as chance, and the same every time.
            self._documents[(self._seen // 16 * 617) % SAMPLE_MAX] = document
        else:
            return
        self._new += 1
        if self._new >= min(STALE_AFTER, len(self._documents)):
            self._new = 0
            self._columns.clear()

    def share(self, condition: Condition) -> float:
        """About how many of the documents satisfy it."""
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
    """What `in` finds in a list, or in a map; of the first so many."""
    if type(value) is list:
        listed = cast("list[Any]", value)[:count_max]
        return [found for item in listed if (found := equality_class(item)) is not None]
    return list(islice(cast("dict[str, Any]", value), count_max)) if type(value) is dict else []
