"""Texts and bytes are sorted as the library sorts them, whatever they have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.spark.index.arrays import argsort_bytes
from tailrace.storage.segments.parquet import BINARY, STRING, pa

# Values that differ behind eight bytes only, or by zeros at the end.
_PIECES = st.sampled_from([b"", b"\0", b"a", b"b", b"abcdefgh", b"\xff"])
_VALUES = st.lists(_PIECES, max_size=6).map(b"".join)


@given(st.sets(_VALUES, max_size=12), st.sampled_from([b"", b"req_", b"12345678"]), st.integers(0, 3))
def test_as_bytes_compare(some: set[bytes], before: bytes, skipped: int) -> None:
    many = {b"%04d" % number for number in range(300)}
    values = [before + value for value in sorted(some | many, key=hash)]
    array = pa.array(values, BINARY).slice(skipped)
    assert [values[skipped:][at] for at in argsort_bytes(array).tolist()] == sorted(values[skipped:])


@given(st.sets(st.text(max_size=12), min_size=300, max_size=320))
def test_texts_are_sorted_by_their_bytes(texts: set[str]) -> None:
    values = sorted(texts, key=hash)
    found = [values[at] for at in argsort_bytes(pa.array(values, STRING)).tolist()]
    assert found == sorted(texts, key=str.encode)


def test_one_value_that_is_empty_among_many() -> None:
    values = [b"", *(b"%08d" % number for number in range(400, 0, -1))]
    assert [values[at] for at in argsort_bytes(pa.array(values, BINARY)).tolist()] == sorted(values)


@given(st.permutations([b"", b"\0", b"/", b"/api/v1/", b"/api/v1/orders/", b"\xff" * 9]), st.integers(1, 40))
def test_many_that_begin_alike(pieces: list[bytes], apart: int) -> None:
    """More than are left to the library, the very first ones among them."""
    ends = [b"%0*d" % (apart, number) for number in range(260)]
    values = sorted(
        {piece + other + end for piece in pieces for other in pieces[:2] for end in ends}, key=hash
    )
    assert [values[at] for at in argsort_bytes(pa.array(values, BINARY)).tolist()] == sorted(values)
