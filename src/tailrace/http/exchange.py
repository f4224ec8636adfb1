"""One request and its response: the exchange, streamed responses, request ids, and the application's
interface.

Response bytes that are made once: status lines, lengths, chunk framing.

Ids of requests: taken from clients that send one, made where somebody may have to ask about an answer.

What the server expects of the application behind it.

A streamed answer: head first, then as many chunks as there are, then the end.

One request and its answer.
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


# Bodies up to this size are joined with their head into one buffer; larger ones are handed to the transport
# beside it, because copying them would cost more than a second element in the vector.
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

# Answers with these codes never have a body, nor a length.
BODILESS_STATUSES = frozenset((204, 304))


def length_end(size: int) -> bytes:
    """`Content-Length` and the empty line that ends the head."""
    return LENGTH_ENDS[size] if size < LENGTH_ENDS_COUNT else b"Content-Length: %d\r\n\r\n" % size


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def date_line(unix_s: float) -> bytes:
    return b"Date: %b\r\n" % formatdate(unix_s, usegmt=True).encode("ascii")


def chunk(payload: bytes) -> bytes:
    """One chunk of a streamed answer, to be framed once and written to many connections.

    An empty payload gives no bytes at all: an empty chunk would end the answer.
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


def unchunk(framed: bytes) -> bytes:
    """The payload of bytes made by `chunk`, for HTTP/1.0 clients, which know no chunks."""
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
    """The client's own id, or a new one in place of what cannot be sent back as it is."""
    return value if _VALID_REQUEST_ID.fullmatch(value) else new_request_id()


def new_request_id() -> bytes:
    return secrets.token_hex(8).encode()


def strip_request_id(head: bytes) -> bytes:
    """The head lines of an answer that is passed on, without the id that somebody else gave the request."""
    begin = head.find(REQUEST_ID_LINE_START)
    return head if begin < 0 else head[:begin] + head[head.index(b"\r\n", begin) + 2 :]


