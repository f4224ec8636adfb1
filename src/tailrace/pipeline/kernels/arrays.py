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
    "byte_order",
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

_WORD_BYTES: Final = 8
_FEW: Final = 256  # values that are sorted at once by the library


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


def byte_order(values: Any) -> Any:
    """The places of different texts or bytes, ascending as bytes do.

    They are compared by eight bytes as one number, from where they begin to differ. What is the same there is
    left to the library, which compares byte by byte and takes many times as long.
    """
    count = len(values)
    if count < _FEW:
        return to_numpy(pc.sort_indices(values)).astype(np.int64)
    _, starts, data = values.buffers()
    edges = np.frombuffer(starts, np.int32)[values.offset : values.offset + count + 1].astype(np.int64)
    held = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    words = _words(held, edges, _alike(values))
    order = np.argsort(words)
    same = np.flatnonzero(words[order[1:]] == words[order[:-1]])
    if len(same):
        tied = np.union1d(same, same + 1)
        places = np.sort(order[tied])
        order[tied] = places[to_numpy(pc.sort_indices(values.take(pa.array(places))))]
    return order


def _alike(values: Any) -> int:
    """With how many bytes all values begin: the smallest and the largest one do."""
    edges = pc.min_max(values.cast(BINARY)).as_py()
    low, high = edges["min"], edges["max"]
    return next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))


def _words(held: Any, edges: Any, skipped: int) -> Any:
    """Eight bytes of each value as a number; zeros where it has fewer."""
    firsts = edges[:-1] + skipped
    words = np.zeros(len(firsts), np.uint64)
    for place in range(_WORD_BYTES):
        at = firsts + place
        inside = at < edges[1:]
        found = held[np.where(inside, at, 0)] if len(held) else np.zeros(len(at), np.uint8)
        words = (words << np.uint64(8)) | np.where(inside, found, 0).astype(np.uint64)
    return words


def lists(kind: Any, offsets: Any, values: Any) -> Any:
    """A list column over flat values."""
    starts = pa.array(offsets.astype(np.int32), INT32)
    return pa.ListArray.from_arrays(starts, values, type=kind)
