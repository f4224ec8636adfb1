"""Relays requests to another process over a unix socket; upgraded connections become tunnels.

Two connections whose bytes pass each other on: what is left when a relayed one leaves HTTP.

Requests that another process on this machine answers: passed on over a unix socket, bytes for bytes.

The request is written as it was read; its body is not looked at. Of the answer only the framing is, to know
where it ends: its bytes go to the client as they come. A connection that leaves HTTP becomes a tunnel. Who
reads too slowly stops the other side: nothing is held here beyond what the transports hold.
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
    """One of the two. Its transport is read only as fast as the other's is written."""

    __slots__ = ("deadline", "other", "server", "transport")

    other: TunnelEnd

    def __init__(self, transport: asyncio.Transport, server: HttpServer | None = None) -> None:
        self.transport = transport
        self.server = server  # of the end that the server looks after
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
            self.server.forget(self)
        self.other.transport.close()

    def on_sweep(self, now: float) -> None:
        """Whoever answers keeps the time."""

    def drain(self) -> None:
        """Whoever answers says goodbye, and its end is ours."""


def open_tunnel(connection: HttpConnection, far: asyncio.Transport) -> None:
    """From now on the client and the other process talk without us."""
    server = connection.server
    near_end, far_end = TunnelEnd(connection.transport, server), TunnelEnd(far)
    near_end.other, far_end.other = far_end, near_end
    far.set_protocol(far_end)
    held = connection.detach(near_end)
    server.watch(near_end)
    if held:
        server.loop.call_soon(near_end.data_received, held)


logger = logging.getLogger("tailrace.http")

# Connections to one process that are kept for the next request.
IDLE_CONNECTIONS_MAX = 256
# An answer that is wanted whole.
RESPONSE_BYTES_MAX = 64 * 1024 * 1024
# How much longer than its owner a request is waited for: the owner gives up first, and says so.
GRACE_S = 10.0

# What the other process is told about the client. Clients that send these are not listened to.
PEER_HEADER, SCHEME_HEADER, REPEATED_HEADER = b"tailrace-peer", b"tailrace-scheme", b"tailrace-repeated"
HOPS_HEADER, ALONE_HEADER = b"tailrace-hops", b"tailrace-alone"
RELAY_HEADERS = frozenset((PEER_HEADER, SCHEME_HEADER, REPEATED_HEADER, HOPS_HEADER, ALONE_HEADER))
_EVENT_STREAM_TYPE = b"text/event-stream"  # what a browser's EventSource accepts, and nothing else
_SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")  # done or not, nothing changed
_REPLACED_HEADERS = RELAY_HEADERS | {b"content-length", b"transfer-encoding", b"expect"}


def encode_request(exchange: Exchange, more: bytes = b"") -> bytes:
    """The request as its client sent it, but for framing and what only we may say; `more` are head lines."""
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
    """The request as it goes on. What it says about its connection holds for ours as well."""
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
    """On the other side: the request gets back what its connection cannot say. How often it went on."""
    headers, connection = exchange.headers, exchange.connection
    connection.peer = headers.get(PEER_HEADER, b"").decode("latin-1")
    connection.scheme = headers.get(SCHEME_HEADER, b"http")
    if REPEATED_HEADER in headers:
        exchange.repeated = frozenset(headers[REPEATED_HEADER].split(b","))
    return int(headers.get(HOPS_HEADER, b"0"))


def peer_unavailable_error() -> TailraceError:
    return TailraceError("unavailable", "the worker that owns this does not answer")


class ResponseReceiver(Protocol):
    """Whoever waits for an answer."""

    def on_begin(self, upstream: PeerConnection) -> None: ...
    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None: ...
    def on_body(self, piece: bytes) -> None: ...
    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None: ...
    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None: ...
    def on_lost(self) -> None: ...


