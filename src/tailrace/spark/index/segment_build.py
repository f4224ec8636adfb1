"""Build of all index files of one segment in one pass, and the `mapInArrow` task that runs it on an executor.

`build_index_files` maps segment descriptors to rows about built index files. It is pickled by name: executors
need the installed package. Payloads never pass through the JVM: a task fetches its segment from the object
store and stores the index files there itself.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.format import (
    AGG,
    COL,
    EXACT,
    FTS,
    MBLK,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
    index_file_key,
)
from tailrace.search.index_files.index_plan import BuildPlan, load_plan
from tailrace.search.records import RecordView
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index import column_files
from tailrace.spark.index.aggregates import AggregateBuilder
from tailrace.spark.index.column_files import ColumnBuilder, MetricBlockBuilder
from tailrace.spark.index.exact import ExactBuilder
from tailrace.spark.index.file_writer import WRITER, BuiltIndexFile, IndexedRange
from tailrace.spark.index.full_text import FullTextBuilder
from tailrace.spark.index.routing_keys import RoutingKeyBuilder
from tailrace.spark.index.segment_batches import (
    SegmentBatch,
    SegmentReader,
    iter_row_group_runs,
    open_segment,
    read_rows,
)
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreError,
    open_object_store,
)
from tailrace.storage.segments.model import CorruptSegmentError, stream_prefix
from tailrace.storage.segments.parquet import pa, pq

TASK_MEMORY_BYTES: Final = 400 << 20

_KEY_FAMILIES: Final = frozenset({ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON})
_EXACT_MEMORY_DIVISOR: Final = 4  # of the budget


class IndexFileBuilder(Protocol):
    """Builds the index files of one family, or of two from the same data."""

    def add(self, batch: SegmentBatch) -> None: ...

    def finish(self) -> list[BuiltIndexFile]: ...


class BuildRequest(NamedTuple):
    """Which index files to build of one segment."""

    stream_id: str
    first: int
    last: int
    rows: int
    sha256: str
    families: frozenset[str]
    plan: BuildPlan
    directory: Path  # for temporary files
    memory_bytes: int = TASK_MEMORY_BYTES
    reference: bool = False  # compute every value by the reference function


class UnusablePlanError(Exception):
    """The plan is invalid, for example an `include` that does not parse. The message quotes no data."""


StepCallback = Callable[[str], None]


def build_segment(
    raw: bytes, request: BuildRequest, step: StepCallback = lambda _name: None
) -> list[BuiltIndexFile]:
    """The index files of a segment.

    Raises CorruptSegmentError if its checksum or row count differs or it cannot be read, and
    UnusablePlanError if the plan is invalid.
    """
    if hashlib.sha256(raw).hexdigest() != request.sha256:
        raise CorruptSegmentError("segment checksum mismatch")
    try:
        builders, reader = create_builders(request)
    except TailraceError as refusal:
        raise UnusablePlanError(refusal.message) from refusal
    with gc_disabled():
        rows = 0
        for batch in read_batches(raw, reader):
            for builder in builders:
                builder.add(batch)
            if not rows:
                step("mid_build")
            rows += batch.count
        if rows != request.rows:
            raise CorruptSegmentError(f"segment has {rows} rows, expected {request.rows}")
        return [built for builder in builders for built in builder.finish()]


@contextmanager
def gc_disabled() -> Generator[None]:
    """Pause the garbage collector: records have no cycles, and scanning thousands of them is slow."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def read_batches(raw: bytes, reader: SegmentReader | None) -> Iterator[SegmentBatch]:
    """The rows of a segment in batches; without a reader only entries and keys."""
    try:
        file = open_segment(raw)
        runs = list(iter_row_group_runs(file))
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegmentError(f"segment cannot be opened: {error}") from error
    for run in runs:
        try:
            rows = read_rows(file, run, payloads=reader is not None)
        except (pa.ArrowException, OSError) as error:
            raise CorruptSegmentError(f"segment cannot be decoded: {error}") from error
        yield SegmentBatch(rows, None) if reader is None else reader.batch(rows)


