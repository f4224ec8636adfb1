"""Followed streams: one upstream feed each, a ring of recent batches, and the readers that share both.

A batch covers `(start, next]` and starts where the previous one ended, so a reader in the ring gets every
entry exactly once. A reader at another offset reads slices first. Channels are opened once, bounded in number
and bytes, and closed some time after their last reader.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from math import inf
from typing import NamedTuple, Protocol

from tailrace.common.errors import TailraceError
from tailrace.common.tasks import wait_event
from tailrace.edge.context import EdgeContext
from tailrace.edge.reconnect import RAMP_S, ReconnectBackoff
from tailrace.edge.requests import build_request, build_stream_target
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.upstream_feed import (
    FeedBatch,
    FeedMessage,
    UpstreamAnswer,
    UpstreamFeed,
    UpstreamRefusedError,
    open_feed,
    read_answer,
)
from tailrace.edge.upstreams import Upstream
from tailrace.http.client import UpstreamLostError, UpstreamResponse
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import is_text

logger = logging.getLogger("tailrace.edge")

# Readers are notified in rounds, this many per loop iteration; the last ones get everything that arrived
# meanwhile in one write.
NOTIFIED_PER_SLICE = 64
# Written to a reader at once; more follows when this was sent.
ENCODED_BYTES_MAX = 256 * 1024
# Joined batches are cached for readers at the last few batches, where most readers are.
JOINED_MAX = 8
SHUT_S = 1.0
CLOSE_GONE = 4404
CLOSE_GOING_AWAY = 1001
CLOSE_OVERLOADED = 1013
CLOSE_NOT_ALLOWED = 1008


class ChannelReader(Protocol):
    """A reader of a channel."""

    authorization: bytes | None
    until_s: float | None  # wall time at which the reader's permission ends

    def on_batches(self) -> None:
        """The ring has more batches, or the channel is closed."""
        ...

    def on_end(self, code: int) -> None:
        """The channel ended; `code` is the WebSocket close code."""
        ...


class EncodedBatches(NamedTuple):
    """Encoded batches, and the position after them."""

    data: bytes
    number: int
    last: str
    cursor: int  # of the first batch: valid for readers that saw no greater one
    up_to_date: bool  # of the last control


class ChannelKey(NamedTuple):
    """What readers of one channel share: stream, format, key."""

    name: str
    fmt: str
    key: str

    @property
    def parameters(self) -> dict[str, str]:
        found = {"format": self.fmt, "key": self.key}
        return {name: value for name, value in found.items() if value}


class Channel:
    """One followed stream. Lives until `edge_linger_ms` after its last reader."""

    def __init__(self, channels: ChannelTable, key: ChannelKey, token: bytes | None, start: str = "") -> None:
        self._channels = channels
        self._context = channels.context
        self.key = key
        self.content_type: str | None = None
        self.earliest = ""
        self.text = False
        self.end = start  # the offset after the newest batch
        self.up_to_date = False  # as the last control said
        self.connected = False
        self.closed = False  # the stream is closed: no more batches
        self.over = False  # the channel ended
        self.first = 0  # number of the oldest batch in the ring
        self.ring: deque[FeedBatch] = deque()
        self.ring_bytes = 0
        self._numbers: dict[str, int] = {}  # batch number by start offset
        self._joined: dict[tuple[int, str], EncodedBatches] = {}  # by batch number and form
        # The common case: from `step_from` to the end, by form.
        self.step_from = -1
        self.step: dict[str, EncodedBatches] = {}
        self.readers: dict[ChannelReader, None] = {}
        self._feed: UpstreamFeed | None = None
        self._upstream: Upstream | None = None  # of the socket
        self._opened_at = 0.0
        self._reconnects = ReconnectBackoff()
        self.authorization: bytes | None = None  # the Authorization of the socket
        self._hold: asyncio.Task[None] | None = None  # ends the channel if the upstream stays away
        self._round: list[ChannelReader] = []
        self._notified = 0  # readers of the round
        self._notify_again = False
        # Arrival of the oldest batch of this round, and of the next one.
        self._round_since: float | None = None
        self._unsent_since: float | None = None
        self.uncounted = False  # no longer part of the total of ring bytes
        self.idle_since = self._context.loop.time()
        self.opened: asyncio.Task[None] = self._context.loop.create_task(self._open(token))
        self.opened.add_done_callback(_note_outcome)
        self._task: asyncio.Task[None] | None = None

    # -- positions

    @property
    def following(self) -> int:
        """The number of the next batch."""
        return self.first + len(self.ring)

    def number_at(self, offset: str) -> int | None:
        """The number of the batch that starts at an offset, if any."""
        if offset == self.end:
            return self.following
        return self._numbers.get(offset)

    def waits_at(self, offset: str) -> bool:
        """Whether an offset is the tail of the stream."""
        return self.up_to_date and self.end == offset and not self.closed and not self.over

    def holds(self, offset: str) -> bool:
        """Whether an offset lies inside the ring, at a batch boundary or not."""
        return bool(self.ring) and self.ring[0].start <= offset <= self.end

    def encoded_from(self, number: int, form: str) -> EncodedBatches:
        """The encoded batches from a number on, shared by all readers at it."""
        found = self._joined.get((number, form))
        if found is None:
            found = self._join(number, form)
            if self.following - number <= JOINED_MAX:
                self._joined[number, form] = found
        if found.number == self.following:
            if self.step_from != number:
                self.step_from, self.step = number, {}
            self.step[form] = found
        return found

    def batch(self, number: int) -> FeedBatch:
        return self.ring[number - self.first]

    def is_newest(self, number: int) -> bool:
        return number + 1 == self.following

    def ends_at(self, number: int) -> bool:
        """Whether a batch ends at the tail."""
        return self.up_to_date and self.is_newest(number)

    def encoded(self, number: int, form: str, cursor: str) -> bytes:
        """A batch with its control."""
        batch = self.batch(number)
        if not batch.is_made(form):
            self._context.telemetry.edge_encodings.value += 1
        return batch.encode(form, cursor, self.ends_at(number))

    def _join(self, number: int, form: str) -> EncodedBatches:
        first = self.batch(number)
        parts: list[bytes] = []
        size = 0
        while number < self.following and size < ENCODED_BYTES_MAX:
            part = self.encoded(number, form, self.batch(number).cursor)
            parts.append(part)
            size += len(part)
            number += 1
        last = self.batch(number - 1).next
        return EncodedBatches(b"".join(parts), number, last, first.cursor_number, self.ends_at(number - 1))

    def _forget_joined(self) -> None:
        """Drops joined batches, which are outdated."""
        self._joined.clear()
        self.step_from, self.step = -1, {}

    def attach(self, reader: ChannelReader) -> None:
        self.readers[reader] = None

    def detach(self, reader: ChannelReader) -> None:
        self.readers.pop(reader, None)
        if not self.readers:
            self.idle_since = self._context.loop.time()

    # -- the upstream socket

    async def _open(self, token: bytes | None) -> None:
        """Follows the stream from its tail, or from where the socket was lost."""
        context = self._context
        upstream = context.upstreams.for_stream(self.key.name)
        async with upstream.opening:
            feed = await self._open_feed(upstream, token)
        if feed is None:
            return
        upstream.record_opened()
        if feed.ended:
            return
        if self.over:
            feed.close()
            return
        self._feed, self._upstream = feed, upstream
        self._opened_at = context.loop.time()
        self.connected = not self.closed
        self._end_hold()

    async def _open_feed(self, upstream: Upstream, token: bytes | None) -> UpstreamFeed | None:
        """The feed; None if the stream is closed or changed its type."""
        context = self._context
        authorization = self.authorization = context.token or token or self._some_token()
        reply = await self._channels.head(self.key.name, authorization)
        content_type = (reply.get(b"content-type") or b"").decode("latin-1")
        if self.content_type is not None and content_type != self.content_type:
            # The content type changed: readers reconnect to get the right encoding.
            self._finish(CLOSE_GOING_AWAY)
            return None
        self.content_type = content_type
        self.text = is_text(content_type)
        self.earliest = (reply.get(b"stream-earliest-offset") or b"").decode("latin-1")
        tail = (reply.get(b"stream-next-offset") or b"").decode("latin-1")
        self.end = self.end or tail
        if reply.get(b"stream-closed") is not None and self.end == tail:
            self._close_stream()
            return None
        return await open_feed(
            upstream,
            context.edge_id,
            self.key.name,
            {"offset": self.end, **self.key.parameters},
            authorization,
            self._on_pair,
            self._on_lost,
            context.limits.edge_frame_bytes,
        )

    def _some_token(self) -> bytes | None:
        """The token of a reader, used if the edge has none."""
        best = max(self.readers, key=_token_lifetime, default=None)
        return None if best is None else best.authorization

    def _on_pair(self, payload: bytes | None, control: FeedMessage) -> None:
        if self.over or self.closed:
            return
        self._forget_joined()
        if payload is None and control.offset == self.end:
            self.up_to_date = control.up_to_date
            if control.closed:
                self._close_stream()
            else:
                self._notify_readers()
            return
        batch = FeedBatch(self.end, control.offset, payload, self.text, control.cursor, closed=control.closed)
        batch.arrived = time.monotonic()
        if self._unsent_since is None:
            self._unsent_since = batch.arrived
        self._numbers[batch.start] = self.following
        self.ring.append(batch)
        self.ring_bytes += batch.size
        self.end = batch.next
        self.up_to_date = control.up_to_date
        self._channels.note_batch(self, batch)
        if control.closed:
            self._close_stream()
        else:
            self._notify_readers()

    def _on_lost(self, code: int) -> None:
        self._feed = None
        self.connected = self.up_to_date = False
        self._forget_joined()
        if self.over or self.closed:
            return
        if code == CLOSE_GONE:
            self._channels.stream_gone(self.key.name)
            self._finish(CLOSE_GONE)
            return
        reason = {CLOSE_GOING_AWAY: "away", CLOSE_NOT_ALLOWED: "token"}.get(code, "lost")
        self._context.telemetry.edge_reconnects.add(reason)
        if self._hold is None:
            self._hold = self._context.loop.create_task(self._hold_readers())
        first = self._reconnects.record_close(self._context.loop.time() - self._opened_at)
        at_once = first and code in (CLOSE_GOING_AWAY, CLOSE_NOT_ALLOWED)
        self._task = self._context.loop.create_task(self._reopen(at_once=at_once))

    async def _reopen(self, *, at_once: bool) -> None:
        """Reopens the socket where it was lost; readers stay connected meanwhile.

        `_hold_readers` limits the time, because one attempt may take longer than the hold.
        """
        while not self.over:
            if not at_once:
                await self._pause()
            at_once = False
            try:
                await self._open(None)
            except UpstreamLostError:
                self._note_failure()
            except TailraceError as refusal:
                if refusal.code == "overloaded":  # else no upstream is usable, and `_pause` waits
                    self._reconnects.record_refusal()
            except UpstreamRefusedError as refused:
                self._reconnects.record_refusal()
                status = refused.refusal.status
                if status in (400, 404, 410):
                    self._finish(CLOSE_GONE if status != 400 else CLOSE_GOING_AWAY)
                elif status in (401, 403):
                    at_once = self._dismiss_refused()
            if self.connected or self.over or self.closed or self._task is not asyncio.current_task():
                return  # the last: the new socket is already lost, and another task reopens it

    async def _hold_readers(self) -> None:
        """Ends the channel if its upstream was unavailable for the whole hold time.

        Back-off and health checks may lag by seconds, so the upstream is checked once more at the end; all
        channels share that check. If the upstream is back, the channel gets the time of the load ramp.
        """
        await asyncio.sleep(self._context.limits.edge_hold_ms / 1000)
        upstreams = self._context.upstreams
        try:
            upstream = upstreams.for_stream(self.key.name)
        except TailraceError:
            upstream = upstreams.home(self.key.name)
        if await upstream.check_now():
            await asyncio.sleep(RAMP_S)
        self.stop(CLOSE_OVERLOADED)

    def _end_hold(self) -> None:
        if self._hold is not None and self._hold is not asyncio.current_task():
            self._hold.cancel()
        self._hold = None

    def _dismiss_refused(self) -> bool:
        """The owner refuses this token: ends its readers, and retries with the tokens of others."""
        for reader in list(self.readers):
            if reader.authorization == self.authorization:
                self.detach(reader)
                reader.on_end(CLOSE_NOT_ALLOWED)
        if self._context.token is not None or not self.readers:
            self._finish(CLOSE_NOT_ALLOWED)
        return True

    async def _pause(self) -> None:
        try:
            upstream = self._context.upstreams.for_stream(self.key.name)
        except TailraceError:
            await asyncio.sleep(SHUT_S)  # no upstream is usable
        else:
            await upstream.pause()
            await self._reconnects.pause()

    def _note_failure(self) -> None:
        try:
            self._context.upstreams.for_stream(self.key.name).record_failed(self._context.loop.time())
        except TailraceError:
            return

    # -- notifying readers

    def _notify_readers(self) -> None:
        if self._round:
            self._notify_again = True
            return
        self._round, self._notified = list(self.readers), 0
        self._round_since, self._unsent_since = self._unsent_since, None
        self._notify_next()

    def _notify_next(self) -> None:
        begun, self._notified = self._notified, self._notified + NOTIFIED_PER_SLICE
        for reader in self._round[begun : self._notified]:
            if reader in self.readers:
                try:
                    reader.on_batches()
                except Exception:
                    logger.exception("live reader failed")  # the others are still notified
        if self._notified < len(self._round):
            self._context.loop.call_soon(self._notify_next)
            return
        if self._round and self._round_since is not None:
            delivery_s = time.monotonic() - self._round_since
            self._context.telemetry.edge_delivery_seconds.observe(delivery_s)
        self._round = []
        if self._notify_again:
            self._notify_again = False
            self._context.loop.call_soon(self._notify_readers)

    # -- the end

    def _close_stream(self) -> None:
        """The stream is closed; readers get the remaining batches."""
        self.closed = True
        self.connected = False
        self._end_hold()
        self._channels.forget(self)  # new readers go to the upstream
        self._notify_readers()

    def _finish(self, code: int) -> None:
        if self.over:
            return
        self.over = True
        self._end_hold()
        self._channels.forget(self)
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        for reader in list(self.readers):
            reader.on_end(code)
        self.readers.clear()

    def stop(self, code: int = CLOSE_GOING_AWAY) -> None:
        """Ends the channel and its tasks."""
        self._finish(code)
        for task in (self.opened, self._task):
            if task is not None and not task.done() and task is not asyncio.current_task():
                task.cancel()

    # -- time and space

    def on_tick(self, now: float) -> None:
        if self._feed is not None:
            self._feed.on_tick(now)
        if self._feed is not None and self._has_moved():
            self._feed.give_up()
        oldest = now - self._context.limits.edge_ring_ms / 1000
        while self.ring and self.ring[0].arrived < oldest:
            self.drop_oldest()

    def _has_moved(self) -> bool:
        """Whether another upstream serves the stream because that of the socket is unusable."""
        if self._upstream is None or self._upstream.usable:
            return False
        try:
            upstream = self._context.upstreams.for_stream(self.key.name)
        except TailraceError:
            return False
        return upstream is not self._upstream and upstream.usable

    def drop_oldest(self) -> None:
        """Evicts the oldest batch; readers that still need it read slices."""
        batch = self.ring.popleft()
        self._forget_joined()
        del self._numbers[batch.start]
        self.first += 1
        self.ring_bytes -= batch.size
        if not self.uncounted:
            self._channels.ring_bytes -= batch.size


def _token_lifetime(reader: ChannelReader) -> float:
    """Sort key: when a reader's token expires; no token sorts last."""
    if reader.authorization is None:
        return -inf
    return inf if reader.until_s is None else reader.until_s


