"""The pipeline process: requests the plan, and runs index build, merge and compaction jobs.

The pipeline has no state of its own that could be lost. The server's plan says what to do, and work is done
when the server has published it. The plan is a long-poll: an idle pipeline sends one request every few
seconds and runs no Spark job.

A server that starts the pipeline passes settings and tokens through a pipe, so that no secret is on the
command line. The first line is a JSON object with the settings below; a later line may renew the token. When
the server exits, the pipe closes and this process exits at once: no step of any job needs a clean shutdown.
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

from tailrace.common.backoff import backoff_delay
from tailrace.common.logging_setup import log_fields
from tailrace.spark.index.segment_build import TASK_MEMORY_BYTES
from tailrace.spark.jobs.compaction import CompactionJob
from tailrace.spark.jobs.index_build import IndexBuildJob, SegmentBuild, is_session_alive, list_segment_builds
from tailrace.spark.jobs.index_merge import IndexMergeJob
from tailrace.spark.jobs.messages import CompactionWork, IndexMergeWork, PlanResponse, RunningJob, StreamPlan
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

logger = logging.getLogger("tailrace.pipeline")


class SupervisorSettings(msgspec.Struct, frozen=True):
    """Settings from the server. A missing one has the default of the command line."""

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
    """The reading end of the pipe from the server. Blocks until the settings are there."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: BinaryIO = os.fdopen(descriptor, "rb")
        os.set_inheritable(descriptor, False)  # else the JVM would inherit it
        self.settings = msgspec.json.decode(self._pipe.readline(), type=SupervisorSettings)
        self._token = self.settings.token
        threading.Thread(target=self._read_tokens, name="parent-pipe", daemon=True).start()

    def token(self) -> str | None:
        return self._token

    def _read_tokens(self) -> None:
        for line in self._pipe:
            renewed = msgspec.json.decode(line, type=_TokenRenewal)
            if renewed.token is not None:
                self._token = renewed.token
        os._exit(0)


JOBS: Final = ("companions", "merge", "compact")
PAUSE_S_FIRST: Final = 0.5
PAUSE_S_MAX: Final = 300.0
PAUSE_S_DONE: Final = 1.0  # after a publication, until the server's plan reflects it
ATTEMPTS_MAX: Final = 4  # per unit of work with `--once`
MERGES_MAX: Final = 16  # per plan, because new segments come first


MergeOrCompaction = IndexMergeWork | CompactionWork


class PipelineOptions(NamedTuple):
    """Options of a pipeline. None of them affects results."""

    master: str = "local[*]"
    jobs: tuple[str, ...] = JOBS
    once: bool = False
    store: str | None = None  # URL of the object store for executors, if not the server's
    directory: Path = Path("tailrace-data/pipeline")
    heap_bytes: int = HEAP_BYTES
    task_memory_bytes: int = TASK_MEMORY_BYTES
    batch_segments: int = 64
    batch_bytes: int = 1 << 30
    group_segments: int = 4
    check_ms: int = 1000
    ui: bool = False
    reference: bool = False
    conf: tuple[tuple[str, str], ...] = ()  # extra Spark settings


class ProgressListener(Protocol):
    """Receives the progress of a pipeline, for a log or a progress bar."""

    def starting(self, master: str) -> None: ...

    def batch(self, job: str, count: int) -> None: ...

    def advance(self, job: str, status: PipelineStatus) -> None:
        """One unit of the batch has finished or failed."""
        ...

    def done(self, status: PipelineStatus) -> None: ...


class LoggingProgress:
    def starting(self, master: str) -> None:
        logger.info("starting Spark", extra=log_fields(master=master))

    def batch(self, job: str, count: int) -> None:
        logger.info("starting batch", extra=log_fields(job=job, count=count))

    def advance(self, job: str, status: PipelineStatus) -> None:
        """Publications are logged when they are sent."""

    def done(self, status: PipelineStatus) -> None:
        """The heartbeat has the totals."""


class UnfinishedError(Exception):
    """Some work failed in all attempts."""


