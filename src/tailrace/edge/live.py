"""Live readers of an edge: from slices to the ring of a channel, with keep-alive and rotation.

A reader stores the offset of the last entry it was sent. A slice or batch is sent only if it starts there, or
earlier with nothing for this reader in between: so no entry is lost or duplicated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.edge.auth import Authenticator, Caller
from tailrace.edge.cache import Slice
from tailrace.edge.channels import (
    CLOSE_GOING_AWAY,
    CLOSE_GONE,
    CLOSE_NOT_ALLOWED,
    CLOSE_OVERLOADED,
    Channel,
    ChannelKey,
    ChannelTable,
    ChannelWaiter,
    EncodedBatches,
)
from tailrace.edge.context import EdgeContext
from tailrace.edge.requests import SharedRead, cache_line
from tailrace.edge.slices import SliceReader
from tailrace.edge.upstream_feed import FeedBatch, UpstreamRefusedError, encode_control, is_transient
from tailrace.http.client import UpstreamLostError
from tailrace.http.exchange import Exchange
from tailrace.http.live_transport import LiveTransport, LiveWebSocketHandler, SseTransport, WebSocketTransport
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import header_line, is_text
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.sse import EVENT_STREAM_HEADERS

# Reads of a reader inside a batch before it gets a private socket.
ROUNDS_MAX = 3
# Time for a lagging channel to reach a reader's offset.
LAG_S_MAX = 1.0
RETRY_S = 0.25


class ContentTypeChangedError(TailraceError):
    """The content type changed, so the encoding of the response is no longer right."""

    def __init__(self) -> None:
        super().__init__("unavailable", "the content type of the stream has changed")


class LiveReader:
    """One SSE or WebSocket client, from its offset to the tail and live."""

    # Slots: there are tens of thousands of readers.
    __slots__ = (
        "_bare_from",
        "_behind",
        "_context",
        "_drained",
        "_floor",
        "_joining",
        "_live",
        "_number",
        "_path",
        "_rounds",
        "_said_up_to_date",
        "_shared",
        "_silent_since",
        "_task",
        "_text",
        "asked_upstream",
        "authorization",
        "caller",
        "channel",
        "ended",
        "last",
        "mode",
        "rotate_at",
        "until_s",
        "wire",
    )

    def __init__(
        self, live: EdgeLiveReaders, channel: Channel, reading: SharedRead, caller: Caller, offset: str
    ) -> None:
        self._live = live
        self._context = live.context
        self.channel = channel  # the one it is attached to, or catching up with
        self._shared = channel
        self.caller = caller
        self.authorization = caller.authorization
        self.until_s = caller.until_s
        self.mode = reading.mode
        self.wire: LiveTransport | None = None
        self.last = offset
        # Nothing for this reader lies between here and `last`: a batch that starts here fits too.
        self._bare_from = offset
        self._number = -1  # of the next batch, while attached
        self._text = channel.text
        cursor = reading.cursor or ""
        self._floor = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18 else -1
        self._said_up_to_date = False  # of the last control sent
        self._behind = False  # the client is too slow
        self._joining = True
        self._drained: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.asked_upstream = False
        self.ended = False
        self.rotate_at: float | None = None
        self._silent_since = live.now
        self._path = "ring"
        self._rounds = 0  # consecutive reads from inside a batch of the ring

    # -- catching up

    async def prepare(self) -> FeedBatch | None:
        """The first slice to send, or None if the ring continues. Errors are raised before the response."""
        return await self._next_slice()

    def begin(self, first: FeedBatch | None) -> None:
        """The response has started: events are sent from here on."""
        if self.ended:
            return
        if first is None:
            self._attach()
        else:
            self._task = self._context.tasks.start(self._join(first))

    async def _next_slice(self) -> FeedBatch | None:
        """The slice after `last`; None once a channel continues from there."""
        while True:
            channel = await self._living_channel()
            if self._number_in(channel) is not None:
                return None
            if self.last > channel.end:
                if await self._is_bare_since(channel) or await ChannelWaiter.reached(
                    channel, self.last, LAG_S_MAX
                ):
                    continue
                await self._go_private()
                return None
            if self._rounds >= ROUNDS_MAX:
                await self._go_private()
                return None
            if channel.holds(self.last):
                self._rounds += 1
                self._path = "straddle"
            batch = self._batch_of(await self._read(self.last, channel.end))
            if batch.payload is not None or batch.closed:
                self._path = "slices" if self._path == "ring" else self._path
                return batch
            if batch.next == self.last:
                self._rounds += 1  # the channel is ahead of the slice
            self.last = batch.next  # empty for this reader

    async def _living_channel(self) -> Channel:
        if self._shared.over:
            self._shared, _ = await self._live.channels.open(self._shared.key, self.authorization)
            self.channel = self._shared
            if self._shared.text is not self._text:
                raise ContentTypeChangedError
        return self._shared

    def _number_in(self, channel: Channel) -> int | None:
        """The batch number at which a channel continues for this reader, if any."""
        number = channel.number_at(self.last)
        if number is None and self._bare_from <= channel.end < self.last:
            return channel.following
        return number

    async def _is_bare_since(self, channel: Channel) -> bool:
        """Whether the owner has nothing for this reader between a channel's end and `last`.

        A socket with a key gets controls for entries of other keys only occasionally, so on a busy stream the
        channel lags behind slice reads until its key is written.
        """
        if not channel.key.key:
            return False
        begun = position = channel.end
        while position < self.last:
            found = await self._read(position, self.last)
            if not found.is_empty or found.next <= position:
                return False
            position = found.next
        self._bare_from = min(self._bare_from, begun)
        return True

    async def _read(self, offset: str, known: str) -> Slice:
        """The slice after an offset, not older than what is known to follow."""
        self.asked_upstream = True
        key = self._shared.key
        reading = SharedRead.plain(key.name, offset, key.fmt, key.key)
        found, _ = await self._live.slices.get(reading, self.caller)
        if found.next == offset < known:
            found = await self._live.slices.fetched(reading, self.caller)
        return found

    def _batch_of(self, found: Slice) -> FeedBatch:
        if is_text(found.content_type) is not self._text:
            raise ContentTypeChangedError
        cursor = next_cursor(None, self._context.now_s())
        payload = None if found.is_empty else found.body
        batch = FeedBatch(self.last, found.next, payload, self._text, cursor, closed=found.closed)
        batch.up_to_date = found.up_to_date
        return batch

    async def _join(self, batch: FeedBatch | None) -> None:
        """Sends slices until the ring continues, with back-pressure."""
        while not self.ended:
            if batch is not None:
                self._send_slice(batch)
                await self._until_drained()
                if self.ended:
                    return
            try:
                batch = await self._next_in_time()
            except (UpstreamRefusedError, TailraceError, TimeoutError) as error:
                self.finish(_close_code(error))
                return
            if batch is None:
                self._task = None
                self._attach()
                return

    async def _next_in_time(self) -> FeedBatch | None:
        """The next slice, retried during the hold time while the upstream is lost."""
        async with asyncio.timeout(self._context.limits.edge_hold_ms / 1000):
            while True:
                try:
                    return await self._next_slice()
                except (UpstreamLostError, UpstreamRefusedError, TailraceError) as error:
                    if not _is_transient_failure(error):
                        raise
                await asyncio.sleep(RETRY_S)

    def _send_slice(self, batch: FeedBatch) -> None:
        """Up to date means: has everything that this edge has received."""
        assert self.wire is not None
        assert batch.start == self.last
        up_to_date = batch.up_to_date and batch.next >= self._shared.end
        self.last = self._bare_from = batch.next
        self._emit(batch.encode(self.wire.form, self._cursor(batch.cursor), up_to_date), up_to_date)
        if batch.closed:
            self.finish(1000)

    async def _until_drained(self) -> None:
        assert self.wire is not None
        while not self.ended and self.wire.unsent_bytes > self._live.unsent_bytes_max:
            self._drained = asyncio.Event()
            await self._drained.wait()

    async def _go_private(self) -> None:
        """A private socket from this offset, until the first batch boundary in the shared ring."""
        self._path = "private"
        channels = self._live.channels
        self.channel = await channels.open_private(self._shared.key, self.authorization, self.last)

    # -- live

    def _attach(self) -> None:
        """Atomic with respect to batches: no await between the check and attaching."""
        if self.ended:
            return
        number = self._number_in(self.channel)
        if number is None or self.channel.over:
            self._rejoin()
            return
        if self.last <= self.channel.end:
            self._bare_from = self.last
        self._joining = False
        self._number = number
        self._context.telemetry.edge_join.add(self._path)
        self._path = "ring"
        self._rounds = 0
        self.channel.attach(self)
        self.on_batches()

    def _rejoin(self) -> None:
        """Back to reading slices, from the last offset sent."""
        self._leave()
        self._joining = True
        self.channel = self._shared
        self._task = self._context.tasks.start(self._join(None))

    def on_batches(self) -> None:
        wire, channel = self.wire, self.channel
        if self._joining or self.ended or wire is None:
            return
        is_exact = self._bare_from is self.last
        if self._number == channel.step_from and is_exact and not channel.closed and channel is self._shared:
            # Another reader at this offset was just served: reuse the bytes.
            piece = channel.step.get(wire.form)
            if piece is not None and piece.cursor > self._floor:
                if wire.offer(piece.data, self._live.unsent_bytes_max):
                    self._note_sent(piece)
                    return
        while self._number < channel.following:
            if self._number < channel.first:
                self._rejoin()
                return
            if channel.batch(self._number).next <= self.last:
                self._number += 1  # empty batch up to this reader's offset
                continue
            if wire.unsent_bytes > self._live.unsent_bytes_max:
                self._note_behind()
                return  # `on_drain` continues from here
            self._send_next(wire, channel)
            if self.ended or self._moved_over():
                return
        if channel.closed:
            self._send_control(up_to_date=True, closed=True)
            self.finish(1000)
        elif channel.up_to_date and not self._said_up_to_date:
            self._send_control(up_to_date=True, closed=False)

    def _note_behind(self) -> None:
        if not self._behind:
            self._behind = True
            self._context.telemetry.edge_detached.value += 1

    def _send_next(self, wire: LiveTransport, channel: Channel) -> None:
        batch = channel.batch(self._number)
        assert self._bare_from <= batch.start <= self.last < batch.next
        if batch.cursor_number > self._floor:
            piece = channel.encoded_from(self._number, wire.form)
        else:
            data = channel.encoded(self._number, wire.form, self._cursor(batch.cursor))
            piece = EncodedBatches(data, self._number + 1, batch.next, -1, channel.ends_at(self._number))
        wire.send(piece.data)
        self._note_sent(piece)
        if channel.closed and self._number == channel.following and channel.batch(self._number - 1).closed:
            self.finish(1000)

    def _note_sent(self, piece: EncodedBatches) -> None:
        live = self._live
        self._number = piece.number
        self.last = self._bare_from = piece.last
        self._said_up_to_date = piece.up_to_date
        self._silent_since = live.now
        live.fanout_bytes[self.mode] += len(piece.data)

    def _moved_over(self) -> bool:
        """Leaves a private socket as soon as the shared channel has the boundary."""
        private, shared = self.channel, self._shared
        if private is shared or shared.over or self._number_in(shared) is None:
            return False
        private.detach(self)
        private.stop()
        self.channel = shared
        self._attach()
        return True

    # -- sending

    def _cursor(self, channels_own: str) -> str:
        """The channel's cursor, or one greater than this reader has seen."""
        if channels_own and int(channels_own) > self._floor:
            return channels_own
        cursor = next_cursor(str(self._floor) if self._floor >= 0 else None, self._context.now_s())
        self._floor = max(self._floor, int(cursor)) if self._floor >= 0 else -1
        return cursor

    def _send_control(self, *, up_to_date: bool, closed: bool) -> None:
        assert self.wire is not None
        cursor = self._cursor(next_cursor(None, self._context.now_s()))
        self._emit(encode_control(self.wire.form, self.last, cursor, up_to_date, closed), up_to_date)

    def _emit(self, data: bytes, up_to_date: bool) -> None:
        assert self.wire is not None
        self._said_up_to_date = up_to_date
        self._silent_since = self._live.now
        self.wire.send(data)

    # -- events

    def on_drain(self) -> None:
        if self._drained is not None:
            self._drained.set()
        self._behind = False
        self.on_batches()

    def on_tick(self, now: float, now_s: float, keep_alive_s: float) -> None:
        wire = self.wire
        if wire is None or self.ended:
            return
        if self.until_s is not None and now_s >= self.until_s:
            self.finish(CLOSE_NOT_ALLOWED)
        elif self.rotate_at is not None and now >= self.rotate_at and self._at_end:
            self.rotate()
        elif now - self._silent_since >= keep_alive_s and wire.unsent_bytes == 0:
            self._silent_since = now
            wire.keep_alive()
        if not self.ended and not self._joining:
            # A batch may reach the shared channel later than the private one.
            self._moved_over()

    @property
    def _at_end(self) -> bool:
        return not self._joining and self._number == self.channel.following

    def rotate(self) -> None:
        """Ends the connection after a control with the offset; the client reconnects."""
        if not self.ended:
            if self._at_end and self.mode == "sse":
                self._send_control(up_to_date=self.channel.up_to_date, closed=False)
            self.finish(CLOSE_GOING_AWAY)

    def on_end(self, code: int) -> None:
        self.finish(code)

    def finish(self, code: int) -> None:
        """Ends the connection; `code` is the WebSocket close code."""
        if not self.ended:
            self.gone()
            if self.wire is not None:
                self.wire.end(code)

    def gone(self) -> None:
        """Releases everything of this reader."""
        if self.ended:
            return
        self.ended = True
        if self._drained is not None:
            self._drained.set()
        self._leave()
        self._live.dismiss(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _leave(self) -> None:
        self.channel.detach(self)
        if self.channel is not self._shared:
            self.channel.stop()


def _is_transient_failure(error: Exception) -> bool:
    """Whether the upstream is lost or temporarily unavailable."""
    if isinstance(error, UpstreamRefusedError):
        return is_transient(error.refusal.status)
    if isinstance(error, TailraceError):
        return error.code == "unavailable" and not isinstance(error, ContentTypeChangedError)
    return isinstance(error, UpstreamLostError)


def _close_code(error: Exception) -> int:
    """The WebSocket close code of a failure."""
    if isinstance(error, UpstreamRefusedError):
        return CLOSE_GONE if error.refusal.status in (404, 410) else CLOSE_GOING_AWAY
    if isinstance(error, TailraceError):
        return CLOSE_OVERLOADED if error.code == "overloaded" else CLOSE_GOING_AWAY
    return CLOSE_OVERLOADED


TICK_S = 1.0
# Readers disconnected per second at shutdown, to spread their reconnects; faster only if it would take
# longer than this.
CLOSED_PER_S = 2000
CLOSE_S_MAX = 5.0


class EdgeLiveReaders:
    """All live readers: admission, and one timer for keep-alives and rotation."""

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
        """Opens a live reader. False, without a response, if the owner has to decide."""
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
            raise TailraceError("unavailable", "the upstream is unavailable") from None
        if not known or reader.asked_upstream:
            outcome = "MISS"
        self._open_wire(exchange, reader, reading.start_line + cache_line(outcome))
        self.context.telemetry.edge_requests.add(reader.mode, outcome, 101 if reader.mode == "ws" else 200)
        reader.begin(first)
        return True

    async def _tail(self, name: str, caller: Caller) -> str:
        """The tail of a stream, from its owner."""
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
        """Keys or revocations changed: ends readers with revoked tokens."""
        for reader in tuple(self.readers):
            if not self._gate.is_valid(reader.caller):
                reader.finish(CLOSE_NOT_ALLOWED)

    def end_all(self) -> None:
        """Shutdown: ends all readers, spread over time, so that they reconnect elsewhere."""
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
    """The interval between two disconnects."""
    return min(1 / CLOSED_PER_S, CLOSE_S_MAX / max(1, readers))
