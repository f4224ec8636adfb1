"""Drives the asynchronous client with synchronous calls, so that one test proves both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from tailrace.client import AsyncClient, AsyncFollow, AsyncProducer, AsyncStream, Receipt

_WRAPPED = (AsyncClient, AsyncStream, AsyncFollow, AsyncProducer)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call on the loop, because objects of asyncio belong to it; await what can be awaited."""

        async def run() -> Any:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) and not isinstance(value, Receipt) else value

        return self.wait(run())

    def close(self) -> None:
        self.wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bridge:
    """Stands in for a synchronous object: every call waits for the asynchronous one behind it."""

    def __init__(self, loop: Loop, target: Any) -> None:
        self._loop = loop
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: self._wrap(self._loop.call(value, *args, **kwargs))

    def __enter__(self) -> Bridge:
        self._loop.wait(self._target.__aenter__())
        return self

    def __exit__(self, *details: Any) -> None:
        self._loop.wait(self._target.__aexit__(*details))

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._target.__aiter__())

    def _iterate(self, source: AsyncIterator[Any]) -> Iterator[Any]:
        end = object()
        while (item := self._loop.wait(_next(source, end))) is not end:
            yield item

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, _WRAPPED):
            return Bridge(self._loop, value)
        if isinstance(value, Receipt):
            return BridgedReceipt(self._loop, value)
        return self._iterate(value) if isinstance(value, AsyncIterator) else value


class BridgedReceipt:
    """A receipt that looks like the future of the synchronous producer."""

    def __init__(self, loop: Loop, receipt: Receipt) -> None:
        self._loop = loop
        self._receipt = receipt

    def result(self) -> Any:
        return self._loop.wait(_await(self._receipt))

    def done(self) -> bool:
        return self._receipt.done


async def _next(source: AsyncIterator[Any], end: object) -> Any:
    return await anext(source, end)


async def _await(receipt: Receipt) -> Any:
    return await receipt
