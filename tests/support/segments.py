"""Segments for tests: entries in, runs of rows, files and objects out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tailrace.storage.segments.model import SegmentFile, SegmentRows, make_stream_id
from tailrace.storage.segments.reader import Footer, read_row_group
from tailrace.storage.segments.writer import write_segment

NAME = "orders/today"
STREAM_ID = make_stream_id(NAME, 0)


class Entry(NamedTuple):
    payload: bytes
    time_ns: int
    key: bytes | None = None


def run_of(first: int, entries: Sequence[Entry], json: bool) -> SegmentRows:
    """One run of rows, as the hot store would hand it over."""
    separator = 1 if json else 0
    ends: array[int] = array("I")
    position = 0
    for entry in entries:
        position += len(entry.payload)
        ends.append(position)
        position += separator
    keys = [entry.key for entry in entries]
    return SegmentRows(
        first,
        (b"," if json else b"").join(entry.payload for entry in entries),
        ends,
        array("q", [entry.time_ns for entry in entries]),
        keys if any(key is not None for key in keys) else None,
    )


def runs_of(first: int, entries: Sequence[Entry], json: bool, run: int = 700) -> list[SegmentRows]:
    """The entries in runs of an awkward length."""
    return [run_of(first + at, entries[at : at + run], json) for at in range(0, len(entries), run)]


def entries_of(rows: SegmentRows, json: bool) -> list[Entry]:
    """Back to entries, one by one and without Arrow."""
    separator = 1 if json else 0
    entries: list[Entry] = []
    start = 0
    for index, end in enumerate(rows.ends):
        key = None if rows.keys is None else rows.keys[index]
        entries.append(Entry(rows.body[start:end], rows.times[index], key))
        start = end + separator
    assert len(rows.times) == len(rows.ends)
    assert start - separator == len(rows.body)
    return entries


def write(path: Path, runs: Sequence[SegmentRows], json: bool, epoch: int = 0) -> SegmentFile:
    return write_segment(
        runs,
        path,
        name=NAME,
        stream_id=STREAM_ID,
        epoch=epoch,
        json=json,
        content_type="application/json" if json else "application/octet-stream",
    )


def read_all(kept: bytes, raw: bytes) -> list[Entry]:
    """Every entry of a segment, row group by row group, each from just its own bytes."""
    footer = Footer(kept)
    entries: list[Entry] = []
    for index, group in enumerate(footer.row_groups):
        rows = read_row_group(footer, index, raw[group.start : group.stop])
        assert (rows.first, rows.last) == (group.first, group.last)
        assert group.first == footer.first + len(entries)
        entries += entries_of(rows, footer.json)
    return entries
