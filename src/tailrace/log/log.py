"""The log: decides, commits, publishes. One owner per stream: everything here runs on the loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tailrace.clock import Clock
from tailrace.errors import TailraceError
from tailrace.limits import Limits
from tailrace.log import compaction, outbox, outbox_events, registry
from tailrace.log.catalogue import DOCUMENT, Catalogue, encode_plans, plans_in
from tailrace.log.commit import Batch, Committer
from tailrace.log.decide import (
    AppendRequest,
    CreateRequest,
    decide_append,
    decide_create,
    decide_delete,
    decide_existing,
)
from tailrace.log.eviction import evict_idle, let_go
from tailrace.log.expiry import Expiry
from tailrace.log.forks import fork_point
from tailrace.log.history import Pinned
from tailrace.log.image import StoredStreams
from tailrace.log.model import NO_LIFETIME, Stream
from tailrace.log.publish import Publisher, answer
from tailrace.log.reader import Reader
from tailrace.log.records import (
    APPEND,
    Append,
    Compacted,
    Describe,
    Meta,
    Published,
    Recorded,
    Sealed,
    Touch,
    Trim,
    encode,
    pack_append_head,
)
from tailrace.log.recovery import Replayed, replay, sync_tail
from tailrace.log.rollback import Undoing, cannot_write
from tailrace.log.rotation import Journal
from tailrace.log.stalls import Stalls
from tailrace.log.streams import UNPUBLISHED
from tailrace.log.transaction import Reply, Transaction, ignore
from tailrace.store.companions import PlanBook
from tailrace.store.directory import make_directory

logger = logging.getLogger("tailrace.log")

LARGE_BYTES = 64 * 1024  # of one append, when memory is short
NO_BOUND = 2**62


class Log:
    """Every change of every stream goes through here, and through the journal."""

    def __init__(
        self,
        directory: Path,
        limits: Limits,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        own_suffix: str = "",
    ) -> None:
        self.directory = directory
        # Logs that share an object store must not use the same names: all but one have a suffix for those of
        # the server's own streams that each of them writes.
        self.own_suffix = own_suffix
        self.is_elsewhere: Callable[[str], bool] = lambda _: False  # whether another log may have a stream
        self.registry_name = registry.NAME + own_suffix
        self.outbox_name = outbox.NAME + own_suffix
        self.limits = limits
        self.clock = clock
        self._loop = loop
        self._ahead_ns = limits.timestamp_ahead_ms * 1_000_000
        self.journal_directory = directory / "journal"
        make_directory(self.journal_directory)
        self.store = StoredStreams(directory / "hot.db")
        self.recovered: Replayed = replay(self.journal_directory, self.store)
        sync_tail(self.journal_directory, self.recovered)
        if self.recovered.torn:
            where = (self.recovered.seq, self.recovered.end)
            logger.warning("journal file %d ends in a torn record at byte %d, which is dropped", *where)
        self.streams = self.recovered.streams
        self.streams.first_epoch = int(str(self.store.db.fact("first_epoch", 0)))
        self.reader = Reader(self.streams, self.store, limits.block_cache_bytes)
        self.journal = Journal(
            self.journal_directory, limits.journal_file_bytes, self.recovered.seq, self.recovered.end
        )
        self.committer = Committer(
            loop, self.journal.reserve, self._acknowledge, self._fail, limits.journal_syncs_in_flight
        )
        self.journal.on_prepared = self._file_prepared
        self.expiry = Expiry(self)
        self.publisher = Publisher(self.streams, loop)
        self.catalogue = Catalogue(self.streams, self.store, loop)
        self.publisher.on_change.append(self.catalogue.changed)
        self.refusal: TailraceError | None = None  # why nothing can be written now
        self.shortage: TailraceError | None = None  # why nothing new is taken in; deletes still are
        self.pressure: TailraceError | None = None  # why nothing large is taken on
        self._shortages: dict[str, TailraceError] = {}
        self.room_bytes = NO_BOUND  # for entries that are in the queue or in memory, not in the hot store yet
        self.on_no_room: Callable[[], None] | None = None  # it is used up; the next look finds a shortage
        self.on_file_retired: Callable[[int, int], None] | None = None
        self.on_failure: Callable[[OSError], None] | None = None
        # Told which streams had records in the files that the hot store now has.
        self.on_checkpointed: Callable[[int, list[Stream]], None] | None = None
        self.checkpoint_pending = False
        self._stalls = Stalls(self.committer, limits.append_ms / 1000, loop)
        self._undoing = Undoing(self.streams, self.store, self.journal, self.expiry.loaded)
        self.failures = 0
        self.streams.on_loaded = self.expiry.loaded
        self.expiry.recovered()

    def open(self) -> None:
        """Makes the journal writable and the system streams present."""
        try:
            self.journal.open_first()
        except OSError as error:
            logger.error("the journal cannot be written: %s; serving reads only", error)
            self.refusal = cannot_write(error)
            return
        self._create_system_streams()

    async def close(self) -> None:
        """Everything submitted is settled; nothing more is accepted."""
        await self.committer.drain()
        self.refusal = TailraceError("unavailable", "the server is stopping")
        self.expiry.stop()
        self._stalls.stop()
        self.committer.stop()
        self.reader.close()

    # -- finding ---------------------------------------------------------------------------------------

    def find(self, name: str) -> Stream | None:
        """The stream, soft-deleted ones included; one that has expired is gone from this very moment."""
        streams = self.streams
        stream = streams.by_name.get(name) or streams.find(name)
        if stream is None or stream.lifetime is NO_LIFETIME or stream.gone:
            return stream
        if not stream.expired(self.clock.now_ns()):
            return stream
        if self.refusal is not None:
            return None  # cannot be written down now; it is gone for everybody all the same
        self.remove(stream, "expired", ignore, None)
        return self.streams.find(name)

    def existing(self, name: str) -> Stream:
        """The stream to write to, or the refusal its absence calls for."""
        stream = self.find(name)
        if stream is None:
            raise TailraceError("not_found", f"there is no stream {name!r}")
        if stream.gone:
            raise TailraceError("stream_gone", "the stream was deleted; its forks live on")
        return stream

    def readable(self, name: str) -> Stream:
        """The stream to read from: its creation is durable."""
        stream = self.existing(name)
        if stream.visible < 0:
            raise TailraceError("not_found", f"there is no stream {name!r}")
        return stream

    def count_streams(self) -> int:
        """Streams that exist, those that are not in memory included."""
        stored = self.store.db.count_streams()
        changed = self.streams.changed_names
        created = sum(1 for name in changed if name in self.streams.by_name)
        return stored + created

    def touch(self, stream: Stream) -> None:
        """Renews a sliding lifetime. Written down only when a tenth of the window has passed."""
        ttl_s = stream.lifetime.ttl_s
        if ttl_s is None or stream.removed:
            return
        now_ns = self.clock.now_ns()
        stream.touched_ns = max(stream.touched_ns, now_ns)
        if now_ns - stream.touched_saved_ns > ttl_s * 100_000_000 and self.refusal is None:
            transaction = Transaction(stream, ignore, None)
            transaction.add(self.streams, Touch(stream.number, now_ns))
            self._submit(transaction)

    # -- changing --------------------------------------------------------------------------------------

    def append(self, stream: Stream, request: AppendRequest, reply: Reply, context: object) -> None:
        """Appends, or refuses by raising. `reply` comes when the outcome is durable."""
        self._admit(stream, len(request.body))
        if request.producer is not None and not stream.producers_known:
            self.streams.load_producer(stream, request.producer[0])
        now_ns = self.clock.now_ns()
        try:
            op = decide_append(stream, request, now_ns, self._ahead_ns)
        except TailraceError as refusal:
            self._refuse(Transaction(stream, reply, context), refusal)
            return
        if type(op) is not Append:
            transaction = Transaction(stream, reply, context)
            transaction.duplicate = True
            self._after(transaction)
            return
        if op.closes or op.binds is not None or stream.lifetime is not NO_LIFETIME:
            self._append_with_more(stream, op, now_ns, Transaction(stream, reply, context))
            return
        self.streams.assign_append(op, stream)
        self._submit_append(stream, op, op.encode(), reply, context)

    def append_plain(
        self, stream: Stream, body: bytes, lengths: Sequence[int] | None, reply: Reply, context: object
    ) -> None:
        """`append` for entries and nothing else, on a stream that is open, of their type, without a lifetime.

        There is nothing to decide but the time: the case is common enough to have its own, shorter way.
        """
        assert not stream.closed
        assert not stream.removed
        body_bytes = len(body)
        self._admit(stream, body_bytes)
        now_ns = self.clock.now_ns()
        if now_ns < stream.last_ns:
            now_ns = stream.last_ns
        first = stream.tail + 1
        if lengths is None:
            op = Append(stream.number, first, 1, body, None, now_ns)
            # `assign_append` and `encode` for this case.
            stream.tail = first
            stream.last_ns = now_ns
            stream.size_bytes += body_bytes
            payload = pack_append_head(APPEND, 0, stream.number, first, now_ns, 1, body_bytes) + body
        else:
            op = Append(stream.number, first, len(lengths), body, lengths, now_ns)
            self.streams.assign_append(op, stream)
            payload = op.encode()
        self._submit_append(stream, op, payload, reply, context)

    def _submit_append(
        self, stream: Stream, op: Append, payload: bytes, reply: Reply, context: object
    ) -> None:
        size = len(payload)
        stream.queued_bytes += size
        stream.batch = self.committer.submit(payload, Transaction(stream, reply, context, op, size=size))
        if self._stalls.timer is None:
            self._stalls.watch()

    def _append_with_more(self, stream: Stream, op: Append, now_ns: int, transaction: Transaction) -> None:
        """An append that closes the stream, binds its type or renews its window: one record for all of it."""
        transaction.add(self.streams, op)
        if stream.lifetime.ttl_s is not None:
            # By the clock: the entry's own time may be one the client asked for.
            transaction.add(self.streams, Touch(stream.number, now_ns))
        if (op.closes or op.binds is not None) and registry.is_listed(stream.name):
            event = registry.updated(self._registry(), stream, stream.content_type, stream.closed, now_ns)
            transaction.add(self.streams, event)
        self._submit(transaction)

    def create(
        self, request: CreateRequest, reply: Reply, context: object, at_hand: Sequence[Pinned] = ()
    ) -> bool:
        """Creates or confirms a stream; True if it is new. `reply` comes when that is durable.

        Raises NotAtHandError if the place where a fork leaves its source has to be fetched first.
        """
        stream = self.find(request.name)
        source = None if request.source is None else self.find(request.source)
        now_ns = self.clock.now_ns()
        if stream is not None:
            self._confirm(stream, request, source, reply, context, now_ns)
            return False
        self._admit(None, 0 if request.initial is None else len(request.initial.body))
        fork = None if request.source is None else fork_point(self.reader, source, request, at_hand)
        streams = self.streams
        tombstone = streams.tombstone(request.name)
        create = decide_create(request, streams.next_number, tombstone, fork, now_ns, streams.first_epoch)
        documents: dict[str, bytes] = {}
        if fork is not None and fork.source.documents is not None and request.inherit is not None:
            documents = request.inherit(fork.source, fork.entry)
        transaction = Transaction(None, reply, context)
        created = transaction.add(self.streams, create)
        assert created is not None
        transaction.subject = created
        for key, value in documents.items():
            transaction.add(self.streams, Describe(created.number, key, value))
        if fork is not None and fork.head:
            head = AppendRequest(
                fork.head, created.content_type, closes=request.closed and not request.initial
            )
            self._add_append(transaction, created, head, now_ns)
        if request.initial is not None:
            self._add_append(transaction, created, request.initial, now_ns)
        if registry.is_listed(request.name):
            event = registry.inserted(self._registry(), create, created.content_type, created.closed)
            transaction.add(self.streams, event)
        self._submit(transaction)
        return True

    def begin(self, size_bytes: int, reply: Reply, context: object) -> Transaction:
        """A change of several streams at once; refused here, before anything is assigned, or not at all."""
        self._admit(None, size_bytes)
        return Transaction(None, reply, context)

    def commit(self, transaction: Transaction) -> None:
        """Makes durable what was added to a transaction that `begin` gave."""
        self._submit(transaction)

    def remove(self, stream: Stream, reason: str, reply: Reply, context: object) -> None:
        """Deletes a stream; with living forks only its name goes."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(stream, reply, context)
        self.add_removal(transaction, stream, reason, self.clock.now_ns())
        self._submit(transaction)

    def add_removal(self, transaction: Transaction, stream: Stream, reason: str, now_ns: int) -> None:
        """The deletion of a stream as part of a larger change."""
        ancestors: list[Stream] = []
        owner = stream
        while owner.parent:
            owner = self.streams.parent_of(owner)
            ancestors.append(owner)
        for op in decide_delete(stream, reason, now_ns, ancestors):
            removed = transaction.add(self.streams, op)
            assert removed is not None
            if registry.is_listed(removed.name) and (removed is stream):
                event = registry.deleted(self._registry(), removed.name, reason, now_ns)
                transaction.add(self.streams, event)
            events = outbox_events.of_removal(self.store, self.streams, removed, reason, now_ns)
            self._deliver(transaction, events, now_ns)

    def confirm_deleted(self, name: str, reply: Reply, context: object) -> bool:
        """Whether the name was deleted before. If so, `reply` comes when that is durable."""
        tombstone = self.streams.tombstone(name)
        if tombstone is None or tombstone.reason != "deleted":
            return False
        transaction = Transaction(None, reply, context)
        transaction.duplicate = True
        newest = self.committer.newest
        if newest is None or self.streams.changed_names.get(name) != UNPUBLISHED:
            reply(transaction, None)
        else:
            newest.waiting.append(lambda error: reply(transaction, error))
        return True

    def put_meta(self, key: str, value: bytes | None, reply: Reply = ignore, context: object = None) -> None:
        """Sets or removes one durable fact of the server itself."""
        self.put_metas([(key, value)], reply, context)

    def put_metas(
        self, facts: Sequence[tuple[str, bytes | None]], reply: Reply = ignore, context: object = None
    ) -> None:
        """Sets or removes several facts: all of them, or none."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, reply, context)
        for key, value in facts:
            transaction.add(self.streams, Meta(key, value))
        self._submit(transaction)

    def describe(
        self, stream: Stream, key: str, value: bytes | None, reply: Reply = ignore, context: object = None
    ) -> None:
        """Sets or removes one document of a stream; the next append is decided by it."""
        self.describe_all(stream, [(key, value)], reply, context)

    def describe_all(
        self,
        stream: Stream,
        documents: Sequence[tuple[str, bytes | None]],
        reply: Reply = ignore,
        context: object = None,
    ) -> None:
        """Sets or removes several documents of a stream: all of them, or none."""
        self._admit(stream, sum(len(value or b"") for _, value in documents))
        transaction = Transaction(stream, reply, context)
        for key, value in documents:
            transaction.add(self.streams, Describe(stream.number, key, value))
        self._submit(transaction)

    def settled(self, stream: Stream, reply: Reply, context: object = None) -> None:
        """`reply` comes when everything that was decided about the stream so far is durable."""
        self._after(Transaction(stream, reply, context))

    def record(self, op: Sealed | Trim | Recorded | Published | Compacted, reply: Reply = ignore) -> None:
        """Writes down what was done on the object store, and tells of it in the same record."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, reply, None)
        now_ns = self.clock.now_ns()
        events = outbox_events.of(op, self.store, self.streams, now_ns)
        stream = transaction.add(self.streams, op)
        if stream is not None and isinstance(op, Sealed) and op.keyed:
            self._note_keys(transaction, stream)
        if isinstance(op, Compacted):
            transaction.add(self.streams, Meta(compaction.fact_of(op.stream), None))  # what was begun is done
        self._deliver(transaction, events, now_ns)
        self._submit(transaction)

    def plan(self, stream: Stream, plans: PlanBook, reply: Reply = ignore) -> None:
        """Sets the stream's index plans; a new one is told of in the same record."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(stream, reply, None)
        known = plans_in(stream.documents).wanted
        transaction.add(self.streams, Describe(stream.number, DOCUMENT, encode_plans(plans)))
        if plans.wanted is not None and plans.wanted != known:
            now_ns = self.clock.now_ns()
            self._deliver(transaction, [outbox.planned(stream, plans.wanted, now_ns)], now_ns)
        self._submit(transaction)

    def open_outbox(self) -> None:
        """Makes `__segments__` present, for those who want to follow it before anything happened."""
        if self.refusal is None and self.streams.find(self.outbox_name) is None:
            transaction = Transaction(None, ignore, None)
            self._outbox(transaction)
            self._submit(transaction)

    def set_shortage(self, cause: str, shortage: TailraceError | None) -> None:
        """Refuses what would grow the log, or lets it in again as far as this cause is concerned."""
        if shortage is None:
            self._shortages.pop(cause, None)
        else:
            self._shortages[cause] = shortage
        self.shortage = next(iter(self._shortages.values()), None)

    # -- inside ----------------------------------------------------------------------------------------

    def _registry(self) -> Stream:
        stream = self.streams.find(self.registry_name)
        assert stream is not None, "the registry stream is made when the log opens"
        return stream

    def _create_system_streams(self) -> None:
        if self.streams.find(self.registry_name) is None:
            transaction = Transaction(None, ignore, None)
            self._create_system_stream(transaction, self.registry_name)
            self._submit(transaction)
        self._registry().lifetime = registry.lifetime(self.limits)
        if (stream := self.streams.find(self.outbox_name)) is not None:
            stream.lifetime = outbox.lifetime(self.limits)

    def _create_system_stream(self, transaction: Transaction, name: str) -> Stream:
        request = CreateRequest(name, "application/json")
        now_ns, streams = self.clock.now_ns(), self.streams
        create = decide_create(request, streams.next_number, None, None, now_ns, streams.first_epoch)
        created = transaction.add(streams, create)
        assert created is not None
        return created

    def _outbox(self, transaction: Transaction) -> Stream:
        """`__segments__`; made in this very record if it has to be."""
        stream = self.streams.find(self.outbox_name)
        if stream is None:
            stream = self._create_system_stream(transaction, self.outbox_name)
            stream.lifetime = outbox.lifetime(self.limits)
        return stream

    def _deliver(self, transaction: Transaction, events: Sequence[bytes], now_ns: int) -> None:
        if events:
            transaction.add(self.streams, outbox.delivery(self._outbox(transaction), events, now_ns))

    def _note_keys(self, transaction: Transaction, stream: Stream) -> None:
        """The first keyed entry of a stream that is sealed: from now on its keys are indexed."""
        plans = plans_in(stream.documents)
        if not plans.keyed and outbox.is_indexed(stream.name):
            noted = encode_plans(msgspec.structs.replace(plans, keyed=True))
            transaction.add(self.streams, Describe(stream.number, DOCUMENT, noted))

    def _confirm(
        self,
        stream: Stream,
        request: CreateRequest,
        source: Stream | None,
        reply: Reply,
        context: object,
        now_ns: int,
    ) -> None:
        transaction = Transaction(stream, reply, context)
        transaction.duplicate = True
        try:
            bind = decide_existing(stream, request, source)
        except TailraceError as refusal:
            self._refuse(transaction, refusal)
            return
        if bind is None:
            self._after(transaction)
            return
        self._admit(stream, 0)
        transaction.add(self.streams, bind)
        event = registry.updated(self._registry(), stream, stream.content_type, stream.closed, now_ns)
        transaction.add(self.streams, event)
        self._submit(transaction)

    def _add_append(
        self, transaction: Transaction, stream: Stream, request: AppendRequest, now_ns: int
    ) -> None:
        op = decide_append(stream, request, now_ns, self._ahead_ns)
        assert isinstance(op, Append), "a new stream takes its first entries"
        transaction.add(self.streams, op)

    def _admit(self, stream: Stream | None, size: int) -> None:
        """Refuses what the queues have no room for, before anything is assigned."""
        if self.refusal is not None or self.shortage is not None:
            raise self.refusal or self.shortage or AssertionError
        if self.pressure is not None and size > LARGE_BYTES:
            raise self.pressure
        limits = self.limits
        if self.streams.memory_bytes + self.committer.queued_bytes + size > self.room_bytes:
            self._refuse_for_room()
        if self.committer.queued_bytes + size > limits.append_queue_bytes:
            raise TailraceError("overloaded", "the server's append queue is full")
        if stream is not None and stream.queued_bytes + size > limits.append_queue_stream_bytes:
            raise TailraceError("overloaded", "the stream's append queue is full")
        if self.streams.memory_bytes > 2 * limits.tail_memory_bytes:
            self._make_room()
            raise TailraceError("overloaded", "checkpoints are behind; memory for new entries is used up")

    def _refuse_for_room(self) -> None:
        if self.on_no_room is not None:
            self.on_no_room()
        raise self.shortage or TailraceError("unavailable", "there is no room for more entries")

    def _make_room(self) -> None:
        """While nothing is accepted nothing begins a new file, which is what would start a checkpoint."""
        if not self.checkpoint_pending and self.committer.idle:
            self.move_on()

    def move_on(self) -> None:
        """Begins a new journal file, so that all that is in the present one can be checkpointed."""
        self.retire_active_file()
        self.put_meta("", None)  # a record that changes nothing

    def _submit(self, transaction: Transaction) -> None:
        payload = encode(transaction.ops)
        size = transaction.size = len(payload)
        batch = self.committer.submit(payload, transaction)
        for stream in transaction.streams:
            if stream is not None:
                stream.batch = batch
        if transaction.subject is not None:
            transaction.subject.queued_bytes += size
        if self._stalls.timer is None:
            self._stalls.watch()

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

    def _acknowledge(self, batch: Batch) -> None:
        """A batch is durable: it is published and answered, and may have filled the memory for entries."""
        file = batch.file
        assert file is not None
        streams = self.streams
        if file.seq != streams.file:
            self._entered_file(file.seq)
        self.journal.settled(file, batch.position + len(batch.data))
        self.publisher.publish(batch)
        if streams.memory_bytes > self.limits.tail_memory_bytes and not self.checkpoint_pending:
            self.retire_active_file()

    def _entered_file(self, seq: int) -> None:
        """The first durable batch of a file: the one before it will not change any more."""
        previous_seq, previous_end = self.journal.durable_seq, self.journal.durable_end
        self.streams.file = seq
        if self.on_file_retired is not None and previous_seq:
            self.on_file_retired(previous_seq, previous_end)

    def checkpointed(self, seq: int) -> None:
        """The hot store has every record up to and including this file: memory and journal may let go."""
        touched = let_go(self.streams, seq)
        self.journal.remove_through(seq)
        if self.on_checkpointed is not None:
            self.on_checkpointed(seq, touched)
        evict_idle(self.streams, seq)

    def retire_active_file(self) -> None:
        """Lets the next batch start a new file, so that the present one can be checkpointed."""
        active = self.journal.active
        if active is not None and active.end < active.size:
            active.size = active.end

    def _file_prepared(self) -> None:
        """On the journal's own thread: a batch may be waiting for the file."""
        try:
            self._loop.call_soon_threadsafe(self.committer.go_on)
        except RuntimeError:
            pass  # the loop is closed: nobody waits for anything

    # -- failure ---------------------------------------------------------------------------------------

    def _fail(self, batches: list[Batch], error: OSError) -> None:
        """The journal could not take a batch. None of it happened: back to the last acknowledged state."""
        logger.error("journal write failed: %s; rolling back to the last durable record", error)
        self.failures += 1
        self.refusal = refusal = cannot_write(error)
        self.journal.abandon()
        self._undoing.begin(batches)
        self._undoing.roll_back()
        for batch in batches:
            for item in batch.items:
                assert isinstance(item, Transaction)
                answer(item, refusal)
            for settled in batch.waiting:
                settled(refusal)
        if self.on_failure is not None:
            self.on_failure(error)

    def resume(self) -> None:
        """The journal has a file that can be written (`Journal.open_next`): writes are accepted again."""
        if self.refusal is None or not self._undoing.roll_back():
            return
        logger.warning("the journal can be written again")
        self.refusal = None
        self._create_system_streams()
