"""A WebSocket to an upstream whose data and control messages become batches."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from tailrace.edge.requests import build_request, build_stream_target
from tailrace.edge.upstreams import Upstream
from tailrace.http.client import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.http.exchange import chunk
from tailrace.protocol import sse
from tailrace.protocol.websocket_frames import encode_text

OVERHEAD_BYTES = 512


class FeedMessage(msgspec.Struct, frozen=True):
    """One message of an upstream socket: `data` or `control`."""

    type: str
    payload: str = ""
    encoding: str = ""
    offset: str = msgspec.field(name="streamNextOffset", default="")
    cursor: str = msgspec.field(name="streamCursor", default="")
    up_to_date: bool = msgspec.field(name="upToDate", default=False)
    closed: bool = msgspec.field(name="streamClosed", default=False)


decode_message = msgspec.json.Decoder(FeedMessage).decode


class FeedBatch:
    """Covers `(start, next]`. Each wire form is encoded on first use and shared by all readers."""

    __slots__ = (
        "_data",
        "arrived",
        "closed",
        "cursor",
        "cursor_number",
        "next",
        "payload",
        "size",
        "start",
        "text",
        "up_to_date",
    )

    def __init__(
        self, start: str, following: str, payload: bytes | None, text: bool, cursor: str, *, closed: bool
    ) -> None:
        self.start = start
        self.next = following
        self.payload = payload  # None if the batch is empty for this reader
        self.text = text  # else sent as base64
        self.cursor = cursor
        self.cursor_number = int(cursor) if cursor else -1
        self.closed = closed
        # With one wire form encoded, the usual number.
        self.size = OVERHEAD_BYTES + (0 if payload is None else 2 * len(payload))
        self.arrived = 0.0
        self.up_to_date = False  # of a slice; for a batch the channel knows it
        self._data: dict[str, bytes] = {}

    def encode(self, form: str, cursor: str, up_to_date: bool) -> bytes:
        """The batch with its control; the cursor may be specific to one reader."""
        return self.event(form) + encode_control(form, self.next, cursor, up_to_date, self.closed)

    def is_made(self, form: str) -> bool:
        return self.payload is None or form in self._data

    def event(self, form: str) -> bytes:
        """The data only, shared by all readers."""
        payload = self.payload
        if payload is None:
            return b""
        found = self._data.get(form)
        if found is None:
            if form == "ws":
                found = encode_text(sse.websocket_data(payload, self.text))
            else:
                made = sse.text_event if self.text else sse.base64_event
                found = chunk(made(payload, self.next))
            self._data[form] = found
        return found


def encode_control(form: str, offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    """A control only."""
    if form == "ws":
        return encode_text(sse.websocket_control(offset, cursor, up_to_date, closed))
    return chunk(sse.control_event(offset, cursor, up_to_date, closed))


def message_payload(message: FeedMessage) -> bytes:
    if message.encoding == "base64":
        return base64.b64decode(message.payload)
    return message.payload.encode()


ACCEPT_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
REFUSAL_BYTES_MAX = 64 * 1024
# Silence after which a ping is sent, and after which the upstream counts as lost.
PING_S = 15.0
DEAD_S = 45.0
ABNORMAL = 1006


class UpstreamAnswer(NamedTuple):
    """An upstream's response, to be forwarded unchanged."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class UpstreamRefusedError(Exception):
    """The upstream responded with an error."""

    def __init__(self, refusal: UpstreamAnswer) -> None:
        super().__init__(f"status {refusal.status}")
        self.refusal = refusal


def is_transient(status: int) -> bool:
    """Whether a retry may succeed."""
    return status == 429 or status >= 500


