"""The index build job (`companions`): builds the missing index files of segments, in parallel.

Threads on the driver take segments from a queue and run Spark jobs of one task each, so that results arrive
as they finish. A segment whose worker dies is found by bisection and retried alone, on the reference path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from tailrace.common.logging_setup import log_fields
from tailrace.spark.index.file_writer import WRITER
from tailrace.spark.index.segment_build import (
    BUILT,
    DESCRIPTOR_SCHEMA,
    FAILED,
    RESULT_DDL,
    TASK_MEMORY_BYTES,
    VERSION_MISMATCH,
    build_index_files,
)
from tailrace.spark.jobs.messages import IndexBuildWork, PlannedSegment, PlanRef, StreamPlan
from tailrace.storage.segments.parquet import pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("tailrace.pipeline")

BATCH_ROWS_SETTING: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Segments per task while many are queued: the overhead of a Spark job is a good part of building a segment.
TASK_SEGMENTS_MAX: Final = 8


class VersionMismatchError(Exception):
    """Workers run another version of the package than the driver."""


class SegmentBuild(NamedTuple):
    """One segment to build index files of, with its stream and plan."""

    stream: str
    stream_id: str
    plan: PlanRef
    segment: PlannedSegment
    replace: tuple[str, ...] = ()  # objects that the group of segments replaces
    publish_group_size: int = 0  # number of segments that must be published in one request; 0: any

    @property
    def families(self) -> tuple[str, ...]:
        missing = self.segment.families
        return self.plan.families if missing is None else missing


class StoredIndexFile(NamedTuple):
    """An index file in the object store that is not published yet."""

    family: str
    object: str
    rows: int
    bytes: int
    sha256: str
    stats: dict[str, int]
    seconds: float


class SegmentBuildResult(NamedTuple):
    """The result of one segment. With status `built`, all its families are there."""

    work: SegmentBuild
    files: tuple[StoredIndexFile, ...]
    status: str
    error: str


def list_segment_builds(plan: StreamPlan, work: IndexBuildWork) -> list[SegmentBuild]:
    group_size = len(work.segments) if work.replace else 0
    return [
        SegmentBuild(plan.stream, plan.stream_id, plan.plan, segment, work.replace, group_size)
        for segment in work.segments
    ]


class SegmentQueue:
    """Hands out segments in order, a few at a time; the last ones singly, to keep all cores busy."""

    def __init__(self, works: Sequence[SegmentBuild], cores: int) -> None:
        self._works = works
        self._cores = cores
        self._at = 0
        self._lock = Lock()

    def take_batch(self) -> Sequence[SegmentBuild]:
        """The next segments; empty if there are none left."""
        with self._lock:
            share = -(-(len(self._works) - self._at) // (2 * self._cores))
            batch = self._works[self._at : self._at + min(TASK_SEGMENTS_MAX, share)]
            self._at += len(batch)
            return batch

    def stop(self) -> None:
        """Discard the remaining segments."""
        with self._lock:
            self._at = len(self._works)


class IndexBuildJob:
    """Builds batches of segments. One that kills its worker is found by bisection and retried alone."""

    def __init__(
        self,
        spark: SparkSession,
        store: str,
        *,
        cores: int,
        memory_bytes: int = TASK_MEMORY_BYTES,
        reference: bool = False,
    ) -> None:
        self._spark = spark
        self._store = store
        self._cores = cores
        self._memory_bytes = memory_bytes
        self._reference = reference

    def run(self, works: Sequence[SegmentBuild]) -> Iterator[SegmentBuildResult]:
        """A result for every segment, in the order in which they finish."""
        yield from self._run(works, self._memory_bytes, self._reference, alone=False)

    def _run(
        self, works: Sequence[SegmentBuild], memory_bytes: int, reference: bool, *, alone: bool
    ) -> Iterator[SegmentBuildResult]:
        waiting = {work.segment.object: work for work in works}
        try:
            for outcome in self._run_parallel(works, memory_bytes, reference):
                del waiting[outcome.work.segment.object]
                if outcome.status == FAILED and not alone:
                    yield from self._retry_alone(outcome.work)
                else:
                    yield outcome
        except VersionMismatchError:
            raise
        except Exception as error:
            if not is_session_alive(self._spark):
                raise
            left = list(waiting.values())
            logger.warning(
                "segments not built",
                extra=log_fields(failed=len(left), segments=len(works), error=_error_name(error)),
            )
            if alone:
                yield SegmentBuildResult(left[0], (), FAILED, "worker process died")
            elif len(left) == 1:
                yield from self._retry_alone(left[0])
            else:
                middle = len(left) // 2
                for half in (left[:middle], left[middle:]):
                    yield from self._run(half, memory_bytes, reference, alone=False)

    def _retry_alone(self, work: SegmentBuild) -> Iterator[SegmentBuildResult]:
        """Retry by the reference path and with half the memory, which avoids most causes of failure."""
        logger.warning("retrying segment alone", extra=log_fields(object=work.segment.object))
        yield from self._run([work], self._memory_bytes // 2, True, alone=True)

    def _run_parallel(
        self, works: Sequence[SegmentBuild], memory_bytes: int, reference: bool
    ) -> Iterator[SegmentBuildResult]:
        """Run batches of a few segments each, as many in parallel as Spark has cores.

        One Spark job over all partitions would return its results in partition order. The error of a batch is
        raised after all other batches have finished.
        """
        rows = {work.segment.object: self._descriptor(work, memory_bytes, reference) for work in works}
        queue = SegmentQueue(works, self._cores)
        finished: SimpleQueue[Sequence[SegmentBuildResult] | Exception | None] = SimpleQueue()

        def run_batches() -> None:
            try:
                while batch := queue.take_batch():
                    finished.put(self._build_task(batch, [rows[work.segment.object] for work in batch]))
            except Exception as error:  # noqa: BLE001 - raised in the main thread
                finished.put(error)
            finally:
                finished.put(None)

        failed: Exception | None = None
        threads = min(self._cores + 1, len(works))  # one more batch is planned and waits for a core
        with _single_row_batches(self._spark), ThreadPoolExecutor(threads, "companions") as pool:
            try:
                for _ in range(threads):
                    pool.submit(run_batches)
                while threads:
                    found = finished.get()
                    if found is None:
                        threads -= 1
                    elif isinstance(found, VersionMismatchError):
                        raise found
                    elif isinstance(found, Exception):
                        failed = failed or found
                    else:
                        yield from found
            finally:
                queue.stop()
        if failed is not None:
            raise failed

    def _build_task(
        self, batch: Sequence[SegmentBuild], rows: list[dict[str, object]]
    ) -> list[SegmentBuildResult]:
        """One Spark task that builds the segments one after the other."""
        spark: Any = self._spark
        # As an Arrow table: plain rows would be pickled, and unpickled by extra workers.
        frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=DESCRIPTOR_SCHEMA))
        return list(
            _collect_results(frame.coalesce(1).mapInArrow(build_index_files, RESULT_DDL).collect(), batch)
        )

    def _descriptor(self, work: SegmentBuild, memory_bytes: int, reference: bool) -> dict[str, object]:
        segment = work.segment
        return {
            "object": segment.object,
            "store": self._store,
            "stream_id": work.stream_id,
            "first": segment.first,
            "last": segment.last,
            "rows": segment.rows,
            "sha256": segment.sha256,
            "plan_object": work.plan.object,
            "families": list(work.families),
            "memory_bytes": memory_bytes,
            "reference": reference,
            "writer": WRITER,
        }


def is_session_alive(spark: SparkSession) -> bool:
    """Whether the Spark session still works; without it there is no point in a retry."""
    try:
        spark.range(1).collect()
    except Exception:  # noqa: BLE001 - any error means that it does not work
        return False
    return True


def _collect_results(rows: Iterable[Any], works: Sequence[SegmentBuild]) -> Iterator[SegmentBuildResult]:
    """Group rows by segment: a result is complete when all families of its segment are there."""
    by_object = {work.segment.object: work for work in works}
    files: dict[str, list[StoredIndexFile]] = {}
    for row in rows:
        work = by_object[row["object"]]
        if row["status"] == VERSION_MISMATCH:
            raise VersionMismatchError(row["error"])
        if row["status"] != BUILT:
            yield SegmentBuildResult(work, (), row["status"], row["error"])
            continue
        found = files.setdefault(row["object"], [])
        found.append(_parse_file(row))
        if len(found) == len(work.families):
            yield SegmentBuildResult(work, tuple(files.pop(row["object"])), BUILT, "")


def _parse_file(row: Any) -> StoredIndexFile:
    stats = msgspec.json.decode(row["stats"], type=dict[str, int])
    return StoredIndexFile(
        row["family"], row["companion"], row["rows"], row["bytes"], row["sha256"], stats, row["seconds"]
    )


class _single_row_batches:  # noqa: N801 - reads as a statement
    """A task gets one descriptor at a time, so that it has one segment in memory."""

    def __init__(self, spark: SparkSession) -> None:
        self._conf = spark.conf
        self._previous = cast("str", spark.conf.get(BATCH_ROWS_SETTING))

    def __enter__(self) -> None:
        self._conf.set(BATCH_ROWS_SETTING, "1")

    def __exit__(self, *_: object) -> None:
        self._conf.set(BATCH_ROWS_SETTING, self._previous)


def _error_name(error: Exception) -> str:
    """The type of an error only: its message may be a Java stack trace and quote payloads."""
    return type(error).__name__
