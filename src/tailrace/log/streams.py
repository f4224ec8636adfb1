"""The streams in memory, and the only code that changes their state, live or at recovery.

Applying an operation has two steps: `assign` when it is decided, so that the next decision sees it, and
`publish` when it is durable, so that readers see it. Replaying the journal does both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
from sortedcontainers import SortedDict

from tailrace.log.model import (
    NO_LIFETIME,
    AppendRecord,
    ColdTotals,
    Producer,
    Stream,
    Tombstone,
    fold_records,
)
from tailrace.log.records import (
    Append,
    Bind,
    Compacted,
    Create,
    Delete,
    Describe,
    Meta,
    Op,
    Published,
    Recorded,
    Sealed,
    Touch,
)
from tailrace.storage.hot_store.tables import meta_subject

# Single appends at the tail before they are folded into a block.
RECENT_COUNT_MAX = 256
RECENT_BYTES_MAX = 64 * 1024
UNPUBLISHED = 2**62  # a journal file number no checkpoint reaches


class StreamStore(Protocol):
    """What the log reads from the hot store. Every method is a point look-up by an index."""

    def stream_by_name(self, name: str) -> Stream | None: ...
    def stream_by_number(self, number: int) -> Stream | None: ...
    def tombstone(self, name: str) -> Tombstone | None: ...
    def producer(self, number: int, producer_id: str) -> Producer | None: ...


class Streams:
    """The streams in memory, backed by the hot store for those that are not."""

    def __init__(self, store: StreamStore | None) -> None:
        self.store = store
        self.by_name: dict[str, Stream] = {}
        self.by_number: dict[int, Stream] = {}
        self.tombstones: dict[str, Tombstone] = {}
        # Names created or removed since the checkpoint, with the journal file: for these the hot store is
        # out of date.
        self.changed_names: SortedDict[str, int] = SortedDict()
        self.meta: dict[str, bytes] = {}
        self.next_number = 1
        self.first_epoch = 0  # of a name without a tombstone
        self.memory_bytes = 0
        self.document_bytes = 0  # of the streams in memory: schema registries, profiles and others
        self.file = 0  # journal file of the operations being published
        self.closed_file = 0  # the last file in which a stream was closed
        self.meta_file = 0  # the last file with a fact that is also stored on the object store
        self.touched: dict[int, list[Stream]] = {}  # streams with records in a file not yet checkpointed
        # Streams removed since the checkpoint, with the journal file: the hot store still has their rows.
        self.removed: dict[int, int] = {}
        # Changes of segments and index files since the checkpoint, by stream, with their journal files.
        self.uncheckpointed: dict[int, list[tuple[int, Sealed | Published | Compacted]]] = {}
        self.on_loaded: Callable[[Stream], None] | None = None

    # -- look-up ---------------------------------------------------------------------------------------

    def find(self, name: str) -> Stream | None:
        stream = self.by_name.get(name)
        if stream is not None or self.store is None or name in self.changed_names:
            return stream
        stream = self.store.stream_by_name(name)
        return None if stream is None else self._adopt(stream)

    def get(self, number: int) -> Stream | None:
        stream = self.by_number.get(number)
        if stream is not None or self.store is None or number in self.removed:
            return stream
        stream = self.store.stream_by_number(number)
        return None if stream is None else self._adopt(stream)

    def parent_of(self, stream: Stream) -> Stream:
        parent = self.get(stream.parent)
        assert parent is not None, f"the source of fork {stream.name} is missing"
        return parent

    def tombstone(self, name: str) -> Tombstone | None:
        found = self.tombstones.get(name)
        if found is None and self.store is not None:
            found = self.store.tombstone(name)
        return found

    def load_producer(self, stream: Stream, producer_id: str) -> None:
        """Loads the producer's state for `decide`, which does no I/O."""
        if stream.producers_known or self.store is None:
            return
        if stream.producers is None:
            stream.producers = {}
        if producer_id not in stream.producers:
            found = self.store.producer(stream.number, producer_id)
            if found is not None:
                stream.producers[producer_id] = found

    def _adopt(self, stream: Stream) -> Stream:
        known = self.by_number.get(stream.number)
        if known is not None:
            return known
        self.by_number[stream.number] = stream
        self.by_name[stream.name] = stream
        self.document_bytes += documents_bytes(stream.visible_documents)
        if self.on_loaded is not None:
            self.on_loaded(stream)
        return stream

    def forget(self, stream: Stream) -> None:
        """Evicts a stream; the hot store has all of it."""
        if self.by_number.pop(stream.number, None) is not None:
            self.document_bytes -= documents_bytes(stream.visible_documents)
        if self.by_name.get(stream.name) is stream:
            del self.by_name[stream.name]

    # -- assign: when an operation is decided ------------------------------------------------------------

    def assign(self, op: Op) -> Stream | None:
        if isinstance(op, Append):
            stream = self.get(op.stream)
            assert stream is not None
            self.assign_append(op, stream)
            return stream
        if isinstance(op, Create):
            return self._assign_create(op)
        if isinstance(op, Delete):
            return self._assign_delete(op)
        if isinstance(op, Meta):
            if op.value is None:
                self.meta.pop(op.key, None)
            else:
                self.meta[op.key] = op.value
            return None
        if isinstance(op, Recorded):
            # The hot store records the objects; streams in memory only show the manifest's generation.
            for number, generation in op.heads:
                if (known := self.by_number.get(number)) is not None:
                    known.cold = msgspec.structs.replace(known.cold, generation=generation)
            return None
        stream = self.get(op.stream)
        assert stream is not None
        if isinstance(op, Touch):
            stream.touched_ns = max(stream.touched_ns, op.at_ns)
            stream.touched_saved_ns = max(stream.touched_saved_ns, op.at_ns)
        elif isinstance(op, Bind):
            stream.bind(op.content_type)
        elif isinstance(op, Describe):
            stream.documents = with_document(stream.documents, op)
        elif isinstance(op, Sealed):
            _assign_sealed(op, stream)
        elif isinstance(op, Compacted):
            _assign_compacted(op, stream)
        elif isinstance(op, Published):
            generation = max(stream.cold.generation, op.generation)
            stream.cold = msgspec.structs.replace(stream.cold, generation=generation)
        else:
            assert stream.earliest <= op.earliest <= stream.sealed
            stream.earliest = op.earliest
            stream.size_bytes -= op.payload_bytes
            stream.sealed_bytes -= op.payload_bytes
            stream.cold = msgspec.structs.replace(
                stream.cold,
                segments=max(0, stream.cold.segments - op.segments),
                segment_bytes=max(0, stream.cold.segment_bytes - op.segment_bytes),
            )
        return stream

    def assign_append(self, op: Append, stream: Stream) -> None:
        count = op.count
        assert op.first == stream.tail + 1, "entries out of order"
        assert not stream.closed
        assert op.time_ns >= stream.last_ns
        if count:
            stream.tail += count
            stream.last_ns = op.time_ns
            stream.size_bytes += len(op.body) if op.lengths is None else sum(op.lengths)
        if op.producer is not None:
            producer_id, epoch, seq = op.producer
            if stream.producers is None:
                stream.producers = {}
            stream.producers[producer_id] = Producer(epoch, seq)
        if op.seq is not None:
            stream.seq = op.seq
        if op.binds is not None:
            stream.bind(op.binds)
        if op.closes:
            stream.closed = True
            stream.closed_by = op.producer

    def _assign_create(self, op: Create) -> Stream:
        assert op.stream >= self.next_number
        assert op.name not in self.by_name
        stream = Stream(op.stream, op.name, op.created_ns)
        stream.incarnation = op.incarnation
        if op.epochs != stream.epochs:
            stream.epochs = op.epochs
        stream.bind(op.content_type)
        if op.lifetime != NO_LIFETIME:  # else the shared constant: `Log.find` compares by identity
            stream.lifetime = op.lifetime
        stream.requested_lifetime = op.asked
        stream.closed = op.closed
        stream.parent = op.parent
        stream.fork_entry = stream.tail = stream.stored = stream.sealed = op.fork_entry
        stream.fork_sub = op.fork_sub
        stream.last_ns = op.fork_ns
        if op.parent:
            parent = self.get(op.parent)
            assert parent is not None
            assert not parent.gone
            parent.forks += 1
            stream.earliest = min(parent.earliest, op.fork_entry)
        self.next_number = op.stream + 1
        self.by_number[op.stream] = stream
        self.by_name[op.name] = stream
        self.changed_names[op.name] = UNPUBLISHED
        self.tombstones.pop(op.name, None)
        if self.on_loaded is not None:
            self.on_loaded(stream)
        return stream

    def _assign_delete(self, op: Delete) -> Stream:
        stream = self.get(op.stream)
        assert stream is not None
        assert not stream.removed
        if op.soft:
            stream.gone = True
            stream.gone_reason = op.reason
            return stream
        stream.removed = True
        self.removed[stream.number] = UNPUBLISHED
        if stream.parent:
            parent = self.parent_of(stream)
            parent.forks -= 1
            parent.leaving += 1
        self.tombstones[stream.name] = Tombstone(stream.epoch, stream.incarnation, op.at_ns, op.reason)
        self.changed_names[stream.name] = UNPUBLISHED
        self.forget(stream)
        return stream

    # -- publish: when an operation is durable ----------------------------------------------------------

    def publish(self, op: Op, stream: Stream | None) -> None:
        if stream is None and isinstance(op, Meta) and meta_subject(op.key) is not None:
            self.meta_file = self.file
        if stream is None or (stream.removed and not isinstance(op, Delete)):
            return  # not visible, or deleted by a later operation; if that fails, the rollback restores it
        if isinstance(op, Append):
            self.publish_append(op, stream)
            return
        if isinstance(op, Create):
            stream.visible = op.fork_entry
            stream.visible_closed = op.closed
            if op.closed:
                self.closed_file = self.file
            self.changed_names[op.name] = self.file
            if op.parent:
                self.mark_touched(self.parent_of(stream))
        elif isinstance(op, Delete) and not op.soft:
            if stream.parent and (parent := self.by_number.get(stream.parent)) is not None:
                parent.leaving -= 1
                self.mark_touched(parent)
            self.removed[stream.number] = self.file
            self.uncheckpointed.pop(stream.number, None)
            if self.by_name.get(stream.name) is None:
                self.changed_names[stream.name] = self.file
            self._release(stream)
            return
        elif isinstance(op, Describe):
            self.document_bytes -= documents_bytes(stream.visible_documents)
            stream.visible_documents = with_document(stream.visible_documents, op)
            self.document_bytes += documents_bytes(stream.visible_documents)
        elif isinstance(op, Sealed | Published | Compacted):
            self.uncheckpointed.setdefault(stream.number, []).append((self.file, op))
        self.mark_touched(stream)

    def checkpointed(self, seq: int) -> None:
        """Drops the changes up to and including this journal file: the hot store has them."""
        for number, ops in list(self.uncheckpointed.items()):
            later = [(file, op) for file, op in ops if file > seq]
            if later:
                self.uncheckpointed[number] = later
            else:
                del self.uncheckpointed[number]

    def _release(self, stream: Stream) -> None:
        for block in stream.blocks or ():
            self.memory_bytes -= block.memory_bytes
        self.memory_bytes -= stream.recent_bytes + 100 * len(stream.recent or ())
        stream.blocks = stream.recent = None
        stream.recent_bytes = 0

    def mark_touched(self, stream: Stream) -> None:
        """Records that the current journal file has an operation on the stream."""
        if stream.recent_file != self.file:
            self.fold_tail(stream)
            stream.recent_file = self.file
            self.touched.setdefault(self.file, []).append(stream)

    def publish_append(self, op: Append, stream: Stream) -> None:
        """Adds durable entries to the memory tail and makes them visible."""
        if stream.recent_file != self.file:
            self.mark_touched(stream)
        if op.count:
            recent = stream.recent
            if recent is None:
                stream.recent = recent = list[AppendRecord]((op,))
            else:
                recent.append(op)
            size = len(op.body)
            self.memory_bytes += size + 100
            stream.recent_bytes = recent_bytes = stream.recent_bytes + size
            if recent_bytes >= RECENT_BYTES_MAX or len(recent) >= RECENT_COUNT_MAX:
                self.fold_tail(stream)
            stream.visible = op.first + op.count - 1
        if op.closes:
            stream.visible_closed = True
            self.closed_file = self.file

    def fold_tail(self, stream: Stream) -> None:
        """Folds the single appends at the tail into a block."""
        recent = stream.recent
        if not recent:
            return
        block = fold_records(recent, stream.separator, stream.recent_file)
        self.memory_bytes += block.memory_bytes - stream.recent_bytes - 100 * len(recent)
        if stream.blocks is None:
            stream.blocks = [block]
        else:
            stream.blocks.append(block)
        stream.recent = None
        stream.recent_bytes = 0

    def drop_through(self, stream: Stream, file: int) -> None:
        """Frees entries that the hot store has: those published in `file` or an older one."""
        if stream.recent_file <= file:
            self.fold_tail(stream)
        stream.producers_known = stream.producers_known and not stream.producers
        blocks = stream.blocks
        while blocks and blocks[0].file <= file:
            stream.stored = blocks[0].last
            self.memory_bytes -= blocks.pop(0).memory_bytes
        if not blocks:
            stream.blocks = None


