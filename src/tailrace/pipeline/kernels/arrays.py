"""Arrow and numpy as the kernels use them. Neither has annotations: this is where typing stops."""

from __future__ import annotations

from typing import Any, Final

import numpy

from tailrace.store.arrow import BINARY, INT32, INT64, STRING, pa, pc, pq

__all__ = [
    "BINARY",
    "BOOL",
    "DOUBLE",
    "INT32",
    "INT64",
    "INT64_LIST",
    "STRING",
    "from_numpy",
    "list_of",
    "lists",
    "np",
    "offsets_of",
    "pa",
    "pc",
    "pq",
    "spans",
    "stable_order",
    "to_numpy",
]

np: Any = numpy

BOOL: Final = pa.bool_()
DOUBLE: Final = pa.float64()


def list_of(kind: Any, *, nullable: bool = False) -> Any:
    return pa.list_(pa.field("element", kind, nullable=nullable))


INT64_LIST: Final = list_of(INT64)


def to_numpy(array: Any) -> Any:
    """An Arrow array of numbers without nulls."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.to_numpy(zero_copy_only=False)


def from_numpy(numbers: Any, kind: Any) -> Any:
    """Numbers of the width of `kind`, as they are."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def offsets_of(counts: Any) -> Any:
    """Where each of some runs begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def spans(starts: Any, counts: Any) -> Any:
    """The numbers from each start on, as many as are wanted there, one span behind the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def stable_order(ranks: Any, bound: int) -> Any:
    """The places of numbers from 0 to below `bound`, ascending; equal ones stay as they are."""
    # Short numbers are sorted by their digits, which takes a fraction of the time.
    return np.argsort(ranks.astype(np.uint16) if bound <= 1 << 16 else ranks, kind="stable")


def lists(kind: Any, offsets: Any, values: Any) -> Any:
    """A list column over flat values."""
    starts = pa.array(offsets.astype(np.int32), INT32)
    return pa.ListArray.from_arrays(starts, values, type=kind)
