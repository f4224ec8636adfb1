"""Answers are the same with every subset of families, whatever happens to them: built under one plan or
another, for some segments or all, taken off the list, damaged or lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis.stateful import run_state_machine_as_test

from support.family_states import FamilyStates
from support.search_model import registry_of
from support.search_states import configured
from tailrace.search.collector import SearchResult
from tailrace.search.index_files.catalogue import RoutingKeyIndex
from tailrace.search.index_files.format import FAMILIES
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchParameters, bind_search

NOON = 1767225600000


def test_p8_r1_r3_q1_l3_f1_a1_k1_k2_answers_are_the_same_with_every_subset_of_families() -> None:
    run_state_machine_as_test(FamilyStates, settings=configured(60, 10))


@pytest.mark.nightly
def test_p8_r1_r3_q1_l3_f1_a1_k1_k2_answers_are_the_same_with_every_subset_of_families_at_length() -> None:
    run_state_machine_as_test(FamilyStates, settings=configured(3000, 30))


TEXTS = [
    "checkout failed",
    "checkout failed and again checkout failed",
    "failed checkout",
    "all is well that failed in the end",
    "checkout x failed checkout failed " * 3,
    "fine",
]


@pytest.fixture
def states() -> Iterator[FamilyStates]:
    """Segments with all families, and ten rows behind them that are in memory alone."""
    made = FamilyStates()
    rows = [
        {"id": f"r{n}", "service": f"s{n % 3}", "status": n % 7, "at": NOON + n * 1000}
        | {"message": TEXTS[(n * n + n // 5) % len(TEXTS)] + " z" * (n % 11)}
        for n in range(150)
    ]
    made.begin(0, 16, 10_000, [rows[:50], rows[50:100], rows[100:140]], FAMILIES)
    made.build(FAMILIES, newest_only=False, before=False, with_rollups=False)
    made.append(rows[140:], True)
    yield made
    made.teardown()


def asked(
    states: FamilyStates, text: str, size: int, sort: list[str] | None, *, families: bool
) -> SearchResult:
    view = RecordView(registry_of())
    states.searcher.catalogue = states.catalogue if families else None
    return states.run(view, bind_search(SearchParameters(text, size, sort, None, None), view.config, 3000))


SCORED = [
    "failed",
    '"checkout failed"',
    'message:"failed checkout" OR well',
    '"checkout failed" status:>2',
    "-well message:failed",
    "checkout failed",
    "message:check*",
]


def test_r6_p8_scores_are_those_of_scans_to_the_last_digit(states: FamilyStates) -> None:
    sorts = (None, ["at:asc"], ["_score:asc", "id:desc"])
    for text, size, sort in product(SCORED, (3, 40), sorts):
        found = asked(states, text, size, sort, families=True)
        plain = asked(states, text, size, sort, families=False)
        assert [(hit.entry, hit.score, hit.values) for hit in found.hits] == [
            (hit.entry, hit.score, hit.values) for hit in plain.hits
        ]
        assert (found.matches, found.primary_max) == (plain.matches, plain.primary_max)
        assert "fts" in found.counters.families


def test_p8_scores_are_the_same_after_splits_were_merged(states: FamilyStates) -> None:
    before = [asked(states, text, 10, None, families=True) for text in SCORED]
    states.families.merge_splits(states.stream, 3)
    for text, earlier in zip(SCORED, before, strict=True):
        found = asked(states, text, 10, None, families=True)
        assert [hit[:3] for hit in found.hits] == [hit[:3] for hit in earlier.hits]
        assert found.matches == earlier.matches
        assert found.counters.indexed_segments == earlier.counters.indexed_segments


def test_what_companions_decide_is_not_decoded(states: FamilyStates) -> None:
    """The rows in memory are."""
    for text, families in (
        ("id:r77", {"exact"}),
        ("status:>3 service:s1", {"exact", "col"}),
        ("id:r7*", {"col"}),
        ("has:message -status:2", {"fts", "exact"}),
        (f"at:<{NOON + 3000}", {"col"}),
    ):
        found = asked(states, text, 10, ["offset:desc"], families=True)
        assert found.counters.decoded <= 10, text
        assert found.counters.families == families, text
        assert found.counters.indexed_segments == len(states.segments_of(states.stream.number))
        assert found.complete


def test_k2_a_key_is_looked_for_in_the_index_first(states: FamilyStates) -> None:
    history = states.real.log.reader.history
    assert isinstance(history.keys, RoutingKeyIndex)
    page = states.real.read(states.stream, 0, 1 << 20, 10_000, b"nobody", apart=True)
    assert (page.count, history.keys.lookups) == (0, 1)
