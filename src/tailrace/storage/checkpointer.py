"""The checkpointer: a process of its own that folds retired journal files into the hot store.

It replays a file with the same `apply` the server uses and writes what changed in one transaction, together
with the number of the file. Being another process, it takes no time from the server's loop; being a fold of
the journal, it needs nothing from the server's memory. It may be killed at any moment.

Between files it gives free pages of the hot store back to the disk, when the server asks for it.

Lines in: `<file> <end>`, answered by `done <file>` or `failed <file> <why>`; `vacuum <1 if the disk is
short>`, answered by `vacuumed <pages>` or `failed vacuum <why>`; `stop`, which ends a vacuum early and has no
answer of its own. It ends when its input does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import apsw

from tailrace.common import failpoints, process
from tailrace.log.journal import JournalScan, file_path, read_header
from tailrace.log.model import Block, Stream
from tailrace.log.records import Describe, Op, decode_record
from tailrace.log.recovery import apply_plain_append
from tailrace.log.stored_streams import (
    StoredStreams,
    decode_block,
    decode_stream,
    encode_block,
    encode_tombstone,
)
from tailrace.log.streams import Streams
from tailrace.storage.cold_changes import ObjectStoreChanges
from tailrace.storage.hot_store.hot import HotDatabase
from tailrace.storage.hot_store.meta_tables import MetaTables
from tailrace.storage.stored import put_due, put_stream
from tailrace.storage.vacuum import vacuum_step

BLOCK_BYTES = 256 * 1024
MERGE_BELOW_BYTES = 64 * 1024
IMAGES_AT_ONCE = 1000


def checkpoint_file(data_dir: Path, store: StoredStreams, seq: int, end: int, tombstone_ns: int) -> None:
    """Folds one journal file into the hot store. Doing it again changes nothing.

    It is all one transaction, from the look at what is done: the checkpointer of a server that was killed may
    still be at the same file.
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
            folding.take(payload)
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
        db.companions.create()
        if db.trims.create():
            write_fork_rows(db)
        self.streams = streams = Streams(store)
        streams.next_number = int(str(db.fact("next_number", 1)))
        self._before = db.meta()
        streams.meta = dict(self._before)
        streams.file = seq
        self.cold = ObjectStoreChanges(seq)
        self._documents: dict[tuple[int, str], bytes | None] = {}

    def take(self, payload: bytes) -> None:
        if apply_plain_append(self.streams, payload):
            return  # says nothing about objects or documents
        for op in decode_record(payload):
            self.apply(op)

    def apply(self, op: Op) -> None:
        stream = self.streams.assign(op)
        self.streams.publish(op, stream)
        self.cold.take(op, stream)
        if type(op) is Describe:
            self._documents[op.stream, op.key] = op.value

    def write(self, tombstone_ns: int) -> None:
        db, streams = self._store.db, self.streams
        if self.cold.trims:
            failpoints.reached("seal.before_trim")
        self.cold.dig_graves(self._store)
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
        streams.settle(stream)
        write_blocks(store, stream)
        for producer_id, producer in (stream.producers or {}).items():
            db.put_producer(stream.number, producer_id, producer.epoch, producer.seq)
        put_stream(db, stream)
    cold.trim(db)
    for stream in streams.touched.get(streams.file, ()):
        if not stream.removed:
            put_due(db, stream)


def write_fork_rows(db: HotDatabase) -> None:
    """Once, in a store that was made before there was such a book."""
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
    """Lines of the server, read on a thread of their own."""

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
        os._exit(0)  # the server is gone; an unfinished transaction rolls back by itself

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


def write_answer(line: str) -> None:
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
                write_answer(f"vacuumed {given_back}")
            else:
                checkpoint_file(data_dir, store, int(name), int(argument), tombstone_ns)
                write_answer(f"done {name}")
        except apsw.InterruptError:
            write_answer("vacuumed 0")
        except Exception as error:  # noqa: BLE001 - reported to the server, which tries again
            write_answer(f"failed {name} {type(error).__name__}: {error}".replace("\n", " "))


if __name__ == "__main__":
    main()
