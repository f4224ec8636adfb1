"""The retention service: trims streams when they are due, and deletes what no stream shows any more.

The order is: the journal records that entries are removed, and readers see it; a checkpoint removes segments
that no stream shows from the hot store; the sealer removes them from the manifest, then deletes the objects;
the journal records the deletion. A missing step is found and repeated in the next round, so a crash loses
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log import system_streams
from tailrace.log.model import Lifetime
from tailrace.log.records import Recorded, Trim
from tailrace.log.segment_catalogue import has_uncheckpointed_compaction
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.retention_rules import (
    decide_stored_retention,
    has_bounds,
    stored_stream,
    unsealed_over_bounds_ns,
)

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.sealing import SealingService

SCAN_COUNT = 100  # streams in one scan
TRIM_PAGE_COUNT = 64  # streams in one job of the sealer
REMEMBERED_MAX = 65_536  # deletions that are not checkpointed; more wait for a checkpoint
TRIM_PAUSE_S = 5.0
SCAN_S_MAX = 60.0
_START = (-(2**63), 0)
NO_END = 2**62


class TrimCandidate(NamedTuple):
    """A trim decided from the hot store, valid while the stream's `earliest` is still the same."""

    number: int
    earliest_was: int
    trim: Trim


class RetentionBound(NamedTuple):
    """A stream whose bounds are set by another part of the server: nothing after `upto` may be removed."""

    number: int
    lifetime: Lifetime
    upto: int = NO_END


class RetentionScan(NamedTuple):
    """The result of one scan of the hot store, its position, and when the next stream is due."""

    candidates: list[TrimCandidate]
    unsealed: list[int]  # streams that have to be sealed before more of them can be removed
    seen: tuple[int, int]
    next_ns: int | None


def scan_due_streams(
    store: StoredStreams, seen: tuple[int, int], bounds: Sequence[RetentionBound], now_ns: int
) -> RetentionScan:
    """Runs on a thread: the next due streams after those seen, and all in `bounds`."""
    db = store.db
    next_ns: int | None = None
    candidates: list[TrimCandidate] = []
    unsealed: list[int] = []

    def decide(number: int, lifetime: Lifetime | None, upto: int = NO_END) -> None:
        stream = stored_stream(db, number)
        if stream is None:
            return
        decision = decide_stored_retention(db, stream, lifetime or stream.lifetime, now_ns, upto)
        if decision.earliest > stream.earliest:
            trim = Trim(
                number,
                decision.earliest,
                decision.payload_bytes,
                decision.segments,
                decision.segment_bytes,
            )
            candidates.append(TrimCandidate(number, stream.earliest, trim))
        over_ns = unsealed_over_bounds_ns(db, stream, lifetime or stream.lifetime)
        if over_ns is not None and over_ns <= now_ns:
            unsealed.append(number)

    with store.snapshot():
        for bound in bounds:
            decide(*bound)
        found = db.trims.due_after(*seen, SCAN_COUNT)
        for at_ns, number in found:
            if at_ns > now_ns:
                next_ns = at_ns
                break
            seen = (at_ns, number)
            decide(number, None)
        else:
            if len(found) == SCAN_COUNT:
                next_ns = now_ns  # there are more
    return RetentionScan(candidates, unsealed, seen, next_ns)


