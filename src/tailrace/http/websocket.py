"""WebSocket connections: they take over from HTTP after the upgrade, on the same listener.

A connection has no task, queue or timer: frames are handled as they are read, writes go to the transport
directly, and the server's sweeper checks its deadlines.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from typing import TYPE_CHECKING, Final, Protocol

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import MODE_OBSERVED, status_line
from tailrace.protocol.websocket_frames import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    TEXT_HEADS,
    TOO_LARGE,
    FrameEvent,
    FrameReader,
    deflate,
    encode_close,
    encode_frame,
    encode_text,
    text_head,
)

if TYPE_CHECKING:
    from tailrace.http.exchange import Exchange
    from tailrace.http.server import HttpServer

__all__ = ["WebSocketConnection", "WebSocketHandler", "encode_text", "upgrade_to_websocket"]

logger = logging.getLogger("tailrace.http")

_ACCEPT_SALT: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# How long the peer has to respond to our close frame before TCP is closed.
CLOSE_S = 2.0
# How long a frame may take from its first byte to its last.
FRAME_S = 30.0
# Frames gathered in one loop iteration beyond this size are written at once.
GATHER_BYTES_MAX = 64 * 1024
# Below this, deflating costs more than it saves.
DEFLATE_BYTES_MIN = 512
_DEFLATE_RESPONSE: Final = (
    b"Sec-WebSocket-Extensions: permessage-deflate; "
    b"server_no_context_takeover; client_no_context_takeover\r\n"
)

GOING_AWAY: Final = 1001
ABNORMAL: Final = 1006
INTERNAL_ERROR: Final = 1011


class WebSocketHandler(Protocol):
    """What an endpoint implements."""

    def on_message(self, data: bytes, is_text: bool) -> None:
        """A whole message; text is known to be UTF-8."""
        ...

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        """A message over the limit was skipped; `prefix` is its beginning, at most 4 KiB."""
        ...

    def on_drain(self) -> None:
        """The write buffer, once above its high-water mark, fell below the low one."""
        ...

    def on_silence(self) -> None:
        """The peer sent nothing for too long; called before the close frame is sent."""
        ...

    def on_close(self, code: int, reason: str) -> None:
        """The connection has ended; called exactly once. The code is 1006 if no close frame was exchanged."""
        ...


class WebSocketConnection(asyncio.Protocol):
    """The server's side of one WebSocket."""

    __slots__ = (
        "_alive_at",
        "_closing",
        "_code",
        "_deflate",
        "_frame_began",
        "_handler",
        "_lost",
        "_out",
        "_out_bytes",
        "_pinged_at",
        "_pong",
        "_reader",
        "_reading",
        "_reason",
        "_write_paused",
        "dead_s",
        "deadline",
        "drains_itself",
        "peer",
        "ping_s",
        "server",
        "silence_code",
        "transport",
        "unsent_bytes_most",
    )

    def __init__(
        self,
        server: HttpServer,
        transport: asyncio.Transport,
        handler: WebSocketHandler,
        reader: FrameReader,
        *,
        peer: str,
        deflate: bool,
    ) -> None:
        self.server = server
        self.transport = transport
        self.peer = peer
        # Seconds between pings, and without data until the peer counts as gone; close code for the latter.
        self.ping_s = server.limits.ws_ping_ms / 1000
        self.dead_s = server.limits.ws_dead_ms / 1000
        self.silence_code = GOING_AWAY
        # True if the endpoint closes its connection itself at shutdown; otherwise the server sends 1001.
        self.drains_itself = False
        self._handler = handler
        self._reader = reader
        self._deflate = deflate
        self._alive_at = self._pinged_at = server.now
        self._frame_began = 0.0
        self._closing = False
        self._lost = False
        self._reading = True
        self._write_paused = False
        # Frames of this loop iteration, written together: uvloop makes a system call for every write.
        self._out: list[bytes] | None = None
        self._out_bytes = 0
        # Upper bound of `unsent_bytes` without a call: `_out_bytes` and what the transport held after the
        # last flush, which can only shrink. The handshake response is not included.
        self.unsent_bytes_most = 0
        self._pong: bytes | None = None
        self._code = ABNORMAL
        self._reason = ""
        self.deadline = server.now + self.ping_s

    # --- sending

    @property
    def closed(self) -> bool:
        """True once a close frame was sent or received, or the client has disconnected."""
        return self._closing

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._lost else self._out_bytes + self.transport.get_write_buffer_size()

    def send_text(self, payload: bytes) -> None:
        """Send UTF-8 bytes as one text message."""
        size = len(payload)
        if self._closing or (self._deflate and size >= DEFLATE_BYTES_MIN):
            self._send(TEXT, payload)
            return
        # `_write` inlined: this runs for every message of the hub.
        head, out = TEXT_HEADS.get(size) or text_head(size), self._out
        if out is None:
            out = self._out = []
            self.server.flush_later(self)
        out.append(head)
        out.append(payload)
        size += len(head)
        self.unsent_bytes_most += size
        self._out_bytes += size
        if self._out_bytes >= GATHER_BYTES_MAX:
            self.flush()

    def send_binary(self, payload: bytes) -> None:
        self._send(BINARY, payload)

    def send_encoded(self, frame: bytes) -> None:
        """Send a frame encoded by `encode_text` or similar, so that one encoding serves many readers."""
        if not self._closing:
            self._write(frame)

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame; the connection ends when the peer has responded, or after a timeout."""
        if self._closing:
            return
        self._write(encode_close(code, reason))
        self._closing = True
        self._code, self._reason = code, reason
        self.resume_reading()
        self.deadline = self.server.now + CLOSE_S

    def _send(self, opcode: int, payload: bytes) -> None:
        if self._closing:
            return
        if self._deflate and len(payload) >= DEFLATE_BYTES_MIN:
            self._write(encode_frame(opcode, deflate(payload), compressed=True))
        else:
            self._write(encode_frame(opcode, payload))

    def _write(self, data: bytes) -> None:
        out = self._out
        if out is None:
            out = self._out = []
            self.server.flush_later(self)
        out.append(data)
        self._out_bytes += len(data)
        self.unsent_bytes_most += len(data)
        if self._out_bytes >= GATHER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the gathered frames; the server calls this at the end of each loop iteration."""
        out = self._out
        if out is None or self._lost:
            return
        size, transport = self._out_bytes, self.transport
        self.server.bytes_out += size
        self._out = None
        self._out_bytes = 0
        try:
            if size > GATHER_BYTES_MAX:
                transport.writelines(out)
            else:
                # Copying small pieces together is faster than passing them to the kernel one by one.
                transport.write(b"".join(out))
        except (RuntimeError, OSError):
            # uvloop raises on a transport that just died; connection_lost follows and cleans up.
            return
        self.unsent_bytes_most = transport.get_write_buffer_size()

    # --- flow

    def pause_reading(self) -> None:
        """Read no further frames for now; those already read are still delivered."""
        if self._reading and not self._closing and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self._alive_at = self.server.now
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._send_pong()
        if not self._closing:
            self._guard_drain()

    # --- receiving

    def data_received(self, data: bytes) -> None:
        server = self.server
        server.bytes_in += len(data)
        self._alive_at = server.now
        reader = self._reader
        for event in reader.feed(data):
            if self._lost:
                return
            if event[0] == TEXT and not self._closing:
                try:
                    self._handler.on_message(event[1], True)
                except Exception as error:  # noqa: BLE001 - an error of a handler closes its connection
                    self._handler_failed(error)
            else:
                self._on_event(event)
        if self._pong is not None:
            self._send_pong()
        if not reader.in_frame:
            self._frame_began = 0.0
        elif not self._frame_began:
            self._frame_began = server.now
            self.deadline = min(self.deadline, server.now + FRAME_S)

    def _on_event(self, event: FrameEvent) -> None:
        kind, payload, number = event
        if kind in (TEXT, BINARY):
            if not self._closing:
                try:
                    self._handler.on_message(payload, kind == TEXT)
                except Exception as error:  # noqa: BLE001 - as above
                    self._handler_failed(error)
        elif kind == PING:
            # Only the newest of several pings gets a pong.
            self._pong = payload
        elif kind == TOO_LARGE:
            if not self._closing:
                try:
                    self._handler.on_too_large(payload, number)
                except Exception as error:  # noqa: BLE001 - as above
                    self._handler_failed(error)
        elif kind == CLOSE:
            self._on_peer_close(number, payload.decode("utf-8"))
        elif kind != PONG:
            self._fail(number, payload.decode("utf-8"))

    def _on_peer_close(self, code: int, reason: str) -> None:
        if not self._closing:
            self._closing = True
            self._code, self._reason = code, reason
            self._write(encode_close(code))
        self.deadline = self.server.now + CLOSE_S
        self.flush()
        self.transport.close()

    def _fail(self, code: int, reason: str) -> None:
        """The peer violated the protocol: close, and let it read the reason before TCP ends."""
        self.close(code, reason)
        self.deadline = self.server.now + CLOSE_S
        self.flush()
        if self.transport.is_closing():
            return
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except (RuntimeError, OSError):
            return

    def _handler_failed(self, error: Exception) -> None:
        logger.error("WebSocket handler failed", exc_info=error)
        self.close(INTERNAL_ERROR, "internal error")

    def _guard_drain(self) -> None:
        try:
            self._handler.on_drain()
        except Exception as error:  # noqa: BLE001 - as above
            self._handler_failed(error)

    def _send_pong(self) -> None:
        """Respond to the newest ping, but not while the peer does not read."""
        if self._pong is not None and not self._write_paused and not self._closing:
            self._write(encode_frame(PONG, self._pong))
            self._pong = None

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._closing = True
        self.server.remove(self)
        try:
            self._handler.on_close(self._code, self._reason)
        except Exception:
            logger.exception("WebSocket close handler failed")

    # --- time

    def on_sweep(self, now: float) -> None:
        if self._closing:
            self.transport.abort()
            return
        if not self._reading:
            # We do not read, so a missing pong proves nothing.
            self._alive_at = now
        if now - self._alive_at >= self.dead_s:
            self._give_up()
            return
        if self._frame_began and now - self._frame_began >= FRAME_S:
            self._fail(1002, "frame not completed in time")
            return
        ping_at = max(self._alive_at, self._pinged_at) + self.ping_s
        if ping_at <= now:
            self._write(encode_frame(PING, b""))
            self._pinged_at = now
            ping_at = now + self.ping_s
        self.deadline = min(ping_at, self._alive_at + self.dead_s)
        if self._frame_began:
            self.deadline = min(self.deadline, self._frame_began + FRAME_S)

    def _give_up(self) -> None:
        try:
            self._handler.on_silence()
        except Exception as error:  # noqa: BLE001 - as above
            self._handler_failed(error)
        self.close(self.silence_code, "ping timeout")

    def drain(self) -> None:
        if not self.drains_itself:
            self.close(GOING_AWAY, "the server is stopping")


