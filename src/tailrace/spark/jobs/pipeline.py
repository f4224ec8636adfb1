"""The pipeline process: asks for the plan, runs build, merge and compaction jobs, follows its parent's pipe.

The pipe to a server that has started this pipeline: settings and tokens come in, its end is our end.

Nothing secret is on the command line. The first line is a JSON object with the settings below; each later one
may bring another token. When the server is gone the pipe closes, and this process ends at once: no step of
any job needs a clean exit.

The driving loop: events say look, the plan says what.

Nothing is remembered that could not be lost. What is to be done is asked of the server each time; what was
done counts when the server has listed it. A long poll on the plan takes the place of following
`__segments__`: an idle pipeline sends one request every few seconds and runs no Spark job.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Protocol

import msgspec

from tailrace.spark.index.segment_build import TASK_MEMORY_BYTES
from tailrace.spark.jobs.compaction import CompactionJob
from tailrace.spark.jobs.index_build import IndexBuildJob, SegmentBuild, is_session_alive, list_segment_builds
from tailrace.spark.jobs.index_merge import IndexMergeJob
from tailrace.spark.jobs.messages import CompactionWork, IndexMergeWork, PlanAnswer, RunningJob, StreamPlan
from tailrace.spark.jobs.pipeline_client import (
    HeartbeatThread,
    IndexPublisher,
    PipelineClient,
    PipelineStatus,
    send_publish_request,
    utc_timestamp,
)
from tailrace.spark.session import HEAP_BYTES, core_count, normalize_master, open_session
from tailrace.storage.segments.index_files import PublishRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SupervisorSettings(msgspec.Struct, frozen=True):
    """What the server tells its pipeline. What it leaves out has the default of the command."""

    endpoint: str
    token: str | None = None
    master: str | None = None
    store: str | None = None
    directory: str | None = None
    jobs: str | None = None
    heap_bytes: int | None = None
    task_memory_bytes: int | None = None
    batch_segments: int | None = None
    batch_bytes: int | None = None
    group_segments: int | None = None
    check_ms: int | None = None
    conf: str | None = None
    log_level: str = "info"
    log_format: str = "auto"


class _TokenRenewal(msgspec.Struct):
    token: str | None = None


class ParentPipe:
    """Holds the reading end. `orders` are there when it is made."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: BinaryIO = os.fdopen(descriptor, "rb")
        os.set_inheritable(descriptor, False)  # else the JVM would hold the pipe open
        self.orders = msgspec.json.decode(self._pipe.readline(), type=SupervisorSettings)
        self._token = self.orders.token
        threading.Thread(target=self._follow, name="leash", daemon=True).start()

    def token(self) -> str | None:
        return self._token

    def _follow(self) -> None:
        for line in self._pipe:
            renewed = msgspec.json.decode(line, type=_TokenRenewal)
            if renewed.token is not None:
                self._token = renewed.token
        os._exit(0)


logger = logging.getLogger("tailrace.pipeline")

JOBS: Final = ("companions", "merge", "compact")
PAUSE_S_FIRST: Final = 0.5
PAUSE_S_MAX: Final = 300.0
PAUSE_S_DONE: Final = 1.0  # until the server has surely noticed what was published
ATTEMPTS_MAX: Final = 4  # of one piece of work by `--once`
MERGES_MAX: Final = 16  # between two looks at the plan: segments come first


MergeOrCompaction = IndexMergeWork | CompactionWork


class PipelineOptions(NamedTuple):
    """How a pipeline runs. Results depend on none of these."""

    master: str = "local[*]"
    jobs: tuple[str, ...] = JOBS
    once: bool = False
    store: str | None = None  # where executors find the objects, if not where the server does
    directory: Path = Path("tailrace-data/pipeline")
    heap_bytes: int = HEAP_BYTES
    task_memory_bytes: int = TASK_MEMORY_BYTES
    batch_segments: int = 64
    batch_bytes: int = 1 << 30
    group_segments: int = 4
    check_ms: int = 1000
    ui: bool = False
    reference: bool = False
    conf: tuple[tuple[str, str], ...] = ()  # more settings of Spark


class ProgressListener(Protocol):
    """Told to whoever watches."""

    def starting(self, master: str) -> None: ...

    def batch(self, job: str, count: int) -> None: ...

    def advance(self, job: str, status: PipelineStatus) -> None:
        """One of the batch is through, whatever became of it."""
        ...

    def done(self, status: PipelineStatus) -> None: ...


