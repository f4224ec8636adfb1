"""One request and its response: exchange, streamed responses, request ids, the application's interface.

`Exchange.respond` is the hot path; `response_connection.py` has the less common cases. Response bytes that
repeat (status lines, lengths) are built once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from tailrace.common.errors import TailraceError
    from tailrace.http.connection import HttpConnection
    from tailrace.http.response_connection import ResponseConnection
    from tailrace.http.websocket import WebSocketConnection, WebSocketHandler


# Bodies up to this size are joined with their head into one buffer; larger ones are passed to the transport
# separately, because copying them would cost more than a second element in the vector.
JOIN_BYTES_MAX = 16 * 1024

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
}

# The end of a head whose body has this many bytes; small bodies are by far the most common.
LENGTH_ENDS: tuple[bytes, ...] = tuple(b"Content-Length: %d\r\n\r\n" % size for size in range(2048))
LENGTH_ENDS_COUNT = len(LENGTH_ENDS)

CRLF = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONNECTION_CLOSE = b"Connection: close\r\n"
CONNECTION_KEEP_ALIVE = b"Connection: keep-alive\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"

# Responses with these statuses never have a body or a length.
BODILESS_STATUSES = frozenset((204, 304))


def length_end(size: int) -> bytes:
    """`Content-Length` and the empty line that ends the head."""
    return LENGTH_ENDS[size] if size < LENGTH_ENDS_COUNT else b"Content-Length: %d\r\n\r\n" % size


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def date_line(unix_s: float) -> bytes:
    return b"Date: %b\r\n" % formatdate(unix_s, usegmt=True).encode("ascii")


def chunk(payload: bytes) -> bytes:
    """One chunk of a streamed response, to be framed once and written to many connections.

    An empty payload yields no bytes: an empty chunk would end the response.
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


def unchunk(framed: bytes) -> bytes:
    """The payload of bytes framed by `chunk`, for HTTP/1.0 clients, which do not support chunks."""
    payloads: list[bytes] = []
    position = 0
    while position < len(framed):
        line_end = framed.index(CRLF, position)
        start = line_end + 2
        size = int(framed[position:line_end], 16)
        payloads.append(framed[start : start + size])
        position = start + size + 2
    return b"".join(payloads)


REQUEST_ID_HEADER: Final = b"x-request-id"
REQUEST_ID_LINE_START: Final = b"X-Request-Id: "
REQUEST_ID_BYTES_MAX: Final = 128

_VALID_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % REQUEST_ID_BYTES_MAX)


def request_id_from_client(value: bytes) -> bytes:
    """The client's id, or a new one if it cannot be sent back safely."""
    return value if _VALID_REQUEST_ID.fullmatch(value) else new_request_id()


def new_request_id() -> bytes:
    return secrets.token_hex(8).encode()


def strip_request_id(head: bytes) -> bytes:
    """Remove the request id that another server added to the head lines of a relayed response."""
    begin = head.find(REQUEST_ID_LINE_START)
    return head if begin < 0 else head[:begin] + head[head.index(b"\r\n", begin) + 2 :]


class App(Protocol):
    """The application: handles requests, and formats errors and common headers."""

    # The result of `common_headers` if it is the same for all requests, else None.
    fixed_headers: bytes | None

    def handle(self, exchange: Exchange) -> None:
        """Respond to a complete request, now or later. A `TailraceError` raised here becomes the response."""
        ...

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        """The handler for later requests with exactly this head: `handle`, or a shortcut.

        Such requests differ only in their body.
        """
        ...

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        """Status, head lines and body for an error; `exchange` is None when no request could be read."""
        ...

    def common_headers(self, exchange: Exchange | None) -> bytes:
        """Head lines, each ending in CRLF, that every response carries."""
        ...


