"""Transports of live readers: server-sent events or WebSocket messages, and how they encode an event.

Events are encoded once for all readers whose transports have the same form.
"""

from __future__ import annotations

from typing import Protocol

from tailrace.http.exchange import ResponseStream, chunk
from tailrace.http.websocket import WebSocketConnection
from tailrace.protocol import sse
from tailrace.protocol.websocket_frames import encode_text


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


class EventTransport(LiveTransport, Protocol):
    """A transport that also encodes; those with the same `form` encode the same bytes."""

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes: ...


class SseEventTransport(SseTransport):
    __slots__ = ("_text",)

    def __init__(self, stream: ResponseStream, text: bool) -> None:
        super().__init__(stream, "sse-text" if text else "sse-base64")
        self._text = text

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = sse.control_event(offset, cursor, up_to_date, closed)
        if payload is None:
            return chunk(control)
        event = sse.text_event(payload, offset) if self._text else sse.base64_event(payload, offset)
        return chunk(event + control)


class WebSocketEventTransport(WebSocketTransport):
    __slots__ = ("_text",)

    def __init__(self, text: bool) -> None:
        super().__init__("ws-text" if text else "ws-base64")
        self._text = text

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = encode_text(sse.websocket_control(offset, cursor, up_to_date, closed))
        if payload is None:
            return control
        return encode_text(sse.websocket_data(payload, self._text)) + control


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
