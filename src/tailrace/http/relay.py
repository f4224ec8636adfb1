"""Relays requests to another process of this machine over a unix socket.

A request is written as it was read, without looking at its body. The response is parsed only to find its end;
its bytes go to the client as they come. After an upgrade the two connections become a tunnel. A slow reader
pauses the other side: nothing is buffered beyond the transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.client import (
    ConnectionPool,
    ResponseReceiver,
    SocketAddress,
    UpstreamConnection,
    UpstreamLostError,
    UpstreamResponse,
)
from tailrace.http.exchange import MODE_CLOSE, MODE_HEAD, MODE_HTTP_1_0, Exchange, ResponseStream
from tailrace.http.server import WRITE_HIGH_WATER_BYTES

if TYPE_CHECKING:
    from tailrace.http.connection import HttpConnection
    from tailrace.http.server import HttpServer


class TunnelEnd(asyncio.Protocol):
    """One side of a tunnel. Its transport is read only as fast as the other's is written."""

    __slots__ = ("deadline", "other", "server", "transport")

    other: TunnelEnd

    def __init__(self, transport: asyncio.Transport, server: HttpServer | None = None) -> None:
        self.transport = transport
        self.server = server  # of the client side, which the server sweeps
        self.deadline = inf

    def data_received(self, data: bytes) -> None:
        server = self.server
        if server is not None:
            server.bytes_in += len(data)
        elif self.other.server is not None:
            self.other.server.bytes_out += len(data)
        try:
            self.other.transport.write(data)
        except (RuntimeError, OSError):
            self.transport.abort()

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.server is not None:
            self.server.remove(self)
        self.other.transport.close()

    def on_sweep(self, now: float) -> None:
        """Deadlines are checked by the process that serves the connection."""

    def drain(self) -> None:
        """The process that serves the connection closes it."""


def open_tunnel(near: TunnelEnd, connection: HttpConnection, upstream: UpstreamConnection) -> None:
    """Connect a client and an upstream that switched protocols directly; `near` is the client's end."""
    far = TunnelEnd(upstream.transport)
    near.other, far.other = far, near
    early = upstream.take_over(far)
    held = connection.detach(near)
    connection.server.add(near)
    if early:
        far.data_received(early)
    if held:
        near.data_received(held)


# Idle connections to one process that are reused.
IDLE_CONNECTIONS_MAX = 256
# Largest buffered response.
RESPONSE_BYTES_MAX = 64 * 1024 * 1024
# How much longer than the owner's timeout a request is waited for, so that the owner's error comes first.
GRACE_S = 10.0

# Information about the client for the other process. These headers are dropped from client requests.
PEER_HEADER, SCHEME_HEADER, REPEATED_HEADER = b"tailrace-peer", b"tailrace-scheme", b"tailrace-repeated"
HOPS_HEADER, ALONE_HEADER = b"tailrace-hops", b"tailrace-alone"
RELAY_HEADERS = frozenset((PEER_HEADER, SCHEME_HEADER, REPEATED_HEADER, HOPS_HEADER, ALONE_HEADER))
_EVENT_STREAM_TYPE = b"text/event-stream"  # the only type that a browser's EventSource accepts
_SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")  # no effect, so an error can be reported in any case
_REPLACED_HEADERS = RELAY_HEADERS | {b"content-length", b"transfer-encoding", b"expect"}


def encode_request(exchange: Exchange, more: bytes = b"") -> bytes:
    """The request as the client sent it, except for framing and relay headers; `more` are head lines."""
    target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
    headers = exchange.headers
    version = 0 if exchange.mode & MODE_HTTP_1_0 else 1
    parts = [b"%b %b HTTP/1.%d\r\n" % (exchange.method, target, version)]
    parts += [b"%b: %b\r\n" % line for line in headers.items() if line[0] not in _REPLACED_HEADERS]
    if exchange.body or b"content-length" in headers or b"transfer-encoding" in headers:
        parts.append(b"content-length: %d\r\n" % len(exchange.body))
    parts += [more, b"\r\n", exchange.body]
    return b"".join(parts)


def encode_relayed_request(exchange: Exchange, hops: int) -> bytes:
    """The request for the other process, with the client's connection data in headers."""
    peer = exchange.peer.encode("latin-1", "replace")
    more = b"%b: %b\r\n%b: %b\r\n%b: %d\r\n" % (
        PEER_HEADER,
        peer,
        SCHEME_HEADER,
        exchange.scheme,
        HOPS_HEADER,
        hops,
    )
    if exchange.repeated is not None:
        more += b"%b: %b\r\n" % (REPEATED_HEADER, b",".join(sorted(exchange.repeated)))
    return encode_request(exchange, more)