def _note_outcome(task: asyncio.Task[None]) -> None:
    """Marks the exception as retrieved; waiters get it from `open`."""
    if not task.cancelled():
        task.exception()


class ChannelWaiter:
    """A reader that waits for one event."""

    def __init__(
        self, channel: Channel, authorization: bytes | None = None, until_s: float | None = None
    ) -> None:
        self._channel = channel
        self.authorization = authorization
        self.until_s = until_s
        self._event = asyncio.Event()

    def on_batches(self) -> None:
        self._event.set()

    def on_end(self, code: int) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """True on an event, False after a timeout."""
        self._channel.attach(self)
        try:
            return await wait_event(self._event, seconds)
        finally:
            self._channel.detach(self)

    @staticmethod
    async def reached(channel: Channel, offset: str, seconds: float) -> bool:
        """Waits until a channel has reached an offset. False after a timeout."""
        until = asyncio.get_running_loop().time() + seconds
        while channel.end < offset and not channel.over and not channel.closed:
            left = until - asyncio.get_running_loop().time()
            if left <= 0 or not await ChannelWaiter(channel).wait(left):
                return False
        return channel.end >= offset or channel.over


TICK_S = 1.0
# Above their limit, rings are evicted down to this share of it.
ROOM_SHARE = 0.9


