"""The HTTP/1.1 client of the relay between workers and of the edge: connections to an upstream, and a pool.

A connection carries one request at a time. It gives the response to a receiver while it arrives: to a relay
as raw bytes, to others as `UpstreamResponse`, with a header and a body in pieces. A receiver that does not
keep up pauses the socket, so that only a bounded part of a response is in memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# Unread body bytes at which reading from the socket is paused.
HELD_BYTES_MAX: Final = 256 * 1024
# Silence within a response after which its upstream counts as lost.
SILENCE_S_MAX = 30.0
CONNECT_S: Final = 5.0
SWITCHING: Final = 101
DIGITS_MAX: Final = 18  # of a number in a header
CONNECTION_LOST: Final = "the connection to the upstream was lost"

_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)

logger = logging.getLogger("tailrace.http")


class UpstreamLostError(Exception):
    """A connection to an upstream failed. `sent`: it may have seen the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class ResponseReceiver(Protocol):
    """Receives one response. `on_end` or `on_lost` is the last call."""

    def on_begin(self, upstream: UpstreamConnection) -> None:
        """The request is about to be sent."""

    def on_body(self, piece: bytes) -> None:
        """Bytes of the body, without framing."""

    def on_bytes(self, upstream: UpstreamConnection, data: bytes) -> None:
        """Bytes as received, with header and framing, after `on_body` had those of the body."""

    def on_upgrade(self, upstream: UpstreamConnection, head: bytes) -> None:
        """The upstream switched protocols: `take_over` its connection, or abort it. `head` is raw."""

    def on_end(self, upstream: UpstreamConnection, *, keep_alive: bool) -> None:
        """The response is complete. The connection may serve another request by now."""

    def on_lost(self, reason: str) -> None:
        """The response is missing or incomplete."""


class UpstreamConnection(asyncio.Protocol):
    """A client connection for HTTP/1.1, one request at a time."""

    __slots__ = (
        "_fields",
        "_full",
        "_head",
        "_is_head",
        "_keep_alive",
        "_leftover",
        "_lost_reason",
        "_parser",
        "_pool",
        "_reading",
        "_receiver",
        "_room",
        "_sending",
        "closed",
        "done",
        "idle_since",
        "responded",
        "transport",
        "upgraded",
    )

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser = HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._is_head = False
        self._head = b""  # of the response to HEAD
        self._keep_alive = False
        self._sending = False  # more of the request follows
        self._reading = True
        self._full = False  # write buffer is full
        self._room: asyncio.Future[None] | None = None
        self._leftover = b""  # received after an upgrade
        self._lost_reason = CONNECTION_LOST
        self.responded = False  # the header of the response is complete
        self.done = False  # the response is complete
        self.upgraded = False
        self.closed = False
        self.idle_since = 0.0

    def send(
        self, request: bytes, receiver: ResponseReceiver, *, is_head: bool = False, more: bool = False
    ) -> None:
        """Send a request, or its header if there is `more`."""
        assert self._receiver is None, "one request at a time"
        self._receiver = receiver
        self._is_head = is_head
        self._sending = more
        self.done = self.responded = False
        receiver.on_begin(self)
        try:
            self.transport.write(request)
        except (RuntimeError, OSError):
            self.abort()  # it has just ended; `connection_lost` follows and reports it

    def send_more(self, piece: bytes, *, last: bool) -> None:
        """A further piece of the request. An unfinished request makes the connection unusable."""
        self._sending = not last
        if piece and not self.closed and not self.transport.is_closing():
            self.transport.write(piece)

    async def room(self) -> None:
        """Wait until the upstream reads more, or has responded."""
        while self._full and not self.responded and not self.closed:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    def take_fields(self) -> list[tuple[bytes, bytes]]:
        """The header lines of the response, unchanged. Empty unless this is a `HeaderConnection`."""
        fields, self._fields = self._fields, []
        return fields

    def abort(self) -> None:
        self.transport.abort()

    def pause(self) -> None:
        if self._reading and not self.closed:
            self._reading = False
            self.transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self.transport.resume_reading()

    def take_over(self, protocol: asyncio.Protocol) -> bytes:
        """After an upgrade: give the transport to another protocol; returns bytes already received."""
        assert self.upgraded
        receiver, self._receiver = self._receiver, None
        leftover, self._leftover = self._leftover, b""
        self.transport.set_protocol(protocol)
        self._pool.on_done(self, False)
        if receiver is not None:
            receiver.on_end(self, keep_alive=False)
        self.resume()
        return leftover

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.abort()  # no request is pending
            return
        if self.upgraded:
            self._leftover += data
            return
        if self._is_head:
            self._head += data
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            offset = cast("int", upgrade.args[0])
            self.upgraded = True
            self._leftover = data[offset:]
            receiver.on_upgrade(self, data[:offset])
            return
        except HttpParserError:
            logger.exception("invalid HTTP response from upstream")
            self._lost_reason = "the upstream response is malformed"
            self.abort()
            return
        receiver.on_bytes(self, data)
        if self.done and self._receiver is receiver:
            self._finish(receiver)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._make_room()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._make_room()
        receiver, self._receiver = self._receiver, None
        self._pool.on_lost(self, pending=receiver is not None)
        if receiver is not None:
            receiver.on_lost(self._lost_reason)

    # -- the parser

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = parser.get_status_code()
        if status < 200 and status != SWITCHING:
            self._fields.clear()  # an interim response
            return
        if self.responded:
            self._keep_alive = False  # bytes after the response
            return
        self.responded = True
        self._keep_alive = parser.should_keep_alive()
        if self._is_head:
            # The parser expects a body, without a length until the connection ends; but HEAD has none.
            self.done = True
            self._keep_alive = _CLOSES.search(self._head) is None
        if self._room is not None:
            self._make_room()

    def on_body(self, piece: bytes) -> None:
        if self._receiver is not None and not self.done:
            self._receiver.on_body(piece)

    def on_message_complete(self) -> None:
        self.done = self.responded

    def _finish(self, receiver: ResponseReceiver) -> None:
        self._receiver = None
        if not self._reading:
            self.resume()
        if self._is_head:
            self._parser = HttpResponseParser(self)  # the old one waits for a body
            self._head = b""
        keep_alive = self._keep_alive
        self._pool.on_done(self, keep_alive and not self._sending)
        receiver.on_end(self, keep_alive=keep_alive)

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)


