"""Phrases and the starts of keywords, answered from the table of terms."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.companions import STREAM_ID, Stored, build, plan_of

from tailrace.schema.registry import Registry
from tailrace.schema.search_config import Binding, Field, SearchConfig
from tailrace.search.index_files.file_cache import LoadedContent, UnusableFileError
from tailrace.search.index_files.full_text import FullTextFile
from tailrace.search.records import tokenize_text

FIELDS = {
    "message": Field(kind="text", bindings=(Binding(0, "/message"),), positions=True),
    "note": Field(kind="text", bindings=(Binding(0, "/note"),)),
    "city": Field(kind="keyword", bindings=(Binding(0, "/city"),), prefix=True),
}
PLAN = plan_of(Registry(name="s", search=SearchConfig(fields=FIELDS)))
TEXTS = st.lists(st.text(st.sampled_from("ab "), max_size=9), max_size=3)
PHRASES = st.lists(st.sampled_from(["a", "b", "ab", "none"]), min_size=2, max_size=4)


def _split(records: Sequence[dict[str, Any]]) -> bytes:
    rows = [Stored(entry, msgspec.json.encode(record)) for entry, record in enumerate(records, 11)]
    return build(rows, PLAN, families=["fts"])["fts"].data


def _opened(data: bytes, count: int) -> FullTextFile:
    return FullTextFile(LoadedContent(data), STREAM_ID, 11, 10 + count)


def _has(texts: Sequence[str], phrase: Sequence[str]) -> bool:
    tokens = map(tokenize_text, texts)
    return any(one[at : at + len(phrase)] == phrase for one in tokens for at in range(len(one)))


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=12), st.lists(PHRASES, min_size=1, max_size=6))
def test_a_phrase_is_where_its_tokens_follow_each_other(
    messages: list[list[str]], phrases: list[list[str]]
) -> None:
    file = _opened(_split([{"message": texts} for texts in messages]), len(messages))
    for phrase in phrases:
        expected = [entry for entry, texts in enumerate(messages, 11) if _has(texts, phrase)]
        assert file.phrase("message", phrase).tolist() == expected


def test_without_positions_nobody_can_tell() -> None:
    assert _opened(_split([{"note": "one two"}]), 1).phrase("note", ["one", "two"]) is None


def test_keywords_by_their_start() -> None:
    cities = ["Rome", "Rotterdam", ["Oslo", "Rostock"], "é" * 2000, None]
    file = _opened(_split([{"city": city} for city in cities]), len(cities))
    assert file.keyword_prefix("city", "Ro").tolist() == [11, 12, 13]
    assert file.keyword_prefix("city", "Ros").tolist() == [13]
    assert file.keyword_prefix("city", "é" * 500).tolist() == [14]
    assert file.keyword_prefix("city", "é" * 512) is None  # what was cut may go on differently
    assert file.keyword_prefix("message", "a") is None


@pytest.mark.parametrize(("form", "whose"), [("1", "an older"), ("3", "a newer")])
def test_splits_of_other_formats_are_not_read(form: str, whose: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_split([{"message": "one two", "city": "Rome"}]))) as stored:
        facts = msgspec.json.decode(stored.read("split.json"))
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("split.json", msgspec.json.encode(facts | {"companion_format": form}))
            archive.writestr("terms.parquet", stored.read("terms.parquet"))
    with pytest.raises(UnusableFileError, match=f"fts file has format {form}, of {whose} version"):
        _opened(out.getvalue(), 1)
