"""Ranged reads of immutable objects through an LRU disk cache, bounded in bytes; fetches are shared.

The cache has one file per part, named after the object and the byte range. Objects never change, so a part is
never stale; a file truncated by a crash has the wrong size and is deleted. The index belongs to the loop
thread; files are read and written on other threads, and a missing file is a cache miss.

The object store is opened by the first fetch, on a thread, because its library is large.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from tailrace.common import private_files
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.storage.object_store.files import FileObjectStore
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.object_store.request_stats import RequestStats, stream_and_artifact


class ByteBudget:
    """Bounds bytes in use, first come, first served. A request above the limit is admitted alone."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def has_room(self, size: int) -> bool:
        """Whether so many bytes could be acquired without waiting."""
        return not self._waiting and self.held + size <= self.bytes_max

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncGenerator[None]:
        size = min(size, self.bytes_max)
        if not self.has_room(size):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(size)
                raise
        else:
            self.held += size
        try:
            yield
        finally:
            self._release(size)

    def _release(self, size: int) -> None:
        self.held -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self.held + wanted <= self.bytes_max:
                self._waiting.popleft()
                self.held += wanted
                turn.set_result(None)
            else:
                break


_PART_FILE_NAME = re.compile(r"([0-9a-f]{32})-(\d+)-(\d+)")
_UNFINISHED = ".new"
OWNER_DIGITS = 16


class ObjectRange(NamedTuple):
    """The bytes [start, stop) of one object. `source` is the hashed key of the object."""

    source: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cache_source(key: str) -> str:
    """The hash of a key. Half of it identifies the stream and kind of object, to count cached bytes."""
    stream_id, artifact = stream_and_artifact(key) or ("", "")
    return _owner_of(stream_id, artifact) + xxhash.xxh3_64_hexdigest(key.encode())


