"""The synchronous client of the hub: the asynchronous one, on an event loop in a thread of its own.

So heartbeats are sent and addresses are renewed while the caller does something else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tailrace.client.handles import Closing
from tailrace.client.hub.aio import PAGE, AsyncHub
from tailrace.client.hub.model import (
    Ack,
    Actor,
    Broadcast,
    Committed,
    MailboxPage,
    Message,
    Published,
    Registration,
    Subscription,
    Timeouts,
)
from tailrace.client.hub.wire import SigningKey, lost
from tailrace.client.retry import Retries

T = TypeVar("T")


class Hub(Closing):
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
        self._run(self._hub.connect())

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._hub.close())
            self._run(self._loop.shutdown_asyncgens())
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

    def request(
        self,
        type: str,  # noqa: A002 - as the member is called
        payload: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """Any message of the protocol that is answered, for what has no method here."""
        return self._run(self._hub.request(type, payload, metadata=metadata, timeout_s=timeout_s))

    def refresh_token(self, token: str | None = None) -> int | None:
        """Go on under a new token. Returns when it expires, in milliseconds since 1970."""
        return self._run(self._hub.refresh_token(token))

    def register(self, address: str | None = None, **options: Any) -> Registration:
        """Take an address, and keep it. The options are those of `AsyncHub.register`."""
        return self._run(self._hub.register(address, **options))

    def unregister(self, address: str, *, delete_mailbox: bool = False) -> None:
        self._run(self._hub.unregister(address, delete_mailbox=delete_mailbox))

    def discover(self, pattern: str = "*", **options: Any) -> Iterator[Actor]:
        """All actors that match, sorted by address. The options are those of `AsyncHub.discover`."""
        return self._iterate(self._hub.discover(pattern, **options))

    def send(self, to: str, type: str, data: Any = None, **options: Any) -> Ack:  # noqa: A002
        """Tell somebody something. The options are those of `AsyncHub.send`, such as `ack`."""
        return self._run(self._hub.send(to, type, data, **options))

    def ask(self, to: str, type: str, data: Any = None, **options: Any) -> Any:  # noqa: A002
        """Ask somebody something, and wait for the reply."""
        return self._run(self._hub.ask(to, type, data, **options))

    def reply(self, message: Message, data: Any = None, *, final: bool = True) -> None:
        self._run(self._hub.reply(message, data, final=final))

    def reply_error(self, message: Message, code: str, text: str) -> None:
        self._run(self._hub.reply_error(message, code, text))

    def broadcast(self, type: str, data: Any = None, **options: Any) -> Broadcast:  # noqa: A002
        """Send to everybody who is registered now, or to those who match."""
        return self._run(self._hub.broadcast(type, data, **options))

    def messages(self) -> Iterator[Message]:
        """What comes for any address or subscription of ours, for as long as the client is open."""
        return self._iterate(self._hub.messages())

    def next_message(self, timeout_s: float | None = None) -> Message | None:
        """The next of them; None if none came in time, or none will come any more."""
        return self._run(self._hub.next_message(timeout_s))

    def subscribe(self, topic: str, **options: Any) -> Subscription:
        """Get what is published to a topic. The options are those of `AsyncHub.subscribe`."""
        return self._run(self._hub.subscribe(topic, **options))

    def unsubscribe(self, subscription: Subscription) -> None:
        self._run(self._hub.unsubscribe(subscription))

    def publish(self, topic: str, type: str, data: Any = None, **options: Any) -> Published:  # noqa: A002
        return self._run(self._hub.publish(topic, type, data, **options))

    def read_mailbox(
        self,
        address: str | None = None,
        *,
        offset: str = "committed",
        since: int | str | None = None,
        limit: int = PAGE,
        stream: str | None = None,
    ) -> MailboxPage:
        """A page of what is kept for an address. Reading moves nothing."""
        return self._run(
            self._hub.read_mailbox(address, offset=offset, since=since, limit=limit, stream=stream)
        )

    def commit_offset(self, offset: str, **options: Any) -> Committed:
        """Everything up to an offset was processed. The options are those of `AsyncHub.commit_offset`."""
        return self._run(self._hub.commit_offset(offset, **options))

    def commit(self, message: Message, *, wait: bool = True) -> None:
        """A kept message, and what was before it, was processed."""
        self._run(self._hub.commit(message, wait=wait))

    def follow(self, address: str | None = None, **options: Any) -> Iterator[Message]:
        """The messages of a durable address, each until it was processed; see `AsyncHub.follow`."""
        return self._iterate(self._hub.follow(address, **options))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise lost("the client is not connected", sent=False)
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()  # as for Ctrl-C: nobody waits for it any more
            raise

    def _iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        end = object()
        while (item := self._run(_next(source, end))) is not end:
            yield item  # pyright: ignore[reportReturnType]


async def _next(source: AsyncIterator[T], end: object) -> T | object:
    return await anext(source, end)