class UpstreamFeed(asyncio.Protocol):
    """One open socket. Reports each pair of data and control, and its end once."""

    def __init__(
        self,
        transport: asyncio.Transport,
        on_pair: Callable[[bytes | None, FeedMessage], None],
        on_end: Callable[[int], None],
        bytes_max: int,
    ) -> None:
        self._transport = transport
        self._on_pair = on_pair
        self._on_end = on_end
        self._frames = Protocol(CLIENT, state=OPEN, max_size=bytes_max)
        self._parts: list[bytes] = []
        self._payload: bytes | None = None  # of data that waits for its control
        self.ended = False
        self._heard_at = self._pinged_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Closes the socket without further callbacks."""
        if not self.ended:
            self.ended = True
            if self._frames.state is OPEN:
                self._frames.send_close(1000)
            self._flush()
            self._transport.close()

    def give_up(self) -> None:
        """Aborts the socket as lost."""
        self._end(ABNORMAL)
        self._transport.abort()

    def on_tick(self, now: float) -> None:
        if now - self._heard_at >= DEAD_S:
            self.give_up()
        elif now - max(self._heard_at, self._pinged_at) >= PING_S:
            self._pinged_at = now
            if self._frames.state is OPEN:
                self._frames.send_ping(b"")
            self._flush()

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        self._heard_at = asyncio.get_running_loop().time()
        self._frames.receive_data(data)
        for event in self._frames.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
        self._flush()
        if self._frames.parser_exc is not None:
            self.give_up()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        code = self._frames.close_rcvd.code if self._frames.close_rcvd is not None else ABNORMAL
        self._end(code)

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._flush()
            self._transport.close()
            return
        if frame.opcode not in (Opcode.TEXT, Opcode.CONT) or self.ended:
            return
        self._parts.append(bytes(frame.data))
        if frame.fin:
            raw = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._on_message(raw)

    def _on_message(self, raw: bytes) -> None:
        try:
            message = decode_message(raw)
        except msgspec.DecodeError:
            self.give_up()
            return
        if message.type == "data":
            self._payload = message_payload(message)
        elif message.type == "control":
            payload, self._payload = self._payload, None
            self._on_pair(payload, message)

    def _flush(self) -> None:
        for data in self._frames.data_to_send():
            if data and not self._transport.is_closing():
                self._transport.write(data)

    def _end(self, code: int) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(code)


async def open_feed(
    upstream: Upstream,
    edge_id: bytes,
    name: str,
    parameters: dict[str, str],
    authorization: bytes | None,
    on_pair: Callable[[bytes | None, FeedMessage], None],
    on_end: Callable[[int], None],
    bytes_max: int,
) -> UpstreamFeed:
    """Opens `live=ws` on a stream with a timeout; raises `UpstreamRefusedError` or `UpstreamLostError`."""
    key = base64.b64encode(secrets.token_bytes(16))
    request = build_request(
        b"GET",
        build_stream_target(name, {"live": "ws", **parameters}),
        upstream.origin.host_header,
        edge_id,
        authorization,
        b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
        b"sec-websocket-key: %b\r\n" % key,
    )
    try:
        async with asyncio.timeout(upstream.pool.answer_s):
            reply, connection = await _upgrade(upstream, request)
    except TimeoutError:
        raise UpstreamLostError("the upstream handshake timed out", sent=True) from None
    accept = base64.b64encode(hashlib.sha1(key + ACCEPT_SALT, usedforsecurity=False).digest())
    if connection.closed or reply.get(b"sec-websocket-accept") != accept:
        connection.abort()
        raise UpstreamLostError("the upstream handshake is invalid", sent=True)
    feed = UpstreamFeed(connection.transport, on_pair, on_end, bytes_max)
    early = connection.take_over(feed)
    if early:
        feed.data_received(early)
    return feed


async def _upgrade(upstream: Upstream, request: bytes) -> tuple[UpstreamResponse, UpstreamConnection]:
    reply, connection = await upstream.pool.request_dedicated(request)
    if reply.status != 101:
        try:
            raise UpstreamRefusedError(await read_answer(reply))
        finally:
            connection.abort()
    return reply, connection


async def read_answer(reply: UpstreamResponse) -> UpstreamAnswer:
    return UpstreamAnswer(reply.status, reply.fields, await reply.body(REFUSAL_BYTES_MAX) or b"")
