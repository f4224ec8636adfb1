"""Records as values and back, on the quick way and on the slow one."""

from __future__ import annotations

import pytest

from tailrace.schema.json_values import decode_json_record, encode_json_record

HALF = "\ud800"


@pytest.mark.parametrize("text", ["", HALF], ids=["quick", "escaped"])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_in_json_becomes_null(text: str, number: float) -> None:
    stored = encode_json_record({"text": text, "number": number, "others": [number, 1.5]})
    assert decode_json_record(stored) == {"text": text, "number": None, "others": [None, 1.5]}


def test_half_a_surrogate_pair_comes_back_as_it_was_sent() -> None:
    assert decode_json_record(encode_json_record({HALF: [HALF, "😀"]})) == {HALF: [HALF, "😀"]}
