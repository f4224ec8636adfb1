"""Bucket health: whether the object store is available, whether this server owns it, and when to retry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tailrace.common.backoff import Backoff
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.storage.bucket_ownership import BucketOwner
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.sealer_client import JobKind, SealerReport

logger = logging.getLogger("tailrace.seal")

BUCKET_PAUSE_S_MIN = 0.5
CONFIRM_S_MIN = 1.0
LOG_AGAIN_S = 3600.0
LOGGED_ERRORS_MAX = 1000


class BucketHealth:
    """Tracks the state of the bucket from the sealer's reports and the owner object."""

    def __init__(self, owner: BucketOwner, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self._loop = loop
        self.failure = ""  # why the object store is unavailable
        self.fenced = ""  # why this server may not write to it any more
        self.failures = 0
        self.on_recovered: Callable[[], None] | None = None  # it is available again
        self.on_fenced: Callable[[], None] | None = None  # another server owns it from now on
        self._owner_failure = ""  # of the last confirmation
        self._confirming = False
        self._confirmed_s = loop.time()
        self._confirm_s = max(limits.seal_interval_ms / 1000, CONFIRM_S_MIN)
        self._paused_until_s = 0.0
        self.pause_s_max = limits.seal_pause_ms / 1000
        self._backoff = Backoff(BUCKET_PAUSE_S_MIN, self.pause_s_max)
        self._logged_s: dict[str, float] = {}  # errors of single streams and when they were logged

    @property
    def owned(self) -> bool:
        """Whether this server owns the bucket, as far as is known."""
        return bool(self.owner.fence) and not self.fenced

    def usable(self, now_s: float) -> bool:
        return self.owned and now_s >= self._paused_until_s

    @property
    def state(self) -> str:
        """One line for health reports."""
        if self.fenced:
            return f"fenced: {self.fenced}"
        return f"failing: {self.failure}" if self.failure else "ok"

    # -- the owner -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claims the bucket; raises if another server owns it."""
        await self.owner.start()
        self.failure = self._owner_failure = self.owner.failure

    def is_confirmation_due(self, now_s: float) -> bool:
        wait_s = self._confirm_s if self.owner.fence else self._backoff.upcoming_s()
        return not self._confirming and now_s - self._confirmed_s >= wait_s

    async def confirm(self) -> None:
        """Reads the owner object. May take long if the store is down, so no other work should await it."""
        self._confirming = True
        try:
            await self.owner.confirm()
        except FencedError as error:
            self._fence(str(error))
        except TailraceError as error:
            fields = log_fields(error=str(error))
            logger.error("cannot determine the owner of the object store", extra=fields)
        else:
            previous, self._owner_failure = self._owner_failure, self.owner.failure
            if self._owner_failure and not self.owner.fence:
                self._backoff.failures += 1
                self.failure = self._owner_failure
            elif self.failure == previous and not self._owner_failure:
                self.failure = ""
        finally:
            self._confirming = False
            self._confirmed_s = self._loop.time()

    def _fence(self, reason: str) -> None:
        """Another server owns the bucket: new entries could never be sealed."""
        if not self.fenced:
            self.fenced = reason
            logger.critical(
                "object store is owned by another server, refusing appends", extra=log_fields(reason=reason)
            )
            if self.on_fenced is not None:
                self.on_fenced()

    # -- reports ---------------------------------------------------------------------------------------

    def on_report(self, kind: JobKind, numbers: list[int], report: SealerReport) -> None:
        """Handles the outcome of a job. A failure is logged, counted and followed by a pause."""
        if not report.error:
            self._on_success()
            return
        self.failures += 1
        if report.trouble == "fenced":
            self._fence(report.error)
        elif report.trouble == "unavailable":
            if not self.failure:
                logger.error("object store unavailable, retrying", extra=log_fields(error=report.error))
            self.failure = report.error
            self._pause()
        elif report.trouble == "ended":
            fields = log_fields(kind=kind, stream_numbers=numbers[:5], error=report.error)
            logger.error("sealer process exited during a job, retrying", extra=fields)
            self._pause()
        elif kind == "seal" and report.trouble == "conflict":
            pass  # logged by `SealConflicts`
        elif self._should_log(report.error):
            fields = log_fields(kind=kind, stream_numbers=numbers[:5], error=report.error)
            logger.error("sealer job failed, retrying", extra=fields)

    def _on_success(self) -> None:
        self._backoff.reset()
        if self.failure:
            logger.warning("object store available again")
            self.failure = ""
            if self.on_recovered is not None:
                self.on_recovered()

    def _pause(self) -> None:
        """Backs off, doubling the pause; several jobs that fail at once count as one failure."""
        now_s = self._loop.time()
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._backoff.next_s()

    def _should_log(self, error: str) -> bool:
        """Whether an error of a single stream was not logged within the last hour."""
        now_s = self._loop.time()
        if now_s - self._logged_s.get(error, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return False
        if len(self._logged_s) >= LOGGED_ERRORS_MAX:
            self._logged_s.clear()
        self._logged_s[error] = now_s
        return True
