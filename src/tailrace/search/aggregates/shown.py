"""Groups as JSON, many at a time: each column of numbers is written at once, and then cut into texts.

The bytes are those that `measures.Summary.shown` gives, group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from tailrace.search.aggregates.exact_sums import compute_averages
from tailrace.search.aggregates.measures import EXACT_INTEGER_MAX, PERCENTILES, round_sum
from tailrace.search.aggregates.sketch import nearest_rank
from tailrace.search.aggregates.spread import BucketArray, values_at_ranks
from tailrace.search.aggregates.summaries import SummaryArray
from tailrace.search.numpy_arrays import np
from tailrace.storage.segments.parquet import BINARY, pa, pc

_COMMA: Final = ord(",")
_END: Final = ord("}")
TextPiece = bytes | Any  # the same for all groups, or an Arrow array of one for each


def number_texts(numbers: Any) -> Any:
    """Each number as JSON, with a comma behind it."""
    if not len(numbers):
        return pa.array([], BINARY)
    text = bytearray(orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY))
    text[-1] = _COMMA
    return _split_texts(text, np.flatnonzero(np.frombuffer(text, np.uint8) == _COMMA) + 1, 1)


def _split_texts(text: bytes | bytearray, ends: Any, begin: int) -> Any:
    """A text cut into pieces, of which the first begins at `begin`."""
    offsets = np.empty(len(ends) + 1, np.int32)
    offsets[0] = begin
    offsets[1:] = ends
    return pa.Array.from_buffers(BINARY, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def join_texts(pieces: Sequence[TextPiece]) -> Any:
    """The pieces of each group as one text."""
    scalars = [pa.scalar(piece, BINARY) if isinstance(piece, bytes) else piece for piece in pieces]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", BINARY))


def measure_texts(counts: Mapping[str, Any], summaries: Mapping[str, SummaryArray], rows: int) -> Any:
    """All measures of each group as one object, in the order of their names."""
    parts: list[TextPiece] = [b"{"]
    for index, name in enumerate(sorted([*counts, *summaries])):
        parts.append(b"%b%b:" % (b"," if index else b"", orjson.dumps(name)))
        parts += count_pieces(counts[name]) if name in counts else summary_pieces(summaries[name])
    parts.append(b"}")
    return join_texts(_merge_constants(parts)) if len(parts) > 2 else pa.array([b"{}"] * rows, BINARY)


def _merge_constants(parts: Sequence[TextPiece]) -> list[TextPiece]:
    """The same with constant pieces that follow each other as one."""
    found: list[TextPiece] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += part
        else:
            found.append(part)
    return found


def count_pieces(counts: Any) -> list[TextPiece]:
    return [b'{"count":', _without_comma(number_texts(counts)), b"}"]


def _without_comma(texts: Any) -> Any:
    return pc.binary_slice(texts, 0, -1)


def summary_pieces(found: SummaryArray) -> list[TextPiece]:
    """A summary without numbers has neither edges nor percentiles."""
    is_empty = found.counts == 0
    counts = np.maximum(found.counts, 1)
    least, most = (np.where(is_empty, 0, edge) for edge in (found.smallest, found.largest))
    smallest, largest = (_or_null(number_texts(edge), is_empty) for edge in (least, most))
    pieces: list[TextPiece] = [b'{"count":', number_texts(found.counts), b'"sum":', _sum_texts(found)]
    pieces += [b'"min":', smallest, b'"max":', largest]
    pieces += [b'"avg":', _or_null(number_texts(compute_averages(found.sums, counts)), is_empty)]
    for name, share in PERCENTILES:
        values = values_at_ranks(found.sketch, _ranks(share, counts))
        texts = pc.if_else(_less(values, least), smallest, number_texts(values))
        texts = pc.if_else(_less(most, values), largest, texts)
        pieces += [b'"%b":' % name.encode(), _or_null(texts, is_empty)]
    if found.histogram is None:
        pieces[-1] = _without_comma(pieces[-1])
        return [*pieces, b"}"]
    return [*pieces, b'"histogram":', _histogram_texts(found.histogram), b"}"]


def _less(one: Any, other: Any) -> Any:
    """Compares doubles and integers as what they are: not all integers are doubles."""
    if all(_are_doubles(numbers) for numbers in (one, other)):
        return one < other
    return (one.astype(object) < other.astype(object)).astype(bool)


def _are_doubles(numbers: Any) -> bool:
    return numbers.dtype != np.int64 or bool(
        ((numbers > -EXACT_INTEGER_MAX) & (numbers < EXACT_INTEGER_MAX)).all()
    )


def _or_null(texts: Any, is_null: Any) -> Any:
    return pc.if_else(is_null, pa.scalar(b"null,", BINARY), texts) if is_null.any() else texts


def _ranks(share: float, counts: Any) -> Any:
    percent = round(share * 100)
    if int(counts.max(initial=0)) < 1 << 50:
        return np.maximum(1, -(-percent * counts // 100))
    return np.array([nearest_rank(share, count) for count in counts.tolist()])


def _sum_texts(found: SummaryArray) -> Any:
    """The nearest doubles; integers as they are, as long as doubles have them all."""
    sums = found.sums
    is_whole = (np.abs(sums.nearest) <= EXACT_INTEGER_MAX) & (sums.rests == 0)
    texts = number_texts(sums.nearest)
    if found.whole:
        wholes = np.where(is_whole, sums.nearest, 0).astype(np.int64)
        texts = pc.if_else(is_whole, number_texts(wholes), texts)
    if sums.beyond:
        listed = texts.to_pylist()
        for row, total in sums.beyond.items():
            listed[row] = orjson.dumps(round_sum(total, found.whole)) + b","
        texts = pa.array(listed, BINARY)
    return texts


def _histogram_texts(histogram: BucketArray) -> Any:
    """`{"1":2,"4":1}`: the comma behind the last count of a row becomes the end of it."""
    starts = histogram.starts
    sizes = np.diff(starts)
    if not len(histogram.codes):
        return pa.array([b"{}"] * len(sizes), BINARY)
    labels = [b'"%d":' % (1 << exponent) for exponent in range(int(histogram.codes.max()) + 1)]
    both = pa.array([*labels, *(b"{" + label for label in labels)], BINARY)
    is_first = np.zeros(len(histogram.codes), bool)
    is_first[starts[:-1][sizes > 0]] = True
    entries = join_texts(
        [both.take(pa.array(histogram.codes + is_first * len(labels))), number_texts(histogram.counts)]
    )
    offsets = np.frombuffer(entries.buffers()[1], np.int32, len(entries) + 1)
    text = bytearray(entries.buffers()[2])
    np.frombuffer(text, np.uint8)[offsets[starts[1:][sizes > 0]] - 1] = _END
    found = _split_texts(text, offsets[starts[1:]], int(offsets[0]))
    return found if sizes.all() else pc.if_else(sizes == 0, pa.scalar(b"{}", BINARY), found)
