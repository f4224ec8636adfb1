"""The way of every change: admitted, submitted, durable, published; or failed, and taken back.

What the changes are is the business of `Log`, which is made on top of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.commit import CommitBatch, Committer
from tailrace.log.eviction import evict_idle, release_checkpointed
from tailrace.log.model import Stream
from tailrace.log.publish import Publisher, send_reply
from tailrace.log.records import Meta, encode_record
from tailrace.log.recovery import ReplayResult, replay_journal, sync_tail
from tailrace.log.rollback import Rollback, journal_unwritable, outcome_unknown
from tailrace.log.rotation import Journal
from tailrace.log.stalls import StalledCommits
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import Reply, Transaction, ignore_reply
from tailrace.storage.data_directory import make_directory

logger = logging.getLogger("tailrace.log")

LARGE_CHANGE_BYTES = 64 * 1024  # of one append, when memory is short
# A journal file is checkpointed whole, and appends that have no room wait for that: files are short then.
BUSY_FILE_BYTES = 16 * 1024 * 1024
UNBOUNDED = 2**62


class LogBackpressureError(TailraceError):
    """A change that the log has no room for now, and will have when it has written what it holds."""

    def __init__(self, message: str, stream: Stream | None = None) -> None:
        super().__init__("overloaded", message)
        self.stream = stream  # the one whose own queue is full, if that is the reason


class CommitPath:
    """From the state that disk brought back to batches that are durable. Runs on the loop thread."""

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
            where = (self.recovered.seq, self.recovered.end)
            logger.warning("journal file %d ends in a torn record at byte %d, which is dropped", *where)
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
        self.refusal: TailraceError | None = None  # why nothing can be written now
        self.shortage: TailraceError | None = None  # why nothing new is taken in; deletes still are
        self.pressure: TailraceError | None = None  # why nothing large is taken on
        self._shortages: dict[str, TailraceError] = {}
        self.room_bytes = (
            UNBOUNDED  # for entries that are in the queue or in memory, not in the hot store yet
        )
        self.on_room: Callable[[], None] | None = None  # there may be room for what was refused before
        self.on_no_room: Callable[[], None] | None = None  # it is used up; the next look finds a shortage
        self.on_file_retired: Callable[[int, int], None] | None = None
        self.on_failure: Callable[[OSError], None] | None = None
        # Told which streams had records in the files that the hot store now has.
        self.on_checkpointed: Callable[[int, list[Stream]], None] | None = None
        self.checkpoint_pending = False
        self._stalls = StalledCommits(self.committer, limits.append_ms / 1000, loop)
        self._undoing = Rollback(self.streams, self.store, self.journal)
        self.failures = 0

    def open(self) -> None:
        """Makes the journal writable; where that cannot be, reads are served all the same."""
        try:
            self.journal.open_first()
        except OSError as error:
            logger.error("the journal cannot be written: %s; serving reads only", error)
            self.refusal = journal_unwritable(error)

    async def close(self) -> None:
        """Everything submitted is settled; nothing more is accepted."""
        await self.committer.drain()
        self.refusal = TailraceError("unavailable", "the server is stopping")
        self._stalls.stop()
        self.committer.stop()

    # -- admission -------------------------------------------------------------------------------------

    def _admit(self, stream: Stream | None, size: int) -> None:
        """Refuses what the queues have no room for, before anything is assigned."""
        if self.refusal is not None or self.shortage is not None:
            raise self.refusal or self.shortage or AssertionError
        if self.pressure is not None and size > LARGE_CHANGE_BYTES:
            raise self.pressure
        limits = self.limits
        queued_bytes, memory_bytes = self.committer.queued_bytes, self.streams.memory_bytes
        if memory_bytes + queued_bytes + size > self.room_bytes:
            self._refuse_for_room()
        if (
            queued_bytes + size > limits.append_queue_max_bytes
            or memory_bytes > 2 * limits.tail_memory_max_bytes
            or (stream is not None and stream.queued_bytes + size > limits.append_queue_stream_bytes)
        ):
            raise self._lack(stream, size) or AssertionError

    def _lack(self, stream: Stream | None, size: int) -> LogBackpressureError | None:
        """What there is no room in for a change of this size."""
        limits = self.limits
        if self.committer.queued_bytes + size > limits.append_queue_max_bytes:
            return LogBackpressureError("the server's append queue is full")
        if stream is not None and stream.queued_bytes + size > limits.append_queue_stream_bytes:
            return LogBackpressureError("the stream's append queue is full", stream)
        if self.streams.memory_bytes > 2 * limits.tail_memory_max_bytes:
            self._make_room()
            return LogBackpressureError("checkpoints are behind; memory for new entries is used up")
        return None

    def has_room(self, stream: Stream | None, size: int) -> bool:
        """Whether a change that was refused with `NoRoomError` would be admitted now, or refused for good."""
        refused = self.refusal is not None or self.shortage is not None
        return refused or self._lack(stream, size) is None

    def _refuse_for_room(self) -> None:
        if self.on_no_room is not None:
            self.on_no_room()
        raise self.shortage or TailraceError("unavailable", "there is no room for more entries")

    def _make_room(self) -> None:
        """While nothing is accepted nothing begins a new file, which is what would start a checkpoint."""
        if not self.checkpoint_pending and self.committer.idle:
            self.move_on()

    def set_shortage(self, cause: str, shortage: TailraceError | None) -> None:
        """Refuses what would grow the log, or lets it in again as far as this cause is concerned."""
        if shortage is None:
            self._shortages.pop(cause, None)
        else:
            self._shortages[cause] = shortage
        self.shortage = next(iter(self._shortages.values()), None)

    # -- submission ------------------------------------------------------------------------------------

    def begin(self, size_bytes: int, reply: Reply, context: object) -> Transaction:
        """A change of several streams at once; refused here, before anything is assigned, or not at all."""
        self._admit(None, size_bytes)
        return Transaction(None, reply, context)

    def commit(self, transaction: Transaction) -> None:
        """Makes durable what was added to a transaction."""
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
        """`reply` comes when everything that was decided about the stream so far is durable."""
        self._after(Transaction(stream, reply, context))

    def _after(self, transaction: Transaction) -> None:
        """Answers at once, or when what the answer rests on is durable."""
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
        """A batch is durable: it is published and answered, and may have filled the memory for entries."""
        file = batch.file
        assert file is not None
        streams = self.streams
        if file.seq != streams.file:
            self._entered_file(file.seq)
        self.journal.settled(file, batch.position + len(batch.data))
        self.publisher.publish(batch)
        if streams.memory_bytes > self._busy_from_bytes:
            self._keep_files_short()
        if self.on_room is not None:
            self.on_room()

    def _keep_files_short(self) -> None:
        """Checkpoints are behind: what they are given next is soon done, and frees memory then."""
        journal, limits = self.journal, self.limits
        journal.file_bytes = min(limits.journal_file_bytes, BUSY_FILE_BYTES)
        if journal.durable_end >= journal.file_bytes or (
            self.streams.memory_bytes > limits.tail_memory_max_bytes and not self.checkpoint_pending
        ):
            self.retire_active_file()

    def _entered_file(self, seq: int) -> None:
        """The first durable batch of a file: the one before it will not change any more."""
        previous_seq, previous_end = self.journal.durable_seq, self.journal.durable_end
        self.streams.file = seq
        if self.streams.memory_bytes <= self._busy_from_bytes:
            self.journal.file_bytes = self.limits.journal_file_bytes
        if self.on_file_retired is not None and previous_seq:
            self.on_file_retired(previous_seq, previous_end)

    def checkpointed(self, seq: int) -> None:
        """The hot store has every record up to and including this file: memory and journal may let go."""
        touched = release_checkpointed(self.streams, seq)
        self.journal.remove_through(seq)
        if self.on_checkpointed is not None:
            self.on_checkpointed(seq, touched)
        evict_idle(self.streams, seq)
        if self.on_room is not None:
            self.on_room()

    def retire_active_file(self) -> None:
        """Lets the next batch start a new file, so that the present one can be checkpointed."""
        active = self.journal.active
        if active is not None and active.end < active.size:
            active.size = active.end

    def move_on(self) -> None:
        """Begins a new journal file, so that all that is in the present one can be checkpointed."""
        self.retire_active_file()
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, ignore_reply, None)
        transaction.add(self.streams, Meta("", None))  # a record that changes nothing
        self.commit(transaction)

    def _file_prepared(self) -> None:
        """On the journal's own thread: a batch may be waiting for the file."""
        try:
            self._loop.call_soon_threadsafe(self.committer.go_on)
        except RuntimeError:
            pass  # the loop is closed: nobody waits for anything

    # -- failure ---------------------------------------------------------------------------------------

    def _fail(self, batches: list[CommitBatch], error: OSError, certain: bool) -> None:
        """The journal could not take a batch. None of it happened: back to the last acknowledged state.

        It is `certain` if the journal file was cut durably. If not, a power cut may bring the batch back
        until the next file has begun, and the answers say so.
        """
        logger.error("journal write failed: %s; rolling back to the last durable record", error)
        self.failures += 1
        self.refusal = refusal = journal_unwritable(error)
        self.journal.abandon()
        self._undoing.begin(batches)
        self._undoing.roll_back()
        unknown = outcome_unknown(refusal)
        for batch in batches:
            failure = refusal if certain or batch.file is None else unknown
            for item in batch.items:
                assert isinstance(item, Transaction)
                send_reply(item, failure)
            for settled in batch.waiting:
                settled(failure)
        if self.on_failure is not None:
            self.on_failure(error)

    def resume(self) -> None:
        """The journal has a file that can be written (`Journal.open_next`): writes are accepted again."""
        if self.refusal is None or not self._undoing.roll_back():
            return
        logger.warning("the journal can be written again")
        self.refusal = None
