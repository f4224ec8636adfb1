"""Live readers of an edge: they read slices until they meet the ring of a channel, and go on from there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.edge.asks import SharedRead
from tailrace.edge.channel import CLOSE_NOT_ALLOWED, ChannelKey
from tailrace.edge.channels import ChannelTable
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.context import EdgeContext
from tailrace.edge.feed import UpstreamRefusedError
from tailrace.edge.gate import Authenticator, Caller
from tailrace.edge.headers import cache_line
from tailrace.edge.reader import LiveReader
from tailrace.edge.slices import SliceReader
from tailrace.http.exchange import Exchange
from tailrace.http.live_transport import LiveWebSocketHandler, SseTransport, WebSocketTransport
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import header_line
from tailrace.protocol.sse import EVENT_STREAM_HEADERS

TICK_S = 1.0
# At shutdown readers are sent away at this rate, so that they do not all come back in one moment; faster only
# if they are so many that it would take longer than this.
CLOSED_PER_S = 2000
CLOSE_S_MAX = 5.0


class EdgeLiveReaders:
    """All live readers: how they come in, and the one timer for keep-alives and rotation."""

    def __init__(
        self, context: EdgeContext, gate: Authenticator, channels: ChannelTable, slices: SliceReader
    ) -> None:
        self.context = context
        self._gate = gate
        self.channels = channels
        self.slices = slices
        self.readers: set[LiveReader] = set()
        self.unsent_bytes_max = context.limits.live_unsent_bytes
        self.now = context.loop.time()  # moved by the tick
        self.fanout_bytes: dict[str, int] = {"sse": 0, "ws": 0}
        for mode in self.fanout_bytes:
            context.telemetry.edge_fanout_bytes.reads[(mode,)] = lambda mode=mode: self.fanout_bytes[mode]
        self._timer: asyncio.TimerHandle | None = None

    async def follow(self, exchange: Exchange, reading: SharedRead, caller: Caller) -> bool:
        """Makes a live reader of a request. False if the owner has to decide: nothing was answered then."""
        if reading.mode == "ws" and not exchange.wants_websocket():
            return False
        outcome = "HIT"
        try:
            offset = reading.offset
            if offset == "now":
                outcome = "MISS"
                offset = await self._tail(reading.name, caller)
            key = ChannelKey(reading.name, reading.fmt, reading.key)
            channel, known = await self.channels.open(key, caller.authorization)
            reader = LiveReader(self, channel, reading, caller, offset)
            first = await reader.prepare()
        except UpstreamRefusedError:
            return False
        except UpstreamLostError:
            raise TailraceError("unavailable", "the upstream does not answer") from None
        if not known or reader.asked_upstream:
            outcome = "MISS"
        self._open_wire(exchange, reader, reading.start_line + cache_line(outcome))
        self.context.telemetry.edge_requests.add(reader.mode, outcome, 101 if reader.mode == "ws" else 200)
        reader.begin(first)
        return True

    async def _tail(self, name: str, caller: Caller) -> str:
        """Where a stream ends, asked now: what this edge has seen so far may be old."""
        reply = await self.channels.head(name, self.context.token or caller.authorization)
        return (reply.get(b"stream-next-offset") or b"").decode("latin-1")

    def _open_wire(self, exchange: Exchange, reader: LiveReader, more: bytes) -> None:
        channel = reader.channel
        if reader.mode == "ws":
            wire = WebSocketTransport("ws")
            try:
                wire.attach(
                    exchange.upgrade_websocket(LiveWebSocketHandler(reader), more, message_bytes=1024)
                )
            except TailraceError:
                reader.gone()
                raise
            reader.wire = wire
        else:
            rotation_s = self.context.limits.sse_rotation_ms / 1000 * random.uniform(0.9, 1.1)  # noqa: S311
            reader.rotate_at = self.context.loop.time() + rotation_s
            head = EVENT_STREAM_HEADERS
            if not channel.text:
                head += b"Stream-SSE-Data-Encoding: base64\r\n"
            if channel.earliest and offsets.parse_offset(channel.earliest)[1]:
                head += header_line("Stream-Earliest-Offset", channel.earliest)
            outlet = exchange.open_stream(200, head + more)
            reader.wire = SseTransport(outlet, "sse")
            outlet.on_gone = reader.gone
            outlet.on_drain = reader.on_drain
            if outlet.closed:
                reader.gone()
        self._admit(reader)

    def _admit(self, reader: LiveReader) -> None:
        if reader.ended:
            return
        self.readers.add(reader)
        self.channels.clients[reader.mode] += 1
        if self._timer is None:
            self.now = self.context.loop.time()
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def dismiss(self, reader: LiveReader) -> None:
        if reader in self.readers:
            self.readers.discard(reader)
            self.channels.clients[reader.mode] -= 1

    def recheck(self) -> None:
        """Keys or revocations have changed: whoever has lost their right is sent away."""
        for reader in tuple(self.readers):
            if not self._gate.stands(reader.caller):
                reader.finish(CLOSE_NOT_ALLOWED)

    def end_all(self) -> None:
        """Shutdown: everybody is sent away and comes back elsewhere, not all at once."""
        pace_s = close_interval_s(len(self.readers))
        for index, reader in enumerate(tuple(self.readers)):
            delay_s = index * pace_s
            end: Callable[[], None] = reader.rotate
            self.context.loop.call_later(delay_s, end) if delay_s else end()

    def _tick(self) -> None:
        self._timer = None
        self.now = now = self.context.loop.time()
        now_s = self.context.now_s()
        keep_alive_s = self.context.limits.sse_keep_alive_ms / 1000
        for reader in tuple(self.readers):
            reader.on_tick(now, now_s, keep_alive_s)
        if self.readers:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)


def close_interval_s(readers: int) -> float:
    """The time between two of so many readers that are sent away."""
    return min(1 / CLOSED_PER_S, CLOSE_S_MAX / max(1, readers))
