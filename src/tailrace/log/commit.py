"""Group commit: one write and one sync for everything that arrived during the last one.

There is no timer on the path. A batch is whatever was submitted while the previous batch was syncing. Syncs
run on threads, so a slow disk never stops the loop; while the disk is slow several are kept in flight, if
that helps. Batches are acknowledged strictly in log order.
"""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tailrace.errors import TailraceError
from tailrace.log.journal import FRAME, FRAME_BYTES, JournalFile, crc32c_extend, encode_header, mark
from tailrace.log.overlap import Overlap

Settled = Callable[[TailraceError | None], None]


class Batch:
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
        self.waiting: list[Settled] = []  # answers that depend on this batch being durable
        self.data = b""
        self.size = 0
        self.file: JournalFile | None = None
        self.position = 0
        self.synced = False
        self.error: OSError | None = None
        self.sync_s = 0.0
        self.under_way = 0  # syncs when its own began, that one included


class Committer:
    """Turns submitted payloads into durable ones. All methods run on the loop thread except `_work`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reserve: Callable[[int, bool], JournalFile | None],
        acknowledge: Callable[[Batch], None],
        fail: Callable[[list[Batch], OSError], None],
        syncs_in_flight: int,
    ) -> None:
        self._loop = loop
        self._reserve = reserve
        self._acknowledge = acknowledge
        self._fail = fail
        self.overlap = Overlap(syncs_in_flight)
        self._open = Batch()
        self._flush_scheduled = False
        self._in_flight: deque[Batch] = deque()
        self._jobs: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self.queued_bytes = 0
        self.syncs = 0
        self.observe_sync: Callable[[float, int], None] | None = None

    def submit(self, payload: bytes, item: object) -> Batch:
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

    def older_than(self, seconds: float) -> list[Batch]:
        """Batches that wait too long for their sync."""
        limit = self._loop.time() - seconds
        return [batch for batch in (*self._in_flight, self._open) if batch.items and batch.opened <= limit]

    @property
    def newest(self) -> Batch | None:
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
            self._open = Batch()
            batch.error = error
            batch.synced = True
            self._in_flight.append(batch)
            self._settle()
            return
        if file is None:
            return  # a new file is due: it begins when it is prepared and everything in the old one durable
        self._open = Batch()
        batch.file = file
        batch.position = file.end
        head = mark(file.durable, file.seed) if file.end else encode_header(file.header)
        batch.data = head + framed(batch.payloads, file.seed)
        assert len(batch.data) == batch.size + len(head)
        file.end += len(batch.data)
        self._in_flight.append(batch)
        batch.under_way = len(self._in_flight)
        if len(self._threads) < len(self._in_flight):
            name = f"commit-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        self._jobs.put(batch)

    def _work(self) -> None:
        while (batch := self._jobs.get()) is not None:
            sync_batch(batch)
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:
                return  # the loop is closed: nobody waits for the answer

    def _settle(self) -> None:
        """Acknowledges finished batches in order, then lets the next one go."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].synced:
            batch = in_flight.popleft()
            self.queued_bytes -= batch.size
            if batch.error is not None:
                self._break(batch)
                return
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

    def _break(self, failed: Batch) -> None:
        """A batch could not be made durable: neither it nor anything after it happened."""
        assert failed.error is not None
        batches = [failed, *self._in_flight, self._open]
        self._in_flight.clear()
        self._open = Batch()
        self.queued_bytes = 0
        self._fail(batches, failed.error)
        if not self._open.payloads:
            self._idle.set()


def framed(payloads: list[bytes], seed: int) -> bytes:
    """The records of a batch as they stand in the file. `frame` written out: this runs for every append."""
    pack, checksum = FRAME.pack, crc32c_extend
    pieces: list[bytes] = []
    for payload in payloads:
        pieces.append(pack(len(payload), checksum(seed, payload)))
        pieces.append(payload)
    return b"".join(pieces)


def sync_batch(batch: Batch) -> None:
    """Makes a batch durable, or notes why it is not."""
    begun = time.perf_counter()
    try:
        write_batch(batch)
    except OSError as error:
        batch.error = error
    batch.sync_s = time.perf_counter() - begun
    batch.synced = True


def write_batch(batch: Batch) -> None:
    """One positioned write (more only if the kernel takes less) and one `fdatasync`, on a commit thread."""
    file, data = batch.file, batch.data
    assert file is not None
    assert file.fd >= 0
    written = os.pwrite(file.fd, data, batch.position)
    while written < len(data):
        more = os.pwrite(file.fd, memoryview(data)[written:], batch.position + written)
        if more == 0:
            raise OSError(errno.EIO, "the journal took no more bytes")
        written += more
    os.fdatasync(file.fd)
