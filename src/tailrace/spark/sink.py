"""Exactly-once writes, `df.write` and `df.writeStream` with `format("tailrace")`: staging, delivery, commit.

Where rows of a batch wait until it commits, and the one document that says which of them count.

A task writes its rows to files, in the order in which they will be sent. The commit creates `COMMIT.json`,
which lists them, and only then sends. A batch that is run again finds the document and sends what **it**
lists, whatever the rows of the new run are: so each batch has one content, however often it is run.

Sends appends, each with its number, so that sending it again changes nothing.

Writing: `df.write` and `df.writeStream` with `format("tailrace")`, each row exactly once.

Producers are named after the query and the partition, their epoch is the number of the batch, and appends
are numbered within both. The server drops what it has seen. That is enough if a repeated batch is cut into
the same appends: `staged` sees to that for every query, `direct` relies on the query.
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

FILE_BYTES_MAX = 32 << 20  # of rows in one file of a partition
INLINE_BYTES_MAX = 256 << 10  # of rows that a task hands over without a file
COMMIT_BYTES_MAX = 4 << 20  # of rows that the document itself holds
BATCHES_KEPT = 2
_PART_SCHEMA = pa.schema([("append", INT32), ("stream", STRING), ("key", STRING), ("value", BINARY)])


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of one partition: in a file, or right here."""

    partition: int
    rows: int
    sha256: str
    file: str | None = None
    inline: bytes | None = None


class BatchCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch consists of."""

    version: int = 1
    query: str
    batch: int
    parts: list[StagedPart]


def encode_parts(appends: Iterable[SinkAppend]) -> Iterator[tuple[int, bytes]]:
    """Appends as Parquet, a few MiB at a time, with the number of their rows."""
    kept: list[SinkAppend] = []
    size = 0
    for append in appends:
        kept.append(append)
        size += int(value_ends(append.values)[-1])
        if size >= FILE_BYTES_MAX:
            yield _encode_part(kept)
            kept, size = [], 0
    if kept:
        yield _encode_part(kept)


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
    # Written once, read once, then gone: that is no occasion for a denser format.
    pq.write_table(table, sink, compression="lz4", use_dictionary=["stream", "key"], write_statistics=False)
    data: bytes = sink.getvalue().to_pybytes()
    return len(numbers), data


def decode_part(data: bytes) -> Iterator[SinkAppend]:
    """The appends of a part, as they were cut."""
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
    """One staging location, as blocking calls. Made where it is needed; never pickled."""

    def __init__(self, url: str) -> None:
        self._steps = BlockingRunner()
        self._objects: ObjectStore = open_object_store(url)
        self._lock = Lock()

    def close(self) -> None:
        self._steps.run(self._objects.close())
        self._steps.close()

    def put(self, query: str, batch: int, part: StagedPart) -> StagedPart:
        """Writes the rows of a part to a file of its own."""
        assert part.inline is not None
        name = f"{part.partition:06}-{secrets.token_hex(8)}.parquet"
        self._steps.run(self._objects.create(_batch_folder(query, batch) + name, part.inline))
        return msgspec.structs.replace(part, file=name, inline=None)

    def rows(self, commit: BatchCommit, part: StagedPart) -> bytes:
        if part.inline is not None:
            return part.inline
        key = _batch_folder(commit.query, commit.batch) + str(part.file)
        with self._lock:  # several partitions are sent at once
            data, _ = self._steps.run(self._objects.get(key))
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise SinkError(f"{key} is not what was staged; nothing of it was sent")
        return data

    def settle(self, commit: BatchCommit) -> tuple[BatchCommit, bool]:
        """The content of the batch: what is given, unless it has one already; and whether it is new.

        A driver that was thought dead may commit when others are batches ahead and what the batch consisted
        of has been swept. Its rows are there already, perhaps from other partitions, so that no number of an
        append would give it away: it is refused. Later batches are looked for after the document is created:
        whoever swept the one before had created a later one by then.
        """
        settled = commit
        if sum(len(part.inline or b"") for part in commit.parts) > COMMIT_BYTES_MAX:
            parts = [
                part if part.inline is None else self.put(commit.query, commit.batch, part)
                for part in commit.parts
            ]
            settled = msgspec.structs.replace(commit, parts=parts)
        key = _commit_key(commit.query, commit.batch)
        try:
            self._steps.run(self._objects.create(key, msgspec.json.encode(settled)))
        except ObjectExistsError:
            data, _ = self._steps.run(self._objects.get(key))
            return msgspec.json.decode(data, type=BatchCommit), False
        if self._steps.run(self._objects.list_after(f"{commit.query}/", key, 1)):
            self.forget(commit.query, commit.batch)
            raise SinkError(
                f"batch {commit.batch} was committed by another run of the same query, which is ahead; "
                "nothing of it was sent. Stop one of them"
            )
        return settled, True

    def forget(self, query: str, batch: int) -> None:
        """Takes a commit back of which nothing was accepted."""
        self._steps.run(self._objects.delete([_commit_key(query, batch)]))

    def discard(self, query: str, batch: int, names: Sequence[str]) -> None:
        self._steps.run(self._objects.delete([_batch_folder(query, batch) + name for name in names]))

    def sweep(self, query: str, batch: int) -> None:
        """Removes all batches before the last one: nobody will run them again."""
        listed = self._steps.run(self._objects.list_after(f"{query}/"))
        kept = _batch_folder(query, max(0, batch - BATCHES_KEPT + 1))
        self._steps.run(self._objects.delete([info.key for info in listed if info.key < kept]))


def _batch_folder(query: str, batch: int) -> str:
    return f"{query}/{batch:020}/"


def _commit_key(query: str, batch: int) -> str:
    return _batch_folder(query, batch) + "COMMIT.json"


class TargetStreams:
    """The streams that are written to, made if they are not there. Remembers their types."""

    def __init__(self, server: ServerClient, options: WriteOptions) -> None:
        self._server = server
        self._options = options
        self._types: dict[str, str] = {}

    def type_of(self, stream: str) -> str:
        found = self._types.get(stream)
        if found is None:
            found = self._types[stream] = self._find(stream)
        return found

    def is_json(self, stream: str) -> bool:
        return is_json(self.type_of(stream))

    def _find(self, stream: str) -> str:
        info = self._server.head(stream)
        if info is None and self._options.create:
            self._server.create(stream, self._options.content_type)
            info = self._server.head(stream)
        if info is None:
            raise SinkError(f"there is no stream {stream}, and createStream is false")
        if info.closed:
            raise SinkError(f"stream {stream} is closed: nothing more can be written to it")
        return info.content_type


class AppendSender:
    """The appends of one partition in one batch. Numbers count from 0 for each target."""

    def __init__(self, server: ServerClient, targets: TargetStreams, producer_id: str, epoch: int) -> None:
        self._server = server
        self._targets = targets
        self._producer_id = producer_id
        self._epoch = epoch
        self._following: Counter[str] = Counter()
        self.rows = 0
        self.accepted = 0  # appends that were new, or had been sent before

    def send_all(self, appends: Iterable[SinkAppend]) -> None:
        for append in appends:
            self.send(append)

    def send(self, append: SinkAppend) -> None:
        content_type = self._targets.type_of(append.stream)
        if is_json(content_type):
            self._send(append, json_array(append.values), content_type)
        else:
            # A body is one entry, so each row needs a request of its own.
            for value in append.values.to_pylist():
                self._send(append, value, content_type)
        self.rows += len(append.values)

    def _send(self, append: SinkAppend, body: bytes, content_type: str) -> None:
        seq = self._following[append.stream]
        producing = ProducerFields(self._producer_id, self._epoch, seq)
        try:
            self._server.append(append.stream, body, content_type, append.key, producing)
        except ClientError as error:
            raise _explain_error(error, append.stream, self._producer_id) from error
        self._following[append.stream] = seq + 1
        self.accepted += 1


class AppendRefusedError(SinkError):
    """The server refused an append, and nothing of it was stored."""


def _explain_error(error: ClientError, stream: str, producer_id: str) -> SinkError:
    match error.code:
        case "stale_epoch":
            return SinkError(
                f"stream {stream}: another run of the same query ({producer_id}) is alive and ahead; "
                "stop one of them"
            )
        case "stream_closed":
            return SinkError(f"stream {stream} is closed: nothing more can be written to it")
        case _ if 400 <= error.status < 500 and error.status not in (408, 409, 429):
            return AppendRefusedError(f"stream {stream}: {error}")
        case _:
            return SinkError(f"stream {stream}: {error}")


logger = logging.getLogger("tailrace.spark")

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
SENDERS_MAX = 8
UNSTAGED_BYTES_MAX = 32 << 20  # of a partition that is written without a place to stage it


class PartitionCommitMessage(WriterCommitMessage):
    """What a task tells the commit: whose rows, and where they wait."""

    def __init__(self, query: str, partition: int, parts: Sequence[StagedPart], rows: int) -> None:
        self.query = query
        self.partition = partition
        self.parts = list(parts)
        self.rows = rows


class PartitionWriter:
    """One task's part of a batch."""

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
        parts = self._staged(build_part(self._partition, *encoded) for encoded in encode_parts(appends))
        return PartitionCommitMessage(self._query, self._partition, parts, sum(part.rows for part in parts))

    def _staged(self, parts: Iterator[StagedPart]) -> list[StagedPart]:
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
                        "a partition is too large to be held until the write commits: set stagingLocation "
                        "to a directory or bucket that all executors see, or delivery to direct"
                    )
        finally:
            if staging is not None:
                staging.close()
        return found


