"""The log: every change of every stream, decided on the loop thread and handed to the commit path.

Each method decides (`decide`), applies the operations to the assigned state (`Streams.assign`) and submits
them as one journal record (`CommitPath.commit`). Refusals are raised, or passed to `reply` if they depend on
a change that is not durable yet. Everything runs on the loop thread, so no locks are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log import segment_catalogue, system_streams
from tailrace.log.backpressure_queue import BackpressureQueue
from tailrace.log.commit_path import CommitPath
from tailrace.log.decide import (
    AppendRequest,
    CreateRequest,
    decide_append,
    decide_create,
    decide_delete,
    decide_existing,
)
from tailrace.log.expiry import Expiry
from tailrace.log.forks import fork_point
from tailrace.log.group_commit import refuse_after_commit
from tailrace.log.history import FetchedBlock
from tailrace.log.model import NO_LIFETIME, Stream
from tailrace.log.reader import Reader
from tailrace.log.records import (
    Append,
    Compacted,
    Describe,
    Meta,
    Published,
    Recorded,
    Sealed,
    Touch,
    Trim,
    pack_single_append,
)
from tailrace.log.segment_catalogue import INDEX_DOCUMENT, IndexFileCatalogue, decode_plans, encode_plans
from tailrace.log.streams import UNPUBLISHED
from tailrace.log.system_streams import SystemStreams, create_system_stream
from tailrace.log.transaction import Reply, Transaction, ignore_reply
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.index_files import PlanHistory


class Log(CommitPath):
    """The changes of streams, documents and facts on top of `CommitPath`."""

    def __init__(
        self,
        directory: Path,
        limits: Limits,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        own_suffix: str = "",
        cold: ColdReader | None = None,
    ) -> None:
        """`cold` reads entries that are only on the object store; None without one."""
        super().__init__(directory, limits, clock, loop)
        self.backpressure_queue = BackpressureQueue(self, loop)
        # Logs of several workers share an object store: all but one append a suffix to the names of the
        # system streams that each of them writes.
        self.own_suffix = own_suffix
        self.system_streams = SystemStreams(self.streams, limits, clock, own_suffix)
        self._ahead_ns = limits.timestamp_ahead_ms * 1_000_000
        self.reader = Reader(self.streams, self.store, limits.block_cache_bytes, cold)
        self.catalogue = IndexFileCatalogue(self.streams, self.store, loop)
        self.publisher.on_change.append(self.catalogue.changed)
        self.expiry = Expiry(self)
        self.streams.on_loaded = self.expiry.loaded
        self.expiry.recovered()

    def open(self) -> None:
        """Makes the journal writable and creates missing system streams."""
        super().open()
        self._open_system_streams()

    def resume(self) -> None:
        """Accepts writes again, after `Journal.open_next` has opened a new file."""
        super().resume()
        self._open_system_streams()

    def _open_system_streams(self) -> None:
        if self.refusal is not None:
            return
        transaction = Transaction(None, ignore_reply, None)
        self.system_streams.open(transaction)
        if transaction.ops:
            self.commit(transaction)

    async def close(self) -> None:
        """Waits for all submitted changes, then refuses new ones."""
        await super().close()
        self.expiry.stop()
        self.reader.close()

    # -- finding ---------------------------------------------------------------------------------------

    def find(self, name: str) -> Stream | None:
        """The stream, also if it is soft-deleted. An expired stream is removed here."""
        streams = self.streams
        stream = streams.by_name.get(name) or streams.find(name)
        if stream is None or stream.lifetime is NO_LIFETIME or stream.gone:
            return stream
        if not stream.expired(self.clock.now_ns()):
            return stream
        if self.refusal is not None:
            return None  # the removal cannot be written now, but the stream has expired
        self.remove(stream, "expired", ignore_reply, None)
        return self.streams.find(name)

    def existing(self, name: str) -> Stream:
        """The stream to write to; raises if it does not exist or is soft-deleted."""
        stream = self.find(name)
        if stream is None:
            raise self.not_found_error(name)
        if stream.gone:
            refusal = TailraceError("stream_gone", "the stream was deleted; its forks live on")
            raise refuse_after_commit(refusal, stream.batch)
        return stream

    def readable(self, name: str) -> Stream:
        """The stream to read from; raises if its creation is not durable."""
        stream = self.existing(name)
        if stream.visible < 0:
            raise self.not_found_error(name, stream)
        return stream

    def not_found_error(self, name: str, stream: Stream | None = None) -> TailraceError:
        """The error for a name without a stream, or with one whose creation is not durable.

        It is delayed if the deletion of an earlier stream of this name is not durable: that one still exists.
        """
        refusal = TailraceError("not_found", f"there is no stream {name!r}")
        if self.streams.changed_names.get(name) == UNPUBLISHED and (stream is None or stream.incarnation):
            return refuse_after_commit(refusal, self.committer.newest)
        return refusal

    def count_streams(self) -> int:
        """Number of streams, in memory or not."""
        stored = self.store.db.count_streams()
        changed = self.streams.changed_names
        created = sum(1 for name in changed if name in self.streams.by_name)
        return stored + created

    def register_metrics(self, metrics: ServerMetrics) -> None:
        waiting = self.backpressure_queue
        metrics.append_entries.read = lambda: self.publisher.entries
        metrics.append_bytes.read = lambda: self.publisher.bytes
        metrics.append_queue_bytes.read = lambda: self.committer.queued_bytes
        metrics.append_waiting_requests.read = lambda: waiting.count
        metrics.append_waiting_bytes.read = lambda: waiting.bytes
        metrics.append_waits.read = lambda: waiting.waited
        metrics.journal_failures.read = lambda: self.failures
        metrics.journal_bytes.read = self.journal.size_bytes
        metrics.streams.read = self.count_streams
        metrics.streams_loaded.read = lambda: len(self.streams.by_number)
        metrics.tail_memory_bytes.read = lambda: self.streams.memory_bytes

    def touch(self, stream: Stream) -> None:
        """Renews a TTL. The renewal is journaled only after a tenth of the TTL, to save writes."""
        ttl_s = stream.lifetime.ttl_s
        if ttl_s is None or stream.removed:
            return
        now_ns = self.clock.now_ns()
        stream.touched_ns = max(stream.touched_ns, now_ns)
        if now_ns - stream.touched_saved_ns > ttl_s * 100_000_000 and self.refusal is None:
            transaction = Transaction(stream, ignore_reply, None)
            transaction.add(self.streams, Touch(stream.number, now_ns))
            self.commit(transaction)

    # -- entries ---------------------------------------------------------------------------------------

    def append(self, stream: Stream, request: AppendRequest, reply: Reply, context: object) -> None:
        """Appends entries, or raises. `reply` is called when the outcome is durable."""
        self._admit(stream, len(request.body))
        if request.producer is not None and not stream.producers_known:
            self.streams.load_producer(stream, request.producer[0])
        now_ns = self.clock.now_ns()
        try:
            op = decide_append(stream, request, now_ns, self._ahead_ns)
        except TailraceError as refusal:
            self._refuse(Transaction(stream, reply, context), refusal)
            return
        if op is None:
            transaction = Transaction(stream, reply, context)
            transaction.duplicate = True
            if request.producer is not None:
                known = (stream.producers or {}).get(request.producer[0])
                transaction.producer = None if known is None else (known.epoch, known.seq)
            self._after(transaction)
            return
        if op.closes or op.binds is not None or stream.lifetime is not NO_LIFETIME:
            self._append_with_more(stream, op, now_ns, Transaction(stream, reply, context))
            return
        self.streams.assign_append(op, stream)
        self._submit_append(stream, op, op.encode(), reply, context)

    def append_plain(
        self,
        stream: Stream,
        body: bytes,
        lengths: Sequence[int] | None,
        reply: Reply,
        context: object,
        key: bytes | None = None,
    ) -> None:
        """`append` of entries without producer, Stream-Seq or close, to an open stream without a lifetime.

        The fast path of most appends: only the time has to be decided. The caller has checked the type.
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
            op = Append(stream.number, first, 1, body, None, now_ns, key)
            # `Streams.assign_append` and `Append.encode` inlined for this case.
            stream.tail = first
            stream.last_ns = now_ns
            stream.size_bytes += body_bytes
            payload = pack_single_append(stream.number, first, now_ns, body, key)
        else:
            op = Append(stream.number, first, len(lengths), body, lengths, now_ns, key)
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
        """An append that also closes the stream, binds its type or renews its TTL, in one record."""
        transaction.add(self.streams, op)
        if stream.lifetime.ttl_s is not None:
            # By the clock: the time of the entry may be a hint of the client.
            transaction.add(self.streams, Touch(stream.number, now_ns))
        if op.closes or op.binds is not None:
            self.system_streams.register_updated(transaction, stream, now_ns)
        self.commit(transaction)

    # -- streams ---------------------------------------------------------------------------------------

    def create(
        self, request: CreateRequest, reply: Reply, context: object, fetched: Sequence[FetchedBlock] = ()
    ) -> bool:
        """Creates or confirms a stream; True if it is new. `reply` is called when that is durable.

        Raises NotLocalError if a block of the fork's source has to be fetched first; the caller retries with
        it in `fetched`.
        """
        stream = self.find(request.name)
        source = None if request.source is None else self.find(request.source)
        now_ns = self.clock.now_ns()
        if stream is not None:
            self._confirm(stream, request, source, reply, context, now_ns)
            return False
        self._admit(None, 0 if request.initial is None else len(request.initial.body))
        fork = None
        if request.source is not None:
            if source is None or source.visible < 0:
                raise self.not_found_error(request.source, source)
            fork = fork_point(self.reader, source, request, fetched)
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
        self.system_streams.register_created(transaction, created)
        self.commit(transaction)
        return True

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
        self.system_streams.register_updated(transaction, stream, now_ns)
        self.commit(transaction)

    def _add_append(
        self, transaction: Transaction, stream: Stream, request: AppendRequest, now_ns: int
    ) -> None:
        op = decide_append(stream, request, now_ns, self._ahead_ns)
        assert op is not None, "an append to a new stream is not a duplicate"
        transaction.add(self.streams, op)

    def remove(self, stream: Stream, reason: str, reply: Reply, context: object) -> None:
        """Deletes a stream; if it has forks it is soft-deleted and only they can read it."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(stream, reply, context)
        self.add_removal(transaction, stream, reason, self.clock.now_ns())
        self.commit(transaction)

    def add_removal(self, transaction: Transaction, stream: Stream, reason: str, now_ns: int) -> None:
        """Adds the deletion of a stream to a transaction."""
        ancestors: list[Stream] = []
        owner = stream
        while owner.parent:
            owner = self.streams.parent_of(owner)
            ancestors.append(owner)
        for op in decide_delete(stream, reason, now_ns, ancestors):
            removed = transaction.add(self.streams, op)
            assert removed is not None
            if removed is stream:
                self.system_streams.register_deleted(transaction, removed, reason, now_ns)
            events = system_streams.events_of_removal(self.store, self.streams, removed, reason, now_ns)
            self.system_streams.add_segment_events(transaction, events, now_ns)

    def confirm_deleted(self, name: str, reply: Reply, context: object) -> bool:
        """Whether the name was deleted before. If so, `reply` is called when that is durable."""
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

    # -- documents and facts ---------------------------------------------------------------------------

    def describe(
        self,
        stream: Stream,
        key: str,
        value: bytes | None,
        reply: Reply = ignore_reply,
        context: object = None,
    ) -> None:
        """Sets or removes one document of a stream; it applies from the next append on."""
        self.describe_all(stream, [(key, value)], reply, context)

    def describe_all(
        self,
        stream: Stream,
        documents: Sequence[tuple[str, bytes | None]],
        reply: Reply = ignore_reply,
        context: object = None,
    ) -> None:
        """Sets or removes several documents of a stream atomically."""
        self._admit(stream, sum(len(value or b"") for _, value in documents))
        transaction = Transaction(stream, reply, context)
        for key, value in documents:
            transaction.add(self.streams, Describe(stream.number, key, value))
        self.commit(transaction)

    def put_meta(
        self, key: str, value: bytes | None, reply: Reply = ignore_reply, context: object = None
    ) -> None:
        """Sets or removes one fact, a durable key-value pair of the server."""
        self.put_metas([(key, value)], reply, context)

    def put_metas(
        self, facts: Sequence[tuple[str, bytes | None]], reply: Reply = ignore_reply, context: object = None
    ) -> None:
        """Sets or removes several facts atomically."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, reply, context)
        for key, value in facts:
            transaction.add(self.streams, Meta(key, value))
        self.commit(transaction)

    # -- the object store ------------------------------------------------------------------------------

    def record_objects(
        self, op: Sealed | Trim | Recorded | Published | Compacted, reply: Reply = ignore_reply
    ) -> None:
        """Journals a change on the object store, and its `__segments__` events in the same record."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(None, reply, None)
        now_ns = self.clock.now_ns()
        events = system_streams.events_of_op(op, self.store, self.streams, now_ns)
        stream = transaction.add(self.streams, op)
        if stream is not None and isinstance(op, Sealed) and op.keyed:
            self._mark_keyed(transaction, stream)
        if isinstance(op, Compacted):
            # The compaction is complete: its intent is removed.
            transaction.add(self.streams, Meta(segment_catalogue.compaction_fact_key(op.stream), None))
        self.system_streams.add_segment_events(transaction, events, now_ns)
        self.commit(transaction)

    def _mark_keyed(self, transaction: Transaction, stream: Stream) -> None:
        """The first keyed entries of a stream were sealed: from now on its keys are indexed."""
        plans = decode_plans(stream.documents)
        if not plans.keyed and system_streams.has_index_files(stream.name):
            document = encode_plans(msgspec.structs.replace(plans, keyed=True))
            transaction.add(self.streams, Describe(stream.number, INDEX_DOCUMENT, document))

    def set_index_plans(self, stream: Stream, plans: PlanHistory, reply: Reply = ignore_reply) -> None:
        """Sets the stream's index plans, with a `__segments__` event for a new one in the same record."""
        if self.refusal is not None:
            raise self.refusal
        transaction = Transaction(stream, reply, None)
        known = decode_plans(stream.documents).wanted
        transaction.add(self.streams, Describe(stream.number, INDEX_DOCUMENT, encode_plans(plans)))
        if plans.wanted is not None and plans.wanted != known:
            now_ns = self.clock.now_ns()
            self.system_streams.add_segment_events(
                transaction, [system_streams.plan_insert_event(stream, plans.wanted, now_ns)], now_ns
            )
        self.commit(transaction)

    def open_outbox(self) -> None:
        """Creates `__segments__` if it is missing, so that clients can follow it before the first event."""
        if self.refusal is None and self.streams.find(self.system_streams.outbox_name) is None:
            transaction = Transaction(None, ignore_reply, None)
            self.system_streams.outbox(transaction)
            self.commit(transaction)


def append_to_streams(
    log: Log,
    parts: Sequence[tuple[str, Sequence[bytes]]],
    now_ns: int,
    reply: Reply,
    context: object,
    facts: Sequence[tuple[str, bytes | None]] = (),
    removed: Sequence[Stream] = (),
) -> None:
    """Appends to several JSON system streams atomically, creating those that are missing.

    Facts are set and streams removed in the same record. An entry's time is `now_ns`, or that of the previous
    entry if the clock was set back.
    """
    found = [log.find(name) for name, _ in parts]  # `find` removes expired streams in their own record
    transaction = log.begin(sum(len(entry) for _, entries in parts for entry in entries), reply, context)
    for (name, entries), stream in zip(parts, found, strict=True):
        stream = stream or create_system_stream(log.streams, transaction, name, now_ns)
        transaction.add_entries(log.streams, stream, entries, now_ns)
    for key, value in facts:
        transaction.add(log.streams, Meta(key, value))
    for stream in removed:
        log.add_removal(transaction, stream, "deleted", now_ns)
    log.commit(transaction)
