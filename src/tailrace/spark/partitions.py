"""Partitions of a read: planned on the driver, read on an executor.

`PositionResolver` turns words, offsets and times into positions of each stream. `PartitionPlanner` cuts the
range between two positions into slices, one per segment and from the server in between, and packs slices into
partitions. A slice names its entries exactly, so `PartitionReader` can read them from the server if the
object does not exist any more. Reading is stateless: the same partition always gives the same rows.
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
from tailrace.common.logging_setup import log_fields
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

logger = logging.getLogger("tailrace.spark")


PARTITION_BYTES = 16 << 20  # small segments share a task up to this size of payload


class StreamRange(NamedTuple):
    """Entries `after + 1` to `through` of a stream."""

    state: StreamState
    after: int
    through: int


class RangeSlice(NamedTuple):
    """Entries `after + 1` to `through` of a segment object, or of the server if `object` is empty."""

    after: int
    through: int
    epoch: int  # of the object's entries; for the server, of the offsets in requests
    store: str = ""
    object: str = ""
    object_bytes: int = 0
    payload_bytes: int = 0

    @property
    def is_sealed(self) -> bool:
        return bool(self.object)

    @property
    def entries(self) -> int:
        return self.through - self.after


class StreamPartition(InputPartition):
    """The slices of one stream that one task reads, in order."""

    def __init__(
        self, metadata: StreamMetadata, pieces: Sequence[RangeSlice], epoch: int, registry: bytes | None
    ) -> None:
        self.metadata = metadata
        self.pieces = tuple(pieces)
        self.epoch = epoch
        self.registry = registry

    def __repr__(self) -> str:
        first, last = self.pieces[0].after + 1, self.pieces[-1].through
        return f"StreamPartition({self.metadata.stream!r}, entries {first} to {last})"


class PartitionPlanner:
    """Cuts ranges into partitions.

    A range of fewer than `sealed_min` entries is read from the server only.
    """

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
        nonempty = [one for one in ranges if one.through > one.after]
        total = sum(one.through - one.after for one in nonempty)
        for one in nonempty:
            # `partitions_min` is shared between streams by the length of their ranges.
            share = -(-self._partitions_min * (one.through - one.after) // total) if total else 0
            planned += self._plan_stream(one, share, with_versions)
        return planned

    def _plan_stream(
        self, one: StreamRange, partitions_min: int, with_versions: bool
    ) -> list[StreamPartition]:
        state, epoch = one.state, one.state.tail.epoch
        sealed: list[SealedSegment] = []
        store = None
        # The server finds the entries of one key by its index.
        if not self._keyed and one.through - one.after >= max(1, self._sealed_min):
            store = self._catalogue.store_url(state.name)
            sealed = [] if store is None else self._catalogue.segments(state.name, one.after, one.through)
        versions = self._catalogue.versions(state) if sealed or with_versions else SchemaVersions()
        pieces = slice_range(one, store or "", sealed)
        groups = [pieces] if self._whole_streams else _pack_slices(pieces)
        if len(groups) < partitions_min and not self._keyed:
            groups = [[piece] for piece in _split_slices(pieces, partitions_min)]
        metadata = StreamMetadata(state.name, state.content_type, versions.firsts)
        return [
            StreamPartition(
                metadata, group, epoch, versions.registry if _needs_promotion(group, versions) else None
            )
            for group in groups
        ]


def _needs_promotion(group: Sequence[RangeSlice], versions: SchemaVersions) -> bool:
    return any(piece.is_sealed and versions.needs_promotion_after(piece.after) for piece in group)


def slice_range(one: StreamRange, store: str, sealed: Sequence[SealedSegment]) -> list[RangeSlice]:
    """The range without gaps or overlaps: segments where they exist, the server in between."""
    pieces: list[RangeSlice] = []
    at, epoch = one.after, one.state.tail.epoch
    for prefix, info in sealed:
        first, last = max(at, info.first - 1), min(one.through, info.last)
        if last <= first:
            continue
        if first > at:
            pieces.append(RangeSlice(at, first, epoch))
        payload_bytes = info.payload_bytes * (last - first) // max(1, info.rows)
        pieces.append(
            RangeSlice(first, last, info.epoch, store, prefix + info.key, info.bytes, payload_bytes)
        )
        at = last
    if at < one.through:
        pieces.append(RangeSlice(at, one.through, epoch))
    return pieces


def _pack_slices(pieces: Sequence[RangeSlice]) -> list[list[RangeSlice]]:
    """One partition per segment; small neighbours share one."""
    groups: list[list[RangeSlice]] = []
    size = 0
    for piece in pieces:
        both_sealed = groups and piece.is_sealed and groups[-1][-1].is_sealed
        if both_sealed and size + piece.payload_bytes <= PARTITION_BYTES:
            groups[-1].append(piece)
            size += piece.payload_bytes
        else:
            groups.append([piece])
            size = piece.payload_bytes
    return groups


def _split_slices(pieces: Sequence[RangeSlice], parts_min: int) -> list[RangeSlice]:
    """At least `parts_min` slices if possible: segments are cut between row groups only."""
    total = sum(piece.entries for piece in pieces)
    found: list[RangeSlice] = []
    for piece in pieces:
        parts = -(-parts_min * piece.entries // total)
        if parts <= 1:
            found.append(piece)
        elif piece.is_sealed:
            found += _cut_slice(piece, _row_group_cuts(piece, parts))
        else:
            step = -(-piece.entries // parts)
            found += _cut_slice(piece, list(range(piece.after + step, piece.through, step)))
    return found


def _cut_slice(piece: RangeSlice, cuts: Sequence[int]) -> list[RangeSlice]:
    edges = [piece.after, *cuts, piece.through]
    return [
        piece._replace(
            after=after,
            through=through,
            payload_bytes=piece.payload_bytes * (through - after) // piece.entries,
        )
        for after, through in pairwise(edges)
    ]


def _row_group_cuts(piece: RangeSlice, parts: int) -> list[int]:
    """The last entries of the row groups after which to cut a segment into about `parts` parts."""

    async def fetch() -> list[int]:
        objects = open_object_store(piece.store)
        try:
            return await row_group_ends(objects, piece.object, piece.object_bytes)
        finally:
            await objects.close()

    try:
        ends = [end for end in asyncio.run(fetch()) if piece.after < end < piece.through]
    except (ObjectStoreError, CorruptSegmentError):
        return []  # not cut; the task that reads the slice falls back to the server
    step = max(1, -(-(len(ends) + 1) // parts))
    return ends[step - 1 :: step]


QUERY_ID_PROPERTY = "sql.streaming.queryId"


class DataLossError(RuntimeError):
    """Entries of the read no longer exist."""

    def __init__(self, stream: str, cause: str) -> None:
        super().__init__(f"stream {stream}: {cause}; set failOnDataLoss to false to skip lost entries")


def task_client(options: ReadOptions) -> ServerClient:
    """The shared client of this process. Its user agent names the streaming query."""
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(QUERY_ID_PROPERTY)
    return shared_client(options.connection, f"query/{query}" if query else "")


class PartitionReader:
    """Reads one partition. `row_filter` drops rows that Spark would drop anyway."""

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType,
        partition: StreamPartition,
        row_filter: RowFilter | None = None,
    ) -> None:
        self._options = options
        self._partition = partition
        self._projection = Projection(schema, partition.metadata)
        self._filter = row_filter
        self._server = task_client(options)
        self._promoter = _build_promoter(partition.registry)

    def batches(self) -> Iterator[Any]:
        for piece in self._partition.pieces:
            for rows in (
                self._read_segment(piece)
                if piece.is_sealed
                else self._read_server(piece.after, piece.through)
            ):
                matching = rows if self._filter is None else self._filter.filter_rows(rows)
                if matching.num_rows:
                    yield self._projection.batch(matching)

    # -- objects ---------------------------------------------------------------------------------------

    def _read_segment(self, piece: RangeSlice) -> Iterator[Any]:
        """The rows of a slice of a segment; from the server if the object cannot be read."""
        at = piece.after
        try:
            for rows in self._from_object(piece):
                yield rows
                at = rows.column("entry")[-1].as_py()
        except (ObjectStoreError, OSError) as error:
            logger.warning(
                "object store unavailable, reading from server",
                extra=log_fields(object=piece.object, error=str(error)),
            )
            yield from self._read_server(at, piece.through)

    def _from_object(self, piece: RangeSlice) -> Iterator[Any]:
        objects = shared_segment_store(piece.store)
        footer = objects.footer(piece.object, piece.object_bytes)
        indices = list(range(footer.find(piece.after + 1), footer.find(piece.through) + 1))
        if self._filter is not None:
            indices = self._filter.select_row_groups(footer, indices)
        columns = ["entry", "append_time", "append_ns"]
        if self._projection.needs_key or self._filter is not None:
            columns.append("key")
        if self._projection.needs_payload:
            columns.append("payload")
        bytes_max = self._options.connection.fetch_bytes
        tables = objects.tables(piece.object, footer, indices, columns, bytes_max)
        for rows in batch_tables(tables, piece.after, piece.through, piece.epoch, columns, bytes_max):
            yield self._promote(rows)

    def _promote(self, rows: Any) -> Any:
        """Rows with records of older schema versions promoted to the current version."""
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

    def _read_server(self, after: int, through: int) -> Iterator[Any]:
        """Rows from the server, page by page."""
        options, stream, epoch = self._options, self._partition.metadata.stream, self._partition.epoch
        while after < through:
            try:
                page = self._server.rows(
                    stream,
                    offset=offsets.encode_offset(epoch, after),
                    key=options.key,
                    entries_max=min(BATCH_ROWS, through - after),
                    bytes_max=options.connection.fetch_bytes,
                )
            except ClientError as error:
                after = self._skip_lost_entries(error, after, through)
                continue
            rows = pa.ipc.open_stream(page.body).read_next_batch()
            reached = offsets.parse_offset(page.next_offset)[1]
            if reached <= after:
                raise DataLossError(stream, f"ends at entry {after}, expected {through}")
            if reached > through:  # a page by key skips entries of other keys
                rows = rows.filter(pc.less_equal(rows.column("entry"), through))
            after = reached
            if rows.num_rows:
                yield rows

    def _skip_lost_entries(self, error: ClientError, after: int, through: int) -> int:
        """The entry after which to continue when entries have been trimmed."""
        stream = self._partition.metadata.stream
        if not is_gone(error):
            raise error
        if self._options.fail_on_data_loss:
            raise DataLossError(
                stream, f"entries from {after + 1} were trimmed before they were read ({error.message})"
            ) from error
        earliest = error.extra.get("earliest_offset")
        following = through
        if isinstance(earliest, str):
            following = min(through, max(after, offsets.parse_offset(earliest)[1]))
        if following == after:
            raise error
        logger.warning(
            "entries were trimmed before they were read",
            extra=log_fields(stream=stream, first=after + 1, last=following),
        )
        return following


def _build_promoter(registry: bytes | None) -> Any:
    if registry is None:
        return None
    from tailrace.schema.registry import Promoter, read_registry

    return Promoter(read_registry(registry))


class PositionResolver:
    """Resolves the bounds of a read to positions, and checks that the entries after a start still exist."""

    def __init__(self, catalogue: StreamCatalogue, options: ReadOptions) -> None:
        self._catalogue = catalogue
        self._options = options

    def resolve_start(self, state: StreamState, default: str) -> Position:
        """The position at which a new read of the stream starts."""
        options = self._options
        if options.starting_ns is not None:
            return self.resolve_time(state, options.starting_ns)
        return self._select(state, options.starting or default, default)

    def resolve_end(self, state: StreamState) -> Position:
        """The position at which a batch read of the stream ends."""
        options = self._options
        if options.ending_ns is not None:
            # Exclusive: the read ends before the first entry of that time.
            return self.resolve_time(state, options.ending_ns)
        return self._select(state, options.ending or "latest", "latest")

    def _select(self, state: StreamState, positions: Positions, default: str) -> Position:
        if isinstance(positions, dict):
            position = positions.get(state.name, default)
            if position not in ("earliest", "latest"):
                return self._parse(state, position)
            positions = position
        return state.earliest if positions == "earliest" else state.tail

    def _parse(self, state: StreamState, text: str) -> Position:
        if text in ("-1", "now"):
            return state.earliest if text == "-1" else state.tail
        try:
            return position_from_offset(text)
        except TailraceError as error:
            raise OptionError(f"invalid offset {text!r} for stream {state.name}: {error}") from None

    def resolve_time(self, state: StreamState, instant_ns: int) -> Position:
        """The position before the first entry appended at that time or later; the tail if there is none."""
        page = self._catalogue.server.rows(state.name, since_ns=instant_ns, entries_max=1)
        rows = pa.ipc.open_stream(page.body).read_next_batch()
        if not rows.num_rows:
            return min(state.tail, position_from_offset(page.next_offset))
        entry: int = rows.column("entry")[0].as_py()
        return Position(rows.column("epoch")[0].as_py(), entry - 1)

    def check_retained(self, state: StreamState, start: Position) -> Position:
        """The position if the stream still has all entries after it; else the earliest one, or an error."""
        if self._is_retained(state, start):
            return start
        if self._options.fail_on_data_loss:
            raise DataLossError(
                state.name,
                f"entries after offset {start.offset} were trimmed before they were read; the earliest "
                f"offset is {state.earliest.offset}",
            )
        logger.warning(
            "entries were trimmed before they were read",
            extra=log_fields(stream=state.name, offset=start.offset, earliest=state.earliest.offset),
        )
        return state.earliest

    def _is_retained(self, state: StreamState, start: Position) -> bool:
        if start == STREAM_START:
            return state.earliest.entry == 0
        if start.epoch == state.tail.epoch:
            return state.earliest.entry <= start.entry <= state.tail.entry
        # Entries of an older epoch may not be part of the current one: only the server can tell.
        try:
            self._catalogue.server.rows(state.name, offset=start.offset, entries_max=1)
        except ClientError as error:
            if is_gone(error) or error.code == "offset_beyond_tail":
                return False
            raise
        return True


def encode_positions(positions: dict[str, Position]) -> dict[str, str]:
    """Positions as Spark stores them: a flat map, sorted so that equal positions give equal JSON."""
    return {name: positions[name].offset for name in sorted(positions)}


def decode_positions(offsets_by_stream: dict[str, str]) -> dict[str, Position]:
    return {name: Position(*offsets.parse_offset(text)) for name, text in offsets_by_stream.items()}
