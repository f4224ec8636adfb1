"""How the events of a live reader reach its client: as server-sent events, or as WebSocket messages.

What is sent here is encoded already, once for everybody who reads the same.
"""

from __future__ import annotations

from typing import Protocol

from tailrace.http.exchange import ResponseStream
from tailrace.http.websocket import WebSocketConnection
from tailrace.protocol import sse


class LiveTransport(Protocol):
    """The way to one client. Readers whose wires have one form are sent the same bytes."""

    form: str

    def send(self, encoded: bytes) -> None: ...
    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        """`send`, unless more than that is unsent. False if nothing was sent."""
        ...

    def keep_alive(self) -> None: ...
    def end(self, code: int) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class SseTransport:
    """An event stream."""

    __slots__ = ("_outlet", "form", "offer")

    def __init__(self, outlet: ResponseStream, form: str) -> None:
        self._outlet = outlet
        self.offer = outlet.offer_raw
        self.form = form

    def send(self, encoded: bytes) -> None:
        self._outlet.write_raw(encoded)

    def keep_alive(self) -> None:
        self._outlet.write(sse.KEEP_ALIVE)

    def end(self, code: int) -> None:
        self._outlet.end()

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes


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
        """Nothing to do."""

    def end(self, code: int) -> None:
        if self._connection is not None:
            self._connection.close(code)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes


class LiveReader(Protocol):
    """Who wants to know about a WebSocket."""

    def on_drain(self) -> None: ...
    def gone(self) -> None: ...


class LiveWebSocketHandler:
    """What the WebSocket layer calls; clients have nothing to say here."""

    __slots__ = ("_reader",)

    def __init__(self, reader: LiveReader) -> None:
        self._reader = reader

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Frames from the client are ignored."""

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        """So are long ones."""

    def on_drain(self) -> None:
        self._reader.on_drain()

    def on_silence(self) -> None:
        """Nothing is said to whoever does not listen."""

    def on_close(self, code: int, reason: str) -> None:
        self._reader.gone()
