"""What a journal file says about the object store, gathered during its replay, written with the rest."""

from __future__ import annotations

import msgspec

from tailrace.log.model import Stream
from tailrace.log.records import (
    Append,
    Bind,
    Compacted,
    Create,
    Delete,
    Describe,
    Op,
    Published,
    Recorded,
    Sealed,
    Trim,
)
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.facts import encode_deleted
from tailrace.storage.hot_store.cold_tables import DeletedStreamRow, SegmentRow
from tailrace.storage.hot_store.hot import HotDatabase
from tailrace.storage.segments.kept import RetainedRanges
from tailrace.storage.segments.segments import make_stream_id
from tailrace.storage.stored import reached_by_forks, stored_stream

_ENCODER = msgspec.msgpack.Encoder()


class ObjectStoreChanges:
    """The operations of one journal file that concern segments and manifests."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._changed: dict[int, None] = {}  # streams whose manifest has to be written again
        self._sealed: list[Sealed] = []
        self._published: list[Published] = []
        self._compacted: list[Compacted] = []
        self._trimmed: dict[int, None] = {}  # streams that show less than before, or less than their source
        self._left: dict[int, None] = {}  # streams that lost a fork
        self._recorded: list[Recorded] = []
        self._removed: list[tuple[Delete, Stream]] = []

    def take(self, op: Op, stream: Stream | None) -> None:
        if type(op) is Append:
            if op.closes or op.binds is not None:
                self._changed[op.stream] = None
        elif isinstance(op, Create | Bind | Describe):
            self._changed[op.stream] = None
            if isinstance(op, Create) and op.parent:
                self._changed[op.parent] = None  # a manifest tells how many forks need it
                if stream is not None and stream.earliest:
                    self._trimmed[op.stream] = None
        elif isinstance(op, Delete):
            assert stream is not None
            if stream.parent:
                self._left[stream.parent] = None
            if op.soft:
                self._changed[op.stream] = None
            else:
                self._removed.append((op, stream))
                if stream.parent:
                    self._changed[stream.parent] = None
        elif isinstance(op, Sealed):
            self._sealed.append(op)
        elif isinstance(op, Published):
            self._published.append(op)
        elif isinstance(op, Compacted):
            self._compacted.append(op)
        elif isinstance(op, Trim):
            self._trimmed[op.stream] = None
        elif isinstance(op, Recorded):
            self._recorded.append(op)

    def dig_graves(self, store: StoredStreams) -> None:
        """For removed streams that the sealer may have seen. Before their rows are deleted."""
        for op, stream in self._removed:
            if store.db.image_by_number(stream.number) is None:
                continue  # made and removed within this file: nothing of it ever left the journal
            folder = make_stream_id(stream.name, stream.incarnation)
            image = encode_deleted(stream, op.at_ns, op.reason)
            store.db.cold.put_grave(DeletedStreamRow(stream.number, stream.name, folder, image))

    @property
    def trims(self) -> bool:
        """Whether entries leave the hot store by it."""
        return bool(self._sealed)

    def write(self, store: StoredStreams) -> None:
        """Segments in and blocks out, in the same transaction. Before new blocks are written."""
        cold = store.db.cold
        removed = {stream.number for _, stream in self._removed}
        for op in self._sealed:
            if op.stream in removed:
                continue
            for segment, footer in zip(op.segments, op.footers, strict=True):
                row = SegmentRow(segment.first, segment.last, _ENCODER.encode(segment), footer)
                cold.put_segment(op.stream, row, segment.last_ns)
            if op.segments:
                cold.drop_blocks(op.stream, op.segments[-1].last)
            cold.head_recorded(op.stream, op.as_of_file, op.generation)
        self._join_segments(store.db, removed)
        self._write_companions(store.db, removed)
        for recorded in self._recorded:
            for number, generation in recorded.heads:
                if number not in removed and store.db.image_by_number(number) is not None:
                    cold.head_recorded(number, recorded.as_of_file, generation)
            for number in recorded.buried:
                cold.delete_grave(number)
            for number in recorded.trimmed:
                store.db.trims.delete_pending(number, recorded.as_of_file)
        for number in self._changed:
            if number not in removed:
                cold.head_changed(number, self._file)

    def _join_segments(self, db: HotDatabase, removed: set[int]) -> None:
        for op in self._compacted:
            if op.stream not in removed:
                row = SegmentRow(op.segment.first, op.segment.last, _ENCODER.encode(op.segment), op.footer)
                db.cold.join_segments(op.stream, row, op.segment.last_ns)
                db.cold.head_recorded(op.stream, 0, op.generation)

    def _write_companions(self, db: HotDatabase, removed: set[int]) -> None:
        for op in self._published:
            if op.stream in removed:
                continue
            for key in op.removed:
                db.companions.drop(op.stream, key)
            for companion in op.added:
                db.companions.put(op.stream, companion)
            for found in op.quarantined:
                db.companions.put_quarantine(op.stream, found)
            db.cold.head_recorded(op.stream, 0, op.generation)

    def trim(self, db: HotDatabase) -> None:
        """Segments out that no stream shows any more. After the streams are written."""
        affected = [*self._trimmed, *self._left]
        seen: set[int] = set()
        while affected:
            number = affected.pop()
            stream = None if number in seen else stored_stream(db, number)
            seen.add(number)
            if stream is None:
                continue
            if stream.parent:
                affected.append(stream.parent)  # may have kept something for this one
            if not stream.earliest:
                continue
            db.companions.trim(number, stream.earliest)
            kept = RetainedRanges(stream.earliest, reached_by_forks(db, stream))
            dropped = sum(db.cold.drop_segments(number, behind, upto) for behind, upto in kept.gaps())
            if dropped or number in self._trimmed:
                db.trims.put_pending(number, self._file)
