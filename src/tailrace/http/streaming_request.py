"""Requests whose bodies are streamed to the application while they arrive; used by the edge to forward them.

A short body that arrives with its head, or soon after, is part of its request as usual. For a longer one the
application gets the request early, with a `BodyStream` to read from. If the application reads slowly, the
connection is not read further: a bounded amount is buffered.
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

# A body is streamed when this much of it has arrived.
STREAMED_BODY_BYTES_MIN = 64 * 1024
# Buffered for a slow application before the connection is paused.
BUFFERED_BODY_BYTES_MAX = 256 * 1024


class BodyLostError(Exception):
    """The body will not be completed; the client got an error response or has disconnected."""


class BodyStream:
    """A request body that is still arriving."""

    __slots__ = ("_held", "_held_bytes", "_on_consumed", "_waiter", "aborted", "ended", "length", "received")

    def __init__(self, length: int | None, on_consumed: Callable[[int], None]) -> None:
        self.length = length  # None if unknown (chunked)
        self.received = 0
        self.ended = False
        self.aborted = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._on_consumed = on_consumed
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._held_bytes > BUFFERED_BODY_BYTES_MAX

    async def read(self) -> bytes:
        """The bytes since the last call; empty at the end, or after `wake`. Raises `BodyLostError`."""
        if not self._held and not self.ended and not self.aborted:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.aborted:
            raise BodyLostError
        found = b"".join(self._held)
        self._held.clear()
        consumed, self._held_bytes = self._held_bytes, 0
        self._on_consumed(consumed)
        return found

    def wake(self) -> None:
        """Let a pending `read` return early."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- called by the connection

    def feed(self, piece: bytes) -> None:
        self.received += len(piece)
        self._held.append(piece)
        self._held_bytes += len(piece)
        self.wake()

    def end(self) -> None:
        self.ended = True
        self.wake()

    def abort(self) -> int:
        """Discard the buffered bytes and fail further reads; returns the number of bytes discarded."""
        self.aborted = True
        self._held.clear()
        dropped, self._held_bytes = self._held_bytes, 0
        self.wake()
        return dropped


class StreamingExchange(Exchange, eq=False):
    """A request that may be handled before its body has arrived."""

    body_stream: BodyStream | None = None