# --- the handshake


def upgrade_to_websocket(
    exchange: Exchange,
    handler: WebSocketHandler,
    head: bytes = b"",
    *,
    subprotocol: bytes | None = None,
    deflate: bool = False,
    message_bytes: int | None = None,
    discard_bytes: int | None = None,
) -> WebSocketConnection:
    """Respond to a valid handshake with 101 and take over the connection; raise for an invalid one."""
    key = _handshake_key(exchange)
    deflate = deflate and _offers_deflate(exchange.headers.get(b"sec-websocket-extensions", b""))
    connection = exchange.connection
    server = connection.server
    limits = server.limits
    reader = FrameReader(
        limits.ws_message_bytes if message_bytes is None else message_bytes,
        limits.ws_discard_bytes if discard_bytes is None else discard_bytes,
        deflate=deflate,
    )
    websocket = WebSocketConnection(
        server, connection.transport, handler, reader, peer=connection.peer, deflate=deflate
    )
    if exchange.answered:
        # The client disconnected while the application decided.
        server.loop.call_soon(websocket.connection_lost, None)
        return websocket
    exchange.answered = True
    accept = base64.b64encode(hashlib.sha1(key + _ACCEPT_SALT, usedforsecurity=False).digest())
    response = (
        status_line(101),
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ",
        accept,
        b"\r\n",
        server.app.common_headers(exchange),
        exchange.begin_response(101, head) if exchange.mode & MODE_OBSERVED else b"",
        b"Sec-WebSocket-Protocol: %b\r\n" % subprotocol if subprotocol else b"",
        _DEFLATE_RESPONSE if deflate else b"",
        head,
        b"\r\n",
    )
    connection.write(b"".join(response))
    held = connection.detach(websocket)
    server.add(websocket)
    if held:
        server.loop.call_soon(websocket.data_received, held)
    return websocket


