"""The sync and the async stream client: the same operations under the same names.

Both run the generators of `operations.py` and `follow.py` on their own transport. The sync client can be
shared between threads, except for a follower or an iterator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Generic, Self, Unpack

import httpx2

from tailrace.client import transport, wire
from tailrace.client.follow import Follower
from tailrace.client.methods import (
    Handle,
    TransportT,
    awaiting,
    awaiting_iterator,
    blocking,
    blocking_iterator,
    opening,
)
from tailrace.client.model import Data, Page
from tailrace.client.operations import ServerOperations, StreamOperations
from tailrace.client.producer import AsyncProducer, Producer, ProducerOptions, ProducerTuning
from tailrace.client.transport import AsyncTransport, Retries, SyncTransport


class ContextManaged(ABC):
    """Closed at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncContextManaged(ABC):
    """Closed at the end of an `async with` block."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class FollowHandle(Generic[TransportT]):
    """A live reader with its own transport."""

    __slots__ = ("_follower", "_transport")

    def __init__(self, transport: TransportT, follower: Follower) -> None:
        self._transport = transport.clone()
        self._follower = follower

    @property
    def offset(self) -> str:
        """The position after everything returned; it also moves past entries that a key excluded."""
        return self._follower.offset

    @property
    def up_to_date(self) -> bool:
        return self._follower.up_to_date

    @property
    def closed(self) -> bool:
        """Whether the stream is closed and was returned completely."""
        return self._follower.closed


class Follow(FollowHandle[SyncTransport], ContextManaged):
    """A live reader. Iterate over it; `offset` is its position."""

    __slots__ = ()

    def next_page(self) -> Page | None:
        """Wait for the next page with content; None when the stream is closed."""
        return self._transport.run(self._follower.advance())

    def __iter__(self) -> Iterator[Page]:
        # A generator, so that leaving a loop closes the connection.
        try:
            while (page := self.next_page()) is not None:
                yield page
        finally:
            self.close()

    def close(self) -> None:
        self._transport.close_stream()


class AsyncFollow(FollowHandle[AsyncTransport], AsyncContextManaged):
    """A live reader. Iterate over it; `offset` is its position."""

    __slots__ = ()

    async def next_page(self) -> Page | None:
        """Wait for the next page with content; None when the stream is closed."""
        return await self._transport.run(self._follower.advance())

    async def __aiter__(self) -> AsyncIterator[Page]:
        # A generator, so that leaving a loop closes the connection.
        try:
            while (page := await self.next_page()) is not None:
                yield page
        finally:
            await self.close()

    async def close(self) -> None:
        await self._transport.close_stream()


class StreamHandle(Handle[TransportT, StreamOperations]):
    """One stream of the server, and the transport that reaches it."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self.operations.name

    @property
    def content_type(self) -> str | None:
        """The content type, if this handle knows it."""
        return self.operations.content_type


class Stream(StreamHandle[SyncTransport]):
    """One stream of the server."""

    __slots__ = ()

    create = blocking(StreamOperations.create)
    append = blocking(StreamOperations.append)
    append_many = blocking(StreamOperations.append_many)
    close = blocking(StreamOperations.close)
    delete = blocking(StreamOperations.delete)
    head = blocking(StreamOperations.head)
    read = blocking(StreamOperations.read)
    pages = blocking_iterator(StreamOperations.pages)
    entries = blocking_iterator(StreamOperations.entries)
    follow = opening(StreamOperations.follow, Follow)

    def fork(
        self,
        target: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        closed: bool = False,
        body: Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> Stream:
        """Create `target` as a stream that begins with this one up to `offset` (by default, all of it)."""
        steps = self.operations.fork(
            target, offset=offset, sub_offset=sub_offset, closed=closed, body=body, **lifetime
        )
        return Stream(self.transport, self.transport.run(steps))

    def producer(
        self, producer_id: str | None = None, epoch: int = 0, **tuning: Unpack[ProducerTuning]
    ) -> Producer:
        """A writer whose batches take effect exactly once. Without an id it uses a random one."""
        options = ProducerOptions(producer_id=producer_id, epoch=epoch, **tuning)
        return Producer(self.transport, self.operations, options)


class AsyncStream(StreamHandle[AsyncTransport]):
    """One stream of the server."""

    __slots__ = ()

    create = awaiting(StreamOperations.create)
    append = awaiting(StreamOperations.append)
    append_many = awaiting(StreamOperations.append_many)
    close = awaiting(StreamOperations.close)
    delete = awaiting(StreamOperations.delete)
    head = awaiting(StreamOperations.head)
    read = awaiting(StreamOperations.read)
    pages = awaiting_iterator(StreamOperations.pages)
    entries = awaiting_iterator(StreamOperations.entries)
    follow = opening(StreamOperations.follow, AsyncFollow)

    async def fork(
        self,
        target: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        closed: bool = False,
        body: Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> AsyncStream:
        """Create `target` as a stream that begins with this one up to `offset` (by default, all of it)."""
        steps = self.operations.fork(
            target, offset=offset, sub_offset=sub_offset, closed=closed, body=body, **lifetime
        )
        return AsyncStream(self.transport, await self.transport.run(steps))

    def producer(
        self, producer_id: str | None = None, epoch: int = 0, **tuning: Unpack[ProducerTuning]
    ) -> AsyncProducer:
        """A writer whose batches take effect exactly once. Without an id it uses a random one."""
        options = ProducerOptions(producer_id=producer_id, epoch=epoch, **tuning)
        return AsyncProducer(self.transport, self.operations, options)


class Client(Handle[SyncTransport, ServerOperations], ContextManaged):
    """A connection pool to one server. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | Callable[[], str] | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        retries: Retries | None = None,
        http: httpx2.Client | None = None,
    ) -> None:
        settings = transport.make_settings(
            base_url, token=token, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, retries=retries
        )
        self._owned = http is None
        self._http = http or httpx2.Client(limits=transport.pool_limits())
        super().__init__(SyncTransport(self._http, settings), ServerOperations(settings.retries))

    def stream(self, name: str, *, content_type: str | None = None) -> Stream:
        """A handle on a stream. Sends nothing; the stream need not exist."""
        return Stream(self.transport, StreamOperations(name, self.operations.retries, content_type))

    streams = blocking_iterator(ServerOperations.streams)

    def close(self) -> None:
        if self._owned:
            self._http.close()


class AsyncClient(Handle[AsyncTransport, ServerOperations], AsyncContextManaged):
    """A connection pool to one server. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | Callable[[], str] | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        retries: Retries | None = None,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        settings = transport.make_settings(
            base_url, token=token, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, retries=retries
        )
        self._owned = http is None
        self._http = http or httpx2.AsyncClient(limits=transport.pool_limits())
        super().__init__(AsyncTransport(self._http, settings), ServerOperations(settings.retries))

    def stream(self, name: str, *, content_type: str | None = None) -> AsyncStream:
        """A handle on a stream. Sends nothing; the stream need not exist."""
        return AsyncStream(self.transport, StreamOperations(name, self.operations.retries, content_type))

    streams = awaiting_iterator(ServerOperations.streams)

    async def close(self) -> None:
        if self._owned:
            await self._http.aclose()
