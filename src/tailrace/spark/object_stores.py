"""Blocking access to object stores and segment objects, with one open store per URL and process.

Tasks of a Python worker share open stores and connections through `ProcessCache`. `SegmentStore` reads the
rows of segments by ranged reads on executors, without the server.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from threading import Lock
from typing import Any, Final, Generic, Protocol, TypeVar

from tailrace.common.caches import LruCache
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectConflictError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    open_object_store,
)
from tailrace.storage.segments.model import FOOTER_GUESS_BYTES
from tailrace.storage.segments.parquet import BINARY, INT64, integer_scalar, pa
from tailrace.storage.segments.reader import Footer, find_tail, pack_tail, read_tables


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Closable)


class ProcessCache(Generic[K, V]):
    """An LRU cache of open resources, shared by the tasks of a process. Closes what it evicts."""

    def __init__(self, make: Callable[[K], V], entries_max: int) -> None:
        self._make = make
        self._entries: LruCache[K, V] = LruCache(
            entries_max=entries_max, on_evict=lambda _, evicted: evicted.close()
        )
        self._lock = Lock()

    def get(self, key: K) -> V:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                found = self._make(key)
                self._entries.put(key, found)
            return found

    def close(self) -> None:
        with self._lock:
            for opened in self._entries.values():
                opened.close()
            self._entries.clear()


OBJECT_STORES_MAX: Final = 4


class BlockingObjectStore:
    """Blocking calls to one store. Never pickled: opened in the process that uses it."""

    def __init__(self, url: str) -> None:
        self._runner = BlockingRunner()
        self._objects: ObjectStore = open_object_store(url)

    def get(self, key: str) -> bytes:
        return self._runner.run(self._objects.get(key))[0]

    def create(self, key: str, data: bytes) -> bool:
        """Create the object. Returns False, and changes nothing, if it exists."""
        try:
            self._runner.run(self._objects.create(key, data))
        except ObjectExistsError:
            return False
        return True

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its ETag; None if it does not exist."""
        try:
            return self._runner.run(self._objects.get(key))
        except ObjectMissingError:
            return None

    def replace(self, key: str, data: bytes, etag: str | None) -> bool:
        """Replace the object if it still has this ETag. Returns False after a concurrent write."""
        try:
            self._runner.run(self._objects.replace(key, data, etag))
        except ObjectConflictError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        self._runner.run(self._objects.delete(keys))

    def close(self) -> None:
        self._runner.run(self._objects.close())
        self._runner.close()


_object_stores: ProcessCache[str, BlockingObjectStore] = ProcessCache(BlockingObjectStore, OBJECT_STORES_MAX)


def shared_object_store(url: str) -> BlockingObjectStore:
    return _object_stores.get(url)


SEGMENT_STORES_MAX = 4
BATCH_ROWS = 4096


class SegmentStore:
    """Blocking reads of segments in one store. One per process; never pickled."""

    def __init__(self, url: str) -> None:
        self._runner = BlockingRunner()
        self._objects = open_object_store(url)

    def close(self) -> None:
        self._runner.run(self._objects.close())
        self._runner.close()

    def footer(self, key: str, size: int) -> Footer:
        return self._runner.run(_read_footer(self._objects, key, size))

    def tables(
        self, key: str, footer: Footer, indices: Sequence[int], columns: Sequence[str], bytes_max: int
    ) -> Iterator[Any]:
        """Row groups as tables, fetched in ranges of about `bytes_max`."""
        at = 0
        while at < len(indices):
            reach = footer.reach(indices[at], bytes_max)
            run = [index for index in indices[at:] if index <= reach]
            start, stop = footer.group(run[0]).start, footer.group(run[-1]).stop
            raw = self._runner.run(self._objects.get_range(key, start, stop))
            yield from read_tables(footer, run, raw, columns)
            at += len(run)


SEGMENT_STORES: ProcessCache[str, SegmentStore] = ProcessCache(SegmentStore, SEGMENT_STORES_MAX)


def shared_segment_store(url: str) -> SegmentStore:
    """The store of this process: tasks share its threads and connections."""
    return SEGMENT_STORES.get(url)


async def row_group_ends(objects: ObjectStore, key: str, size: int) -> list[int]:
    """The last entry of each row group of a segment."""
    return [group.last for group in (await _read_footer(objects, key, size)).row_groups]


async def _read_footer(objects: ObjectStore, key: str, size: int) -> Footer:
    start = max(0, size - FOOTER_GUESS_BYTES)
    while True:
        found = find_tail(await objects.get_range(key, start, size), size)
        if isinstance(found, bytes):
            return Footer(pack_tail(found))
        start = found


def batch_tables(
    tables: Iterator[Any], after: int, through: int, epoch: int, columns: Sequence[str], bytes_max: int
) -> Iterator[Any]:
    """The rows of a range as bounded batches, each with `columns` and the epoch."""
    pending: list[Any] = []
    rows = size = 0
    for table in tables:
        table = _slice_entries(table, after, through)
        if not table.num_rows:
            continue
        if pending and (rows + table.num_rows > BATCH_ROWS or size + table.nbytes > bytes_max):
            yield _build_batch(pending, epoch, columns)
            pending, rows, size = [], 0, 0
        pending.append(table)
        rows += table.num_rows
        size += table.nbytes
    if pending:
        yield _build_batch(pending, epoch, columns)


def _slice_entries(table: Any, after: int, through: int) -> Any:
    """Entries are consecutive within a row group, so a range of them is a slice."""
    count: int = table.num_rows
    first: int = table.column("entry")[0].as_py()
    begin, end = max(0, after + 1 - first), min(count, through + 1 - first)
    return table.slice(begin, max(0, end - begin)) if begin or end < count else table


def _build_batch(tables: Sequence[Any], epoch: int, columns: Sequence[str]) -> Any:
    count = sum(table.num_rows for table in tables)
    arrays = [_concat_arrays([_column_array(table, name) for table in tables]) for name in columns]
    arrays.append(pa.repeat(integer_scalar(INT64, epoch), count))
    return pa.RecordBatch.from_arrays(arrays, names=[*columns, "epoch"])


def _column_array(table: Any, name: str) -> Any:
    if name == "key" and "key" not in table.column_names:
        return pa.nulls(table.num_rows, BINARY)
    column = table.column(name)
    if name == "key":
        column = column.cast(BINARY)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _concat_arrays(arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
