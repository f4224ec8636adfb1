"""Segments: what one is called, where it lies, and what is recorded about it.

A segment is an immutable Parquet file with consecutive entries of one stream. This file is the part that
everybody needs and that costs nothing to import; `segment_writer.py` makes the files and `segment_reader.py`
takes them apart, and both bring Arrow with them. The format is described in docs/formats.md.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec
import xxhash

FORMAT_VERSION = 1
FOOTER_GUESS_BYTES = 64 << 10  # how much of the end of a file to read for its footer, at first
NAME_HASH_DIGITS = 16  # of the file's SHA-256: enough that a name never stands for two contents


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
    """32 hex digits for one use of a name: a name that was deleted and made again gets another folder."""
    return xxhash.xxh3_128_hexdigest(name.encode() + b"\0" + incarnation.to_bytes(8, "big"))


def stream_prefix(stream_id: str) -> str:
    return f"streams/{stream_id[:2]}/{stream_id}/"


def segment_name(epoch: int, first: int, last: int, sha256: str) -> str:
    """The key of a segment in its stream's folder; names sort as entries do."""
    return f"segments/{epoch:010}-{first:020}-{last:020}.{sha256[:NAME_HASH_DIGITS]}.parquet"
