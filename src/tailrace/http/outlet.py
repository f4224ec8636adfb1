"""A streamed answer: head first, then as many chunks as there are, then the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.http.wire import LAST_CHUNK, chunk, unchunk

if TYPE_CHECKING:
    from tailrace.http.response_connection import ResponseConnection


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
