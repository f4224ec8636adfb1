"""Requests whose bodies are given on while they come, for an application that passes them on itself.

A body that is here as soon as its head is, or soon after, is part of its request as anywhere. A longer one is
not waited for: the application gets the request with an `Intake`, from which it takes what has come so far.
What it does not take stops the client: no more than a bound is held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

from tailrace.common.errors import TailraceError
from tailrace.http.connection import HttpConnection
from tailrace.http.exchange import MODE_CLOSE, Exchange
from tailrace.http.response_connection import BODY_BYTES_PER_S_MIN
from tailrace.http.server import HttpServer

# A body of which this much is here is not waited for any longer.
STREAMED_BODY_BYTES_MIN = 64 * 1024
# Held for an application that does not take it, before the client is stopped.
BUFFERED_BODY_BYTES_MAX = 256 * 1024


class BodyLostError(Exception):
    """The body will not come to its end; the client was told why, or is gone."""


class BodyStream:
    """A body that is still coming."""

    __slots__ = ("_held", "_held_bytes", "_on_taken", "_waiter", "ended", "length", "lost", "received")

    def __init__(self, length: int | None, on_taken: Callable[[int], None]) -> None:
        self.length = length  # None if only its end will tell
        self.received = 0
        self.ended = False
        self.lost = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._on_taken = on_taken
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._held_bytes > BUFFERED_BODY_BYTES_MAX

    async def piece(self) -> bytes:
        """What has come since; nothing at the end, or when `wake` was called. Raises `BodyLostError`."""
        if not self._held and not self.ended and not self.lost:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.lost:
            raise BodyLostError
        found = b"".join(self._held)
        self._held.clear()
        taken, self._held_bytes = self._held_bytes, 0
        self._on_taken(taken)
        return found

    def wake(self) -> None:
        """Lets whoever waits look at something else."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- what the connection does

    def hold(self, piece: bytes) -> None:
        self.received += len(piece)
        self._held.append(piece)
        self._held_bytes += len(piece)
        self.wake()

    def end(self) -> None:
        self.ended = True
        self.wake()

    def lose(self) -> int:
        """Nothing more comes, and what was held is of no use. Its size."""
        self.lost = True
        self._held.clear()
        dropped, self._held_bytes = self._held_bytes, 0
        self.wake()
        return dropped


class StreamingExchange(Exchange, eq=False):
    """A request that may be here before its body is."""

    intake: BodyStream | None = None


class StreamingConnection(HttpConnection):
    """A connection that hands long requests over as soon as they have begun."""

    __slots__ = ("_closes", "_heard_at", "_intake", "_stopped_at", "_stopped_s")

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._intake: BodyStream | None = None  # of the current request, until its body is here
        self._closes = 0  # whether that request asked for the end of the connection
        self._heard_at = 0.0  # when more of the body came, in the coarse time of the server
        self._stopped_at = 0.0
        self._stopped_s = 0.0  # for how long it was not read because nobody took it

    # --- reading

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if type(self._incoming) is Exchange:
            self._incoming = StreamingExchange(self, self._headers)

    def on_body(self, piece: bytes) -> None:
        intake = self._intake
        if intake is None:
            super().on_body(piece)
            return
        self._check_length(intake.received + len(piece))
        self._count(len(piece))
        intake.hold(piece)
        if intake.is_full:
            self._update_reading()

    def on_message_complete(self) -> None:
        intake = self._intake
        if intake is None:
            super().on_message_complete()
            return
        exchange = self._incoming
        assert exchange is not None
        if not exchange.answered:
            exchange.mode = exchange.mode & ~MODE_CLOSE | self._closes
        self._intake = self._incoming = None
        self._begun = self._head_done = False
        self._wire_idle = self._body_seen = 0
        self.server.requests += 1
        intake.end()
        self.rearm()

    def _on_partial(self, size: int) -> None:
        super()._on_partial(size)
        if self._intake is not None:
            self._heard_at = self.server.now
            self.rearm()
        elif self._head_done and self._received_bytes() >= STREAMED_BODY_BYTES_MIN:
            self._begin()

    def _ask_for_share(self) -> None:
        """Of a body that is given on while it comes, no more than a bound is in memory at any time."""

    def _begin(self) -> None:
        """The request is handed over without the rest of its body, if it is its turn."""
        exchange = self._incoming
        if not isinstance(exchange, StreamingExchange) or self.current is not None or self._queue:
            return
        if self._write_paused or self._ended or self._refusal is not None:
            return
        length = exchange.headers.get(b"content-length")
        intake = exchange.intake = BodyStream(None if length is None else int(length), self._on_taken)
        body = bytes(self._body or b"")
        self._drop_body()
        self._intake = intake
        self._heard_at, self._stopped_s = self.server.now, 0.0
        self.server.body_bytes_held += len(body)
        intake.hold(body)
        # Whoever answers before the body is here cannot go on with this connection.
        self._closes = exchange.mode & MODE_CLOSE
        exchange.mode |= MODE_CLOSE
        self.backlog = True
        self._dispatch(exchange)

    def _received_bytes(self) -> int:
        return super()._received_bytes() if self._intake is None else self._intake.received

    def _count(self, size: int) -> None:
        server = self.server
        if server.body_bytes_held + size > server.limits.append_queue_max_bytes:
            raise TailraceError("overloaded", "too many bodies are being received")
        server.body_bytes_held += size

    def _on_taken(self, size: int) -> None:
        self.server.body_bytes_held -= size
        if not self._ended:
            self._update_reading()
            self.rearm()

    def _update_reading(self) -> None:
        intake, was_reading = self._intake, self._reading
        if intake is None or not intake.is_full or self._lingering:
            super()._update_reading()
        elif was_reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()
        if was_reading and not self._reading:
            self._stopped_at = self.server.now
        elif self._reading and not was_reading:
            self._heard_at = self.server.now
            self._stopped_s += self.server.now - self._stopped_at

    # --- the end of a body that is not all there

    def eof_received(self) -> bool:
        return False if self._intake is not None else super().eof_received()

    def refuse(self, error: TailraceError) -> None:
        exchange = self._incoming
        if self._intake is None or exchange is None:
            super().refuse(error)
            return
        self.server.parse_errors += 1
        if exchange.answered:
            self.transport.abort()
        else:
            exchange.respond(*self._refusal_of(exchange, error))

    def close(self) -> None:
        if self._intake is None:
            super().close()
            return
        self._stop_parsing()
        self._queue.clear()
        self.flush()
        self._linger()

    def _stop_parsing(self) -> None:
        intake, self._intake = self._intake, None
        if intake is not None:
            self.server.body_bytes_held -= intake.lose()
        super()._stop_parsing()

    # --- time

    def rearm(self) -> None:
        super().rearm()
        if not self._ended:
            self.deadline = min(self.deadline, self._body_deadline())

    def on_sweep(self, now: float) -> None:
        if not self._ended and self._body_deadline() <= now:
            self.refuse(TailraceError("request_timeout", "the request's body did not arrive in time"))
        else:
            super().on_sweep(now)

    def _body_deadline(self) -> float:
        """As for any body: some silence is allowed, and some time per byte. Being stopped is not silence."""
        intake, exchange = self._intake, self._incoming
        if intake is None or exchange is None or not self._reading:
            return inf
        needed_s = intake.received / BODY_BYTES_PER_S_MIN + self._stopped_s
        return min(self._heard_at, exchange.started + needed_s) + self.server.limits.body_idle_ms / 1000


class StreamingServer(HttpServer):
    """A listener whose application takes bodies as they come."""

    def _connection(self) -> HttpConnection:
        return StreamingConnection(self)
