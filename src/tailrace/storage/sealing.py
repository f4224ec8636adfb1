"""The sealing service: dispatches due streams to the sealer and journals what was sealed.

Everything runs on the loop thread in small steps. The hot store is read page by page on a thread; the object
store is written by the sealer process. Several streams are sealed at a time, one job at a time for each.

If the bucket has other entries of a stream than this server, the stream is in conflict: it stays in the hot
store, is served from there, and is retried much later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet, wait_event
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Delete, Op, Published, Recorded, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import await_commit
from tailrace.storage.bucket_health import BUCKET_PAUSE_S_MIN, BucketHealth
from tailrace.storage.bucket_ownership import BucketOwner
from tailrace.storage.hot_store.tables import ColdTables
from tailrace.storage.manifest_recording import ManifestRecorder
from tailrace.storage.meta_objects import MetaRecorder
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.object_store.request_stats import RequestStats
from tailrace.storage.retention_service import RetentionService
from tailrace.storage.seal_schedule import (
    AgingStreams,
    DueStreams,
    EarlyRotation,
    ForkDependencies,
    SealBacklog,
)
from tailrace.storage.sealer_client import (
    JobKind,
    ManifestPublication,
    SealerProcess,
    SealerReport,
    SealerSetup,
)
from tailrace.storage.sweep import SweepSchedule, SweepShare

if TYPE_CHECKING:
    from tailrace.log.log import Log

logger = logging.getLogger("tailrace.seal")

CONFLICT_ADVICE = (
    "The data directory is older than the bucket, or another server runs on a copy of it: see 'Backup, "
    "restore, upgrade' in docs/operations.md"
)


class SealConflicts:
    """Streams in conflict. Logged once per stream; metrics, /readyz and the stream's details show them."""

    def __init__(self, find: Callable[[int], Stream | None]) -> None:
        self._find = find
        self._names: dict[int, str] = {}
        self.resting: set[int] = set()  # not retried before their time

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, number: int) -> bool:
        return number in self._names

    def add(self, stream: Stream, why: str) -> None:
        self.resting.add(stream.number)
        if stream.number not in self._names:
            self._names[stream.number] = stream.name
            fields = log_fields(stream=stream.name, error=why, advice=CONFLICT_ADVICE)
            logger.error("stream conflicts with the object store and is not sealed", extra=fields)

    def clear(self, number: int) -> None:
        """The stream was sealed or removed, or is to be tried again."""
        self._names.pop(number, None)
        self.resting.discard(number)

    def refusal(self, stream: Stream) -> TailraceError | None:
        """The error if the stream or an ancestor is in conflict and it cannot be sealed."""
        found: Stream | None = stream
        while found is not None and self._names:
            if found.number in self._names:
                problem = f"the object store has other entries of {found.name!r} than this server"
                return TailraceError("conflict", f"{problem}. {CONFLICT_ADVICE}")
            found = self._find(found.parent) if found.parent else None
        return None

    @property
    def state(self) -> str:
        """One line for health reports; empty if there are no conflicts."""
        if not self._names:
            return ""
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        named = next(iter(self._names.values()))
        return f"conflict: it has other entries of stream {named!r}{more} than this server"


UNSEALED_PAGE_COUNT = 200


class UnsealedStream(NamedTuple):
    number: int
    last: int
    sealed: int
    size_bytes: int
    closed: bool
    oldest_ns: int

    @property
    def entries(self) -> int:
        return self.last - self.sealed


def unsealed_streams_after(store: StoredStreams, number: int) -> list[UnsealedStream]:
    """The next streams with entries in the hot store; fewer than a page if there are no more."""
    found: list[UnsealedStream] = []
    with store.snapshot():
        for row in store.db.cold.hot_ranges(number, UNSEALED_PAGE_COUNT):
            stream = store.stream_by_number(row.number)
            sealed = row.last if stream is None else stream.sealed
            closed = stream is not None and stream.closed
            found.append(UnsealedStream(row.number, row.last, sealed, row.body_bytes, closed, row.oldest_ns))
    return found