class ResponseStream:
    """The writing end of a streamed response.

    Nothing is buffered here: the writer checks `unsent_bytes`, pauses when it is too large, and continues in
    `on_drain`.
    """

    __slots__ = ("_connection", "_plain", "closed", "on_drain", "on_gone")

    def __init__(self, connection: ResponseConnection, *, plain: bool) -> None:
        self._connection = connection
        self._plain = plain
        self.closed = False
        # Called when the transport's buffer, once above its high-water mark, fell below the low one.
        self.on_drain: Callable[[], None] | None = None
        # Called once if the client disconnects before `end`.
        self.on_gone: Callable[[], None] | None = None

    @property
    def unsent_bytes(self) -> int:
        """Bytes written here that the kernel has not accepted yet."""
        return 0 if self.closed else self._connection.unsent_bytes

    def write(self, payload: bytes) -> None:
        """Send `payload` as one chunk."""
        if not self.closed and payload:
            self._connection.write(payload if self._plain else chunk(payload))

    def write_raw(self, framed: bytes) -> None:
        """Send bytes that are already framed by `chunk`, so that one encoding serves many readers."""
        if not self.closed:
            self._connection.write(unchunk(framed) if self._plain else framed)

    def try_write_raw(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        """`write_raw`, unless more bytes than that are unsent. Runs for every live reader and message."""
        if self.closed:
            return True
        connection = self._connection
        if connection.transport.get_write_buffer_size() > unsent_bytes_max:
            return False
        connection.write(unchunk(encoded) if self._plain else encoded)
        return True

    def end(self) -> None:
        """Finish the response; the connection continues with its next request unless it has to close."""
        if self.closed:
            return
        self.closed = True
        self.on_gone = self.on_drain = None
        if not self._plain:
            self._connection.write(LAST_CHUNK)
        self._connection.finish_stream()


# Responses to one read that are written together; they are small, so this bounds their bytes too.
CORKED_MAX = 16

# Exposed to browsers only on responses that have an id, to save the line on all others.
REQUEST_ID_LINES = REQUEST_ID_LINE_START + b"%b\r\nAccess-Control-Expose-Headers: X-Request-Id\r\n"

# Bits of `Exchange.mode`. Zero is the common case: HTTP/1.1, kept alive, not HEAD.
MODE_CLOSE = 1
MODE_HTTP_1_0 = 2  # HTTP/1.0
MODE_HEAD = 4
MODE_UPGRADE = 8  # the client requests an upgrade
MODE_CONTINUE = 16  # the client waits for 100 Continue before it sends the body
MODE_OBSERVED = 32  # the response carries an id, or has an observer
MODE_ADMISSION_CHECKED = 64  # the application has decided whether to wait for the body

OnResponse = Callable[["Exchange", int, bytes], None]


class Exchange(msgspec.Struct, eq=False):
    """One request and its response; created per request, so it is small.

    A Struct because its constructor is compiled, which takes a third of the time of an `__init__` in Python.
    """

    connection: HttpConnection
    # Lower-case names. A repeated header's values are joined with ", " and its name is in `repeated`.
    headers: dict[bytes, bytes]
    method: bytes = b""
    path: bytes = b""
    query: bytes = b""
    started: float = 0.0
    body: bytes = b""
    repeated: frozenset[bytes] | None = None
    mode: int = 0
    # True once a response was given, or the client has disconnected.
    answered: bool = False
    # Called once if the client disconnects before the response is complete. Set it for long waits only: with
    # it, a half-closed connection counts as disconnected.
    on_gone: Callable[[], None] | None = None
    # Durations in the format of Server-Timing; filled and sent by the application.
    timing_phases: str = ""
    deadline_at: float = inf
    on_deadline: Callable[[], None] | None = None
    # Identifies the request in its response and in the log. Most requests have none.
    request_id: bytes = b""
    # Called with the status and the head lines when the response begins; set by `observe_response`.
    on_response: OnResponse | None = None

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def scheme(self) -> bytes:
        return self.connection.scheme

    @property
    def is_head(self) -> bool:
        return self.mode & MODE_HEAD != 0

    def respond(
        self, status: int, head: bytes = b"", body: bytes | Sequence[bytes | memoryview] = b""
    ) -> None:
        """Respond. `head` is header lines, each ending in CRLF; date, length and connection are added.

        Does nothing after a response was sent or the client has disconnected, so a late response is harmless.
        """
        if self.answered:
            return
        self.answered = True
        connection = self.connection
        server = connection.server
        key = (self.method, status)
        try:
            server.responses[key] += 1
        except KeyError:
            server.responses[key] = 1
        if self.mode or server.draining or type(body) is not bytes or len(body) > JOIN_BYTES_MAX:
            connection.respond_general(self, status, head, body)
            return
        size = len(body)
        if status in BODILESS_STATUSES:
            end = CRLF
            body = b""
        else:
            end = LENGTH_ENDS[size] if size < LENGTH_ENDS_COUNT else b"Content-Length: %d\r\n\r\n" % size
        start = server.status_heads.get(status) or server.status_head(status)
        if server.varying_headers is not None:
            start += server.varying_headers(self)
        data = b"".join((start, head, end, body))
        server.bytes_out += len(data)
        cork = connection.cork
        if cork is None:
            try:
                connection.transport.write(data)
            except (RuntimeError, OSError):
                # uvloop raises on a transport that just died; connection_lost follows and cleans up.
                return
        else:
            cork.append(data)
            if len(cork) >= CORKED_MAX:
                connection.flush()
        connection.current = None
        connection.deadline = server.idle_deadline
        if connection.has_backlog:
            connection.process_next()

    def acknowledge(self, head: bytes) -> None:
        """`respond(204, head)`, inlined for the most frequent response."""
        connection = self.connection
        server = connection.server
        if (
            self.mode
            or self.answered
            or server.draining
            or server.varying_headers is not None
            or connection.cork is not None
        ):
            self.respond(204, head)
            return
        self.answered = True
        key = (self.method, 204)
        try:
            server.responses[key] += 1
        except KeyError:
            server.responses[key] = 1
        data = b"%b%b\r\n" % (server.status_heads.get(204) or server.status_head(204), head)
        server.bytes_out += len(data)
        connection.current = None
        connection.deadline = server.idle_deadline
        try:
            connection.transport.write(data)
        except (RuntimeError, OSError):
            return  # as in `respond`
        if connection.has_backlog:
            connection.process_next()

    def run(self, handle: Callable[[Exchange], None]) -> None:
        """Pass a deferred request to its handler; an error that it raises becomes the response."""
        if not self.answered:
            self.connection.handle_deferred(self, handle)

    def hold_body(self) -> bool:
        """Count the body as held in memory until `release_body`; False if the budget is exhausted."""
        return self.connection.server.hold_body(len(self.body))

    def release_body(self) -> None:
        self.connection.server.release_body(len(self.body))

    def assign_request_id(self) -> str:
        """The id of this request, created if the client sent none; the response will carry it."""
        self.request_id = self.request_id or new_request_id()
        self.mode |= MODE_OBSERVED
        return self.request_id.decode("ascii")

    def observe_response(self, on_response: OnResponse) -> None:
        """Have `on_response` called when the response begins, unless the client disconnects first."""
        self.on_response = on_response
        self.mode |= MODE_OBSERVED

    def begin_response(self, status: int, head: bytes) -> bytes:
        """Called by the transport when the response begins; returns additional head lines."""
        callback, self.on_response = self.on_response, None
        if callback is not None:
            callback(self, status, head)
        return REQUEST_ID_LINES % self.request_id if self.request_id else b""

    def open_stream(self, status: int, head: bytes, length: int | None = None) -> ResponseStream:
        """Begin a streamed response; if `length` is given, exactly that many bytes must be written.

        If the client has disconnected, the stream is closed from the start.
        """
        return self.connection.open_response_stream(self, status, head, length)

    def set_deadline(self, at: float, on_deadline: Callable[[], None]) -> None:
        """Call `on_deadline` soon after loop time `at`, unless the response came first.

        The sweeper of all connections checks it, so it may be up to half a second late.
        """
        self.deadline_at = at
        self.on_deadline = on_deadline
        self.connection.rearm()

    def wants_websocket(self) -> bool:
        """True if this is an upgrade request for a WebSocket, valid or not."""
        if not self.mode & MODE_UPGRADE:
            return False
        return any(token.strip() == b"websocket" for token in self.headers[b"upgrade"].lower().split(b","))

    def upgrade_websocket(
        self,
        handler: WebSocketHandler,
        head: bytes = b"",
        *,
        subprotocol: bytes | None = None,
        deflate: bool = False,
        message_bytes: int | None = None,
        discard_bytes: int | None = None,
    ) -> WebSocketConnection:
        """Upgrade this connection to a WebSocket; raises if the handshake is invalid.

        Limits that are not given are those of the server. `subprotocol` is the selected one, if any.
        """
        from tailrace.http.websocket import upgrade_to_websocket

        return upgrade_to_websocket(
            self,
            handler,
            head,
            subprotocol=subprotocol,
            deflate=deflate,
            message_bytes=message_bytes,
            discard_bytes=discard_bytes,
        )
