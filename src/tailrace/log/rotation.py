"""The sequence of journal files: which one is written, and having the next one ready."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tailrace.log.journal import (
    FIRST_FILE_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Header,
    JournalFile,
    list_files,
    open_file,
    prepare_file,
    read_header,
)


class Journal:
    """Hands out room in the journal. Used from the loop thread; files are prepared on another."""

    def __init__(self, directory: Path, file_bytes: int, previous_seq: int, previous_end: int) -> None:
        self.directory = directory
        self.file_bytes = file_bytes
        self.active: JournalFile | None = None
        self.durable_seq = previous_seq  # the last acknowledged byte: everything behind it is void
        self.durable_end = previous_end
        self._next: Path | None = None
        self._preparing: threading.Thread | None = None
        for _, path in list_files(directory):
            if read_header(path) is None:
                path.unlink()
        self.seq = max([previous_seq, *(seq for seq, _ in list_files(directory))])

    def open_first(self) -> None:
        """Prepares the file of the first append, small so that starting is quick."""
        size = min(FIRST_FILE_BYTES, self.file_bytes)
        self._next = prepare_file(self.directory, self.seq + 1, size, zero=True)

    def open_next(self) -> None:
        """Proves that a new file can be written, after a failure. Raises OSError while it cannot."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._next is not None:
            self._next.unlink(missing_ok=True)
            self._next = None
        self._next = prepare_file(self.directory, self.seq + 1, self.file_bytes, zero=True)

    def reserve(self, size: int, settled: bool) -> JournalFile | None:
        """The file the next `size` bytes go to, with room for them.

        None if that is a new file and not everything before it is `settled`: the header of a file vouches for
        every byte of the one before, so a crash must not be able to leave the header and take the bytes.
        """
        active = self.active
        if active is not None and max(active.end, HEADER_BYTES) + size <= active.size:
            return active
        return self._rotate(size) if settled else None

    def abandon(self) -> None:
        """After a failed write: nothing more goes to the active file, and nothing unacknowledged counts."""
        self.active = None

    def settled(self, file: JournalFile, end: int) -> None:
        """Everything up to here is durable and acknowledged."""
        assert (file.seq, end) > (self.durable_seq, self.durable_end)
        self.durable_seq = file.seq
        self.durable_end = end

    def remove_through(self, seq: int) -> None:
        """Deletes files the checkpoint covers."""
        for number, path in list_files(self.directory):
            if number <= seq:
                path.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in list_files(self.directory))

    def _rotate(self, size: int) -> JournalFile:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        needed = HEADER_BYTES + FRAME_BYTES + size
        path, self._next = self._next, None
        if path is not None and path.stat().st_size < needed:
            path.unlink()
            path = None
        if path is None:
            path = prepare_file(self.directory, self.seq + 1, max(self.file_bytes, needed), zero=False)
        self.seq += 1
        file_id = int.from_bytes(os.urandom(8), "little")
        header = Header(self.seq, file_id, self.durable_seq, self.durable_end, time.time_ns())
        self.active = open_file(path, header)
        self._prepare_next()
        return self.active

    def _prepare_next(self) -> None:
        seq = self.seq + 1

        def work() -> None:
            try:
                self._next = prepare_file(self.directory, seq, self.file_bytes, zero=True)
            except OSError:
                self._next = None  # rotation will meet the same error where somebody can be told

        self._preparing = threading.Thread(target=work, name="journal-prepare", daemon=True)
        self._preparing.start()
