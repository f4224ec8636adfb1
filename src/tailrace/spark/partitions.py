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

from tailrace.spark.catalogue import SchemaVersions, SealedSegment, StreamCatalogue, StreamState
from tailrace.spark.columns import StreamMetadata
from tailrace.spark.segment_objects import row_group_ends
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store
from tailrace.storage.segments.model import CorruptSegmentError

PARTITION_BYTES = 16 << 20  # of payload, up to which small segments share a task


class StreamRange(NamedTuple):
    """Entries `after + 1` to `upto` of a stream."""

    state: StreamState
    after: int
    upto: int


class RangeSlice(NamedTuple):
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

    def __init__(
        self, about: StreamMetadata, pieces: Sequence[RangeSlice], epoch: int, registry: bytes | None
    ) -> None:
        self.about = about
        self.pieces = tuple(pieces)
        self.epoch = epoch
        self.registry = registry

    def __repr__(self) -> str:
        first, last = self.pieces[0].after + 1, self.pieces[-1].upto
        return f"StreamPartition({self.about.stream!r}, entries {first} to {last})"


class PartitionPlanner:
    """Makes partitions of ranges. `sealed_min` is how long a range has to be for a look at its segments."""

    def __init__(
        self,
        catalogue: StreamCatalogue,
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

    def partitions(
        self, ranges: Sequence[StreamRange], *, with_versions: bool = False
    ) -> list[StreamPartition]:
        planned: list[StreamPartition] = []
        wanted = [one for one in ranges if one.upto > one.after]
        total = sum(one.upto - one.after for one in wanted)
        for one in wanted:
            # Every stream gets its part of what is asked for, by its length.
            share = -(-self._partitions_min * (one.upto - one.after) // total) if total else 0
            planned += self._of_stream(one, share, with_versions)
        return planned

    def _of_stream(self, one: StreamRange, partitions_min: int, with_versions: bool) -> list[StreamPartition]:
        state, epoch = one.state, one.state.tail.epoch
        sealed: list[SealedSegment] = []
        store = None
        # Entries with one key are found by the server, which has an index of them.
        if not self._keyed and one.upto - one.after >= max(1, self._sealed_min):
            store = self._catalogue.store_of(state.name)
            sealed = [] if store is None else self._catalogue.segments(state.name, one.after, one.upto)
        versions = self._catalogue.versions(state) if sealed or with_versions else SchemaVersions()
        pieces = slice_range(one, store or "", sealed)
        groups = [pieces] if self._whole_streams else _pack_slices(pieces)
        if len(groups) < partitions_min and not self._keyed:
            groups = [[piece] for piece in _split_slices(pieces, partitions_min)]
        about = StreamMetadata(state.name, state.content_type, versions.firsts)
        return [
            StreamPartition(
                about, group, epoch, versions.registry if _needs_promotion(group, versions) else None
            )
            for group in groups
        ]


def _needs_promotion(group: Sequence[RangeSlice], versions: SchemaVersions) -> bool:
    return any(piece.sealed and versions.promotes_behind(piece.after) for piece in group)


def slice_range(one: StreamRange, store: str, sealed: Sequence[SealedSegment]) -> list[RangeSlice]:
    """The range without a gap and without an overlap: segments where there are, the server in between."""
    pieces: list[RangeSlice] = []
    at, epoch = one.after, one.state.tail.epoch
    for prefix, info in sealed:
        first, last = max(at, info.first - 1), min(one.upto, info.last)
        if last <= first:
            continue
        if first > at:
            pieces.append(RangeSlice(at, first, epoch))
        payload_bytes = info.payload_bytes * (last - first) // max(1, info.rows)
        pieces.append(
            RangeSlice(first, last, info.epoch, store, prefix + info.key, info.bytes, payload_bytes)
        )
        at = last
    if at < one.upto:
        pieces.append(RangeSlice(at, one.upto, epoch))
    return pieces


def _pack_slices(pieces: Sequence[RangeSlice]) -> list[list[RangeSlice]]:
    """One partition for each segment, but neighbours that are small share one."""
    groups: list[list[RangeSlice]] = []
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


def _split_slices(pieces: Sequence[RangeSlice], parts_min: int) -> list[RangeSlice]:
    """At least so many pieces, where that is possible: segments are cut between row groups only."""
    total = sum(piece.entries for piece in pieces)
    found: list[RangeSlice] = []
    for piece in pieces:
        parts = -(-parts_min * piece.entries // total)
        if parts <= 1:
            found.append(piece)
        elif piece.sealed:
            found += _cut_slice(piece, _row_group_cuts(piece, parts))
        else:
            step = -(-piece.entries // parts)
            found += _cut_slice(piece, list(range(piece.after + step, piece.upto, step)))
    return found


def _cut_slice(piece: RangeSlice, cuts: Sequence[int]) -> list[RangeSlice]:
    edges = [piece.after, *cuts, piece.upto]
    return [
        piece._replace(
            after=after, upto=upto, payload_bytes=piece.payload_bytes * (upto - after) // piece.entries
        )
        for after, upto in pairwise(edges)
    ]


def _row_group_cuts(piece: RangeSlice, parts: int) -> list[int]:
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
