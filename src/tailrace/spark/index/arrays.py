"""Arrow and numpy as the kernels use them. Neither has annotations: this is where typing stops."""

from __future__ import annotations

from typing import Any, Final

import numpy

from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa, pc, pq

__all__ = [
    "BINARY",
    "BOOL",
    "DOUBLE",
    "INT32",
    "INT64",
    "INT64_LIST",
    "STRING",
    "argsort_bytes",
    "build_list_array",
    "expand_spans",
    "from_numpy",
    "list_type",
    "np",
    "offsets_from_counts",
    "pa",
    "pc",
    "pq",
    "stable_argsort",
    "to_numpy",
]

np: Any = numpy

BOOL: Final = pa.bool_()
DOUBLE: Final = pa.float64()

_WORD_BYTES: Final = 8
_LIBRARY_SORT_MAX: Final = 256  # values that are sorted at once by the library
_WORDS_MAX: Final = 4  # of a value, that are compared; what is the same in all of them has more in common yet
# By how many bytes there are of a word, what is kept of it.
_WORD_MASKS: Final = np.array([((1 << 64) - 1) ^ ((1 << 64 - 8 * size) - 1) for size in range(9)], np.uint64)


def list_type(kind: Any, *, nullable: bool = False) -> Any:
    return pa.list_(pa.field("element", kind, nullable=nullable))


INT64_LIST: Final = list_type(INT64)


def to_numpy(array: Any) -> Any:
    """An Arrow array of numbers without nulls."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.to_numpy(zero_copy_only=False)


def from_numpy(numbers: Any, kind: Any) -> Any:
    """Numbers of the width of `kind`, as they are."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def offsets_from_counts(counts: Any) -> Any:
    """Where each of some runs begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def expand_spans(starts: Any, counts: Any) -> Any:
    """The numbers from each start on, as many as are wanted there, one span behind the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def stable_argsort(ranks: Any, bound: int) -> Any:
    """The places of numbers from 0 to below `bound`, ascending; equal ones stay as they are."""
    # Short numbers are sorted by their digits, which takes a fraction of the time.
    return np.argsort(ranks.astype(np.uint16) if bound <= 1 << 16 else ranks, kind="stable")


def argsort_bytes(values: Any) -> Any:
    """The places of different texts or bytes, ascending as bytes do.

    They are compared by eight bytes as one number, from where they begin to differ; where these are the same,
    by the next eight. What is still the same is left to the library, which takes many times as long.
    """
    count = len(values)
    if count < _LIBRARY_SORT_MAX:
        return to_numpy(pc.sort_indices(values)).astype(np.int64)
    _, starts, data = values.buffers()
    edges = np.frombuffer(starts, np.int32)[values.offset : values.offset + count + 1].astype(np.int64)
    held = np.zeros(edges[-1] + _WORD_BYTES, np.uint8)  # a word may begin at the very end
    if data is not None:
        held[: edges[-1]] = np.frombuffer(data, np.uint8)[: edges[-1]]
    firsts = edges[:-1] + _common_prefix_bytes(values)
    words = _load_words(held, firsts, edges[1:])
    order = np.argsort(words)
    same = np.append(words[order[1:]] == words[order[:-1]], False)  # as the next one
    for word in range(1, _WORDS_MAX):
        tied = _tied_places(same)
        if len(tied) < _LIBRARY_SORT_MAX:
            break
        places = order[tied]
        words = _load_words(held, firsts[places] + word * _WORD_BYTES, edges[1:][places])
        within = np.lexsort([words, offsets_from_counts(~same)[tied]])
        order[tied], words = places[within], words[within]
        same[tied[:-1]] &= words[1:] == words[:-1]
    tied = _tied_places(same)
    if len(tied):
        places = np.sort(order[tied])
        order[tied] = places[to_numpy(pc.sort_indices(values.take(pa.array(places))))]
    return order


def _tied_places(same: Any) -> Any:
    """Where something is the same as the next one, or as the one before."""
    either = same.copy()
    either[1:] |= same[:-1]
    return np.flatnonzero(either)


def _common_prefix_bytes(values: Any) -> int:
    """With how many bytes all values begin: the smallest and the largest one do."""
    edges = pc.min_max(values.cast(BINARY)).as_py()
    low, high = edges["min"], edges["max"]
    return next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))


def _load_words(held: Any, firsts: Any, ends: Any) -> Any:
    """Eight bytes of each value from some place on as a number; zeros where it has fewer."""
    firsts = np.minimum(firsts, ends)
    everywhere = np.ndarray(len(held) - _WORD_BYTES + 1, ">u8", held, strides=(1,))
    return everywhere[firsts].astype(np.uint64) & _WORD_MASKS[np.minimum(ends - firsts, _WORD_BYTES)]


def build_list_array(kind: Any, offsets: Any, values: Any) -> Any:
    """A list column over flat values."""
    starts = pa.array(offsets.astype(np.int32), INT32)
    return pa.ListArray.from_arrays(starts, values, type=kind)
