"""Background tasks that are kept until they end, calls shared by concurrent callers, and bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Hashable,
    Iterable,
)
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class TaskSet:
    """Background tasks. Each is referenced until it ends: the event loop itself references tasks only weakly.

    `on_error` gets the exception of a failed task. Without it, asyncio logs one that no caller retrieved.
    """

    __slots__ = ("_on_error", "_tasks")

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def running(self) -> bool:
        """Whether one has not ended yet. A task that has just ended may still be counted by `len`."""
        return any(not task.done() for task in self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if self._on_error is None else self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class SingleFlight(Generic[K, T]):
    """At most one running call per key: concurrent callers share it and its result."""

    __slots__ = ("_calls", "_tasks")

    def __init__(self, tasks: TaskSet | None = None) -> None:
        self._calls: dict[K, asyncio.Task[T]] = {}
        self._tasks = TaskSet() if tasks is None else tasks

    def get(self, key: K) -> asyncio.Task[T] | None:
        """The running call. Await it by `asyncio.shield`: others may wait for it as well."""
        return self._calls.get(key)

    async def run(self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the running call, which is started if there is none."""
        return await asyncio.shield(self._calls.get(key) or self.start(key, call()))

    def start(self, key: K, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call that later callers share, in place of a running one."""
        task = self._calls[key] = self._tasks.start(work)
        task.add_done_callback(lambda _: self._ended(key, task))
        return task

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        if self._calls.get(key) is task:
            del self._calls[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all callers may have been cancelled


async def wait_event(event: asyncio.Event, seconds: float | None) -> bool:
    """True if the event is set within the time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def run_all(
    items: Iterable[T] | AsyncIterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int
) -> None:
    """Process all items, some at once. The first failure cancels the others and is raised."""
    slots = asyncio.Semaphore(at_once)

    async def run(item: T) -> None:
        try:
            await work(item)
        finally:
            slots.release()

    with first_failure():
        async with asyncio.TaskGroup() as tasks:
            async for item in items if isinstance(items, AsyncIterable) else _iterate(items):
                await slots.acquire()
                tasks.create_task(run(item))


async def _iterate(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


@contextmanager
def first_failure() -> Generator[None]:
    """Raise only the first of a group of failures: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as errors:
        error = cast("BaseException", errors)
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseException", error.exceptions[0])
        raise error from None
