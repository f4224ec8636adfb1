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
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Delete, Op, Published, Recorded, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import await_commit
from tailrace.storage.bucket_health import BUCKET_PAUSE_S_MIN, BucketHealth
from tailrace.storage.hot_store.tables import ColdTables
from tailrace.storage.manifest_recording import ManifestRecorder
from tailrace.storage.meta_objects import MetaRecorder
from tailrace.storage.object_store.request_stats import RequestStats
from tailrace.storage.ownership import BucketOwner
from tailrace.storage.retention_service import RetentionService
from tailrace.storage.seal_schedule import (
    AgingStreams,
    DueStreams,
    EarlyRotation,
    ForkDependencies,
    SealBacklog,
)
from tailrace.storage.sealer_process import (
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
    """Told once for each stream; afterwards metrics, /readyz and the stream's details show it."""

    def __init__(self, find: Callable[[int], Stream | None]) -> None:
        self._find = find
        self._names: dict[int, str] = {}
        self.resting: set[int] = set()  # those that are not tried again before their time

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, number: int) -> bool:
        return number in self._names

    def found(self, stream: Stream, why: str) -> None:
        self.resting.add(stream.number)
        if stream.number not in self._names:
            self._names[stream.number] = stream.name
            logger.error("stream %r is not sealed any more: %s. %s", stream.name, why, CONFLICT_ADVICE)

    def over(self, number: int) -> None:
        """The stream was sealed or removed, or somebody wants to know anew."""
        self._names.pop(number, None)
        self.resting.discard(number)

    def refusal(self, stream: Stream) -> TailraceError | None:
        """Why the stream cannot be sealed: it is in conflict, or the source of the fork that it is."""
        found: Stream | None = stream
        while found is not None and self._names:
            if found.number in self._names:
                problem = f"the object store has other entries of {found.name!r} than this server"
                return TailraceError("conflict", f"{problem}. {CONFLICT_ADVICE}")
            found = self._find(found.parent) if found.parent else None
        return None

    @property
    def state(self) -> str:
        """One line, for whoever asks whether the server is well; nothing if there are none."""
        if not self._names:
            return ""
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        named = next(iter(self._names.values()))
        return f"conflict: it has other entries than this server of stream {named!r}{more}"


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
    """The next streams that have entries in the hot store; fewer than a page mean that these are all."""
    found: list[UnsealedStream] = []
    with store.snapshot():
        for row in store.db.cold.hot_ranges(number, UNSEALED_PAGE_COUNT):
            stream = store.stream_by_number(row.number)
            sealed = row.last if stream is None else stream.sealed
            closed = stream is not None and stream.closed
            found.append(UnsealedStream(row.number, row.last, sealed, row.body_bytes, closed, row.oldest_ns))
    return found


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


TICK_S = 1.0
AGED_PER_TURN = 100
QUEUE_SOFT_MAX = 2000  # leftovers wait while so many streams are due
T = TypeVar("T")


