"""Stretches of immutable objects: fetched once for everybody who asks, and kept in the cache on disk.

The object store is opened by the first fetch, on a thread, because its library is large.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from tailrace.common.limits import Limits
from tailrace.storage.object_store.byte_budget import ByteBudget
from tailrace.storage.object_store.disk_cache import DiskCache, ObjectRange
from tailrace.storage.object_store.files import FileObjectStore
from tailrace.storage.object_store.objects import ObjectStore, open_object_store
from tailrace.storage.object_store.request_stats import RequestStats

logger = logging.getLogger("tailrace.store")

FETCH_BYTES_MAX = 32 << 20  # of fetches under way, or on their way into the cache

T = TypeVar("T")


class LoopTasks:
    """The loop's side tasks and the few threads they use, so that all of them can be ended together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self.loop = loop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cold")
        self._tasks: set[asyncio.Task[object]] = set()
        self._over = False

    async def on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await self.loop.run_in_executor(self._pool, function, *arguments)

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody did, nobody misses it


def fail_future(future: asyncio.Future[T], error: BaseException) -> None:
    """Pass an error on to whoever waits, which may be nobody any more."""
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
        future.exception()


class _PendingFetch(NamedTuple):
    """A ranged get that is under way, or whose bytes are on their way into the cache."""

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
        """Bytes that are asked for once, past the cache."""
        objects = await self.opened()
        with self.book.timed("get"):
            data = await objects.get_range(key, start, stop)
        self.fetches += 1
        self.book.note(key, "gets")
        self.fetched_bytes += len(data)
        return data

    def get_now(self, key: str, start: int, stop: int) -> bytes | None:
        """For threads: bytes that lie on this machine, without a way over the loop. None if they do not."""
        objects = self.objects
        if not isinstance(objects, FileObjectStore):
            return None
        begun = time.perf_counter()
        data = objects.get_range_now(key, start, stop)
        self._work.loop.call_soon_threadsafe(self._got, key, len(data), time.perf_counter() - begun)
        return data

    def _got(self, key: str, size: int, seconds: float) -> None:
        self.fetches += 1
        self.fetched_bytes += size
        self.book.note(key, "gets")
        self.book.note_time("get", seconds)

    def find(self, source: str, start: int, stop: int) -> ObjectRange | None:
        return None if self.cache is None else self.cache.find(source, start, stop)

    def is_near(self, wanted: ObjectRange) -> bool:
        """Whether the bytes are in the cache or on their way."""
        return self.find(*wanted) is not None or self._under_way(wanted) is not None

    async def fetch(self, key: str, wanted: ObjectRange) -> memoryview:
        """The wanted bytes, by a ranged get, or by the one that somebody has under way."""
        fetch = self._under_way(wanted) or self._start(key, wanted)
        data = await asyncio.shield(fetch.data)
        begin = wanted.start - fetch.part.start
        return memoryview(data)[begin : begin + wanted.size]

    def fetch_ahead(self, key: str, part: ObjectRange) -> None:
        """Get bytes into the cache that somebody will probably want; not while others wait for theirs."""
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
        """Bytes of a cached part; None if its file is gone."""
        assert self.cache is not None
        return await self._work.on_thread(self.cache.read, part, wanted.start, wanted.stop)

    async def drop(self, part: ObjectRange) -> None:
        """Take a part that cannot be used out of the cache."""
        assert self.cache is not None
        self.cache.forget(part)
        await self._work.on_thread(self.cache.remove, [part])

    async def forget(self, source: str) -> bool:
        """Take all parts of an object out of the cache; False if it has none."""
        held = [] if self.cache is None else self.cache.parts_of(source)
        for part in held:
            await self.drop(part)
        return bool(held)

    async def _open(self) -> ObjectStore:
        objects = await self._work.on_thread(lambda: open_object_store(self._url, limits=self._limits))
        if self.cache is not None:
            try:
                for part in await self._work.on_thread(self.cache.scan):
                    await self._remove(self.cache, self.cache.add(part))
            except OSError as error:
                logger.warning("the cache of segments cannot be used: %s", error)
                self.cache = None
        return objects

    async def _get(self, key: str, fetch: _PendingFetch) -> None:
        part = fetch.part
        try:
            async with self._budget.hold(part.size):
                data = await self.get(key, part.start, part.stop)
                fetch.data.set_result(data)
                if self.cache is not None:
                    await self._keep(self.cache, part, data)
        except BaseException as error:
            fail_future(fetch.data, error)
            raise
        finally:
            left = self._fetches[part.source]
            left.remove(fetch)
            if not left:
                del self._fetches[part.source]

    async def _keep(self, cache: DiskCache, part: ObjectRange, data: bytes) -> None:
        """A cache that cannot be written is slow, not wrong."""
        try:
            await self._work.on_thread(cache.write, part, data)
        except OSError as error:
            logger.warning("the cache of segments cannot be written: %s", error)
        else:
            await self._remove(cache, cache.add(part))

    async def _remove(self, cache: DiskCache, leaving: list[ObjectRange]) -> None:
        if leaving:
            await self._work.on_thread(cache.remove, leaving)
