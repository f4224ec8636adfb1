"""The sequence of journal files: which one is written, and having the next one ready."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tailrace.log.journal import (
    FIRST_FILE_BYTES,
    HEADER_BYTES,
    MARK_BYTES,
    JournalFile,
    JournalHeader,
    list_files,
    open_file,
    prepare_file,
    read_header,
)

logger = logging.getLogger("tailrace.log")

# For a file descriptor, while connections that are about to be refused have all of them.
DESCRIPTOR_TRIES = 20
DESCRIPTOR_PAUSE_S = 0.1


class Journal:
    """Hands out room in the journal. Used from the loop thread; files are prepared on another."""

    def __init__(
        self, directory: Path, file_bytes: int, previous_seq: int, previous_end: int, descriptors: int
    ) -> None:
        """`descriptors` is the number of commit threads that write to a file at the same time."""
        self._descriptors = descriptors
        self.directory = directory
        self.file_bytes = file_bytes
        self.active: JournalFile | None = None
        self.durable_seq = previous_seq  # the last acknowledged byte: everything behind it is void
        self.durable_end = previous_end
        # Called on the preparing thread when a file is ready, or cannot be had.
        self.on_prepared: Callable[[], None] | None = None
        self._next: Path | None = None
        self._preparing = False
        self._hurry = threading.Event()  # somebody waits for the file that is being prepared
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None  # why a file that somebody waits for could not be prepared
        for _, path in list_files(directory):
            if read_header(path) is None:
                path.unlink()  # prepared and never used: there is nothing but zeros behind its header
        self.seq = max([previous_seq, *(seq for seq, _ in list_files(directory))])

    def open_first(self) -> None:
        """Prepares the file of the first append, small so that starting is quick."""
        size = min(FIRST_FILE_BYTES, self.file_bytes)
        self._next = prepare_file(self.directory, self.seq + 1, size, zero=True)

    def open_next(self) -> None:
        """Proves that a new file can be written, after a failure. Raises OSError while it cannot.

        Takes as long as the disk does; while writes are refused it may run on any thread.
        """
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        if self._next is not None:
            self._next.unlink(missing_ok=True)
            self._next = None
        self._error = None
        self.open_first()

    def reserve(self, size: int, settled: bool) -> JournalFile | None:
        """The file the next `size` bytes go to, with room for them.

        None if that is a new file and not everything before it is `settled`: the header of a file vouches for
        every byte of the one before, so a crash must not be able to leave the header and take the bytes.
        None while the first batch of a file is in flight, because nothing may be written behind a header that
        is not durable.
        None as well while the new file is being prepared; `on_prepared` tells when to ask again.
        """
        active = self.active
        if active is not None and max(active.end + MARK_BYTES, HEADER_BYTES) + size <= active.size:
            return active if active.durable or not active.end else None
        if not settled or not self._is_ready(HEADER_BYTES + size):
            return None
        return self._rotate()

    def abandon(self) -> None:
        """After a failed write: nothing more goes to the active file."""
        self.active = None

    def settled(self, file: JournalFile, end: int) -> None:
        """Everything up to here is durable and acknowledged."""
        assert (file.seq, end) > (self.durable_seq, self.durable_end)
        self.durable_seq = file.seq
        self.durable_end = file.durable = end

    def remove_through(self, seq: int) -> None:
        """Deletes files the checkpoint covers. One that cannot be deleted does no harm until next time."""
        try:
            for number, path in list_files(self.directory):
                if number <= seq:
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("journal files up to %d cannot be deleted yet: %s", seq, error)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in list_files(self.directory))

    def _is_ready(self, needed: int) -> bool:
        """Whether the next file is there and large enough; if not, it soon will be."""
        if self._preparing:
            self._hurry.set()
            return False
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._next is not None:
            if self._next.stat().st_size >= needed:
                return True
            self._next.unlink()
            self._next = None
        # More may arrive while it is being prepared, and all of that goes into it.
        self._prepare(max(self.file_bytes, 2 * needed), in_advance=False)
        return False

    def _rotate(self) -> JournalFile:
        path = self._next
        assert path is not None
        file_id = int.from_bytes(os.urandom(8), "little")
        header = JournalHeader(self.seq + 1, file_id, self.durable_seq, self.durable_end, time.time_ns())
        self.active = open_file(path, header, self._descriptors)
        self._next = None
        self.seq += 1
        self._prepare(self.file_bytes, in_advance=True)
        return self.active

    def _prepared(self, seq: int, size: int, *, zero: bool) -> Path:
        """On the preparing thread. A process that has no file descriptor left will have one again soon."""
        for _ in range(DESCRIPTOR_TRIES):
            try:
                return prepare_file(self.directory, seq, size, zero=zero, hurry=self._hurry)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            time.sleep(DESCRIPTOR_PAUSE_S)
        return prepare_file(self.directory, seq, size, zero=zero, hurry=self._hurry)

    def _prepare(self, size: int, *, in_advance: bool) -> None:
        """Has the file after the present one made on a thread, so that no disk holds up the loop."""
        seq = self.seq + 1

        def work() -> None:
            try:
                self._next = self._prepared(seq, size, zero=in_advance)
            except OSError as error:
                # Nobody waits for a file made in advance: it is tried again when somebody does.
                self._error = None if in_advance else error
            self._preparing = False
            if self.on_prepared is not None:
                self.on_prepared()

        self._preparing = True
        self._hurry.clear()
        self._thread = threading.Thread(target=work, name="journal-prepare", daemon=True)
        self._thread.start()