class HeaderConnection(UpstreamConnection):
    """A connection that collects header lines, which a relay of raw bytes need not pay for."""

    __slots__ = ()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.responded:  # else it is a trailer
            self._fields.append((name, value.strip()))


class UpstreamResponse:
    """The response of an upstream: header, then body in pieces. Holds `HELD_BYTES_MAX` and one read."""

    __slots__ = (
        "_abandoned",
        "_connection",
        "_failure",
        "_found",
        "_held",
        "_held_bytes",
        "_waiter",
        "fields",
        "on_responded",
        "queued_s",
        "status",
    )

    def __init__(self, status: int = 0, fields: list[tuple[bytes, bytes]] | None = None) -> None:
        self.status = status  # 0 until the header is there
        self.fields = fields or []  # unchanged
        self.queued_s = 0.0  # time of the request in the queue
        self.on_responded: Callable[[], None] | None = None  # called when `responded` becomes true
        self._connection: UpstreamConnection | None = None  # None once the body is complete
        self._abandoned = False
        self._found: dict[bytes, bytes] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: UpstreamLostError | None = None

    def get(self, name: bytes) -> bytes | None:
        """A header by its lower-case name; the last one if repeated."""
        if self._found is None:
            self._found = {field.lower(): value for field, value in self.fields}
        return self._found.get(name)

    @property
    def connection(self) -> UpstreamConnection | None:
        return self._connection

    @property
    def responded(self) -> bool:
        """Whether the header is there, or the response failed."""
        return self.status != 0 or self._failure is not None

    @property
    def complete(self) -> bool:
        """Whether the whole response is in memory."""
        return self.status != 0 and self._connection is None and self._failure is None

    @property
    def length(self) -> int | None:
        """The length of the body, if the upstream sent it."""
        return self.number(b"content-length")

    def number(self, name: bytes) -> int | None:
        """The integer value of a header; None if absent or invalid."""
        text = self.get(name) or b""
        return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else None

    async def head(self) -> None:
        """Wait for the header. Raises `UpstreamLostError` if there is none."""
        while self.status == 0:
            if self._failure is not None:
                raise self._failure
            await self._change()

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises `UpstreamLostError` if it is cut off."""
        while not self._held:
            if self._failure is not None:
                raise self._failure
            if self._connection is None:
                return b""
            await self._change()
        if self._connection is not None:
            self._connection.resume()
        return self._pop_held()

    async def body(self, bytes_max: int) -> bytes | None:
        """The whole body, or None if it is longer than `bytes_max`; the rest is not read.

        Times out on silence, because several reads may share this response.
        """
        if self.complete:
            return self._pop_held() if self._held_bytes <= bytes_max else None
        if (self.length or 0) > bytes_max:
            self.abandon()
            return None
        parts: list[bytes] = []
        size = 0
        while piece := await self._piece_in_time():
            parts.append(piece)
            size += len(piece)
            if size > bytes_max:
                self.abandon()
                return None
        return b"".join(parts)

    async def _piece_in_time(self) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                return await self.piece()
        except TimeoutError:
            self.abandon()
            raise UpstreamLostError("the upstream response timed out", sent=True) from None

    def _pop_held(self) -> bytes:
        found = self._held.pop() if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return found

    def abandon(self) -> None:
        """Drop the rest: a connection within a response cannot be reused."""
        self._abandoned = True
        if self._connection is not None:
            self._connection.abort()

    # -- called by the connection

    def on_begin(self, upstream: UpstreamConnection) -> None:
        self._connection = upstream
        if self._abandoned:
            upstream.abort()

    def on_body(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)

    def on_bytes(self, upstream: UpstreamConnection, data: bytes) -> None:
        if self.status == 0 and upstream.responded:
            self._begin(upstream)
        if self._held_bytes > HELD_BYTES_MAX:
            upstream.pause()
        self._wake()

    def on_upgrade(self, upstream: UpstreamConnection, head: bytes) -> None:
        upstream.pause()  # until it is taken over
        self._begin(upstream)
        self._wake()

    def _begin(self, upstream: UpstreamConnection) -> None:
        self.status = upstream.status
        self.fields = upstream.take_fields()
        if self.on_responded is not None:
            self.on_responded()

    def on_end(self, upstream: UpstreamConnection, *, keep_alive: bool) -> None:
        self._connection = None
        self._wake()

    def on_lost(self, reason: str) -> None:
        self._connection = None
        self._failure = UpstreamLostError(reason, sent=True)
        self._wake()
        if self.on_responded is not None:
            self.on_responded()

    def _change(self) -> asyncio.Future[None]:
        """Done when more of the response has arrived, or nothing more will."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class SocketAddress(NamedTuple):
    """Where an upstream listens: on a unix socket, or on a host and port, with or without TLS."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: ssl.SSLContext | None = None


class ConnectionPool:
    """The connections to one address. Idle ones are reused; how many are busy is up to the subclass."""

    def __init__(
        self,
        address: SocketAddress,
        loop: asyncio.AbstractEventLoop,
        connection_type: type[UpstreamConnection],
        *,
        idle_max: int,
        idle_s_max: float = inf,
    ) -> None:
        self._address = address
        self._loop = loop
        self._connection_type = connection_type
        self._idle_max = idle_max
        self._idle_s_max = idle_s_max
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()

    def pop_idle(self) -> UpstreamConnection | None:
        """An idle connection that its upstream has probably not closed; the one used last."""
        while self._idle:
            connection = self._idle.pop()
            if connection.transport.is_closing():
                continue
            if self._idle_s_max != inf and connection.idle_since < self._loop.time() - self._idle_s_max:
                connection.abort()
                continue
            return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises `UpstreamLostError`."""
        address = self._address
        try:
            async with asyncio.timeout(CONNECT_S):
                if address.path:
                    _, connection = await self._loop.create_unix_connection(
                        lambda: self._connection_type(self), address.path
                    )
                else:
                    _, connection = await self._loop.create_connection(
                        lambda: self._connection_type(self), address.host, address.port, ssl=address.tls
                    )
        except (OSError, TimeoutError) as error:
            raise UpstreamLostError(f"cannot connect to the upstream: {error}", sent=False) from None
        self._open.add(connection)
        return connection

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()

    # -- called by connections

    def on_done(self, connection: UpstreamConnection, reusable: bool) -> None:
        """A response is complete, or the connection was taken over."""
        if reusable and len(self._idle) < self._idle_max and not connection.transport.is_closing():
            if self._idle_s_max != inf:
                connection.idle_since = self._loop.time()
            self._idle.append(connection)
        elif connection.upgraded:
            self._open.discard(connection)
        else:
            connection.transport.close()

    def on_lost(self, connection: UpstreamConnection, *, pending: bool) -> None:
        """A connection ended, `pending`: within a request."""
        self._open.discard(connection)
        if not pending and connection in self._idle:
            self._idle.remove(connection)
