"""What runs in a Python worker of Spark: descriptors of segments in, rows about built companions out.

`build_companions` is found by name in the installed package, never sent along. Payloads do not cross into
the JVM: a task fetches its segment from the object store and puts the files there itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tailrace.search.index_files.format import index_file_key
from tailrace.search.index_files.index_plan import BuildPlan, load_plan
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index.parquet import WRITER, BuiltIndexFile
from tailrace.spark.index.segment import BuildRequest, UnusablePlanError, build_segment, verify_built_file
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreError,
    open_object_store,
)
from tailrace.storage.segments.model import CorruptSegmentError, stream_prefix
from tailrace.storage.segments.parquet import pa

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

# How a segment ended.
BUILT: Final = "built"
MISSING: Final = "missing"  # the object is not there
UNAVAILABLE: Final = "unavailable"  # the store could not be used
UNDECODABLE: Final = "undecodable"  # it is not what was recorded
FAILED: Final = "failed"
VERSION_MISMATCH: Final = "other_version"

TaskRow = dict[str, Any]


class WorkerStores:
    """Object stores and plans of this process; a worker serves many tasks."""

    def __init__(self) -> None:
        self._steps = BlockingRunner()
        self._opened: dict[str, ObjectStore] = {}
        self._plans: OrderedDict[str, BuildPlan] = OrderedDict()

    def at(self, url: str) -> ObjectStore:
        store = self._opened.get(url)
        if store is None:
            store = self._opened[url] = open_object_store(url)
        return store

    def get(self, url: str, key: str) -> bytes:
        return self._steps.run(self.at(url).get(key))[0]

    def size(self, url: str, key: str) -> int:
        return self._steps.run(self.at(url).head(key)).size

    def range(self, url: str, key: str, start: int, stop: int) -> bytes:
        return self._steps.run(self.at(url).get_range(key, start, stop))

    def put(self, url: str, key: str, data: bytes | memoryview) -> None:
        """Names tell contents: an object that is there already is this one."""
        try:
            self._steps.run(self.at(url).create(key, data))
        except ObjectExistsError:
            pass

    def plan(self, url: str, key: str) -> BuildPlan:
        plan = self._plans.get(f"{url} {key}")
        if plan is None:
            plan = self._plans[f"{url} {key}"] = load_plan(self.get(url, key))
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        return plan


_worker_stores: WorkerStores | None = None


def worker_stores() -> WorkerStores:
    """Made in the worker itself: a loop does not survive a fork."""
    global _worker_stores
    if _worker_stores is None:
        _worker_stores = WorkerStores()
    return _worker_stores


class ObjectFile(io.RawIOBase):
    """An object as a file of which only those bytes are fetched that somebody reads."""

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
        found = worker_stores().range(self._url, self._key, self._at, stop)
        self._at = stop
        return found


def build_index_files(batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: each row describes a segment, whatever happens to it comes out as rows."""
    try:
        for batch in batches:
            for row in batch.to_pylist():
                yield pa.RecordBatch.from_pylist(build_described_segment(row), schema=RESULT_SCHEMA)
    finally:
        release_memory()


def release_memory() -> None:
    """Give memory back to the system: a worker serves many tasks, and should not grow with them."""
    pa.default_memory_pool().release_unused()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # another C library, which has its own ways


def build_described_segment(row: TaskRow) -> list[TaskRow]:
    """Builds and puts the companions of one segment. An error is a row, so that it stays with its segment."""
    started = time.monotonic()
    if row["writer"] != WRITER:
        message = f"the driver is {row['writer']}, a worker is {WRITER}"
        return [_status_row(row, VERSION_MISMATCH, message, started)]
    try:
        return _build_and_store(row, started)
    except CorruptSegmentError as error:
        return [_error_row(row, UNDECODABLE, error, started)]
    except ObjectMissingError as error:
        return [_error_row(row, MISSING, error, started)]
    except ObjectStoreError as error:
        return [_error_row(row, UNAVAILABLE, error, started)]
    except Exception as error:  # noqa: BLE001 - one segment must not take the others along
        return [_error_row(row, FAILED, error, started)]


def _build_and_store(row: TaskRow, started: float) -> list[TaskRow]:
    found = worker_stores()
    url, prefix = row["store"], stream_prefix(row["stream_id"])
    plan = found.plan(url, row["plan_object"])
    raw = found.get(url, row["object"])
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
        found.put(url, prefix + name, one.data)
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
    # A message may quote data; only our own errors are known not to.
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
