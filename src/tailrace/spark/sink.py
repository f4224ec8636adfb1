"""Exactly-once writes, `df.write` and `df.writeStream` with `format("tailrace")`: staging, delivery, commit.

The producer id is the query and the partition, the producer epoch is the batch number, and appends are
numbered within both, so the server drops duplicates. That is exactly-once if a repeated batch is cut into the
same appends. With `delivery=direct` tasks send their rows, and this depends on the query being deterministic.

With `delivery=staged` it holds for every query: a task writes its rows to files, in the order in which they
will be sent. The commit on the driver creates `COMMIT.json`, which lists the files, and only then sends their
rows. A repeated batch finds that document and sends the rows that it lists, not those of the new run.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.client.errors import ClientError
from tailrace.client.model import is_json
from tailrace.client.wire import ProducerFields
from tailrace.common.logging_setup import log_fields
from tailrace.spark.options import OptionError, WriteOptions
from tailrace.spark.server_client import ServerClient, shared_client
from tailrace.spark.sink_rows import (
    SinkAppend,
    SinkError,
    check_columns,
    json_array,
    split_into_appends,
    to_sink_rows,
    value_ends,
)
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectExistsError,
    ObjectStore,
    ObjectStoreError,
    open_object_store,
)
from tailrace.storage.segments.parquet import BINARY, INT32, STRING, integer_array, pa, pq

logger = logging.getLogger("tailrace.spark")

FILE_BYTES_MAX = 32 << 20  # of rows in one staged file
INLINE_BYTES_MAX = 256 << 10  # of rows in the commit message of a task, instead of a file
COMMIT_BYTES_MAX = 4 << 20  # of rows in COMMIT.json, instead of files
BATCHES_RETAINED = 2
_PART_SCHEMA = pa.schema([("append", INT32), ("stream", STRING), ("key", STRING), ("value", BINARY)])


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one partition: in a file or inline."""

    partition: int
    rows: int
    sha256: str
    file: str | None = None
    inline: bytes | None = None


class BatchCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a batch, stored as COMMIT.json."""

    version: int = 1
    query: str
    batch: int
    parts: list[StagedPart]


def encode_parts(appends: Iterable[SinkAppend]) -> Iterator[tuple[int, bytes]]:
    """Appends as Parquet files of at most about FILE_BYTES_MAX, each with its number of rows."""
    pending: list[SinkAppend] = []
    size = 0
    for append in appends:
        pending.append(append)
        size += int(value_ends(append.values)[-1])
        if size >= FILE_BYTES_MAX:
            yield _encode_part(pending)
            pending, size = [], 0
    if pending:
        yield _encode_part(pending)


def _encode_part(appends: list[SinkAppend]) -> tuple[int, bytes]:
    counts = [len(append.values) for append in appends]
    numbers = np.repeat(np.arange(len(appends), dtype=np.int32), counts)
    places = integer_array(INT32, numbers, len(numbers))
    columns = [
        places,
        pa.array([append.stream for append in appends], STRING).take(places),
        pa.array([append.key for append in appends], STRING).take(places),
        pa.chunked_array([append.values for append in appends], BINARY),
    ]
    sink = pa.BufferOutputStream()
    table = pa.table(columns, schema=_PART_SCHEMA)
    # Written once, read once, then deleted: fast compression is enough.
    pq.write_table(table, sink, compression="lz4", use_dictionary=["stream", "key"], write_statistics=False)
    data: bytes = sink.getvalue().to_pybytes()
    return len(numbers), data


def decode_part(data: bytes) -> Iterator[SinkAppend]:
    """The appends of an encoded part."""
    table = pq.read_table(pa.BufferReader(data), use_threads=False).combine_chunks()
    numbers = table.column("append").to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    first = table.select(["stream", "key"]).take(starts)
    streams: list[str] = first.column("stream").to_pylist()
    keys: list[str | None] = first.column("key").to_pylist()
    values = table.column("value").chunk(0)
    edges = [*starts.tolist(), len(numbers)]
    for stream, key, (start, stop) in zip(streams, keys, pairwise(edges), strict=True):
        yield SinkAppend(stream, key, values.slice(start, stop - start))


def build_part(partition: int, rows: int, data: bytes) -> StagedPart:
    return StagedPart(partition=partition, rows=rows, sha256=hashlib.sha256(data).hexdigest(), inline=data)


class StagingArea:
    """Blocking access to one staging location. Never pickled: opened in the process that uses it."""

    def __init__(self, url: str) -> None:
        self._runner = BlockingRunner()
        self._objects: ObjectStore = open_object_store(url)
        self._lock = Lock()

    def close(self) -> None:
        self._runner.run(self._objects.close())
        self._runner.close()

    def put(self, query: str, batch: int, part: StagedPart) -> StagedPart:
        """Write the rows of an inline part to a new file."""
        assert part.inline is not None
        name = f"{part.partition:06}-{secrets.token_hex(8)}.parquet"
        self._runner.run(self._objects.create(_batch_folder(query, batch) + name, part.inline))
        return msgspec.structs.replace(part, file=name, inline=None)

    def read_part(self, commit: BatchCommit, part: StagedPart) -> bytes:
        if part.inline is not None:
            return part.inline
        key = _batch_folder(commit.query, commit.batch) + str(part.file)
        with self._lock:  # partitions are sent concurrently
            data, _ = self._runner.run(self._objects.get(key))
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise SinkError(f"staged file {key} has the wrong SHA-256; none of its rows were sent")
        return data

    def commit(self, commit: BatchCommit) -> tuple[BatchCommit, bool]:
        """Store the content of the batch unless a run before did.

        Returns the stored content and if it is new.

        A driver that was presumed dead may commit when another run is batches ahead and has swept this
        batch's COMMIT.json. The rows of the batch are in the stream already, perhaps from other partitions,
        so that the server would not recognize them as duplicates: the commit is refused. The check for later
        batches runs after COMMIT.json is created, because a run creates a later one before it sweeps.
        """
        stored = commit
        if sum(len(part.inline or b"") for part in commit.parts) > COMMIT_BYTES_MAX:
            parts = [
                part if part.inline is None else self.put(commit.query, commit.batch, part)
                for part in commit.parts
            ]
            stored = msgspec.structs.replace(commit, parts=parts)
        key = _commit_key(commit.query, commit.batch)
        try:
            self._runner.run(self._objects.create(key, msgspec.json.encode(stored)))
        except ObjectExistsError:
            data, _ = self._runner.run(self._objects.get(key))
            return msgspec.json.decode(data, type=BatchCommit), False
        if self._runner.run(self._objects.list_after(f"{commit.query}/", key, 1)):
            self.delete_commit(commit.query, commit.batch)
            raise SinkError(
                f"batch {commit.batch} was committed by another run of the same query, which is ahead; "
                "none of its rows were sent. Stop one of the two runs"
            )
        return stored, True

    def delete_commit(self, query: str, batch: int) -> None:
        """Revoke a commit of which no row was accepted."""
        self._runner.run(self._objects.delete([_commit_key(query, batch)]))

    def discard(self, query: str, batch: int, names: Sequence[str]) -> None:
        self._runner.run(self._objects.delete([_batch_folder(query, batch) + name for name in names]))

    def sweep(self, query: str, batch: int) -> None:
        """Delete all batches but the last BATCHES_RETAINED: Spark does not repeat them."""
        listed = self._runner.run(self._objects.list_after(f"{query}/"))
        first_retained = _batch_folder(query, max(0, batch - BATCHES_RETAINED + 1))
        self._runner.run(self._objects.delete([info.key for info in listed if info.key < first_retained]))


def _batch_folder(query: str, batch: int) -> str:
    return f"{query}/{batch:020}/"


def _commit_key(query: str, batch: int) -> str:
    return _batch_folder(query, batch) + "COMMIT.json"


class TargetStreams:
    """Content types of the target streams, cached. Creates missing streams if `createStream` is set."""

    def __init__(self, server: ServerClient, options: WriteOptions) -> None:
        self._server = server
        self._options = options
        self._types: dict[str, str] = {}

    def content_type(self, stream: str) -> str:
        found = self._types.get(stream)
        if found is None:
            found = self._types[stream] = self._load(stream)
        return found

    def is_json(self, stream: str) -> bool:
        return is_json(self.content_type(stream))

    def _load(self, stream: str) -> str:
        info = self._server.head(stream)
        if info is None and self._options.create:
            self._server.create(stream, self._options.content_type)
            info = self._server.head(stream)
        if info is None:
            raise SinkError(f"stream not found: {stream}, and createStream is false")
        if info.closed:
            raise SinkError(f"stream {stream} is closed")
        return info.content_type


class AppendSender:
    """Sends the appends of one partition of a batch. Sequence numbers start at 0 for each target."""

    def __init__(self, server: ServerClient, targets: TargetStreams, producer_id: str, epoch: int) -> None:
        self._server = server
        self._targets = targets
        self._producer_id = producer_id
        self._epoch = epoch
        self._next_seq: Counter[str] = Counter()
        self.rows = 0
        self.accepted = 0  # appends that the server accepted, duplicates included

    def send_all(self, appends: Iterable[SinkAppend]) -> None:
        for append in appends:
            self.send(append)

    def send(self, append: SinkAppend) -> None:
        content_type = self._targets.content_type(append.stream)
        if is_json(content_type):
            self._send(append, json_array(append.values), content_type)
        else:
            # The body of a request is one entry, so each row is a request.
            for value in append.values.to_pylist():
                self._send(append, value, content_type)
        self.rows += len(append.values)

    def _send(self, append: SinkAppend, body: bytes, content_type: str) -> None:
        seq = self._next_seq[append.stream]
        producing = ProducerFields(self._producer_id, self._epoch, seq)
        try:
            self._server.append(append.stream, body, content_type, append.key, producing)
        except ClientError as error:
            raise _explain_error(error, append.stream, self._producer_id) from error
        self._next_seq[append.stream] = seq + 1
        self.accepted += 1


class AppendRefusedError(SinkError):
    """The server refused an append and stored none of it."""


def _explain_error(error: ClientError, stream: str, producer_id: str) -> SinkError:
    match error.code:
        case "stale_epoch":
            return SinkError(
                f"stream {stream}: another run of the same query ({producer_id}) is alive and ahead; "
                "stop one of the two runs"
            )
        case "stream_closed":
            return SinkError(f"stream {stream} is closed")
        case _ if 400 <= error.status < 500 and error.status not in (408, 409, 429):
            return AppendRefusedError(f"stream {stream}: {error}")
        case _:
            return SinkError(f"stream {stream}: {error}")


QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
SENDERS_MAX = 8
UNSTAGED_BYTES_MAX = 32 << 20  # of a partition in a write without a staging location


class PartitionCommitMessage(WriterCommitMessage):
    """Sent from a task to the commit on the driver: the staged parts of its partition."""

    def __init__(self, query: str, partition: int, parts: Sequence[StagedPart], rows: int) -> None:
        self.query = query
        self.partition = partition
        self.parts = list(parts)
        self.rows = rows


class PartitionWriter:
    """Writes one partition of a batch, in a task."""

    def __init__(self, options: WriteOptions, query: str, batch: int, partition: int) -> None:
        self._options = options
        self._query = query
        self._batch = batch
        self._partition = partition
        self._server = shared_client(options.connection, f"query/{query}")
        self._targets = TargetStreams(self._server, options)

    def write(self, batches: Iterator[Any]) -> PartitionCommitMessage:
        rows = to_sink_rows(batches, self._options)
        appends = split_into_appends(rows, self._options, self._targets.is_json)
        if self._options.direct:
            delivery = AppendSender(
                self._server, self._targets, producer_name(self._query, self._partition), self._batch
            )
            delivery.send_all(appends)
            return PartitionCommitMessage(self._query, self._partition, [], delivery.rows)
        parts = self._stage(build_part(self._partition, *encoded) for encoded in encode_parts(appends))
        return PartitionCommitMessage(self._query, self._partition, parts, sum(part.rows for part in parts))

    def _stage(self, parts: Iterator[StagedPart]) -> list[StagedPart]:
        found: list[StagedPart] = []
        staging = None if self._options.staging is None else StagingArea(self._options.staging)
        try:
            for part in parts:
                size = len(part.inline or b"")
                if staging is not None and size > INLINE_BYTES_MAX:
                    part = staging.put(self._query, self._batch, part)
                found.append(part)
                if staging is None and sum(len(one.inline or b"") for one in found) > UNSTAGED_BYTES_MAX:
                    raise SinkError(
                        f"partition exceeds {UNSTAGED_BYTES_MAX} bytes without a staging location: set "
                        "stagingLocation to a directory or bucket that all executors share, or delivery "
                        "to direct"
                    )
        finally:
            if staging is not None:
                staging.close()
        return found


def producer_name(query: str, partition: int) -> str:
    return f"spark:{query}:{partition}"


class BatchCommitter:
    """Commits or aborts a batch, on the driver."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        written = [message for message in messages if isinstance(message, PartitionCommitMessage)]
        if not written or self._options.direct:
            return
        query = written[0].query
        parts = [part for message in written for part in message.parts]
        commit = BatchCommit(query=query, batch=batch, parts=sorted(parts, key=lambda part: part.partition))
        if self._options.staging is None:
            self._send(commit, lambda part: part.inline or b"")
            return
        staging = StagingArea(self._options.staging)
        try:
            self._commit_staged(staging, commit)
        finally:
            staging.close()

    def _commit_staged(self, staging: StagingArea, commit: BatchCommit) -> None:
        stored, new = staging.commit(commit)
        try:
            self._send(stored, lambda part: staging.read_part(stored, part))
        except _NothingAcceptedError as error:
            if new:
                # No row was stored: a corrected query may commit this batch with other rows.
                staging.delete_commit(commit.query, commit.batch)
            raise error.cause from error.cause.__cause__
        if not new:
            listed = {part.file for part in stored.parts}
            staging.discard(
                commit.query,
                commit.batch,
                [part.file for part in commit.parts if part.file is not None and part.file not in listed],
            )
        try:
            staging.sweep(commit.query, commit.batch)
        except ObjectStoreError as error:
            logger.warning("staged files of old batches not deleted", extra=log_fields(error=str(error)))

    def _send(self, commit: BatchCommit, rows: Callable[[StagedPart], bytes]) -> None:
        """Send partitions concurrently, the appends of each in order."""
        server = shared_client(self._options.connection, f"query/{commit.query}")
        targets = TargetStreams(server, self._options)
        deliveries: list[AppendSender] = []

        def send(partition: int, parts: list[StagedPart]) -> None:
            producer = producer_name(commit.query, partition)
            delivery = AppendSender(server, targets, producer, commit.batch)
            deliveries.append(delivery)
            for part in parts:
                delivery.send_all(decode_part(rows(part)))

        with ThreadPoolExecutor(SENDERS_MAX, "sink") as pool:
            sent = [
                pool.submit(send, partition, list(parts))
                for partition, parts in groupby(commit.parts, key=lambda part: part.partition)
            ]
            failures = [error for one in sent if (error := one.exception()) is not None]
        if not failures:
            return
        if not any(one.accepted for one in deliveries) and all(
            isinstance(error, AppendRefusedError) for error in failures
        ):
            raise _NothingAcceptedError(failures[0])
        raise failures[0]

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """Delete the staged files of a batch that failed."""
        written = [message for message in messages if isinstance(message, PartitionCommitMessage)]
        names = [part.file for message in written for part in message.parts if part.file is not None]
        if not names or self._options.staging is None:
            return
        staging = StagingArea(self._options.staging)
        try:
            staging.discard(written[0].query, batch, names)
        except ObjectStoreError as error:
            logger.warning("staged files of aborted batch not deleted", extra=log_fields(error=str(error)))
        finally:
            staging.close()


