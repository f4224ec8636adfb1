"""One HTTP/1.1 connection: bytes in, requests to the application, answers out in order.

The parser is llhttp (through httptools); this class is its callback object and the asyncio protocol at once,
so that a request costs one object and no task. Rare cases live in methods of their own, away from the path
that every request takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from tailrace.errors import TailraceError
from tailrace.net.exchange import MODE_CLOSE, MODE_CONTINUE, MODE_HEAD, MODE_LEGACY, Exchange
from tailrace.net.outlet import Outlet
from tailrace.net.request_head import ODD_HEADERS, check_head_size, examine_head, head_too_large, note_repeat
from tailrace.net.wire import (
    BODILESS,
    CHUNKED,
    CONNECTION_CLOSE,
    CONNECTION_KEEP_ALIVE,
    CONTINUE,
    CRLF,
    JOIN_BYTES_MAX,
    length_end,
)

if TYPE_CHECKING:
    from tailrace.net.server import HttpServer

logger = logging.getLogger("tailrace.net")

# Requests of one connection that may wait parsed; beyond it the socket is not read.
PIPELINE_MAX = 16
# How long a refused client may go on sending before it is cut off: closing at once would reset the
# connection and often destroy the refusal on its way.
LINGER_S = 2.0
# A body may take `body_idle_ms` plus the time it needs at this rate, so that dripping cannot go on forever.
BODY_RATE_MIN = 512
SLASH = 0x2F


def _ignore(data: bytes | memoryview) -> None:
    """Takes the bytes of a connection that is done with reading."""


def _http09() -> TailraceError:
    return TailraceError("invalid_request", "HTTP/0.9 is not supported; use HTTP/1.1")


# Stands in for the parser of a finished connection: parser and connection refer to each other, and breaking
# the cycle frees both at once instead of at the next collection.
_NO_PARSER = HttpRequestParser(object())


class HttpConnection(asyncio.Protocol):
    """The protocol object of one client connection. Only `net` touches it."""

    __slots__ = (
        "_advancing",
        "_body",
        "_body_counted",
        "_body_seen",
        "_ended",
        "_feed",
        "_handle",
        "_head_bytes",
        "_head_deadline",
        "_head_done",
        "_headers",
        "_held",
        "_holding",
        "_incoming",
        "_last_request",
        "_lingering",
        "_parser",
        "_queue",
        "_reading",
        "_refusal",
        "_refused",
        "_sent_seen",
        "_time",
        "_url",
        "_wire_idle",
        "_write_paused",
        "_written",
        "backlog",
        "current",
        "deadline",
        "outlet",
        "peer",
        "scheme",
        "server",
        "successor",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.peer = ""
        self.scheme = b"http"
        # The exchange the application is working on, and its stream if it opened one.
        self.current: Exchange | None = None
        self.outlet: Outlet | None = None
        # The protocol that took the connection over, if one did.
        self.successor: asyncio.Protocol | None = None
        # True when something waits for the current answer: `advance` has work to do.
        self.backlog = False
        # Loop time at which the sweeper has to look at this connection.
        self.deadline = inf
        self._handle = server.app.handle
        self._time = server.loop.time
        self._parser = HttpRequestParser(self)
        self._feed: Callable[[bytes | memoryview], None] = self._parser.feed_data
        # The request being read.
        self._incoming: Exchange | None = None
        self._headers: dict[bytes, bytes] = {}
        self._url = b""
        self._head_done = False
        self._head_bytes = 0
        self._head_deadline = inf
        self._body: bytes | bytearray | None = None
        self._body_seen = 0
        self._body_counted = 0
        self._wire_idle = 0
        # What waits behind the current exchange: parsed requests, then a refusal or unparsed bytes.
        self._queue: deque[Exchange] = deque()
        self._refusal: TailraceError | None = None
        self._refused: Exchange | None = None
        self._held = b""
        self._holding = False
        self._last_request = False
        self._ended = False
        self._lingering = False
        self._advancing = False
        self._reading = True
        self._write_paused = False
        self._written = 0
        self._sent_seen = 0

    # --- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        address: object = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            host, port, *_ = cast("tuple[object, ...]", address)
            self.peer = f"{host}:{port}"
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = b"https"
        self.server.admit(self)

    def data_received(self, data: bytes) -> None:
        server = self.server
        size = len(data)
        server.bytes_in += size
        if size > server.slice_bytes:
            self._feed_slices(data)
            return
        try:
            self._feed(data)
        except HttpParserUpgrade as upgrade:
            self._leave_parser(data[cast("int", upgrade.args[0]) :])
            return
        except HttpParserError as error:
            self._parse_failed(error)
            return
        if self._incoming is not None:
            self._on_partial(size)

    def eof_received(self) -> bool:
        """Half-closed or gone? One cannot tell, so it depends on what the client is waiting for.

        An answer that is being made is finished and sent. A stream, or a wait whose handler asked to be told
        (`on_gone`), would hold the connection for long and most likely for nobody: it ends.
        """
        current = self.current
        if (
            current is None
            or current.on_gone is not None
            or self.outlet is not None
            or self.scheme == b"https"
        ):
            return False
        self._stop_parsing()
        last = self._queue[-1] if self._queue else current
        last.mode |= MODE_CLOSE
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._ended = True
        self._stop_parsing()
        self._parser = _NO_PARSER
        self.server.forget(self)
        for waiting in self._queue:
            waiting.answered = True
        self._queue.clear()
        exchange, outlet = self.current, self.outlet
        self.current = self.outlet = None
        if exchange is not None:
            exchange.answered = True
            gone, exchange.on_gone, exchange.on_deadline = exchange.on_gone, None, None
            self._call(gone)
        if outlet is not None:
            outlet.closed = True
            gone, outlet.on_gone, outlet.on_drain = outlet.on_gone, None, None
            self._call(gone)

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

    # --- parser callbacks

    def on_url(self, url: bytes) -> None:
        if self._incoming is None:
            headers: dict[bytes, bytes] = {}
            self._headers = headers
            self._incoming = Exchange(self, headers)
            self._url = url
        else:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        name = name.lower()
        if name not in headers:
            headers[name] = value.rstrip()
        elif self._incoming is not None and not self._head_done:
            note_repeat(self._incoming, name, value.rstrip())

    def on_headers_complete(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._head_done = True
        parser = self._parser
        server = self.server
        exchange.started = self._time()
        method = exchange.method = parser.get_method()
        url = self._url
        if b"?" in url:
            exchange.path, _, exchange.query = url.partition(b"?")
        else:
            exchange.path = url
            exchange.query = b""
        if self._head_bytes:
            self._head_bytes = 0
            check_head_size(exchange, url, server.limits.header_bytes)
        headers = exchange.headers
        keep_alive = parser.should_keep_alive()
        if (
            not keep_alive
            or headers.get(b"host") not in server.hosts_known
            or exchange.repeated is not None
            or method == b"HEAD"
            or url[0] != SLASH
            or not ODD_HEADERS.isdisjoint(headers)
        ):
            self._examine(exchange, keep_alive)
        length = headers.get(b"content-length")
        if length is not None and len(length) >= server.body_digits:
            self._check_length(int(length))

    def on_body(self, piece: bytes) -> None:
        if self._body is None:
            self._body = piece
            if len(piece) > self.server.body_bytes_max:
                self._check_length(len(piece))
        else:
            self._add_body(piece)

    def on_message_complete(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._incoming = None
        self._head_done = False
        self._wire_idle = 0
        body = self._body
        if body is not None:
            exchange.body = body if type(body) is bytes else bytes(body)
            self._drop_body()
        self.server.requests += 1
        if self.current is None and not self._write_paused:
            self.current = exchange
            self.deadline = inf
            try:
                self._handle(exchange)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
                self._handler_failed(exchange, error)
        else:
            self._queue.append(exchange)
            self.backlog = True
            if len(self._queue) >= PIPELINE_MAX:
                self._update_reading()

    # --- reading, uncommon cases

    def _feed_slices(self, data: bytes) -> None:
        """Parse a large read in slices, so that a crowded pipeline stops it before it is all objects."""
        view = memoryview(data)
        step = self.server.slice_bytes
        position = 0
        while position < len(data):
            if self._holding or len(self._queue) >= PIPELINE_MAX:
                self._hold(data[position:])
                return
            piece = view[position : position + step]
            try:
                self._feed(piece)
            except HttpParserUpgrade as upgrade:
                self._leave_parser(data[position + cast("int", upgrade.args[0]) :])
                return
            except HttpParserError as error:
                self._parse_failed(error)
                return
            position += len(piece)
            if self._incoming is not None:
                self._on_partial(len(piece))

    def _hold(self, data: bytes | memoryview) -> None:
        """Keep bytes unparsed until the answers in front are given; the socket is not read meanwhile."""
        self._held += data
        if not self._holding:
            self._holding = True
            self._feed = self._hold
            self.backlog = True
            self._update_reading()

    def _release_held(self) -> None:
        data, self._held = self._held, b""
        self._holding = False
        self._feed = self._parser.feed_data
        if data:
            self._feed_slices(data)

    def _leave_parser(self, rest: bytes) -> None:
        """After an upgrade request: what follows is HTTP or not, as the application decides."""
        if self.successor is not None:
            if rest:
                self.successor.data_received(rest)
        elif self._ended:
            return
        elif self.current is not None or self._queue:
            self._hold(rest)
        elif rest:
            self._feed_slices(rest)

    def _stop_parsing(self) -> None:
        self._feed = _ignore
        self._holding = False
        self._held = b""
        self._incoming = None
        self._headers = {}
        self._drop_body()

    def _on_partial(self, size: int) -> None:
        """A request is begun and not finished: mind its size and the time it may take."""
        server = self.server
        limit = server.limits.header_bytes
        if not self._head_done:
            if self._head_bytes == 0:
                # The part of a head that lies in one slice is never over the limit: slices are not longer.
                self._head_bytes = 1
                self._head_deadline = server.now + server.limits.header_ms / 1000
            else:
                self._head_bytes += size
            if self._head_bytes > limit:
                self.refuse(head_too_large(limit))
                return
            if self._parser.get_http_version() == "0.9":
                self.refuse(_http09())
                return
        else:
            received = 0 if self._body is None else len(self._body)
            # Chunk extensions and trailers carry no body: they may be as long as a head, not longer.
            self._wire_idle = self._wire_idle + size if received == self._body_seen else 0
            self._body_seen = received
            if self._wire_idle > limit:
                self.refuse(
                    TailraceError("invalid_request", f"over {limit} bytes of chunk framing or trailers")
                )
                return
        if self.current is None:
            self.rearm()
        else:
            self.backlog = True

    def _examine(self, exchange: Exchange, keep_alive: bool) -> None:
        # The trailers of a chunked body come through on_header too; they must not reach the headers.
        self._headers = {}
        examine_head(exchange, self._parser, keep_alive, self.server.hosts_known)
        if exchange.mode & MODE_CLOSE:
            self._last_request = True
        if exchange.mode & MODE_CONTINUE:
            length = exchange.headers.get(b"content-length")
            if length is not None:
                self._check_length(int(length))
            self._send_continue()

    def _send_continue(self) -> None:
        """Ask for the body, but only when every answer in front of it is out."""
        exchange = self._incoming
        if exchange is None or not exchange.mode & MODE_CONTINUE:
            return
        if self.current is not None or self._queue:
            self.backlog = True
            return
        exchange.mode &= ~MODE_CONTINUE
        if self._body is None:
            self.write(CONTINUE)

    def _check_length(self, size: int) -> None:
        limit = self.server.body_bytes_max
        if size > limit:
            message = f"the body is over {limit} bytes"
            raise TailraceError("payload_too_large", message, limit_bytes=limit)

    def _add_body(self, piece: bytes) -> None:
        """A further piece of a body; unfinished bodies share one budget, so that many cannot fill memory."""
        body = self._body
        if not isinstance(body, bytearray):
            body = self._body = bytearray(body or b"")
        body += piece
        self._check_length(len(body))
        server = self.server
        server.body_bytes_held += len(body) - self._body_counted
        self._body_counted = len(body)
        if server.body_bytes_held > server.limits.append_queue_bytes:
            raise TailraceError("overloaded", "too many bodies are being received")

    def _drop_body(self) -> None:
        self._body = None
        self._body_seen = 0
        if self._body_counted:
            self.server.body_bytes_held -= self._body_counted
            self._body_counted = 0

    def _update_reading(self) -> None:
        wanted = self._lingering or not (
            self._write_paused
            or self._holding
            or self._refusal is not None
            or len(self._queue) >= PIPELINE_MAX
        )
        if wanted is self._reading or self.transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # --- answering, uncommon cases

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self.server.bytes_out += len(data)
        try:
            self.transport.write(data)
        except (RuntimeError, OSError):
            # uvloop raises on a transport that died a moment ago; connection_lost follows and cleans up.
            return

    def _head(self, exchange: Exchange | None, status: int, head: bytes, *, closing: bool) -> bytes:
        server = self.server
        persistence = b""
        if closing:
            persistence = CONNECTION_CLOSE
        elif exchange is not None and exchange.mode & MODE_LEGACY:
            persistence = CONNECTION_KEEP_ALIVE
        return b"".join((server.status_head(status), server.common_headers(exchange), head, persistence))

    def answer_unusual(
        self, exchange: Exchange, status: int, head: bytes, body: bytes | Sequence[bytes | memoryview]
    ) -> None:
        """`Exchange.respond` for all that is not small, kept alive and HTTP/1.1."""
        closing = exchange.mode & MODE_CLOSE != 0 or self.server.draining
        parts = (body,) if isinstance(body, bytes) else body
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        start = self._head(exchange, status, head, closing=closing)
        if status in BODILESS:
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
            try:
                self.transport.writelines([start, *parts])
            except (RuntimeError, OSError):
                return
        self._finish(closing=closing)

    def open_outlet(self, exchange: Exchange, status: int, head: bytes) -> Outlet:
        legacy = exchange.mode & MODE_LEGACY != 0
        outlet = Outlet(self, plain=legacy)
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
        self.write(start + (CRLF if legacy else CHUNKED + CRLF))
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
        if not isinstance(error, TailraceError):
            logger.error("handler failed", exc_info=error)
            error = TailraceError("internal", "internal error")
        if not exchange.answered:
            exchange.respond(*self._refusal_of(exchange, error))
        elif self.current is exchange:
            # The answer is half out; cutting it off is the only honest end.
            self.transport.abort()

    def _refusal_of(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        try:
            return self.server.app.refuse(exchange, error)
        except Exception:
            logger.exception("refusing failed")
            body = TailraceError("internal", "internal error").body()
            return 500, b"Content-Type: application/json; charset=utf-8\r\n", body

    def _parse_failed(self, error: HttpParserError) -> None:
        if self._last_request or self._ended:
            # Bytes after a request that closes the connection are nobody's.
            return
        cause = error.__context__
        if isinstance(cause, TailraceError):
            self.refuse(cause)
        elif cause is not None:
            logger.error("reading a request failed", exc_info=cause)
            self.refuse(TailraceError("internal", "internal error"))
        elif self._parser.get_http_version() == "0.9":
            self.refuse(_http09())
        else:
            self.refuse(TailraceError("invalid_request", f"malformed HTTP request: {error}"))

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
        self.transport.close()

    def detach(self, successor: asyncio.Protocol) -> bytes:
        """Give the transport to another protocol; returns the bytes that came after the request."""
        held = self._held
        self._ended = True
        self.successor = successor
        self.current = None
        self._stop_parsing()
        self.server.forget(self)
        self.transport.set_protocol(successor)
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        return held

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
                received = self._incoming.started + self._body_seen / BODY_RATE_MIN
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
