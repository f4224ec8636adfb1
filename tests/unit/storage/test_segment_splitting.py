"""Cutting a stream's entries into segments: nothing lost, nothing reordered, no bound passed."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tailrace.storage.sealer import slice_run, split_into_segments
from tailrace.storage.segments.model import SegmentRows


def run_of(first: int, payloads: list[bytes], separator: int, keyed: bool) -> SegmentRows:
    ends: array[int] = array("I")
    position = 0
    for payload in payloads:
        position += len(payload)
        ends.append(position)
        position += separator
    times = array("q", range(first, first + len(payloads)))
    keys: list[bytes | None] | None = None
    if keyed:
        keys = [b"k%d" % number for number in range(first, first + len(payloads))]
    return SegmentRows(first, (b"," if separator else b"").join(payloads), ends, times, keys)


def entries_of(run: SegmentRows, separator: int) -> list[tuple[int, bytes, int, bytes | None]]:
    found: list[tuple[int, bytes, int, bytes | None]] = []
    for index, end in enumerate(run.ends):
        start = run.ends[index - 1] + separator if index else 0
        key = None if run.keys is None else run.keys[index]
        found.append((run.first + index, run.body[start:end], run.times[index], key))
    return found


blocks = st.lists(
    st.tuples(st.lists(st.binary(min_size=0, max_size=30), min_size=1, max_size=8), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(
    blocks=blocks,
    first=st.integers(1, 5),
    separator=st.sampled_from([0, 1]),
    bytes_max=st.integers(1, 60),
    entries_max=st.integers(1, 9),
    epoch_starts=st.lists(st.integers(2, 30), max_size=3, unique=True),
)
def test_portions_hold_every_entry_once_and_in_order(
    blocks: list[tuple[list[bytes], bool]],
    first: int,
    separator: int,
    bytes_max: int,
    entries_max: int,
    epoch_starts: list[int],
) -> None:
    runs: list[SegmentRows] = []
    for payloads, keyed in blocks:
        runs.append(run_of(first, payloads, separator, keyed))
        first += len(payloads)
    epochs = [(number, start) for number, start in enumerate([1, *sorted(epoch_starts)])]
    cut = list(split_into_segments(runs, epochs, separator, bytes_max=bytes_max, entries_max=entries_max))
    expected = [entry for run in runs for entry in entries_of(run, separator)]
    assert [
        entry for portion in cut for run in portion.runs for entry in entries_of(run, separator)
    ] == expected
    for portion in cut:
        inside = [entry for run in portion.runs for entry in entries_of(run, separator)]
        assert len(inside) <= entries_max
        assert len(inside) == 1 or sum(len(payload) for _, payload, _, _ in inside) <= bytes_max
        for number, _, _, _ in inside:
            assert portion.epoch == max(epoch for epoch, start in epochs if start <= number)


@given(
    payloads=st.lists(st.binary(max_size=9), min_size=1, max_size=9),
    separator=st.sampled_from([0, 1]),
    keyed=st.booleans(),
    data=st.data(),
)
def test_a_part_is_what_it_was_in_the_whole(
    payloads: list[bytes], separator: int, keyed: bool, data: st.DataObject
) -> None:
    run = run_of(7, payloads, separator, keyed)
    begin = data.draw(st.integers(0, len(payloads) - 1))
    end = data.draw(st.integers(begin + 1, len(payloads)))
    part = slice_run(run, begin, end, separator)
    assert entries_of(part, separator) == entries_of(run, separator)[begin:end]
    assert len(part.body) == part.ends[-1]
