"""Whether a segment holds what the hot store holds: entry by entry, however either is cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.storage.sealer import is_prefix_of
from tailrace.storage.segments.model import SegmentRows

Entry = tuple[bytes, int, bytes | None]  # payload, time, key

entries = st.lists(
    st.tuples(st.binary(max_size=4), st.integers(0, 3), st.none() | st.sampled_from([b"", b"k"])), max_size=12
)
cuts = st.lists(st.integers(1, 11), max_size=4)


def runs_of(found: list[Entry], cut_at: list[int], separator: int) -> Iterator[SegmentRows]:
    """The entries in runs that end at some of them. Keys are left out where no entry of a run has one."""
    borders = sorted({0, len(found), *(at for at in cut_at if at < len(found))})
    for start, stop in pairwise(borders):
        part = found[start:stop]
        ends, position = array("I"), 0
        for payload, _, _ in part:
            position += len(payload)
            ends.append(position)
            position += separator
        keys = [key for _, _, key in part]
        yield SegmentRows(
            start + 1,
            (b"," * separator).join(payload for payload, _, _ in part),
            ends,
            array("q", [time for _, time, _ in part]),
            keys if any(key is not None for key in keys) else None,
        )


@given(entries, cuts, cuts, st.integers(0, 12), st.sampled_from([0, 1]))
def test_the_same_entries_are_the_same_however_they_are_cut(
    found: list[Entry], cut: list[int], other_cut: list[int], count: int, separator: int
) -> None:
    some = runs_of(found[:count], cut, separator)
    assert is_prefix_of(some, runs_of(found, other_cut, separator), separator)


@given(entries, entries, cuts, cuts, st.sampled_from([0, 1]))
def test_nothing_else_is(
    some: list[Entry], others: list[Entry], cut: list[int], other_cut: list[int], separator: int
) -> None:
    same = others[: len(some)] == some
    assert (
        is_prefix_of(runs_of(some, cut, separator), runs_of(others, other_cut, separator), separator) == same
    )


@given(entries.filter(bool), st.data(), cuts, st.sampled_from([0, 1]))
def test_one_difference_is_enough(
    found: list[Entry], data: st.DataObject, cut: list[int], separator: int
) -> None:
    at = data.draw(st.integers(0, len(found) - 1))
    payload, time, key = found[at]
    changed = data.draw(
        st.sampled_from(
            [
                (payload + b"x", time, key),
                (payload, time + 1, key),
                (payload, time, None if key else b"other"),
            ]
        )
    )
    other = [*found[:at], changed, *found[at + 1 :]]
    assert not is_prefix_of(runs_of(other, cut, separator), runs_of(found, [], separator), separator)
