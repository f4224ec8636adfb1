"""Writing: `df.write` and `df.writeStream` with `format("tailrace")`, each row exactly once.

Producers are named after the query and the partition, their epoch is the number of the batch, and appends
are numbered within both. The server drops what it has seen. That is enough if a repeated batch is cut into
the same appends: `staged` sees to that for every query, `direct` relies on the query.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.spark.delivery import AppendRefusedError, AppendSender, TargetStreams
from tailrace.spark.options import OptionError
from tailrace.spark.server_client import shared_client
from tailrace.spark.sink_appends import split_into_appends
from tailrace.spark.sink_options import WriteOptions
from tailrace.spark.sink_rows import SinkError, check_columns, to_sink_rows
from tailrace.spark.staging import (
    INLINE_BYTES_MAX,
    BatchCommit,
    StagedPart,
    StagingArea,
    build_part,
    decode_part,
    encode_parts,
)
from tailrace.storage.object_store.interface import ObjectStoreError

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
