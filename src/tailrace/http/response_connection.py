"""The response side of a connection: responses in order, errors, closing, deadlines.

The hot path is in `exchange.py` (`respond`) and `connection.py` (reading); the less common cases are here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import (
    BODILESS_STATUSES,
    CHUNKED,
    CONNECTION_CLOSE,
    CONNECTION_KEEP_ALIVE,
    CRLF,
    JOIN_BYTES_MAX,
    MODE_CLOSE,
    MODE_HEAD,
    MODE_HTTP_1_0,
    MODE_OBSERVED,
    Exchange,
    ResponseStream,
    length_end,
    strip_request_id,
)

if TYPE_CHECKING:
    from tailrace.http.server import HttpServer

logger = logging.getLogger("tailrace.http")

# Parsed requests of one connection that may wait; beyond that the socket is not read.
PIPELINED_REQUESTS_MAX = 16
# How long a client may continue sending after an error response: closing at once would reset the connection
# and often destroy the response in transit.
LINGER_S = 2.0
# A body may take `body_idle_ms` plus the time it needs at this rate, which bounds slow senders.
BODY_BYTES_PER_S_MIN = 512
PATH_BYTES_LOGGED = 512


class ResponseConnection(asyncio.Protocol):
    """An HTTP connection except for reading requests."""

    __slots__ = (
        "_body_seen",
        "_ended",
        "_handle",
        "_head_deadline",
        "_head_done",
        "_holding",
        "_incoming",
        "_lingering",
        "_processing",
        "_queue",
        "_reading",
        "_refusal",
        "_refused",
        "_sent_seen",
        "_write_paused",
        "_written",
        "cork",
        "current",
        "deadline",
        "has_backlog",
        "peer",
        "response_stream",
        "scheme",
        "server",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.peer = ""
        self.scheme = b"http"
        # The exchange being handled, and its response stream if it opened one.
        self.current: Exchange | None = None
        self.response_stream: ResponseStream | None = None
        # True when something waits for the current response: `process_next` has work to do.
        self.has_backlog = False
        # While a read is being handled: the responses to it so far. uvloop makes a system call for every
        # write, so pipelined responses are written together.
        self.cork: list[bytes] | None = None
        # Loop time at which the sweeper checks this connection.
        self.deadline = inf
        self._handle = server.app.handle
        # The request being read, and its progress.
        self._incoming: Exchange | None = None
        self._head_done = False
        self._head_deadline = inf
        self._body_seen = 0
        # Waiting behind the current exchange: parsed requests, then an error or unparsed bytes.
        self._queue: deque[Exchange] = deque()
        self._refusal: TailraceError | None = None
        self._refused: Exchange | None = None
        self._holding = False
        self._ended = False
        self._lingering = False
        self._processing = False
        self._reading = True
        self._write_paused = False
        self._written = 0
        self._sent_seen = 0

    # --- implemented by the reading half

    def _stop_parsing(self) -> None:
        """Read no further request, and drop the incomplete one."""

    def _release_held(self) -> None:
        """Parse the bytes that were held."""

    def _send_continue(self) -> None:
        """Send 100 Continue for the request being read, if its client waits for it."""

    # --- flow

    def pause_writing(self) -> None:
        self._write_paused = True
        self.has_backlog = True
        self._sent_seen = self._written - self.unsent_bytes
        self._update_reading()
        self.rearm()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self.response_stream is not None:
            self._call(self.response_stream.on_drain)
        self.process_next()

    def _update_reading(self) -> None:
        should_read = self._lingering or not (
            self._write_paused
            or self._holding
            or self._refusal is not None
            or len(self._queue) >= PIPELINED_REQUESTS_MAX
        )
        if should_read is self._reading or self.transport.is_closing():
            return
        self._reading = should_read
        if should_read:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # --- responding

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def flush(self) -> None:
        """Write the responses gathered so far."""
        cork = self.cork
        if cork:
            data = cork[0] if len(cork) == 1 else b"".join(cork)
            cork.clear()
            try:
                self.transport.write(data)
            except (RuntimeError, OSError):
                # uvloop raises on a transport that just died; connection_lost follows and cleans up.
                return

    def write(self, data: bytes) -> None:
        if self.cork:
            self.flush()
        size = len(data)
        self._written += size
        self.server.bytes_out += size
        try:
            self.transport.write(data)
        except (RuntimeError, OSError):
            return

    def _head(self, exchange: Exchange | None, status: int, head: bytes, *, closing: bool) -> bytes:
        server = self.server
        persistence = b""
        if closing:
            persistence = CONNECTION_CLOSE
        elif exchange is not None and exchange.mode & MODE_HTTP_1_0:
            persistence = CONNECTION_KEEP_ALIVE
        if exchange is not None and exchange.mode & MODE_OBSERVED:
            lines = exchange.begin_response(status, head)
            if lines:
                head = strip_request_id(head) + lines
        return server.response_start(status, exchange) + head + persistence

    def respond_general(
        self, exchange: Exchange, status: int, head: bytes, body: bytes | Sequence[bytes | memoryview]
    ) -> None:
        """`Exchange.respond` for large responses, closing connections, HEAD and HTTP/1.0."""
        closing = exchange.mode & MODE_CLOSE != 0 or self.server.draining
        parts = (body,) if isinstance(body, bytes) else body
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        start = self._head(exchange, status, head, closing=closing)
        if status in BODILESS_STATUSES:
            self.write(start + CRLF)
        elif exchange.mode & MODE_HEAD:
            # A HEAD response may omit the length, and must not say 0 for a body of unknown size.
            self.write(start + (length_end(size) if size else CRLF))
        elif size <= JOIN_BYTES_MAX:
            self.write(b"".join((start, length_end(size), *parts)))
        else:
            start += length_end(size)
            self._written += len(start) + size
            self.server.bytes_out += len(start) + size
            self.flush()
            try:
                self.transport.writelines([start, *parts])
            except (RuntimeError, OSError):
                return
        self._finish(closing=closing)

    def open_response_stream(
        self, exchange: Exchange, status: int, head: bytes, length: int | None = None
    ) -> ResponseStream:
        legacy = exchange.mode & MODE_HTTP_1_0 != 0 and length is None
        stream = ResponseStream(self, plain=legacy or length is not None)
        if exchange.answered:
            stream.closed = True
            return stream
        exchange.answered = True
        exchange.deadline_at = inf
        if legacy:
            # Without chunks, only the end of the connection marks the end of the response.
            exchange.mode |= MODE_CLOSE
        closing = exchange.mode & MODE_CLOSE != 0 or self.server.draining
        start = self._head(exchange, status, head, closing=closing)
        if closing:
            exchange.mode |= MODE_CLOSE
        ending = CHUNKED + CRLF if length is None else length_end(length)
        self.write(start + (CRLF if legacy else ending))
        if exchange.mode & MODE_HEAD:
            stream.closed = True
            self._finish(closing=closing)
        else:
            self.response_stream = stream
            self.rearm()
        return stream

    def finish_stream(self) -> None:
        exchange = self.current
        self.response_stream = None
        if exchange is not None:
            self._finish(closing=exchange.mode & MODE_CLOSE != 0 or self.server.draining)

    def _finish(self, *, closing: bool) -> None:
        self.current = None
        if closing:
            self.close()
            return
        self.deadline = self.server.idle_deadline
        if self.has_backlog:
            self.process_next()

    def process_next(self) -> None:
        """Continue after a response: the next waiting request, then held bytes or an error."""
        if self._processing:
            return
        self._processing = True
        try:
            while self.current is None and not self._write_paused and not self._ended:
                if self._queue:
                    self._dispatch(self._queue.popleft())
                elif self._refusal is not None:
                    self._send_refusal(self._refusal)
                elif self._holding:
                    self._release_held()
                else:
                    break
        finally:
            self._processing = False
        if self._ended:
            return
        self._send_continue()
        self.has_backlog = (
            self._holding
            or self._write_paused
            or bool(self._queue)
            or self._refusal is not None
            or (self._incoming is not None and self.current is not None)
        )
        self._update_reading()
        self.rearm()

    def _dispatch(self, exchange: Exchange) -> None:
        self.current = exchange
        self.deadline = inf
        try:
            self._handle(exchange)
        except Exception as error:  # noqa: BLE001 - becomes an error response
            self._handler_failed(exchange, error)

    def handle_deferred(self, exchange: Exchange, handle: Callable[[Exchange], None]) -> None:
        """Run the handler of a deferred request."""
        try:
            handle(exchange)
        except Exception as error:  # noqa: BLE001 - becomes an error response
            self._handler_failed(exchange, error)

    def _call(self, callback: Callable[[], None] | None) -> None:
        """Run a callback of the application; its errors must not stop the connection's clean-up."""
        if callback is None:
            return
        try:
            callback()
        except Exception:
            logger.exception("connection callback failed")

    # --- errors and closing

    def _handler_failed(self, exchange: Exchange, error: Exception) -> None:
        refusal = error if isinstance(error, TailraceError) else TailraceError("internal", "internal error")
        if refusal.pending_commit is not None and not exchange.answered:
            refusal.pending_commit(lambda _: self._handle_again(exchange))
            return
        response = None if exchange.answered else self._refusal_of(exchange, refusal)
        if refusal is not error:
            path = exchange.path[:PATH_BYTES_LOGGED].decode("latin-1")
            fields = {"path": path, "request_id": exchange.request_id.decode("ascii")}
            logger.error("request handler failed", exc_info=error, extra={"fields": fields})
        if response is not None:
            exchange.respond(*response)
        elif self.current is exchange:
            # The response is partially sent; aborting is the only way to signal the error.
            self.transport.abort()

    def _handle_again(self, exchange: Exchange) -> None:
        """The change that an error depended on was committed or has failed: handle the request again."""
        if self.current is not exchange or exchange.answered:
            return  # the client has disconnected
        try:
            self.server.app.handle(exchange)
        except Exception as error:  # noqa: BLE001 - becomes an error response
            if isinstance(error, TailraceError):
                error.pending_commit = None  # another change may be pending; one wait is enough
            self._handler_failed(exchange, error)

    def _refusal_of(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        try:
            return self.server.app.refuse(exchange, error)
        except Exception:
            logger.exception("error response failed")
            body = TailraceError("internal", "internal error").body()
            return 500, b"Content-Type: application/json; charset=utf-8\r\n", body

    def refuse(self, error: TailraceError) -> None:
        """Respond with `error` after the responses in front, then close. Nothing more is parsed."""
        self.server.parse_errors += 1
        self._refused = self._incoming if self._head_done else None
        self._refusal = error
        self.has_backlog = True
        self._stop_parsing()
        self._update_reading()
        self.process_next()

    def _send_refusal(self, error: TailraceError) -> None:
        exchange, self._refused = self._refused, None
        self._refusal = None
        status, head, body = self._refusal_of(exchange, error)
        start = self._head(exchange, status, head, closing=True) + length_end(len(body))
        is_head = exchange is not None and exchange.method == b"HEAD"
        self.write(start if is_head else start + body)
        self._linger()

    def _linger(self) -> None:
        """Close gracefully while the client may still be sending, so that it can read its response."""
        self._ended = True
        if self.transport.is_closing():
            return
        if not self.transport.can_write_eof():
            self.close()
            return
        self._lingering = True
        self.deadline = self.server.now + LINGER_S
        try:
            self.transport.write_eof()
        except (RuntimeError, OSError):
            return
        self._update_reading()

    def close(self) -> None:
        """Close the connection after the written bytes are sent."""
        self._ended = True
        self._stop_parsing()
        self._queue.clear()
        # The client has this long to read before the sweeper aborts the connection.
        self.deadline = self.server.now + self.server.limits.body_idle_ms / 1000
        self.flush()
        self.transport.close()

    # --- time

    def rearm(self) -> None:
        """Set the deadline for the sweeper from the state of the connection."""
        if self._ended:
            return
        server = self.server
        limits = server.limits
        deadline = server.idle_deadline
        if self.current is not None:
            deadline = self.current.deadline_at
        elif self._incoming is not None:
            if self._head_done:
                quiet = limits.body_idle_ms / 1000
                received = self._incoming.started + self._body_seen / BODY_BYTES_PER_S_MIN
                deadline = quiet + min(server.now, received)
            else:
                deadline = self._head_deadline
        if self._write_paused:
            deadline = min(deadline, server.now + limits.body_idle_ms / 1000)
        self.deadline = deadline

    def on_sweep(self, now: float) -> None:
        """The deadline has passed: act on what was late."""
        current = self.current
        if self._ended:
            self.transport.abort()
        elif current is not None and current.deadline_at <= now:
            current.deadline_at = inf
            callback, current.on_deadline = current.on_deadline, None
            self._call(callback)
            self.rearm()
        elif self._write_paused:
            sent = self._written - self.unsent_bytes
            if sent <= self._sent_seen:
                self.transport.abort()
                return
            self._sent_seen = sent
            self.rearm()
        elif current is not None:
            self.rearm()
        elif self._incoming is not None:
            part = "body" if self._head_done else "headers"
            self.refuse(TailraceError("request_timeout", f"the request {part} did not arrive in time"))
        else:
            self.close()

    def drain(self) -> None:
        """The server is stopping: close an idle connection now, a busy one after its responses."""
        if self.current is None and not self._queue and self._incoming is None and not self._ended:
            self.close()
