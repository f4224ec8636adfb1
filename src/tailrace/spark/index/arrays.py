"""Arrow and numpy helpers of the index builders. Neither library has annotations: both are `Any` here."""

from __future__ import annotations

from typing import Any, Final

import numpy

from tailrace.storage.segments.parquet import BINARY, INT32, INT64, pa, pc

np: Any = numpy

BOOL: Final = pa.bool_()
DOUBLE: Final = pa.float64()

_WORD_BYTES: Final = 8
_LIBRARY_SORT_MAX: Final = 256  # fewer values are sorted by Arrow
_WORDS_MAX: Final = 4  # words of a value that are compared before the rest is left to Arrow
# By the number of valid bytes in a word, the mask of these bytes.
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
    """An Arrow array over the buffer of a numpy array, whose item size is that of `kind`."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def offsets_from_counts(counts: Any) -> Any:
    """The start of each run, and the end of the last one."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def expand_spans(starts: Any, counts: Any) -> Any:
    """The concatenated ranges `start .. start + count - 1`."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def stable_argsort(ranks: Any, bound: int) -> Any:
    """Stable argsort of integers in `0 .. bound - 1`."""
    # numpy sorts 16-bit integers by radix, in a fraction of the time.
    return np.argsort(ranks.astype(np.uint16) if bound <= 1 << 16 else ranks, kind="stable")


def argsort_bytes(values: Any) -> Any:
    """Argsort of distinct texts or byte strings, in byte order.

    Compares eight bytes as one integer, starting after the common prefix, and the next eight bytes where
    these are equal. Remaining ties are sorted by Arrow, which is many times slower.
    """
    count = len(values)
    if count < _LIBRARY_SORT_MAX:
        return to_numpy(pc.sort_indices(values)).astype(np.int64)
    _, starts, data = values.buffers()
    edges = np.frombuffer(starts, np.int32)[values.offset : values.offset + count + 1].astype(np.int64)
    padded = np.zeros(edges[-1] + _WORD_BYTES, np.uint8)  # padded: a word may start at the end
    if data is not None:
        padded[: edges[-1]] = np.frombuffer(data, np.uint8)[: edges[-1]]
    firsts = edges[:-1] + _common_prefix_bytes(values)
    words = _load_words(padded, firsts, edges[1:])
    order = np.argsort(words)
    same = np.append(words[order[1:]] == words[order[:-1]], False)  # equal to the next one
    for word in range(1, _WORDS_MAX):
        tied = _tied_places(same)
        if len(tied) < _LIBRARY_SORT_MAX:
            break
        places = order[tied]
        words = _load_words(padded, firsts[places] + word * _WORD_BYTES, edges[1:][places])
        within = np.lexsort([words, offsets_from_counts(~same)[tied]])
        order[tied], words = places[within], words[within]
        same[tied[:-1]] &= words[1:] == words[:-1]
    tied = _tied_places(same)
    if len(tied):
        places = np.sort(order[tied])
        order[tied] = places[to_numpy(pc.sort_indices(values.take(pa.array(places))))]
    return order


def _tied_places(same: Any) -> Any:
    """The indices that are equal to the next or to the previous one."""
    either = same.copy()
    either[1:] |= same[:-1]
    return np.flatnonzero(either)


def _common_prefix_bytes(values: Any) -> int:
    """The length of the common prefix: that of the smallest and the largest value."""
    edges = pc.min_max(values.cast(BINARY)).as_py()
    low, high = edges["min"], edges["max"]
    return next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))


def _load_words(padded: Any, firsts: Any, ends: Any) -> Any:
    """Eight bytes of each value as a big-endian integer, padded with zeros."""
    firsts = np.minimum(firsts, ends)
    everywhere = np.ndarray(len(padded) - _WORD_BYTES + 1, ">u8", padded, strides=(1,))
    return everywhere[firsts].astype(np.uint64) & _WORD_MASKS[np.minimum(ends - firsts, _WORD_BYTES)]


def build_list_array(kind: Any, offsets: Any, values: Any) -> Any:
    """A list column over flat values."""
    starts = pa.array(offsets.astype(np.int32), INT32)
    return pa.ListArray.from_arrays(starts, values, type=kind)
