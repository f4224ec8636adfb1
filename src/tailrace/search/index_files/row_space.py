"""The rows of a stretch of entries: which bit of a set stands for which entry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tailrace.search.numpy_arrays import bits_from_row_array, np


class RowNumbering:
    """Entries ascend. Usually there is one for every number, and a row is a difference; but not always."""

    def __init__(self, entries: Sequence[int]) -> None:
        self.entries = entries
        self.first = entries[0]
        self.last = entries[-1]
        self.count = len(entries)
        self.all_rows = (1 << self.count) - 1
        self._is_range = self.last - self.first + 1 == self.count

    @cached_property
    def _numbers(self) -> Any:
        return np.array(self.entries, np.int64)

    def after(self, entry: int) -> int:
        """The rows behind an entry."""
        return self.all_rows & ~((1 << bisect_left(self.entries, entry + 1)) - 1)

    def cut(self, entries: Any) -> tuple[Any, Any]:
        """Which of some ascending entries lie here, and the row of each of these."""
        begin, end = np.searchsorted(entries, (self.first, self.last + 1))
        inside = entries[begin:end]
        if self._is_range:
            return slice(begin, end), inside - self.first
        rows = np.searchsorted(self._numbers, inside)
        found = self._numbers[rows] == inside
        return begin + np.flatnonzero(found), rows[found]

    def rows(self, entries: Any) -> int:
        """The set of rows of some ascending entries."""
        if not len(entries):
            return 0  # of most files, when a value is looked for that few records have
        return bits_from_row_array(self.cut(entries)[1], self.count)

    def each(self, numbers: Any, first: int) -> Any:
        """For each row its number of a list that has one for every entry from `first` on."""
        if self._is_range:
            return numbers[self.first - first : self.last - first + 1]
        return numbers[self._numbers - first]
