"""Intervals of numbers: which of them hold a point, at a cost that follows the answer."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# So many are looked at one by one, which is faster than any order.
FEW_MAX: Final = 24
_DOUBLE: Final = struct.Struct(">d")
_BITS: Final = struct.Struct(">Q")
_SIGN: Final = 1 << 63


def rank(number: float) -> int:
    """Doubles as integers in the same order."""
    bits: int = _BITS.unpack(_DOUBLE.pack(number + 0.0))[0]  # the sum makes -0.0 the same as 0.0
    return bits ^ 0xFFFF_FFFF_FFFF_FFFF if bits & _SIGN else bits | _SIGN


class _Cell(Generic[T]):
    """Intervals that all hold the middle of the cell, by where they begin and by where they end."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[tuple[int, int, T]] = []
        self.ends: list[tuple[int, int, T]] = []


class Intervals(Generic[T]):
    """A list of intervals as long as they are few, then a tree of them."""

    __slots__ = ("_few", "_tree")

    def __init__(self) -> None:
        self._few: list[tuple[float, float, T]] = []
        self._tree: Tree[T] | None = None

    def __len__(self) -> int:
        return len(self._few) if self._tree is None else len(self._tree)

    @property
    def is_empty(self) -> bool:
        return not self._few if self._tree is None else self._tree.is_empty

    def add(self, low: float, high: float, item: T) -> None:
        if not low <= high:
            return  # nothing is in it
        if self._tree is not None:
            self._tree.add(low, high, item)
            return
        self._few.append((low, high, item))
        if len(self._few) > FEW_MAX:
            self._tree = Tree()
            for known in self._few:
                self._tree.add(*known)
            self._few = []

    def discard(self, item: T) -> None:
        if self._tree is not None:
            self._tree.discard(item)
        else:
            self._few = [known for known in self._few if known[2] != item]

    def holding(self, number: float) -> list[T]:
        """Every interval with this number between its ends, the ends included."""
        if self._tree is None:
            return [item for low, high, item in self._few if low <= number <= high]
        return self._tree.holding(number)


class Tree(Generic[T]):
    """An interval tree over all doubles: each interval lies in the smallest cell that holds it whole."""

    __slots__ = ("_levels", "_places", "_serial")

    def __init__(self) -> None:
        self._levels: dict[int, dict[int, _Cell[T]]] = {}  # cells by their size and place
        self._places: dict[T, list[tuple[int, int, int]]] = {}  # low, high, serial
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    @property
    def is_empty(self) -> bool:
        return not self._places

    def add(self, low: float, high: float, item: T) -> None:
        first, last = rank(low), rank(high)
        self._serial += 1
        level = (first ^ last).bit_length()
        cells = self._levels.setdefault(level, {})
        cell = cells.get(first >> level)
        if cell is None:
            cell = cells[first >> level] = _Cell()
        insort(cell.starts, (first, self._serial, item))
        insort(cell.ends, (last, self._serial, item))
        self._places.setdefault(item, []).append((first, last, self._serial))

    def discard(self, item: T) -> None:
        for first, last, serial in self._places.pop(item, ()):
            level = (first ^ last).bit_length()
            cells = self._levels[level]
            cell = cells[first >> level]
            del cell.starts[bisect_left(cell.starts, (first, serial))]
            del cell.ends[bisect_left(cell.ends, (last, serial))]
            if not cell.starts:
                del cells[first >> level]
            if not cells:
                del self._levels[level]

    def holding(self, number: float) -> list[T]:
        if number != number:
            return []
        point = rank(number)
        found: list[T] = []
        for level, cells in self._levels.items():
            cell = cells.get(point >> level)
            if cell is None:
                continue
            half = 1 << level >> 1
            if level and point & half:
                begin = bisect_left(cell.ends, (point,))
                found += [item for _, _, item in cell.ends[begin:]]
            else:
                end = bisect_right(cell.starts, (point, self._serial + 1))
                found += [item for _, _, item in cell.starts[:end]]
        return found
