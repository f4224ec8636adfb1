"""The value function, against the vectors that every runtime has to agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.schema.json_values import UnreadableRecordError, decode_payload
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.records import (
    TOKEN_BYTES_MAX,
    FieldExtractor,
    RecordView,
    field_values,
    flatten_leaves,
    to_string,
    tokenize_text,
)

CORPUS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "corpus" / "values" / "vectors.json").read_text(encoding="utf-8")
)
CONFIG = parse_search_config({"fields": CORPUS["fields"]})


@pytest.mark.parametrize("vector", CORPUS["vectors"], ids=lambda vector: vector["payload"][:40])
def test_v1_values_are_those_of_the_shared_vectors(vector: dict[str, Any]) -> None:
    record = decode_payload(vector["payload"].encode())
    found = {name: field_values(record, field, CORPUS["version"]) for name, field in CONFIG.fields.items()}
    some = {name: values for name, values in found.items() if values}
    # Compared as JSON, so that 1, 1.0 and true are three different things.
    assert json.dumps(some, sort_keys=True) == json.dumps(vector["values"], sort_keys=True)
    if "tokens" in vector:
        assert [tokenize_text(str(value)) for value in found["text"]] == vector["tokens"]


def test_v1_the_extractor_of_scans_and_indexes_gives_the_same_values() -> None:
    registry = Registry(
        name="s", version=CORPUS["version"], search=CONFIG, boundaries=(VersionBoundary(0, 2),)
    )
    names = list(CONFIG.fields)
    extractor = FieldExtractor(RecordView(registry), names)
    for vector in CORPUS["vectors"]:
        row = extractor.row(1, vector["payload"].encode())
        some = {name: list(values) for name, values in zip(names, row, strict=True) if values}
        assert json.dumps(some, sort_keys=True) == json.dumps(vector["values"], sort_keys=True)


def test_long_tokens_are_cut_at_whole_characters() -> None:
    assert tokenize_text("x" * 2000) == ["x" * TOKEN_BYTES_MAX]
    assert tokenize_text("x" + "é" * 2000) == ["x" + "é" * 511]
    assert tokenize_text("😀" * 300 + "𝔘" * 300) == ["𝔘" * 256]
    assert tokenize_text("y" * 1024 + " " + "z" * 1025) == ["y" * 1024, "z" * 1024]


def test_arrays_of_any_depth_are_flattened_in_order() -> None:
    deep: Any = "x"
    for number in range(500):
        deep = [number, deep]
    assert flatten_leaves(deep) == [*range(499, -1, -1), "x"]
    assert decode_payload(b"[" * 500 + b"1" + b"]" * 500) is not None


@pytest.mark.parametrize("payload", [b"", b"{", b"nul", b"NaN", b'{"a":Infinity}', b"[" * 5000, b'"\xff"'])
def test_what_is_no_json_is_unreadable(payload: bytes) -> None:
    with pytest.raises(UnreadableRecordError):
        decode_payload(payload)


def test_half_a_surrogate_pair_counts_as_the_replacement_character() -> None:
    assert to_string("a\ud800") == "a�"
    assert decode_payload(rb'["\ud83d\ude00", "\ud83d", 1e999]') == ["😀", "�", float("inf")]