def create_builders(request: BuildRequest) -> tuple[list[IndexFileBuilder], SegmentReader | None]:
    """The builders of the requested families, and the reader of the fields that they need."""
    covers = IndexedRange(
        request.stream_id, request.first, request.last, request.rows, request.plan.plan.hash
    )
    families, members = request.families, request.plan.members
    builders: list[IndexFileBuilder] = []
    if families & _KEY_FAMILIES:
        builders.append(RoutingKeyBuilder(covers, families))
    if not families - _KEY_FAMILIES:
        return builders, None
    view = _search_view(request.plan)
    config, fields, pointers = view.config, set[str](), list[tuple[str, ...]]()
    if EXACT in families:
        names = members[EXACT]
        share = request.memory_bytes // _EXACT_MEMORY_DIVISOR
        builders.append(ExactBuilder(covers, config, names, share, request.directory))
        fields.update(names)
    if COL in families:
        names = column_fields(members[COL], view.primary)
        builders.append(ColumnBuilder(covers, config, names, view.primary))
        fields.update(names)
    if FTS in families:
        builders.append(FullTextBuilder(covers, config, members[FTS]))
        fields.update(members[FTS])
    if AGG in families:
        agg = AggregateBuilder(covers, config, members[AGG])
        builders.append(agg)
        fields |= agg.fields()
        pointers += agg.pointers()
    if MBLK in families:
        builders.append(MetricBlockBuilder(covers))
        pointers += column_files.METRIC_BLOCK_POINTERS
    return builders, SegmentReader(view, sorted(fields), pointers, reference=request.reference)


def column_fields(names: Iterable[str], primary: str | None) -> list[str]:
    """The columns of `col`: its fields, and the primary timestamp that searches sort by."""
    return sorted({*names, *([] if primary is None else [primary])})


def _search_view(plan: BuildPlan) -> RecordView:
    """The plan's view. Without a search configuration records have no fields, but may be metrics."""
    if plan.view is not None:
        return plan.view
    return RecordView(msgspec.structs.replace(plan.registry, search=SearchConfig(fields={})))


def verify_built_file(built: BuiltIndexFile) -> None:
    """Reopen a Parquet file that was just built, and check its family and rows."""
    if built.family != FTS:
        verify_index_file(built.family, built.data, built.rows)


def verify_index_file(family: str, data: bytes | memoryview, rows: int) -> None:
    """Check the family and rows of a Parquet file, which may be memory-mapped."""
    file: Any = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)))
    facts = file.metadata.metadata
    assert facts[b"tailrace.family"] == family.encode(), "footer has another family"
    assert family not in (COL, MBLK) or file.metadata.num_rows == rows, "one row per entry"


PLANS_MAX: Final = 16
ERROR_CHARACTERS_MAX: Final = 300

RESULT_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string(), nullable=False),
        pa.field("family", pa.string(), nullable=False),
        pa.field("companion", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("stats", pa.string(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
    ]
)
RESULT_DDL: Final = (
    "object string, family string, companion string, rows bigint, bytes bigint, sha256 string, stats string, "
    "seconds double, status string, error string"
)
DESCRIPTOR_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("store", pa.string()),
        pa.field("stream_id", pa.string()),
        pa.field("first", pa.int64()),
        pa.field("last", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("plan_object", pa.string()),
        pa.field("families", pa.list_(pa.string())),
        pa.field("memory_bytes", pa.int64()),
        pa.field("reference", pa.bool_()),
        pa.field("writer", pa.string()),
    ]
)

# Status of a segment.
BUILT: Final = "built"
MISSING: Final = "missing"  # the object does not exist
UNAVAILABLE: Final = "unavailable"  # the object store failed
UNDECODABLE: Final = "undecodable"  # the segment is corrupt
FAILED: Final = "failed"
VERSION_MISMATCH: Final = "other_version"

TaskRow = dict[str, Any]


class WorkerStores:
    """Object stores and plans of a Python worker, shared by its tasks."""

    def __init__(self) -> None:
        self._runner = BlockingRunner()
        self._opened: dict[str, ObjectStore] = {}
        self._plans: LruCache[str, BuildPlan] = LruCache(entries_max=PLANS_MAX)

    def open(self, url: str) -> ObjectStore:
        store = self._opened.get(url)
        if store is None:
            store = self._opened[url] = open_object_store(url)
        return store

    def get(self, url: str, key: str) -> bytes:
        return self._runner.run(self.open(url).get(key))[0]

    def size(self, url: str, key: str) -> int:
        return self._runner.run(self.open(url).head(key)).size

    def get_range(self, url: str, key: str, start: int, stop: int) -> bytes:
        return self._runner.run(self.open(url).get_range(key, start, stop))

    def put(self, url: str, key: str, data: bytes | memoryview) -> None:
        """Create the object. Keys contain the hash of the content: an existing object is the same."""
        try:
            self._runner.run(self.open(url).create(key, data))
        except ObjectExistsError:
            pass

    def plan(self, url: str, key: str) -> BuildPlan:
        plan = self._plans.get(f"{url} {key}")
        if plan is None:
            plan = load_plan(self.get(url, key))
            self._plans.put(f"{url} {key}", plan)
        return plan