class SealingService:
    """The scheduler of cold history."""

    def __init__(
        self, log: Log, settings: Settings, deployment: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._log = log
        self._loop = loop
        self._settings = settings
        url = settings.object_store_url
        owner = BucketOwner(url, deployment, settings.take_over, log)
        self.standing = BucketHealth(owner, log.limits, loop)
        self.standing.on_back = self._back
        self.standing.on_lost = self._lost
        self._due = DueStreams(log.limits)
        self.lineage = ForkDependencies(self._due, log.streams.get)
        self.pressure = SealBacklog(log)
        self.runs = SealDispatcher(self, log, self._due)
        self.sealer: SealerProcess | None = None
        self.book = RequestStats()
        self._threads = ThreadPoolExecutor(1, "leftovers")
        self._heads = ManifestRecorder(self)
        self.meta = MetaRecorder(self, log, settings.recovery_key)
        self.trims = RetentionService(self, log)
        self.sweeps = SweepSchedule(self, log)
        self.share: SweepShare = "all"  # of the sweep, if this is one of several workers
        self._turns = EarlyRotation(log, self._due, self.pressure, self._others_wait, loop.time())
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tick_s = min(TICK_S, log.limits.seal_interval_ms / 1000)
        self._looked_s = 0.0

    # -- life ------------------------------------------------------------------------------------------

    async def claim(self) -> None:
        """Before anything is written here; raises if the bucket is somebody else's, or newer than we are."""
        await self.standing.start()

    def start(self) -> None:
        self.pressure.start()
        self._log.on_checkpointed = self._checkpointed
        self.spawn(self._run())
        self.spawn(self._look_back())

    async def stop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.sealer is not None:
            await self.sealer.stop()
        await self.standing.owner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while not self.standing.fenced:
            try:
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now_s = self._loop.time()
            try:
                if now_s - self._looked_s >= self._tick_s:
                    self._looked_s = now_s
                    self._look(now_s)
                self._take_aged(now_s)
                if self.standing.usable(now_s):
                    self.runs.dispatch()
                    self._heads.dispatch()
                    self.trims.dispatch()
            except TailraceError as error:
                logger.warning("sealing waits: %s", error)
            except Exception:
                logger.exception("a step of sealing failed")  # the next one may not

    def _look(self, now_s: float) -> None:
        """What is looked at now and then, and not whenever a job ends."""
        self.pressure.look(self.standing.failure)
        self.trims.look(now_s)
        if self.standing.usable(now_s):
            self.sweeps.look(now_s)
        self._turns.look(now_s)
        if self.standing.is_confirmation_due(now_s):
            self.spawn(self._confirm())

    async def _confirm(self) -> None:
        try:
            await self.standing.confirm()
        finally:
            self._wake.set()

    def _back(self) -> None:
        """The object store can be used again."""
        self._heads.want()
        self.trims.want()

    def _lost(self) -> None:
        """The object store is somebody else's."""
        message = "another server has taken this one's object store over"
        self._log.set_shortage("fence", TailraceError("unavailable", message))
        self.notify()

    # -- what is due -----------------------------------------------------------------------------------

    def _checkpointed(self, seq: int, touched: list[Stream]) -> None:
        begun_s = self._turns.checkpointed(seq, self._loop.time())
        self._due.checkpointed(touched, begun_s)
        self.pressure.checkpointed(seq)
        self._heads.checkpointed(seq)
        self.trims.checkpointed(seq)
        self.notify()

    def _others_wait(self, now_s: float) -> bool:
        """Whether anything but entries waits for a checkpoint."""
        seq = self._turns.checkpointed_seq
        facts = self.meta.waits_for_checkpoint(seq, now_s)
        trimmed = self.pressure.untrimmed or self.trims.waits_for_checkpoint(seq)
        return facts or trimmed or self._heads.uncheckpointed

    def _take_aged(self, now_s: float) -> None:
        if len(self._due) > AGED_PER_TURN:
            return
        upto_s = float("inf") if self.pressure.hurry else now_s
        for number, last in self._due.aged(upto_s, AGED_PER_TURN):
            stream = self._log.streams.get(number)
            if stream is not None and not stream.removed and stream.sealed < last:
                self._due.add(number)

    async def _look_back(self, forced: dict[int, int] | None = None) -> None:
        """Finds what an earlier life of the server left in the hot store.

        With `forced` all of it is due, and is listed there: stream and last entry.
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
        """Whatever its age and size."""
        self._due.add(number)
        self._wake.set()

    # -- for those who work with it --------------------------------------------------------------------

    async def ask(
        self,
        kind: JobKind,
        numbers: list[int],
        sealed: int = 0,
        after: str = "",
        publication: ManifestPublication | None = None,
    ) -> SealerReport:
        """The sealer's report. One that failed has been logged, counted and followed by a pause."""
        if self.sealer is None:
            setup = SealerSetup(
                data_dir=str(self._log.directory),
                url=self._settings.object_store_url,
                deployment=self.standing.owner.deployment,
                fence=self.standing.owner.fence,
                limits=self._log.limits,
                share=self.share,
            )
            self.sealer = SealerProcess(setup, self._settings.recovery_key)
        report = await self.sealer.ask(kind, numbers, sealed, after, publication)
        usage = report.usage
        self.book.take(usage.by_stream, usage.heads, usage.timings, self._log.clock.now_ns())
        self.standing.learn(kind, numbers, report)
        return report

    async def journal(self, op: Sealed | Trim | Recorded | Published | Compacted) -> None:
        """Returns when the operation is durable."""
        await await_commit(partial(self._log.record_objects, op))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sealing stopped unexpectedly", exc_info=error)

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self._loop.call_later(seconds, work)

    def now_s(self) -> float:
        return self._loop.time()

    def notify(self) -> None:
        """Something happened that somebody may wait for."""
        self._wake.set()
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()

    def stored(self) -> ColdTables:
        """The hot store's book of objects, for whoever is on a thread."""
        return self._log.store.db.cold

    async def forks_among(self, numbers: list[int]) -> set[int]:
        """Those of the streams that are forks, as the hot store knows."""
        return await self.on_thread(lambda: self._log.store.db.trims.forks_among(numbers))

    def stream(self, number: int) -> Stream | None:
        return self._log.streams.get(number)

    @property
    def journal_file(self) -> int:
        return self._log.streams.file

    # -- for people ------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """How the object store is, in one line."""
        state = self.standing.state
        return self.runs.conflicts.state or state if state == "ok" else state

    @property
    def queued(self) -> int:
        return len(self._due) + len(self.runs.busy)

    @property
    def requests(self) -> Counter[str]:
        """Requests to the object store, by kind: the sealer's and our own."""
        made = Counter(self.standing.owner.requests)
        return made if self.sealer is None else made + self.sealer.requests

    def spooled_bytes(self) -> int:
        """Segments that are written and not yet uploaded."""
        try:
            return sum(entry.stat().st_size for entry in os.scandir(self._log.directory / "spool"))
        except OSError:
            return 0  # none was ever written, or one is being removed

    async def seal_now(self, name: str | None) -> None:
        """Returns when the stream, or everything, is on the object store as it is now."""
        await self._fold()
        wanted: dict[int, int] = {}
        if name is None:
            await self._look_back(wanted)
        else:
            stream = self._log.readable(name)
            wanted[stream.number] = stream.stored
            self.seal_soon(stream.number)
        for number in wanted:
            self.runs.retry_conflict(number)
        self._wake.set()
        refusal: TailraceError | None = None
        for number, last in wanted.items():
            while (found := self._log.streams.get(number)) is not None and found.sealed < last:
                if (held_up := self.runs.conflicts.refusal(found)) is not None:
                    refusal = held_up
                    break
                await self._step()
        through = self._heads.want()
        while self._heads.rounds < through:
            self._wake.set()
            await self._step()
        if refusal is not None:
            raise refusal

    async def _fold(self) -> None:
        """Everything that is durable now gets into the hot store."""
        file = self._log.streams.file
        touched = self._log.streams.touched or self.meta.uncheckpointed(self._turns.checkpointed_seq)
        if file > self._turns.checkpointed_seq and touched:
            self._log.rotate_journal()
            while self._turns.checkpointed_seq < file:
                await self._step()

    async def _step(self) -> None:
        """Waits for something to happen; raises if nothing can."""
        trouble = self.standing.fenced or self.standing.failure
        if trouble:
            raise TailraceError("unavailable", f"the object store cannot be used: {trouble}")
        try:
            async with asyncio.timeout(TICK_S):
                await self._progress.wait()
        except TimeoutError:
            pass