class PeerClient:
    """Another process, by its socket: idle connections are kept, new ones made when there is none."""

    def __init__(
        self, path: str, loop: asyncio.AbstractEventLoop, request_ms: int, body_bytes_max: int
    ) -> None:
        self.path = path
        self._loop = loop
        self._wait_s = request_ms / 1000 + GRACE_S
        self._body_bytes_max = body_bytes_max
        self.body_bytes = 0  # of requests that are not answered yet
        self._idle: deque[PeerConnection] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.relayed = 0
        self.lost = 0

    def relay(self, exchange: Exchange, hops: int = 1, waits_s: float = 0.0) -> None:
        """Has the request answered by the other process, which may first wait so long for something."""
        self.relayed += 1
        relay = RelayedRequest(exchange, self, may_wait=waits_s > 0)
        if exchange.body and self.body_bytes + len(exchange.body) > self._body_bytes_max:
            relay.refuse(TailraceError("overloaded", "too much waits for the worker that owns this"))
            return
        relay.hold()
        exchange.set_deadline(self._loop.time() + self._wait_s + waits_s, relay.on_deadline)
        self.send(encode_relayed_request(exchange, hops), relay, is_head=exchange.mode & MODE_HEAD != 0)

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[int, bytes]:
        """Status and body of one request of our own. Raises `unavailable` if there is no answer."""
        asked = BufferedResponse(self._loop)
        self.send(build_request(method, target, body, headers), asked)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asked.answer
        except TimeoutError:
            raise peer_unavailable_error() from None
        finally:
            asked.let_go()

    def send(self, request: bytes, sink: ResponseReceiver, *, is_head: bool = False) -> None:
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                upstream.begin(request, sink, is_head)
                return
        task = self._loop.create_task(self._connect(request, sink, is_head))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, request: bytes, sink: ResponseReceiver, is_head: bool) -> None:
        try:
            _, upstream = await self._loop.create_unix_connection(lambda: PeerConnection(self), self.path)
        except OSError:
            self.lost += 1
            sink.on_lost()
            return
        upstream.begin(request, sink, is_head)

    def keep(self, upstream: PeerConnection) -> None:
        if len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(upstream)
        else:
            upstream.transport.close()

    def close(self) -> None:
        for upstream in self._idle:
            upstream.transport.abort()
        self._idle.clear()
        for task in tuple(self._tasks):
            task.cancel()


