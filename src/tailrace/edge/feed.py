"""The upstream's end of a followed stream: a WebSocket whose pairs of data and control become batches."""

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

from tailrace.edge.asks import build_stream_target
from tailrace.edge.batch import FeedMessage, decode_message, message_payload
from tailrace.edge.connection import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.edge.headers import build_request
from tailrace.edge.upstreams import Upstream

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
