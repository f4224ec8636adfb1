"""What retention takes away, against definitions that look at every single entry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.model import Lifetime
from tailrace.storage.hot_store.tables import ForkRow
from tailrace.storage.retention_rules import (
    SECOND_NS,
    ShownSegment,
    decide_retention,
    ranges_reached_by_forks,
)
from tailrace.storage.segments.model import FOREVER, EntryRange, RetainedRanges, merge_entry_ranges

ENTRY = st.tuples(st.integers(0, 5), st.integers(0, 3))  # seconds after the one before, payload bytes
SEGMENTS = st.lists(st.lists(ENTRY, min_size=1, max_size=4), max_size=8)
BOUND = st.none() | st.integers(0, 20)


def shown_as(
    segments: Sequence[Sequence[tuple[int, int]]], earliest: int
) -> tuple[list[ShownSegment], list[int]]:
    """The segments, and the time of each entry in seconds."""
    flat = [entry for segment in segments for entry in segment]
    times_s = list(accumulate(seconds for seconds, _ in flat))
    found: list[ShownSegment] = []
    last = 0
    for segment in segments:
        last += len(segment)
        payload_bytes = sum(size for _, size in segment)
        found.append(
            ShownSegment(earliest + last, times_s[last - 1] * SECOND_NS, payload_bytes, last % 2 == 0)
        )
    return found, times_s


@given(SEGMENTS, st.lists(ENTRY, max_size=4), BOUND, BOUND, st.integers(0, 60), st.integers(0, 9))
def test_exactly_the_oldest_segments_go_of_which_every_entry_is_over_a_bound(
    segments: list[list[tuple[int, int]]],
    unsealed: list[tuple[int, int]],
    age_s: int | None,
    size_bytes: int | None,
    now_s: int,
    earliest: int,
) -> None:
    shown, times_s = shown_as(segments, earliest)
    sizes = [size for segment in [*segments, unsealed] for _, size in segment]

    def is_over(index: int) -> bool:
        old = age_s is not None and index < len(times_s) and times_s[index] + age_s <= now_s
        return old or (size_bytes is not None and sum(sizes[index + 1 :]) >= size_bytes)

    expected, own_bytes, start = earliest, 0, 0
    for segment, shape in zip(shown, segments, strict=True):
        entries = range(start, start + len(shape))
        # Times never decrease and newer bytes never grow, so all are over if the newest is.
        if not is_over(entries[-1]):
            break
        assert all(is_over(index) for index in entries)
        expected, start = segment.last, entries[-1] + 1
        own_bytes += segment.payload_bytes if segment.own else 0
    lifetime = Lifetime(retention_s=age_s, retention_bytes=size_bytes)

    decision = decide_retention(earliest, iter(shown), lifetime, sum(sizes), now_s * SECOND_NS)

    assert (decision.earliest, decision.payload_bytes) == (expected, own_bytes)
    # Nothing else happens before the time that was named, and something at that time.
    left = [segment for segment in shown if segment.last > expected]
    left_bytes = sum(sizes[start:])
    if decision.next_ns is None:
        assert not left or age_s is None
    else:
        assert decision.next_ns > now_s * SECOND_NS
        before = decide_retention(expected, left, lifetime, left_bytes, decision.next_ns - 1)
        after = decide_retention(expected, left, lifetime, left_bytes, decision.next_ns)
        assert before.earliest == expected < after.earliest


RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def entries_of(runs: Sequence[EntryRange], upto: int = 40) -> set[int]:
    return {entry for after, last in runs for entry in range(after + 1, min(last, upto) + 1)}


@given(st.integers(0, 30), RUNS, st.integers(1, 35), st.integers(0, 5))
def test_what_is_kept_is_what_is_shown_and_what_forks_show(
    earliest: int, runs: list[EntryRange], first: int, more: int
) -> None:
    kept = RetainedRanges(earliest, runs)
    expected = entries_of([*runs, (earliest, FOREVER)])
    asked = set(range(first, first + more + 1))

    assert kept.overlaps(first, first + more) == bool(asked & expected)
    assert kept.contains(first, first + more) == (asked <= expected)
    assert entries_of(list(kept.gaps())) == set(range(1, 41)) - expected
    assert entries_of(merge_entry_ranges(runs)) == entries_of(runs)


class Tree:
    """Streams that fork one another, each made as the log makes it."""

    def __init__(self) -> None:
        self.parents = [0, 0]  # by number; 1 is the first stream and has none
        self.fork_entries = [0, 0]
        self.earliest = [0, 0]
        self.tails = [0, 40]
        self.gone = [False, False]

    def fork(self, parent: int, entry: int) -> None:
        if not self.gone[parent] and self.earliest[parent] <= entry <= self.tails[parent]:
            self.parents.append(parent)
            self.fork_entries.append(entry)
            self.earliest.append(self.earliest[parent])
            self.tails.append(entry + 10)
            self.gone.append(False)

    def forks_of(self, number: int) -> list[ForkRow]:
        return [
            ForkRow(
                child, self.fork_entries[child], self.earliest[child], self.gone[child], self.count(child)
            )
            for child, parent in enumerate(self.parents)
            if parent == number
        ]

    def count(self, number: int) -> int:
        return sum(parent == number for parent in self.parents[2:])

    def owner(self, number: int, entry: int) -> int:
        while self.parents[number] and entry <= self.fork_entries[number]:
            number = self.parents[number]
        return number

    def shown_of(self, owner: int) -> set[int]:
        """Entries that this stream stores and that some other one shows."""
        return {
            entry
            for number in range(1, len(self.parents))
            if number != owner and not self.gone[number]
            for entry in range(self.earliest[number] + 1, self.tails[number] + 1)
            if self.owner(number, entry) == owner
        }


Step = tuple[str, int, int]
STEP = st.tuples(st.sampled_from(["fork", "fork", "trim", "go"]), st.integers(0, 20), st.integers(0, 50))


@given(st.lists(STEP, max_size=14))
def test_forks_reach_exactly_what_they_show_and_never_more_than_before(
    steps: list[tuple[str, int, int]],
) -> None:
    tree = Tree()
    before: dict[int, set[int]] = {}
    for kind, which, entry in steps:
        number = 1 + which % (len(tree.parents) - 1)
        if kind == "fork":
            tree.fork(number, entry)
        elif kind == "trim":
            tree.earliest[number] = max(tree.earliest[number], min(entry, tree.tails[number]))
        else:
            tree.gone[number] = tree.gone[number] or bool(tree.count(number))
        for owner in range(1, len(tree.parents)):
            runs = ranges_reached_by_forks(owner, tree.count(owner), tree.forks_of)
            own = {entry for entry in entries_of(runs, 80) if entry > tree.fork_entries[owner]}
            assert own == tree.shown_of(owner)
            # A look that is out of date keeps too much, never too little.
            kept = own | set(range(tree.earliest[owner] + 1, tree.tails[owner] + 1))
            assert kept <= before.get(owner, kept)
            before[owner] = kept


def test_an_incomplete_book_of_forks_keeps_everything() -> None:
    book = {1: [ForkRow(2, 10, 0, gone=False, forks=1)], 2: list[ForkRow]()}
    assert ranges_reached_by_forks(1, 1, lambda number: book[number]) == [(0, FOREVER)]
    assert ranges_reached_by_forks(1, 2, lambda number: book[number]) == [(0, FOREVER)]
    assert ranges_reached_by_forks(1, 0, lambda number: book[number]) == []
