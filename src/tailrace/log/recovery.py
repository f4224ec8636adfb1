"""Recovery: replays the journal on top of the last checkpoint to rebuild the acknowledged state."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from tailrace.common.logging_setup import log_fields
from tailrace.log.journal import (
    HEADER_BYTES,
    SALVAGE_HINT,
    JournalCorruptError,
    JournalScan,
    file_path,
    files_to_replay,
    write_all,
)
from tailrace.log.records import UNREADABLE_ERRORS, decode_plain_append, decode_record
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams

logger = logging.getLogger("tailrace.log")


class ReplayResult(NamedTuple):
    streams: Streams
    seq: int  # last file and the end of its acknowledged part
    end: int
    files: list[tuple[int, int]]  # the replayed files with their ends
    records: int
    torn: bool
    acknowledged: int  # the part of the last file that is known to have been acknowledged


def replay_journal(
    directory: Path, store: StoredStreams, upto: tuple[int, int] | None = None
) -> ReplayResult:
    """Rebuilds all state. With `upto`, records after that position of the journal are ignored.

    Reads a snapshot of the hot store: the checkpointer of a killed server may still be writing to it.
    """
    with store.snapshot():
        return _replay_files(directory, store, upto)


def _replay_files(directory: Path, store: StoredStreams, upto: tuple[int, int] | None) -> ReplayResult:
    checkpoint_seq = store.db.journal_seq
    streams = Streams(store)
    streams.next_number = int(str(store.db.fact("next_number", 1)))
    streams.meta = store.db.meta()
    seq, end, records, torn, acknowledged = checkpoint_seq, HEADER_BYTES, 0, False, 0
    files: list[tuple[int, int]] = []
    for path, header, known_end in files_to_replay(
        directory, checkpoint_seq, None if upto is None else upto[0]
    ):
        if upto is not None and header.seq == upto[0]:
            known_end = upto[1]
        scan = JournalScan(path, header, known_end)
        for position, payload in scan:
            records += 1
            streams.file = header.seq
            try:
                apply_record(streams, payload)
            except UNREADABLE_ERRORS as error:
                why = str(error).partition("\n")[0] or type(error).__name__
                raise JournalCorruptError(
                    f"{path.name}: the record at byte {position} cannot be applied ({why}); {SALVAGE_HINT}"
                ) from error
        seq, end, torn, acknowledged = header.seq, scan.end, scan.torn, scan.acknowledged
        files.append((seq, end))
    return ReplayResult(streams, seq, end, files, records, torn, acknowledged)


def sync_tail(directory: Path, replayed: ReplayResult) -> None:
    """Makes the replayed tail durable: a killed server may have left it in the page cache only.

    A sync is not enough. If write-back failed and the error was reported to the killed server, the pages are
    clean, and no later sync writes them or reports the error again. So the part that was not acknowledged is
    rewritten in place. If the file cannot be written it is only synced, so that reads can be served.
    """
    if not replayed.files:
        return
    path = file_path(directory, replayed.seq)
    start, end = replayed.acknowledged, replayed.end
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            write_all(fd, os.pread(fd, end - start, start), start)
        except OSError as error:
            fields = log_fields(file=path.name, error=str(error))
            logger.warning("cannot rewrite the journal tail, syncing it only", extra=fields)
        os.fsync(fd)
    finally:
        os.close(fd)


def apply_record(streams: Streams, payload: bytes) -> None:
    """Assigns and publishes the operations of a record: everything in the journal is durable."""
    if not apply_plain_append(streams, payload):
        for op in decode_record(payload):
            streams.publish(op, streams.assign(op))


def apply_plain_append(streams: Streams, payload: bytes) -> bool:
    """The fast path for a record with one plain entry; False for any other record."""
    plain = decode_plain_append(payload)
    if plain is None:
        return False
    stream = streams.get(plain.stream)
    assert stream is not None
    streams.assign_append(plain, stream)
    if not stream.removed:
        streams.publish_append(plain, stream)
    return True