def _assign_sealed(op: Sealed, stream: Stream) -> None:
    cold, size_bytes = stream.cold, 0
    for segment in op.segments:
        assert segment.first == stream.sealed + 1, "segments out of order"
        assert segment.last <= stream.tail
        stream.sealed = segment.last
        stream.sealed_bytes += segment.payload_bytes
        size_bytes += segment.bytes
    stream.cold = ColdTotals(
        cold.segments + len(op.segments),
        cold.segment_bytes + size_bytes,
        max(cold.generation, op.generation),
        op.at_ns if op.segments else cold.recorded_ns,
    )


def _assign_compacted(op: Compacted, stream: Stream) -> None:
    cold = stream.cold
    stream.cold = msgspec.structs.replace(
        cold,
        segments=max(0, cold.segments - len(op.replaced)) + 1,
        segment_bytes=max(0, cold.segment_bytes - op.replaced_bytes) + op.segment.bytes,
        generation=max(cold.generation, op.generation),
    )


def documents_bytes(documents: dict[str, bytes] | None) -> int:
    return 0 if documents is None else sum(map(len, documents.values()))


def with_document(documents: dict[str, bytes] | None, op: Describe) -> dict[str, bytes] | None:
    """A copy of the documents with one of them set or removed."""
    changed: dict[str, bytes] = {} if documents is None else dict(documents)
    if op.value is None:
        changed.pop(op.key, None)
    else:
        changed[op.key] = op.value
    return changed or None
