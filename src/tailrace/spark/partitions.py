"""Cuts ranges of entries into partitions: each segment by itself, what is in none from the server.

A partition is a run of pieces of one stream, in the order of their entries. A piece says exactly which
entries it stands for, so that they can be had from the server, too, if the object is not there any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from tailrace.spark.catalogue import Catalogue, SealedSegment, StreamState, Versions
from tailrace.spark.columns import About
from tailrace.spark.segment_objects import row_group_ends
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store
from tailrace.storage.segments.model import CorruptSegmentError

PARTITION_BYTES = 16 << 20  # of payload, up to which small segments share a task


class Range(NamedTuple):
    """Entries `after + 1` to `upto` of a stream."""

    state: StreamState
    after: int
    upto: int


class Piece(NamedTuple):
    """Entries `after + 1` to `upto`: of an object, or of the server if there is none."""

    after: int
    upto: int
    epoch: int  # that of the object's entries; on the server, the one to ask with
    store: str = ""
    object: str = ""
    object_bytes: int = 0
    payload_bytes: int = 0

    @property
    def sealed(self) -> bool:
        return bool(self.object)

    @property
    def entries(self) -> int:
        return self.upto - self.after


class StreamPartition(InputPartition):
    """What one task reads."""

    def __init__(self, about: About, pieces: Sequence[Piece], epoch: int, registry: bytes | None) -> None:
        self.about = about
        self.pieces = tuple(pieces)
        self.epoch = epoch
        self.registry = registry

    def __repr__(self) -> str:
        first, last = self.pieces[0].after + 1, self.pieces[-1].upto
        return f"StreamPartition({self.about.stream!r}, entries {first} to {last})"


class Planner:
    """Makes partitions of ranges. `sealed_min` is how long a range has to be for a look at its segments."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        sealed_min: int,
        partitions_min: int,
        keyed: bool,
        whole_streams: bool = False,
    ) -> None:
        self._catalogue = catalogue
        self._sealed_min = sealed_min
        self._partitions_min = partitions_min
        self._keyed = keyed
        self._whole_streams = whole_streams

    def partitions(self, ranges: Sequence[Range], *, with_versions: bool = False) -> list[StreamPartition]:
        planned: list[StreamPartition] = []
        wanted = [one for one in ranges if one.upto > one.after]
        total = sum(one.upto - one.after for one in wanted)
        for one in wanted:
            # Every stream gets its part of what is asked for, by its length.
            share = -(-self._partitions_min * (one.upto - one.after) // total) if total else 0
            planned += self._of_stream(one, share, with_versions)
        return planned

    def _of_stream(self, one: Range, partitions_min: int, with_versions: bool) -> list[StreamPartition]:
        state, epoch = one.state, one.state.tail.epoch
        sealed: list[SealedSegment] = []
        store = None
        # Entries with one key are found by the server, which has an index of them.
        if not self._keyed and one.upto - one.after >= max(1, self._sealed_min):
            store = self._catalogue.store_of(state.name)
            sealed = [] if store is None else self._catalogue.segments(state.name, one.after, one.upto)
        versions = self._catalogue.versions(state) if sealed or with_versions else Versions()
        pieces = pieces_of(one, store or "", sealed)
        groups = [pieces] if self._whole_streams else _packed(pieces)
        if len(groups) < partitions_min and not self._keyed:
            groups = [[piece] for piece in _split(pieces, partitions_min)]
        about = About(state.name, state.content_type, versions.firsts)
        return [
            StreamPartition(about, group, epoch, versions.registry if _promoted(group, versions) else None)
            for group in groups
        ]


def _promoted(group: Sequence[Piece], versions: Versions) -> bool:
    return any(piece.sealed and versions.promotes_behind(piece.after) for piece in group)


def pieces_of(one: Range, store: str, sealed: Sequence[SealedSegment]) -> list[Piece]:
    """The range without a gap and without an overlap: segments where there are, the server in between."""
    pieces: list[Piece] = []
    at, epoch = one.after, one.state.tail.epoch
    for prefix, info in sealed:
        first, last = max(at, info.first - 1), min(one.upto, info.last)
        if last <= first:
            continue
        if first > at:
            pieces.append(Piece(at, first, epoch))
        payload_bytes = info.payload_bytes * (last - first) // max(1, info.rows)
        pieces.append(Piece(first, last, info.epoch, store, prefix + info.key, info.bytes, payload_bytes))
        at = last
    if at < one.upto:
        pieces.append(Piece(at, one.upto, epoch))
    return pieces


def _packed(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """One partition for each segment, but neighbours that are small share one."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        together = groups and piece.sealed and groups[-1][-1].sealed
        if together and size + piece.payload_bytes <= PARTITION_BYTES:
            groups[-1].append(piece)
            size += piece.payload_bytes
        else:
            groups.append([piece])
            size = piece.payload_bytes
    return groups


def _split(pieces: Sequence[Piece], parts_min: int) -> list[Piece]:
    """At least so many pieces, where that is possible: segments are cut between row groups only."""
    total = sum(piece.entries for piece in pieces)
    found: list[Piece] = []
    for piece in pieces:
        parts = -(-parts_min * piece.entries // total)
        if parts <= 1:
            found.append(piece)
        elif piece.sealed:
            found += _cut(piece, _group_cuts(piece, parts))
        else:
            step = -(-piece.entries // parts)
            found += _cut(piece, list(range(piece.after + step, piece.upto, step)))
    return found


def _cut(piece: Piece, cuts: Sequence[int]) -> list[Piece]:
    edges = [piece.after, *cuts, piece.upto]
    return [
        piece._replace(
            after=after, upto=upto, payload_bytes=piece.payload_bytes * (upto - after) // piece.entries
        )
        for after, upto in pairwise(edges)
    ]


def _group_cuts(piece: Piece, parts: int) -> list[int]:
    """The last entries of row groups at which a segment falls into about so many parts."""

    async def fetch() -> list[int]:
        objects = open_object_store(piece.store)
        try:
            return await row_group_ends(objects, piece.object, piece.object_bytes)
        finally:
            await objects.close()

    try:
        ends = [end for end in asyncio.run(fetch()) if piece.after < end < piece.upto]
    except (ObjectStoreError, CorruptSegmentError):
        return []  # whoever reads it will find out, and has the server to ask
    step = max(1, -(-(len(ends) + 1) // parts))
    return ends[step - 1 :: step]
