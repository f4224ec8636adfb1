"""When batches are due, and that no more is held than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.producer import BatchLimits, ProducerBatcher


def batcher(**limits: float) -> ProducerBatcher[object]:
    return ProducerBatcher(BatchLimits(**limits), object)  # type: ignore[arg-type]


def test_a_batch_waits_for_company() -> None:
    queue = batcher(linger_s=1.0)
    queue.add(b"a", None, 10.0)
    assert queue.due_in_s(10.25) == 0.75
    assert queue.pop_due(10.25) is None
    queue.add(b"b", None, 10.5)
    batch = queue.pop_due(11.0)
    assert batch is not None
    assert batch.parts == [b"a", b"b"]


def test_a_full_batch_does_not_wait() -> None:
    queue = batcher(linger_s=1.0, batch_count_max=2)
    queue.add(b"a", None, 0.0)
    queue.add(b"b", None, 0.0)
    assert queue.due_in_s(0.0) == 0.0


def test_a_flush_does_not_wait_and_does_not_hurry_what_comes_later() -> None:
    queue = batcher(linger_s=1.0)
    queue.add(b"a", None, 0.0)
    assert queue.flush() == 1
    first = queue.pop_due(0.0)
    assert first is not None
    queue.add(b"b", None, 0.0)
    assert queue.pop_due(0.0) is None
    queue.settle(first)
    assert queue.settled == 1


def test_a_key_belongs_to_its_batch() -> None:
    queue = batcher(linger_s=0.0)
    for part, key in ((b"1", "x"), (b"2", "x"), (b"3", "y"), (b"4", None)):
        queue.add(part, key, 0.0)
    taken = [(batch.key, batch.parts) for _ in range(3) if (batch := queue.pop_due(0.0))]
    assert taken == [("x", [b"1", b"2"]), ("y", [b"3"]), (None, [b"4"])]


def test_all_parts_of_a_batch_share_a_ticket() -> None:
    queue = batcher()
    assert queue.add(b"a", None, 0.0) is queue.add(b"b", None, 0.0)
    assert queue.add(b"c", "other", 0.0) is not queue.add(b"d", None, 0.0)


def test_one_part_larger_than_everything_enters_alone() -> None:
    queue = batcher(inflight_bytes_max=10, batch_bytes_max=5)
    assert queue.has_room(100)
    queue.add(b"x" * 100, None, 0.0)
    assert not queue.has_room(1)


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="batch_count_max"):
        BatchLimits(batch_count_max=0)


@given(st.lists(st.integers(0, 40)), st.integers(1, 60), st.integers(1, 5), st.integers(50, 200))
def test_order_and_bounds(sizes: list[int], bytes_max: int, count_max: int, held_max: int) -> None:
    queue = batcher(
        linger_s=0.0, batch_bytes_max=bytes_max, batch_count_max=count_max, inflight_bytes_max=held_max
    )
    sent: list[bytes] = []
    parts = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    for part in parts:
        while not queue.has_room(len(part)):
            batch = queue.pop_due(0.0)
            assert batch is not None
            sent.extend(batch.parts)
            queue.settle(batch)
        queue.add(part, None, 0.0)
        assert queue.bytes_held <= max(held_max, len(part) + 1)
    while batch := queue.pop_due(0.0):
        assert len(batch.parts) <= count_max
        assert len(batch.parts) == 1 or batch.size_bytes <= bytes_max
        sent.extend(batch.parts)
        queue.settle(batch)
    assert sent == parts
    assert queue.bytes_held == 0
