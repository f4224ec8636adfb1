"""A thread that a source's connection belongs to: the driver blocks, the loop must not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SourceThread:
    """Does one thing after the other. A daemon: nothing that hangs keeps the server from stopping."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any] | None, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=f"source-{name}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """The result, when it is there; nothing is taken back that has begun."""
        settled: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((settled, lambda: function(*args, **kwargs)))
        return settled

    def finish(self, last: Callable[[], object]) -> None:
        """Does one more thing, whose outcome nobody waits for, and ends."""
        self._jobs.put((None, last))
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            settled, function = job
            if settled is None:
                with suppress(Exception):
                    function()
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - given to whoever waits
                self._tell(_fail, settled, error)
            else:
                self._tell(_succeed, settled, result)

    def _tell(self, settle: Callable[[asyncio.Future[Any], Any], None], *given: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle, *given)


def _succeed(settled: asyncio.Future[Any], result: Any) -> None:
    if not settled.done():
        settled.set_result(result)


def _fail(settled: asyncio.Future[Any], error: BaseException) -> None:
    if not settled.done():
        settled.set_exception(error)
