"""The answering half of a connection: answers in order, refusals, closing, deadlines.

What every request passes through is in `exchange.py` (`respond`) and `connection.py` (reading); this half has
the rest, so that those two stay short.
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

# Requests of one connection that may wait parsed; beyond it the socket is not read.
PIPELINED_REQUESTS_MAX = 16
# How long a refused client may go on sending before it is cut off: closing at once would reset the
# connection and often destroy the refusal on its way.
LINGER_S = 2.0
# A body may take `body_idle_ms` plus the time it needs at this rate, so that dripping cannot go on forever.
BODY_BYTES_PER_S_MIN = 512
PATH_BYTES_LOGGED = 512


class ResponseConnection(asyncio.Protocol):
    """Everything of an HTTP connection except how requests are read."""

    __slots__ = (
        "_advancing",
        "_body_seen",
        "_ended",
        "_handle",
        "_head_deadline",
        "_head_done",
        "_holding",
        "_incoming",
        "_lingering",
        "_queue",
        "_reading",
        "_refusal",
        "_refused",
        "_sent_seen",
        "_write_paused",
        "_written",
        "backlog",
        "cork",
        "current",
        "deadline",
        "outlet",
        "peer",
        "scheme",
        "server",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.peer = ""
        self.scheme = b"http"
        # The exchange the application is working on, and its stream if it opened one.
        self.current: Exchange | None = None
        self.outlet: ResponseStream | None = None
        # True when something waits for the current answer: `advance` has work to do.
        self.backlog = False
        # While a read is being handled: the answers to it so far. uvloop makes a system call of every write,
        # so pipelined answers go out together.
        self.cork: list[bytes] | None = None
        # Loop time at which the sweeper has to look at this connection.
        self.deadline = inf
        self._handle = server.app.handle
        # The request being read, and how far it is.
        self._incoming: Exchange | None = None
        self._head_done = False
        self._head_deadline = inf
        self._body_seen = 0
        # What waits behind the current exchange: parsed requests, then a refusal or unparsed bytes.
        self._queue: deque[Exchange] = deque()
        self._refusal: TailraceError | None = None
        self._refused: Exchange | None = None
        self._holding = False
        self._ended = False
        self._lingering = False
        self._advancing = False
        self._reading = True
        self._write_paused = False
        self._written = 0
        self._sent_seen = 0

    # --- what the reading half does

    def _stop_parsing(self) -> None:
        """Read no further request, and forget the unfinished one."""

    def _release_held(self) -> None:
        """Parse the bytes that were held back."""

    def _send_continue(self) -> None:
        """Ask for the body of the request being read, if its client waits to be asked."""

    # --- flow

    def pause_writing(self) -> None:
        self._write_paused = True
        self.backlog = True
        self._sent_seen = self._written - self.unsent_bytes
        self._update_reading()
        self.rearm()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self.outlet is not None:
            self._call(self.outlet.on_drain)
        self.advance()

    def _update_reading(self) -> None:
        wanted = self._lingering or not (
            self._write_paused
            or self._holding
            or self._refusal is not None
            or len(self._queue) >= PIPELINED_REQUESTS_MAX
        )
        if wanted is self._reading or self.transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # --- answering

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def flush(self) -> None:
        """Write the answers held back so far."""
        cork = self.cork
        if cork:
            data = cork[0] if len(cork) == 1 else b"".join(cork)
            cork.clear()
            try:
                self.transport.write(data)
            except (RuntimeError, OSError):
                # uvloop raises on a transport that died a moment ago; connection_lost follows and cleans up.
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
            noted = exchange.note_answer(status, head)
            if noted:
                head = strip_request_id(head) + noted
        return server.start_of_answer(status, exchange) + head + persistence

    def answer_unusual(
        self, exchange: Exchange, status: int, head: bytes, body: bytes | Sequence[bytes | memoryview]
    ) -> None:
        """`Exchange.respond` for all that is not small, kept alive and HTTP/1.1."""
        closing = exchange.mode & MODE_CLOSE != 0 or self.server.draining
        parts = (body,) if isinstance(body, bytes) else body
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        start = self._head(exchange, status, head, closing=closing)
        if status in BODILESS_STATUSES:
            self.write(start + CRLF)
        elif exchange.mode & MODE_HEAD:
            # A HEAD answer may leave the length out, and must not claim 0 for a body it does not know.
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

    def open_outlet(
        self, exchange: Exchange, status: int, head: bytes, length: int | None = None
    ) -> ResponseStream:
        legacy = exchange.mode & MODE_HTTP_1_0 != 0 and length is None
        outlet = ResponseStream(self, plain=legacy or length is not None)
        if exchange.answered:
            outlet.closed = True
            return outlet
        exchange.answered = True
        exchange.deadline_at = inf
        if legacy:
            # Without chunks, only the end of the connection can mark the end of the answer.
            exchange.mode |= MODE_CLOSE
        closing = exchange.mode & MODE_CLOSE != 0 or self.server.draining
        start = self._head(exchange, status, head, closing=closing)
        if closing:
            exchange.mode |= MODE_CLOSE
        ending = CHUNKED + CRLF if length is None else length_end(length)
        self.write(start + (CRLF if legacy else ending))
        if exchange.mode & MODE_HEAD:
            outlet.closed = True
            self._finish(closing=closing)
        else:
            self.outlet = outlet
            self.rearm()
        return outlet

    def finish_stream(self) -> None:
        exchange = self.current
        self.outlet = None
        if exchange is not None:
            self._finish(closing=exchange.mode & MODE_CLOSE != 0 or self.server.draining)

    def _finish(self, *, closing: bool) -> None:
        self.current = None
        if closing:
            self.close()
            return
        self.deadline = self.server.idle_deadline
        if self.backlog:
            self.advance()

    def advance(self) -> None:
        """Go on after an answer: the next waiting request, then held bytes or a refusal."""
        if self._advancing:
            return
        self._advancing = True
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
            self._advancing = False
        if self._ended:
            return
        self._send_continue()
        self.backlog = (
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
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            self._handler_failed(exchange, error)

    def handle_later(self, exchange: Exchange, handle: Callable[[Exchange], None]) -> None:
        """Have a request handled that waited for something."""
        try:
            handle(exchange)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            self._handler_failed(exchange, error)

    def _call(self, callback: Callable[[], None] | None) -> None:
        """Run a callback of the application; its mistakes must not stop the connection's clean-up."""
        if callback is None:
            return
        try:
            callback()
        except Exception:
            logger.exception("a connection callback failed")

    # --- refusing and closing

    def _handler_failed(self, exchange: Exchange, error: Exception) -> None:
        refusal = error if isinstance(error, TailraceError) else TailraceError("internal", "internal error")
        if refusal.pending_commit is not None and not exchange.answered:
            refusal.pending_commit(lambda _: self._handle_again(exchange))
            return
        answer = None if exchange.answered else self._refusal_of(exchange, refusal)
        if refusal is not error:
            path = exchange.path[:PATH_BYTES_LOGGED].decode("latin-1")
            fields = {"path": path, "request_id": exchange.request_id.decode("ascii")}
            logger.error("handler failed", exc_info=error, extra={"fields": fields})
        if answer is not None:
            exchange.respond(*answer)
        elif self.current is exchange:
            # The answer is half out; cutting it off is the only honest end.
            self.transport.abort()

    def _handle_again(self, exchange: Exchange) -> None:
        """What a refusal rested on is durable now, or did not happen: the request is decided by that."""
        if self.current is not exchange or exchange.answered:
            return  # the client has left
        try:
            self.server.app.handle(exchange)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            if isinstance(error, TailraceError):
                error.pending_commit = None  # another change may be on its way; one wait is enough
            self._handler_failed(exchange, error)

    def _refusal_of(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        try:
            return self.server.app.refuse(exchange, error)
        except Exception:
            logger.exception("refusing failed")
            body = TailraceError("internal", "internal error").body()
            return 500, b"Content-Type: application/json; charset=utf-8\r\n", body

    def refuse(self, error: TailraceError) -> None:
        """Answer with `error` after the answers in front, then close. Nothing more is parsed."""
        self.server.parse_errors += 1
        self._refused = self._incoming if self._head_done else None
        self._refusal = error
        self.backlog = True
        self._stop_parsing()
        self._update_reading()
        self.advance()

    def _send_refusal(self, error: TailraceError) -> None:
        exchange, self._refused = self._refused, None
        self._refusal = None
        status, head, body = self._refusal_of(exchange, error)
        start = self._head(exchange, status, head, closing=True) + length_end(len(body))
        is_head = exchange is not None and exchange.method == b"HEAD"
        self.write(start if is_head else start + body)
        self._linger()

    def _linger(self) -> None:
        """Ends the connection of a client that may still be sending, so that it gets to read its answer."""
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
        """End the connection once what was written is out."""
        self._ended = True
        self._stop_parsing()
        self._queue.clear()
        # Unread or unsent, a client has this long before the sweeper cuts the connection.
        self.deadline = self.server.now + self.server.limits.body_idle_ms / 1000
        self.flush()
        self.transport.close()

    # --- time

    def rearm(self) -> None:
        """Set the time of the sweeper's next look from what the connection is doing."""
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
        """The deadline has passed: see what was late."""
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
            self.refuse(TailraceError("request_timeout", f"the request's {part} did not arrive in time"))
        else:
            self.close()

    def drain(self) -> None:
        """The server is stopping: an idle connection ends now, a working one after its answers."""
        if self.current is None and not self._queue and self._incoming is None and not self._ended:
            self.close()
