"""Does the same to every stream of a bucket, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tailrace.storage.object_store.bucket import list_stream_ids

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

STREAMS_IN_PARALLEL = 8


async def for_each_stream(objects: ObjectStore, work: Callable[[str], Awaitable[None]]) -> None:
    """The first failure ends it."""
    gate = asyncio.Semaphore(STREAMS_IN_PARALLEL)

    async def one(stream_id: str) -> None:
        try:
            await work(stream_id)
        finally:
            gate.release()

    with first_failure():
        async with asyncio.TaskGroup() as tasks:
            async for stream_id in list_stream_ids(objects):
                await gate.acquire()
                tasks.create_task(one(stream_id))


@contextmanager
def first_failure() -> Generator[None]:
    """Of a group of failures, raise the first: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None


def _first_error(error: BaseException) -> BaseException:
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())  # only groups have them
    return _first_error(inner[0]) if inner else error
