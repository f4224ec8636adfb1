"""Partitions of a read: positions resolved and ranges cut on the driver, rows read on an executor.

Cuts ranges of entries into partitions: each segment by itself, what is in none from the server.

A partition is a run of pieces of one stream, in the order of their entries. A piece says exactly which
entries it stands for, so that they can be had from the server, too, if the object is not there any more.

Reads one partition, on an executor. Stateless: the same partition gives the same rows again.

Where a read begins and ends: words, offsets and times as positions of each stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from tailrace.client.errors import ClientError
from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.spark.catalogue import (
    STREAM_START,
    Position,
    SchemaVersions,
    SealedSegment,
    StreamCatalogue,
    StreamState,
    position_from_offset,
)
from tailrace.spark.columns import Projection, StreamMetadata
from tailrace.spark.object_stores import BATCH_ROWS, batch_tables, row_group_ends, shared_segment_store
from tailrace.spark.options import OptionError, Positions, ReadOptions
from tailrace.spark.server_client import ServerClient, is_gone, shared_client
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store
from tailrace.storage.segments.model import CorruptSegmentError
from tailrace.storage.segments.parquet import STRING, pa, pc

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tailrace.spark.batch_reader import RowFilter


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


logger = logging.getLogger("tailrace.spark")

QUERY_ID_PROPERTY = "sql.streaming.queryId"


class DataLossError(RuntimeError):
    """Entries that were to be read are not there any more."""

    def __init__(self, stream: str, what: str) -> None:
        super().__init__(f"stream {stream}: {what}; set failOnDataLoss to false to go on with what there is")


def task_client(options: ReadOptions) -> ServerClient:
    """The server of this process, told apart in its logs by the query that asks."""
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(QUERY_ID_PROPERTY)
    return shared_client(options.connection, f"query/{query}" if query else "")


class PartitionReader:
    """Everything that one task needs. `row_filter` drops rows that Spark would drop anyway."""

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType,
        partition: StreamPartition,
        row_filter: RowFilter | None = None,
    ) -> None:
        self._options = options
        self._partition = partition
        self._projection = Projection(schema, partition.about)
        self._filter = row_filter
        self._server = task_client(options)
        self._promoter = _build_promoter(partition.registry)

    def batches(self) -> Iterator[Any]:
        for piece in self._partition.pieces:
            for rows in self._sealed(piece) if piece.sealed else self._served(piece.after, piece.upto):
                kept = rows if self._filter is None else self._filter.keep(rows)
                if kept.num_rows:
                    yield self._projection.batch(kept)

    # -- objects ---------------------------------------------------------------------------------------

    def _sealed(self, piece: RangeSlice) -> Iterator[Any]:
        """A piece of a segment; what the store cannot give, the server can."""
        at = piece.after
        try:
            for rows in self._from_object(piece):
                yield rows
                at = rows.column("entry")[-1].as_py()
        except (ObjectStoreError, OSError) as error:
            logger.warning("%s is read through the server: %s", piece.object, error)
            yield from self._served(at, piece.upto)

    def _from_object(self, piece: RangeSlice) -> Iterator[Any]:
        objects = shared_segment_store(piece.store)
        footer = objects.footer(piece.object, piece.object_bytes)
        indices = list(range(footer.find(piece.after + 1), footer.find(piece.upto) + 1))
        if self._filter is not None:
            indices = self._filter.groups(footer, indices)
        columns = ["entry", "append_time", "append_ns"]
        if self._projection.needs_key or self._filter is not None:
            columns.append("key")
        if self._projection.needs_payload:
            columns.append("payload")
        bytes_max = self._options.connection.fetch_bytes
        tables = objects.tables(piece.object, footer, indices, columns, bytes_max)
        for rows in batch_tables(tables, piece.after, piece.upto, piece.epoch, columns, bytes_max):
            yield self._promoted(rows)

    def _promoted(self, rows: Any) -> Any:
        """Rows as readers get them: a record of an older schema version becomes one of the current."""
        if self._promoter is None or not self._projection.needs_payload:
            return rows
        entries: list[int] = rows.column("entry").to_pylist()
        if not self._promoter.needed(entries[0] - 1):
            return rows
        payloads: list[str] = rows.column("payload").to_pylist()
        promoted = [
            bytes(self._promoter.promote_payload(payload.encode(), entry - 1))
            for entry, payload in zip(entries, payloads, strict=True)
        ]
        column = pa.array([payload.decode() for payload in promoted], STRING)
        return rows.set_column(rows.schema.get_field_index("payload"), "payload", column)

    # -- server ----------------------------------------------------------------------------------------

    def _served(self, after: int, upto: int) -> Iterator[Any]:
        """Rows from the server, page by page."""
        options, stream, epoch = self._options, self._partition.about.stream, self._partition.epoch
        while after < upto:
            try:
                page = self._server.rows(
                    stream,
                    offset=offsets.encode_offset(epoch, after),
                    key=options.key,
                    entries_max=min(BATCH_ROWS, upto - after),
                    bytes_max=options.connection.fetch_bytes,
                )
            except ClientError as error:
                after = self._over_loss(error, after, upto)
                continue
            rows = pa.ipc.open_stream(page.body).read_next_batch()
            reached = offsets.parse_offset(page.next_offset)[1]
            if reached <= after:
                raise DataLossError(stream, f"it ends at entry {after}, and {upto} was expected")
            if reached > upto:  # by key a page reaches as far as there is nothing to show
                rows = rows.filter(pc.less_equal(rows.column("entry"), upto))
            after = reached
            if rows.num_rows:
                yield rows

    def _over_loss(self, error: ClientError, after: int, upto: int) -> int:
        """Where to go on when entries are gone."""
        stream = self._partition.about.stream
        if not is_gone(error):
            raise error
        if self._options.fail_on_data_loss:
            raise DataLossError(stream, f"entries from {after + 1} on are gone ({error.message})") from error
        earliest = error.extra.get("earliest_offset")
        following = upto
        if isinstance(earliest, str):
            following = min(upto, max(after, offsets.parse_offset(earliest)[1]))
        if following == after:
            raise error
        logger.warning("stream %s: entries %d to %d are gone", stream, after + 1, following)
        return following


def _build_promoter(registry: bytes | None) -> Any:
    if registry is None:
        return None
    from tailrace.schema.registry import Promoter, read_registry

    return Promoter(read_registry(registry))


class PositionResolver:
    """Resolves positions, and looks whether they still mean something."""

    def __init__(self, catalogue: StreamCatalogue, options: ReadOptions) -> None:
        self._catalogue = catalogue
        self._options = options

    def starting(self, state: StreamState, default: str) -> Position:
        """Where a new read of the stream begins."""
        options = self._options
        if options.starting_ns is not None:
            return self.at_time(state, options.starting_ns)
        return self._positioned(state, options.starting or default, default)

    def ending(self, state: StreamState) -> Position:
        """Where a batch read of the stream ends."""
        options = self._options
        if options.ending_ns is not None:
            # As with a start, the first entry at that time is the first one behind it.
            return self.at_time(state, options.ending_ns)
        return self._positioned(state, options.ending or "latest", "latest")

    def _positioned(self, state: StreamState, positions: Positions, default: str) -> Position:
        if isinstance(positions, dict):
            given = positions.get(state.name, default)
            if given not in ("earliest", "latest"):
                return self._explicit(state, given)
            positions = given
        return state.earliest if positions == "earliest" else state.tail

    def _explicit(self, state: StreamState, text: str) -> Position:
        if text in ("-1", "now"):
            return state.earliest if text == "-1" else state.tail
        try:
            return position_from_offset(text)
        except TailraceError as error:
            raise OptionError(f"{text!r} is no offset of stream {state.name}: {error}") from None

    def at_time(self, state: StreamState, instant_ns: int) -> Position:
        """Before the first entry that was appended at that time or later; the tail if there is none."""
        page = self._catalogue.server.rows(state.name, since_ns=instant_ns, entries_max=1)
        rows = pa.ipc.open_stream(page.body).read_next_batch()
        if not rows.num_rows:
            return min(state.tail, position_from_offset(page.next_offset))
        entry: int = rows.column("entry")[0].as_py()
        return Position(rows.column("epoch")[0].as_py(), entry - 1)

    def checked(self, state: StreamState, start: Position) -> Position:
        """The position if the stream still has everything behind it; else the earliest, or an error."""
        if self._holds(state, start):
            return start
        if self._options.fail_on_data_loss:
            raise DataLossError(
                state.name,
                f"entries behind offset {start.offset} are gone; what there is begins behind "
                f"{state.earliest.offset}",
            )
        logger.warning("stream %s: entries behind offset %s are gone", state.name, start.offset)
        return state.earliest

    def _holds(self, state: StreamState, start: Position) -> bool:
        if start == STREAM_START:
            return state.earliest.entry == 0
        if start.epoch == state.tail.epoch:
            return state.earliest.entry <= start.entry <= state.tail.entry
        # Of an older epoch some entries may never have made it into this one: the server knows.
        try:
            self._catalogue.server.rows(state.name, offset=start.offset, entries_max=1)
        except ClientError as error:
            if is_gone(error) or error.code == "offset_beyond_tail":
                return False
            raise
        return True


def encode_positions(positions: dict[str, Position]) -> dict[str, str]:
    """Positions as Spark keeps them: flat, and sorted so that equal ones are equal texts."""
    return {name: positions[name].offset for name in sorted(positions)}


def decode_positions(offsets_by_stream: dict[str, str]) -> dict[str, Position]:
    return {name: Position(*offsets.parse_offset(text)) for name, text in offsets_by_stream.items()}
