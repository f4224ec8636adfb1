"""Values and sums of companion files: they come back as they were, and bytes compare as values do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.search.aggregates.measures import exact_sum
from tailrace.search.index_files.format import (
    decode_sum,
    decode_value,
    encode_sum,
    encode_value,
    index_file_key,
    is_truncated,
    key_hash,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(INT64, INT64)
def test_integers_compare_as_bytes(one: int, other: int) -> None:
    assert (encode_value(one) < encode_value(other)) == (one < other)
    assert decode_value(encode_value(one), "integer") == one


@given(FLOATS, FLOATS)
def test_floats_compare_as_bytes(one: float, other: float) -> None:
    assert (encode_value(one) < encode_value(other)) == (one < other)
    assert decode_value(encode_value(one), "float") == one


@given(TEXTS, TEXTS)
def test_texts_compare_as_code_points(one: str, other: str) -> None:
    assert (encode_value(one) < encode_value(other)) == (one < other)
    assert decode_value(encode_value(one), "keyword") == one


def test_truth_values() -> None:
    assert [decode_value(encode_value(value), "bool") for value in (True, False)] == [True, False]


def test_long_texts_are_cut_and_stay_apart() -> None:
    whole, one, other = "x" * 1024, "x" * 1025, "x" * 1024 + "y"
    assert not is_truncated(encode_value(whole))
    assert is_truncated(encode_value(one))
    assert len({encode_value(text) for text in (whole, one, other)}) == 3
    assert len(encode_value("é" * 1_000_000)) == 1024 + 16


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_sums_are_exact(numbers: list[float]) -> None:
    total = exact_sum(numbers)
    assert decode_sum(encode_sum(total)) == total


@given(INT64)
def test_sums_of_integers(number: int) -> None:
    assert decode_sum(encode_sum(number << 1074)) == number << 1074


def test_names() -> None:
    name = index_file_key("sha256:" + "ab" * 32, "fts", 1, 9, "cd" * 32)
    assert name == (
        "companions/abababababababab/fts/00000000000000000001-00000000000000000009.cdcdcdcdcdcdcdcd.zip"
    )
    assert -(2**63) <= key_hash(b"some key") < 2**63
