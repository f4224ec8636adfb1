"""The body of the request that is being read: what of it is here, and what memory it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import TailraceError
from tailrace.net.answering import AnsweringConnection
from tailrace.net.exchange import MODE_ASKED

if TYPE_CHECKING:
    from tailrace.net.server import HttpServer

# Clients that are not known share this part of the memory for bodies that are not all there.
STRANGERS_PART = 16
# Of a Content-Length; Python converts no more than 4300 digits to a number.
LENGTH_DIGITS_MAX = 18


class ReceivingConnection(AnsweringConnection):
    """A connection, as far as it holds bodies that are not all there. Most bodies come whole."""

    __slots__ = ("_body", "_body_counted", "_stranger")

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._body: bytes | bytearray | None = None
        self._body_counted = 0
        self._stranger = False  # whose bodies are counted apart

    def _received_bytes(self) -> int:
        """Of the body of the request that is being read."""
        return 0 if self._body is None else len(self._body)

    def _check_declared(self, length: bytes) -> None:
        """A Content-Length. The parser has checked that it is digits; any number of them may be zeros."""
        if len(length) > LENGTH_DIGITS_MAX:
            message = f"Content-Length has more than {LENGTH_DIGITS_MAX} digits"
            raise TailraceError("invalid_header", message, header="content-length")
        self._check_length(int(length))

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
        self._count_body(len(body))
        server = self.server
        bound = server.limits.append_queue_max_bytes
        if self._stranger:
            full = server.stranger_bytes_held > bound // STRANGERS_PART
        else:
            full = server.body_bytes_held > bound
        if full:
            raise TailraceError("overloaded", "too many bodies are being received")

    def _ask_for_admission(self) -> None:
        """Once for each request whose body is still coming: nobody holds memory whom nobody knows."""
        admit, exchange = self.server.admit_body, self._incoming
        if admit is None or exchange is None or exchange.mode & MODE_ASKED:
            return
        exchange.mode |= MODE_ASKED
        stranger = not admit(exchange)
        if stranger is not self._stranger:
            counted = self._body_counted
            self._count_body(0)
            self._stranger = stranger
            self._count_body(counted)

    def _count_body(self, size: int) -> None:
        more, self._body_counted = size - self._body_counted, size
        if self._stranger:
            self.server.stranger_bytes_held += more
        else:
            self.server.body_bytes_held += more

    def _drop_body(self) -> None:
        self._body = None
        self._body_seen = 0
        if self._body_counted:
            self._count_body(0)
