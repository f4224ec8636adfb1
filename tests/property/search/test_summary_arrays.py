"""States as arrays are the states one by one, to the last digit and the last byte of JSON."""

from __future__ import annotations

from typing import Any

import numpy
import orjson
from hypothesis import given
from hypothesis import strategies as st

from tailrace.search.aggregates.exact_sums import (
    compute_averages,
    merge_sums,
    split_to_doubles,
    sum_by_group,
)
from tailrace.search.aggregates.keyed_states import join_texts, summary_pieces
from tailrace.search.aggregates.measures import EXACT_SUM_SCALE, Summary, nearest_ratio, to_exact
from tailrace.search.aggregates.summary_arrays import (
    SummaryArray,
    build_number_array,
    concat_summaries,
    summarise_by_group,
)
from tailrace.search.records import INT64_MAX

np: Any = numpy
GROUPS = 5

usual = st.integers(-(10**7), 10**7).map(lambda number: number / 1000)
far = st.sampled_from([0.1, -0.1, 1e300, -1e300, 5e-324, 1.7e308, 3.0, 2.0**53 + 2, 0.0, 1 + 2.0**-52])
any_double = st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)
whole = st.one_of(
    st.integers(-9, 9),
    st.integers(-INT64_MAX - 1, INT64_MAX),
    st.sampled_from([2**60 - 1, 2**60, 2**53 + 1, -INT64_MAX - 1]),
)


def grouped(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[int, Any]]]:
    return st.lists(st.tuples(st.integers(0, GROUPS - 1), numbers), max_size=40)


doubles = st.one_of(grouped(usual), grouped(far), grouped(any_double))
everything = st.one_of(doubles, grouped(whole))


def arrays(rows: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """The group of each number, and the numbers. Those without any are integers."""
    kind = np.int64 if all(isinstance(number, int) for _, number in rows) else np.float64
    return np.array([group for group, _ in rows], np.int64), np.array([number for _, number in rows], kind)


def summary_of(numbers: list[Any], *, histogram: bool, is_whole: bool) -> Summary:
    found = Summary(histogram=histogram, whole=is_whole)
    found.add_all(numbers)
    return found


def check(found: SummaryArray, expected: list[Summary]) -> None:
    texts = join_texts(summary_pieces(found)).to_pylist()
    for row, one in enumerate(expected):
        assert texts[row] == orjson.dumps(one.to_json(method=False))
        again = found.summary(row)
        assert (again.total, again.count, again.sketch) == (one.total, one.count, one.sketch)
        assert again.to_json(method=False) == one.to_json(method=False)


@given(everything, st.lists(st.integers(0, 2), min_size=GROUPS, max_size=GROUPS))
def test_a1_sums_are_exact_however_they_are_cut(rows: list[tuple[int, Any]], again: list[int]) -> None:
    group_of, numbers = arrays(rows)
    found = sum_by_group(numbers, group_of, GROUPS)
    totals = [sum(to_exact(number) for group, number in rows if group == one) for one in range(GROUPS)]
    assert [found.total(group) for group in range(GROUPS)] == totals
    for group, total in enumerate(totals):
        halves = None if group in found.beyond else (found.nearest[group], found.rests[group])
        assert halves == split_to_doubles(total)
    merged = merge_sums(found, np.array(again), 3)
    for one in range(3):
        assert merged.total(one) == sum(total for total, of in zip(totals, again, strict=True) if of == one)


@given(everything, st.lists(st.integers(1, 2**40), min_size=GROUPS, max_size=GROUPS))
def test_a1_averages_are_the_nearest_doubles(rows: list[tuple[int, Any]], counts: list[int]) -> None:
    group_of, numbers = arrays(rows)
    sums = sum_by_group(numbers, group_of, GROUPS)
    expected = [
        nearest_ratio(sums.total(group), count << EXACT_SUM_SCALE) for group, count in enumerate(counts)
    ]
    assert compute_averages(sums, np.array(counts)).tolist() == expected


@given(everything, st.booleans(), st.lists(st.integers(0, 2), min_size=GROUPS, max_size=GROUPS))
def test_a1_a6_summaries_as_arrays_are_shown_as_they_are_one_by_one(
    rows: list[tuple[int, Any]], histogram: bool, again: list[int]
) -> None:
    group_of, numbers = arrays(rows)
    found = summarise_by_group(build_number_array(numbers, histogram=histogram), group_of, GROUPS)
    of_group: list[list[Any]] = [[number for group, number in rows if group == one] for one in range(GROUPS)]
    expected = [summary_of(some, histogram=histogram, is_whole=found.whole) for some in of_group]
    check(found, expected)
    some = np.array([3, 0, 3])
    check(concat_summaries([found.take(some), found]), [expected[3], expected[0], expected[3], *expected])
    merged: list[list[Any]] = [[], [], []]
    for one, group in zip(of_group, again, strict=True):
        merged[group] += one
    check(
        found.merged(np.array(again), 3),
        [summary_of(numbers, histogram=histogram, is_whole=found.whole) for numbers in merged],
    )


def test_a6_too_many_buckets_collapse_as_they_do_one_by_one() -> None:
    numbers = [
        sign * 1.7**power * 2.0**step for sign in (1, -1) for power in range(9) for step in range(-950, 950)
    ]
    found = summarise_by_group(
        build_number_array(np.array(numbers), histogram=True), np.arange(len(numbers)) % 2, 2
    )
    halves = [summary_of(numbers[half::2], histogram=True, is_whole=False) for half in (0, 1)]
    check(found, halves)
    halves[0].merge(halves[1])
    check(found.merged(np.zeros(2, np.int64), 1), halves[:1])
