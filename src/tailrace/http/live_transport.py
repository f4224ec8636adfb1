"""Transports of live readers: server-sent events or WebSocket messages.

Batches are already encoded, once for all readers with the same encoding.
"""

from __future__ import annotations

from typing import Protocol

from tailrace.http.exchange import ResponseStream
from tailrace.http.websocket import WebSocketConnection
from tailrace.protocol import sse


class LiveTransport(Protocol):
    """The connection to one client. Readers whose transports have the same `form` get the same bytes."""

    form: str

    def send(self, encoded: bytes) -> None: ...
    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        """`send`, unless more bytes than that are unsent. False if nothing was sent."""
        ...

    def keep_alive(self) -> None: ...
    def end(self, code: int) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class SseTransport:
    """Server-sent events."""

    __slots__ = ("_stream", "form", "offer")

    def __init__(self, stream: ResponseStream, form: str) -> None:
        self._stream = stream
        self.offer = stream.try_write_raw
        self.form = form

    def send(self, encoded: bytes) -> None:
        self._stream.write_raw(encoded)

    def keep_alive(self) -> None:
        self._stream.write(sse.KEEP_ALIVE)

    def end(self, code: int) -> None:
        self._stream.end()

    @property
    def unsent_bytes(self) -> int:
        return self._stream.unsent_bytes


class WebSocketTransport:
    """WebSocket messages; the connection sends its own pings."""

    __slots__ = ("_connection", "form")

    def __init__(self, form: str) -> None:
        self._connection: WebSocketConnection | None = None
        self.form = form

    def attach(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    def send(self, encoded: bytes) -> None:
        if self._connection is not None:
            self._connection.send_encoded(encoded)

    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        if self.unsent_bytes > unsent_bytes_max:
            return False
        self.send(encoded)
        return True

    def keep_alive(self) -> None:
        """Nothing to do: the connection sends pings."""

    def end(self, code: int) -> None:
        if self._connection is not None:
            self._connection.close(code)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes


class LiveReader(Protocol):
    """A live reader on a WebSocket."""

    def on_drain(self) -> None: ...
    def gone(self) -> None: ...


class LiveWebSocketHandler:
    """Handles WebSocket events of a live reader; messages from the client are ignored."""

    __slots__ = ("_reader",)

    def __init__(self, reader: LiveReader) -> None:
        self._reader = reader

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Ignored."""

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        """Ignored."""

    def on_drain(self) -> None:
        self._reader.on_drain()

    def on_silence(self) -> None:
        """Nothing to send before the close frame."""

    def on_close(self, code: int, reason: str) -> None:
        self._reader.gone()
