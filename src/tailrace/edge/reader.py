"""One live reader: where it is, what it is given next, and how it gets from slices to a channel.

A reader keeps the offset of the last thing it was given. What follows is handed over only if it begins there,
be it a slice or a batch of a ring; this one rule is why nothing is missed and nothing comes twice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tailrace.edge.asks import Reading
from tailrace.edge.batch import Batch, encode_control
from tailrace.edge.cache import Slice
from tailrace.edge.channel import GOING_AWAY, GONE, NOT_ALLOWED, OVERLOADED, Channel, Piece
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.doorbell import Doorbell
from tailrace.edge.feed import RefusedError
from tailrace.edge.gate import Caller
from tailrace.errors import TailraceError
from tailrace.net.live_wires import Wire
from tailrace.protocol.content_types import is_text
from tailrace.protocol.cursor import next_cursor

if TYPE_CHECKING:
    from tailrace.edge.live import Live

# How often a reader between two boundaries reads on before it gets a socket of its own.
ROUNDS_MAX = 3
# How long a channel that lags has to arrive where a reader is.
LAG_S_MAX = 1.0
RETRY_S = 0.25


class LiveReader:
    """One SSE or WebSocket client, from its offset to the tail and on."""

    # There are tens of thousands of them.
    __slots__ = (
        "_context",
        "_drained",
        "_floor",
        "_greeted",
        "_joining",
        "_live",
        "_number",
        "_path",
        "_rounds",
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

    def __init__(self, live: Live, channel: Channel, reading: Reading, caller: Caller, offset: str) -> None:
        self._live = live
        self._context = live.context
        self.channel = channel  # the one it is attached to, or is on its way to
        self._shared = channel
        self.caller = caller
        self.authorization = caller.authorization
        self.until_s = caller.until_s
        self.mode = reading.mode
        self.wire: Wire | None = None
        self.last = offset
        self._number = -1  # of the next batch, while attached
        self._text = channel.text
        cursor = reading.cursor or ""
        self._floor = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18 else -1
        self._greeted = False
        self._joining = True
        self._drained: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.asked_upstream = False
        self.ended = False
        self.rotate_at: float | None = None
        self._silent_since = live.now
        self._path = "ring"
        self._rounds = 0  # reads in a row from inside a batch of the ring

    # -- getting there

    async def prepare(self) -> Batch | None:
        """The first thing to send, or None if that comes from the ring. What is refused, is refused here."""
        return await self._next_slice()

    def begin(self, first: Batch | None) -> None:
        """The client is connected: from here on it is sent events."""
        if self.ended:
            return
        if first is None:
            self._attach()
        else:
            self._task = self._context.spawn(self._join(first))

    async def _next_slice(self) -> Batch | None:
        """What follows `last`, read from upstream or the cache; None once a channel goes on from there."""
        while True:
            if self._shared.over:
                self._shared, _ = await self._live.channels.open(self._shared.key, self.authorization)
                self.channel = self._shared
                if self._shared.text is not self._text:
                    raise TailraceError("unavailable", "the type of the stream has changed")
            channel = self._shared
            if channel.number_at(self.last) is not None:
                return None
            if self.last > channel.end and await Doorbell.reached(channel, self.last, LAG_S_MAX):
                continue
            if self._rounds >= ROUNDS_MAX or self.last > channel.end:
                await self._go_private()
                return None
            if channel.holds(self.last):
                self._rounds += 1
                self._path = "straddle"
            self.asked_upstream = True
            key = channel.key
            reading = Reading.plain(key.name, self.last, key.fmt, key.key)
            found, _ = await self._live.slices.get(reading, self.caller)
            batch = self._batch_of(found)
            if batch.payload is not None or batch.closed:
                self._path = "slices" if self._path == "ring" else self._path
                return batch
            if batch.next != self.last:
                self.last = batch.next  # nothing in it for this reader

    def _batch_of(self, found: Slice) -> Batch:
        if is_text(found.content_type) is not self._text:
            raise TailraceError("unavailable", "the type of the stream has changed")
        cursor = next_cursor(None, self._context.now_s())
        payload = None if found.is_empty else found.body
        batch = Batch(self.last, found.next, payload, self._text, cursor, closed=found.closed)
        batch.up_to_date = found.up_to_date
        return batch

    async def _join(self, batch: Batch | None) -> None:
        """Sends slices until the ring goes on, as fast as the client takes them."""
        begun = self._context.loop.time()
        while not self.ended:
            try:
                if batch is not None:
                    self._send_slice(batch)
                    await self._until_drained()
                    begun = self._context.loop.time()
                if self.ended:
                    return
                batch = await self._next_slice()
            except RefusedError as refused:
                self.finish(GONE if refused.refusal.status in (404, 410) else GOING_AWAY)
                return
            except UpstreamLostError:
                if self._context.loop.time() - begun >= self._context.limits.edge_hold_ms / 1000:
                    self.finish(OVERLOADED)
                    return
                batch = None
                await asyncio.sleep(RETRY_S)
                continue
            except TailraceError as refusal:
                self.finish(OVERLOADED if refusal.code == "overloaded" else GOING_AWAY)
                return
            if batch is None:
                self._task = None
                self._attach()
                return

    def _send_slice(self, batch: Batch) -> None:
        """Up to date is only who has all that this edge has received."""
        assert self.wire is not None
        assert batch.start == self.last
        up_to_date = batch.up_to_date and batch.next >= self._shared.end
        self.last = batch.next
        self._emit(batch.encode(self.wire.form, self._cursor(batch.cursor), up_to_date))
        if batch.closed:
            self.finish(1000)

    async def _until_drained(self) -> None:
        assert self.wire is not None
        while not self.ended and self.wire.unsent_bytes > self._live.unsent_bytes_max:
            self._drained = asyncio.Event()
            await self._drained.wait()

    async def _go_private(self) -> None:
        """A socket of its own, from exactly here; it is left at the first boundary that the ring knows."""
        self._path = "private"
        channels = self._live.channels
        self.channel = await channels.open_private(self._shared.key, self.authorization, self.last)

    # -- being there

    def _attach(self) -> None:
        """Atomic with respect to the arrival of batches: nothing waits between looking and attaching."""
        if self.ended:
            return
        number = self.channel.number_at(self.last)
        if number is None or self.channel.over:
            self._rejoin()
            return
        self._joining = False
        self._number = number
        self._context.telemetry.edge_join.add(self._path)
        self._path = "ring"
        self._rounds = 0
        self.channel.attach(self)
        self.on_batches()

    def _rejoin(self) -> None:
        """Back to reading slices, from the last thing that was given."""
        self._leave()
        self._joining = True
        self.channel = self._shared
        self._task = self._context.spawn(self._join(None))

    def on_batches(self) -> None:
        wire, channel = self.wire, self.channel
        if self._joining or self.ended or wire is None:
            return
        if self._number == channel.step_from and not channel.closed and channel is self._shared:
            # Somebody at the same place was just served: the same bytes will do.
            piece = channel.step.get(wire.form)
            if piece is not None and piece.cursor > self._floor:
                if wire.offer(piece.data, self._live.unsent_bytes_max):
                    self._note_sent(piece)
                    return
        while self._number < channel.following:
            if self._number < channel.first:
                self._rejoin()
                return
            if wire.unsent_bytes > self._live.unsent_bytes_max:
                self._context.telemetry.edge_detached.value += 1
                return  # `on_drain` goes on from here
            self._send_next(wire, channel)
            if self.ended or self._moved_over():
                return
        if channel.closed:
            self._send_control(up_to_date=True, closed=True)
            self.finish(1000)
        elif not self._greeted and channel.up_to_date:
            self._send_control(up_to_date=True, closed=False)

    def _send_next(self, wire: Wire, channel: Channel) -> None:
        batch = channel.batch(self._number)
        assert batch.start == self.last
        if batch.cursor_number > self._floor:
            piece = channel.piece_from(self._number, wire.form)
        else:
            data = channel.encoded(self._number, wire.form, self._cursor(batch.cursor))
            piece = Piece(data, self._number + 1, batch.next, -1)
        wire.send(piece.data)
        self._note_sent(piece)
        if channel.closed and self._number == channel.following and channel.batch(self._number - 1).closed:
            self.finish(1000)

    def _note_sent(self, piece: Piece) -> None:
        live = self._live
        self._number = piece.number
        self.last = piece.last
        self._greeted = True
        self._silent_since = live.now
        live.fanout_bytes[self.mode] += len(piece.data)

    def _moved_over(self) -> bool:
        """Leaves a private socket as soon as the shared channel knows the place."""
        private, shared = self.channel, self._shared
        if private is shared or shared.over or shared.number_at(self.last) is None:
            return False
        private.detach(self)
        private.stop()
        self.channel = shared
        self._attach()
        return True

    # -- sending

    def _cursor(self, channels_own: str) -> str:
        """The channel's cursor, or a greater one than this reader has already seen."""
        if channels_own and int(channels_own) > self._floor:
            return channels_own
        cursor = next_cursor(str(self._floor) if self._floor >= 0 else None, self._context.now_s())
        self._floor = max(self._floor, int(cursor)) if self._floor >= 0 else -1
        return cursor

    def _send_control(self, *, up_to_date: bool, closed: bool) -> None:
        assert self.wire is not None
        cursor = self._cursor(next_cursor(None, self._context.now_s()))
        self._emit(encode_control(self.wire.form, self.last, cursor, up_to_date, closed))

    def _emit(self, data: bytes) -> None:
        assert self.wire is not None
        self._greeted = True
        self._silent_since = self._live.now
        self.wire.send(data)

    # -- events

    def on_drain(self) -> None:
        if self._drained is not None:
            self._drained.set()
        self.on_batches()

    def on_tick(self, now: float, now_s: float, keep_alive_s: float) -> None:
        wire = self.wire
        if wire is None or self.ended:
            return
        if self.until_s is not None and now_s >= self.until_s:
            self.finish(NOT_ALLOWED)
        elif self.rotate_at is not None and now >= self.rotate_at and self._at_end:
            self.rotate()
        elif now - self._silent_since >= keep_alive_s and wire.unsent_bytes == 0:
            self._silent_since = now
            wire.keep_alive()
        if not self.ended and not self._joining:
            # A batch may reach the shared channel later than the private one, and nothing may follow it.
            self._moved_over()

    @property
    def _at_end(self) -> bool:
        return not self._joining and self._number == self.channel.following

    def rotate(self) -> None:
        """Sent away with where it is; the client comes back."""
        if not self.ended:
            if self._at_end and self.mode == "sse":
                self._send_control(up_to_date=self.channel.up_to_date, closed=False)
            self.finish(GOING_AWAY)

    def on_end(self, code: int) -> None:
        self.finish(code)

    def finish(self, code: int) -> None:
        """Ends the connection; the code is what a WebSocket client gets to see."""
        if not self.ended:
            self.gone()
            if self.wire is not None:
                self.wire.end(code)

    def gone(self) -> None:
        """The client left, or is being left: no trace remains."""
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
