"""Kept connections to one upstream: so many at once, and a bounded queue for their turn."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from tailrace.common.errors import TailraceError
from tailrace.edge.connection import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.edge.origin import UpstreamAddress
from tailrace.http.exchange import LAST_CHUNK, chunk
from tailrace.http.streaming_request import BodyStream

# A kept connection that was silent longer is not trusted with a request: its other end may be closing it.
IDLE_S_MAX = 20.0
CONNECT_S = 5.0


class ConnectionPool:
    """Requests to one upstream. Long answers and sockets have connections of their own."""

    def __init__(
        self, origin: UpstreamAddress, connections_max: int, queue_max: int, answer_s: float
    ) -> None:
        self.origin = origin
        self._loop = asyncio.get_running_loop()
        self._free = connections_max
        self._queue_max = queue_max
        self.answer_s = answer_s  # how long an upstream has to begin its answer
        self._idle: list[UpstreamConnection] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._all: set[UpstreamConnection] = set()
        self._slots: set[UpstreamConnection] = set()  # busy ones that count
        self.refused = 0  # requests for which there was no place in the queue

    @property
    def active(self) -> int:
        """Requests that have a connection; long answers with one of their own are not among them."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def ask(self, request: bytes, *, head_only: bool = False, again: bool = False) -> UpstreamResponse:
        """Sends a request when it is its turn. With `again` it is tried once more if nothing came back."""
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

    async def ask_while_coming(
        self, head: bytes, body: BodyStream, *, head_only: bool = False
    ) -> UpstreamResponse:
        """Sends a request whose body is still coming, as fast as the upstream takes it.

        An upstream that answers before the end gets no more of it. Raises `BodyLostError` if there is no end.
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
                answer.exception()  # nobody else will look at it
            if isinstance(error, TimeoutError):
                raise UpstreamLostError("the upstream did not answer in time", sent=True) from None
            raise
        reply.queued_s = queued_s
        return reply

    async def _pass_on(self, connection: UpstreamConnection, body: BodyStream) -> bool:
        """The next piece of a body that is still coming; true if it was the last."""
        piece = await body.piece()
        if body.length is None:
            piece = chunk(piece) + (LAST_CHUNK if body.ended else b"")
        connection.send_more(piece, last=body.ended)
        return body.ended

    async def ask_apart(self, request: bytes) -> tuple[UpstreamResponse, UpstreamConnection]:
        """Sends a request on a connection of its own, for answers that take as long as they like."""
        connection = await self._connect()
        try:
            return await connection.send(request, head_only=False), connection
        except asyncio.CancelledError:
            connection.abort()
            raise

    def close(self) -> None:
        for connection in tuple(self._all):
            connection.abort()

    # -- turns

    async def _turn(self) -> float:
        """Waits for a turn; the answer is how long that took."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return 0.0
        if len(self._waiting) >= self._queue_max:
            self.refused += 1
            raise TailraceError("overloaded", "too many requests wait for the upstream")
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
            raise UpstreamLostError(f"the upstream cannot be reached: {error}", sent=False) from None
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
            raise UpstreamLostError("the upstream did not answer in time", sent=True) from None

    def let_go(self, reply: UpstreamResponse) -> None:
        """An answer that has no end in sight gives its turn to others."""
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
