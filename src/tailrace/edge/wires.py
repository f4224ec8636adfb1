"""How a live reader's events reach its client: as server-sent events, or as WebSocket messages."""

from __future__ import annotations

from typing import Protocol

from tailrace.net.http1 import Outlet
from tailrace.net.websocket import WebSocketConnection
from tailrace.protocol import sse


class Wire(Protocol):
    """The way to one client."""

    form: str

    def send(self, encoded: bytes) -> None: ...
    def keep_alive(self) -> None: ...
    def end(self, code: int) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class SseWire:
    """An event stream; a client's type of encoding is in its head."""

    __slots__ = ("_outlet", "form")

    def __init__(self, outlet: Outlet) -> None:
        self.form = "sse"
        self._outlet = outlet

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
    """Messages of `live=ws`; the connection sends its own pings."""

    __slots__ = ("connection", "form")

    def __init__(self) -> None:
        self.form = "ws"
        self.connection: WebSocketConnection | None = None

    def send(self, encoded: bytes) -> None:
        if self.connection is not None:
            self.connection.send_encoded(encoded)

    def keep_alive(self) -> None:
        """Nothing to do."""

    def end(self, code: int) -> None:
        if self.connection is not None:
            self.connection.close(code)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.connection is None else self.connection.unsent_bytes


class Follower(Protocol):
    """Who wants to know about a WebSocket."""

    def on_drain(self) -> None: ...
    def gone(self) -> None: ...


class WsHandler:
    """What the WebSocket layer calls; clients have nothing to say here."""

    __slots__ = ("_follower",)

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Frames from the client are ignored."""

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        """So are long ones."""

    def on_drain(self) -> None:
        self._follower.on_drain()

    def on_close(self, code: int, reason: str) -> None:
        self._follower.gone()
