"""Relays requests to another process of this machine over a unix socket.

A request is written as it was read, without looking at its body. The response is parsed only to find its end;
its bytes go to the client as they come. After an upgrade the two connections become a tunnel. A slow reader
pauses the other side: nothing is buffered beyond the transports.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import (
    CONNECTION_CLOSE,
    MODE_CLOSE,
    MODE_HEAD,
    MODE_HTTP_1_0,
    Exchange,
    ResponseStream,
)
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


def open_tunnel(connection: HttpConnection, far: asyncio.Transport) -> None:
    """Connect the client and the other process directly."""
    server = connection.server
    near_end, far_end = TunnelEnd(connection.transport, server), TunnelEnd(far)
    near_end.other, far_end.other = far_end, near_end
    far.set_protocol(far_end)
    held = connection.detach(near_end)
    server.add(near_end)
    if held:
        server.loop.call_soon(near_end.data_received, held)


logger = logging.getLogger("tailrace.http")

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


class ResponseReceiver(Protocol):
    """Receives one response."""

    def on_begin(self, upstream: PeerConnection) -> None: ...
    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None: ...
    def on_body(self, piece: bytes) -> None: ...
    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None: ...
    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None: ...
    def on_lost(self) -> None: ...


class PeerClient:
    """Client of another process by its unix socket, with a pool of idle connections."""

    def __init__(
        self, path: str, loop: asyncio.AbstractEventLoop, request_ms: int, body_bytes_max: int
    ) -> None:
        self.path = path
        self._loop = loop
        self._wait_s = request_ms / 1000 + GRACE_S
        self._body_bytes_max = body_bytes_max
        self.body_bytes = 0  # of requests without a response yet
        self._idle: deque[PeerConnection] = deque()
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
        receiver = BufferedResponse(self._loop)
        self.send(build_request(method, target, body, headers), receiver)
        try:
            async with asyncio.timeout(self._wait_s):
                return await receiver.response
        except TimeoutError:
            raise peer_unavailable_error() from None
        finally:
            receiver.abort()

    def send(self, request: bytes, sink: ResponseReceiver, *, is_head: bool = False) -> None:
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                upstream.begin(request, sink, is_head)
                return
        self._tasks.start(self._connect(request, sink, is_head))

    async def _connect(self, request: bytes, sink: ResponseReceiver, is_head: bool) -> None:
        try:
            _, upstream = await self._loop.create_unix_connection(lambda: PeerConnection(self), self.path)
        except OSError:
            self.lost += 1
            sink.on_lost()
            return
        upstream.begin(request, sink, is_head)

    def release(self, upstream: PeerConnection) -> None:
        if len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(upstream)
        else:
            upstream.transport.close()

    def close(self) -> None:
        for upstream in self._idle:
            upstream.transport.abort()
        self._idle.clear()
        self._tasks.cancel()


def build_request(method: str, target: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    head = f"{method} {target} HTTP/1.1\r\nhost: worker\r\ncontent-length: {len(body)}\r\n".encode()
    return b"".join((head, lines, b"\r\n", body))


class PeerConnection(asyncio.Protocol):
    """One connection to another process, for one request at a time."""

    __slots__ = ("_head", "_is_head", "_keep_alive", "_parser", "_peer", "_sink", "done", "transport")

    transport: asyncio.Transport

    def __init__(self, peer: PeerClient) -> None:
        self._peer = peer
        self._parser = HttpResponseParser(self)
        self._sink: ResponseReceiver | None = None
        self._is_head = False
        self._head = b""
        self._keep_alive = False
        self.done = False  # the response is complete

    def begin(self, request: bytes, sink: ResponseReceiver, is_head: bool) -> None:
        self._sink, self._is_head, self.done = sink, is_head, False
        sink.on_begin(self)
        if is_head:
            # The parser would wait for the body that the head announces.
            self._parser = HttpResponseParser(self)
            self._head = b""
        try:
            self.transport.write(request)
        except (RuntimeError, OSError):
            self.abort()  # it has just ended; `connection_lost` follows and reports it

    def abort(self) -> None:
        self.transport.abort()

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    # --- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self.abort()  # no request is pending
            return
        if self._is_head:
            self._head += data
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            offset = cast("int", upgrade.args[0])
            self._sink = None
            sink.on_upgrade(self, data[:offset], data[offset:])
            return
        except HttpParserError:
            logger.exception("invalid HTTP response from worker")
            self.abort()
            return
        sink.on_bytes(self, data)
        if self.done and self._sink is sink:
            self._sink = None
            keep_alive = self._keep_alive
            if self._is_head:
                self._parser = HttpResponseParser(self)
            if keep_alive and not self.transport.is_closing():
                self._peer.release(self)
            else:
                self.transport.close()
            sink.on_end(self, keep_alive=keep_alive)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._peer.lost += 1
            sink.on_lost()

    # --- parser callbacks

    def on_headers_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        if self._is_head:
            self.done = True
            # Without a length the parser expects a body until the connection ends, but HEAD has none.
            self._keep_alive = CONNECTION_CLOSE not in self._head

    def on_body(self, piece: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(piece)

    def on_message_complete(self) -> None:
        self.done = True


class RelayedRequest:
    """One client request that another process serves."""

    __slots__ = ("_exchange", "_held_bytes", "_peer", "_stream", "_upstream")

    def __init__(self, exchange: Exchange, peer: PeerClient, *, may_wait: bool) -> None:
        self._exchange = exchange
        self._peer = peer
        self._held_bytes = 0
        self._stream: ResponseStream | None = None
        self._upstream: PeerConnection | None = None
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

    def on_begin(self, upstream: PeerConnection) -> None:
        self._upstream = upstream
        if self._exchange.answered:
            upstream.abort()

    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None:
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
            upstream.transport.pause_reading()

    def on_body(self, piece: bytes) -> None:
        """The bytes were already written by `on_bytes`."""

    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None:
        exchange = self._exchange
        self._release()
        if exchange.answered:
            upstream.abort()
            return
        exchange.answered = True
        exchange.on_gone = None
        exchange.connection.write(head + rest)
        open_tunnel(exchange.connection, upstream.transport)

    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None:
        if not keep_alive:
            self._exchange.mode |= MODE_CLOSE
        if self._stream is not None:
            self._stream.end()

    def on_lost(self) -> None:
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
        upstream = self._upstream
        if upstream is not None and not upstream.transport.is_closing():
            upstream.transport.resume_reading()


class BufferedResponse:
    """Collects a whole response."""

    __slots__ = ("_bytes", "_pieces", "_upstream", "response")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._upstream: PeerConnection | None = None
        self.response: asyncio.Future[tuple[int, bytes]] = loop.create_future()

    def abort(self) -> None:
        """Abort the connection if the response is not complete: it cannot be reused."""
        if self._upstream is not None:
            self._upstream.abort()

    def on_begin(self, upstream: PeerConnection) -> None:
        self._upstream = upstream
        if self.response.done():
            upstream.abort()

    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None:
        if self.response.done() or self._bytes > RESPONSE_BYTES_MAX:
            upstream.abort()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)

    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None:
        upstream.abort()
        self.on_lost()

    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None:
        self._upstream = None  # it may serve another request by now
        if not self.response.done():
            self.response.set_result((upstream.status, b"".join(self._pieces)))

    def on_lost(self) -> None:
        self._upstream = None
        if not self.response.done():
            self.response.set_exception(peer_unavailable_error())


class LineStreamReceiver:
    """Splits an endless response into lines."""

    __slots__ = ("_on_line", "_on_lost", "_rest", "upstream")

    def __init__(self, on_line: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_lost = on_lost
        self._rest = b""
        self.upstream: PeerConnection | None = None

    def on_begin(self, upstream: PeerConnection) -> None:
        self.upstream = upstream

    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._on_line(line)

    def on_body(self, piece: bytes) -> None:
        self._rest += piece

    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None:
        upstream.abort()
        self._on_lost()

    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None:
        self.upstream = None  # it may serve another request by now
        self._on_lost()

    def on_lost(self) -> None:
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
