"""The rows of a stretch of entries: which bit of a set stands for which entry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from tailrace.query.families.field_column import bits_in
from tailrace.query.packed import bits_of
from tailrace.store.arrow import INT64, pa, pc

_LISTED_MAX = 400  # beyond, one step of Arrow over all rows is quicker than a loop over the marked ones


@lru_cache(16)
def _counting(count: int) -> Any:
    """The numbers from 0 on: most stretches are of the same few lengths."""
    return pa.array(range(count), INT64)


class RowSpace:
    """Entries ascend. Usually there is one for every number, and a row is a difference; but not always."""

    def __init__(self, entries: Sequence[int]) -> None:
        self.entries = entries
        self.first = entries[0]
        self.last = entries[-1]
        self.count = len(entries)
        self.all_rows = (1 << self.count) - 1
        self._is_range = self.last - self.first + 1 == self.count

    @cached_property
    def _base(self) -> int:
        return self.first if self._is_range else 0

    @cached_property
    def _array(self) -> Any:
        """The entries less `_base`."""
        return _counting(self.count) if self._is_range else pa.array(self.entries, INT64)

    def after(self, entry: int) -> int:
        """The rows behind an entry."""
        return self.all_rows & ~((1 << bisect_left(self.entries, entry + 1)) - 1)

    def clipped(self, entries: Any) -> Any:
        """Those of an array of entries, in any order, that lie here."""
        if not len(entries):
            return entries
        inside = pc.and_(pc.greater_equal(entries, self.first), pc.less_equal(entries, self.last))
        return entries.filter(inside)

    def rows(self, entries: Any) -> int:
        """The set of rows of an array of entries."""
        entries = self.clipped(entries)
        if len(entries) > _LISTED_MAX:
            return bits_in(pc.is_in(self._array, value_set=pc.subtract(entries, self._base)))
        listed: list[int] = entries.to_pylist()
        if self._is_range:
            return bits_of([entry - self.first for entry in listed], self.count)
        found = [(entry, bisect_left(self.entries, entry)) for entry in listed]
        return bits_of(
            [row for entry, row in found if row < self.count and self.entries[row] == entry], self.count
        )

    def places(self, entries: Any) -> Any:
        """For each row its place in an array of entries; null if it is not there."""
        return pc.index_in(self._array, value_set=pc.subtract(entries, self._base))
