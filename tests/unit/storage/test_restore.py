"""What a stream is after a loss: its epochs, what it shows, and offsets that never mean something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.log.decide import resolve_position
from tailrace.log.model import Stream
from tailrace.protocol.offsets import parse_offset
from tailrace.storage.manifests.model import ForkParent, HeadTombstone, ManifestHead, RecordedLifetime
from tailrace.storage.restore import (
    ForkSource,
    SegmentTotals,
    raise_epoch,
    restored_earliest,
    restored_head,
    restored_ranges,
    restored_stream,
)
from tailrace.storage.segments.model import SegmentInfo


def head(**more: object) -> ManifestHead:
    facts = {
        "name": "s",
        "stream_id": "0" * 32,
        "incarnation": 0,
        "epochs": ((0, 1),),
        "created_ns": 5,
        "tail": 0,
    }
    return ManifestHead(**{**facts, **more})


def segment(first: int, last: int) -> SegmentInfo:
    return SegmentInfo("key", 0, first, last, last - first + 1, 10, 100, "", first, last)


def sums_of(*runs: tuple[int, int], earliest: int = 0) -> SegmentTotals:
    sums = SegmentTotals(earliest)
    for first, last in runs:
        sums.add(segment(first, last))
    return sums


@pytest.mark.parametrize(
    ("epochs", "through", "expected"),
    [
        (((0, 1),), 0, ((0, 1), (1, 1))),
        (((0, 1),), 7, ((0, 1), (1, 8))),
        (((0, 1), (1, 8)), 9, ((0, 1), (1, 8), (2, 10))),
        # Nothing of epoch 1 was recorded, and still it was handed out.
        (((0, 1), (1, 8)), 7, ((0, 1), (2, 8))),
        (((0, 1), (1, 1)), 0, ((0, 1), (2, 1))),
        (((3, 1),), 0, ((3, 1), (4, 1))),
        # A fork that ends earlier than it began.
        (((0, 1), (4, 11)), 5, ((0, 1), (5, 6))),
    ],
)
def test_epochs_go_on_behind_what_is_left(
    epochs: tuple[tuple[int, int], ...], through: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert raise_epoch(epochs, through) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6), st.integers(0, 5))
def test_an_offset_of_a_lost_entry_is_gone_for_good(lives: list[tuple[int, int]], more: int) -> None:
    """In each life some entries are sealed and some more are appended that are lost."""
    stream = Stream(1, "s", 0)
    stream.visible = 0
    kept: dict[str, int] = {stream.offset(0): 0}
    lost: set[str] = set()
    for sealed, unsealed in lives:
        through = stream.visible + sealed
        for entry in range(stream.visible + 1, through + unsealed + 1):
            if entry <= through:
                kept[stream.offset(entry)] = entry
            else:
                lost.add(stream.offset(entry))
        stream.epochs, stream.visible = raise_epoch(stream.epochs, through), through
    stream.visible += more
    for offset, entry in kept.items():
        assert resolve_position(stream, parse_offset(offset), 0) == entry
    assert not lost & {stream.offset(entry) for entry in range(stream.visible + 1)}
    for offset in lost:
        with pytest.raises(TailraceError) as refused:
            resolve_position(stream, parse_offset(offset), 0)
        assert refused.value.code == "offset_gone"


def test_a_tombstone_is_raised_too() -> None:
    found = restored_head(head(deleted=HeadTombstone(at_ns=9, reason="deleted", epoch=3)), None)
    assert found.deleted == HeadTombstone(at_ns=9, reason="deleted", epoch=4)


def test_a_fork_of_lost_entries_ends_where_its_source_does() -> None:
    parent = ForkParent("1" * 32, "source")
    fork = head(parent=parent, fork_entry=10, uploaded_through=10, tail=10, epochs=((0, 1), (2, 11)))
    source = ForkSource(7, 6, 66, ((0, 6),))
    found = restored_head(fork, source)
    assert (found.fork_entry, found.uploaded_through, found.tail) == (6, 6, 6)
    assert found.epochs == ((0, 1), (3, 7))
    stream = restored_stream(2, found, source, SegmentTotals(), 0)
    assert (stream.parent, stream.tail, stream.sealed, stream.earliest, stream.last_ns) == (7, 6, 6, 0, 66)


def test_a_fork_with_entries_behind_a_gap_begins_there() -> None:
    fork = head(parent=ForkParent("1" * 32, "source"), fork_entry=10, uploaded_through=12, tail=12)
    for source in (ForkSource(7, 6, 66, ((0, 6),)), None):
        found = restored_head(fork, source)
        assert (found.fork_entry, found.uploaded_through) == (10, 12)
        assert restored_earliest(found, source) == 10


def test_what_is_stored_is_what_its_forks_may_show() -> None:
    # Retention took 1 to 20 and 31 to 40; 21 to 30 are kept for a fork.
    root = head(uploaded_through=60, tail=60, earliest=40)
    sums = sums_of((21, 30), (41, 50), (51, 60), earliest=40)
    assert sums.runs == [(20, 30), (40, 60)]
    assert (sums.entries, sums.payload_bytes) == (30, 200)
    runs = restored_ranges(root, None, sums)
    source = ForkSource(1, 60, 0, runs)
    early = head(parent=ForkParent("1" * 32, "s"), fork_entry=25, uploaded_through=27, tail=27)
    late = head(parent=ForkParent("1" * 32, "s"), fork_entry=55, uploaded_through=55, tail=55)
    none = head(parent=ForkParent("1" * 32, "s"), fork_entry=35, uploaded_through=36, tail=36)
    start = head(parent=ForkParent("1" * 32, "s"), fork_entry=0, uploaded_through=3, tail=3)
    assert [restored_earliest(one, source) for one in (early, late, none, start)] == [20, 40, 35, 0]
    assert restored_ranges(early, source, sums_of((26, 27))) == ((20, 27),)
    assert restored_ranges(start, source, sums_of((1, 3))) == ((0, 3),)
    assert restored_ranges(late, source, SegmentTotals()) == ((20, 30), (40, 55))


def test_a_window_begins_again() -> None:
    found = head(lifetime=RecordedLifetime(ttl_s=60), touched_ns=1)
    stream = restored_stream(1, found, None, SegmentTotals(), 1000)
    assert stream.deadline_ns() == 1000 + 60 * 10**9
