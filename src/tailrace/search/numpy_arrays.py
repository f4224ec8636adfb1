"""Row sets and integers as numpy arrays. Numpy is untyped here: `np` is `Any`."""

from __future__ import annotations

from typing import Any

import numpy

np: Any = numpy

EMPTY: Any = np.zeros(0, np.int64)


def to_numpy(array: Any) -> Any:
    """The numbers of an Arrow array without nulls, without a copy where possible."""
    return array.to_numpy(zero_copy_only=False)


def narrow_integers(numbers: Any) -> Any:
    """Non-negative numbers in the narrowest type."""
    return numbers.astype(np.min_scalar_type(numbers.max())) if len(numbers) else numbers


def bits_from_row_array(rows: Any, count: int) -> int:
    """The set of rows out of `count` rows."""
    if not len(rows):
        return 0
    marks = np.zeros(count, np.uint8)
    marks[rows] = 1
    return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")


def row_array_from_bits(bits: int, count: int) -> Any:
    """The rows of a set out of `count` rows."""
    packed = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, count=count, bitorder="little"))