def build_request(method: str, target: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    head = f"{method} {target} HTTP/1.1\r\nhost: worker\r\ncontent-length: {len(body)}\r\n".encode()
    return b"".join((head, lines, b"\r\n", body))


class PeerConnection(asyncio.Protocol):
    """One connection to another process. It carries one request at a time."""

    __slots__ = ("_head", "_is_head", "_keep_alive", "_parser", "_peer", "_sink", "done", "transport")

    transport: asyncio.Transport

    def __init__(self, peer: PeerClient) -> None:
        self._peer = peer
        self._parser = HttpResponseParser(self)
        self._sink: ResponseReceiver | None = None
        self._is_head = False
        self._head = b""
        self._keep_alive = False
        self.done = False  # the answer is here to its end

    def begin(self, request: bytes, sink: ResponseReceiver, is_head: bool) -> None:
        self._sink, self._is_head, self.done = sink, is_head, False
        sink.on_begin(self)
        if is_head:
            # The parser would wait for the body that the head speaks of.
            self._parser = HttpResponseParser(self)
            self._head = b""
        try:
            self.transport.write(request)
        except (RuntimeError, OSError):
            self.abort()  # it ended a moment ago; `connection_lost` follows and tells

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
            self.abort()  # nobody asked
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
            logger.exception("another worker's answer cannot be read")
            self.abort()
            return
        sink.on_bytes(self, data)
        if self.done and self._sink is sink:
            self._sink = None
            keep_alive = self._keep_alive
            if self._is_head:
                self._parser = HttpResponseParser(self)
            if keep_alive and not self.transport.is_closing():
                self._peer.keep(self)
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
            # Without a length the parser expects a body to the end of the connection, which there is not.
            self._keep_alive = CONNECTION_CLOSE not in self._head

    def on_body(self, piece: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(piece)

    def on_message_complete(self) -> None:
        self.done = True


class RelayedRequest:
    """One request of a client that another process answers."""

    __slots__ = ("_exchange", "_held_bytes", "_outlet", "_peer", "_upstream")

    def __init__(self, exchange: Exchange, peer: PeerClient, *, may_wait: bool) -> None:
        self._exchange = exchange
        self._peer = peer
        self._held_bytes = 0
        self._outlet: ResponseStream | None = None
        self._upstream: PeerConnection | None = None
        if may_wait or b"live=" in exchange.query:
            # It may wait for long, and for nobody. Others are answered soon, even a client that half-closed.
            exchange.on_gone = self._on_gone

    def hold(self) -> None:
        """Its body is held until it is answered: whoever owns it may not read."""
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
        outlet = self._outlet
        if outlet is None:
            self._release()
            outlet = self._outlet = _open_response(self._exchange, upstream.status)
            if outlet.closed:
                upstream.abort()
                return
            outlet.on_gone = self._on_gone
            outlet.on_drain = self._on_drain
        outlet.write(data)
        if outlet.unsent_bytes > _high_water_bytes(self._exchange) and not upstream.done:
            # Never a connection that is free from here on: the answer to its next request would not be read.
            upstream.transport.pause_reading()

    def on_body(self, piece: bytes) -> None:
        """The bytes went out as they came."""

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
        if self._outlet is not None:
            self._outlet.end()

    def on_lost(self) -> None:
        self._release()
        exchange, outlet = self._exchange, self._outlet
        if outlet is None:
            if exchange.answered:
                return
            if exchange.headers.get(b"accept") == _EVENT_STREAM_TYPE:
                # A browser's EventSource gives up for good on 503, and reconnects after a broken connection.
                exchange.connection.transport.abort()
            elif self._upstream is None or exchange.method in _SAFE_METHODS:
                self.refuse(peer_unavailable_error())
            else:
                # It may have been done. Whoever had asked that process itself would be left like this, too.
                exchange.connection.transport.abort()
        elif outlet.closed:
            return
        elif exchange.mode & MODE_HTTP_1_0:
            exchange.mode |= MODE_CLOSE  # without framing the end of the connection is the end of the answer
            outlet.end()
        else:
            exchange.connection.transport.abort()

    def on_deadline(self) -> None:
        self.refuse(TailraceError("append_timeout", "the worker that owns this took too long to answer"))
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
    """An answer that is wanted whole."""

    __slots__ = ("_bytes", "_pieces", "_upstream", "answer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._upstream: PeerConnection | None = None
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()

    def let_go(self) -> None:
        """Nobody waits any more: what is not answered never will be on this connection."""
        if self._upstream is not None:
            self._upstream.abort()

    def on_begin(self, upstream: PeerConnection) -> None:
        self._upstream = upstream
        if self.answer.done():
            upstream.abort()

    def on_bytes(self, upstream: PeerConnection, data: bytes) -> None:
        if self.answer.done() or self._bytes > RESPONSE_BYTES_MAX:
            upstream.abort()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)

    def on_upgrade(self, upstream: PeerConnection, head: bytes, rest: bytes) -> None:
        upstream.abort()
        self.on_lost()

    def on_end(self, upstream: PeerConnection, *, keep_alive: bool) -> None:
        self._upstream = None  # it may carry the request of somebody else by now
        if not self.answer.done():
            self.answer.set_result((upstream.status, b"".join(self._pieces)))

    def on_lost(self) -> None:
        self._upstream = None
        if not self.answer.done():
            self.answer.set_exception(peer_unavailable_error())


class LineStreamReceiver:
    """An answer without end, by lines."""

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
        self.upstream = None  # it may carry the request of somebody else by now
        self._on_lost()

    def on_lost(self) -> None:
        self._on_lost()


def _open_response(exchange: Exchange, status: int) -> ResponseStream:
    """An outlet for an answer that comes with its head and framing. It is counted where its client is."""
    connection = exchange.connection
    outlet = ResponseStream(connection, plain=True)
    if exchange.answered:
        outlet.closed = True
        return outlet
    exchange.answered = True
    exchange.on_gone = None
    exchange.deadline_at = inf
    mark = (exchange.method, status)
    connection.server.answers[mark] = connection.server.answers.get(mark, 0) + 1
    connection.outlet = outlet
    connection.rearm()
    return outlet


def _high_water_bytes(exchange: Exchange) -> int:
    """Above it the client's transport says when it has gone down."""
    return min(WRITE_HIGH_WATER_BYTES, exchange.connection.server.limits.live_unsent_bytes)
