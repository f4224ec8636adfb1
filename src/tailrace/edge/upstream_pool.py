"""Connections to one upstream: its address, the HTTP client connection, and the bounded pool."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from tailrace.common.errors import TailraceError
from tailrace.common.settings import SettingsError
from tailrace.http.exchange import LAST_CHUNK, chunk
from tailrace.http.streaming_request import BodyStream

_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(https?://.*)")


class UpstreamAddress(NamedTuple):
    """One configured upstream: `URL` or `name=URL`."""

    id: str
    host: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


def parse_upstreams(text: str) -> list[UpstreamAddress]:
    """Parses a comma-separated list of upstreams."""
    items = [text] if "@" in text else text.split(",")  # a password may contain a comma
    origins = [_parse_upstream(item.strip()) for item in items if item.strip()]
    if not origins:
        raise SettingsError("an edge needs an upstream: tailrace edge --upstream http://host:4437")
    if len({origin.id for origin in origins}) != len(origins):
        raise SettingsError("an upstream is configured twice")
    return origins


def _parse_upstream(text: str) -> UpstreamAddress:
    named = _NAMED.fullmatch(text)
    url = named[2] if named else text
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = parts.path in ("", "/") and not parts.query and not parts.username and not parts.password
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not plain:
        raise SettingsError(f"an upstream must be http://host:port or https://host:port{_redacted(text)}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = port or (443 if tls else 80)
    shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return UpstreamAddress(
        named[1] if named else f"{parts.scheme}://{shown}:{port}", parts.hostname, port, tls
    )


def _redacted(text: str) -> str:
    """The invalid text for the error, unless it may contain a password."""
    return ", without a user or a password" if "@" in text else f", not {text.partition('?')[0]!r}"


# Unread body bytes at which reading from the socket is paused.
HELD_BYTES_MAX = 256 * 1024
# Silence within a response after which its upstream counts as lost.
SILENCE_S_MAX = 30.0
SWITCHING = 101
DIGITS_MAX = 18  # of a number in a header


class UpstreamLostError(Exception):
    """A connection to an upstream failed. `sent`: it may have seen the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class UpstreamResponse:
    """The response of an upstream: header, then body in pieces."""

    __slots__ = (
        "_connection",
        "_failure",
        "_found",
        "_held",
        "_held_bytes",
        "_waiter",
        "fields",
        "queued_s",
        "status",
    )

    def __init__(
        self, connection: UpstreamConnection, status: int, fields: list[tuple[bytes, bytes]]
    ) -> None:
        self.status = status
        self.fields = fields  # unchanged
        self.queued_s = 0.0  # time of the request in the queue
        self._connection: UpstreamConnection | None = connection  # None once the body is complete
        self._found: dict[bytes, bytes] | None = None
        self._held: deque[bytes] = deque()
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
    def complete(self) -> bool:
        """Whether the whole response is in memory."""
        return self._connection is None and self._failure is None

    @property
    def length(self) -> int | None:
        """The length of the body, if the upstream sent it."""
        return self.number(b"content-length")

    def number(self, name: bytes) -> int | None:
        """The integer value of a header; None if absent or invalid."""
        text = self.get(name) or b""
        return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else None

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises `UpstreamLostError` if it is cut off."""
        while not self._held:
            if self._failure is not None:
                raise self._failure
            if self._connection is None:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found = self._held.popleft() if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        if self._connection is not None:
            self._connection.read_on()
        return found

    async def body(self, bytes_max: int) -> bytes | None:
        """The whole body, or None if it is longer than `most`; the rest is not read.

        Times out on silence, because several reads may share this response.
        """
        parts: list[bytes] = []
        size = 0
        if (self.length or 0) > bytes_max:
            self.abandon()
            return None
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

    def abandon(self) -> None:
        """Drops the rest: a connection within a response cannot be reused."""
        if self._connection is not None:
            self._connection.abort()

    # -- called by the connection

    def hold(self, piece: bytes) -> bool:
        """Buffers a piece; True if the socket should pause until it is read."""
        self._held.append(piece)
        self._held_bytes += len(piece)
        self._wake()
        return self._held_bytes > HELD_BYTES_MAX

    def end(self, failure: UpstreamLostError | None) -> None:
        self._connection = None
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """A client connection for HTTP/1.1, one request at a time."""

    transport: asyncio.Transport

    def __init__(self, on_done: Callable[[UpstreamConnection, bool], None]) -> None:
        # Called once per request at the end of its response; True if the connection can be reused.
        self._on_done = on_done
        # Called when the connection is lost, also between two requests.
        self.on_lost: Callable[[UpstreamConnection], None] | None = None
        self._parser: HttpResponseParser | None = None
        self._waiter: asyncio.Future[UpstreamResponse] | None = None
        self._reply: UpstreamResponse | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_only = False
        self._reading = True
        self._sending = False  # more of the request follows
        self._full = False  # write buffer is full
        self._room: asyncio.Future[None] | None = None
        self._leftover = b""
        self.upgraded = False
        self.closed = False
        self.idle_since = 0.0

    def send(
        self, request: bytes, *, head_only: bool, more: bool = False
    ) -> asyncio.Future[UpstreamResponse]:
        """Sends a request, or its header if there is `more`; the future has the response header."""
        assert self._parser is None, "one request at a time"
        self._parser = HttpResponseParser(self)
        self._fields = []
        self._head_only = head_only
        self._sending = more
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._waiter

    def send_more(self, piece: bytes, *, last: bool) -> None:
        """A further piece of the request. An unfinished request makes the connection unusable."""
        self._sending = not last
        if piece and not self.closed and not self.transport.is_closing():
            self.transport.write(piece)

    async def room(self) -> None:
        """Waits until the upstream reads more, or has responded."""
        while self._full and self._waiter is not None:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def abort(self) -> None:
        self.transport.abort()

    def read_on(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self.transport.resume_reading()

    def take_over(self, protocol: asyncio.Protocol) -> bytes:
        """After 101: hands the transport to another protocol; returns bytes already received."""
        assert self.upgraded
        leftover, self._leftover = self._leftover, b""
        self.transport.set_protocol(protocol)
        self._finish(reusable=False)
        self.read_on()
        return leftover

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.upgraded:
            self._leftover += data
            return
        parser = self._parser
        if parser is None:
            self.abort()  # unexpected bytes
            return
        try:
            parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self.upgraded = True
            self._leftover = data[cast("int", upgrade.args[0]) :]
            self._rest()
        except HttpParserError:
            if self._parser is not None:
                self._fail("the upstream response is malformed")
                self.abort()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._parser is not None:
            self._fail("the connection to the upstream was lost")
        if self.on_lost is not None:
            self.on_lost(self)

    # -- the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is None:  # else it is a trailer
            self._fields.append((name, value.strip()))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if status < SWITCHING:
            return
        self._reply = reply = UpstreamResponse(self, status, self._fields)
        waiter, self._waiter = self._waiter, None
        self._make_room()
        if self._head_only:
            # The parser would wait for a body that is never sent.
            self._finish(reusable=not self._closes())
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)
        elif waiter is not None:
            self.abort()  # the request was cancelled

    def _closes(self) -> bool:
        return any(
            name.lower() == b"connection" and value.lower() == b"close" for name, value in self._fields
        )

    def on_body(self, piece: bytes) -> None:
        if self._reply is not None and not self._head_only and self._reply.hold(piece):
            self._rest()

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser is None:
            return
        if self._reply is None:
            self._fields = []  # an interim response
        elif self._reply.status != SWITCHING:
            self._finish(reusable=parser.should_keep_alive())

    # -- end of a response

    def _rest(self) -> None:
        if self._reading and not self.closed:
            self._reading = False
            self.transport.pause_reading()

    def _finish(self, *, reusable: bool) -> None:
        reply, self._reply = self._reply, None
        self._parser = None
        self.read_on()
        if reply is not None:
            reply.end(None)
        self._on_done(self, reusable and not self._sending)

    def _fail(self, reason: str) -> None:
        failure = UpstreamLostError(reason, sent=True)
        reply, self._reply = self._reply, None
        waiter, self._waiter = self._waiter, None
        self._make_room()
        self._parser = None
        if reply is not None:
            reply.end(failure)
        if waiter is not None and not waiter.done():
            waiter.set_exception(failure)
        self._on_done(self, False)


# An idle connection is not reused after this time: the upstream may be closing it.
IDLE_S_MAX = 20.0
CONNECT_S = 5.0


class ConnectionPool:
    """Requests to one upstream. Long responses and sockets use dedicated connections."""

    def __init__(
        self, origin: UpstreamAddress, connections_max: int, queue_max: int, answer_s: float
    ) -> None:
        self.origin = origin
        self._loop = asyncio.get_running_loop()
        self._free = connections_max
        self._queue_max = queue_max
        self.answer_s = answer_s  # time limit for the response header
        self._idle: list[UpstreamConnection] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._all: set[UpstreamConnection] = set()
        self._slots: set[UpstreamConnection] = set()  # busy connections within the limit
        self.refused = 0  # requests rejected by the full queue

    @property
    def active(self) -> int:
        """Requests with a pooled connection."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def request(
        self, request: bytes, *, head_only: bool = False, again: bool = False
    ) -> UpstreamResponse:
        """Sends a request after queueing. With `again` it is retried once if there was no response."""
        queued_s = await self._turn()
        connection = await self._kept_or_new()
        try:
            reply = await self._send(connection, request, head_only=head_only)
        except UpstreamLostError:
            if not again:
                raise
            queued_s += await self._turn()
            connection = await self._new()
            reply = await self._send(connection, request, head_only=head_only)
        reply.queued_s = queued_s
        return reply

    async def request_streaming(
        self, head: bytes, body: BodyStream, *, head_only: bool = False
    ) -> UpstreamResponse:
        """Sends a request whose body is still being received, with back-pressure.

        Stops at an early response. Raises `BodyLostError` if the body is cut off.
        """
        queued_s = await self._turn()
        connection = await self._kept_or_new()
        answer = connection.send(head, head_only=head_only, more=True)
        answer.add_done_callback(lambda _: body.wake())
        try:
            while not answer.done() and not await self._pass_on(connection, body):
                async with asyncio.timeout(self.answer_s):
                    await connection.room()
            async with asyncio.timeout(self.answer_s):
                reply = await answer
        except BaseException as error:
            connection.abort()
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # mark as retrieved
            if isinstance(error, TimeoutError):
                raise UpstreamLostError("the upstream response timed out", sent=True) from None
            raise
        reply.queued_s = queued_s
        return reply

    async def _pass_on(self, connection: UpstreamConnection, body: BodyStream) -> bool:
        """Sends the next piece of the body; True if it was the last."""
        piece = await body.read()
        if body.length is None:
            piece = chunk(piece) + (LAST_CHUNK if body.ended else b"")
        connection.send_more(piece, last=body.ended)
        return body.ended

    async def request_dedicated(self, request: bytes) -> tuple[UpstreamResponse, UpstreamConnection]:
        """Sends a request on a dedicated connection, for long responses."""
        connection = await self._connect()
        try:
            return await connection.send(request, head_only=False), connection
        except asyncio.CancelledError:
            connection.abort()
            raise

    def close(self) -> None:
        for connection in tuple(self._all):
            connection.abort()

    # -- queue

    async def _turn(self) -> float:
        """Waits for a free slot; returns the waiting time."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return 0.0
        if len(self._waiting) >= self._queue_max:
            self.refused += 1
            raise TailraceError("overloaded", "the request queue of the upstream is full")
        begun = time.monotonic()
        turn = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise
        return time.monotonic() - begun

    def _give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    # -- connections

    async def _kept_or_new(self) -> UpstreamConnection:
        oldest = self._loop.time() - IDLE_S_MAX
        while self._idle:
            connection = self._idle.pop()
            if connection.closed or connection.transport.is_closing():
                continue
            if connection.idle_since < oldest:
                connection.abort()
                continue
            self._slots.add(connection)
            return connection
        return await self._new()

    async def _new(self) -> UpstreamConnection:
        try:
            connection = await self._connect()
        except BaseException:
            self._give_back()
            raise
        self._slots.add(connection)
        return connection

    async def _connect(self) -> UpstreamConnection:
        origin = self.origin
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self._done), origin.host, origin.port, ssl=origin.tls
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamLostError(f"cannot connect to the upstream: {error}", sent=False) from None
        connection.on_lost = self._lost
        self._all.add(connection)
        return connection

    async def _send(
        self, connection: UpstreamConnection, request: bytes, *, head_only: bool
    ) -> UpstreamResponse:
        try:
            async with asyncio.timeout(self.answer_s):
                return await connection.send(request, head_only=head_only)
        except asyncio.CancelledError:
            connection.abort()
            raise
        except TimeoutError:
            connection.abort()
            raise UpstreamLostError("the upstream response timed out", sent=True) from None

    def release(self, reply: UpstreamResponse) -> None:
        """Releases the slot of a long response."""
        connection = reply.connection
        if connection is not None and connection in self._slots:
            self._slots.discard(connection)
            self._give_back()

    def _done(self, connection: UpstreamConnection, reusable: bool) -> None:
        counted = connection in self._slots
        if connection.upgraded:
            self._all.discard(connection)
        self._slots.discard(connection)
        if not reusable or connection.closed or not counted:
            if not connection.closed and not connection.upgraded:
                connection.transport.close()
        else:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        if counted:
            self._give_back()

    def _lost(self, connection: UpstreamConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