class App(Protocol):
    """The application: answers requests, and gives refusals and responses their house form."""

    # What `common_headers` gives for every request alike; None if it depends on the request.
    fixed_headers: bytes | None

    def handle(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later. A `TailraceError` raised here is answered by net."""
        ...

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        """What to call for every later request with this very head: `handle`, or a shorter way to the same.

        The body is the only thing such requests differ in.
        """
        ...

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        """Status, head lines and body for an error; `exchange` is None when no request could be read."""
        ...

    def common_headers(self, exchange: Exchange | None) -> bytes:
        """Head lines, each ending in CRLF, that every response carries."""
        ...


class ResponseStream:
    """The writing end of a streamed answer.

    Nothing is buffered here: the writer looks at `unsent_bytes`, holds back when it is too much, and goes
    on from `on_drain`.
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
        """Bytes written here that the kernel has not taken yet."""
        return 0 if self.closed else self._connection.unsent_bytes

    def write(self, payload: bytes) -> None:
        """Send `payload` as one chunk."""
        if not self.closed and payload:
            self._connection.write(payload if self._plain else chunk(payload))

    def write_raw(self, framed: bytes) -> None:
        """Send bytes that are already framed by `chunk`, so that one encoding serves many readers."""
        if not self.closed:
            self._connection.write(unchunk(framed) if self._plain else framed)

    def offer_raw(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        """`write_raw`, unless more than that is unsent. Runs for every live reader of every message."""
        if self.closed:
            return True
        connection = self._connection
        if connection.transport.get_write_buffer_size() > unsent_bytes_max:
            return False
        connection.write(unchunk(encoded) if self._plain else encoded)
        return True

    def end(self) -> None:
        """Finish the answer; the connection goes on with its next request unless it is to close."""
        if self.closed:
            return
        self.closed = True
        self.on_gone = self.on_drain = None
        if not self._plain:
            self._connection.write(LAST_CHUNK)
        self._connection.finish_stream()


# Answers to one read that are written together; they are small, so this bounds their bytes too.
CORKED_MAX = 16

# Exposed to browsers on those answers only that have it: all others are spared the line.
REQUEST_ID_LINES = REQUEST_ID_LINE_START + b"%b\r\nAccess-Control-Expose-Headers: X-Request-Id\r\n"

# Bits of `Exchange.mode`. Zero is the common case: HTTP/1.1, kept alive, not HEAD.
MODE_CLOSE = 1
MODE_HTTP_1_0 = 2  # HTTP/1.0
MODE_HEAD = 4
MODE_UPGRADE = 8  # the client asked to leave HTTP
MODE_CONTINUE = 16  # the client waits for 100 Continue before it sends the body
MODE_OBSERVED = 32  # the answer carries an id, or somebody wants to hear of it
MODE_ADMISSION_CHECKED = 64  # the application was asked whether to wait for the body

OnResponse = Callable[["Exchange", int, bytes], None]


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer; made per request, so it carries no more than it must.

    A Struct because its constructor is compiled: a third of the time of an `__init__` in Python.
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
    # True once an answer was given, or can no longer be given because the client is gone.
    answered: bool = False
    # Called once if the client disconnects before the answer is complete. Set it for waits only: with
    # it, a client that half-closes its side counts as gone.
    on_gone: Callable[[], None] | None = None
    # What took how long, in the form of Server-Timing; the application's to fill and to send.
    phases: str = ""
    deadline_at: float = inf
    on_deadline: Callable[[], None] | None = None
    # Names the request in its answer and in the log. Most have none: nobody will ask about them.
    request_id: bytes = b""
    # Told the status and the head lines when the answer begins; set by `watch_answer`.
    on_answer: OnResponse | None = None

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
        """Answer. `head` is header lines, each ending in CRLF; net adds date, length and connection.

        Answering twice, or after the client is gone, does nothing, so a late answer is harmless.
        """
        if self.answered:
            return
        self.answered = True
        connection = self.connection
        server = connection.server
        mark = (self.method, status)
        try:
            server.answers[mark] += 1
        except KeyError:
            server.answers[mark] = 1
        if self.mode or server.draining or type(body) is not bytes or len(body) > JOIN_BYTES_MAX:
            connection.answer_unusual(self, status, head, body)
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
                # uvloop raises on a transport that died a moment ago; connection_lost follows and cleans up.
                return
        else:
            cork.append(data)
            if len(cork) >= CORKED_MAX:
                connection.flush()
        connection.current = None
        connection.deadline = server.idle_deadline
        if connection.backlog:
            connection.advance()

    def acknowledge(self, head: bytes) -> None:
        """`respond(204, head)`, written out for the answer that is given most often."""
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
        mark = (self.method, 204)
        try:
            server.answers[mark] += 1
        except KeyError:
            server.answers[mark] = 1
        data = b"%b%b\r\n" % (server.status_heads.get(204) or server.status_head(204), head)
        server.bytes_out += len(data)
        connection.current = None
        connection.deadline = server.idle_deadline
        try:
            connection.transport.write(data)
        except (RuntimeError, OSError):
            return  # as in `respond`
        if connection.backlog:
            connection.advance()

    def run(self, handle: Callable[[Exchange], None]) -> None:
        """Give a request that waited to its handler; a refusal that it raises is answered."""
        if not self.answered:
            self.connection.handle_later(self, handle)

    def hold_body(self) -> bool:
        """Count the body among those that wait in memory, until `release_body`; False if there is no room."""
        return self.connection.server.hold_body(len(self.body))

    def release_body(self) -> None:
        self.connection.server.release_body(len(self.body))

    def name(self) -> str:
        """The id of this request, made now if its client gave none; the answer will carry it."""
        self.request_id = self.request_id or new_request_id()
        self.mode |= MODE_OBSERVED
        return self.request_id.decode("ascii")

    def watch_answer(self, on_answer: OnResponse) -> None:
        """Have `on_answer` called once the answer begins. Not if the client leaves first."""
        self.on_answer = on_answer
        self.mode |= MODE_OBSERVED

    def note_answer(self, status: int, head: bytes) -> bytes:
        """For net: the answer begins. The head lines that it gets by that."""
        told, self.on_answer = self.on_answer, None
        if told is not None:
            told(self, status, head)
        return REQUEST_ID_LINES % self.request_id if self.request_id else b""

    def open_stream(self, status: int, head: bytes, length: int | None = None) -> ResponseStream:
        """Begin a streamed answer, of `length` bytes if that is known; all of them then have to be written.

        After the client is gone the outlet is closed from the start.
        """
        return self.connection.open_outlet(self, status, head, length)

    def set_deadline(self, at: float, on_deadline: Callable[[], None]) -> None:
        """Call `on_deadline` soon after loop time `at`, unless the answer came first.

        Kept by the sweeper that serves all connections, so it may come up to half a second late.
        """
        self.deadline_at = at
        self.on_deadline = on_deadline
        self.connection.rearm()

    def wants_websocket(self) -> bool:
        """True if this is an upgrade request for a WebSocket, be it well formed or not."""
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
        """Leave HTTP and speak WebSocket on this connection; raises if the handshake is bad.

        Limits not given are those of the server. `subprotocol` is the one chosen, if any.
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
