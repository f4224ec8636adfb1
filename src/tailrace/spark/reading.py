"""Reads one partition, on an executor. Stateless: the same partition gives the same rows again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from tailrace.client.errors import ClientError
from tailrace.protocol import offsets
from tailrace.spark.columns import Projection
from tailrace.spark.options import ReadOptions
from tailrace.spark.partitions import RangeSlice, StreamPartition
from tailrace.spark.segment_objects import BATCH_ROWS, batch_tables, shared_segment_store
from tailrace.spark.server_client import ServerClient, is_gone, shared_client
from tailrace.storage.object_store.interface import ObjectStoreError
from tailrace.storage.segments.parquet import STRING, pa, pc

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tailrace.spark.filters import RowFilter

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
