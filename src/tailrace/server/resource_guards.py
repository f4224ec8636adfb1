"""Disk and memory guards: refuse writes and evict caches before the disk or the memory is full.

`DiskGuard` refuses appends while less than the reserve is free, and resumes the log after failed journal
writes.

`MemoryGuard` reads the resident size twice a second. Above the limit it evicts caches and large requests are
refused; well above it appends are refused, too, while reads and deletes continue. With or without a limit it
returns freed memory to the system from time to time, as the C library would keep it because of fragmentation.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import apsw

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.common.memory import cgroup_memory_limit_bytes, trim_malloc
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.log import Log

logger = logging.getLogger("tailrace.disk")

DISK_CHECK_S = 1.0


class DiskGuard:
    """Checks the free space every second and, after a failed journal write, tries to open the next file.

    `on_scarce` is called when less than the reserve is free, and when it is free again.
    """

    def __init__(
        self, log: Log, loop: asyncio.AbstractEventLoop, on_scarce: Callable[[bool], None] | None = None
    ) -> None:
        self._log = log
        self._loop = loop
        self._on_scarce = on_scarce
        self._scarce = False
        self._timer: asyncio.TimerHandle | None = None
        self._attempt: asyncio.Future[None] | None = None
        self._stopped = False
        self._short = False

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.disk_free_bytes.read = self.free_bytes
        metrics.hot_free_bytes.read = self.reusable_bytes

    def start(self) -> None:
        self._check()

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def free_bytes(self) -> int:
        found = os.statvfs(self._log.directory)
        return found.f_bavail * found.f_frsize

    def _check(self) -> None:
        self._timer = self._loop.call_later(DISK_CHECK_S, self._check)
        self._check_space()
        if self._log.refusal is not None and self._attempt is None:
            # On a thread: a failing disk may be slow, and reads continue in the meantime.
            self._attempt = self._loop.run_in_executor(None, self._log.journal.open_next)
            self._attempt.add_done_callback(self._attempted)

    def _check_space(self) -> None:
        log = self._log
        reserve = log.limits.disk_reserve_bytes
        try:
            free = self.free_bytes()
        except OSError as error:
            logger.warning("cannot read the free disk space", extra=log_fields(error=str(error)))
            return
        scarce = free < reserve
        if scarce != self._scarce and self._on_scarce is not None:
            self._on_scarce(scarce)
        self._scarce = scarce
        # Free pages of the hot store count as free space, since entries move there from the journal. But the
        # journal and the write-ahead log of the hot store need space of their own: half of the reserve.
        short = scarce and free + min(self.reusable_bytes(), reserve // 2) < reserve
        if short and not self._short:
            logger.error(
                "disk space below reserve, refusing appends",
                extra=log_fields(free_bytes=free, reserve_bytes=reserve),
            )
            shortage = TailraceError(
                "insufficient_storage",
                f"free disk space is below the reserve of {reserve} bytes; retry when there is space",
            )
            log.set_shortage("disk", shortage)
        elif not short and self._short:
            logger.warning("disk space above reserve, accepting appends", extra=log_fields(free_bytes=free))
            log.set_shortage("disk", None)
        self._short = short

    def reusable_bytes(self) -> int:
        """Bytes in free pages of the hot store."""
        try:
            return self._log.store.db.space().free_bytes
        except TailraceError:
            return 0  # logged by the hot store

    def _attempted(self, attempt: asyncio.Future[None]) -> None:
        self._attempt = None
        if attempt.cancelled() or self._stopped:
            return
        error = attempt.exception()
        if error is None:
            self._log.resume()
        elif not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            logger.warning("cannot write the journal, retrying", extra=log_fields(error=str(error)))


memory_logger = logging.getLogger("tailrace.memory")

MEMORY_CHECK_S = 0.5
RELIEF_SHARE = 0.9  # pressure ends below this share of the limit
REFUSE_SHARE = 1.15  # above this share of the limit appends are refused
MOVE_BYTES = 1 << 20  # of recent entries: fewer are not worth a checkpoint
COLLECT_S = 10.0  # minimum interval of full collections and of trims, which are slow
RETURN_BYTES = 48 << 20  # growth of the process, or memory freed by recent entries, that is worth a trim
RETURNS = 3  # trims after which the remaining memory is considered to be in use
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")

MEMORY_PRESSURE = TailraceError(
    "overloaded", "memory is above its limit, refusing large requests; retry later"
)
MEMORY_EXHAUSTED = TailraceError("overloaded", "memory is far above its limit, refusing appends; retry later")


class HighWaterMark(NamedTuple):
    """The highest value so far, and when it was reached."""

    value: int
    at_ns: int


def resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def mapped_file_bytes() -> int:
    """Resident bytes of mapped files, including programs and libraries."""
    return int(_STATM.read_text().split()[2]) * _PAGE_BYTES


def memory_limit_bytes(limits: Limits) -> int:
    """The resident size where pressure begins; 0 without a limit."""
    return limits.memory_limit_bytes or int((cgroup_memory_limit_bytes() or 0) * 0.9)


class MemoryGuard:
    """Calls `evictors` while memory is above its limit, and records the highest values of `gauges`."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        limit_bytes: int,
        read: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim_malloc,
    ) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._read = read
        self._timer: asyncio.TimerHandle | None = None
        self._collected_s = -COLLECT_S
        self._trim = trim
        self.trimming: asyncio.Future[None] | None = None  # a trim in progress
        self._trimmed_s = -COLLECT_S
        self._trims = 0  # since the resident size was last near its minimum
        self._least_bytes = 0  # recent minimum of the resident size
        self._most_held_bytes = 0  # maximum held by recent entries since the last trim
        self.limit_bytes = limit_bytes
        self.rss_bytes = 0
        self.active = False
        self.refusing = False
        self.evictors: list[Callable[[], None]] = [log.reader.cache.clear]
        self.gauges: dict[str, Callable[[], int]] = {"rss_bytes": lambda: self.rss_bytes}
        self.on_tick: list[Callable[[], None]] = []  # called at each check
        self.high_water: dict[str, HighWaterMark] = {}
        self.pressures = 0  # how often the limit was exceeded
        self.collections = 0  # forced because of memory pressure
        self.collected_ns = 0  # time of the last forced collection

    def bound_sqlite(self) -> None:
        """Limit the page caches of all SQLite connections of this process together."""
        apsw.soft_heap_limit(self._log.limits.sqlite_cache_bytes)

    def start(self) -> None:
        self._timer = self._loop.call_later(MEMORY_CHECK_S, self.start)
        try:
            self.poll()
        except OSError as error:
            memory_logger.warning("cannot read the process size", extra=log_fields(error=str(error)))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def poll(self) -> None:
        self.rss_bytes = self._read()
        now_ns = self._clock.now_ns()
        for name, read in self.gauges.items():
            value = read()
            known = self.high_water.get(name)
            if known is None or value > known.value:
                self.high_water[name] = HighWaterMark(value, now_ns)
        self._return_freed()
        if self.limit_bytes:
            self._compare()
        for tick in self.on_tick:
            tick()

    @property
    def max_rss_bytes(self) -> int:
        """The maximum recorded by the kernel, so that peaks between two checks count."""
        return max(self.rss_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def _return_freed(self) -> None:
        """Return freed memory to the system, on a thread as it takes some milliseconds."""
        rss, held = self.rss_bytes, self._log.streams.memory_bytes
        self._most_held_bytes = max(self._most_held_bytes, held)
        if not self._least_bytes or rss < self._least_bytes + RETURN_BYTES:
            self._trims = 0
            self._least_bytes = min(rss, self._least_bytes or rss)
            if self._most_held_bytes - held < RETURN_BYTES:
                return
        now_s = self._loop.time()
        if now_s - self._trimmed_s < COLLECT_S or (self.trimming is not None and not self.trimming.done()):
            return
        self._trimmed_s = now_s
        self._most_held_bytes = held
        self._trims += 1
        if self._trims >= RETURNS:
            self._trims, self._least_bytes = 0, rss
        self.trimming = self._loop.run_in_executor(None, self._trim)

    def _compare(self) -> None:
        rss, limit = self.rss_bytes, self.limit_bytes
        if not self.active and rss > limit:
            self.active = True
            self.pressures += 1
            self._log.pressure = MEMORY_PRESSURE
            memory_logger.warning(
                "memory above limit, evicting caches", extra=log_fields(rss_bytes=rss, limit_bytes=limit)
            )
        elif self.active and rss < RELIEF_SHARE * limit:
            self.active = False
            self._log.pressure = None
            memory_logger.info("memory below limit", extra=log_fields(rss_bytes=rss, limit_bytes=limit))
        refusing = self.active and (rss > REFUSE_SHARE * limit or (self.refusing and rss > limit))
        if refusing != self.refusing:
            self.refusing = refusing
            self._log.set_shortage("memory", MEMORY_EXHAUSTED if refusing else None)
        if self.active:
            self._evict()

    def _evict(self) -> None:
        for evict in self.evictors:
            evict()
        log = self._log
        if not log.checkpoint_pending and log.committer.idle and log.refusal is None:
            if log.streams.memory_bytes + log.streams.document_bytes > MOVE_BYTES:
                # Move recent entries to the hot store early; then idle streams and their documents can go.
                log.rotate_journal()
        now_s = self._loop.time()
        if now_s - self._collected_s >= COLLECT_S:
            self._collected_s = now_s
            gc.collect()
            self.collections += 1
            self.collected_ns = self._clock.now_ns()
            self._trim()
