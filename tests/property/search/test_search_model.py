"""Searches equal the plain model in every state a stream can be in."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from support.search_states import SearchStates, configured


def test_m1_r1_r3_q1_l3_search_equals_the_model_in_any_state() -> None:
    run_state_machine_as_test(SearchStates, settings=configured(200, 10))


@pytest.mark.nightly
def test_m1_r1_r3_q1_l3_search_equals_the_model_in_any_state_at_length() -> None:
    run_state_machine_as_test(SearchStates, settings=configured(10_000, 20))
