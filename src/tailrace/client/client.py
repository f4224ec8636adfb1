"""The sync and the async stream client: the same operations under the same names.

Both run the generators of `operations.py` and `follow.py` on their own transport. The sync client can be
shared between threads, except for a follower or an iterator.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx2

from tailrace.client import transport, wire
from tailrace.client.follow import Follower, Mode
from tailrace.client.model import AppendResult, Data, Page, StreamDescriptor, StreamInfo
from tailrace.client.operations import PageReader, StreamLister, StreamOperations
from tailrace.client.producer import AsyncProducer, Producer, ProducerOptions, ProducerTuning
from tailrace.client.transport import (
    CloseStream,
    Effect,
    NextChunk,
    OpenStream,
    Reply,
    Retries,
    SendRequest,
    Sleep,
    Steps,
)

TransportT = TypeVar("TransportT")


class StreamHandle(Generic[TransportT]):
    """One stream of the server, and the transport that reaches it."""

    __slots__ = ("_operations", "_transport")

    def __init__(self, transport: TransportT, operations: StreamOperations) -> None:
        self._transport = transport
        self._operations = operations

    @property
    def name(self) -> str:
        return self._operations.name

    @property
    def content_type(self) -> str | None:
        """The content type, if this handle knows it."""
        return self._operations.content_type


class FollowHandle(Generic[TransportT]):
    """A live reader with its own transport."""

    __slots__ = ("_follower", "_transport")

    def __init__(self, transport: TransportT, follower: Follower) -> None:
        self._transport = transport
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


T = TypeVar("T")


class SyncTransport:
    """Runs steps on blocking sockets. Holds at most one open response."""

    __slots__ = ("_chunks", "_http", "_response", "_settings")

    def __init__(self, http: httpx2.Client, settings: transport.TransportSettings) -> None:
        self._http = http
        self._settings = settings
        self._response: httpx2.Response | None = None
        self._chunks: Iterator[bytes] = iter(())

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    reply = self._perform(effect)
                except transport.CONNECTION_ERRORS as error:
                    effect = steps.throw(transport.broken_connection_from(error))
                else:
                    effect = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def clone(self) -> SyncTransport:
        """A separate transport for a follower, on the same connection pool."""
        return SyncTransport(self._http, self._settings)

    def close_stream(self) -> None:
        response, self._response = self._response, None
        self._chunks = iter(())
        if response is not None:
            response.close()

    def _perform(self, effect: Effect) -> Reply:
        match effect:
            case SendRequest():
                response = self._http.send(self._settings.build(self._http, effect.request))
                return transport.response_from(response, response.content)
            case Sleep():
                time.sleep(effect.seconds)
            case OpenStream():
                return self._open(effect.request)
            case NextChunk():
                return next(self._chunks, None)
            case CloseStream():
                self.close_stream()
        return None

    def _open(self, request: wire.HttpRequest) -> Reply:
        self.close_stream()
        response = self._http.send(self._settings.build(self._http, request), stream=True)
        self._response = response
        if response.status_code == 200:
            self._chunks = response.iter_bytes()
            return transport.response_from(response, b"")
        body = response.read()
        self.close_stream()
        return transport.response_from(response, body)


class Client(ContextManaged):
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
        self._transport = SyncTransport(self._http, settings)
        self._retries = settings.retries

    def stream(self, name: str, *, content_type: str | None = None) -> Stream:
        """A handle on a stream. Sends nothing; the stream need not exist."""
        return Stream(self._transport, StreamOperations(name, self._retries, content_type))

    def streams(
        self, prefix: str = "", *, after: str = "", page_size: int = 100, system: bool = False
    ) -> Iterator[StreamDescriptor]:
        """All streams whose name starts with the prefix, in byte order, page by page as needed."""
        lister = StreamLister(self._retries, prefix=prefix, after=after, limit=page_size, system=system)
        while (rows := self._transport.run(lister.advance())) is not None:
            yield from rows

    def close(self) -> None:
        if self._owned:
            self._http.close()


class Stream(StreamHandle[SyncTransport]):
    """One stream of the server."""

    __slots__ = ()

    def create(
        self,
        *,
        content_type: str | None = None,
        closed: bool = False,
        body: Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> StreamInfo:
        """Create the stream, or confirm that it exists with this configuration (`created` is False then)."""
        steps = self._operations.create(
            content_type=content_type, lifetime=lifetime, closed=closed, body=body
        )
        return self._transport.run(steps)

    def append(
        self,
        data: Data,
        *,
        key: str | None = None,
        seq: str | None = None,
        timestamp: wire.Time | None = None,
        close: bool = False,
    ) -> AppendResult:
        """Append; on a JSON stream a list is a batch. Returns after the commit.

        An append with an unknown outcome is not sent again: the error has `outcome_unknown` set.
        """
        return self._transport.run(
            self._operations.append(data, key=key, seq=seq, timestamp=timestamp, close=close)
        )

    def append_many(
        self,
        items: Iterable[Data],
        *,
        key: str | None = None,
        timestamp: wire.Time | None = None,
    ) -> AppendResult | None:
        """Append several items, in as few requests as possible on a JSON stream.

        An error has in `extra["appended"]` how many items had been committed before it.
        """
        return self._transport.run(self._operations.append_many(items, key=key, timestamp=timestamp))

    def close(self) -> AppendResult:
        """Close the stream permanently. Closing it again is allowed."""
        return self._transport.run(self._operations.close())

    def delete(self) -> None:
        self._transport.run(self._operations.delete())

    def head(self) -> StreamInfo:
        return self._transport.run(self._operations.head())

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
        steps = self._operations.fork(
            target, offset=offset, sub_offset=sub_offset, closed=closed, body=body, lifetime=lifetime
        )
        return Stream(self._transport, self._transport.run(steps))

    def read(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> Page:
        """One page from the offset on; without an offset from the start.

        `key` selects entries by routing key, `since` those from a time on, `filter` those that match.
        """
        return self._transport.run(self._operations.read(offset=offset, **options))

    def pages(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> Iterator[Page]:
        """The pages with content up to the tail."""
        pager = PageReader(self._operations, offset=offset, options=options)
        while (page := self._transport.run(pager.advance())) is not None:
            yield page

    def entries(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> Iterator[Any]:
        """The decoded messages up to the tail; on a byte stream, the bytes of each page."""
        for page in self.pages(offset, **options):
            yield from page.entries

    def follow(
        self,
        offset: str = "-1",
        *,
        mode: Mode = "long-poll",
        give_up_s: float | None = None,
        **options: Unpack[wire.ReadOptions],
    ) -> Follow:
        """Live pages, until the stream is closed.

        `offset` is `-1` (the start), `now`, or the `next_offset` of the last processed page. Broken
        connections are resumed, with `give_up_s` only for that long. Nothing is sent before the first page is
        requested. A `filter` requires the mode `long-poll`.
        """
        follower = Follower(
            self.name,
            offset=offset,
            mode=mode,
            options=options,
            give_up_s=give_up_s,
            retries=self._operations.retries,
        )
        return Follow(self._transport.clone(), follower)

    def producer(
        self,
        producer_id: str | None = None,
        epoch: int = 0,
        **tuning: Unpack[ProducerTuning],
    ) -> Producer:
        """A writer whose batches take effect exactly once. Without an id it uses a random one."""
        options = ProducerOptions(producer_id=producer_id, epoch=epoch, **tuning)
        return Producer(self._transport, self._operations, options)


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


class AsyncTransport:
    """Runs steps on an event loop. Holds at most one open response."""

    __slots__ = ("_chunks", "_http", "_response", "_settings")

    def __init__(self, http: httpx2.AsyncClient, settings: transport.TransportSettings) -> None:
        self._http = http
        self._settings = settings
        self._response: httpx2.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    reply = await self._perform(effect)
                except transport.CONNECTION_ERRORS as error:
                    effect = steps.throw(transport.broken_connection_from(error))
                else:
                    effect = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def clone(self) -> AsyncTransport:
        """A separate transport for a follower, on the same connection pool."""
        return AsyncTransport(self._http, self._settings)

    async def close_stream(self) -> None:
        response, self._response = self._response, None
        self._chunks = None
        if response is not None:
            await response.aclose()

    async def _perform(self, effect: Effect) -> Reply:
        match effect:
            case SendRequest():
                response = await self._http.send(self._settings.build(self._http, effect.request))
                return transport.response_from(response, response.content)
            case Sleep():
                await asyncio.sleep(effect.seconds)
            case OpenStream():
                return await self._open(effect.request)
            case NextChunk():
                return None if self._chunks is None else await anext(self._chunks, None)
            case CloseStream():
                await self.close_stream()
        return None

    async def _open(self, request: wire.HttpRequest) -> Reply:
        await self.close_stream()
        response = await self._http.send(self._settings.build(self._http, request), stream=True)
        self._response = response
        if response.status_code == 200:
            self._chunks = response.aiter_bytes()
            return transport.response_from(response, b"")
        body = await response.aread()
        await self.close_stream()
        return transport.response_from(response, body)


class AsyncClient(AsyncContextManaged):
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
        self._transport = AsyncTransport(self._http, settings)
        self._retries = settings.retries

    def stream(self, name: str, *, content_type: str | None = None) -> AsyncStream:
        """A handle on a stream. Sends nothing; the stream need not exist."""
        return AsyncStream(self._transport, StreamOperations(name, self._retries, content_type))

    async def streams(
        self, prefix: str = "", *, after: str = "", page_size: int = 100, system: bool = False
    ) -> AsyncIterator[StreamDescriptor]:
        """All streams whose name starts with the prefix, in byte order, page by page as needed."""
        lister = StreamLister(self._retries, prefix=prefix, after=after, limit=page_size, system=system)
        while (rows := await self._transport.run(lister.advance())) is not None:
            for row in rows:
                yield row

    async def close(self) -> None:
        if self._owned:
            await self._http.aclose()


class AsyncStream(StreamHandle[AsyncTransport]):
    """One stream of the server."""

    __slots__ = ()

    async def create(
        self,
        *,
        content_type: str | None = None,
        closed: bool = False,
        body: Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> StreamInfo:
        """Create the stream, or confirm that it exists with this configuration (`created` is False then)."""
        steps = self._operations.create(
            content_type=content_type, lifetime=lifetime, closed=closed, body=body
        )
        return await self._transport.run(steps)

    async def append(
        self,
        data: Data,
        *,
        key: str | None = None,
        seq: str | None = None,
        timestamp: wire.Time | None = None,
        close: bool = False,
    ) -> AppendResult:
        """Append; on a JSON stream a list is a batch. Returns after the commit.

        An append with an unknown outcome is not sent again: the error has `outcome_unknown` set.
        """
        return await self._transport.run(
            self._operations.append(data, key=key, seq=seq, timestamp=timestamp, close=close)
        )

    async def append_many(
        self,
        items: Iterable[Data],
        *,
        key: str | None = None,
        timestamp: wire.Time | None = None,
    ) -> AppendResult | None:
        """Append several items, in as few requests as possible on a JSON stream.

        An error has in `extra["appended"]` how many items had been committed before it.
        """
        return await self._transport.run(self._operations.append_many(items, key=key, timestamp=timestamp))

    async def close(self) -> AppendResult:
        """Close the stream permanently. Closing it again is allowed."""
        return await self._transport.run(self._operations.close())

    async def delete(self) -> None:
        await self._transport.run(self._operations.delete())

    async def head(self) -> StreamInfo:
        return await self._transport.run(self._operations.head())

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
        steps = self._operations.fork(
            target, offset=offset, sub_offset=sub_offset, closed=closed, body=body, lifetime=lifetime
        )
        return AsyncStream(self._transport, await self._transport.run(steps))

    async def read(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> Page:
        """One page from the offset on; without an offset from the start.

        `key` selects entries by routing key, `since` those from a time on, `filter` those that match.
        """
        return await self._transport.run(self._operations.read(offset=offset, **options))

    async def pages(
        self, offset: str | None = None, **options: Unpack[wire.ReadOptions]
    ) -> AsyncIterator[Page]:
        """The pages with content up to the tail."""
        pager = PageReader(self._operations, offset=offset, options=options)
        while (page := await self._transport.run(pager.advance())) is not None:
            yield page

    async def entries(
        self, offset: str | None = None, **options: Unpack[wire.ReadOptions]
    ) -> AsyncIterator[Any]:
        """The decoded messages up to the tail; on a byte stream, the bytes of each page."""
        async for page in self.pages(offset, **options):
            for entry in page.entries:
                yield entry

    def follow(
        self,
        offset: str = "-1",
        *,
        mode: Mode = "long-poll",
        give_up_s: float | None = None,
        **options: Unpack[wire.ReadOptions],
    ) -> AsyncFollow:
        """Live pages, until the stream is closed.

        `offset` is `-1` (the start), `now`, or the `next_offset` of the last processed page. Broken
        connections are resumed, with `give_up_s` only for that long. Nothing is sent before the first page is
        requested. A `filter` requires the mode `long-poll`.
        """
        follower = Follower(
            self.name,
            offset=offset,
            mode=mode,
            options=options,
            give_up_s=give_up_s,
            retries=self._operations.retries,
        )
        return AsyncFollow(self._transport.clone(), follower)

    def producer(
        self,
        producer_id: str | None = None,
        epoch: int = 0,
        **tuning: Unpack[ProducerTuning],
    ) -> AsyncProducer:
        """A writer whose batches take effect exactly once. Without an id it uses a random one."""
        options = ProducerOptions(producer_id=producer_id, epoch=epoch, **tuning)
        return AsyncProducer(self._transport, self._operations, options)


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