class RetentionService:
    """Runs one scan and one round of deletions at a time. Each checkpoint requests the next ones."""

    def __init__(self, sealing: SealingService, log: Log) -> None:
        self._sealing = sealing
        self._log = log
        self._scanning = False
        self._scan_at_s = 0.0
        self._checkpoints = 0
        self._seen = _START  # time and number up to which due streams were scanned
        self._file = 0  # the last journal file with a trim
        self._deleting = False
        self._requested = True
        self._early = False  # forks wait for their sources to be sealed
        self._bounds: list[Callable[[], Sequence[RetentionBound]]] = []  # of other parts of the server
        self._done: dict[int, int] = {}  # stream to the journal file as of which its objects are deleted
        self._recorded: dict[int, list[int]] = {}  # journal file to the streams whose deletion it records
        self.entries = self.segments = self.segment_bytes = 0  # removed so far

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.trimmed_entries.read = lambda: self.entries
        metrics.trimmed_segments.read = lambda: self.segments
        metrics.trimmed_bytes.read = lambda: self.segment_bytes

    @property
    def pending(self) -> bool:
        return self._requested or self._deleting

    def waits_for_checkpoint(self, checkpointed_seq: int) -> bool:
        """Whether objects can be deleted, or removed from the list, only after the next checkpoint."""
        return self._file > checkpointed_seq or bool(self._done) or self._early

    def checkpointed(self, seq: int) -> None:
        for file in [file for file in self._recorded if file <= seq]:
            for number in self._recorded.pop(file):
                self._done.pop(number, None)
        self._checkpoints += 1
        self._early = False
        self._seen = _START
        self._scan_at_s = 0.0
        self._requested = True

    # -- trimming streams over their bounds ------------------------------------------------------------

    def poll(self, now_s: float) -> None:
        """Starts a scan if a stream is due."""
        if not self._scanning and now_s >= self._scan_at_s and self._log.refusal is None:
            self._scanning = True
            self._sealing.tasks.start(self._scan(now_s))

    async def _scan(self, now_s: float) -> None:
        delay_s = TRIM_PAUSE_S
        try:
            now_ns = self._log.clock.now_ns()
            checkpoints = self._checkpoints
            work = partial(scan_due_streams, self._log.store, self._seen, self._bounded(), now_ns)
            found = await self._sealing.on_thread(work)
            for number in found.unsealed:
                self._sealing.seal_soon(number)
            await self._trim(found.candidates)
            delay_s = 0.0
            if checkpoints == self._checkpoints:  # else the scan starts over
                self._seen = found.seen
                delay_s = SCAN_S_MAX if found.next_ns is None else (found.next_ns - now_ns) / 1e9
        except TailraceError:
            self._seen = _START  # the journal or the hot store is unavailable
        finally:
            self._scanning = False
            self._scan_at_s = now_s + min(delay_s, SCAN_S_MAX)

    def _bounded(self) -> list[RetentionBound]:
        """Streams whose bounds are a setting of the server, which the hot store does not have."""
        if self._seen != _START:
            return []
        suffix = self._log.own_suffix
        found = [self._log.streams.by_name.get(name + suffix) for name in system_streams.BOUNDED_STREAMS]
        own = [
            RetentionBound(stream.number, stream.lifetime)
            for stream in found
            if stream is not None and has_bounds(stream.lifetime)
        ]
        return [*own, *(bound for bounds in self._bounds for bound in bounds())]

    def add_bounds(self, bounds: Callable[[], Sequence[RetentionBound]]) -> None:
        """Apply further bounds, which each scan from the start asks for."""
        self._bounds.append(bounds)

    def look_again(self) -> None:
        """The bounds of other parts of the server have changed: scans from the start."""
        self._seen = _START
        self._scan_at_s = 0.0

    async def _trim(self, candidates: Sequence[TrimCandidate]) -> None:
        trims: list[Trim] = []
        for number, earliest_was, trim in candidates:
            stream = self._log.streams.get(number)
            # The hot store may be behind: the next checkpoint requests another scan.
            # Segments that were compacted into one are removed together or not at all.
            same = stream is not None and not stream.removed and stream.earliest == earliest_was
            if same and not has_uncheckpointed_compaction(self._log.streams, number, trim.earliest):
                trims.append(trim)
                self.entries += trim.earliest - earliest_was
                self.segments += trim.segments
                self.segment_bytes += trim.segment_bytes
        if trims:
            failpoints.reached("retain.before_trim")
            await asyncio.gather(*(self._sealing.journal(trim) for trim in trims))
            failpoints.reached("retain.after_trim")
            self._file = self._sealing.journal_file

    # -- deleting what no stream shows any more --------------------------------------------------------

    def dispatch(self) -> None:
        if self._requested and not self._deleting:
            self._requested = False
            self._deleting = True
            self._sealing.tasks.start(self._delete())

    async def _delete(self) -> None:
        clean = False
        try:
            clean = await self._delete_pending()
        except TailraceError:
            pass
        finally:
            self._deleting = False
        if not clean:
            self._sealing.call_later(TRIM_PAUSE_S, self.request_round)

    def request_round(self) -> None:
        self._requested = True

    async def _delete_pending(self) -> bool:
        """True if all succeeded. A failure of one stream does not stop the others."""
        clean = True
        after = 0
        while len(self._done) < REMEMBERED_MAX:
            rows = await self._sealing.on_thread(lambda after=after: self._pending(after))
            numbers = [number for number, file in rows if self._done.get(number, 0) < file]
            new = await self._sealing.on_thread(lambda numbers=numbers: self._unrecorded_forks(numbers))
            early = {number for number in new if self._must_wait(number)}
            self._early = self._early or bool(early)
            numbers = [number for number in numbers if number not in early]
            if numbers:
                report = await self._sealing.run_job("trim", numbers)
                done = [number for number, _ in report.done]
                if done:
                    await self._sealing.journal(Recorded(report.as_of, [], [], done))
                    self._done.update((number, report.as_of) for number in done)
                    self._recorded.setdefault(self._sealing.journal_file, []).extend(done)
                clean = clean and not report.error
                if report.trouble in ("unavailable", "fenced"):
                    return False
            if len(rows) < TRIM_PAGE_COUNT:
                return clean
            after = rows[-1][0]
        return clean

    def _pending(self, after: int) -> list[tuple[int, int]]:
        return self._log.store.db.trims.pending(after, TRIM_PAGE_COUNT)

    def _must_wait(self, number: int) -> bool:
        """Whether a fork waits for its source to be sealed before its first manifest."""
        stream = self._log.streams.get(number)
        return stream is not None and self._sealing.fork_dependencies.must_wait(stream)

    def _unrecorded_forks(self, numbers: list[int]) -> set[int]:
        db = self._log.store.db
        return {number for number in db.trims.forks_among(numbers) if not db.cold.generation(number)}
