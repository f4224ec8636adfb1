"""How far times reach is told without a column of them, and is what the column would have said."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.queries import CONFIG, LEAVES
from tailrace.search.columns import build_column
from tailrace.search.scan import value_bounds

AT = CONFIG.fields["at"]

times = st.sampled_from(
    [
        "2026-01-01T00:00:00.000Z",
        "2026-01-01T23:59:59.999Z",
        "2025-12-31T00:00:00.001Z",
        "2026-02-30T00:00:00.000Z",
        "0000-01-01T00:00:00.000Z",
    ]
)


@given(st.lists(times, min_size=1, max_size=6) | st.lists(times | st.sampled_from(LEAVES), min_size=1))
@settings(max_examples=300, deadline=None)
def test_times_reach_as_far_as_columns_say(found: list[Any]) -> None:
    terms = build_column(AT, found).terms
    assert value_bounds(AT, found) == ((terms[0], terms[len(terms) - 1]) if len(terms) else None)
