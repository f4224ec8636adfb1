"""What a page of a stream looks like on the wire of a follower."""

from __future__ import annotations

from typing import Protocol

from tailrace.http import live_transport
from tailrace.http.exchange import ResponseStream, chunk
from tailrace.protocol import sse
from tailrace.protocol.websocket_frames import encode_text


class FollowerTransport(live_transport.LiveTransport, Protocol):
    """How a follower's events reach its client."""

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes: ...


class SseFollowerTransport(live_transport.SseTransport):
    __slots__ = ("_text",)

    def __init__(self, outlet: ResponseStream, text: bool) -> None:
        super().__init__(outlet, "sse-text" if text else "sse-base64")
        self._text = text

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = sse.control_event(offset, cursor, up_to_date, closed)
        if payload is None:
            return chunk(control)
        event = sse.text_event(payload, offset) if self._text else sse.base64_event(payload, offset)
        return chunk(event + control)


class WebSocketFollowerTransport(live_transport.WebSocketTransport):
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
