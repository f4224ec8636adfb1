"""The checkpointer process: folds retired journal files into the hot store and vacuums it.

It replays a file with the same code as the server and writes the changes in one transaction, together with
the number of the file. As a separate process it does not block the server's loop, and it needs nothing from
the server's memory. It may be killed at any moment.

Between files it returns free pages of the hot store to the file system: SQLite reuses freed pages but never
shrinks the file by itself. Pages are moved from the end of the file and the end is truncated, in bounded
steps and only while no journal file waits. A file created by an older version has no pointer map and is
rebuilt once within the write-ahead log, so that a crash leaves either the old or the new content.

Protocol, one line each: `<file> <end>` has the response `done <file>` or `failed <file> <why>`; `vacuum <1 if
the disk is nearly full>` has `vacuumed <pages>` or `failed vacuum <why>`; `stop` ends a vacuum early and has
no response. The process exits at the end of its input.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import apsw
import msgspec

from tailrace.common import failpoints, process
from tailrace.log.journal import JournalScan, file_path, read_header
from tailrace.log.model import Block, Stream
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
    decode_record,
)
from tailrace.log.recovery import apply_plain_append
from tailrace.log.stored_streams import (
    StoredStreams,
    decode_block,
    decode_stream,
    encode_block,
    encode_tombstone,
)
from tailrace.log.streams import Streams
from tailrace.storage.hot_store.database import FileSpace, HotDatabase
from tailrace.storage.hot_store.tables import DeletedStreamRow, MetaTables, SegmentRow
from tailrace.storage.manifest_recording import encode_deleted
from tailrace.storage.retention_rules import put_due, put_stream, reached_by_forks, stored_stream
from tailrace.storage.segments.model import RetainedRanges, make_stream_id

logger = logging.getLogger("tailrace.checkpoint")

STEP_PAGES: Final = 2048  # 16 MiB: some 60 ms
# Free pages that are not returned, because the next checkpoints need them again.
SLACK_BYTES: Final = 64 * 1024 * 1024
SLACK_SHARE: Final = 0.5  # of what is used
# A rebuilt file is written twice, to a temporary file and to the write-ahead log, before the old one is cut.
REBUILD_COPIES: Final = 2
REBUILD_MARGIN_BYTES: Final = 1024 * 1024


def excess_pages(space: FileSpace, *, short: bool) -> int:
    """Free pages to return; all of them if the disk is `short` of space."""
    retained = 0 if short else max(SLACK_BYTES, int(space.used_bytes * SLACK_SHARE)) // space.page_bytes
    return max(0, space.free_pages - retained)


def is_vacuum_due(space: FileSpace, *, short: bool) -> bool:
    excess = excess_pages(space, short=short)
    if space.incremental:
        return excess > 0
    # A rebuild writes all used pages, and should free more than that.
    return excess > 0 and space.free_bytes >= space.used_bytes


def vacuum_step(data_dir: Path, db: HotDatabase, *, short: bool) -> int:
    """Returns some pages; how many. 0 if there is nothing to do, or no space to do it."""
    space = db.space()
    if not is_vacuum_due(space, short=short):
        return 0
    if space.incremental:
        for _ in db.rows(f"PRAGMA incremental_vacuum({min(STEP_PAGES, excess_pages(space, short=short))})"):
            pass  # one row for each page, in some versions
    else:
        free = os.statvfs(data_dir)
        if free.f_bavail * free.f_frsize < REBUILD_COPIES * space.used_bytes + REBUILD_MARGIN_BYTES:
            return 0
        # Otherwise the temporary file would be in /tmp, which may be memory. It is unlinked at once, so a
        # crash leaves nothing.
        os.environ["SQLITE_TMPDIR"] = str(data_dir)
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("VACUUM")
    truncate_wal(db)
    return space.pages - db.space().pages


def truncate_wal(db: HotDatabase) -> None:
    """Moves everything from the write-ahead log to the file, which is cut by that, and empties the log."""
    db.connection.set_busy_timeout(100)
    try:
        db.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        pass  # a reader still needs it; the next checkpoint does it
    finally:
        db.connection.set_busy_timeout(10_000)


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

    def collect(self, op: Op, stream: Stream | None) -> None:
        if type(op) is Append:
            if op.closes or op.binds is not None:
                self._changed[op.stream] = None
        elif isinstance(op, Create | Bind | Describe):
            self._changed[op.stream] = None
            if isinstance(op, Create) and op.parent:
                self._changed[op.parent] = None  # a manifest has the number of its forks
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

    def collect_deleted(self, store: StoredStreams) -> None:
        """For removed streams that the sealer may have seen; called before their rows are deleted."""
        for op, stream in self._removed:
            if store.db.image_by_number(stream.number) is None:
                continue  # created and removed within this file: the sealer never saw it
            folder = make_stream_id(stream.name, stream.incarnation)
            image = encode_deleted(stream, op.at_ns, op.reason)
            store.db.cold.put_deleted(DeletedStreamRow(stream.number, stream.name, folder, image))

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
            cold.mark_head_recorded(op.stream, op.as_of_file, op.generation)
        self._join_segments(store.db, removed)
        self._write_index_files(store.db, removed)
        for recorded in self._recorded:
            for number, generation in recorded.heads:
                if number not in removed and store.db.image_by_number(number) is not None:
                    cold.mark_head_recorded(number, recorded.as_of_file, generation)
            for number in recorded.buried:
                cold.forget_deleted(number)
            for number in recorded.trimmed:
                store.db.trims.delete_pending(number, recorded.as_of_file)
        for number in self._changed:
            if number not in removed:
                cold.mark_head_stale(number, self._file)

    def _join_segments(self, db: HotDatabase, removed: set[int]) -> None:
        for op in self._compacted:
            if op.stream not in removed:
                row = SegmentRow(op.segment.first, op.segment.last, _ENCODER.encode(op.segment), op.footer)
                db.cold.join_segments(op.stream, row, op.segment.last_ns)
                db.cold.mark_head_recorded(op.stream, 0, op.generation)

    def _write_index_files(self, db: HotDatabase, removed: set[int]) -> None:
        for op in self._published:
            if op.stream in removed:
                continue
            for key in op.removed:
                db.index_files.drop(op.stream, key)
            for index_file in op.added:
                db.index_files.put(op.stream, index_file)
            for found in op.quarantined:
                db.index_files.put_quarantine(op.stream, found)
            db.cold.mark_head_recorded(op.stream, 0, op.generation)

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
                affected.append(stream.parent)  # may have retained entries for this one
            if not stream.earliest:
                continue
            db.index_files.trim(number, stream.earliest)
            retained = RetainedRanges(stream.earliest, reached_by_forks(db, stream))
            dropped = sum(db.cold.drop_segments(number, behind, upto) for behind, upto in retained.gaps())
            if dropped or number in self._trimmed:
                db.trims.put_pending(number, self._file)


BLOCK_BYTES = 256 * 1024
MERGE_BELOW_BYTES = 64 * 1024
IMAGES_AT_ONCE = 1000


def checkpoint_file(data_dir: Path, store: StoredStreams, seq: int, end: int, tombstone_ns: int) -> None:
    """Folds one journal file into the hot store. Idempotent.

    It is one transaction including the check of what is done: the checkpointer of a killed server may
    still be working on the same file.
    """
    db = store.db
    with db.write():
        done = db.journal_seq
        if seq <= done:
            return
        path = file_path(data_dir / "journal", seq)
        header = read_header(path)
        if header is None or header.previous_seq > done:
            raise ValueError(f"journal file {seq} does not follow file {done}, the last one checkpointed")
        folding = FileCheckpoint(store, seq)
        for _, payload in JournalScan(path, header, end):
            folding.apply_record(payload)
        folding.write(tombstone_ns)
    if folding.cold.trims:
        failpoints.reached("seal.after_trim")
    db.connection.wal_checkpoint(mode=0)


class FileCheckpoint:
    """The records of one journal file on their way into the hot store, within one transaction."""

    def __init__(self, store: StoredStreams, seq: int) -> None:
        self._store = store
        self._seq = seq
        db = store.db
        db.cold.create()
        db.documents.create()
        db.index_files.create()
        if db.trims.create():
            write_fork_rows(db)
        self.streams = streams = Streams(store)
        streams.next_number = int(str(db.fact("next_number", 1)))
        self._before = db.meta()
        streams.meta = dict(self._before)
        streams.file = seq
        self.cold = ObjectStoreChanges(seq)
        self._documents: dict[tuple[int, str], bytes | None] = {}

    def apply_record(self, payload: bytes) -> None:
        if apply_plain_append(self.streams, payload):
            return  # nothing about objects or documents
        for op in decode_record(payload):
            self.apply(op)

    def apply(self, op: Op) -> None:
        stream = self.streams.assign(op)
        self.streams.publish(op, stream)
        self.cold.collect(op, stream)
        if type(op) is Describe:
            self._documents[op.stream, op.key] = op.value

    def write(self, tombstone_ns: int) -> None:
        db, streams = self._store.db, self.streams
        if self.cold.trims:
            failpoints.reached("seal.before_trim")
        self.cold.collect_deleted(self._store)
        write_streams(self._store, streams, self.cold)
        for (number, key), value in self._documents.items():
            if number not in streams.removed:
                db.documents.put(number, key, value)
        keys = self._before.keys() | streams.meta.keys()
        changed = [key for key in keys if self._before.get(key) != streams.meta.get(key)]
        MetaTables(db).changed(changed, self._seq)
        for key in changed:
            db.put_meta(key, streams.meta.get(key))
        db.expire_tombstones(time.time_ns() - tombstone_ns)
        db.set_fact("next_number", streams.next_number)
        db.set_fact("journal_seq", self._seq)


def write_streams(store: StoredStreams, streams: Streams, cold: ObjectStoreChanges) -> None:
    db = store.db
    for number in streams.removed:
        db.delete_stream(number)
    cold.write(store)
    for name in streams.changed_names:
        tombstone = streams.tombstones.get(name)
        if tombstone is not None:
            db.put_tombstone(name, tombstone.deleted_ns, encode_tombstone(tombstone))
        else:
            db.delete_tombstone(name)
    for stream in streams.touched.get(streams.file, ()):
        if stream.removed:
            continue
        streams.fold_tail(stream)
        write_blocks(store, stream)
        for producer_id, producer in (stream.producers or {}).items():
            db.put_producer(stream.number, producer_id, producer.epoch, producer.seq)
        put_stream(db, stream)
    cold.trim(db)
    for stream in streams.touched.get(streams.file, ()):
        if not stream.removed:
            put_due(db, stream)


def write_fork_rows(db: HotDatabase) -> None:
    """Once, in a store that was created before these tables existed."""
    name = ""
    while found := db.images_after(name, "", IMAGES_AT_ONCE):
        name = found[-1][0]
        for _, image in found:
            stream = decode_stream(image)
            if stream.parent:
                put_stream(db, stream)
            put_due(db, stream)


def write_blocks(store: StoredStreams, stream: Stream) -> None:
    """Writes the new blocks, joined up so that a slow stream does not end as a thousand tiny rows."""
    pending = list(stream.blocks or ())
    if not pending:
        return
    added = 0
    last = store.db.last_block(stream.number)
    if last is not None and len(last.body) < MERGE_BELOW_BYTES:
        pending.insert(0, decode_block(last))
        added -= len(last.body)
    group: list[Block] = []
    size = 0
    for block in pending:
        if group and size + len(block.body) > BLOCK_BYTES:
            added += _put_blocks(store, stream, group)
            group, size = [], 0
        group.append(block)
        size += len(block.body)
    added += _put_blocks(store, stream, group)
    store.db.cold.add_hot_bytes(added)


def _put_blocks(store: StoredStreams, stream: Stream, group: list[Block]) -> int:
    block = group[0] if len(group) == 1 else merge_blocks(group, stream.separator)
    store.db.put_block(stream.number, encode_block(block), block.times[-1])
    return len(block.body)


def merge_blocks(blocks: list[Block], separator: int) -> Block:
    """One block out of consecutive ones."""
    ends: array[int] = array("I")
    times: array[int] = array("q")
    keyed = any(block.keys is not None for block in blocks)
    keys: list[bytes | None] = []
    base = 0
    for block in blocks:
        ends.extend([base + end for end in block.ends])
        times.extend(block.times)
        if keyed:
            keys.extend(block.keys if block.keys is not None else [None] * len(block.ends))
        base += len(block.body) + separator
    glue = b"," if separator else b""
    body = glue.join([block.body for block in blocks])
    return Block(blocks[0].first, body, ends, times, keys if keyed else None)


class CommandReader:
    """Lines from the server, read on a separate thread."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ready = threading.Condition()
        self._interruptible: HotDatabase | None = None  # vacuums
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            with self._ready:
                if line.strip() == "stop":
                    if self._interruptible is not None:
                        self._interruptible.connection.interrupt()
                    continue
                self._lines.append(line)
                self._ready.notify()
        os._exit(0)  # the server has exited; SQLite rolls an unfinished transaction back

    def next(self) -> list[str]:
        with self._ready:
            while not self._lines:
                self._ready.wait()
            return self._lines.pop(0).split()

    @contextmanager
    def may_interrupt(self, db: HotDatabase) -> Generator[None]:
        with self._ready:
            self._interruptible = db
        try:
            yield
        finally:
            with self._ready:
                self._interruptible = None


def write_response(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    data_dir = Path(sys.argv[1])
    tombstone_ns = int(sys.argv[2]) * 1_000_000
    process.lower_cpu_priority()
    failpoints.mark_child_process()
    store: StoredStreams | None = None
    orders = CommandReader()
    while True:
        name, argument = orders.next()
        try:
            store = store or StoredStreams(data_dir / "hot.db", writer=True)
            if name == "vacuum":
                with orders.may_interrupt(store.db):
                    given_back = vacuum_step(data_dir, store.db, short=argument == "1")
                write_response(f"vacuumed {given_back}")
            else:
                checkpoint_file(data_dir, store, int(name), int(argument), tombstone_ns)
                write_response(f"done {name}")
        except apsw.InterruptError:
            write_response("vacuumed 0")
        except Exception as error:  # noqa: BLE001 - reported to the server, which tries again
            write_response(f"failed {name} {type(error).__name__}: {error}".replace("\n", " "))


if __name__ == "__main__":
    main()