# A small stream costs round trips, a large one memory and spool space, so it counts as four.
JOBS_MAX = 16
LARGE_JOB_WEIGHT = 4
LARGE_JOB_BYTES = 1024 * 1024
CONFLICT_RETRY_S = 600.0  # only an operator can resolve a conflict


class SealRun(NamedTuple):
    """The outcome of one job for one stream, for tracing."""

    stream: str
    begun_ns: int
    segments: int = 0
    segment_bytes: int = 0
    error: str = ""


class SealDispatcher:
    """Starts seal jobs for due streams up to a limit, and queues streams again that are not done."""

    def __init__(
        self,
        sealing: SealingService,
        log: Log,
        due: DueStreams,
        on_run: Callable[[SealRun], None] | None,
    ) -> None:
        self._sealing = sealing
        self._log = log
        self._due = due
        self._jobs = 0
        self.busy: set[int] = set()
        self.conflicts = SealConflicts(log.streams.get)
        log.publisher.on_change.append(self._changed)
        self.segments = self.segment_bytes = 0
        self._on_run = on_run

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
                continue  # removed, or queued again later
            large = stream.size_bytes - stream.sealed_bytes >= LARGE_JOB_BYTES
            self.busy.add(number)
            weight = LARGE_JOB_WEIGHT if large else 1
            self._jobs += weight
            self._sealing.tasks.start(self._seal(number, weight))

    async def _seal(self, number: int, weight: int) -> None:
        try:
            again = await self._seal_once(number)
        except TailraceError as error:
            fields = log_fields(stream_number=number, error=str(error))
            logger.warning("cannot seal stream, retrying", extra=fields)
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
        forks = self._sealing.fork_dependencies
        stream = self._log.streams.get(number)
        if stream is None or stream.removed or stream.stored <= stream.sealed:
            forks.sealed(number)
            return False
        if forks.wait(stream):
            return False
        sealed = stream.sealed
        begun_ns = self._log.clock.now_ns()
        report = await self._sealing.run_job("seal", [number], sealed)
        if report.error:
            self._failed(number, report, begun_ns)
            return False
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            self.conflicts.clear(number)
            return False  # its objects are deleted after the checkpoint of the deletion
        if stream.sealed != sealed:
            return True  # a failed commit was rolled back meanwhile
        if report.refused == "buried":
            self._suspend_conflicting(stream, report.detail)
            return False
        self.conflicts.clear(number)
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
            self._sealing.backlog.sealed(segment.payload_bytes)
        self._notify(SealRun(stream.name, begun_ns, len(report.segments), size_bytes))
        forks.sealed(number)
        return report.more or self._due.is_due(stream)

    def _failed(self, number: int, report: SealerReport, begun_ns: int) -> None:
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            self.conflicts.clear(number)
            return
        self._notify(SealRun(stream.name, begun_ns, error=report.error))
        if report.trouble == "conflict":
            self._suspend_conflicting(stream, report.error)
            return
        everything_pauses = report.trouble in ("unavailable", "ended")
        self._later(number, 0.0 if everything_pauses else self._sealing.health.pause_s_max)

    def _suspend_conflicting(self, stream: Stream, why: str) -> None:
        """The stream stays in the hot store, is served from there, and is retried much later."""
        self.conflicts.add(stream, why)
        self._sealing.call_later(CONFLICT_RETRY_S, lambda: self._try_again(stream.number))

    def _changed(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Delete) and stream.removed:
            self.conflicts.clear(stream.number)

    def _try_again(self, number: int) -> None:
        self.conflicts.resting.discard(number)
        self._due.add(number)

    def retry_conflict(self, number: int) -> None:
        """An operator may have resolved the conflict: tries the stream again."""
        if number in self.conflicts:
            self.conflicts.clear(number)
            self._due.add(number)

    def _later(self, number: int, pause_s: float) -> None:
        """Queues the stream again after a pause; 0 if all sealing pauses anyway."""
        self._sealing.call_later(pause_s, lambda: self._due.add(number))

    def _notify(self, run: SealRun) -> None:
        if self._on_run is not None:
            self._on_run(run)


