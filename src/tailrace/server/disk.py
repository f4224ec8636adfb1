"""Watches the disk: refuses writes before it is full, and lets them go on when there is room again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable

from tailrace.common.errors import TailraceError
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