class StreamingConnection(HttpConnection):
    """A connection that dispatches requests with long bodies early."""

    __slots__ = ("_body_stream", "_closes", "_heard_at", "_stopped_at", "_stopped_s")

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._body_stream: BodyStream | None = None  # of the current request, until its body is complete
        self._closes = 0  # MODE_CLOSE if that request asked to close the connection
        self._heard_at = 0.0  # when the last body bytes arrived, in the server's coarse time
        self._stopped_at = 0.0
        self._stopped_s = 0.0  # how long reading was paused because the application was slow

    # --- reading

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if type(self._incoming) is Exchange:
            self._incoming = StreamingExchange(self, self._headers)

    def on_body(self, piece: bytes) -> None:
        body_stream = self._body_stream
        if body_stream is None:
            super().on_body(piece)
            return
        self._check_length(body_stream.received + len(piece))
        self._count(len(piece))
        body_stream.feed(piece)
        if body_stream.is_full:
            self._update_reading()

    def on_message_complete(self) -> None:
        body_stream = self._body_stream
        if body_stream is None:
            super().on_message_complete()
            return
        exchange = self._incoming
        assert exchange is not None
        if not exchange.answered:
            exchange.mode = exchange.mode & ~MODE_CLOSE | self._closes
        self._body_stream = self._incoming = None
        self._begun = self._head_done = False
        self._wire_idle = self._body_seen = 0
        self.server.requests += 1
        body_stream.end()
        self.rearm()

    def _on_partial(self, size: int) -> None:
        super()._on_partial(size)
        if self._body_stream is not None:
            self._heard_at = self.server.now
            self.rearm()
        elif self._head_done and self._received_bytes() >= STREAMED_BODY_BYTES_MIN:
            self._begin()

    def _request_body_memory(self) -> None:
        """Nothing to reserve: a streamed body uses a bounded amount of memory."""

    def _begin(self) -> None:
        """Dispatch the request without the rest of its body, if no request is in front of it."""
        exchange = self._incoming
        if not isinstance(exchange, StreamingExchange) or self.current is not None or self._queue:
            return
        if self._write_paused or self._ended or self._refusal is not None:
            return
        length = exchange.headers.get(b"content-length")
        body_stream = exchange.body_stream = BodyStream(
            None if length is None else int(length), self._on_consumed
        )
        body = bytes(self._body or b"")
        self._drop_body()
        self._body_stream = body_stream
        self._heard_at, self._stopped_s = self.server.now, 0.0
        self.server.body_bytes_held += len(body)
        body_stream.feed(body)
        # A response before the end of the body makes the connection unusable for further requests.
        self._closes = exchange.mode & MODE_CLOSE
        exchange.mode |= MODE_CLOSE
        self.has_backlog = True
        self._dispatch(exchange)

    def _received_bytes(self) -> int:
        return super()._received_bytes() if self._body_stream is None else self._body_stream.received

    def _count(self, size: int) -> None:
        server = self.server
        if server.body_bytes_held + size > server.limits.append_queue_max_bytes:
            raise TailraceError("overloaded", "too many request bodies are being received, retry later")
        server.body_bytes_held += size

    def _on_consumed(self, size: int) -> None:
        self.server.body_bytes_held -= size
        if not self._ended:
            self._update_reading()
            self.rearm()

    def _update_reading(self) -> None:
        body_stream, was_reading = self._body_stream, self._reading
        if body_stream is None or not body_stream.is_full or self._lingering:
            super()._update_reading()
        elif was_reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()
        if was_reading and not self._reading:
            self._stopped_at = self.server.now
        elif self._reading and not was_reading:
            self._heard_at = self.server.now
            self._stopped_s += self.server.now - self._stopped_at

    # --- the end of an incomplete body

    def eof_received(self) -> bool:
        return False if self._body_stream is not None else super().eof_received()

    def refuse(self, error: TailraceError) -> None:
        exchange = self._incoming
        if self._body_stream is None or exchange is None:
            super().refuse(error)
            return
        self.server.parse_errors += 1
        if exchange.answered:
            self.transport.abort()
        else:
            exchange.respond(*self._refusal_of(exchange, error))

    def close(self) -> None:
        if self._body_stream is None:
            super().close()
            return
        self._stop_parsing()
        self._queue.clear()
        self.flush()
        self._linger()

    def _stop_parsing(self) -> None:
        body_stream, self._body_stream = self._body_stream, None
        if body_stream is not None:
            self.server.body_bytes_held -= body_stream.abort()
        super()._stop_parsing()

    # --- time

    def rearm(self) -> None:
        super().rearm()
        if not self._ended:
            self.deadline = min(self.deadline, self._body_deadline())

    def on_sweep(self, now: float) -> None:
        if not self._ended and self._body_deadline() <= now:
            self.refuse(TailraceError("request_timeout", "the request body did not arrive in time"))
        else:
            super().on_sweep(now)

    def _body_deadline(self) -> float:
        """As for other bodies, a pause and some time per byte; time while reading is paused is excluded."""
        body_stream, exchange = self._body_stream, self._incoming
        if body_stream is None or exchange is None or not self._reading:
            return inf
        needed_s = body_stream.received / BODY_BYTES_PER_S_MIN + self._stopped_s
        return min(self._heard_at, exchange.started + needed_s) + self.server.limits.body_idle_ms / 1000


class StreamingServer(HttpServer):
    """A listener whose application streams request bodies."""

    def _connection(self) -> HttpConnection:
        return StreamingConnection(self)
