"""Sketches and summaries: what they promise, and that no order of merges changes them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.schema.search_config import Measure
from tailrace.search.aggregates.measures import (
    BUCKETS_MAX,
    Number,
    Sketch,
    Summary,
    SummaryPartsReader,
    decode_sketch,
    exponent_of,
    nearest_rank,
    parse_sketch,
)

# Subnormal numbers have too few digits for any relative error.
doubles = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False).map(
    lambda value: value + 0.0
)
small = st.integers(-1000, 1000).map(lambda value: value / 4)
numbers = st.lists(st.one_of(doubles, small), max_size=40)
PARTS = Measure("summary_parts", None, None, None, "/count", "/sum", "/min", "/max", "/buckets", "/sketch")


def sketch(values: Sequence[Number]) -> Sketch:
    made = Sketch()
    made.add_all(values)
    return made


def merged(*sketches: Sketch) -> Sketch:
    made = Sketch()
    for one in sketches:
        made.merge(one)
    return made


def summary(values: Sequence[Number]) -> Summary:
    made = Summary(histogram=True, whole=False)
    made.add_all(values)
    return made


def exact_quantile(values: Sequence[Number], percent: int) -> Number:
    return sorted(values)[nearest_rank(percent / 100, len(values)) - 1]


@given(numbers, numbers, numbers)
def test_a6_merges_of_sketches_in_any_order_have_the_same_buckets(
    one: list[float], two: list[float], three: list[float]
) -> None:
    a, b, c = sketch(one), sketch(two), sketch(three)
    whole = sketch([*one, *two, *three])
    assert merged(a, b, c) == merged(c, a, b) == merged(a, merged(b, c)) == merged(merged(b, a), c) == whole


def test_a6_also_when_buckets_are_collapsed() -> None:
    chance = random.Random(6)
    wide = [math.exp(chance.uniform(-600, 600)) for _ in range(9000)]
    parts = [sketch(wide[start::3]) for start in range(3)]
    whole = sketch(wide)
    assert len(whole.positive) == BUCKETS_MAX
    assert merged(*parts) == merged(*parts[::-1]) == merged(parts[1], merged(parts[0], parts[2])) == whole
    assert whole.count == len(wide)
    found = whole.quantile(0.99)
    assert found is not None
    assert math.isclose(found, exact_quantile(wide, 99), rel_tol=0.01)


@given(numbers.filter(bool), st.sampled_from([1, 50, 95, 99, 100]))
def test_a1_a_quantile_is_within_one_percent(values: list[float], percent: int) -> None:
    found = sketch(values).quantile(percent / 100)
    assert found is not None
    exact = exact_quantile(values, percent)
    if abs(exact) < 1e308:
        assert math.isclose(found, exact, rel_tol=0.0, abs_tol=abs(exact) * 0.01)


@given(numbers)
def test_a_sketch_comes_back_from_its_bytes(values: list[float]) -> None:
    made = sketch(values)
    assert decode_sketch(made.to_bytes()) == made
    assert parse_sketch(made.to_text()) == made


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda rest: b"\1" + rest)))
@settings(max_examples=300)
def test_bytes_are_a_sketch_in_its_one_form_or_none(form: bytes) -> None:
    found = decode_sketch(form)
    if found is not None:
        assert decode_sketch(found.to_bytes()) == found


@pytest.mark.parametrize("value", [None, 7, "", "!", "AQ==", "AgAAAA==", {}, "AQAAAAA=", "é"])
def test_what_is_no_sketch_is_none(value: object) -> None:
    assert parse_sketch(value) is None


@given(numbers, st.integers(0, 40))
def test_a2_a_summary_does_not_depend_on_where_it_is_cut(values: list[float], cut: int) -> None:
    halves = summary(values[:cut])
    halves.merge(summary(values[cut:]))
    assert halves.to_json(method=True) == summary(values).to_json(method=True)


@given(numbers)
def test_a1_a4_a_summary_is_that_of_its_numbers(values: list[float]) -> None:
    shown: Any = summary(values).to_json(method=False)
    total = sum(map(Fraction, values))
    assert shown["count"] == len(values)
    assert sum(shown["histogram"].values()) == len(values)
    assert shown["min"] == min(values, default=None)
    assert shown["max"] == max(values, default=None)
    if abs(total) < 1e308:
        assert math.isclose(shown["sum"], total, rel_tol=1e-12)
        if values:
            assert math.isclose(shown["avg"], total / len(values), rel_tol=1e-12)
    if not values:
        assert shown == {
            "count": 0, "sum": 0, "min": None, "max": None, "avg": None,
            "p50": None, "p95": None, "p99": None, "histogram": {},
        }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "exponent"),
    [(0, 0), (0.0, 0), (0.3, 0), (1, 0), (-1.5, 0), (2, 1), (1.9999999999999998, 0), (2**53 - 1, 52),
     (2.0**53, 53), (-(2**63), 63), (2**63 - 1, 62), (-1024.5, 10), (1.7e308, 1023)],
)  # fmt: skip
def test_a_power_of_two_names_the_bucket(value: Number, exponent: int) -> None:
    assert exponent_of(value) == exponent
    assert 2**exponent <= max(1, abs(value)) < 2 ** (exponent + 1)


def test_sums_of_integers_are_exact_and_of_huge_doubles_bounded() -> None:
    whole = Summary(histogram=False, whole=True)
    whole.add_all([2**53 - 2, 1])
    assert whole.to_json(method=False)["sum"] == 2**53 - 1
    huge: Any = summary([1.7e308, 1.7e308]).to_json(method=False)
    assert huge["sum"] > 1.7e308
    assert huge["avg"] == 1.7e308
    assert summary([1e16, 1.0, -1e16]).to_json(method=False)["sum"] == 1.0


def parts_of(*records: object) -> Any:
    made = Summary(histogram=True, whole=False)
    for record in records:
        parts = SummaryPartsReader(PARTS).read(record)
        if parts is not None:
            made.add_parts(parts)
    return made.to_json(method=True)


def record_of(values: Sequence[Number], **more: object) -> dict[str, object]:
    return {"count": len(values), "sum": sum(values), "min": min(values), "max": max(values), **more}


def test_a4_parts_have_percentiles_from_what_every_record_has() -> None:
    low, high = [1.0, 2.0, 3.0], [100.0, 200.0]
    sketched = [
        record_of(
            values,
            sketch=sketch(values).to_text(),
            buckets=summary(values).to_json(method=False)["histogram"],
        )
        for values in (low, high)
    ]
    shown = parts_of(*sketched)
    assert shown["percentile_method"] == "sketch"
    assert shown["histogram"] == {"1": 1, "2": 2, "64": 1, "128": 1}
    assert math.isclose(shown["p50"], 3.0, rel_tol=0.01)
    assert (shown["min"], shown["max"], shown["count"], shown["sum"]) == (1.0, 200.0, 5, 306.0)
    del sketched[0]["sketch"]
    shown = parts_of(*sketched)
    assert shown["percentile_method"] == "histogram"
    assert 2 <= shown["p50"] <= 4
    assert shown["p99"] == 200.0
    sketched[0]["buckets"] = {}
    shown = parts_of(*sketched)
    assert shown["percentile_method"] is None
    assert shown["p50"] is None
    assert sum(shown["histogram"].values()) == shown["count"] == 5


@pytest.mark.parametrize(
    "record",
    [None, [], {}, {"count": 1}, {"sum": 1}, {"count": 0, "sum": 1}, {"count": -1, "sum": 1},
     {"count": "x", "sum": 1}, {"count": 1, "sum": None}, {"count": 2**64, "sum": 1},
     {"count": 1.5, "sum": 1}],
)  # fmt: skip
def test_records_without_count_and_sum_contribute_nothing(record: object) -> None:
    assert SummaryPartsReader(PARTS).read(record) is None


def test_negative_histograms_are_read_from_the_other_end() -> None:
    shown = parts_of(record_of([-4.0, -100.0], buckets={"4": 1, "64": 1}))
    assert shown["percentile_method"] == "histogram"
    assert shown["p99"] == -4.0
    assert -100 <= shown["p50"] <= -64
