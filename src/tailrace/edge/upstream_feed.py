"""A WebSocket to an upstream whose data and control messages become batches.

A batch of a stream: what one data message and its control carried, in every form that readers take.

The upstream's end of a followed stream: a WebSocket whose pairs of data and control become batches.
"""

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
from tailrace.edge.upstream_pool import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.edge.upstreams import Upstream
from tailrace.http.exchange import chunk
from tailrace.protocol import sse
from tailrace.protocol.websocket_frames import encode_text

OVERHEAD_BYTES = 512


class FeedMessage(msgspec.Struct, frozen=True):
    """What an upstream says on a socket: a `data` or a `control`."""

    type: str
    payload: str = ""
    encoding: str = ""
    offset: str = msgspec.field(name="streamNextOffset", default="")
    cursor: str = msgspec.field(name="streamCursor", default="")
    up_to_date: bool = msgspec.field(name="upToDate", default=False)
    closed: bool = msgspec.field(name="streamClosed", default=False)


decode_message = msgspec.json.Decoder(FeedMessage).decode


class FeedBatch:
    """Covers `(start, next]`. Each wire form is made on first use, and the same bytes go to all readers."""

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
        self.payload = payload  # None if the batch only moves on: nothing in it was for this reader
        self.text = text  # else it travels as base64
        self.cursor = cursor
        self.cursor_number = int(cursor) if cursor else -1
        self.closed = closed
        # What it holds with one wire form made of it, which is the usual number.
        self.size = OVERHEAD_BYTES + (0 if payload is None else 2 * len(payload))
        self.arrived = 0.0
        self.up_to_date = False  # as a slice said; of a batch the channel knows
        self._data: dict[str, bytes] = {}

    def encode(self, form: str, cursor: str, up_to_date: bool) -> bytes:
        """The batch with its control; the cursor may be one that a single reader needs."""
        return self.event(form) + encode_control(form, self.next, cursor, up_to_date, self.closed)

    def is_made(self, form: str) -> bool:
        return self.payload is None or form in self._data

    def event(self, form: str) -> bytes:
        """The data alone: most of the bytes, and the same for everybody."""
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
    """A control by itself."""
    if form == "ws":
        return encode_text(sse.websocket_control(offset, cursor, up_to_date, closed))
    return chunk(sse.control_event(offset, cursor, up_to_date, closed))


def message_payload(message: FeedMessage) -> bytes:
    if message.encoding == "base64":
        return base64.b64decode(message.payload)
    return message.payload.encode()


ACCEPT_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
REFUSAL_BYTES_MAX = 64 * 1024
# Silence after which the upstream is asked whether it is there, and after which it counts as lost.
PING_S = 15.0
DEAD_S = 45.0
ABNORMAL = 1006


class UpstreamAnswer(NamedTuple):
    """What an upstream said, to be passed on as it is."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class UpstreamRefusedError(Exception):
    """The upstream answered, and the answer is no."""

    def __init__(self, refusal: UpstreamAnswer) -> None:
        super().__init__(f"status {refusal.status}")
        self.refusal = refusal


def is_transient(status: int) -> bool:
    """Whether an upstream that answers so may answer otherwise in a moment."""
    return status == 429 or status >= 500


class UpstreamFeed(asyncio.Protocol):
    """One open socket. Tells of each pair, and once of its end."""

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
        self._payload: bytes | None = None  # of a data whose control has not come yet
        self.ended = False
        self._heard_at = self._pinged_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Says goodbye; nothing is told any more."""
        if not self.ended:
            self.ended = True
            if self._frames.state is OPEN:
                self._frames.send_close(1000)
            self._flush()
            self._transport.close()

    def give_up(self) -> None:
        """Whoever is at the other end is not waited for any longer."""
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
    """Opens `live=ws` on a stream; raises `RefusedError` or `UpstreamLostError`, and that in time."""
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
        raise UpstreamLostError("the upstream's handshake did not come in time", sent=True) from None
    accept = base64.b64encode(hashlib.sha1(key + ACCEPT_SALT, usedforsecurity=False).digest())
    if connection.closed or reply.get(b"sec-websocket-accept") != accept:
        connection.abort()
        raise UpstreamLostError("the upstream's handshake is wrong", sent=True)
    feed = UpstreamFeed(connection.transport, on_pair, on_end, bytes_max)
    early = connection.take_over(feed)
    if early:
        feed.data_received(early)
    return feed


async def _upgrade(upstream: Upstream, request: bytes) -> tuple[UpstreamResponse, UpstreamConnection]:
    reply, connection = await upstream.pool.ask_apart(request)
    if reply.status != 101:
        try:
            raise UpstreamRefusedError(await read_answer(reply))
        finally:
            connection.abort()
    return reply, connection


async def read_answer(reply: UpstreamResponse) -> UpstreamAnswer:
    return UpstreamAnswer(reply.status, reply.fields, await reply.body(REFUSAL_BYTES_MAX) or b"")