def producer_name(query: str, partition: int) -> str:
    return f"spark:{query}:{partition}"


class BatchCommitter:
    """Makes a batch final, on the driver."""

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
        settled, new = staging.settle(commit)
        try:
            self._send(settled, lambda part: staging.rows(settled, part))
        except _NothingAcceptedError as error:
            if new:
                # The rows were refused and nobody has seen any: a corrected query may try with others.
                staging.forget(commit.query, commit.batch)
            raise error.cause from error.cause.__cause__
        if not new:
            listed = {part.file for part in settled.parts}
            staging.discard(
                commit.query,
                commit.batch,
                [part.file for part in commit.parts if part.file is not None and part.file not in listed],
            )
        try:
            staging.sweep(commit.query, commit.batch)
        except ObjectStoreError as error:
            logger.warning("staging of an old batch stays: %s", error)

    def _send(self, commit: BatchCommit, rows: Callable[[StagedPart], bytes]) -> None:
        """Partitions side by side, the appends of each in order."""
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
        """Some task failed for good. What the others staged is not needed."""
        written = [message for message in messages if isinstance(message, PartitionCommitMessage)]
        names = [part.file for message in written for part in message.parts if part.file is not None]
        if not names or self._options.staging is None:
            return
        staging = StagingArea(self._options.staging)
        try:
            staging.discard(written[0].query, batch, names)
        except ObjectStoreError as error:
            logger.warning("staging of an aborted batch stays: %s", error)
        finally:
            staging.close()


class _NothingAcceptedError(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _check_write(schema: StructType, options: WriteOptions, overwrite: bool) -> None:
    if overwrite:
        raise OptionError("streams only grow: write with mode append, and with outputMode append")
    check_columns(schema, options)


class StreamSink(DataSourceStreamArrowWriter):
    """Micro-batches. Spark makes a new one for each commit: nothing that `write` sets is there."""

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
            raise SinkError("Spark does not say which query and batch this is; is it version 4.3?")
        name = self._options.producer_id or query
        return PartitionWriter(self._options, name, int(batch), context.partitionId()).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        BatchCommitter(self._options).commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        BatchCommitter(self._options).abort(messages, batchId)


class BatchSink(DataSourceArrowWriter):
    """One write. With `producerId` a repetition of it has no effect."""

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
