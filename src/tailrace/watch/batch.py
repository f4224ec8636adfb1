"""Many changes at once: comparisons of fields with values are decided for all of them together, in arrays.

A predicate that is made of a few such comparisons has a row here: for each, the column of values that it
looks at and the least and the greatest value that it takes. Texts are compared by numbers that they are given
when the first predicate asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from tailrace.watch.lower import field_getter
from tailrace.watch.predicate import Condition, FieldPath

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
