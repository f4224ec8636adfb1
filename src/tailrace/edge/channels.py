"""All followed streams of an edge: each opened once, kept within bounds, closed when nobody reads it."""

from __future__ import annotations

import asyncio
from collections import Counter

from tailrace.common.errors import TailraceError
from tailrace.edge.asks import build_stream_target
from tailrace.edge.batch import FeedBatch
from tailrace.edge.channel import CLOSE_GOING_AWAY, CLOSE_GONE, Channel, ChannelKey
from tailrace.edge.connection import UpstreamLostError, UpstreamResponse
from tailrace.edge.context import EdgeContext
from tailrace.edge.facts import StreamInfoCache
from tailrace.edge.feed import UpstreamAnswer, UpstreamRefusedError, read_answer
from tailrace.edge.headers import build_request
from tailrace.protocol import offsets

TICK_S = 1.0
# Down to this share of their bound the rings are emptied once they are past it.
ROOM_SHARE = 0.9


class ChannelTable:
    """The table of channels, and the timer that serves them all."""

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
        """The channel of a stream, and whether it was there already. Raises what its upstream says."""
        channel = self._table.get(key)
        known = channel is not None
        if channel is None:
            if len(self._table) >= self.context.limits.edge_channels:
                self.context.telemetry.edge_overload.add("channels")
                raise TailraceError("overloaded", "too many streams are followed")
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
            # The stream was deleted meanwhile; what is said of that is the owner's.
            raise UpstreamRefusedError(UpstreamAnswer(404, [], b"")) from None
        return channel, known

    async def open_private(self, key: ChannelKey, token: bytes | None, start: str) -> Channel:
        """A socket for one reader that does not fit into the ring."""
        if len(self._private) >= self.context.limits.edge_private_sockets:
            self.context.telemetry.edge_overload.add("private_sockets")
            raise TailraceError("overloaded", "too many readers need a socket of their own")
        channel = Channel(self, key, token, start)
        self._private.add(channel)
        self._enter(channel)
        try:
            await channel.opened
        except BaseException:
            channel.stop()  # its socket may just have been opened
            raise
        return channel

    def follows(self, name: str) -> bool:
        """Whether the owner of a stream has a live reader here."""
        return any(channel.connected for channel in self._by_name.get(name, ()))

    def forget(self, channel: Channel) -> None:
        """Takes a channel off the table; readers that it has may still finish with it."""
        self._take_off(channel)
        if not channel.uncounted:
            channel.uncounted = True
            self.ring_bytes -= channel.ring_bytes

    async def head(self, name: str, authorization: bytes | None) -> UpstreamResponse:
        """What the owner says of a stream right now; raises `RefusedError` if that is a no."""
        upstream = self.context.upstreams.of(name)
        request = build_request(
            b"HEAD",
            build_stream_target(name, {}),
            upstream.origin.host_header,
            self.context.edge_id,
            authorization,
        )
        asking = self._book.asking(name, self.context.loop.time())
        reply = await upstream.pool.ask(request, head_only=True, again=True)
        self._book.note_head(name, reply, self.context.loop.time(), asking)
        if reply.status != 200:
            raise UpstreamRefusedError(await read_answer(reply))
        return reply

    def note_batch(self, channel: Channel, batch: FeedBatch) -> None:
        """A batch arrived: reads that begin now have to see it, and the ring keeps its bounds."""
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
        """Takes from the largest rings, and last of all their only batch; what has just come stays.

        A little more than is needed, so that not every batch has to look for the largest.
        """
        enough = self.context.limits.edge_rings_bytes * ROOM_SHARE
        largest = sorted(self._all, key=lambda channel: channel.ring_bytes, reverse=True)
        for kept in (1, 0):
            for channel in largest:
                while self.ring_bytes > enough and len(channel.ring) > kept and channel.ring[0] is not newest:
                    channel.drop_oldest()

    def stream_gone(self, name: str) -> None:
        self._book.drop(name, "gone")
        self.end_stream(name, CLOSE_GONE)

    def end_stream(self, name: str, code: int) -> None:
        """All channels of a stream end: it was deleted, or another has its name."""
        for channel in tuple(self._by_name.get(name, ())):
            channel.stop(code)

    async def recheck(self, name: str) -> None:
        """A deletion was told. It may be one of a stream that had the name before: the owner knows."""
        if name not in self._by_name:
            return
        epoch, code = -1, CLOSE_GOING_AWAY
        try:
            carried = (channel.carried for channel in self._by_name[name])
            reply = await self.head(name, self.context.token or next(filter(None, carried), None))
            epoch = _epoch_of((reply.get(b"stream-next-offset") or b"").decode("latin-1"))
        except UpstreamRefusedError as refused:
            code = CLOSE_GONE if refused.refusal.status in (404, 410) else CLOSE_GOING_AWAY
        except (UpstreamLostError, TailraceError):
            pass  # whoever comes back is told by the owner
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
