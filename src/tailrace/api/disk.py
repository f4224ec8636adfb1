"""Watches the disk: refuses writes before it is full, and lets them go on when there is room again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

from tailrace.errors import TailraceError
from tailrace.log.log import Log

logger = logging.getLogger("tailrace.disk")

CHECK_S = 1.0


class DiskGuard:
    """One look a second at the free space; after a failed journal write also the attempt to go on."""

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def free_bytes(self) -> int:
        found = os.statvfs(self._log.directory)
        return found.f_bavail * found.f_frsize

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_S, self._check)
        log = self._log
        try:
            short = self.free_bytes() < log.limits.disk_reserve_bytes
        except OSError as error:
            logger.warning("cannot tell the free disk space: %s", error)
            return
        if short and log.shortage is None:
            logger.error("the disk is below its reserve; appends are refused until there is room")
            log.shortage = TailraceError(
                "insufficient_storage", "the disk is below its reserve; try again when there is room"
            )
        elif not short and log.shortage is not None:
            logger.warning("the disk has room again")
            log.shortage = None
        if log.refusal is None:
            return
        try:
            log.try_resume()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                logger.warning("the journal still cannot be written: %s", error)