def _handshake_key(exchange: Exchange) -> bytes:
    if exchange.method != b"GET" or not exchange.wants_websocket():
        raise TailraceError(
            "upgrade_required", "this endpoint requires a WebSocket", headers=(("Upgrade", "websocket"),)
        )
    headers = exchange.headers
    if headers.get(b"sec-websocket-version") != b"13":
        raise TailraceError(
            "upgrade_required",
            "Sec-WebSocket-Version must be 13",
            headers=(("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")),
        )
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_valid = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_valid = False
    if not is_valid:
        raise TailraceError(
            "invalid_header", "Sec-WebSocket-Key must be 16 bytes in base64", header="sec-websocket-key"
        )
    return key


def _offers_deflate(offers: bytes) -> bool:
    """True if one of the client's offers is compatible with our parameters."""
    for offer in offers.lower().split(b","):
        name, *parameters = (part.strip() for part in offer.split(b";"))
        if name == b"permessage-deflate" and all(_supports_parameter(parameter) for parameter in parameters):
            return True
    return False


def _supports_parameter(parameter: bytes) -> bool:
    name, _, value = (part.strip() for part in parameter.partition(b"="))
    if name in (b"client_no_context_takeover", b"server_no_context_takeover"):
        return value == b""
    if name == b"client_max_window_bits":
        return True
    return name == b"server_max_window_bits" and value.strip(b'"') == b"15"