class LoggingProgress:
    """Nobody watches."""

    def starting(self, master: str) -> None:
        logger.info("starting Spark at %s", master)

    def batch(self, job: str, count: int) -> None:
        logger.info("%s: %d", job, count)

    def advance(self, job: str, status: PipelineStatus) -> None:
        """Each publication is logged."""

    def done(self, status: PipelineStatus) -> None:
        """The heartbeat tells enough."""


class UnfinishedError(Exception):
    """Some work could not be done, however often it was tried."""


class Pipeline:
    """One process, one session, one server."""

    def __init__(
        self, owner: PipelineClient, options: PipelineOptions, progress: ProgressListener | None = None
    ) -> None:
        self._owner = owner
        self._options = options
        self._progress = progress or LoggingProgress()
        self._master = normalize_master(options.master)
        self._cores = core_count(self._master)
        self.status = PipelineStatus(self._master)
        self._stopping = threading.Event()
        self._spark: SparkSession | None = None
        self._tries = RetryTracker()

    def stop(self) -> None:
        """Finish what is running, publish it, take nothing new."""
        self._stopping.set()

    def run(self) -> None:
        """Until it is stopped; with `once`, until there is nothing left to do."""
        heartbeats = HeartbeatThread(self._owner, self.status, self.stop)
        heartbeats.start()
        try:
            self._loop()
        finally:
            self.status.to("stopping")
            heartbeats.stop()
            if self._spark is not None:
                self._spark.stop()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            answer = self._owner.plan(",".join(self._options.jobs), wait=True)
            batch = self._batch(answer)
            if batch.empty:
                if self._options.once and self._finished(answer):
                    return
                self.status.to("idle")
                self._stopping.wait(self._pause_s(answer))
                continue
            self._work(answer.store, batch)

    def _finished(self, answer: PlanAnswer) -> bool:
        """Whether a run that does everything once is over."""
        if not answer.streams:
            return True
        if self._tries.worst >= ATTEMPTS_MAX:
            raise UnfinishedError(f"some work could not be done in {ATTEMPTS_MAX} tries")
        return False

    def _pause_s(self, answer: PlanAnswer) -> float:
        """The plan has waited already if there was nothing; else for what was put off."""
        return self._options.check_ms / 1000 if answer.streams else 0.0

    def _batch(self, answer: PlanAnswer) -> WorkBatch:
        """As much as one job takes, streams in turn as the server lists them."""
        batch = WorkBatch([], [])
        taken: set[str] = set()
        raw_bytes = 0
        for stream in answer.streams:
            for work in stream.work:
                if isinstance(work, MergeOrCompaction):
                    name = _work_name(stream, work)
                    if len(batch.merges) < MERGES_MAX and self._tries.may(name, stream.plan.hash):
                        batch.merges.append((stream, work))
                    continue
                for group in _publication_groups(list_segment_builds(stream, work)):
                    if batch.segments and (
                        len(batch.segments) + len(group) > self._options.batch_segments
                        or raw_bytes >= self._options.batch_bytes
                    ):
                        return batch
                    may = all(self._tries.may(one.segment.object, one.plan.hash) for one in group)
                    if may and taken.isdisjoint(one.segment.object for one in group):
                        batch.segments.extend(group)
                        taken.update(one.segment.object for one in group)
                        raw_bytes += sum(one.segment.raw_bytes for one in group)
        return batch

    def _work(self, store: str, batch: WorkBatch) -> None:
        spark = self._session()
        store = self._options.store or store
        if batch.segments:
            self._companions(spark, store, batch.segments)
        if batch.merges and not self._stopping.is_set():
            self._merge(spark, store, batch.merges)
        self._progress.done(self.status)

    def _companions(self, spark: SparkSession, store: str, works: list[SegmentBuild]) -> None:
        self.status.to("running", _running_builds("companions", works))
        self._progress.batch("companions", len(works))
        job = IndexBuildJob(
            spark,
            store,
            cores=self._cores,
            memory_bytes=self._options.task_memory_bytes,
            reference=self._options.reference,
        )
        publisher = IndexPublisher(self._owner, self.status, self._options.group_segments)
        for work in works:
            self._tries.tried(work.segment.object, work.plan.hash)
        for outcome in job.run(works):
            publisher.add(outcome)
            self._progress.advance("companions", self.status)
        publisher.flush()
        put_off = {outcome.work.segment.object for outcome in publisher.put_off}
        for work in works:
            if work.segment.object not in put_off:
                self._tries.done(work.segment.object, work.plan.hash)

    def _merge(
        self, spark: SparkSession, store: str, merges: list[tuple[StreamPlan, MergeOrCompaction]]
    ) -> None:
        """As many at once as there are cores: most of a merge is one task."""
        self._progress.batch("merge", len(merges))
        self.status.to("running", [_running_merge(*one) for one in merges])
        merge, compact = IndexMergeJob(spark, store), CompactionJob(spark, store)

        def build(stream: StreamPlan, work: MergeOrCompaction) -> PublishRequest | None:
            if self._stopping.is_set():
                return None
            return merge.run(stream, work) if isinstance(work, IndexMergeWork) else compact.run(stream, work)

        with ThreadPoolExecutor(min(self._cores, len(merges)), "merge") as pool:
            futures: dict[Future[PublishRequest | None], tuple[StreamPlan, MergeOrCompaction]] = {}
            for stream, work in merges:
                self._tries.tried(_work_name(stream, work), stream.plan.hash)
                futures[pool.submit(build, stream, work)] = stream, work
            for future in as_completed(futures):
                self._publish_merge(spark, *futures[future], future)
                self._progress.advance("merge", self.status)

    def _publish_merge(
        self,
        spark: SparkSession,
        stream: StreamPlan,
        work: MergeOrCompaction,
        future: Future[PublishRequest | None],
    ) -> None:
        name = _work_name(stream, work)
        try:
            offer = future.result()
        except Exception as error:
            # Inputs that are gone, or a worker that died: the plan says whether it is still wanted.
            if not is_session_alive(spark):
                raise
            logger.warning("%s was not built: %s", name, type(error).__name__)
            self.status.failed(f"{name}: {type(error).__name__}")
            return
        if offer is not None:
            send_publish_request(self._owner, self.status, offer)
            self._tries.done(name, stream.plan.hash)

    def _session(self) -> SparkSession:
        """Started when there is something to do: a stream without work never costs a JVM."""
        if self._spark is None:
            options = self._options
            self._progress.starting(self._master)
            options.directory.mkdir(parents=True, exist_ok=True)
            self._spark = open_session(
                self._master,
                options.directory,
                heap_bytes=options.heap_bytes,
                ui=options.ui,
                extra=dict(options.conf),
            )
            self.status.spark_version = self._spark.version
        return self._spark


