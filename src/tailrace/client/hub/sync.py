"""The synchronous client of the hub: the asynchronous one, on an event loop in a thread of its own.

So heartbeats are sent and addresses are renewed while the caller does something else. Every operation is said
once, in `AsyncHub`; here it is called, and waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tailrace.client.handles import ContextManaged
from tailrace.client.hub.aio import AsyncHub
from tailrace.client.hub.model import Message, Timeouts
from tailrace.client.hub.wire import SigningKey, connection_lost
from tailrace.client.retry import Retries

T = TypeVar("T")
P = ParamSpec("P")


class BlockingMethod(Generic[P, T]):
    """An operation of the asynchronous client, waited for."""

    def __init__(self, method: Callable[Concatenate[AsyncHub, P], Coroutine[Any, Any, T]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, hub: Hub, owner: type[Hub]) -> Callable[P, T]:
        def call(*args: P.args, **named: P.kwargs) -> T:
            return hub.run(lambda behind: self._method(behind, *args, **named))

        return call


class BlockingIterator(Generic[P, T]):
    """The same for what comes one after the other."""

    def __init__(self, method: Callable[Concatenate[AsyncHub, P], AsyncIterator[T]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, hub: Hub, owner: type[Hub]) -> Callable[P, Iterator[T]]:
        def call(*args: P.args, **named: P.kwargs) -> Iterator[T]:
            return hub.iterate(lambda behind: self._method(behind, *args, **named))

        return call


class Hub(ContextManaged):
    """An actor's place at the hub. Safe to share between threads. Use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        address: str | None = None,
        token: str | Callable[[], str] | None = None,
        capabilities: Sequence[str] = (),
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        signing_key: SigningKey | None = None,
        on_notice: Callable[[Message], None] | None = None,
    ) -> None:
        self._hub = AsyncHub(
            base_url,
            address=address,
            token=token,
            capabilities=capabilities,
            timeouts=timeouts,
            retries=retries,
            signing_key=signing_key,
            on_notice=on_notice,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tailrace-hub", daemon=True)

    def connect(self) -> None:
        self._thread.start()
        self.run(AsyncHub.connect)

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(AsyncHub.close)
            self.run(lambda _: self._loop.shutdown_asyncgens())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> Hub:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def identity(self) -> str:
        """Who the hub says we are."""
        return self._hub.identity

    @property
    def session_id(self) -> str:
        return self._hub.session_id

    @property
    def resumed(self) -> bool:
        """Whether the session is the one from before the last lost connection."""
        return self._hub.resumed

    request = BlockingMethod(AsyncHub.request)
    refresh_token = BlockingMethod(AsyncHub.refresh_token)
    register = BlockingMethod(AsyncHub.register)
    unregister = BlockingMethod(AsyncHub.unregister)
    discover = BlockingIterator(AsyncHub.discover)
    watch = BlockingIterator(AsyncHub.watch)
    send = BlockingMethod(AsyncHub.send)
    ask = BlockingMethod(AsyncHub.ask)
    reply = BlockingMethod(AsyncHub.reply)
    reply_error = BlockingMethod(AsyncHub.reply_error)
    broadcast = BlockingMethod(AsyncHub.broadcast)
    messages = BlockingIterator(AsyncHub.messages)
    next_message = BlockingMethod(AsyncHub.next_message)
    subscribe = BlockingMethod(AsyncHub.subscribe)
    unsubscribe = BlockingMethod(AsyncHub.unsubscribe)
    publish = BlockingMethod(AsyncHub.publish)
    read_mailbox = BlockingMethod(AsyncHub.read_mailbox)
    commit_offset = BlockingMethod(AsyncHub.commit_offset)
    commit = BlockingMethod(AsyncHub.commit)
    commit_each = BlockingMethod(AsyncHub.commit_each)
    follow = BlockingIterator(AsyncHub.follow)

    def run(self, work: Callable[[AsyncHub], Coroutine[Any, Any, T]]) -> T:
        """Waits for something that the asynchronous client behind this one does."""
        if not self._thread.is_alive():
            raise connection_lost("the client is not connected", sent=False)
        waiting = asyncio.run_coroutine_threadsafe(work(self._hub), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()  # as for Ctrl-C: nobody waits for it any more
            raise

    def iterate(self, begin: Callable[[AsyncHub], AsyncIterator[T]]) -> Iterator[T]:
        source, end = begin(self._hub), object()
        while (item := self.run(lambda _: _next_or_end(source, end))) is not end:
            yield item  # pyright: ignore[reportReturnType]


async def _next_or_end(source: AsyncIterator[T], end: object) -> T | object:
    return await anext(source, end)
