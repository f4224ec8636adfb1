"""An index of numeric intervals: finds those that contain a point, in time proportional to the result.

Intervals that are open to one side are in lists sorted by their end. Intervals with two ends are in cells of
about half their width: the cell of the start, the cell of the end, and those between. A point is looked up in
one cell per size; widths within a factor of two share a size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Up to this many are scanned, which is faster than an index.
LINEAR_MAX: Final = 8
LARGE_CELL_MIN: Final = 16  # cells with more entries are sorted
_SIZE_MAX: Final = 2.0**1023

IntervalEntry = tuple[float, float, T]  # both ends, inclusive, and the item


class IntervalIndex(Generic[T]):
    """A list while there are few intervals, then a grid."""

    __slots__ = ("_few", "_many")

    def __init__(self) -> None:
        self._few: list[IntervalEntry[T]] = []
        self._many: _GridIndex[T] | None = None

    def __len__(self) -> int:
        return len(self._few) if self._many is None else self._many.count

    def add(self, low: float, high: float, item: T) -> None:
        if not low <= high:
            return  # empty interval
        if self._many is not None:
            self._many.add((low, high, item))
            return
        self._few.append((low, high, item))
        if len(self._few) > LINEAR_MAX:
            self._many = _GridIndex()
            for entry in self._few:
                self._many.add(entry)
            self._few = []

    def discard(self, low: float, high: float, item: T) -> None:
        """Remove an item added with these ends, if present."""
        if self._many is not None:
            self._many.discard((low, high, item))
        else:
            _remove(self._few, (low, high, item))

    def containing(self, number: float) -> list[T]:
        """The items of all intervals that contain the number."""
        if self._many is None:
            return [item for low, high, item in self._few if low <= number <= high]
        return self._many.containing(number)


class _GridIndex(Generic[T]):
    """Intervals by the kind of their ends."""

    __slots__ = ("_above", "_below", "_everywhere", "_points", "_sizes", "count")

    def __init__(self) -> None:
        self._above: _SortedItems[T] = _SortedItems()  # no upper end
        self._below: _SortedItems[T] = _SortedItems()  # no lower end
        self._everywhere: list[T] = []
        self._points: dict[float, list[T]] = {}
        self._sizes: dict[float, dict[float, _Cell[T]]] = {}  # cells by size and index
        self.count = 0

    def add(self, entry: IntervalEntry[T]) -> None:
        low, high, item = entry
        self.count += 1
        if low == high:
            self._points.setdefault(low, []).append(item)
        elif low == -math.inf and high == math.inf:
            self._everywhere.append(item)
        elif high == math.inf:
            self._above.add(low, item)
        elif low == -math.inf:
            self._below.add(high, item)
        else:
            size, indexes = _cells_of(low, high)
            cells = self._sizes.setdefault(size, {})
            for index in indexes:
                cell = cells.get(index)
                if cell is None:
                    cell = cells[index] = _Cell(size, index)
                cell.add(entry)

    def discard(self, entry: IntervalEntry[T]) -> None:
        low, high, item = entry
        if low == high:
            known = low in self._points and _remove(self._points[low], item)
            if known and not self._points[low]:
                del self._points[low]
        elif low == -math.inf and high == math.inf:
            known = _remove(self._everywhere, item)
        elif high == math.inf:
            known = self._above.discard(low, item)
        elif low == -math.inf:
            known = self._below.discard(high, item)
        else:
            known = low < high and self._discard_from_cells(entry)
        self.count -= known

    def _discard_from_cells(self, entry: IntervalEntry[T]) -> bool:
        size, indexes = _cells_of(entry[0], entry[1])
        cells, known = self._sizes.get(size, {}), False
        for index in indexes:
            cell = cells.get(index)
            if cell is not None and cell.discard(entry):
                known = True
                if cell.is_empty:
                    del cells[index]
        if known and not cells:
            del self._sizes[size]
        return known

    def containing(self, number: float) -> list[T]:
        found: list[T] = []
        if number != number:
            return found
        if self._above.keys:
            found += self._above.upto(number)
        if self._below.keys:
            found += self._below.since(number)
        if self._everywhere:
            found += self._everywhere
        if self._points:
            found += self._points.get(number, ())
        for size, cells in self._sizes.items():
            cell = cells.get(number // size)
            if cell is None:
                continue
            if cell.crowd is not None:
                found += cell.crowd.containing(number)
            else:
                found += [item for low, high, item in cell.few if low <= number <= high]
        return found


def _cells_of(low: float, high: float) -> tuple[float, range]:
    """The cell size for an interval, and the indexes of the cells that it reaches: at least two.

    In the first cell only the start, in the last only the end has to be compared. This relies only on cell
    indexes being monotonic in the numbers.
    """
    width = high - low
    size = _SIZE_MAX if width == math.inf else 2.0 ** (math.frexp(width)[1] - 1)
    while low // size == high // size:
        size /= 2  # the width was rounded up
    return size, range(int(low // size), int(high // size) + 1)


class _Cell(Generic[T]):
    """The intervals that reach one cell."""

    __slots__ = ("_index", "_size", "crowd", "few")

    def __init__(self, size: float, index: int) -> None:
        self._size = size
        self._index = index
        self.few: list[IntervalEntry[T]] = []
        self.crowd: _LargeCell[T] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.few and (self.crowd is None or self.crowd.is_empty)

    def add(self, entry: IntervalEntry[T]) -> None:
        if self.crowd is None:
            self.few.append(entry)
            if len(self.few) <= LARGE_CELL_MIN:
                return
            self.crowd, waiting, self.few = _LargeCell(), self.few, []
        else:
            waiting = [entry]
        for one in waiting:
            self.crowd.add(one, *self._ends(one))

    def discard(self, entry: IntervalEntry[T]) -> bool:
        if self.crowd is None:
            return _remove(self.few, entry)
        return self.crowd.discard(entry, *self._ends(entry))

    def _ends(self, entry: IntervalEntry[T]) -> tuple[bool, bool]:
        """Whether the interval starts here, and whether it ends here."""
        return entry[0] // self._size == self._index, entry[1] // self._size == self._index


class _LargeCell(Generic[T]):
    """A cell with many intervals: those that start, end, or pass through."""

    __slots__ = ("_beginning", "_ending", "_through")

    def __init__(self) -> None:
        self._beginning: _SortedItems[T] = _SortedItems()
        self._ending: _SortedItems[T] = _SortedItems()
        self._through: list[T] = []

    @property
    def is_empty(self) -> bool:
        return not (self._beginning.keys or self._ending.keys or self._through)

    def add(self, entry: IntervalEntry[T], begins: bool, ends: bool) -> None:
        low, high, item = entry
        if begins:
            self._beginning.add(low, item)
        elif ends:
            self._ending.add(high, item)
        else:
            self._through.append(item)

    def discard(self, entry: IntervalEntry[T], begins: bool, ends: bool) -> bool:
        low, high, item = entry
        if begins:
            return self._beginning.discard(low, item)
        return self._ending.discard(high, item) if ends else _remove(self._through, item)

    def containing(self, number: float) -> list[T]:
        return self._beginning.upto(number) + self._through + self._ending.since(number)


class _SortedItems(Generic[T]):
    """Items sorted by key."""

    __slots__ = ("items", "keys")

    def __init__(self) -> None:
        self.keys: list[float] = []
        self.items: list[T] = []

    def add(self, key: float, item: T) -> None:
        index = bisect_right(self.keys, key)
        self.keys.insert(index, key)
        self.items.insert(index, item)

    def discard(self, key: float, item: T) -> bool:
        for index in range(bisect_left(self.keys, key), bisect_right(self.keys, key)):
            if self.items[index] == item:
                del self.keys[index], self.items[index]
                return True
        return False

    def upto(self, key: float) -> list[T]:
        return self.items[: bisect_right(self.keys, key)]

    def since(self, key: float) -> list[T]:
        return self.items[bisect_left(self.keys, key) :]


def _remove(items: list[T], item: T) -> bool:
    """Remove an item; False if it is missing."""
    if item not in items:
        return False
    items.remove(item)
    return True
