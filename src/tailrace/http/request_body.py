"""The body of the request that is being read: what of it is here, and what memory it may take.

Bodies that are not all there share one budget. One whose length is known takes its whole share before most of
it is read; if that is not to be had, its client is not read any further until others are done, in order. So a
body that was begun can be finished, and clients with large bodies wait instead of being refused.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import MODE_ADMISSION_CHECKED
from tailrace.http.response_connection import ResponseConnection

if TYPE_CHECKING:
    from tailrace.http.server import HttpServer

# Clients that are not known share this part of the memory for bodies that are not all there.
UNKNOWN_CLIENTS_FRACTION = 16
# Beyond the budget: the first bytes of bodies that wait for their share, as this part of it.
PARTIAL_BODIES_FRACTION = 8
# Of a Content-Length; Python converts no more than 4300 digits to a number.
CONTENT_LENGTH_DIGITS_MAX = 18


class RequestBodyConnection(ResponseConnection):
    """A connection, as far as it holds bodies that are not all there. Most bodies come whole."""

    __slots__ = ("_body", "_body_counted", "_body_share", "_body_waits_until", "_stranger")

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._body: bytes | bytearray | None = None
        self._body_counted = 0
        self._body_share = 0  # of the budget, for the whole body; 0 before there is one
        self._body_waits_until = inf  # loop time; inf if it does not wait for its share
        self._stranger = False  # whose bodies are counted apart

    def _received_bytes(self) -> int:
        """Of the body of the request that is being read."""
        return 0 if self._body is None else len(self._body)

    def _check_declared(self, length: bytes) -> None:
        """A Content-Length. The parser has checked that it is digits; any number of them may be zeros."""
        if len(length) > CONTENT_LENGTH_DIGITS_MAX:
            message = f"Content-Length has more than {CONTENT_LENGTH_DIGITS_MAX} digits"
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
        if len(body) <= self._body_share:
            return
        self._count_body(len(body))
        server = self.server
        bound = server.limits.append_queue_max_bytes
        if self._stranger:
            full = server.stranger_bytes_held > bound // UNKNOWN_CLIENTS_FRACTION
        else:
            full = server.body_bytes_held > bound + bound // PARTIAL_BODIES_FRACTION
        if full:
            raise self._too_many()

    def _too_many(self) -> TailraceError:
        return TailraceError("overloaded", "too many bodies are being received")

    def _ask_for_share(self) -> None:
        """Once for each body whose length is known and that did not come with its head."""
        exchange = self._incoming
        if exchange is None or self._stranger or self._body_share or self._body_waits_until < inf:
            return
        length = exchange.headers.get(b"content-length")
        if length is None:
            return  # of chunks: what has come is counted
        server = self.server
        if not server.bodies_waiting and server.has_share(int(length) - self._body_counted):
            self.take_share()
            return
        self._body_waits_until = server.loop.time() + server.limits.append_wait_ms / 1000
        server.bodies_waiting.append(self)
        self._update_reading()

    @property
    def share_wanted(self) -> int | None:
        """Bytes that this connection waits for in the budget; None if it does not wait any more."""
        exchange = self._incoming
        if exchange is None or self._body_waits_until == inf:
            return None
        return int(exchange.headers[b"content-length"]) - self._body_counted

    def take_share(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._body_waits_until = inf
        self._body_share = int(exchange.headers[b"content-length"])
        self.server.body_shares += 1
        self._count_body(self._body_share)
        self._update_reading()
        self.rearm()

    def _update_reading(self) -> None:
        if self._body_waits_until == inf or self._lingering:
            super()._update_reading()
        elif self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def rearm(self) -> None:
        super().rearm()
        if not self._ended and self._body_waits_until < inf:
            self.deadline = self._body_waits_until

    def on_sweep(self, now: float) -> None:
        if not self._ended and self._body_waits_until <= now:
            self._body_waits_until = inf
            self.refuse(self._too_many())
        else:
            super().on_sweep(now)

    def _ask_for_admission(self) -> None:
        """Once for each request whose body is still coming: nobody holds memory whom nobody knows."""
        admit, exchange = self.server.admit_body, self._incoming
        if admit is None or exchange is None or exchange.mode & MODE_ADMISSION_CHECKED:
            return
        exchange.mode |= MODE_ADMISSION_CHECKED
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
        if more < 0 and self.server.bodies_waiting:
            self.server.share_out()

    def _drop_body(self) -> None:
        self._body = None
        self._body_seen = 0
        self._body_waits_until = inf
        if self._body_share:
            self._body_share = 0
            self.server.body_shares -= 1
        if self._body_counted:
            self._count_body(0)