def restore_relayed_request(exchange: Exchange) -> int:
    """On the receiving side: restore connection data from the relay headers. Returns the number of hops."""
    headers, connection = exchange.headers, exchange.connection
    connection.peer = headers.get(PEER_HEADER, b"").decode("latin-1")
    connection.scheme = headers.get(SCHEME_HEADER, b"http")
    if REPEATED_HEADER in headers:
        exchange.repeated = frozenset(headers[REPEATED_HEADER].split(b","))
    return int(headers.get(HOPS_HEADER, b"0"))


def peer_unavailable_error() -> TailraceError:
    return TailraceError("unavailable", "the worker that owns this stream is unavailable, retry later")


class PeerClient(ConnectionPool):
    """Client of another process by its unix socket. Bounds the bodies of requests, not their number."""

    def __init__(
        self, path: str, loop: asyncio.AbstractEventLoop, request_ms: int, body_bytes_max: int
    ) -> None:
        super().__init__(SocketAddress(path=path), loop, UpstreamConnection, idle_max=IDLE_CONNECTIONS_MAX)
        self.path = path
        self._wait_s = request_ms / 1000 + GRACE_S
        self._body_bytes_max = body_bytes_max
        self.body_bytes = 0  # of requests without a response yet
        self._tasks = TaskSet()
        self.relayed = 0
        self.lost = 0

    def relay(self, exchange: Exchange, hops: int = 1, waits_s: float = 0.0) -> None:
        """Have the other process respond; it may wait `waits_s` for something first."""
        self.relayed += 1
        relay = RelayedRequest(exchange, self, may_wait=waits_s > 0)
        if exchange.body and self.body_bytes + len(exchange.body) > self._body_bytes_max:
            relay.refuse(
                TailraceError("overloaded", "too many requests wait for the worker that owns this stream")
            )
            return
        relay.reserve_body()
        exchange.set_deadline(self._loop.time() + self._wait_s + waits_s, relay.on_deadline)
        self.send(encode_relayed_request(exchange, hops), relay, is_head=exchange.mode & MODE_HEAD != 0)

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[int, bytes]:
        """Status and body of a request of this process. Raises `unavailable` if there is no response."""
        response = UpstreamResponse()
        self.send(build_request(method, target, body, headers), response)
        try:
            async with asyncio.timeout(self._wait_s):
                await response.head()
                found = await response.body(RESPONSE_BYTES_MAX)
        except (UpstreamLostError, TimeoutError):
            raise peer_unavailable_error() from None
        finally:
            response.abandon()
        if found is None:
            raise peer_unavailable_error()
        return response.status, found

    def send(self, request: bytes, receiver: ResponseReceiver, *, is_head: bool = False) -> None:
        connection = self.pop_idle()
        if connection is not None:
            connection.send(request, receiver, is_head=is_head)
            return
        self._tasks.start(self._connect(request, receiver, is_head))

    async def _connect(self, request: bytes, receiver: ResponseReceiver, is_head: bool) -> None:
        try:
            connection = await self.connect()
        except UpstreamLostError as error:
            self.lost += 1
            receiver.on_lost(str(error))
            return
        connection.send(request, receiver, is_head=is_head)

    def on_lost(self, connection: UpstreamConnection, *, pending: bool) -> None:
        self.lost += pending
        super().on_lost(connection, pending=pending)

    def close(self) -> None:
        super().close()
        self._tasks.cancel()


