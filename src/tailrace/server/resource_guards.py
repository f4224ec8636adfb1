"""Disk and memory guards: refuse writes and evict caches before the disk or the memory is full.

Watches the disk: refuses writes before it is full, and lets them go on when there is room again.

Watches the process's memory: lets caches go and refuses large work before the kernel ends the server.

Twice a second the resident size is read, one line of a file that the kernel makes up. Above the limit caches
are shed and large work is told to come back; well above it nothing that grows the log is taken in, while
reads and deletes go on. Limit or not, memory that was freed is given back to the system now and then: the C
library keeps it otherwise, since what was freed lies between what was not.
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
from tailrace.common.memory import cgroup_memory_limit_bytes, trim_malloc
from tailrace.log.log import Log

logger = logging.getLogger("tailrace.disk")

DISK_CHECK_S = 1.0


class DiskGuard:
    """One look a second at the free space; after a failed journal write also the attempt to go on.

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
        self._look_at_space()
        if self._log.refusal is not None and self._attempt is None:
            # On a thread: a disk in trouble may take its time, and reads go on meanwhile.
            self._attempt = self._loop.run_in_executor(None, self._log.journal.open_next)
            self._attempt.add_done_callback(self._attempted)

    def _look_at_space(self) -> None:
        log = self._log
        reserve = log.limits.disk_reserve_bytes
        try:
            free = self.free_bytes()
        except OSError as error:
            logger.warning("cannot tell the free disk space: %s", error)
            return
        scarce = free < reserve
        if scarce != self._scarce and self._on_scarce is not None:
            self._on_scarce(scarce)
        self._scarce = scarce
        # Entries move from the journal to the hot store, where they reuse free pages. The journal and the
        # write-ahead log of the hot store need room of their own: half of the reserve is really free.
        short = scarce and free + min(self.reusable_bytes(), reserve // 2) < reserve
        if short and not self._short:
            logger.error("the disk is below its reserve; appends are refused until there is room")
            shortage = TailraceError(
                "insufficient_storage", "the disk is below its reserve; try again when there is room"
            )
            log.set_shortage("disk", shortage)
        elif not short and self._short:
            logger.warning("the disk has room again")
            log.set_shortage("disk", None)
        self._short = short

    def reusable_bytes(self) -> int:
        """Room for entries in free pages of the hot store."""
        try:
            return self._log.store.db.space().free_bytes
        except TailraceError:
            return 0  # logged where it was found

    def _attempted(self, attempt: asyncio.Future[None]) -> None:
        self._attempt = None
        if attempt.cancelled() or self._stopped:
            return
        error = attempt.exception()
        if error is None:
            self._log.resume()
        elif not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            logger.warning("the journal still cannot be written: %s", error)


memory_logger = logging.getLogger("tailrace.memory")

MEMORY_CHECK_S = 0.5
RELIEF_SHARE = 0.9  # pressure ends below this share of the limit, not right under it
REFUSE_SHARE = 1.15  # from here on nothing is taken in
MOVE_BYTES = 1 << 20  # of recent entries: less is not worth a checkpoint
COLLECT_S = 10.0  # full collections and trims take a while: no more often than this
RETURN_BYTES = 48 << 20  # that were taken, or that entries let go of, before it is worth to give some back
RETURNS = 3  # tries after which memory that is still there is taken to be in use
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")

MEMORY_PRESSURE = TailraceError("overloaded", "memory is short; large requests are refused for now")
MEMORY_EXHAUSTED = TailraceError(
    "overloaded", "memory is used up; nothing is taken in until there is some again"
)


class HighWaterMark(NamedTuple):
    """The highest value that was seen, and when."""

    value: int
    at_ns: int


def resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def mapped_file_bytes() -> int:
    """Resident pages of files, programs and libraries among them, that the process has mapped."""
    return int(_STATM.read_text().split()[2]) * _PAGE_BYTES


def memory_limit_bytes(limits: Limits) -> int:
    """Where pressure begins; 0 if there is no limit."""
    return limits.memory_limit_bytes or int((cgroup_memory_limit_bytes() or 0) * 0.9)


class MemoryGuard:
    """`sheds` are called whenever memory is short; `gauges` are watched for their highest values."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        limit_bytes: int,
        read: Callable[[], int] = resident_bytes,
        give: Callable[[], None] = trim_malloc,
    ) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._read = read
        self._timer: asyncio.TimerHandle | None = None
        self._collected_s = -COLLECT_S
        self._give = give
        self.giving: asyncio.Future[None] | None = None  # memory that is going back right now
        self._given_s = -COLLECT_S
        self._given = 0  # tries since memory was last as small as it should be
        self._least_bytes = 0  # resident, of late
        self._most_held_bytes = 0  # by recent entries, since memory was last given back
        self.limit_bytes = limit_bytes
        self.rss_bytes = 0
        self.active = False
        self.refusing = False
        self.sheds: list[Callable[[], None]] = [log.reader.cache.clear]
        self.gauges: dict[str, Callable[[], int]] = {"rss_bytes": lambda: self.rss_bytes}
        self.ticks: list[Callable[[], None]] = []  # others who have to look at something now and then
        self.high_water: dict[str, HighWaterMark] = {}
        self.pressures = 0  # times it began
        self.collections = 0  # that were forced because memory was short
        self.collected_ns = 0  # when that was last done

    def bound_sqlite(self) -> None:
        """Of all connections of this process together: SQLite takes pages of its cache before new ones."""
        apsw.soft_heap_limit(self._log.limits.sqlite_cache_bytes)

    def start(self) -> None:
        self._timer = self._loop.call_later(MEMORY_CHECK_S, self.start)
        try:
            self.look()
        except OSError as error:
            memory_logger.warning("cannot tell the size of this process: %s", error)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
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
        for tick in self.ticks:
            tick()

    @property
    def max_rss_bytes(self) -> int:
        """As the kernel remembers it, so that peaks between two looks count."""
        return max(self.rss_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def _return_freed(self) -> None:
        """What was let go of goes back to the system, on a thread: that takes some milliseconds."""
        rss, held = self.rss_bytes, self._log.streams.memory_bytes
        self._most_held_bytes = max(self._most_held_bytes, held)
        if not self._least_bytes or rss < self._least_bytes + RETURN_BYTES:
            self._given = 0
            self._least_bytes = min(rss, self._least_bytes or rss)
            if self._most_held_bytes - held < RETURN_BYTES:
                return
        now_s = self._loop.time()
        if now_s - self._given_s < COLLECT_S or (self.giving is not None and not self.giving.done()):
            return
        self._given_s = now_s
        self._most_held_bytes = held
        self._given += 1
        if self._given >= RETURNS:
            self._given, self._least_bytes = 0, rss
        self.giving = self._loop.run_in_executor(None, self._give)

    def _compare(self) -> None:
        rss, limit = self.rss_bytes, self.limit_bytes
        if not self.active and rss > limit:
            self.active = True
            self.pressures += 1
            self._log.pressure = MEMORY_PRESSURE
            memory_logger.warning(
                "%d MiB resident, above the limit of %d MiB: caches go", rss >> 20, limit >> 20
            )
        elif self.active and rss < RELIEF_SHARE * limit:
            self.active = False
            self._log.pressure = None
            memory_logger.info("memory is below its limit again")
        refusing = self.active and (rss > REFUSE_SHARE * limit or (self.refusing and rss > limit))
        if refusing != self.refusing:
            self.refusing = refusing
            self._log.set_shortage("memory", MEMORY_EXHAUSTED if refusing else None)
        if self.active:
            self._shed()

    def _shed(self) -> None:
        for shed in self.sheds:
            shed()
        log = self._log
        if not log.checkpoint_pending and log.committer.idle and log.refusal is None:
            if log.streams.memory_bytes + log.streams.document_bytes > MOVE_BYTES:
                # Recent entries go to the hot store early, and idle streams with their documents after them.
                log.rotate_journal()
        now_s = self._loop.time()
        if now_s - self._collected_s >= COLLECT_S:
            self._collected_s = now_s
            gc.collect()
            self.collections += 1
            self.collected_ns = self._clock.now_ns()
            self._give()
