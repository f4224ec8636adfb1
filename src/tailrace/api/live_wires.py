"""How a follower's events reach its client: as server-sent events, or as WebSocket messages."""

from __future__ import annotations

from typing import Protocol

from tailrace.net.http1 import Outlet, chunk
from tailrace.net.websocket import WebSocketConnection, encode_text
from tailrace.protocol import sse


class Wire(Protocol):
    """How a follower's events reach its client."""

    form: str

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes: ...
    def send(self, encoded: bytes) -> None: ...
    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool: ...
    def keep_alive(self) -> None: ...
    def end(self, code: int) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class SseWire:
    __slots__ = ("_outlet", "_text", "form", "offer")

    def __init__(self, outlet: Outlet, text: bool) -> None:
        self._outlet = outlet
        self.offer = outlet.offer_raw
        self._text = text
        self.form = "sse-text" if text else "sse-base64"

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        event = (
            b"" if payload is None else sse.text_event(payload) if self._text else sse.base64_event(payload)
        )
        return chunk(event + sse.control_event(offset, cursor, up_to_date, closed))

    def send(self, encoded: bytes) -> None:
        self._outlet.write_raw(encoded)

    def keep_alive(self) -> None:
        self._outlet.write(sse.KEEP_ALIVE)

    def end(self, code: int) -> None:
        self._outlet.end()

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes


class WsWire:
    __slots__ = ("_connection", "_text", "form")

    def __init__(self, text: bool) -> None:
        self._connection: WebSocketConnection | None = None
        self._text = text
        self.form = "ws-text" if text else "ws-base64"

    def attach(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = encode_text(sse.ws_control(offset, cursor, up_to_date, closed))
        if payload is None:
            return control
        return encode_text(sse.ws_data(payload, self._text)) + control

    def send(self, encoded: bytes) -> None:
        if self._connection is not None:
            self._connection.send_encoded(encoded)

    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        if self.unsent_bytes > unsent_bytes_max:
            return False
        self.send(encoded)
        return True

    def keep_alive(self) -> None:
        """The connection sends its own pings."""

    def end(self, code: int) -> None:
        if self._connection is not None:
            self._connection.close(code)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes
