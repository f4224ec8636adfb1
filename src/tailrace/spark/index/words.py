"""Texts into tokens, many at once. What a token is, only `query.analyze` decides."""

from __future__ import annotations

from typing import Any, Final

from tailrace.search.records import TOKEN_BYTES_MAX, tokenize_text
from tailrace.spark.index.arrays import expand_spans, np, offsets_from_counts, to_numpy
from tailrace.storage.segments.parquet import STRING, pa, pc

# Each byte of ASCII as it is in a token; 0 where there is none.
_ASCII_TOKEN_BYTES: Final = np.array(
    [ord(chr(at).lower()) if chr(at).isalnum() else 0 for at in range(128)], np.uint8
)


def tokenize_column(values: Any) -> tuple[Any, Any]:
    """The tokens of texts, one behind the other, and how many each text has."""
    is_ascii = pc.string_is_ascii(values)
    if not pc.any(is_ascii, min_count=0).as_py():
        return _tokenize_distinct(values)
    tokens, counts = _tokenize_ascii(values.filter(is_ascii))
    if len(tokens) and pc.max(pc.binary_length(tokens)).as_py() > TOKEN_BYTES_MAX:
        return _tokenize_distinct(values)
    marks = to_numpy(is_ascii)
    if marks.all():
        return tokens, counts
    return _interleave_tokens(marks, (tokens, counts), _tokenize_distinct(values.filter(pc.invert(is_ascii))))


def _interleave_tokens(marks: Any, marked: tuple[Any, Any], others: tuple[Any, Any]) -> tuple[Any, Any]:
    """Tokens of marked texts and of the others, in the order of the texts."""
    counts = np.empty(len(marks), np.int64)
    counts[marks], counts[~marks] = marked[1], others[1]
    starts = np.empty(len(marks), np.int64)
    starts[marks] = offsets_from_counts(marked[1])[:-1]
    starts[~marks] = offsets_from_counts(others[1])[:-1] + len(marked[0])
    encoded = pa.concat_arrays([marked[0], others[0]]).dictionary_encode()
    return encoded.take(pa.array(expand_spans(starts, counts))), counts


def _tokenize_ascii(values: Any) -> tuple[Any, Any]:
    """Letters and digits are the same in ASCII whoever is asked, and so is lower case."""
    _, starts, data = values.buffers()
    edges = np.frombuffer(starts, np.int32)[values.offset : values.offset + len(values) + 1]
    held = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]] if data is not None else np.zeros(0, np.uint8)
    edges = edges - edges[0]
    letters = _ASCII_TOKEN_BYTES[held]
    inside = letters != 0
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    texts = edges[:-1][edges[:-1] < len(held)]
    begins[texts] = inside[texts]
    at = np.flatnonzero(begins)
    kept = letters[inside]
    offsets = np.append(np.cumsum(inside)[at] - 1, len(kept)).astype(np.int32)
    tokens = pa.Array.from_buffers(STRING, len(at), [None, pa.py_buffer(offsets), pa.py_buffer(kept)])
    return tokens, np.diff(np.searchsorted(at, edges))


def _tokenize_distinct(values: Any) -> tuple[Any, Any]:
    """The reference function, once for each different text."""
    encoded = values.dictionary_encode()
    found = [tokenize_text(text) for text in encoded.dictionary.to_pylist()]
    counts = np.fromiter(map(len, found), np.int64, len(found))
    flat = pa.array([token for tokens in found for token in tokens], STRING)
    which = to_numpy(encoded.indices)
    return flat.take(pa.array(expand_spans(offsets_from_counts(counts)[which], counts[which]))), counts[which]
