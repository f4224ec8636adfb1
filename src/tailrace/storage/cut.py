"""Cutting a stream's hot entries into segments. Pure: runs of entries in, runs of entries out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tailrace.storage.segments.segments import SegmentRows


class SegmentPortion(NamedTuple):
    """The rows of one segment: consecutive, of one epoch."""

    epoch: int
    runs: list[SegmentRows]


def slice_run(run: SegmentRows, begin: int, end: int, separator: int) -> SegmentRows:
    """Rows `begin` to `end` (not included) of a run, counted from 0."""
    if begin == 0 and end == len(run.ends):
        return run
    start = run.ends[begin - 1] + separator if begin else 0
    ends = run.ends[begin:end]
    if start:
        for index, stop in enumerate(ends):
            ends[index] = stop - start
    body = run.body[start : run.ends[end - 1]]
    keys = None if run.keys is None else run.keys[begin:end]
    return SegmentRows(run.first + begin, body, ends, run.times[begin:end], keys)


def split_into_segments(
    runs: Iterable[SegmentRows],
    epochs: Sequence[tuple[int, int]],
    separator: int,
    *,
    bytes_max: int,
    entries_max: int,
) -> Iterator[SegmentPortion]:
    """What goes into each segment: at most so many bytes and entries, one larger entry alone excepted."""
    held: list[SegmentRows] = []
    held_bytes = held_entries = 0
    epoch = 0
    for run in runs:
        at, count = 0, len(run.ends)
        while at < count:
            entry_epoch, epoch_last = _epoch_at(epochs, run.first + at)
            if held and (held_bytes >= bytes_max or held_entries >= entries_max or entry_epoch != epoch):
                yield SegmentPortion(epoch, held)
                held, held_bytes, held_entries = [], 0, 0
            epoch = entry_epoch
            start = run.ends[at - 1] + separator if at else 0
            reach = min(count, at + entries_max - held_entries, epoch_last - run.first + 1)
            stop = bisect_right(run.ends, start + bytes_max - held_bytes, at, reach)
            if stop == at:
                if held:
                    held_bytes = bytes_max  # the next entry does not fit any more
                    continue
                stop = at + 1
            held.append(slice_run(run, at, stop, separator))
            held_bytes += run.ends[stop - 1] - start
            held_entries += stop - at
            at = stop
    if held:
        yield SegmentPortion(epoch, held)


def _epoch_at(epochs: Sequence[tuple[int, int]], entry: int) -> tuple[int, int]:
    """The epoch an entry was written in, and the last entry that this epoch can have."""
    index = bisect_right(epochs, entry, key=lambda pair: pair[1]) - 1
    last = epochs[index + 1][1] - 1 if index + 1 < len(epochs) else 2**62
    return epochs[max(index, 0)][0], last
