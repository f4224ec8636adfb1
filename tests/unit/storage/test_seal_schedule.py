"""Which streams are due, and when."""

from __future__ import annotations

from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.storage.seal_schedule import DueStreams

LIMITS = Limits(seal_bytes=1000, seal_entries=10, seal_age_ms=60_000)


def stream(number: int, *, stored: int, sealed: int = 0, size_bytes: int = 0) -> Stream:
    made = Stream(number, f"s{number}", 1)
    made.tail = made.visible = made.stored = stored
    made.sealed = sealed
    made.size_bytes = size_bytes
    return made


def popped(due: DueStreams, busy: frozenset[int] = frozenset()) -> list[int]:
    found: list[int] = []
    while (number := due.pop(busy)) is not None:
        found.append(number)
    return found


def test_by_count_by_size_and_when_closed() -> None:
    due = DueStreams(LIMITS)
    closed = stream(3, stored=1)
    closed.closed = True
    removed = stream(5, stored=100)
    removed.removed = True
    few, many = stream(1, stored=9), stream(2, stored=19, sealed=9)
    large = stream(4, stored=1, size_bytes=1000)
    done = stream(6, stored=50, sealed=50)
    due.checkpointed([few, many, closed, large, removed, done], 0.0)
    assert popped(due) == [2, 3, 4]
    assert list(due.aged(59.9, 10)) == []
    assert list(due.aged(60.0, 10)) == [(1, 9)]
    assert list(due.aged(60.0, 10)) == []


def test_what_is_in_memory_only_does_not_count() -> None:
    due = DueStreams(LIMITS)
    large = stream(1, stored=1, size_bytes=1000)
    large.recent_bytes = 500
    due.checkpointed([large], 0.0)
    assert popped(due) == []


def test_aged_streams_come_some_at_a_time_oldest_first() -> None:
    due = DueStreams(LIMITS)
    due.checkpointed([stream(number, stored=1) for number in range(1, 6)], 0.0)
    due.checkpointed([stream(number, stored=2) for number in (1, 9)], 5.0)
    assert list(due.aged(61.0, 3)) == [(1, 1), (2, 1), (3, 1)]
    assert list(due.aged(61.0, 3)) == [(4, 1), (5, 1)]
    assert list(due.aged(70.0, 3)) == [(1, 2), (9, 2)]
    assert list(due.aged(float("inf"), 3)) == []


def test_a_stream_that_is_being_sealed_waits_its_turn() -> None:
    due = DueStreams(LIMITS)
    for number in (7, 8, 7):
        due.add(number)
    assert popped(due, frozenset({7})) == [8]
    assert 7 in due
    assert popped(due) == [7]