def build_request(method: str, target: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    head = f"{method} {target} HTTP/1.1\r\nhost: worker\r\ncontent-length: {len(body)}\r\n".encode()
    return b"".join((head, lines, b"\r\n", body))


class RelayedRequest:
    """One client request that another process serves."""

    __slots__ = ("_exchange", "_held_bytes", "_peer", "_stream", "_upstream")

    def __init__(self, exchange: Exchange, peer: PeerClient, *, may_wait: bool) -> None:
        self._exchange = exchange
        self._peer = peer
        self._held_bytes = 0
        self._stream: ResponseStream | None = None
        self._upstream: UpstreamConnection | None = None
        if may_wait or b"live=" in exchange.query:
            # It may wait for long after the client has gone. Other requests finish soon, even if half-closed.
            exchange.on_gone = self._on_gone

    def reserve_body(self) -> None:
        """Count the body as held until the response begins: the owner may not read it."""
        self._held_bytes = len(self._exchange.body)
        self._peer.body_bytes += self._held_bytes

    def _release(self) -> None:
        self._peer.body_bytes -= self._held_bytes
        self._held_bytes = 0

    def on_begin(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        if self._exchange.answered:
            upstream.abort()

    def on_bytes(self, upstream: UpstreamConnection, data: bytes) -> None:
        stream = self._stream
        if stream is None:
            self._release()
            stream = self._stream = _open_response(self._exchange, upstream.status)
            if stream.closed:
                upstream.abort()
                return
            stream.on_gone = self._on_gone
            stream.on_drain = self._on_drain
        stream.write(data)
        if stream.unsent_bytes > _high_water_bytes(self._exchange) and not upstream.done:
            # Never pause a finished connection: the response to its next request would not be read.
            upstream.pause()

    def on_body(self, piece: bytes) -> None:
        """Its bytes are written by `on_bytes`."""

    def on_upgrade(self, upstream: UpstreamConnection, head: bytes) -> None:
        exchange = self._exchange
        self._release()
        if exchange.answered:
            upstream.abort()
            return
        exchange.answered = True
        exchange.on_gone = None
        connection = exchange.connection
        connection.write(head)
        open_tunnel(TunnelEnd(connection.transport, connection.server), connection, upstream)

    def on_end(self, upstream: UpstreamConnection, *, keep_alive: bool) -> None:
        if not keep_alive:
            self._exchange.mode |= MODE_CLOSE
        if self._stream is not None:
            self._stream.end()

    def on_lost(self, reason: str) -> None:
        self._release()
        exchange, stream = self._exchange, self._stream
        if stream is None:
            if exchange.answered:
                return
            if exchange.headers.get(b"accept") == _EVENT_STREAM_TYPE:
                # A browser's EventSource stops for good on 503, but reconnects after a broken connection.
                exchange.connection.transport.abort()
            elif self._upstream is None or exchange.method in _SAFE_METHODS:
                self.refuse(peer_unavailable_error())
            else:
                # The request may have been executed; a client connected to that process would see the same.
                exchange.connection.transport.abort()
        elif stream.closed:
            return
        elif exchange.mode & MODE_HTTP_1_0:
            exchange.mode |= MODE_CLOSE  # without framing, the end of the connection ends the response
            stream.end()
        else:
            exchange.connection.transport.abort()

    def on_deadline(self) -> None:
        self.refuse(
            TailraceError("append_timeout", "the worker that owns this stream did not respond in time")
        )
        self._on_gone()

    def refuse(self, error: TailraceError) -> None:
        exchange = self._exchange
        exchange.respond(*exchange.connection.server.app.refuse(exchange, error))

    def _on_gone(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()

    def _on_drain(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()


class LineStreamReceiver:
    """Splits an endless response into lines."""

    __slots__ = ("_on_line", "_on_lost", "_rest", "upstream")

    def __init__(self, on_line: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_lost = on_lost
        self._rest = b""
        self.upstream: UpstreamConnection | None = None

    def on_begin(self, upstream: UpstreamConnection) -> None:
        self.upstream = upstream

    def on_bytes(self, upstream: UpstreamConnection, data: bytes) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._on_line(line)

    def on_body(self, piece: bytes) -> None:
        self._rest += piece

    def on_upgrade(self, upstream: UpstreamConnection, head: bytes) -> None:
        upstream.abort()

    def on_end(self, upstream: UpstreamConnection, *, keep_alive: bool) -> None:
        self.upstream = None  # it may serve another request by now
        self._on_lost()

    def on_lost(self, reason: str) -> None:
        self._on_lost()


def _open_response(exchange: Exchange, status: int) -> ResponseStream:
    """A response stream for bytes that include head and framing. It is counted by the client's server."""
    connection = exchange.connection
    stream = ResponseStream(connection, plain=True)
    if exchange.answered:
        stream.closed = True
        return stream
    exchange.answered = True
    exchange.on_gone = None
    exchange.deadline_at = inf
    key = (exchange.method, status)
    connection.server.responses[key] = connection.server.responses.get(key, 0) + 1
    connection.response_stream = stream
    connection.rearm()
    return stream


def _high_water_bytes(exchange: Exchange) -> int:
    """The client transport's high-water mark, above which it will call `on_drain`."""
    return min(WRITE_HIGH_WATER_BYTES, exchange.connection.server.limits.live_unsent_bytes)
