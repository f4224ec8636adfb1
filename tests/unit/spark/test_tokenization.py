"""Tokens of many texts at once are those of one text after the other."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.search.records import TOKEN_BYTES_MAX, tokenize_text
from tailrace.spark.index.full_text import tokenize_column

WORDS = st.text(st.sampled_from("aZ09 _-.\0\t/"), max_size=12)


@example(["", ""], 0)
@example(["one", "two"], 0)  # the end of a text ends its last token
@example(["x" * TOKEN_BYTES_MAX + "y", "z"], 0)
@example(["ΑΣ", "Σ", "İ", "ASCII too"], 1)
@given(st.lists(WORDS | st.text(max_size=8), max_size=12), st.integers(0, 3))
def test_tokens_in_is_tokens_of_each(texts: list[str], skipped: int) -> None:
    values = pa.array(["before"] * skipped + texts, pa.string()).slice(skipped)
    tokens, counts = tokenize_column(values)
    assert tokens.to_pylist() == [token for text in texts for token in tokenize_text(text)]
    assert counts.tolist() == [len(tokenize_text(text)) for text in texts]


@pytest.mark.parametrize("code", range(128))
def test_every_character_of_ascii(code: int) -> None:
    text = f"a{chr(code)}B"
    tokens, _ = tokenize_column(pa.array([text], pa.string()))
    assert tokens.to_pylist() == tokenize_text(text)
