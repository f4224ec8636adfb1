"""The body of the request that is being received, and its memory.

Incomplete bodies share one memory budget. A body of known length reserves its whole size before most of it is
read; if the budget is exhausted, its connection is not read until others have finished, in order. So a body
whose memory is reserved can always be completed, and clients with large bodies wait instead of being refused.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import MODE_ADMISSION_CHECKED
from tailrace.http.response_connection import ResponseConnection

if TYPE_CHECKING:
    from tailrace.http.server import HttpServer

# Unauthenticated clients share this fraction of the memory for incomplete bodies.
UNKNOWN_CLIENTS_FRACTION = 16
# Beyond the budget: the first bytes of bodies that wait for a reservation, as a fraction of it.
PARTIAL_BODIES_FRACTION = 8
# Of a Content-Length; Python converts no more than 4300 digits to a number.
CONTENT_LENGTH_DIGITS_MAX = 18


class RequestBodyConnection(ResponseConnection):
    """The part of a connection that holds incomplete bodies. Most bodies arrive complete."""

    __slots__ = ("_body", "_body_counted", "_body_reserved", "_body_waits_until", "_unauthenticated")

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._body: bytes | bytearray | None = None
        self._body_counted = 0
        self._body_reserved = 0  # bytes reserved for the whole body; 0 before the reservation
        self._body_waits_until = inf  # loop time; inf if it does not wait for memory
        self._unauthenticated = False  # its bodies are counted separately

    def _received_bytes(self) -> int:
        """Received bytes of the current request's body."""
        return 0 if self._body is None else len(self._body)

    def _check_declared(self, length: bytes) -> None:
        """Check a Content-Length. The parser guarantees digits, but there may be many leading zeros."""
        if len(length) > CONTENT_LENGTH_DIGITS_MAX:
            message = f"Content-Length must have at most {CONTENT_LENGTH_DIGITS_MAX} digits"
            raise TailraceError("invalid_header", message, header="content-length")
        self._check_length(int(length))

    def _check_length(self, size: int) -> None:
        limit = self.server.body_bytes_max
        if size > limit:
            message = f"request body exceeds {limit} bytes"
            raise TailraceError("payload_too_large", message, limit_bytes=limit)

    def _add_body(self, piece: bytes) -> None:
        """Add a further piece of a body; incomplete bodies share one budget, to bound memory."""
        body = self._body
        if not isinstance(body, bytearray):
            body = self._body = bytearray(body or b"")
        body += piece
        self._check_length(len(body))
        if len(body) <= self._body_reserved:
            return
        self._count_body(len(body))
        server = self.server
        bound = server.limits.append_queue_max_bytes
        if self._unauthenticated:
            full = server.unauthenticated_body_bytes > bound // UNKNOWN_CLIENTS_FRACTION
        else:
            full = server.body_bytes_held > bound + bound // PARTIAL_BODIES_FRACTION
        if full:
            raise self._too_many()

    def _too_many(self) -> TailraceError:
        return TailraceError("overloaded", "too many request bodies are being received, retry later")

    def _request_body_memory(self) -> None:
        """Reserve memory once for each body of known length that did not arrive with its head."""
        exchange = self._incoming
        if exchange is None or self._unauthenticated or self._body_reserved or self._body_waits_until < inf:
            return
        length = exchange.headers.get(b"content-length")
        if length is None:
            return  # chunked: only the received bytes are counted
        server = self.server
        if not server.bodies_waiting and server.has_body_memory(int(length) - self._body_counted):
            self.reserve_body_memory()
            return
        self._body_waits_until = server.loop.time() + server.limits.append_wait_ms / 1000
        server.bodies_waiting.append(self)
        self._update_reading()

    @property
    def body_memory_needed(self) -> int | None:
        """Bytes that this connection waits to reserve; None if it does not wait any more."""
        exchange = self._incoming
        if exchange is None or self._body_waits_until == inf:
            return None
        return int(exchange.headers[b"content-length"]) - self._body_counted

    def reserve_body_memory(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._body_waits_until = inf
        self._body_reserved = int(exchange.headers[b"content-length"])
        self.server.bodies_reserved += 1
        self._count_body(self._body_reserved)
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

    def _check_admission(self) -> None:
        """Ask the application once, while a body is still arriving, whether its client is authenticated."""
        admit, exchange = self.server.admit_body, self._incoming
        if admit is None or exchange is None or exchange.mode & MODE_ADMISSION_CHECKED:
            return
        exchange.mode |= MODE_ADMISSION_CHECKED
        unauthenticated = not admit(exchange)
        if unauthenticated is not self._unauthenticated:
            counted = self._body_counted
            self._count_body(0)
            self._unauthenticated = unauthenticated
            self._count_body(counted)

    def _count_body(self, size: int) -> None:
        more, self._body_counted = size - self._body_counted, size
        if self._unauthenticated:
            self.server.unauthenticated_body_bytes += more
        else:
            self.server.body_bytes_held += more
        if more < 0 and self.server.bodies_waiting:
            self.server.grant_body_memory()

    def _drop_body(self) -> None:
        self._body = None
        self._body_seen = 0
        self._body_waits_until = inf
        if self._body_reserved:
            self._body_reserved = 0
            self.server.bodies_reserved -= 1
        if self._body_counted:
            self._count_body(0)
