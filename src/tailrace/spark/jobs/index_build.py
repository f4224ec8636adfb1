"""The companion job: segments that lack companions, spread over the cores of Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

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
# As long as much is waiting. Each turn is a job of Spark, which costs as much as a good part of a segment.
TASK_SEGMENTS_MAX: Final = 8


class VersionMismatchError(Exception):
    """Workers run another version of the package than the driver: what they build cannot be trusted."""


class SegmentBuild(NamedTuple):
    """One segment to be built, with the stream and the plan it belongs to."""

    stream: str
    stream_id: str
    plan: PlanRef
    segment: PlannedSegment
    replace: tuple[str, ...] = ()  # what it takes the place of, together with others
    together: int = 0  # how many these are: they are published at once

    @property
    def families(self) -> tuple[str, ...]:
        missing = self.segment.families
        return self.plan.families if missing is None else missing


class StoredIndexFile(NamedTuple):
    """A companion that lies in the store, not yet listed."""

    family: str
    object: str
    rows: int
    bytes: int
    sha256: str
    stats: dict[str, int]
    seconds: float


class SegmentBuildResult(NamedTuple):
    """How one segment ended. Without an error all of its families are there."""

    work: SegmentBuild
    files: tuple[StoredIndexFile, ...]
    status: str
    error: str


def list_segment_builds(plan: StreamPlan, work: IndexBuildWork) -> list[SegmentBuild]:
    together = len(work.segments) if work.replace else 0
    return [
        SegmentBuild(plan.stream, plan.stream_id, plan.plan, segment, work.replace, together)
        for segment in work.segments
    ]


class SegmentQueue:
    """Hands out segments in their order, a few at a time; the last ones alone, so that all end together."""

    def __init__(self, works: Sequence[SegmentBuild], cores: int) -> None:
        self._works = works
        self._cores = cores
        self._at = 0
        self._lock = Lock()

    def next(self) -> Sequence[SegmentBuild]:
        """Empty if there are none left."""
        with self._lock:
            share = -(-(len(self._works) - self._at) // (2 * self._cores))
            turn = self._works[self._at : self._at + min(TASK_SEGMENTS_MAX, share)]
            self._at += len(turn)
            return turn

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._at = len(self._works)


class IndexBuildJob:
    """Builds batches of segments. One that kills its worker is found by halving, and is built alone."""

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
        """An outcome for every segment, in the order in which they finish."""
        yield from self._run(works, self._memory_bytes, self._reference, alone=False)

    def _run(
        self, works: Sequence[SegmentBuild], memory_bytes: int, reference: bool, *, alone: bool
    ) -> Iterator[SegmentBuildResult]:
        waiting = {work.segment.object: work for work in works}
        try:
            for outcome in self._spread(works, memory_bytes, reference):
                del waiting[outcome.work.segment.object]
                if outcome.status == FAILED and not alone:
                    yield from self._once_more(outcome.work)
                else:
                    yield outcome
        except VersionMismatchError:
            raise
        except Exception as error:
            if not is_session_alive(self._spark):
                raise
            left = list(waiting.values())
            logger.warning("%d of %d segments were not built: %s", len(left), len(works), _error_name(error))
            if alone:
                yield SegmentBuildResult(left[0], (), FAILED, "the worker died")
            elif len(left) == 1:
                yield from self._once_more(left[0])
            else:
                middle = len(left) // 2
                for half in (left[:middle], left[middle:]):
                    yield from self._run(half, memory_bytes, reference, alone=False)

    def _once_more(self, work: SegmentBuild) -> Iterator[SegmentBuildResult]:
        """By the reference path and in half the memory: whatever was wrong, this is the careful way."""
        logger.warning("segment %s is built once more, alone", work.segment.object)
        yield from self._run([work], self._memory_bytes // 2, True, alone=True)

    def _spread(
        self, works: Sequence[SegmentBuild], memory_bytes: int, reference: bool
    ) -> Iterator[SegmentBuildResult]:
        """Turns of a few segments each, as many at once as Spark has cores.

        One job over all partitions would tell of its results in their order, and run two of them at a time.
        An error of a turn is raised when the others are done.
        """
        rows = {work.segment.object: self._descriptor(work, memory_bytes, reference) for work in works}
        turns = SegmentQueue(works, self._cores)
        finished: SimpleQueue[Sequence[SegmentBuildResult] | Exception | None] = SimpleQueue()

        def work_off() -> None:
            try:
                while turn := turns.next():
                    finished.put(self._built(turn, [rows[work.segment.object] for work in turn]))
            except Exception as error:  # noqa: BLE001 - it is raised by whoever waits
                finished.put(error)
            finally:
                finished.put(None)

        failed: Exception | None = None
        threads = min(self._cores + 1, len(works))  # one more turn is planned and waits for a core
        with _single_row_batches(self._spark), ThreadPoolExecutor(threads, "companions") as pool:
            try:
                for _ in range(threads):
                    pool.submit(work_off)
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
                turns.stop()
        if failed is not None:
            raise failed

    def _built(self, turn: Sequence[SegmentBuild], rows: list[dict[str, object]]) -> list[SegmentBuildResult]:
        """One task, that builds one segment after the other."""
        spark: Any = self._spark
        # As a table: rows would first be pickled, and unpickled by workers that do nothing else.
        frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=DESCRIPTOR_SCHEMA))
        return list(
            _collect_results(frame.coalesce(1).mapInArrow(build_index_files, RESULT_DDL).collect(), turn)
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
    """Whether Spark still is; without it there is nothing to try again with."""
    try:
        spark.range(1).collect()
    except Exception:  # noqa: BLE001 - whatever it says, it is gone
        return False
    return True


def _collect_results(rows: Iterable[Any], works: Sequence[SegmentBuild]) -> Iterator[SegmentBuildResult]:
    """Rows of one segment come together, and a segment is whole when all of its families are there."""
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
    """A task gets one descriptor at a time, so that it holds one segment."""

    def __init__(self, spark: SparkSession) -> None:
        self._conf = spark.conf
        self._before = cast("str", spark.conf.get(BATCH_ROWS_SETTING))

    def __enter__(self) -> None:
        self._conf.set(BATCH_ROWS_SETTING, "1")

    def __exit__(self, *_: object) -> None:
        self._conf.set(BATCH_ROWS_SETTING, self._before)


def _error_name(error: Exception) -> str:
    """The kind of an error: its text may be a page of Java, and quote what nobody should read."""
    return type(error).__name__
