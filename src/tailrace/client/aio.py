"""The asynchronous client: the same operations under the same names, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar, Unpack

import httpx2

from tailrace.client import transport, wire
from tailrace.client.aio_producer import AsyncProducer
from tailrace.client.encode import Data
from tailrace.client.follow import Follower, Mode
from tailrace.client.handles import AsyncContextManaged, FollowHandle, StreamHandle
from tailrace.client.model import AppendResult, Page, StreamDescriptor, StreamInfo
from tailrace.client.operations import PageReader, StreamLister, StreamOperations
from tailrace.client.producing import ProducerOptions, ProducerTuning
from tailrace.client.retry import Retries
from tailrace.client.steps import (
    CloseStream,
    Effect,
    NextChunk,
    OpenStream,
    Reply,
    SendRequest,
    Sleep,
    Steps,
)

T = TypeVar("T")


class AsyncTransport:
    """Carries out steps on an event loop. Holds at most one open answer."""

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

    def another(self) -> AsyncTransport:
        """A port of its own for a follower, on the same connection pool."""
        return AsyncTransport(self._http, self._settings)

    async def hang_up(self) -> None:
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
                await self.hang_up()
        return None

    async def _open(self, request: wire.HttpRequest) -> Reply:
        await self.hang_up()
        response = await self._http.send(self._settings.build(self._http, request), stream=True)
        self._response = response
        if response.status_code == 200:
            self._chunks = response.aiter_bytes()
            return transport.response_from(response, b"")
        body = await response.aread()
        await self.hang_up()
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
        self._port = AsyncTransport(self._http, settings)
        self._retries = settings.retries

    def stream(self, name: str, *, content_type: str | None = None) -> AsyncStream:
        """A handle on a stream. Sends nothing; the stream need not exist."""
        return AsyncStream(self._port, StreamOperations(name, self._retries, content_type))

    async def streams(
        self, prefix: str = "", *, after: str = "", page_size: int = 100, system: bool = False
    ) -> AsyncIterator[StreamDescriptor]:
        """All streams whose name starts with the prefix, in byte order, page by page as needed."""
        lister = StreamLister(self._retries, prefix=prefix, after=after, limit=page_size, system=system)
        while (rows := await self._port.run(lister.advance())) is not None:
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
        return await self._port.run(steps)

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

        It is not sent again when its fate is unknown: then the error says `outcome_unknown`.
        """
        return await self._port.run(
            self._operations.append(data, key=key, seq=seq, timestamp=timestamp, close=close)
        )

    async def append_many(
        self,
        items: Iterable[Data],
        *,
        key: str | None = None,
        timestamp: wire.Time | None = None,
    ) -> AppendResult | None:
        """Append item after item, in as few requests as possible on a JSON stream.

        An error carries in `extra["appended"]` how many items had been committed before it.
        """
        return await self._port.run(self._operations.append_many(items, key=key, timestamp=timestamp))

    async def close(self) -> AppendResult:
        """Close the stream for good. Closing it again is fine."""
        return await self._port.run(self._operations.close())

    async def delete(self) -> None:
        await self._port.run(self._operations.delete())

    async def head(self) -> StreamInfo:
        return await self._port.run(self._operations.head())

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
        return AsyncStream(self._port, await self._port.run(steps))

    async def read(self, offset: str | None = None, **narrow: Unpack[wire.ReadOptions]) -> Page:
        """One page from the offset on; from the start without one.

        `key` gives entries with a routing key, `since` those of a time or later, `filter` those that match.
        """
        return await self._port.run(self._operations.read(offset=offset, **narrow))

    async def pages(
        self, offset: str | None = None, **narrow: Unpack[wire.ReadOptions]
    ) -> AsyncIterator[Page]:
        """The pages with content up to the tail."""
        pager = PageReader(self._operations, offset=offset, narrow=narrow)
        while (page := await self._port.run(pager.advance())) is not None:
            yield page

    async def entries(
        self, offset: str | None = None, **narrow: Unpack[wire.ReadOptions]
    ) -> AsyncIterator[Any]:
        """The decoded messages up to the tail; on a byte stream, the bytes of each page."""
        async for page in self.pages(offset, **narrow):
            for entry in page.entries:
                yield entry

    def follow(
        self,
        offset: str = "-1",
        *,
        mode: Mode = "long-poll",
        give_up_s: float | None = None,
        **narrow: Unpack[wire.ReadOptions],
    ) -> AsyncFollow:
        """Pages as they come, for ever, or until the stream is closed.

        `offset` is `-1` (the start), `now`, or the `next_offset` of the last page that was processed. Broken
        connections are resumed; with `give_up_s` only for so long. Sends nothing before the first page. A
        `filter` needs the mode `long-poll`.
        """
        follower = Follower(
            self.name,
            offset=offset,
            mode=mode,
            narrow=narrow,
            give_up_s=give_up_s,
            retries=self._operations.retries,
        )
        return AsyncFollow(self._port.another(), follower)

    def producer(
        self,
        producer_id: str | None = None,
        epoch: int = 0,
        **tuning: Unpack[ProducerTuning],
    ) -> AsyncProducer:
        """A writer whose batches take effect exactly once. Without an id it gets one of its own."""
        options = ProducerOptions(producer_id=producer_id, epoch=epoch, **tuning)
        return AsyncProducer(self._port, self._operations, options)


class AsyncFollow(FollowHandle[AsyncTransport], AsyncContextManaged):
    """A reader that keeps up. Iterate over it; `offset` is where it stands."""

    __slots__ = ()

    async def next_page(self) -> Page | None:
        """Wait for the next page with content; None when the stream is closed."""
        return await self._port.run(self._follower.advance())

    async def __aiter__(self) -> AsyncIterator[Page]:
        # A generator, because leaving a loop ends it, and that closes the connection.
        try:
            while (page := await self.next_page()) is not None:
                yield page
        finally:
            await self.close()

    async def close(self) -> None:
        await self._port.hang_up()
