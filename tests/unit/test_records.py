"""Records as values and back, on the quick way and on the slow one."""

from __future__ import annotations

import pytest

from tailrace.schema.record import dump_record, load_record

HALF = "\ud800"


@pytest.mark.parametrize("text", ["", HALF], ids=["quick", "escaped"])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_in_json_becomes_null(text: str, number: float) -> None:
    stored = dump_record({"text": text, "number": number, "others": [number, 1.5]})
    assert load_record(stored) == {"text": text, "number": None, "others": [None, 1.5]}


def test_half_a_surrogate_pair_comes_back_as_it_was_sent() -> None:
    assert load_record(dump_record({HALF: [HALF, "😀"]})) == {HALF: [HALF, "😀"]}