class Pipeline:
    """The driving loop, with one Spark session and one server."""

    def __init__(
        self, client: PipelineClient, options: PipelineOptions, progress: ProgressListener | None = None
    ) -> None:
        self._client = client
        self._options = options
        self._progress = progress or LoggingProgress()
        self._master = normalize_master(options.master)
        self._cores = core_count(self._master)
        self.status = PipelineStatus(self._master)
        self._stopping = threading.Event()
        self._spark: SparkSession | None = None
        self._retries = RetryTracker()

    def stop(self) -> None:
        """Finish and publish the current batch, and start no other."""
        self._stopping.set()

    def run(self) -> None:
        """Run until stopped; with `once`, until the plan is empty."""
        heartbeats = HeartbeatThread(self._client, self.status, self.stop)
        heartbeats.start()
        try:
            self._loop()
        finally:
            self.status.set_phase("stopping")
            heartbeats.stop()
            if self._spark is not None:
                self._spark.stop()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            plan = self._client.plan(",".join(self._options.jobs), wait=True)
            batch = self._batch(plan)
            if batch.empty:
                if self._options.once and self._finished(plan):
                    return
                self.status.set_phase("idle")
                self._stopping.wait(self._pause_s(plan))
                continue
            self._work(plan.store, batch)

    def _finished(self, plan: PlanResponse) -> bool:
        """Whether a run with `once` is complete."""
        if not plan.streams:
            return True
        if self._retries.attempts_max >= ATTEMPTS_MAX:
            raise UnfinishedError(f"some work failed in {ATTEMPTS_MAX} attempts; see the log")
        return False

    def _pause_s(self, plan: PlanResponse) -> float:
        """No pause after an empty plan, which is a long-poll; else until deferred work may be due."""
        return self._options.check_ms / 1000 if plan.streams else 0.0

    def _batch(self, plan: PlanResponse) -> WorkBatch:
        """The work of one batch, within its limits, in the order of the plan."""
        batch = WorkBatch([], [])
        taken: set[str] = set()
        raw_bytes = 0
        for stream in plan.streams:
            for work in stream.work:
                if isinstance(work, MergeOrCompaction):
                    name = _work_name(stream, work)
                    if len(batch.merges) < MERGES_MAX and self._retries.is_due(name, stream.plan.hash):
                        batch.merges.append((stream, work))
                    continue
                for group in _publication_groups(list_segment_builds(stream, work)):
                    if batch.segments and (
                        len(batch.segments) + len(group) > self._options.batch_segments
                        or raw_bytes >= self._options.batch_bytes
                    ):
                        return batch
                    due = all(self._retries.is_due(one.segment.object, one.plan.hash) for one in group)
                    if due and taken.isdisjoint(one.segment.object for one in group):
                        batch.segments.extend(group)
                        taken.update(one.segment.object for one in group)
                        raw_bytes += sum(one.segment.raw_bytes for one in group)
        return batch

    def _work(self, store: str, batch: WorkBatch) -> None:
        spark = self._session()
        store = self._options.store or store
        if batch.segments:
            self._build_indexes(spark, store, batch.segments)
        if batch.merges and not self._stopping.is_set():
            self._run_merges(spark, store, batch.merges)
        self._progress.done(self.status)

    def _build_indexes(self, spark: SparkSession, store: str, works: list[SegmentBuild]) -> None:
        self.status.set_phase("running", _running_builds("companions", works))
        self._progress.batch("companions", len(works))
        job = IndexBuildJob(
            spark,
            store,
            cores=self._cores,
            memory_bytes=self._options.task_memory_bytes,
            reference=self._options.reference,
        )
        publisher = IndexPublisher(self._client, self.status, self._options.group_segments)
        for work in works:
            self._retries.record_attempt(work.segment.object, work.plan.hash)
        for outcome in job.run(works):
            publisher.add(outcome)
            self._progress.advance("companions", self.status)
        publisher.flush()
        deferred = {outcome.work.segment.object for outcome in publisher.deferred}
        for work in works:
            if work.segment.object not in deferred:
                self._retries.record_success(work.segment.object, work.plan.hash)

    def _run_merges(
        self, spark: SparkSession, store: str, merges: list[tuple[StreamPlan, MergeOrCompaction]]
    ) -> None:
        """Run merges and compactions, as many in parallel as there are cores: each is one task."""
        self._progress.batch("merge", len(merges))
        self.status.set_phase("running", [_running_merge(*one) for one in merges])
        merge, compact = IndexMergeJob(spark, store), CompactionJob(spark, store)

        def build(stream: StreamPlan, work: MergeOrCompaction) -> PublishRequest | None:
            if self._stopping.is_set():
                return None
            return merge.run(stream, work) if isinstance(work, IndexMergeWork) else compact.run(stream, work)

        with ThreadPoolExecutor(min(self._cores, len(merges)), "merge") as pool:
            futures: dict[Future[PublishRequest | None], tuple[StreamPlan, MergeOrCompaction]] = {}
            for stream, work in merges:
                self._retries.record_attempt(_work_name(stream, work), stream.plan.hash)
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
            request = future.result()
        except Exception as error:
            # Deleted inputs, or a dead worker: the next plan has the work again if it is still needed.
            if not is_session_alive(spark):
                raise
            logger.warning("merge failed", extra=log_fields(work=name, error=type(error).__name__))
            self.status.failed(f"{name}: {type(error).__name__}")
            return
        if request is not None:
            send_publish_request(self._client, self.status, request)
            self._retries.record_success(name, stream.plan.hash)

    def _session(self) -> SparkSession:
        """The Spark session, started on first use: a pipeline without work starts no JVM."""
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
    """Single segments, or one group if all must be published in one request."""
    return [works] if works and works[0].publish_group_size else [[one] for one in works]


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
    """Back-off per unit of work.

    Work reappears in the plan because the server has not updated it yet, or because the last attempt failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[int, float]] = {}  # attempts, time of the next one

    @property
    def attempts_max(self) -> int:
        return max((count for count, _ in self._known.values()), default=0)

    def is_due(self, name: str, plan_hash: str) -> bool:
        found = self._known.get((name, plan_hash))
        return found is None or self._clock() >= found[1]

    def record_attempt(self, name: str, plan_hash: str) -> None:
        count, _ = self._known.get((name, plan_hash), (0, 0.0))
        pause_s = backoff_delay(count + 1, PAUSE_S_FIRST, PAUSE_S_MAX, factor=4)
        self._known[name, plan_hash] = (count + 1, self._clock() + pause_s)
        self._drop_old()

    def record_success(self, name: str, plan_hash: str) -> None:
        """Published just now: a plan that still has it is outdated."""
        count, not_before = self._known.get((name, plan_hash), (0, 0.0))
        self._known[name, plan_hash] = (count, max(not_before, self._clock() + PAUSE_S_DONE))

    def _drop_old(self) -> None:
        """Drop work that has not reappeared for PAUSE_S_MAX."""
        before = self._clock() - PAUSE_S_MAX
        if len(self._known) > 10_000:
            self._known = {key: found for key, found in self._known.items() if found[1] >= before}


def _running_builds(job: str, works: list[SegmentBuild]) -> list[RunningJob]:
    counts: dict[str, int] = {}
    for work in works:
        counts[work.stream] = counts.get(work.stream, 0) + 1
    return [RunningJob(job, stream, count, utc_timestamp()) for stream, count in counts.items()]