class ChannelTable:
    """All channels of an edge, and their timer."""

    def __init__(self, context: EdgeContext, book: StreamInfoCache) -> None:
        self.context = context
        self._book = book
        self._table: dict[ChannelKey, Channel] = {}
        self._private: set[Channel] = set()
        self._by_name: dict[str, set[Channel]] = {}
        self.ring_bytes = 0
        self.clients: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        telemetry = context.telemetry
        telemetry.edge_channels.read = lambda: len(self._table)
        telemetry.edge_private_sockets.read = lambda: len(self._private)
        telemetry.edge_ring_bytes.read = lambda: self.ring_bytes

    async def open(self, key: ChannelKey, token: bytes | None) -> tuple[Channel, bool]:
        """The channel of a stream, and whether it existed. Raises the upstream's error."""
        channel = self._table.get(key)
        known = channel is not None
        if channel is None:
            if len(self._table) >= self.context.limits.edge_channels:
                self.context.telemetry.edge_overload.add("channels")
                raise TailraceError(
                    "overloaded", f"at most {self.context.limits.edge_channels} streams are followed"
                )
            channel = self._table[key] = Channel(self, key, token)
            self._enter(channel)
        try:
            await asyncio.shield(channel.opened)
        except (UpstreamRefusedError, UpstreamLostError, TailraceError):
            self._take_off(channel)
            raise
        except asyncio.CancelledError:
            if not channel.opened.cancelled():
                raise
            # The stream was deleted meanwhile.
            raise UpstreamRefusedError(UpstreamAnswer(404, [], b"")) from None
        return channel, known

    async def open_private(self, key: ChannelKey, token: bytes | None, start: str) -> Channel:
        """A channel for one reader whose offset is not a batch boundary."""
        if len(self._private) >= self.context.limits.edge_private_sockets:
            self.context.telemetry.edge_overload.add("private_sockets")
            raise TailraceError("overloaded", "too many readers need a private upstream socket")
        channel = Channel(self, key, token, start)
        self._private.add(channel)
        self._enter(channel)
        try:
            await channel.opened
        except BaseException:
            channel.stop()  # its socket may be open
            raise
        return channel

    def follows(self, name: str) -> bool:
        """Whether a connected channel follows a stream."""
        return any(channel.connected for channel in self._by_name.get(name, ()))

    def forget(self, channel: Channel) -> None:
        """Removes a channel from the table; its readers may still finish."""
        self._take_off(channel)
        if not channel.uncounted:
            channel.uncounted = True
            self.ring_bytes -= channel.ring_bytes

    async def head(self, name: str, authorization: bytes | None) -> UpstreamResponse:
        """HEAD of a stream at its owner; raises `UpstreamRefusedError`."""
        upstream = self.context.upstreams.for_stream(name)
        request = build_request(
            b"HEAD",
            build_stream_target(name, {}),
            upstream.origin.host_header,
            self.context.edge_id,
            authorization,
        )
        asking = self._book.asking(name, self.context.loop.time())
        reply = await upstream.pool.request(request, head_only=True, again=True)
        self._book.note_head(name, reply, self.context.loop.time(), asking)
        if reply.status != 200:
            raise UpstreamRefusedError(await read_answer(reply))
        return reply

    def note_batch(self, channel: Channel, batch: FeedBatch) -> None:
        """Records a batch for later reads, and enforces the ring limits."""
        context = self.context
        context.telemetry.edge_batches.value += 1
        self._book.note_batch(channel.key.name, batch.next)
        if channel.uncounted:
            return
        self.ring_bytes += batch.size
        while len(channel.ring) > 1 and channel.ring_bytes > context.limits.edge_ring_bytes:
            channel.drop_oldest()
        if self.ring_bytes > context.limits.edge_rings_bytes:
            self._make_room(batch)

    def _make_room(self, newest: FeedBatch) -> None:
        """Evicts from the largest rings, their only batch last; never the newest batch.

        Evicts a little more than needed, so that not every batch sorts the rings.
        """
        enough = self.context.limits.edge_rings_bytes * ROOM_SHARE
        largest = sorted(self._all, key=lambda channel: channel.ring_bytes, reverse=True)
        for retained in (1, 0):
            for channel in largest:
                while (
                    self.ring_bytes > enough
                    and len(channel.ring) > retained
                    and channel.ring[0] is not newest
                ):
                    channel.drop_oldest()

    def stream_gone(self, name: str) -> None:
        self._book.drop(name, "gone")
        self.end_stream(name, CLOSE_GONE)

    def end_stream(self, name: str, code: int) -> None:
        """Ends all channels of a deleted or replaced stream."""
        for channel in tuple(self._by_name.get(name, ())):
            channel.stop(code)

    async def recheck(self, name: str) -> None:
        """Checks at the owner whether a deletion event concerns the followed stream or an earlier one."""
        if name not in self._by_name:
            return
        epoch, code = -1, CLOSE_GOING_AWAY
        try:
            tokens = (channel.authorization for channel in self._by_name[name])
            reply = await self.head(name, self.context.token or next(filter(None, tokens), None))
            epoch = _epoch_of((reply.get(b"stream-next-offset") or b"").decode("latin-1"))
        except UpstreamRefusedError as refused:
            code = CLOSE_GONE if refused.refusal.status in (404, 410) else CLOSE_GOING_AWAY
        except (UpstreamLostError, TailraceError):
            pass  # readers reconnect and get the owner's error
        for channel in tuple(self._by_name.get(name, ())):
            if channel.end and _epoch_of(channel.end) != epoch:
                channel.stop(code)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for channel in self._all:
            channel.stop()

    @property
    def _all(self) -> list[Channel]:
        return [*self._table.values(), *self._private]

    def _enter(self, channel: Channel) -> None:
        self._by_name.setdefault(channel.key.name, set()).add(channel)
        self._arm()

    def _take_off(self, channel: Channel) -> None:
        if self._table.get(channel.key) is channel:
            del self._table[channel.key]
        self._private.discard(channel)
        of_name = self._by_name.get(channel.key.name, set())
        of_name.discard(channel)
        if not of_name:
            self._by_name.pop(channel.key.name, None)

    # -- time

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.context.loop.time()
        linger_s = self.context.limits.edge_linger_ms / 1000
        for channel in self._all:
            channel.on_tick(now)
            if not channel.readers and now - channel.idle_since >= linger_s and channel.opened.done():
                channel.stop()
        if self._table or self._private:
            self._arm()


def _epoch_of(offset: str) -> int:
    return offsets.parse_offset(offset)[0]
