"""The pauses between retries stay within their bounds, whatever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.backoff import Backoff, backoff_delay

seconds = st.floats(0.001, 10_000)


@given(st.integers(1, 10**9), seconds, seconds, st.floats(1, 10), st.floats(0, 1))
def test_a_delay_is_within_its_bounds(
    failures: int, first: float, longest: float, factor: float, jitter: float
) -> None:
    without_jitter = backoff_delay(failures, first, longest, factor=factor)
    assert min(first, longest) <= without_jitter <= longest
    delay = backoff_delay(failures, first, longest, factor=factor, jitter=jitter)
    assert (1 - jitter) * without_jitter <= delay <= without_jitter


@given(st.integers(1, 50), seconds, seconds)
def test_delays_double_until_the_longest(failures: int, first: float, longest: float) -> None:
    delay = backoff_delay(failures, first, longest)
    assert delay == min(longest, first * 2 ** (failures - 1))
    assert delay <= backoff_delay(failures + 1, first, longest)


@given(st.lists(st.booleans(), max_size=40), seconds, seconds)
def test_pauses_depend_on_the_failures_since_the_last_success(
    outcomes: list[bool], first_s: float, max_s: float
) -> None:
    backoff = Backoff(first_s, max_s)
    failures = 0
    for success in outcomes:
        if success:
            backoff.reset()
            failures = 0
        else:
            upcoming_s = backoff.upcoming_s()
            assert backoff.next_s() == upcoming_s == min(max_s, first_s * 2**failures)
            failures += 1
        assert backoff.failures == failures