class WorkBatch(NamedTuple):
    segments: list[SegmentBuild]
    merges: list[tuple[StreamPlan, MergeOrCompaction]]

    @property
    def empty(self) -> bool:
        return not self.segments and not self.merges


def _publication_groups(works: list[SegmentBuild]) -> list[list[SegmentBuild]]:
    """Segments by themselves; those that take the place of something together stay together."""
    return [works] if works and works[0].together else [[one] for one in works]


def _running_merge(stream: StreamPlan, work: MergeOrCompaction) -> RunningJob:
    inputs = work.inputs if isinstance(work, IndexMergeWork) else work.segments
    return RunningJob(
        "merge" if isinstance(work, IndexMergeWork) else "compact",
        stream.stream,
        len(inputs),
        utc_timestamp(),
    )


def _work_name(stream: StreamPlan, work: MergeOrCompaction) -> str:
    if isinstance(work, CompactionWork):
        return f"compact {stream.stream_id} {work.first} {work.last}"
    return f"merge {stream.stream_id} {work.family} {work.level} {work.first} {work.last}"


class RetryTracker:
    """How often a piece of work was begun lately. One that comes back is left alone for a while.

    It comes back because the server has not looked again yet, or because it could not be done this time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[int, float]] = {}  # count, not before

    @property
    def worst(self) -> int:
        return max((count for count, _ in self._known.values()), default=0)

    def may(self, name: str, plan_hash: str) -> bool:
        found = self._known.get((name, plan_hash))
        return found is None or self._clock() >= found[1]

    def tried(self, name: str, plan_hash: str) -> None:
        count, _ = self._known.get((name, plan_hash), (0, 0.0))
        pause_s = min(PAUSE_S_FIRST * 4**count, PAUSE_S_MAX)
        self._known[name, plan_hash] = (count + 1, self._clock() + pause_s)
        self._forget()

    def done(self, name: str, plan_hash: str) -> None:
        """It was published just now: whoever lists it still has not looked since."""
        count, not_before = self._known.get((name, plan_hash), (0, 0.0))
        self._known[name, plan_hash] = (count, max(not_before, self._clock() + PAUSE_S_DONE))

    def _forget(self) -> None:
        """What has not come back for long was done."""
        before = self._clock() - PAUSE_S_MAX
        if len(self._known) > 10_000:
            self._known = {key: found for key, found in self._known.items() if found[1] >= before}


def _running_builds(job: str, works: list[SegmentBuild]) -> list[RunningJob]:
    counts: dict[str, int] = {}
    for work in works:
        counts[work.stream] = counts.get(work.stream, 0) + 1
    return [RunningJob(job, stream, count, utc_timestamp()) for stream, count in counts.items()]