class _NothingAcceptedError(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _check_write(schema: StructType, options: WriteOptions, overwrite: bool) -> None:
    if overwrite:
        raise OptionError("streams are append-only: use mode append and outputMode append")
    check_columns(schema, options)


class StreamSink(DataSourceStreamArrowWriter):
    """Writes micro-batches.

    Spark creates a new object for each commit: attributes set by `write` are lost.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        _check_write(schema, options, overwrite)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> PartitionCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query, batch = (
            context.getLocalProperty(QUERY_ID_PROPERTY),
            context.getLocalProperty(BATCH_ID_PROPERTY),
        )
        if query is None or batch is None:
            raise SinkError("Spark does not provide the query id and batch id; Spark 4.3 is required")
        name = self._options.producer_id or query
        return PartitionWriter(self._options, name, int(batch), context.partitionId()).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        BatchCommitter(self._options).commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        BatchCommitter(self._options).abort(messages, batchId)


class BatchSink(DataSourceArrowWriter):
    """A batch write. With `producerId`, repeating it has no effect."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        _check_write(schema, options, overwrite)
        self._options = options
        self._id = options.producer_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> PartitionCommitMessage:
        context = TaskContext.get()
        assert context is not None
        return PartitionWriter(self._options, self._id, 0, context.partitionId()).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        BatchCommitter(self._options).commit(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        BatchCommitter(self._options).abort(messages, 0)
