"""Group commit: one write and one fdatasync for everything submitted during the previous one.

There is no timer: a batch is what was submitted while the previous batch was syncing. Syncs run on threads,
so a slow disk does not block the loop. Batches are acknowledged strictly in log order.

One sync at a time is enough on a fast disk. On a slow disk several concurrent syncs raise the throughput if
the disk processes them in parallel; if it serializes them, one large batch is better than several small ones
in a queue. `SyncConcurrency` finds out which from the duration of the syncs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.log.journal import (
    FRAME,
    FRAME_BYTES,
    JournalFile,
    crc32c_extend,
    encode_header,
    encode_mark,
)

# Above this, waiting for a sync before writing the next batch costs throughput.
SLOW_SYNC_S = 0.0015
SYNC_TIME_WEIGHT = 0.1  # of the newest sync in the moving average
# Part of the duration of other syncs that a sync waits: 0 if they run in parallel, 1 if the disk serializes.
SYNC_WAIT_SHARE_MAX = 0.5
SYNCS_PER_PROBE = 64  # a serializing disk is tested again after this many syncs


class SyncConcurrency:
    """How many syncs may run at once (`permitted`), adapted after every sync."""

    __slots__ = ("_alone_s", "_count", "_most", "_waited", "permitted", "sync_s")

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone_s = 0.0  # moving average of syncs that started while no other was running
        self._waited = 0.0
        self._count = 0
        self.sync_s = 0.0  # moving average of all syncs
        self.permitted = 1

    def record_sync(self, sync_s: float, under_way: int) -> None:
        """Adds one sync: its duration, and the number of running syncs (itself included) when it started."""
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
    """Records that share one sync, and the callbacks for its outcome."""

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
        self.waiting: list[CommitCallback] = []  # called when the batch is durable or has failed
        self.data = b""
        self.size = 0
        self.file: JournalFile | None = None
        self.position = 0
        self.synced = False
        self.error: OSError | None = None
        self.sync_s = 0.0
        self.under_way = 0  # running syncs when its own started, that one included


def refuse_after_commit(refusal: TailraceError, batch: CommitBatch | None) -> TailraceError:
    """Delays a refusal until the batch it is based on is durable or has failed."""
    if batch is not None:
        refusal.pending_commit = batch.waiting.append
    return refusal


class Committer:
    """Makes submitted payloads durable. All methods run on the loop thread except `_work` and `_cut_off`."""

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
        self._fail = fail  # its last argument: it is certain that a restart does not restore the batches
        self._cutting = False  # a failed file is being truncated after its last acknowledged record
        self.sync_concurrency = SyncConcurrency(syncs_in_flight)
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
            not self._in_flight or len(self._in_flight) < self.sync_concurrency.permitted
        ):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return batch

    def older_than(self, seconds: float) -> list[CommitBatch]:
        """Batches that have been waiting for their sync for at least this long."""
        limit = self._loop.time() - seconds
        return [batch for batch in (*self._in_flight, self._open) if batch.items and batch.opened <= limit]

    @property
    def newest(self) -> CommitBatch | None:
        """The last batch that is not settled; when it is, all others are too."""
        if self._open.items:
            return self._open
        return self._in_flight[-1] if self._in_flight else None

    @property
    def queued_records(self) -> int:
        return sum(len(batch.items) for batch in (*self._in_flight, self._open))

    @property
    def syncs_allowed(self) -> int:
        """Syncs that may run at once."""
        return self.sync_concurrency.permitted

    @property
    def in_flight(self) -> int:
        """Syncs that are running."""
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

    def resume_writing(self) -> None:
        """A journal file is ready: writes the batch that waited for it."""
        if (
            self._open.payloads
            and not self._flush_scheduled
            and len(self._in_flight) < self.sync_concurrency.permitted
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
            return  # a new file starts when it is prepared and everything in the old one is durable
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
                return  # the loop is closed: there is no request left

    def _settle(self) -> None:
        """Acknowledges finished batches in order, then starts the next one."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].synced:
            batch = in_flight[0]
            file = batch.file
            if file is None or file.failed is not None:
                self._stop_writing(file)
                return
            in_flight.popleft()
            self.queued_bytes -= batch.size
            self.sync_concurrency.record_sync(batch.sync_s, batch.under_way)
            self.syncs += 1
            if self.observe_sync is not None:
                self.observe_sync(batch.sync_s, len(batch.items))
            self._acknowledge(batch)
        if self._open.payloads:
            if not self._flush_scheduled and len(in_flight) < self.sync_concurrency.permitted:
                self._flush_scheduled = True
                self._loop.call_soon(self._flush)
        elif not in_flight:
            self._idle.set()

    def _stop_writing(self, file: JournalFile | None) -> None:
        """A write to this file failed: nothing more in it is acknowledged.

        All batches in flight fail, once no thread writes to the file and it is truncated after its last
        acknowledged record.
        """
        if file is None:
            self._fail_batches(certain=True)  # there was no file to write to
        elif not self._cutting and all(batch.synced for batch in self._in_flight):
            self._cutting = True
            threading.Thread(target=self._cut_off, args=(file,), name="journal-cut", daemon=True).start()

    def _cut_off(self, file: JournalFile) -> None:
        try:
            file.cut_off()
            certain = True
        except OSError as error:
            fields = log_fields(file=file.path.name, error=str(error))
            logger.warning("cannot truncate failed journal file", extra=fields)
            certain = False
        try:
            self._loop.call_soon_threadsafe(self._fail_batches, certain)
        except RuntimeError:
            pass  # the loop is closed: there is no request left

    def _fail_batches(self, certain: bool) -> None:
        """Fails every batch in flight and the open one: they are after the failed write in log order."""
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
    """The records of a batch as bytes of the file. `frame_record` inlined: this runs for every append."""
    pack, checksum = FRAME.pack, crc32c_extend
    pieces: list[bytes] = []
    for payload in payloads:
        pieces.append(pack(len(payload), checksum(seed, payload)))
        pieces.append(payload)
    return b"".join(pieces)


def sync_batch(batch: CommitBatch, thread: int) -> None:
    """Makes a batch durable, or sets its error."""
    started = time.perf_counter()
    file = batch.file
    assert file is not None
    try:
        file.write_durably(thread, batch.data, batch.position)
    except OSError as error:
        batch.error = file.failed = error
    batch.sync_s = time.perf_counter() - started
    batch.synced = True
