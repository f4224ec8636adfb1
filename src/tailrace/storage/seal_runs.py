"""Streams on their way to the object store: several at a time, one job after the other for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.records import Delete, Op, Sealed
from tailrace.storage.bucket_health import BUCKET_PAUSE_S_MIN
from tailrace.storage.conflicts import SealConflicts
from tailrace.storage.due import DueStreams

if TYPE_CHECKING:
    from tailrace.storage.seal import SealingService
    from tailrace.storage.seal_job import SealerReport

logger = logging.getLogger("tailrace.seal")

# Small streams cost round trips, large ones memory and room in the spool: one of them counts as four.
JOBS_MAX = 16
LARGE_JOB_WEIGHT = 4
LARGE_JOB_BYTES = 1024 * 1024
CONFLICT_RETRY_S = 600.0  # nothing that the server does ends a conflict


class SealRun(NamedTuple):
    """One job for one stream, as it is told to whoever measures."""

    stream: str
    begun_ns: int
    segments: int = 0
    segment_bytes: int = 0
    error: str = ""


class SealDispatcher:
    """Takes due streams off the queue as there is room, and puts back what is not done yet."""

    def __init__(self, sealing: SealingService, log: Log, due: DueStreams) -> None:
        self._sealing = sealing
        self._log = log
        self._due = due
        self._jobs = 0
        self.busy: set[int] = set()
        self.conflicts = SealConflicts(log.streams.get)
        log.publisher.on_change.append(self._changed)
        self.segments = self.segment_bytes = 0
        self.on_run: Callable[[SealRun], None] | None = None

    def dispatch(self) -> None:
        while self._jobs < JOBS_MAX and len(self._due):
            number = self._due.pop(self.busy)
            if number is None:
                break
            try:
                stream = self._log.streams.get(number)
            except TailraceError:
                self._due.add(number)
                raise
            if stream is None or number in self.conflicts.resting:
                continue  # gone, or only its own time brings it back
            large = stream.size_bytes - stream.sealed_bytes >= LARGE_JOB_BYTES
            self.busy.add(number)
            weight = LARGE_JOB_WEIGHT if large else 1
            self._jobs += weight
            self._sealing.spawn(self._seal(number, weight))

    async def _seal(self, number: int, weight: int) -> None:
        try:
            again = await self._seal_once(number)
        except TailraceError as error:
            logger.warning("stream %d is not sealed yet: %s", number, error)
            again = False
            self._later(number, BUCKET_PAUSE_S_MIN)
        finally:
            self.busy.discard(number)
            self._jobs -= weight
        if again:
            self._due.add(number)
        self._sealing.notify()

    async def _seal_once(self, number: int) -> bool:
        """One job for one stream; True if another has to follow."""
        lineage = self._sealing.lineage
        stream = self._log.streams.get(number)
        if stream is None or stream.removed or stream.stored <= stream.sealed:
            lineage.sealed(number)
            return False
        if lineage.wait(stream):
            return False
        sealed = stream.sealed
        begun_ns = self._log.clock.now_ns()
        report = await self._sealing.ask("seal", [number], sealed)
        if report.error:
            self._failed(number, report, begun_ns)
            return False
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            self.conflicts.over(number)
            return False  # its objects are deleted when the hot store has heard of it
        if stream.sealed != sealed:
            return True  # a failed commit took the journal back meanwhile
        if report.refused == "buried":
            self._stand_aside(stream, report.detail)
            return False
        self.conflicts.over(number)
        now_ns = self._log.clock.now_ns()
        await self._sealing.journal(
            Sealed(
                number,
                report.generation,
                report.as_of,
                report.segments,
                report.footers,
                now_ns,
                report.keyed,
            )
        )
        size_bytes = sum(segment.bytes for segment in report.segments)
        self.segments += len(report.segments)
        self.segment_bytes += size_bytes
        for segment in report.segments:
            self._sealing.pressure.sealed(segment.payload_bytes)
        self._tell(SealRun(stream.name, begun_ns, len(report.segments), size_bytes))
        lineage.sealed(number)
        return report.more or self._due.is_due(stream)

    def _failed(self, number: int, report: SealerReport, begun_ns: int) -> None:
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            self.conflicts.over(number)
            return
        self._tell(SealRun(stream.name, begun_ns, error=report.error))
        if report.trouble == "conflict":
            self._stand_aside(stream, report.error)
            return
        everything_pauses = report.trouble in ("unavailable", "ended")
        self._later(number, 0.0 if everything_pauses else self._sealing.standing.pause_s_max)

    def _stand_aside(self, stream: Stream, why: str) -> None:
        """The stream stays in the hot store, where it is served from, and is tried again much later."""
        self.conflicts.found(stream, why)
        self._sealing.call_later(CONFLICT_RETRY_S, lambda: self._try_again(stream.number))

    def _changed(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Delete) and stream.removed:
            self.conflicts.over(stream.number)

    def _try_again(self, number: int) -> None:
        self.conflicts.resting.discard(number)
        self._due.add(number)

    def retry_conflict(self, number: int) -> None:
        """Somebody may have ended it."""
        if number in self.conflicts:
            self.conflicts.over(number)
            self._due.add(number)

    def _later(self, number: int, pause_s: float) -> None:
        """Again after a pause of its own; 0 where everything pauses."""
        self._sealing.call_later(pause_s, lambda: self._due.add(number))

    def _tell(self, run: SealRun) -> None:
        if self.on_run is not None:
            self.on_run(run)
