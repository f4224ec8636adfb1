"""The path of every change: admission, commit, publication or rollback, and eviction after a checkpoint.

1. `_admit` refuses a change before anything is assigned if the journal, memory or a queue has no room.
2. `commit` encodes the transaction and hands it to the `Committer`, which syncs it with others.
3. `_acknowledge` publishes a durable batch; `_fail` rolls a failed one back to the last durable state.
4. `checkpointed` frees the memory and the journal files that the hot store has made redundant.

A commit that takes longer than `append_ms` gets a time-out response, although it may still succeed. Which
changes exist is decided by `Log`, which extends `CommitPath`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.log import system_streams
from tailrace.log.group_commit import CommitBatch, Committer
from tailrace.log.journal import Journal, JournalCorruptError
from tailrace.log.model import Stream
from tailrace.log.publish import Publisher, send_reply
from tailrace.log.records import Meta, encode_record
from tailrace.log.recovery import ReplayResult, replay_journal, sync_tail
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.log.transaction import Reply, Transaction, ignore_reply
from tailrace.storage.data_directory import make_directory

NEVER_EVICTED = (
    system_streams.REGISTRY_STREAM,
    system_streams.SEGMENTS_STREAM,
)  # their retention is a setting, which the hot store does not have


def release_checkpointed(streams: Streams, seq: int) -> list[Stream]:
    """Frees what was published up to this journal file; returns the streams with records in it."""
    touched: list[Stream] = []
    for file in [file for file in streams.touched if file <= seq]:
        for stream in streams.touched.pop(file):
            if not stream.removed:
                streams.drop_through(stream, seq)
                touched.append(stream)
    for name in [name for name, file in streams.changed_names.items() if file <= seq]:
        del streams.changed_names[name]
        streams.tombstones.pop(name, None)
    for number in [number for number, file in streams.removed.items() if file <= seq]:
        del streams.removed[number]
    streams.checkpointed(seq)
    return touched


def evict_idle(streams: Streams, seq: int) -> None:
    """Evicts streams that are not in use and are in the hot store; the name index finds them again."""
    for stream in list(streams.by_number.values()):
        in_use = stream.readers is not None or stream.batch is not None or stream.live
        in_use = in_use or stream.forks or stream.leaving
        saved = stream.recent_file <= seq and stream.touched_ns == stream.touched_saved_ns
        if (
            saved
            and not in_use
            and stream.visible == stream.stored
            and not stream.name.startswith(NEVER_EVICTED)
        ):
            streams.forget(stream)


STALL_CHECK_S = 0.5
APPEND_TIMED_OUT = TailraceError(
    "append_timeout",
    "append timed out; append outcome is unknown, check Stream-Next-Offset before retrying",
)


class StalledCommits:
    """Sends a time-out response for batches that are not durable in time. Runs only while there are any."""

    def __init__(self, committer: Committer, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._committer = committer
        self._timeout_s = timeout_s
        self._loop = loop
        self.timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.timer = self._loop.call_later(STALL_CHECK_S, self._check)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _check(self) -> None:
        self.timer = None
        for batch in self._committer.older_than(self._timeout_s):
            callbacks, batch.waiting = batch.waiting, []
            for item in batch.items:
                assert type(item) is Transaction
                reply, item.reply = item.reply, ignore_reply
                reply(item, APPEND_TIMED_OUT)
            for callback in callbacks:
                callback(APPEND_TIMED_OUT)
        if not self._committer.idle:
            self.watch()


logger = logging.getLogger("tailrace.log")

_PRESERVED_FIELDS = frozenset({"readers", "live"})


class Rollback:
    """Undoes what failed commits had assigned, as soon as the disk can be read."""

    def __init__(self, streams: Streams, store: StoredStreams, journal: Journal) -> None:
        self._streams = streams
        self._store = store
        self._journal = journal
        self._failed: dict[int, Stream] | None = None  # streams of a failure not rolled back yet

    def add_failed(self, batches: Sequence[CommitBatch]) -> None:
        """Marks the streams of failed batches for the rollback."""
        self._failed = {}
        for batch in batches:
            for item in batch.items:
                assert isinstance(item, Transaction)
                self._failed |= {stream.number: stream for stream in item.streams if stream is not None}

    def roll_back(self) -> bool:
        """Rebuilds the assigned state from disk; True if done.

        Published state does not change, so a failed attempt can be repeated.
        """
        if self._failed is None:
            return True
        journal = self._journal
        try:
            # A snapshot of the hot store: the checkpointer may be writing to it.
            with self._store.snapshot():
                durable = replay_journal(
                    journal.directory, self._store, (journal.durable_seq, journal.durable_end)
                )
                durable.streams.on_loaded = self._streams.on_loaded
                roll_back(self._streams, durable.streams, self._failed)
        except (OSError, TailraceError, JournalCorruptError):
            logger.exception("cannot read the last durable state, retrying")
            return False
        self._failed = None
        return True


def journal_unwritable(error: OSError) -> TailraceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TailraceError("insufficient_storage", "the disk is full")
    return TailraceError("unavailable", "the journal cannot be written; the server is retrying")


def outcome_unknown(refusal: TailraceError) -> TailraceError:
    """The error for a change written to a journal file that could neither be synced nor truncated.

    Always 503: 507 promises that nothing was changed, so clients repeat the request.
    """
    message = f"{refusal.message}; the outcome of this request is unknown, check the stream before retrying"
    return TailraceError("unavailable", message, outcome="unknown")


def roll_back(streams: Streams, durable: Streams, known: Mapping[int, Stream]) -> None:
    """Replaces the content of `streams` by a state rebuilt from disk, keeping `Stream` objects in use.

    `known` are streams by number that are no longer in `streams` because their deletion was decided before
    it failed; readers may still refer to them.
    """
    for number, stream in {**known, **streams.by_number}.items():
        fresh = durable.get(number)
        if fresh is None:
            stream.removed = True  # its creation failed, or its deletion was durable
            continue
        restore_stream(stream, fresh)
        durable.by_number[number] = stream
        durable.by_name[stream.name] = stream
    for file, touched in durable.touched.items():
        durable.touched[file] = [durable.by_number.get(stream.number, stream) for stream in touched]
    durable.file = streams.file
    vars(streams).update(vars(durable))


def restore_stream(stream: Stream, fresh: Stream) -> None:
    """Resets a stream to its durable state, keeping the object and its live readers."""
    # Renewals by readers are journaled late, so the one in memory may be newer.
    touched_ns = max(stream.touched_ns, fresh.touched_ns)
    for slot in Stream.__slots__:
        if slot not in _PRESERVED_FIELDS:
            setattr(stream, slot, getattr(fresh, slot))
    stream.touched_ns = touched_ns


LARGE_CHANGE_BYTES = 64 * 1024  # appends above this are refused when memory is short
# A journal file is checkpointed as a whole. While memory is scarce appends wait for that, so files are short.
BUSY_FILE_BYTES = 16 * 1024 * 1024
UNBOUNDED = 2**62


class LogBackpressureError(TailraceError):
    """The log has no room for a change until queued changes are durable or checkpointed."""

    def __init__(self, message: str, size: int, stream: Stream | None = None) -> None:
        super().__init__("overloaded", message)
        self.size = size  # of the change
        self.stream = stream  # set if the queue of this stream is full


class CommitPath:
    """Recovers the state at start, then commits transactions. All methods run on the loop thread."""

    def __init__(
        self, directory: Path, limits: Limits, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.directory = directory
        self.limits = limits
        self.clock = clock
        self._loop = loop
        self._busy_from_bytes = limits.tail_memory_max_bytes // 2
        journal_directory = directory / "journal"
        make_directory(journal_directory)
        self.store = StoredStreams(directory / "hot.db")
        self.recovered: ReplayResult = replay_journal(journal_directory, self.store)
        sync_tail(journal_directory, self.recovered)
        if self.recovered.torn:
            where = log_fields(file=self.recovered.seq, position=self.recovered.end)
            logger.warning("dropped a torn record at the end of the journal", extra=where)
        self.streams = self.recovered.streams
        self.streams.first_epoch = int(str(self.store.db.fact("first_epoch", 0)))
        self.journal = Journal(
            journal_directory,
            limits.journal_file_bytes,
            self.recovered.seq,
            self.recovered.end,
            limits.journal_syncs_in_flight,
        )
        self.committer = Committer(
            loop, self.journal.reserve, self._acknowledge, self._fail, limits.journal_syncs_in_flight
        )
        self.journal.on_prepared = self._file_prepared
        self.publisher = Publisher(self.streams, loop)
        self.refusal: TailraceError | None = None  # why nothing can be written
        self.shortage: TailraceError | None = None  # why new data is refused; deletes are accepted
        self.pressure: TailraceError | None = None  # why large changes are refused
        self._shortages: dict[str, TailraceError] = {}
        self.room_bytes = UNBOUNDED  # for entries in the queue or in memory that are not in the hot store yet
        # Called when there may be room again for waiting changes; None if there are none.
        self.on_room: Callable[[], None] | None = None
        self.admitting = False  # a waiting change is being made
        self.on_backpressure: Callable[[], None] | None = None  # `room_bytes` is used up
        self.on_file_retired: Callable[[int, int], None] | None = None
        self.on_failure: Callable[[OSError], None] | None = None
        # Called with the last checkpointed file and the streams that had records in the files up to it.
        self.on_checkpointed: Callable[[int, list[Stream]], None] | None = None
        self.checkpoint_pending = False
        self._stalls = StalledCommits(self.committer, limits.append_ms / 1000, loop)
        self._rollback = Rollback(self.streams, self.store, self.journal)
        self.failures = 0

    def open(self) -> None:
        """Makes the journal writable. If that fails the log serves reads only."""
        try:
            self.journal.open_first()
        except OSError as error:
            logger.error("cannot write the journal, serving reads only", extra=log_fields(error=str(error)))
            self.refusal = journal_unwritable(error)

    async def close(self) -> None:
        """Waits for all submitted changes, then refuses new ones."""
        await self.committer.drain()
        self.refusal = TailraceError("unavailable", "the server is stopping")
        self._stalls.stop()
        self.committer.stop()

    # -- admission -------------------------------------------------------------------------------------

    def _admit(self, stream: Stream | None, size: int) -> None:
        """Refuses a change that the queues have no room for, before anything is assigned."""
        if self.refusal is not None or self.shortage is not None:
            raise self.refusal or self.shortage or AssertionError
        if self.pressure is not None and size > LARGE_CHANGE_BYTES:
            raise self.pressure
        if self.on_room is not None and not self.admitting:
            raise LogBackpressureError("other changes are waiting for room", size)
        limits = self.limits
        queued_bytes, memory_bytes = self.committer.queued_bytes, self.streams.memory_bytes
        if memory_bytes + queued_bytes + size > self.room_bytes:
            self._refuse_for_room()
        if (
            queued_bytes + size > limits.append_queue_max_bytes
            or memory_bytes > 2 * limits.tail_memory_max_bytes
            or (stream is not None and stream.queued_bytes + size > limits.append_queue_stream_bytes)
        ):
            raise self._find_shortage(stream, size) or AssertionError

    def _find_shortage(self, stream: Stream | None, size: int) -> LogBackpressureError | None:
        """The error for a change of this size, or None if there is room for it."""
        limits = self.limits
        if self.committer.queued_bytes + size > limits.append_queue_max_bytes:
            return LogBackpressureError("the server's append queue is full", size)
        if stream is not None and stream.queued_bytes + size > limits.append_queue_stream_bytes:
            return LogBackpressureError("the stream's append queue is full", size, stream)
        if self.streams.memory_bytes > 2 * limits.tail_memory_max_bytes:
            self._make_room()
            return LogBackpressureError("memory for new entries is full until the next checkpoint", size)
        return None

    @property
    def must_queue(self) -> bool:
        """Whether a new change has to queue behind others."""
        return self.on_room is not None and not self.admitting

    def has_room(self, stream: Stream | None, size: int) -> bool:
        """Whether a change refused with `LogBackpressureError` should be retried now."""
        refused = self.refusal is not None or self.shortage is not None
        return refused or self._find_shortage(stream, size) is None

    def _refuse_for_room(self) -> None:
        if self.on_backpressure is not None:
            self.on_backpressure()
        raise self.shortage or TailraceError("unavailable", "there is no room for new entries")

    def _make_room(self) -> None:
        """Starts a checkpoint by rotating the journal: without appends no file would fill up."""
        if not self.checkpoint_pending and self.committer.idle:
            self.rotate_journal()

    def set_shortage(self, cause: str, shortage: TailraceError | None) -> None:
        """Sets or clears one reason for refusing changes that grow the log."""
        if shortage is None:
            self._shortages.pop(cause, None)
        else:
            self._shortages[cause] = shortage
        self.shortage = next(iter(self._shortages.values()), None)

    # -- submission ------------------------------------------------------------------------------------

    def begin(self, size_bytes: int, reply: Reply, context: object) -> Transaction:
        """Starts a change of several streams; raises if there is no room for it."""
        self._admit(None, size_bytes)
        return Transaction(None, reply, context)

    def commit(self, transaction: Transaction) -> None:
        """Submits a transaction; its `reply` is called when it is durable or has failed."""
        payload = encode_record(transaction.ops)
        size = transaction.size = len(payload)
        batch = self.committer.submit(payload, transaction)
        for stream in transaction.streams:
            if stream is not None:
                stream.batch = batch
        if transaction.subject is not None:
            transaction.subject.queued_bytes += size
        if self._stalls.timer is None:
            self._stalls.watch()

    def settled(self, stream: Stream, reply: Reply, context: object = None) -> None:
        """Calls `reply` when everything decided about the stream so far is durable."""
        self._after(Transaction(stream, reply, context))

    def _after(self, transaction: Transaction) -> None:
        """Calls the reply now, or when the stream's pending batch is durable."""
        stream = transaction.subject
        if stream is None or stream.batch is None:
            transaction.reply(transaction, None)
            return
        stream.batch.waiting.append(lambda error: transaction.reply(transaction, error))

    def _refuse(self, transaction: Transaction, refusal: TailraceError) -> None:
        stream = transaction.subject
        if stream is None or stream.batch is None:
            raise refusal
        stream.batch.waiting.append(lambda error: transaction.reply(transaction, error or refusal))

    # -- journal files ---------------------------------------------------------------------------------

    def _acknowledge(self, batch: CommitBatch) -> None:
        """A batch is durable: publishes it, and rotates the journal early if memory is filling up."""
        file = batch.file
        assert file is not None
        streams = self.streams
        if file.seq != streams.file:
            self._entered_file(file.seq)
        self.journal.settled(file, batch.position + len(batch.data))
        self.publisher.publish(batch)
        if streams.memory_bytes > self._busy_from_bytes:
            self._rotate_if_behind()
        if self.on_room is not None:
            self.on_room()

    def _rotate_if_behind(self) -> None:
        """Checkpoints are behind: shorter files make each one free memory sooner."""
        journal, limits = self.journal, self.limits
        journal.file_bytes = min(limits.journal_file_bytes, BUSY_FILE_BYTES)
        if journal.durable_end >= journal.file_bytes or (
            self.streams.memory_bytes > limits.tail_memory_max_bytes and not self.checkpoint_pending
        ):
            self.retire_active_file()

    def _entered_file(self, seq: int) -> None:
        """The first batch of a file is durable: the previous file is complete."""
        previous_seq, previous_end = self.journal.durable_seq, self.journal.durable_end
        self.streams.file = seq
        if self.streams.memory_bytes <= self._busy_from_bytes:
            self.journal.file_bytes = self.limits.journal_file_bytes
        if self.on_file_retired is not None and previous_seq:
            self.on_file_retired(previous_seq, previous_end)

    def checkpointed(self, seq: int) -> None:
        """The hot store has every record up to and including this file: frees memory and deletes files."""
        touched = release_checkpointed(self.streams, seq)
        self.journal.remove_through(seq)
        if self.on_checkpointed is not None:
            self.on_checkpointed(seq, touched)
        evict_idle(self.streams, seq)
        if self.on_room is not None:
            self.on_room()

    def retire_active_file(self) -> None:
        """Makes the next batch start a new file, so that the current one can be checkpointed."""
        active = self.journal.active
        if active is not None and active.end < active.size:
            active.size = active.end

    def rotate_journal(self) -> None:
        """Starts a new journal file now, so that the current one can be checkpointed."""
        self.retire_active_file()
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, ignore_reply, None)
        transaction.add(self.streams, Meta("", None))  # a record that changes nothing
        self.commit(transaction)

    def _file_prepared(self) -> None:
        """Called on the journal's thread: a batch may be waiting for the file."""
        try:
            self._loop.call_soon_threadsafe(self.committer.resume_writing)
        except RuntimeError:
            pass  # the loop is closed: there is no request left

    # -- failure ---------------------------------------------------------------------------------------

    def _fail(self, batches: list[CommitBatch], error: OSError, certain: bool) -> None:
        """A journal write failed: rolls back to the last acknowledged state and sends errors.

        `certain` if the journal file was truncated durably. If not, a power cut may restore the batch until
        the next file is started, so the outcome is reported as unknown.
        """
        logger.error(
            "journal write failed, rolling back to the last durable record",
            extra=log_fields(error=str(error)),
        )
        self.failures += 1
        self.refusal = refusal = journal_unwritable(error)
        self.journal.abandon()
        self._rollback.add_failed(batches)
        self._rollback.roll_back()
        unknown = outcome_unknown(refusal)
        for batch in batches:
            failure = refusal if certain or batch.file is None else unknown
            for item in batch.items:
                assert isinstance(item, Transaction)
                send_reply(item, failure)
            for callback in batch.waiting:
                callback(failure)
        if self.on_failure is not None:
            self.on_failure(error)

    def resume(self) -> None:
        """Accepts writes again, after `Journal.open_next` has opened a new file."""
        if self.refusal is None or not self._rollback.roll_back():
            return
        logger.warning("journal is writable again")
        self.refusal = None