_worker_stores: WorkerStores | None = None


def worker_stores() -> WorkerStores:
    """Created on first use in the worker: an event loop does not survive a fork."""
    global _worker_stores
    if _worker_stores is None:
        _worker_stores = WorkerStores()
    return _worker_stores


class ObjectFile(io.RawIOBase):
    """An object as a file: each read fetches its range."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._size = worker_stores().size(url, key)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        found = worker_stores().get_range(self._url, self._key, self._at, stop)
        self._at = stop
        return found


def build_index_files(batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: each input row describes a segment; built files and errors are output rows."""
    try:
        for batch in batches:
            for row in batch.to_pylist():
                yield pa.RecordBatch.from_pylist(build_described_segment(row), schema=RESULT_SCHEMA)
    finally:
        release_memory()


def release_memory() -> None:
    """Return memory to the system: a worker runs many tasks and must not grow with them."""
    pa.default_memory_pool().release_unused()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not glibc


def build_described_segment(row: TaskRow) -> list[TaskRow]:
    """Build and store the index files of one segment. An error becomes a row and does not fail the task."""
    started = time.monotonic()
    if row["writer"] != WRITER:
        message = f"driver runs {row['writer']}, worker runs {WRITER}; install the same version on both"
        return [_status_row(row, VERSION_MISMATCH, message, started)]
    try:
        return _build_and_store(row, started)
    except CorruptSegmentError as error:
        return [_error_row(row, UNDECODABLE, error, started)]
    except ObjectMissingError as error:
        return [_error_row(row, MISSING, error, started)]
    except ObjectStoreError as error:
        return [_error_row(row, UNAVAILABLE, error, started)]
    except Exception as error:  # noqa: BLE001 - one segment must not fail the others
        return [_error_row(row, FAILED, error, started)]


def _build_and_store(row: TaskRow, started: float) -> list[TaskRow]:
    stores = worker_stores()
    url, prefix = row["store"], stream_prefix(row["stream_id"])
    plan = stores.plan(url, row["plan_object"])
    raw = stores.get(url, row["object"])
    hit_failpoint("after_fetch", "worker")
    directory = Path(tempfile.mkdtemp(prefix="tailrace-build-"))
    try:
        request = BuildRequest(
            row["stream_id"],
            row["first"],
            row["last"],
            row["rows"],
            row["sha256"],
            frozenset(row["families"]),
            plan,
            directory,
            row["memory_bytes"],
            row["reference"],
        )
        built = build_segment(raw, request, lambda name: hit_failpoint(name, "worker"))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    hit_failpoint("after_write", "worker")
    rows: list[TaskRow] = []
    for one in built:
        verify_built_file(one)
        sha256 = hashlib.sha256(one.data).hexdigest()
        name = index_file_key(plan.plan.hash, one.family, request.first, request.last, sha256)
        stores.put(url, prefix + name, one.data)
        rows.append(_built_row(row, one, prefix + name, sha256, started))
    hit_failpoint("after_put", "worker")
    return rows


def _built_row(row: TaskRow, built: BuiltIndexFile, key: str, sha256: str, started: float) -> TaskRow:
    return {
        "object": row["object"],
        "family": built.family,
        "companion": key,
        "rows": built.rows,
        "bytes": len(built.data),
        "sha256": sha256,
        "stats": msgspec.json.encode(built.stats).decode(),
        "seconds": time.monotonic() - started,
        "status": BUILT,
        "error": "",
    }


def _error_row(row: TaskRow, status: str, error: Exception, started: float) -> TaskRow:
    # Messages of other errors may quote data.
    ours = isinstance(error, CorruptSegmentError | ObjectStoreError | UnusablePlanError)
    return _status_row(row, status, str(error) if ours else type(error).__name__, started)


def _status_row(row: TaskRow, status: str, message: str, started: float) -> TaskRow:
    return {
        "object": row["object"],
        "family": "",
        "companion": "",
        "rows": 0,
        "bytes": 0,
        "sha256": "",
        "stats": "{}",
        "seconds": time.monotonic() - started,
        "status": status,
        "error": message[:ERROR_CHARACTERS_MAX],
    }
