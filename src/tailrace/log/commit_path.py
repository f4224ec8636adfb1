"""The path of every change: admission, commit, publication or rollback, and eviction after a checkpoint.

What memory may let go of once the hot store has it.

Nobody waits for ever: a commit that takes too long is answered, though it may still succeed.

Back to the last durable state, after a commit that failed.

The way of every change: admitted, submitted, durable, published; or failed, and taken back.

What the changes are is the business of `Log`, which is made on top of this.
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
from tailrace.log import system_streams
from tailrace.log.commit import CommitBatch, Committer
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
)  # their bounds are settings, which the hot store does not have


def release_checkpointed(streams: Streams, seq: int) -> list[Stream]:
    """Frees what was published up to this journal file; the answer is which streams had records in it."""
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
    streams.folded(seq)
    return touched


def evict_idle(streams: Streams, seq: int) -> None:
    """Forgets streams that nobody uses and the hot store has; the name index finds them again."""
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
    """Looks at the batches on their way now and then, and only while there are any."""

    def __init__(self, committer: Committer, patience_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._committer = committer
        self._patience_s = patience_s
        self._loop = loop
        self.timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.timer = self._loop.call_later(STALL_CHECK_S, self._check)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _check(self) -> None:
        self.timer = None
        for batch in self._committer.older_than(self._patience_s):
            waiting, batch.waiting = batch.waiting, []
            for item in batch.items:
                assert type(item) is Transaction
                reply, item.reply = item.reply, ignore_reply
                reply(item, APPEND_TIMED_OUT)
            for settled in waiting:
                settled(APPEND_TIMED_OUT)
        if not self._committer.idle:
            self.watch()


logger = logging.getLogger("tailrace.log")

_PRESERVED_FIELDS = frozenset({"readers", "live"})


class Rollback:
    """Takes back what failed commits had assigned, as soon as the disk can be read."""

    def __init__(self, streams: Streams, store: StoredStreams, journal: Journal) -> None:
        self._streams = streams
        self._store = store
        self._journal = journal
        self._undone: dict[int, Stream] | None = None  # streams of a failure that is not rolled back yet

    def begin(self, batches: Sequence[CommitBatch]) -> None:
        """None of these happened."""
        self._undone = {}
        for batch in batches:
            for item in batch.items:
                assert isinstance(item, Transaction)
                self._undone |= {stream.number: stream for stream in item.streams if stream is not None}

    def roll_back(self) -> bool:
        """Rebuilds the state from disk. What readers see is not touched by it, so it can be tried again."""
        if self._undone is None:
            return True
        journal = self._journal
        try:
            # One view of the hot store, whatever the checkpointer does to it meanwhile.
            with self._store.snapshot():
                durable = replay_journal(
                    journal.directory, self._store, (journal.durable_seq, journal.durable_end)
                )
                durable.streams.on_loaded = self._streams.on_loaded
                roll_back(self._streams, durable.streams, self._undone)
        except (OSError, TailraceError, JournalCorruptError):
            logger.exception("the last durable state cannot be read; trying again")
            return False
        self._undone = None
        return True


def journal_unwritable(error: OSError) -> TailraceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TailraceError("insufficient_storage", "the disk is full")
    return TailraceError("unavailable", "the journal cannot be written; the server is trying to recover")


def outcome_unknown(refusal: TailraceError) -> TailraceError:
    """For a change that was written to a journal file which then could neither be synced nor cut.

    Always 503: clients repeat a request after 507, which promises that nothing was changed.
    """
    message = f"{refusal.message}; the outcome of this request is unknown, check the stream before retrying"
    return TailraceError("unavailable", message, outcome="unknown")


def roll_back(streams: Streams, durable: Streams, known: Mapping[int, Stream]) -> None:
    """Puts a state rebuilt from disk into `streams`, and into the objects that readers hold on to.

    `known` are streams by number that somebody may hold although `streams` has let go of them, because their
    deletion was decided and then failed.
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
    """Gives a stream its durable state back, keeping its identity and whoever waits on it."""
    # Renewals by readers are written down late; they did happen.
    touched_ns = max(stream.touched_ns, fresh.touched_ns)
    for slot in Stream.__slots__:
        if slot not in _PRESERVED_FIELDS:
            setattr(stream, slot, getattr(fresh, slot))
    stream.touched_ns = touched_ns


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
