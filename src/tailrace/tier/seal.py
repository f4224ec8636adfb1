"""Keeps the sealer at work: which streams are due, what it reports, and what becomes of failures.

Everything here runs on the loop thread and in small steps. What reads the hot store page by page does so on a
thread; what writes to the object store is another process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from tailrace.errors import TailraceError
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Published, Recorded, Sealed, Trim
from tailrace.log.transaction import Transaction
from tailrace.settings import Settings
from tailrace.store.cold_tables import ColdTables
from tailrace.store.manifest_model import FencedError
from tailrace.store.object_book import ObjectBook
from tailrace.tier.due import Aging, DueStreams
from tailrace.tier.heads import Heads
from tailrace.tier.leftovers import PAGE_COUNT, leftovers_after
from tailrace.tier.lineage import Lineage
from tailrace.tier.meta_recording import MetaRecording
from tailrace.tier.owner import Owner
from tailrace.tier.pressure import Pressure
from tailrace.tier.retention import is_over
from tailrace.tier.seal_job import Kind, Publication, Report, SealerSetup
from tailrace.tier.sealer_process import SealerProcess
from tailrace.tier.sweeps import Sweeps
from tailrace.tier.trims import Trims

logger = logging.getLogger("tailrace.seal")

# Small streams cost round trips, large ones memory and room in the spool: one of them counts as four.
JOBS_MAX = 16
LARGE_JOB = 4
LARGE_JOB_BYTES = 1024 * 1024
TICK_S = 1.0
AGED_PER_TURN = 100
LARGE_PER_TURN = 1000
QUEUE_SOFT_MAX = 2000  # leftovers wait while so many streams are due
PAUSE_S_MIN = 0.5
TELL_AGAIN_S = 3600.0
TOLD_MAX = 1000
T = TypeVar("T")


class SealRun(NamedTuple):
    """One job for one stream, as it is told to whoever measures."""

    stream: str
    begun_ns: int
    segments: int = 0
    segment_bytes: int = 0
    error: str = ""


class Sealing:
    """The scheduler of cold history."""

    def __init__(
        self, log: Log, settings: Settings, deployment: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._log = log
        self._loop = loop
        self._settings = settings
        self._interval_s = log.limits.seal_interval_ms / 1000
        url = settings.object_store_url
        self._owner = Owner(url, deployment, settings.take_over, log.store, log.limits)
        self._due = DueStreams(log.limits)
        self.lineage = Lineage(self._due, log.streams.get)
        self.pressure = Pressure(log)
        self.sealer: SealerProcess | None = None
        self.book = ObjectBook()
        self._threads = ThreadPoolExecutor(1, "leftovers")
        self._heads = Heads(self)
        self.meta = MetaRecording(self, log, settings.recovery_key)
        self.trims = Trims(self, log)
        self.sweeps = Sweeps(self, log)
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs = 0
        self.busy: set[int] = set()
        self._checkpointed_seq = 0
        self._begun_s: dict[int, float] = {}  # when a journal file was first seen to hold something
        self._moved_on_s = self._confirmed_s = loop.time()
        self._looked_s = 0.0
        self._looked_at = 0  # how many streams of the present journal file were asked for their size
        self._large = False
        self._confirming = False
        self._owner_said = ""  # what was wrong when it was asked last
        self._paused_until_s = 0.0
        self._pause_s = PAUSE_S_MIN
        self._pause_s_max = log.limits.seal_pause_ms / 1000
        self.failure = ""  # why the object store cannot be used just now
        self.fenced = ""
        self._told_s: dict[str, float] = {}  # errors of single streams and when they were logged
        self.segments = self.segment_bytes = self.failures = 0
        self.on_run: Callable[[SealRun], None] | None = None

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claims the bucket; raises if it is somebody else's."""
        await self._owner.start()
        self.failure = self._owner_said = self._owner.failure
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
        await self._owner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self._loop.call_later(seconds, work)

    def now_s(self) -> float:
        return self._loop.time()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sealing stopped unexpectedly", exc_info=error)

    # -- what is due -----------------------------------------------------------------------------------

    def _checkpointed(self, seq: int, touched: list[Stream]) -> None:
        self._checkpointed_seq = seq
        begun_s = min((self._begun_s.pop(file) for file in list(self._begun_s) if file <= seq), default=None)
        self._due.checkpointed(touched, self._loop.time() if begun_s is None else begun_s)
        self.pressure.checkpointed(seq)
        self._heads.checkpointed(seq)
        self.trims.checkpointed(seq)
        self._notify()

    def _notify(self) -> None:
        """Something happened that somebody may wait for."""
        self._wake.set()
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()

    async def _look_back(self, forced: dict[int, int] | None = None) -> None:
        """Finds what an earlier life of the server left in the hot store.

        With `forced` all of it is due, and is listed there: stream and last entry.
        """
        number = 0
        now_ns, now_s = self._log.clock.now_ns(), self._loop.time()
        age_s = self._log.limits.seal_age_ms / 1000
        while True:
            rows = await self.on_thread(lambda after=number: leftovers_after(self._log.store, after))
            later = Aging(now_s + age_s)
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
            if len(rows) < PAGE_COUNT:
                return
            while len(self._due) > QUEUE_SOFT_MAX:
                await self._step()

    def _take_aged(self, now_s: float) -> None:
        hurry = self.pressure.hurry
        streams = self._log.streams
        if len(self._due) > AGED_PER_TURN:
            return
        for number, last in self._due.aged(now_s if not hurry else float("inf"), AGED_PER_TURN):
            stream = streams.get(number)
            if stream is not None and not stream.removed and stream.sealed < last:
                self._due.add(number)

    def _move_on_if_due(self, now_s: float) -> None:
        """What is due and only in the journal: the file being written is ended early, but not too often."""
        streams = self._log.streams
        pending = [file for file, touched in streams.touched.items() if touched]
        for file in pending:
            self._begun_s.setdefault(file, now_s)
        hurry = self.pressure.hurry and streams.memory_bytes > 0
        if now_s - self._moved_on_s < (min(TICK_S, self._interval_s) if hurry else self._interval_s):
            return
        if self._log.checkpoint_pending or self._log.refusal is not None:
            return
        age_s = self._log.limits.seal_age_ms / 1000
        aged = any(now_s - self._begun_s[file] >= age_s for file in pending)
        closed = streams.closed_file > self._checkpointed_seq and streams.closed_file in pending
        trimmed = self.pressure.untrimmed or self.trims.waits_for_checkpoint(self._checkpointed_seq)
        facts = self.meta.waits_for_checkpoint(self._checkpointed_seq, now_s)
        if aged or closed or hurry or self._large or trimmed or facts or self._heads.unfolded:
            self._moved_on_s = now_s
            self._looked_at, self._large = 0, False
            self._log.move_on()

    def _look_for_large(self, now_s: float) -> None:
        """Some streams at a time of those in the present journal file: is one due by what is in memory?"""
        file = self._log.streams.file
        touched = self._log.streams.touched.get(file, ())
        held_s = now_s - self._begun_s.get(file, now_s)
        if self._looked_at >= len(touched):
            self._looked_at = 0
        for stream in touched[self._looked_at : self._looked_at + LARGE_PER_TURN]:
            entries, size_bytes = stream.visible - stream.sealed, stream.size_bytes - stream.sealed_bytes
            self._large = (
                self._large
                or self._due.is_enough(entries, size_bytes, closed=False)
                or (entries > 0 and is_over(stream.lifetime, size_bytes, held_s))
            )
        self._looked_at += LARGE_PER_TURN

    # -- work ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        tick_s = min(TICK_S, self._interval_s)
        while not self.fenced:
            try:
                async with asyncio.timeout(tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now_s = self._loop.time()
            try:
                if now_s - self._looked_s >= tick_s:
                    self._looked_s = now_s
                    self._look(now_s)
                self._take_aged(now_s)
                if now_s >= self._paused_until_s and self._owner.fence and not self.fenced:
                    self._dispatch()
            except TailraceError as error:
                logger.warning("sealing waits: %s", error)
            except Exception:
                logger.exception("a step of sealing failed")  # the next one may not

    def _look(self, now_s: float) -> None:
        """What is looked at now and then, and not whenever a job ends."""
        self.pressure.look(self.failure)
        self.trims.look(now_s)
        if now_s >= self._paused_until_s and self._owner.fence:
            self.sweeps.look(now_s)
        self._look_for_large(now_s)
        self._move_on_if_due(now_s)
        self._confirm_if_due(now_s)

    def _confirm_if_due(self, now_s: float) -> None:
        wait_s = max(self._interval_s, TICK_S) if self._owner.fence else self._pause_s
        if not self._confirming and now_s - self._confirmed_s >= wait_s:
            self._confirming = True
            self.spawn(self._confirm_owner())

    async def _confirm_owner(self) -> None:
        """A store that is down answers late, and nobody waits for it."""
        try:
            await self._owner.confirm()
        except FencedError as error:
            self._give_up(str(error))
        except TailraceError as error:
            logger.error("the owner of the object store cannot be told: %s", error)
        else:
            said, self._owner_said = self._owner_said, self._owner.failure
            if self._owner_said and not self._owner.fence:
                self._pause_s = min(2 * self._pause_s, self._pause_s_max)
                self.failure = self._owner_said
            elif self.failure == said and not self._owner_said:
                self.failure = ""
        finally:
            self._confirming = False
            self._confirmed_s = self._loop.time()
            self._wake.set()

    def _dispatch(self) -> None:
        while self._jobs < JOBS_MAX and len(self._due):
            number = self._due.pop(self.busy)
            if number is None:
                break
            try:
                stream = self._log.streams.get(number)
            except TailraceError:
                self._due.add(number)
                raise
            if stream is None:
                continue
            large = stream.size_bytes - stream.sealed_bytes >= LARGE_JOB_BYTES
            self.busy.add(number)
            weight = LARGE_JOB if large else 1
            self._jobs += weight
            self.spawn(self._seal(number, weight))
        self._heads.dispatch()
        self.trims.dispatch()

    async def _seal(self, number: int, weight: int) -> None:
        try:
            again = await self._seal_once(number)
        except TailraceError as error:
            logger.warning("stream %d is not sealed yet: %s", number, error)
            again = False
            self._later(number, PAUSE_S_MIN)
        finally:
            self.busy.discard(number)
            self._jobs -= weight
        if again:
            self._due.add(number)
        self._notify()

    async def _seal_once(self, number: int) -> bool:
        """One job for one stream; True if another has to follow."""
        stream = self._log.streams.get(number)
        if stream is None or stream.removed or stream.stored <= stream.sealed:
            self.lineage.sealed(number)
            return False
        if self.lineage.wait(stream):
            return False
        sealed = stream.sealed
        begun_ns = self._log.clock.now_ns()
        report = await self.ask("seal", [number], sealed)
        if report.error:
            self._tell_run(SealRun(stream.name, begun_ns, error=report.error))
            self._later(number, 0.0 if report.trouble in ("unavailable", "ended") else self._pause_s_max)
            return False
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            return False  # its objects are deleted when the hot store has heard of it
        if stream.sealed != sealed:
            return True  # a failed commit took the journal back meanwhile
        now_ns = self._log.clock.now_ns()
        await self.journal(
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
        for segment in report.segments:
            self.segments += 1
            self.segment_bytes += segment.bytes
            self.pressure.sealed(segment.payload_bytes)
        size_bytes = sum(segment.bytes for segment in report.segments)
        self._tell_run(SealRun(stream.name, begun_ns, len(report.segments), size_bytes))
        self.lineage.sealed(number)
        return report.more or self._due.is_due(stream)

    def _tell_run(self, run: SealRun) -> None:
        if self.on_run is not None:
            self.on_run(run)

    def seal_soon(self, number: int) -> None:
        """Whatever its age and size."""
        self._due.add(number)
        self._wake.set()

    def _later(self, number: int, pause_s: float) -> None:
        """Again after a pause of its own; 0 where everything pauses."""
        self._loop.call_later(pause_s, self._due.add, number)

    async def ask(
        self,
        kind: Kind,
        numbers: list[int],
        sealed: int = 0,
        after: str = "",
        publication: Publication | None = None,
    ) -> Report:
        """The sealer's report. One that failed has been logged, counted and followed by a pause."""
        if self.sealer is None:
            setup = SealerSetup(
                data_dir=str(self._log.directory),
                url=self._settings.object_store_url,
                deployment=self._owner.deployment,
                fence=self._owner.fence,
                limits=self._log.limits,
            )
            self.sealer = SealerProcess(setup, self._settings.recovery_key)
        report = await self.sealer.ask(kind, numbers, sealed, after, publication)
        usage = report.usage
        self.book.take(usage.by_stream, usage.heads, usage.timings, self._log.clock.now_ns())
        if not report.error:
            self._pause_s = PAUSE_S_MIN
            if self.failure:
                logger.warning("the object store can be used again")
                self.failure = ""
                self._heads.want()
                self.trims.want()
            return report
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
        elif self._is_news(report.error):
            logger.error(
                "%s of streams %s failed: %s; trying again for ever", kind, numbers[:5], report.error
            )
        return report

    def _is_news(self, error: str) -> bool:
        """What is wrong with one stream stays wrong: it is told once an hour, not once a minute."""
        now_s = self._loop.time()
        if now_s - self._told_s.get(error, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return False
        if len(self._told_s) >= TOLD_MAX:
            self._told_s.clear()
        self._told_s[error] = now_s
        return True

    def _pause(self) -> None:
        """Longer each time; several jobs that fail at once are one failure."""
        now_s = self._loop.time()
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._pause_s_max)

    async def journal(self, op: Sealed | Trim | Recorded | Published | Compacted) -> None:
        """Returns when the operation is durable."""
        settled: asyncio.Future[None] = self._loop.create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if settled.done():
                return
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        self._log.record(op, reply)
        await settled

    def _give_up(self, reason: str) -> None:
        """Somebody else owns the bucket: what we would acknowledge from now on could never get there."""
        if not self.fenced:
            self.fenced = reason
            logger.critical(
                "this server no longer owns its object store and takes no more entries: %s", reason
            )
            message = "another server has taken this one's object store over"
            self._log.set_shortage("fence", TailraceError("unavailable", message))
            self._notify()

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    def stored(self) -> ColdTables:
        """The hot store's book of objects, for whoever is on a thread."""
        return self._log.store.db.cold

    async def forks_among(self, numbers: list[int]) -> set[int]:
        """Those of the streams that are forks, as the hot store knows."""
        return await self.on_thread(lambda: self._log.store.db.trims.forks_among(numbers))

    def stream(self, number: int) -> Stream | None:
        return self._log.streams.get(number)

    @property
    def owned(self) -> bool:
        """Whether the bucket is ours, as far as we know."""
        return bool(self._owner.fence) and not self.fenced

    @property
    def journal_file(self) -> int:
        return self._log.streams.file

    # -- for people ------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._due) + len(self.busy)

    @property
    def state(self) -> str:
        """The object store in one line, for whoever asks whether the server is well."""
        if self.fenced:
            return f"fenced: {self.fenced}"
        return f"failing: {self.failure}" if self.failure else "ok"

    @property
    def requests(self) -> Counter[str]:
        """Requests to the object store, by kind: the sealer's and our own."""
        made = Counter(self._owner.requests)
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
            self._due.add(stream.number)
            self._wake.set()
        for number, last in wanted.items():
            while (found := self._log.streams.get(number)) is not None and found.sealed < last:
                await self._step()
        through = self._heads.want()
        while self._heads.rounds < through:
            self._wake.set()
            await self._step()

    async def _fold(self) -> None:
        """Everything that is durable now gets into the hot store."""
        file = self._log.streams.file
        touched = self._log.streams.touched or self.meta.unfolded(self._checkpointed_seq)
        if file > self._checkpointed_seq and touched:
            self._log.move_on()
            while self._checkpointed_seq < file:
                await self._step()

    async def _step(self) -> None:
        """Waits for something to happen; raises if nothing can."""
        if self.fenced or self.failure:
            raise TailraceError(
                "unavailable", f"the object store cannot be used: {self.fenced or self.failure}"
            )
        try:
            async with asyncio.timeout(TICK_S):
                await self._progress.wait()
        except TimeoutError:
            pass