def _owner_of(stream_id: str, artifact: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{stream_id}/{artifact}".encode())


class DiskCache:
    def __init__(self, directory: Path, bytes_max: int) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.bytes = 0
        self.evictions = 0
        self._recent: OrderedDict[ObjectRange, None] = OrderedDict()
        self._by_source: dict[str, list[tuple[int, int]]] = {}
        self._by_owner: dict[str, int] = {}  # bytes

    def __len__(self) -> int:
        return len(self._recent)

    # -- files, on any thread ----------------------------------------------------------------------------

    def scan(self) -> list[ObjectRange]:
        """Parts from an earlier run, oldest first. Incomplete files are removed."""
        private_files.make_private_directory(self.directory)
        found: list[tuple[int, ObjectRange]] = []
        for entry in os.scandir(self.directory):
            status = entry.stat()
            named = _PART_FILE_NAME.fullmatch(entry.name)
            part = ObjectRange(named[1], int(named[2]), int(named[3])) if named else None
            if part is None or part.size != status.st_size:
                Path(entry.path).unlink(missing_ok=True)
            else:
                found.append((status.st_mtime_ns, part))
        return [part for _, part in sorted(found)]

    def write(self, part: ObjectRange, data: bytes | memoryview) -> None:
        """Store a part. It is not synced: what a power cut spoils is recognised when it is read."""
        path = self._path(part)
        unfinished = path.with_name(path.name + _UNFINISHED)
        unfinished.write_bytes(data)
        unfinished.rename(path)

    def read(self, part: ObjectRange, start: int, stop: int) -> bytes | None:
        """Bytes of the part, or None if the file is missing or incomplete."""
        try:
            with self._path(part).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != part.size:
                    return None
                data = os.pread(file.fileno(), stop - start, start - part.start)
        except OSError:
            return None
        return data if len(data) == stop - start else None

    def remove(self, parts: list[ObjectRange]) -> None:
        for part in parts:
            self._path(part).unlink(missing_ok=True)

    def _path(self, part: ObjectRange) -> Path:
        return self.directory / f"{part.source}-{part.start}-{part.stop}"

    # -- the index, on the loop's thread -----------------------------------------------------------------

    def find(self, source: str, start: int, stop: int) -> ObjectRange | None:
        """The part that contains these bytes; marks it as most recently used."""
        ranges = self._by_source.get(source)
        if not ranges:
            return None
        at = bisect_right(ranges, (start, 1 << 62)) - 1
        if at < 0 or ranges[at][1] < stop:
            return None
        part = ObjectRange(source, *ranges[at])
        self._recent.move_to_end(part)
        return part

    def add(self, part: ObjectRange) -> list[ObjectRange]:
        """Records a part that was written; returns the parts to evict, whose files are to be removed."""
        if part in self._recent:
            return []
        self._recent[part] = None
        insort(self._by_source.setdefault(part.source, []), (part.start, part.stop))
        self._count(part, part.size)
        leaving: list[ObjectRange] = []
        while self.bytes > self.bytes_max:
            oldest = next(iter(self._recent))
            self.forget(oldest)
            leaving.append(oldest)
            self.evictions += 1
        return leaving

    def parts_of(self, source: str) -> list[ObjectRange]:
        return [ObjectRange(source, *held) for held in self._by_source.get(source, ())]

    def forget(self, part: ObjectRange) -> None:
        if part not in self._recent:
            return
        del self._recent[part]
        self._count(part, -part.size)
        ranges = self._by_source[part.source]
        ranges.remove((part.start, part.stop))
        if not ranges:
            del self._by_source[part.source]

    def bytes_of(self, stream_id: str, artifact: str) -> int:
        """What one stream has in the cache of one kind of object."""
        return self._by_owner.get(_owner_of(stream_id, artifact), 0)

    def _count(self, part: ObjectRange, difference: int) -> None:
        self.bytes += difference
        owner = part.source[:OWNER_DIGITS]
        held = self._by_owner.get(owner, 0) + difference
        if held:
            self._by_owner[owner] = held
        else:
            del self._by_owner[owner]


logger = logging.getLogger("tailrace.store")

FETCH_BYTES_MAX = 32 << 20  # of running fetches, and bytes being written to the cache

T = TypeVar("T")


class LoopTasks(TaskSet):
    """The loop's side tasks and the few threads they use, so that all of them can be ended together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        super().__init__(_ignore_error)  # all callers of a failed task may have been cancelled
        self.loop = loop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cold")
        self._over = False

    async def on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await self.loop.run_in_executor(self._pool, function, *arguments)

    def wait(self, make: Callable[[], Coroutine[object, object, T]], timeout_s: float) -> T:
        """For a thread that has to have something done by the loop.

        Not for the loop's own thread, nor for those of this pool, which the work may need.
        """
        done: Future[T] = Future()

        def begin() -> None:
            if self._over:
                done.cancel()
            else:
                self.start(make()).add_done_callback(ended)

        def ended(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            raise CancelledError from error  # the loop is closed
        return done.result(timeout_s)

    async def end(self) -> None:
        self._over = True
        await self.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _ignore_error(_: BaseException) -> None:
    """A caller that still waits for the task gets the error from it."""


def fail_future(future: asyncio.Future[T], error: BaseException) -> None:
    """Passes an error on to waiting tasks, of which there may be none."""
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
        future.exception()


class _PendingFetch(NamedTuple):
    """A running ranged get, or one whose bytes are being written to the cache."""

    part: ObjectRange
    data: asyncio.Future[bytes]


class ObjectCache:
    def __init__(
        self, url: str, cache_dir: Path | None, cache_bytes: int, limits: Limits, work: LoopTasks
    ) -> None:
        self._url = url
        self._limits = limits
        self._work = work
        local = url.startswith("file:")  # the file itself is as near as a copy of it
        cached = cache_dir is not None and cache_bytes > 0 and not local
        self.cache = DiskCache(cache_dir, cache_bytes) if cached and cache_dir is not None else None
        self.book = RequestStats()
        self.fetches = 0
        self.fetched_bytes = 0
        self._budget = ByteBudget(FETCH_BYTES_MAX)
        self._opening: asyncio.Task[ObjectStore] | None = None
        self._fetches: dict[str, list[_PendingFetch]] = {}

    async def opened(self) -> ObjectStore:
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = self._work.start(self._open())
        return await asyncio.shield(self._opening)

    @property
    def objects(self) -> ObjectStore | None:
        """The object store, once something was read from it."""
        opening = self._opening
        done = opening is not None and opening.done() and not opening.cancelled()
        return opening.result() if opening is not None and done and opening.exception() is None else None

    @property
    def cached_bytes(self) -> int:
        return 0 if self.cache is None else self.cache.bytes

    async def close(self) -> None:
        if self.objects is not None:
            await self.objects.close()

    async def get(self, key: str, start: int, stop: int) -> bytes:
        """Bytes that are read once, bypassing the cache."""
        objects = await self.opened()
        with self.book.timed("get"):
            data = await objects.get_range(key, start, stop)
        self.fetches += 1
        self.book.record(key, "gets")
        self.fetched_bytes += len(data)
        return data

    def get_local(self, key: str, start: int, stop: int) -> bytes | None:
        """For threads: bytes that are on the local disk, without the loop. None if they are not."""
        objects = self.objects
        if not isinstance(objects, FileObjectStore):
            return None
        begun = time.perf_counter()
        data = objects.get_range_now(key, start, stop)
        self._work.loop.call_soon_threadsafe(self._record_get, key, len(data), time.perf_counter() - begun)
        return data

    def _record_get(self, key: str, size: int, seconds: float) -> None:
        self.fetches += 1
        self.fetched_bytes += size
        self.book.record(key, "gets")
        self.book.record_time("get", seconds)

    def find(self, source: str, start: int, stop: int) -> ObjectRange | None:
        return None if self.cache is None else self.cache.find(source, start, stop)

    def is_cached_or_pending(self, wanted: ObjectRange) -> bool:
        """Whether the bytes are in the cache or on their way."""
        return self.find(*wanted) is not None or self._under_way(wanted) is not None

    async def fetch(self, key: str, wanted: ObjectRange) -> memoryview:
        """The bytes, by a ranged get or by one that is already running."""
        fetch = self._under_way(wanted) or self._start(key, wanted)
        data = await asyncio.shield(fetch.data)
        begin = wanted.start - fetch.part.start
        return memoryview(data)[begin : begin + wanted.size]

    def fetch_ahead(self, key: str, part: ObjectRange) -> None:
        """Fetches bytes that will probably be read into the cache; not while other reads wait."""
        if self.cache is not None and self._budget.has_room(part.size):
            self._start(key, part)

    def _under_way(self, wanted: ObjectRange) -> _PendingFetch | None:
        for fetch in self._fetches.get(wanted.source, ()):
            if fetch.part.start <= wanted.start and wanted.stop <= fetch.part.stop:
                return fetch
        return None

    def _start(self, key: str, part: ObjectRange) -> _PendingFetch:
        fetch = _PendingFetch(part, self._work.loop.create_future())
        self._fetches.setdefault(part.source, []).append(fetch)
        self._work.start(self._get(key, fetch))
        return fetch

    async def read(self, part: ObjectRange, wanted: ObjectRange) -> bytes | None:
        """Bytes of a cached part; None if its file is missing."""
        assert self.cache is not None
        return await self._work.on_thread(self.cache.read, part, wanted.start, wanted.stop)

    async def evict(self, part: ObjectRange) -> None:
        """Removes an unusable part from the cache."""
        assert self.cache is not None
        self.cache.forget(part)
        await self._work.on_thread(self.cache.remove, [part])

    async def evict_object(self, source: str) -> bool:
        """Removes all parts of an object from the cache; False if it has none."""
        held = [] if self.cache is None else self.cache.parts_of(source)
        for part in held:
            await self.evict(part)
        return bool(held)

    async def _open(self) -> ObjectStore:
        objects = await self._work.on_thread(lambda: open_object_store(self._url, limits=self._limits))
        if self.cache is not None:
            try:
                for part in await self._work.on_thread(self.cache.scan):
                    await self._remove(self.cache, self.cache.add(part))
            except OSError as error:
                logger.warning("cannot read the segment cache, disabled", extra=log_fields(error=str(error)))
                self.cache = None
        return objects

    async def _get(self, key: str, fetch: _PendingFetch) -> None:
        part = fetch.part
        try:
            async with self._budget.hold(part.size):
                data = await self.get(key, part.start, part.stop)
                fetch.data.set_result(data)
                if self.cache is not None:
                    await self._store(self.cache, part, data)
        except BaseException as error:
            fail_future(fetch.data, error)
            raise
        finally:
            left = self._fetches[part.source]
            left.remove(fetch)
            if not left:
                del self._fetches[part.source]

    async def _store(self, cache: DiskCache, part: ObjectRange, data: bytes) -> None:
        """A cache that cannot be written is slow, not wrong."""
        try:
            await self._work.on_thread(cache.write, part, data)
        except OSError as error:
            logger.warning("cannot write to the segment cache", extra=log_fields(error=str(error)))
        else:
            await self._remove(cache, cache.add(part))

    async def _remove(self, cache: DiskCache, leaving: list[ObjectRange]) -> None:
        if leaving:
            await self._work.on_thread(cache.remove, leaving)
