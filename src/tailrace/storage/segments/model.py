"""Segments: names, what is recorded about each, and which entries stay retained. Imports no Arrow.

A segment is an immutable Parquet file with consecutive entries of one stream. Writing and reading segments is
in `writer` and `reader`, which import Arrow. The format is described in docs/formats.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore


FORMAT_VERSION = 1
FOOTER_GUESS_BYTES = 64 << 10  # how much of the end of a file to read for its footer, at first
NAME_HASH_DIGITS = 16  # of the file's SHA-256: enough to avoid collisions


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """What manifests, the journal and the hot store record about one segment. The order never changes."""

    key: str  # relative to the folder of the stream, as `segment_name` makes it
    epoch: int
    first: int
    last: int
    rows: int
    bytes: int  # of the file
    payload_bytes: int
    sha256: str  # of the file, in hex
    first_ns: int
    last_ns: int


class SegmentRows(NamedTuple):
    """Consecutive entries, in exactly the form of a block of the log.

    `body` is the entries one after the other, on JSON streams joined by a comma; `ends[i]` is where entry
    `first + i` ends in it, `times[i]` its append time in nanoseconds.
    """

    first: int
    body: bytes
    ends: array[int]
    times: array[int]
    keys: list[bytes | None] | None

    @property
    def last(self) -> int:
        return self.first + len(self.ends) - 1


class SegmentFile(NamedTuple):
    """A segment that was written and synced, and the footer that reads of it start with."""

    info: SegmentInfo
    footer: bytes


class CorruptSegmentError(Exception):
    """Bytes that are not what was written. Nothing of them may reach a reader."""


def make_stream_id(name: str, incarnation: int) -> str:
    """32 hex digits for one use of a name: a name that is used again after a deletion gets another folder."""
    return xxhash.xxh3_128_hexdigest(name.encode() + b"\0" + incarnation.to_bytes(8, "big"))


def stream_prefix(stream_id: str) -> str:
    return f"streams/{stream_id[:2]}/{stream_id}/"


def segment_name(epoch: int, first: int, last: int, sha256: str) -> str:
    """The key of a segment in its stream's folder; names sort as entries do."""
    return f"segments/{epoch:010}-{first:020}-{last:020}.{sha256[:NAME_HASH_DIGITS]}.parquet"


# A range of entries: those after the first number, up to and including the second.
EntryRange = tuple[int, int]

FOREVER = 2**62


class RetainedRanges:
    """A few ranges of entries. The last one starts after `earliest` and has no end."""

    __slots__ = ("_lasts", "_runs", "earliest")

    def __init__(self, earliest: int, reached: Iterable[EntryRange] = ()) -> None:
        self.earliest = earliest
        self._runs = merge_entry_ranges([*reached, (earliest, FOREVER)])
        self._lasts = [last for _, last in self._runs]

    def overlaps(self, first: int, last: int) -> bool:
        """Whether at least one of these entries is retained."""
        index = bisect_left(self._lasts, first)
        return index < len(self._runs) and self._runs[index][0] < last

    def contains(self, first: int, last: int) -> bool:
        """Whether all of these entries are retained."""
        index = bisect_left(self._lasts, first)
        return index < len(self._runs) and self._runs[index][0] < first and last <= self._lasts[index]

    def gaps(self) -> Iterator[EntryRange]:
        """The ranges in between, which are removed."""
        behind = 0
        for after, last in self._runs:
            if behind < after:
                yield behind, after
            behind = last


def merge_entry_ranges(runs: Sequence[EntryRange]) -> list[EntryRange]:
    """The same entries in as few runs as possible, in order."""
    found: list[EntryRange] = []
    for after, last in sorted(runs):
        if after >= last:
            continue
        if found and after <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((after, last))
    return found


async def fetch_footer(objects: ObjectStore, key: str, info: SegmentInfo) -> bytes:
    """Two ranged gets at most: the end of the object, and more of it if that was not enough."""
    from tailrace.storage.segments import reader

    start = max(info.bytes - reader.GUESS_BYTES, 0)
    while True:
        found = reader.find_tail(await objects.get_range(key, start, info.bytes), info.bytes)
        if isinstance(found, bytes):
            return reader.pack_tail(found)
        assert found < start, f"{key} needs bytes from before the requested range"
        start = found


def footer_has_keys(stored: bytes) -> bool:
    """Whether any entry of the segment with this footer has a key."""
    from tailrace.storage.segments.reader import Footer

    footer = Footer(stored)
    return any(footer.has_keys(index) for index in range(footer.count))
