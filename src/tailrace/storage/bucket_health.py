"""How we stand with the object store: whether it can be used, whether it is ours, and when to try again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.ownership import BucketOwner
from tailrace.storage.sealer_process import JobKind, SealerReport

logger = logging.getLogger("tailrace.seal")

BUCKET_PAUSE_S_MIN = 0.5
CONFIRM_S_MIN = 1.0
LOG_AGAIN_S = 3600.0
LOGGED_ERRORS_MAX = 1000


class BucketHealth:
    """Learns from the sealer's reports and from the owner's mark in the bucket."""

    def __init__(self, owner: BucketOwner, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self._loop = loop
        self.failure = ""  # why the object store cannot be used just now
        self.fenced = ""
        self.failures = 0
        self.on_back: Callable[[], None] | None = None  # it can be used again
        self.on_lost: Callable[[], None] | None = None  # it is somebody else's from now on
        self._owner_said = ""  # what was wrong when it was asked last
        self._confirming = False
        self._confirmed_s = loop.time()
        self._confirm_s = max(limits.seal_interval_ms / 1000, CONFIRM_S_MIN)
        self._paused_until_s = 0.0
        self._pause_s = BUCKET_PAUSE_S_MIN
        self.pause_s_max = limits.seal_pause_ms / 1000
        self._told_s: dict[str, float] = {}  # errors of single streams and when they were logged

    @property
    def owned(self) -> bool:
        """Whether the bucket is ours, as far as we know."""
        return bool(self.owner.fence) and not self.fenced

    def usable(self, now_s: float) -> bool:
        return self.owned and now_s >= self._paused_until_s

    @property
    def state(self) -> str:
        """One line, for whoever asks whether the server is well."""
        if self.fenced:
            return f"fenced: {self.fenced}"
        return f"failing: {self.failure}" if self.failure else "ok"

    # -- the owner -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claims the bucket; raises if it is somebody else's."""
        await self.owner.start()
        self.failure = self._owner_said = self.owner.failure

    def is_confirmation_due(self, now_s: float) -> bool:
        wait_s = self._confirm_s if self.owner.fence else self._pause_s
        return not self._confirming and now_s - self._confirmed_s >= wait_s

    async def confirm(self) -> None:
        """A store that is down answers late: nobody should wait for this."""
        self._confirming = True
        try:
            await self.owner.confirm()
        except FencedError as error:
            self._give_up(str(error))
        except TailraceError as error:
            logger.error("the owner of the object store cannot be told: %s", error)
        else:
            said, self._owner_said = self._owner_said, self.owner.failure
            if self._owner_said and not self.owner.fence:
                self._pause_s = min(2 * self._pause_s, self.pause_s_max)
                self.failure = self._owner_said
            elif self.failure == said and not self._owner_said:
                self.failure = ""
        finally:
            self._confirming = False
            self._confirmed_s = self._loop.time()

    def _give_up(self, reason: str) -> None:
        """Somebody else owns the bucket: what we would acknowledge from now on could never get there."""
        if not self.fenced:
            self.fenced = reason
            logger.critical(
                "this server no longer owns its object store and takes no more entries: %s", reason
            )
            if self.on_lost is not None:
                self.on_lost()

    # -- reports ---------------------------------------------------------------------------------------

    def learn(self, kind: JobKind, numbers: list[int], report: SealerReport) -> None:
        """From the outcome of a job. A failure is logged, counted and followed by a pause."""
        if not report.error:
            self._went_well()
            return
        self.failures += 1
        if report.trouble == "fenced":
            self._give_up(report.error)
        elif report.trouble == "unavailable":
            if not self.failure:
                logger.error("the object store cannot be used: %s; trying again for ever", report.error)
            self.failure = report.error
            self._pause()
        elif report.trouble == "ended":
            logger.error("%s of streams %s: %s", kind, numbers[:5], report.error)
            self._pause()
        elif kind == "seal" and report.trouble == "conflict":
            pass  # told by those who keep book of them
        elif self._is_news(report.error):
            logger.error(
                "%s of streams %s failed: %s; trying again for ever", kind, numbers[:5], report.error
            )

    def _went_well(self) -> None:
        self._pause_s = BUCKET_PAUSE_S_MIN
        if self.failure:
            logger.warning("the object store can be used again")
            self.failure = ""
            if self.on_back is not None:
                self.on_back()

    def _pause(self) -> None:
        """Longer each time; several jobs that fail at once are one failure."""
        now_s = self._loop.time()
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.pause_s_max)

    def _is_news(self, error: str) -> bool:
        """What is wrong with one stream stays wrong: it is told once an hour, not once a minute."""
        now_s = self._loop.time()
        if now_s - self._told_s.get(error, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return False
        if len(self._told_s) >= LOGGED_ERRORS_MAX:
            self._told_s.clear()
        self._told_s[error] = now_s
        return True
