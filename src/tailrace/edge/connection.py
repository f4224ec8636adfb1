"""One connection to an upstream: one request at a time, its answer read as fast as somebody takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# Body bytes that wait for their reader before the socket is not read any further.
HELD_BYTES_MAX = 256 * 1024
# Silence in the middle of an answer that is waited for as a whole, after which its upstream counts as lost.
SILENCE_S_MAX = 30.0
SWITCHING = 101
DIGITS_MAX = 18  # of a number in a header


class UpstreamLostError(Exception):
    """An upstream could not be reached or went away. `sent` is true if it may have seen the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class UpstreamResponse:
    """The answer of an upstream: its head, then its body piece by piece."""

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
        self.fields = fields  # as they came
        self.queued_s = 0.0  # how long its request waited for its turn
        self._connection: UpstreamConnection | None = connection  # None once the body is all here
        self._found: dict[bytes, bytes] | None = None
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: UpstreamLostError | None = None

    def get(self, name: bytes) -> bytes | None:
        """A header by its name in lower case; the last one if there are several."""
        if self._found is None:
            self._found = {field.lower(): value for field, value in self.fields}
        return self._found.get(name)

    @property
    def connection(self) -> UpstreamConnection | None:
        return self._connection

    @property
    def complete(self) -> bool:
        """The whole answer is in memory."""
        return self._connection is None and self._failure is None

    @property
    def length(self) -> int | None:
        """How long the body is going to be, if the upstream said so."""
        return self.number(b"content-length")

    def number(self, name: bytes) -> int | None:
        """The value of a header that is a whole number; None if it is absent or something else."""
        text = self.get(name) or b""
        return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else None

    async def piece(self) -> bytes:
        """The next bytes of the body; none at its end. Raises `UpstreamLostError` if it breaks off."""
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
        """The whole body, or None if it is longer than that; the rest is then not read.

        Others may wait for the same answer: an upstream that died in the middle of it must not hold them.
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
            raise UpstreamLostError("the upstream fell silent in its answer", sent=True) from None

    def abandon(self) -> None:
        """Nobody wants the rest: a connection in the middle of an answer is of no further use."""
        if self._connection is not None:
            self._connection.abort()

    # -- what the connection tells

    def hold(self, piece: bytes) -> bool:
        """Keeps a piece for the reader; true if the socket should rest until it is taken."""
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
    """The client's end of one HTTP/1.1 connection."""

    transport: asyncio.Transport

    def __init__(self, on_done: Callable[[UpstreamConnection, bool], None]) -> None:
        # Called once per request when its answer is over; true if another request may follow.
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
        self._full = False  # the upstream does not take what it is sent
        self._room: asyncio.Future[None] | None = None
        self._leftover = b""
        self.upgraded = False
        self.closed = False
        self.idle_since = 0.0

    def send(
        self, request: bytes, *, head_only: bool, more: bool = False
    ) -> asyncio.Future[UpstreamResponse]:
        """Sends a request, or its head if there is `more`; the future has the head of its answer."""
        assert self._parser is None, "one request at a time"
        self._parser = HttpResponseParser(self)
        self._fields = []
        self._head_only = head_only
        self._sending = more
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._waiter

    def send_more(self, piece: bytes, *, last: bool) -> None:
        """A further piece of the request. One that is never finished costs the connection."""
        self._sending = not last
        if piece and not self.closed and not self.transport.is_closing():
            self.transport.write(piece)

    async def room(self) -> None:
        """Waits until the upstream takes more, or has said something."""
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
        """After 101: gives the transport to another protocol; returns the bytes that came early."""
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
            self.abort()  # bytes that nobody asked for
            return
        try:
            parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self.upgraded = True
            self._leftover = data[cast("int", upgrade.args[0]) :]
            self._rest()
        except HttpParserError:
            if self._parser is not None:
                self._fail("the upstream's answer is malformed")
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
            self._fail("the connection to the upstream broke")
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
            # The parser would wait for a body that is announced and never sent.
            self._finish(reusable=not self._closes())
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)
        elif waiter is not None:
            self.abort()  # whoever asked has given up

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
            self._fields = []  # an interim answer
        elif self._reply.status != SWITCHING:
            self._finish(reusable=parser.should_keep_alive())

    # -- the end of an answer

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
