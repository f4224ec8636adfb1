"""The sweep on a schedule: now and then the sealer walks the bucket and takes away what nobody can need.

One page of the listing at a time, with pauses, so that it never holds up sealing. How far it came is a fact
of the log, so a restart goes on there: a server that is restarted every day sweeps its whole bucket all the
same. A turn that a crash cut short is done again, and finds less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.log.log import Log
from tailrace.storage.sweep import SweepReport

if TYPE_CHECKING:
    from tailrace.storage.seal import SealingService

SWEEP_FACT: Final = "swept"
MS_NS: Final = 1_000_000
FIRST_S_MAX: Final = 600.0  # a server that has just started has other things to do
SWEEP_CHECK_S: Final = 60.0
SWEEP_PAUSE_S: Final = 0.5
SWEEP_PAUSE_SHARE: Final = 4.0  # a turn is followed by a pause of so many times its length
TURNS_PER_NOTE: Final = 16  # so much is done again after a crash


class SweepProgress(NamedTuple):
    """When the present pass began, or the last one if `after` is empty; the key it has come to."""

    begun_ns: int
    after: str

    @classmethod
    def decode(cls, value: bytes) -> SweepProgress:
        begun, _, after = value.decode().partition(" ")
        return cls(int(begun), after)

    def encode(self) -> bytes:
        return f"{self.begun_ns} {self.after}".encode()


class SweepSchedule:
    """One turn at a time."""

    def __init__(self, sealing: SealingService, log: Log) -> None:
        self._sealing = sealing
        self._log = log
        self._interval_ns = log.limits.sweep_interval_ms * MS_NS
        self._progress: SweepProgress | None = None
        self._running = False
        self._look_at_s: float | None = None
        self._turns = 0
        self.passes = 0
        self.seen = SweepReport()

    def look(self, now_s: float) -> None:
        """Called every second; does something when a turn is due."""
        if not self._interval_ns or self._running or self._log.refusal is not None:
            return
        if self._look_at_s is None:
            self._look_at_s = now_s + min(self._interval_ns / 1e9, FIRST_S_MAX)
        if now_s < self._look_at_s:
            return
        progress = self._due()
        if progress is None:
            self._look_at_s = now_s + min(self._interval_ns / 1e9, SWEEP_CHECK_S)
            return
        self._running = True
        self._sealing.spawn(self._turn(progress, now_s))

    def _due(self) -> SweepProgress | None:
        """Where the next turn begins; None if there is none yet."""
        now_ns = self._log.clock.now_ns()
        noted = self._log.streams.meta.get(SWEEP_FACT)
        if self._progress is None and noted is not None:
            self._progress = SweepProgress.decode(noted)
        if self._progress is None:
            # There is nothing to sweep before there was something to seal.
            return None if self._sealing.sealer is None else SweepProgress(now_ns, "")
        if self._progress.after:
            return self._progress
        # A clock that was set back must not stop it for ever.
        waited_ns = abs(now_ns - self._progress.begun_ns)
        return SweepProgress(now_ns, "") if waited_ns >= self._interval_ns else None

    async def _turn(self, progress: SweepProgress, begun_s: float) -> None:
        pause_s = SWEEP_CHECK_S
        try:
            report = await self._sealing.ask("sweep", [], after=progress.after)
            if report.error:
                return
            self.seen.add(report.swept)
            self._turns += 1
            self.passes += not report.after
            self._progress = progress._replace(after=report.after)
            if not report.after or self._turns % TURNS_PER_NOTE == 0:
                self._log.put_meta(SWEEP_FACT, self._progress.encode())
            pause_s = max(SWEEP_PAUSE_S, SWEEP_PAUSE_SHARE * (self._sealing.now_s() - begun_s))
        except TailraceError:
            pass  # the journal takes nothing just now; only the note is missing
        finally:
            self._running = False
            self._look_at_s = self._sealing.now_s() + pause_s
