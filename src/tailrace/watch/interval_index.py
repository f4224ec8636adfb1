"""Intervals of numbers: which of them hold a point, at a cost that follows the answer.

One that is open to a side lies in a list, sorted by its end. One with two ends lies in cells of about half
its width: the one where it begins, the one where it ends, and those between. So a point is looked up in one
cell for each width there is, and widths that are less than twice each other count as one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# So many are looked at one by one, which is faster than any order.
LINEAR_MAX: Final = 8
LARGE_CELL_MIN: Final = 16  # entries of a cell beyond which they are put in order
_SIZE_MAX: Final = 2.0**1023

IntervalEntry = tuple[float, float, T]  # the two ends, which belong to it, and what it stands for


class IntervalIndex(Generic[T]):
    """A list of intervals as long as they are few, then in order."""

    __slots__ = ("_few", "_many")

    def __init__(self) -> None:
        self._few: list[IntervalEntry[T]] = []
        self._many: _GridIndex[T] | None = None

    def __len__(self) -> int:
        return len(self._few) if self._many is None else self._many.count

    def add(self, low: float, high: float, item: T) -> None:
        if not low <= high:
            return  # nothing is in it
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
        """Takes out what was added with these ends, if it is there."""
        if self._many is not None:
            self._many.discard((low, high, item))
        else:
            _remove(self._few, (low, high, item))

    def holding(self, number: float) -> list[T]:
        """Every interval with this number between its ends, the ends included."""
        if self._many is None:
            return [item for low, high, item in self._few if low <= number <= high]
        return self._many.holding(number)


class _GridIndex(Generic[T]):
    """Intervals by what their ends are."""

    __slots__ = ("_above", "_below", "_everywhere", "_points", "_sizes", "count")

    def __init__(self) -> None:
        self._above: _SortedItems[T] = _SortedItems()  # without an upper end
        self._below: _SortedItems[T] = _SortedItems()  # without a lower one
        self._everywhere: list[T] = []
        self._points: dict[float, list[T]] = {}
        self._sizes: dict[float, dict[float, _Cell[T]]] = {}  # cells by their size and place
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
            size, places = _cells_of(low, high)
            cells = self._sizes.setdefault(size, {})
            for place in places:
                cell = cells.get(place)
                if cell is None:
                    cell = cells[place] = _Cell(size, place)
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
        size, places = _cells_of(entry[0], entry[1])
        cells, known = self._sizes.get(size, {}), False
        for place in places:
            cell = cells.get(place)
            if cell is not None and cell.discard(entry):
                known = True
                if cell.is_empty:
                    del cells[place]
        if known and not cells:
            del self._sizes[size]
        return known

    def holding(self, number: float) -> list[T]:
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
                found += cell.crowd.holding(number)
            else:
                found += [item for low, high, item in cell.few if low <= number <= high]
        return found


def _cells_of(low: float, high: float) -> tuple[float, range]:
    """The size of the cells for an interval, and the places of those that it reaches: two at least.

    What is in the first and not below its beginning is in the interval, and so is what is in the last and not
    above its end: that takes nothing but that places are in the order of their numbers.
    """
    width = high - low
    size = _SIZE_MAX if width == math.inf else 2.0 ** (math.frexp(width)[1] - 1)
    while low // size == high // size:
        size /= 2  # the width was rounded up
    return size, range(int(low // size), int(high // size) + 1)


class _Cell(Generic[T]):
    """Numbers between two multiples of a size, and the intervals that reach there."""

    __slots__ = ("_place", "_size", "crowd", "few")

    def __init__(self, size: float, place: int) -> None:
        self._size = size
        self._place = place
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
        """Whether the interval begins here, and whether it ends here."""
        return entry[0] // self._size == self._place, entry[1] // self._size == self._place


class _LargeCell(Generic[T]):
    """The intervals of a cell with many: some begin there, some end there, some do neither."""

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

    def holding(self, number: float) -> list[T]:
        return self._beginning.upto(number) + self._through + self._ending.since(number)


class _SortedItems(Generic[T]):
    """Items in the order of their keys."""

    __slots__ = ("items", "keys")

    def __init__(self) -> None:
        self.keys: list[float] = []
        self.items: list[T] = []

    def add(self, key: float, item: T) -> None:
        place = bisect_right(self.keys, key)
        self.keys.insert(place, key)
        self.items.insert(place, item)

    def discard(self, key: float, item: T) -> bool:
        for place in range(bisect_left(self.keys, key), bisect_right(self.keys, key)):
            if self.items[place] == item:
                del self.keys[place], self.items[place]
                return True
        return False

    def upto(self, key: float) -> list[T]:
        return self.items[: bisect_right(self.keys, key)]

    def since(self, key: float) -> list[T]:
        return self.items[bisect_left(self.keys, key) :]


def _remove(items: list[T], item: T) -> bool:
    """Whether it was there."""
    if item not in items:
        return False
    items.remove(item)
    return True
