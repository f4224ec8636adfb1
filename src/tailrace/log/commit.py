"""Group commit: one write and one fdatasync for everything that arrived during the last one.

How many syncs may be under way at once.

On a quick disk one is enough. On a slow one several at once multiply the throughput, if the disk works on
them together; if it does them one after the other, each only waits for those before it, and small batches
queue where one large batch would do. Which of the two it is shows in how long syncs take.

Group commit: one write and one sync for everything that arrived during the last one.

There is no timer on the path. A batch is whatever was submitted while the previous batch was syncing. Syncs
run on threads, so a slow disk never stops the loop; while the disk is slow several are kept in flight, if
that helps. Batches are acknowledged strictly in log order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.log.journal import (
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    JournalFile,
    crc32c_extend,
    encode_header,
    encode_mark,
    write_all,
)

# Above this a sync is slow enough that waiting for it to end before writing the next batch costs throughput.
SLOW_SYNC_S = 0.0015
SYNC_TIME_WEIGHT = 0.1  # of one sync among those before it
# Of the time that other syncs take, the part that is waited for: 0 if they run together, 1 if in turn.
SYNC_WAIT_SHARE_MAX = 0.5
SYNCS_PER_PROBE = 64  # syncs; disks change their ways


class SyncConcurrency:
    """Learns from every sync; `permitted` is what it has come to."""

    __slots__ = ("_alone_s", "_count", "_most", "_waited", "permitted", "sync_s")

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone_s = 0.0  # smoothed, of syncs that began while no other was under way
        self._waited = 0.0
        self._count = 0
        self.sync_s = 0.0  # smoothed, of all
        self.permitted = 1

    def note(self, sync_s: float, under_way: int) -> None:
        """One sync took this long, and began as the last of so many."""
        self._count += 1
        self.sync_s += (sync_s - self.sync_s) * SYNC_TIME_WEIGHT
        if under_way == 1:
            self._alone_s += (sync_s - self._alone_s) * (SYNC_TIME_WEIGHT if self._alone_s else 1.0)
        elif self._alone_s:
            waited = (sync_s / self._alone_s - 1.0) / (under_way - 1)
            self._waited += (min(max(waited, 0.0), 1.0) - self._waited) * SYNC_TIME_WEIGHT
        if self.sync_s <= SLOW_SYNC_S:
            self.permitted = 1
        elif self._waited <= SYNC_WAIT_SHARE_MAX:
            self.permitted = self._most
        else:
            self.permitted = min(2, self._most) if self._count % SYNCS_PER_PROBE == 0 else 1


logger = logging.getLogger("tailrace.log")

CommitCallback = Callable[[TailraceError | None], None]


class CommitBatch:
    """Records that share one sync, and what is to be called when it is done."""

    __slots__ = (
        "data",
        "error",
        "file",
        "items",
        "opened",
        "payloads",
        "position",
        "size",
        "sync_s",
        "synced",
        "under_way",
        "waiting",
    )

    def __init__(self) -> None:
        self.opened = 0.0  # loop time of its first record
        self.payloads: list[bytes] = []
        self.items: list[object] = []  # transactions, in log order
        self.waiting: list[CommitCallback] = []  # answers that depend on this batch being durable
        self.data = b""
        self.size = 0
        self.file: JournalFile | None = None
        self.position = 0
        self.synced = False
        self.error: OSError | None = None
        self.sync_s = 0.0
        self.under_way = 0  # syncs when its own began, that one included


def refuse_after_commit(refusal: TailraceError, batch: CommitBatch | None) -> TailraceError:
    """The refusal, which no client gets before the batch is durable or has failed."""
    if batch is not None:
        refusal.pending_commit = batch.waiting.append
    return refusal


class Committer:
    """Turns submitted payloads into durable ones. All methods run on the loop thread except `_work`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reserve: Callable[[int, bool], JournalFile | None],
        acknowledge: Callable[[CommitBatch], None],
        fail: Callable[[list[CommitBatch], OSError, bool], None],
        syncs_in_flight: int,
    ) -> None:
        self._loop = loop
        self._reserve = reserve
        self._acknowledge = acknowledge
        self._fail = fail  # told whether it is certain that a restart does not bring the batches back
        self._cutting = False  # a failed file is being cut after its last acknowledged record
        self.overlap = SyncConcurrency(syncs_in_flight)
        self._open = CommitBatch()
        self._flush_scheduled = False
        self._in_flight: deque[CommitBatch] = deque()
        self._jobs: queue.SimpleQueue[CommitBatch | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self.queued_bytes = 0
        self.syncs = 0
        self.observe_sync: Callable[[float, int], None] | None = None

    def submit(self, payload: bytes, item: object) -> CommitBatch:
        """Adds one record to the open batch."""
        batch = self._open
        if not batch.payloads:
            batch.opened = self._loop.time()
        batch.payloads.append(payload)
        batch.items.append(item)
        size = len(payload) + FRAME_BYTES
        batch.size += size
        self.queued_bytes += size
        if not self._flush_scheduled and (
            not self._in_flight or len(self._in_flight) < self.overlap.permitted
        ):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return batch

    def older_than(self, seconds: float) -> list[CommitBatch]:
        """Batches that wait too long for their sync."""
        limit = self._loop.time() - seconds
        return [batch for batch in (*self._in_flight, self._open) if batch.items and batch.opened <= limit]

    @property
    def newest(self) -> CommitBatch | None:
        """The last batch that is not settled: whoever waits for it waits for all of them."""
        if self._open.items:
            return self._open
        return self._in_flight[-1] if self._in_flight else None

    @property
    def queued_records(self) -> int:
        return sum(len(batch.items) for batch in (*self._in_flight, self._open))

    @property
    def syncs_allowed(self) -> int:
        """At once, with a disk as it has been lately."""
        return self.overlap.permitted

    @property
    def in_flight(self) -> int:
        """Syncs that are under way."""
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self._open.items

    async def drain(self) -> None:
        """Returns when everything submitted so far is settled."""
        while self._open.items or self._in_flight:
            self._idle.clear()
            await self._idle.wait()

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def go_on(self) -> None:
        """Writes what had to wait for a file."""
        if (
            self._open.payloads
            and not self._flush_scheduled
            and len(self._in_flight) < self.overlap.permitted
        ):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        batch = self._open
        if not batch.payloads:
            return
        try:
            file = self._reserve(batch.size, not self._in_flight)
        except OSError as error:
            self._open = CommitBatch()
            batch.error = error
            batch.synced = True
            self._in_flight.append(batch)
            self._settle()
            return
        if file is None:
            return  # a new file is due: it begins when it is prepared and everything in the old one durable
        if file.failed is not None:
            return  # fails with the batches that are in flight
        self._open = CommitBatch()
        batch.file = file
        batch.position = file.end
        head = encode_mark(file.durable, file.seed) if file.end else encode_header(file.header)
        batch.data = head + frame_records(batch.payloads, file.seed)
        assert len(batch.data) == batch.size + len(head)
        file.end += len(batch.data)
        self._in_flight.append(batch)
        batch.under_way = len(self._in_flight)
        if len(self._threads) < len(self._in_flight):
            number = len(self._threads)
            thread = threading.Thread(target=self._work, args=(number,), name=f"commit-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(batch)

    def _work(self, number: int) -> None:
        while (batch := self._jobs.get()) is not None:
            sync_batch(batch, number)
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:
                return  # the loop is closed: nobody waits for the answer

    def _settle(self) -> None:
        """Acknowledges finished batches in order, then lets the next one go."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].synced:
            batch = in_flight[0]
            file = batch.file
            if file is None or file.failed is not None:
                self._stop_writing(file)
                return
            in_flight.popleft()
            self.queued_bytes -= batch.size
            self.overlap.note(batch.sync_s, batch.under_way)
            self.syncs += 1
            if self.observe_sync is not None:
                self.observe_sync(batch.sync_s, len(batch.items))
            self._acknowledge(batch)
        if self._open.payloads:
            if not self._flush_scheduled and len(in_flight) < self.overlap.permitted:
                self._flush_scheduled = True
                self._loop.call_soon(self._flush)
        elif not in_flight:
            self._idle.set()

    def _stop_writing(self, file: JournalFile | None) -> None:
        """Nothing more is acknowledged from this file, whatever became of the batches that are in flight.

        They fail when no thread writes to the file any more and it is cut after its last acknowledged record.
        """
        if file is None:
            self._break(certain=True)  # there was no file to write to
        elif not self._cutting and all(batch.synced for batch in self._in_flight):
            self._cutting = True
            threading.Thread(target=self._cut_off, args=(file,), name="journal-cut", daemon=True).start()

    def _cut_off(self, file: JournalFile) -> None:
        try:
            file.cut_off()
            certain = True
        except OSError as error:
            logger.warning("journal file cannot be cut after its last record: %s: %s", file.path.name, error)
            certain = False
        try:
            self._loop.call_soon_threadsafe(self._break, certain)
        except RuntimeError:
            pass  # the loop is closed: there is no request left to answer

    def _break(self, certain: bool) -> None:
        """A batch could not be made durable: neither it nor anything after it happened."""
        self._cutting = False
        batches = [*self._in_flight, self._open]
        error = next(batch.error for batch in batches if batch.error is not None)
        self._in_flight.clear()
        self._open = CommitBatch()
        self.queued_bytes = 0
        self._fail(batches, error, certain)
        if not self._open.payloads:
            self._idle.set()


def frame_records(payloads: list[bytes], seed: int) -> bytes:
    """The records of a batch as they stand in the file. `frame` written out: this runs for every append."""
    pack, checksum = FRAME.pack, crc32c_extend
    pieces: list[bytes] = []
    for payload in payloads:
        pieces.append(pack(len(payload), checksum(seed, payload)))
        pieces.append(payload)
    return b"".join(pieces)


def sync_batch(batch: CommitBatch, thread: int) -> None:
    """Makes a batch durable, or notes why it is not."""
    begun = time.perf_counter()
    file = batch.file
    assert file is not None
    try:
        write_batch(batch, file.fds[thread])
    except OSError as error:
        batch.error = file.failed = error
    batch.sync_s = time.perf_counter() - begun
    batch.synced = True


def write_batch(batch: CommitBatch, fd: int) -> None:
    """One write and one `fdatasync`, on a commit thread and its own descriptor.

    The first batch of a file begins with the header, which is synced before the records: otherwise a crash
    could leave records behind a header that is not there.
    """
    data, position = batch.data, batch.position
    if not position:
        write_all(fd, data[:HEADER_BYTES], 0)
        os.fdatasync(fd)
        data, position = data[HEADER_BYTES:], HEADER_BYTES
    write_all(fd, data, position)
    os.fdatasync(fd)
