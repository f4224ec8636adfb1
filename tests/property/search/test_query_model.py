"""Every kind of query equals the plain model after every action: searches, filtered and keyed reads,
aggregates and the listing of keys, over one stream in any state.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from support.query_states import QueryStates
from support.search_states import configured


def test_m1_f1_a1_k1_k2_every_query_equals_the_model_in_any_state() -> None:
    run_state_machine_as_test(QueryStates, settings=configured(200, 8))


@pytest.mark.nightly
def test_m1_f1_a1_k1_k2_every_query_equals_the_model_in_any_state_at_length() -> None:
    run_state_machine_as_test(QueryStates, settings=configured(10_000, 20))
