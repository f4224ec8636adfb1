"""Bloom filters: a key that was added is always found, others seldom; a worn one is made anew."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.watch.external_matching import (
    FALSE_POSITIVE_MAX,
    SAMPLE_INTERVAL,
    SAMPLES_MIN,
    BloomFilter,
    bloom_key,
)


@given(st.sets(st.binary(max_size=12), max_size=200), st.sets(st.binary(max_size=12), max_size=50))
def test_w21_no_key_is_ever_missed_over_growth_deletions_and_rebuilds(
    keys: set[bytes], gone: set[bytes]
) -> None:
    bloom = BloomFilter(0.0, keys_each=16)
    for key in keys:
        bloom.add(key)
    assert all(key in bloom for key in keys)
    for _ in keys & gone:
        bloom.discard()
    left = keys - gone
    fresh = bloom.rebuilt(left, 1.0)
    assert all(key in fresh for key in left)
    assert len(fresh) == len(left)
    assert all(key in bloom for key in left), "the old one serves until the new one is there"


def test_few_others_are_found() -> None:
    bloom = BloomFilter(0.0)
    for number in range(40_000):
        bloom.add(bloom_key(("user",), f"u{number}"))
    asked = [bloom_key(("user",), f"other{number}") for number in range(20_000)]
    wrong = sum(key in bloom for key in asked)
    assert wrong / len(asked) < FALSE_POSITIVE_MAX
    assert bloom.size_bytes < 100_000


def test_a_worn_filter_says_so() -> None:
    bloom = BloomFilter(0.0)
    for number in range(10):
        bloom.add(b"%d" % number)
    assert not bloom.needs_rebuild(1.0)
    assert bloom.needs_rebuild(24 * 3600.0), "it is old"
    for _ in range(6):
        bloom.discard()
    assert bloom.needs_rebuild(1.0), "half of it is nobody's any more"
    wrong = BloomFilter(0.0)
    wrong.add(b"x")
    chance = random.Random(3)
    for _ in range(SAMPLES_MIN):
        wrong.record_check(chance.random() < 0.3, really=False)
    wrong.record_check(found=True, really=True)
    assert wrong.false_ratio > FALSE_POSITIVE_MAX
    assert wrong.needs_rebuild(1.0), "too many answers were wrong"
    assert [wrong.is_sampled() for _ in range(SAMPLE_INTERVAL)].count(True) == 1