TICK_S = 1.0
AGED_PER_STEP = 100
QUEUE_SOFT_MAX = 2000  # the scan for unsealed streams pauses while so many are due
T = TypeVar("T")


class SealingService:
    """Schedules all work on the object store: sealing, recording of manifests, retention, sweep."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        deployment: str,
        loop: asyncio.AbstractEventLoop,
        share: SweepShare = "all",
        on_run: Callable[[SealRun], None] | None = None,
    ) -> None:
        """`share` is the part of the sweep that is done here, if this is one of several workers.

        `on_run` is called after each run of the sealer.
        """
        self._log = log
        self._loop = loop
        self._settings = settings
        url = settings.object_store_url
        owner = BucketOwner(url, deployment, settings.take_over, log)
        self.health = BucketHealth(owner, log.limits, loop)
        self.health.on_recovered = self._on_recovered
        self.health.on_fenced = self._on_fenced
        self._due = DueStreams(log.limits)
        self.fork_dependencies = ForkDependencies(self._due, log.streams.get)
        self.backlog = SealBacklog(log)
        self.dispatcher = SealDispatcher(self, log, self._due, on_run)
        self.sealer: SealerProcess | None = None
        self.request_stats = RequestStats()
        self._threads = ThreadPoolExecutor(1, "leftovers")
        self._heads = ManifestRecorder(self)
        self.meta = MetaRecorder(self, log, settings.recovery_key)
        self.retention = RetentionService(self, log)
        self.sweep = SweepSchedule(self, log)
        self._share: SweepShare = share
        self._rotation = EarlyRotation(log, self._due, self.backlog, self._checkpoint_needed, loop.time())
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self.tasks = TaskSet(lambda error: logger.error("sealing stopped unexpectedly", exc_info=error))
        self._tick_s = min(TICK_S, log.limits.seal_interval_ms / 1000)
        self._polled_s = 0.0

    def register_metrics(self, metrics: ServerMetrics, caches: Sequence[ObjectCache]) -> None:
        """`caches` read from the object store as well; their requests are part of the totals."""

        def requests() -> Iterable[tuple[list[str], float]]:
            made = Counter(self.requests)
            for cache in caches:
                if cache.objects is not None:
                    made += cache.objects.requests
            return [([kind], count) for kind, count in sorted(made.items())]

        def received() -> int:
            sealer = 0 if self.sealer is None else self.sealer.bytes_in
            return sealer + sum(cache.fetched_bytes for cache in caches)

        metrics.object_requests.each = requests
        metrics.object_sent_bytes.read = lambda: 0 if self.sealer is None else self.sealer.bytes_out
        metrics.object_received_bytes.read = received
        metrics.object_store_ok.read = lambda: float(self.health.state == "ok")
        metrics.hot_bytes.read = lambda: self.backlog.stored_bytes
        metrics.unsealed_bytes.read = lambda: self.backlog.waiting_bytes
        metrics.spooled_bytes.read = self.spooled_bytes
        metrics.seal_queue.read = lambda: self.queued
        metrics.sealed_segments.read = lambda: self.dispatcher.segments
        metrics.sealed_bytes.read = lambda: self.dispatcher.segment_bytes
        metrics.seal_failures.read = lambda: self.health.failures
        metrics.seal_conflicts.read = lambda: len(self.dispatcher.conflicts)
        self.retention.register_metrics(metrics)
        self.sweep.register_metrics(metrics)

    # -- start and stop --------------------------------------------------------------------------------

    async def claim(self) -> None:
        """Claims the bucket before anything is written; raises if another server owns it or it is newer."""
        await self.health.start()

    def start(self) -> None:
        self.backlog.start()
        self._log.on_checkpointed = self._checkpointed
        self.tasks.start(self._run())
        self.tasks.start(self._scan_unsealed())

    async def stop(self) -> None:
        await self.tasks.close()
        if self.sealer is not None:
            await self.sealer.stop()
        await self.health.owner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while not self.health.fenced:
            await wait_event(self._wake, self._tick_s)
            self._wake.clear()
            now_s = self._loop.time()
            try:
                if now_s - self._polled_s >= self._tick_s:
                    self._polled_s = now_s
                    self._poll(now_s)
                self._queue_aged(now_s)
                if self.health.usable(now_s):
                    self.dispatcher.dispatch()
                    self._heads.dispatch()
                    self.retention.dispatch()
            except TailraceError as error:
                logger.warning("cannot dispatch seal jobs, retrying", extra=log_fields(error=str(error)))
            except Exception:
                logger.exception("sealing step failed")  # the next one may succeed

    def _poll(self, now_s: float) -> None:
        """Periodic checks, independent of finished jobs."""
        self.backlog.update(self.health.failure)
        self.retention.poll(now_s)
        if self.health.usable(now_s):
            self.sweep.poll(now_s)
        self._rotation.poll(now_s)
        if self.health.is_confirmation_due(now_s):
            self.tasks.start(self._confirm())

    async def _confirm(self) -> None:
        try:
            await self.health.confirm()
        finally:
            self._wake.set()

    def _on_recovered(self) -> None:
        """The object store is available again."""
        self._heads.request_round()
        self.retention.request_round()

    def _on_fenced(self) -> None:
        """Another server owns the object store."""
        message = "another server has taken over the object store of this server"
        self._log.set_shortage("fence", TailraceError("unavailable", message))
        self.notify()

    # -- what is due -----------------------------------------------------------------------------------

    def _checkpointed(self, seq: int, touched: list[Stream]) -> None:
        started_s = self._rotation.checkpointed(seq, self._loop.time())
        self._due.checkpointed(touched, started_s)
        self.backlog.checkpointed(seq)
        self._heads.checkpointed(seq)
        self.retention.checkpointed(seq)
        self.notify()

    def _checkpoint_needed(self, now_s: float) -> bool:
        """Whether anything except entries waits for a checkpoint."""
        seq = self._rotation.checkpointed_seq
        facts = self.meta.waits_for_checkpoint(seq, now_s)
        trimmed = self.backlog.untrimmed or self.retention.waits_for_checkpoint(seq)
        return facts or trimmed or self._heads.uncheckpointed

    def _queue_aged(self, now_s: float) -> None:
        if len(self._due) > AGED_PER_STEP:
            return
        upto_s = float("inf") if self.backlog.urgent else now_s
        for number, last in self._due.aged(upto_s, AGED_PER_STEP):
            stream = self._log.streams.get(number)
            if stream is not None and not stream.removed and stream.sealed < last:
                self._due.add(number)

    async def _scan_unsealed(self, forced: dict[int, int] | None = None) -> None:
        """Finds streams with unsealed entries in the hot store, left by an earlier run of the server.

        With `forced` all of them are due and added to it, with their last entry.
        """
        number = 0
        now_ns, now_s = self._log.clock.now_ns(), self._loop.time()
        age_s = self._log.limits.seal_age_ms / 1000
        while True:
            rows = await self.on_thread(lambda after=number: unsealed_streams_after(self._log.store, after))
            later = AgingStreams(now_s + age_s)
            for row in rows:
                number = row.number
                stream = self._log.streams.by_number.get(number)
                if row.last <= (row.sealed if stream is None else stream.sealed):
                    continue
                old = now_ns - row.oldest_ns >= age_s * 1e9
                if forced is not None:
                    forced[number] = row.last
                    self._due.add(number)
                elif old or self._due.is_enough(row.entries, row.size_bytes, row.closed):
                    self._due.add(number)
                else:
                    later.add(number, row.last)
            self._due.wait(later)
            self._wake.set()
            if len(rows) < UNSEALED_PAGE_COUNT:
                return
            while len(self._due) > QUEUE_SOFT_MAX:
                await self._step()

    def seal_soon(self, number: int) -> None:
        """Seals a stream regardless of its age and size."""
        self._due.add(number)
        self._wake.set()

    # -- used by the other services of storage ---------------------------------------------------------

    async def run_job(
        self,
        kind: JobKind,
        numbers: list[int],
        sealed: int = 0,
        after: str = "",
        publication: ManifestPublication | None = None,
    ) -> SealerReport:
        """Runs a job in the sealer; a failed report has been logged, counted and followed by a pause."""
        if self.sealer is None:
            setup = SealerSetup(
                data_dir=str(self._log.directory),
                url=self._settings.object_store_url,
                deployment=self.health.owner.deployment,
                fence=self.health.owner.fence,
                limits=self._log.limits,
                share=self._share,
            )
            self.sealer = SealerProcess(setup, self._settings.recovery_key)
        report = await self.sealer.run_job(kind, numbers, sealed, after, publication)
        usage = report.usage
        self.request_stats.merge(usage.by_stream, usage.heads, usage.timings, self._log.clock.now_ns())
        self.health.on_report(kind, numbers, report)
        return report

    async def journal(self, op: Sealed | Trim | Recorded | Published | Compacted) -> None:
        """Returns when the operation is durable."""
        await await_commit(partial(self._log.record_objects, op))

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self._loop.call_later(seconds, work)

    def now_s(self) -> float:
        return self._loop.time()

    def notify(self) -> None:
        """Wakes the service and tasks that wait for progress."""
        self._wake.set()
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()

    def stored(self) -> ColdTables:
        """The hot store's tables of objects, for use on a thread."""
        return self._log.store.db.cold

    async def forks_among(self, numbers: list[int]) -> set[int]:
        """Those of the streams that are forks according to the hot store."""
        return await self.on_thread(lambda: self._log.store.db.trims.forks_among(numbers))

    def stream(self, number: int) -> Stream | None:
        return self._log.streams.get(number)

    @property
    def journal_file(self) -> int:
        return self._log.streams.file

    # -- operators and metrics -------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of the object store in one line."""
        state = self.health.state
        return self.dispatcher.conflicts.state or state if state == "ok" else state

    @property
    def queued(self) -> int:
        return len(self._due) + len(self.dispatcher.busy)

    @property
    def requests(self) -> Counter[str]:
        """Requests to the object store by kind, of the sealer and this process."""
        made = Counter(self.health.owner.requests)
        return made if self.sealer is None else made + self.sealer.requests

    def spooled_bytes(self) -> int:
        """Segments that are written and not yet uploaded."""
        try:
            return sum(entry.stat().st_size for entry in os.scandir(self._log.directory / "spool"))
        except OSError:
            return 0  # the directory does not exist, or a file is being removed

    async def seal_now(self, name: str | None) -> None:
        """Returns when the stream, or all streams, are on the object store as they are now."""
        await self._checkpoint_all()
        to_seal: dict[int, int] = {}
        if name is None:
            await self._scan_unsealed(to_seal)
        else:
            stream = self._log.readable(name)
            to_seal[stream.number] = stream.stored
            self.seal_soon(stream.number)
        for number in to_seal:
            self.dispatcher.retry_conflict(number)
        self._wake.set()
        refusal: TailraceError | None = None
        for number, last in to_seal.items():
            while (found := self._log.streams.get(number)) is not None and found.sealed < last:
                if (conflict := self.dispatcher.conflicts.refusal(found)) is not None:
                    refusal = conflict
                    break
                await self._step()
        through = self._heads.request_round()
        while self._heads.rounds < through:
            self._wake.set()
            await self._step()
        if refusal is not None:
            raise refusal

    async def _checkpoint_all(self) -> None:
        """Returns when everything that is durable now is in the hot store."""
        file = self._log.streams.file
        touched = self._log.streams.touched or self.meta.uncheckpointed(self._rotation.checkpointed_seq)
        if file > self._rotation.checkpointed_seq and touched:
            self._log.rotate_journal()
            while self._rotation.checkpointed_seq < file:
                await self._step()

    async def _step(self) -> None:
        """Waits for progress; raises if the object store is unavailable."""
        problem = self.health.fenced or self.health.failure
        if problem:
            raise TailraceError("unavailable", f"the object store is unavailable: {problem}")
        await wait_event(self._progress, TICK_S)
