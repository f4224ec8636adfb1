"""What scans count without taking texts apart is what the columns would have said."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.queries import CONFIG, LEAVES
from tailrace.query.bind import bind_query
from tailrace.query.column_build import column_from
from tailrace.query.dialect import SEARCH
from tailrace.query.search_request import SearchRequest
from tailrace.query.sort import parse_sort
from tailrace.query.tally import bounds_of, tally_needles, text_counts

MESSAGE, AT = CONFIG.fields["message"], CONFIG.fields["at"]

words = st.text(st.sampled_from("ab9_ -.\n\té😀İ\u212a\ud800"), max_size=12)
times = st.sampled_from(
    [
        "2026-01-01T00:00:00.000Z",
        "2026-01-01T23:59:59.999Z",
        "2025-12-31T00:00:00.001Z",
        "2026-02-30T00:00:00.000Z",
        "0000-01-01T00:00:00.000Z",
    ]
)


@given(st.lists(words | st.sampled_from(LEAVES), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_texts_are_counted_as_columns_count_them(found: list[Any]) -> None:
    counts = text_counts(found)
    if counts is None:
        assert any(isinstance(leaf, list) for leaf in found)
        return
    column = column_from(MESSAGE, found)
    assert counts == (column.documents, column.tokens)


@given(st.lists(times, min_size=1, max_size=6) | st.lists(times | st.sampled_from(LEAVES), min_size=1))
@settings(max_examples=300, deadline=None)
def test_times_reach_as_far_as_columns_say(found: list[Any]) -> None:
    terms = column_from(AT, found).terms
    assert bounds_of(AT, found) == ((terms[0], terms[len(terms) - 1]) if len(terms) else None)


def needles(q: str) -> Any:
    query = bind_query(q, CONFIG, SEARCH)
    return tally_needles(SearchRequest(query, 10, parse_sort(None, query, CONFIG), None, 100), CONFIG)


def test_a_row_is_passed_over_if_it_neither_matches_nor_has_a_word_that_weighs() -> None:
    both = needles("message:checkout message:failed id:X")
    assert both.may_match(b'{"message":"CHECKOUT","id":"zz"}'), "its word counts, although it does not match"
    assert both.may_match(b'{"message":"has failed"}')
    assert needles("message:checkout OR id:Xy").may_match(b'{"id":"XY"}'), "case is one for all needles"
    assert both.may_match(b'{"message":"\\u0063heckout"}')
    assert not both.may_match(b'{"message":"fine","id":"x y"}')


def test_words_that_cannot_be_looked_for_are_not() -> None:
    assert needles("message:straße") is None
    assert needles("status:>5") is None
    assert needles("id:Xy") is None, "nothing weighs"
    assert needles("message:checkout OR has:id") is None
    assert needles(" OR ".join(f"id:x{n}" for n in range(9))) is None
