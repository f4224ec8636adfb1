"""Live readers: server-sent events and WebSockets that follow a stream's tail.

A follower first catches up page by page, then waits in the stream's list. When something is published each
wire form is encoded once and the same bytes go to everybody who was at the same place. A follower whose
socket does not keep up is not written to until it has drained, and then reads on from the log.

Pages for those that catch up are shared, too: readers at one place read and encode a page once. A few of them
are sent in one turn of the loop, and none to a reader whose socket has not taken most of those before.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

from tailrace.auth import Action, Identity, is_allowed, is_hub_stream
from tailrace.common.errors import TailraceError
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange
from tailrace.http.live_transport import LiveWebSocketHandler
from tailrace.http.server import WRITE_HIGH_WATER_BYTES
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.http_headers import is_text
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.sse import EVENT_STREAM_HEADERS
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.schema.stream_schema import StreamSchemaCache
from tailrace.server.follower import Follower, event_payload
from tailrace.server.live_wires import FollowerTransport, SseFollowerTransport, WebSocketFollowerTransport
from tailrace.server.read_request import ReadRequest

TICK_S = 1.0
# Of one page for a follower that catches up.
CATCH_UP_PAGE_BYTES = 256 * 1024
# Such pages that are sent in one turn of the loop: what else there is to do comes in between.
PAGES_PER_TURN = 4
# Of pages in their wire form that were made since the last tick.
ENCODED_BYTES_MAX = 16 * 1024 * 1024


class LiveReaders:
    """All live connections: admission, shared encodings, one timer for keep-alives and rotation."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._limits = context.limits
        self.loop = context.loop
        self._origins = AllowedOrigins(context.settings)
        self.unsent_bytes_max = context.limits.live_unsent_bytes
        self.contracts = StreamSchemaCache(context.limits.key_bytes)
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.now = self.loop.time()  # moved by the tick
        # The last step of a stream, `(step_from, step_to]`, in every wire form that was asked for.
        self.step_stream: Stream | None = None
        self.step_from = -1
        self.step_to = -1
        self.step: dict[str, bytes] = {}
        self._too_far: tuple[Stream, int, int] | None = None  # a step that is not one page, or not in memory
        # Pages that do not reach the tail: being read, and as they were sent, by where they begin.
        self._reading: dict[tuple[Stream, int], asyncio.Task[Page]] = {}
        self._encoded: dict[tuple[Stream, int, int, str], bytes] = {}
        self._encoded_bytes = 0
        self._turns: deque[Callable[[], None]] = deque()  # followers that have a page to send
        self.page_bytes = min(CATCH_UP_PAGE_BYTES, context.limits.read_page_bytes)
        # A transport with more than this says when it has sent most of it.
        self.catch_up_unsent_bytes_max = min(WRITE_HIGH_WATER_BYTES, context.limits.live_unsent_bytes)
        self.connections = 0
        self.open_by_mode = {"long-poll": 0, "sse": 0, "ws": 0}
        self.by_stream: dict[Stream, int] = {}
        self.demoted = 0

    # -- opening ---------------------------------------------------------------------------------------

    def admit(self, mode: str, stream: Stream) -> None:
        if self.connections >= self._limits.live_connections:
            raise TailraceError("overloaded", "there are too many live connections")
        self.connections += 1
        self.open_by_mode[mode] += 1
        self.by_stream[stream] = self.by_stream.get(stream, 0) + 1

    def dismiss(self, mode: str, stream: Stream) -> None:
        self.connections -= 1
        self.open_by_mode[mode] -= 1
        left = self.by_stream[stream] - 1
        if left:
            self.by_stream[stream] = left
        else:
            del self.by_stream[stream]

    def open_sse(self, exchange: Exchange, request: ReadRequest, identity: Identity) -> None:
        stream = request.stream
        rotation_s = self._limits.sse_rotation_ms / 1000 * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load
        follower = self._open(request, rotation_s, identity)
        text = is_text(stream.content_type)
        head = EVENT_STREAM_HEADERS
        if not text:
            head += b"Stream-SSE-Data-Encoding: base64\r\n"
        head += responses.earliest_offset_header(stream) + request.start_line
        outlet = exchange.open_stream(200, head)
        outlet.on_gone = follower.gone
        outlet.on_drain = follower.on_drain
        follower.start(SseFollowerTransport(outlet, text))

    def open_ws(self, exchange: Exchange, request: ReadRequest, identity: Identity) -> None:
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required", "live=ws needs a WebSocket upgrade", headers=(("Upgrade", "websocket"),)
            )
        self._origins.check(exchange)
        follower = self._open(request, None, identity)
        wire = WebSocketFollowerTransport(is_text(request.stream.content_type))
        try:
            wire.attach(
                exchange.upgrade_websocket(
                    LiveWebSocketHandler(follower), request.start_line, message_bytes=1024
                )
            )
        except TailraceError:
            follower.gone()
            raise
        follower.start(wire)

    def _open(self, request: ReadRequest, rotation_s: float | None, identity: Identity) -> Follower:
        stream = request.stream
        self.admit("ws" if rotation_s is None else "sse", stream)
        follower = Follower(self, stream, request.start, request.key, request.cursor, rotation_s)
        follower.identity, follower.until_s = identity, identity.until_s
        self._followers.add(follower)
        stream.live += 1
        if self._timer is None:
            self.now = self.loop.time()
            self._timer = self.loop.call_later(TICK_S, self._tick)
        return follower

    def closed(self, follower: Follower, stream: Stream) -> None:
        self._followers.discard(follower)
        self.dismiss(follower.mode, stream)
        stream.live -= 1
        self._log.touch(stream)

    def end_all(self) -> None:
        """Shutdown: everybody is sent away and will reconnect."""
        for follower in tuple(self._followers):
            follower.finish(1001)

    def recheck(self, stands: Callable[[Identity], bool]) -> int:
        """Sends away whoever has lost their right, and counts them."""
        lost = [follower for follower in self._followers if not stands(follower.identity)]
        for follower in lost:
            follower.finish(1008)
        return len(lost)

    def recheck_hub(self) -> None:
        """Sends away whoever follows a stream of the hub that its rules let them read no more."""
        for follower in tuple(self._followers):
            name = follower.stream.name
            if is_hub_stream(name) and not is_allowed(follower.identity, Action.READ_STREAM, stream=name):
                follower.finish(1008)

    def _tick(self) -> None:
        self._timer = None
        self.now = now = self.loop.time()
        self.step_stream = None  # what it says about the cursor grows old
        self._too_far = None
        self._forget_encoded()
        keep_alive_s = self._limits.sse_keep_alive_ms / 1000
        for follower in tuple(self._followers):
            follower.on_tick(now, keep_alive_s)
        if self._followers:
            self._timer = self.loop.call_later(TICK_S, self._tick)

    # -- reading ---------------------------------------------------------------------------------------

    def now_s(self) -> float:
        return self._context.clock.now_ns() / 1e9

    def interval(self) -> int:
        return int(next_cursor(None, self.now_s()))

    def try_page(self, stream: Stream, after: int, key: bytes | None, bytes_max: int) -> Page | None:
        limits = self._limits
        if stream.visible_documents is None:
            found = self._log.reader.try_read(stream, after, bytes_max, limits.read_page_entries, key)
            return found if isinstance(found, Page) else None
        page_bytes, entries_max, apart = self.contracts.page_of(stream, after, limits)
        bytes_max = min(bytes_max, page_bytes)
        found = self._log.reader.try_read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, found) if isinstance(found, Page) else None

    async def page(self, stream: Stream, after: int, key: bytes | None) -> Page:
        """A page that is not in memory. Followers that want the same one at the same time read it once."""
        if key is not None:
            return await self._read(stream, after, key)
        reading = self._reading.get((stream, after))
        if reading is None:
            reading = self._reading[stream, after] = self.loop.create_task(self._read(stream, after, None))
            reading.add_done_callback(lambda done: self._was_read(stream, after, done))
        return await asyncio.shield(reading)

    def _was_read(self, stream: Stream, after: int, reading: asyncio.Task[Page]) -> None:
        self._reading.pop((stream, after), None)
        if not reading.cancelled():
            reading.exception()  # all who waited for it may be gone

    async def _read(self, stream: Stream, after: int, key: bytes | None) -> Page:
        bytes_max, entries_max, apart = self.contracts.page_of(stream, after, self._limits)
        bytes_max = min(bytes_max, self.page_bytes)
        page = await self._log.reader.read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, page)

    def in_turn(self, send: Callable[[], None]) -> None:
        """Has a follower that catches up called for one page when those before it have sent theirs."""
        if not self._turns:
            self.loop.call_soon(self._turn)
        self._turns.append(send)

    async def turn(self) -> None:
        """Returns when it is the turn of a follower that has read a page."""
        come = asyncio.Event()
        self.in_turn(come.set)
        await come.wait()

    def _turn(self) -> None:
        turns = self._turns
        for _ in range(min(PAGES_PER_TURN, len(turns))):
            try:
                turns[0]()
            finally:
                turns.popleft()
        if turns:
            self.loop.call_soon(self._turn)

    def encoded_page(self, wire: FollowerTransport, stream: Stream, after: int, page: Page) -> bytes:
        """A page that does not reach the tail, in one wire form, made once for all who take it soon."""
        known = (stream, after, page.next_entry, wire.form)
        found = self._encoded.get(known)
        if found is None:
            cursor = next_cursor(None, self.now_s())
            payload = event_payload(stream, page) if page.count else None
            offset = stream.offset(page.next_entry)
            found = wire.encode(payload, offset, cursor, up_to_date=False, closed=False)
            if self._encoded_bytes + len(found) > ENCODED_BYTES_MAX:
                self._forget_encoded()
            self._encoded[known] = found
            self._encoded_bytes += len(found)
        return found

    def _forget_encoded(self) -> None:
        self._encoded.clear()
        self._encoded_bytes = 0

    def _promoted(self, stream: Stream, after: int, page: Page) -> Page:
        contract = self.contracts.of(stream.visible_documents)
        return page if contract is None else contract.promoted(stream, after, page)

    def encoded(self, wire: FollowerTransport, stream: Stream, after: int) -> bytes | None:
        """The step from `after` to the tail in one wire form, made once for all who take it now."""
        if self.step_stream is stream and self.step_from == after and self.step_to == stream.visible:
            found = self.step.get(wire.form)
            if found is not None and not stream.visible_closed:
                return found
        if self._too_far == (stream, after, stream.visible):
            return None
        page = self.try_page(stream, after, None, self._limits.read_page_bytes)
        if page is None or page.next_entry < stream.visible:
            self._too_far = (stream, after, stream.visible)
            return None
        closed = stream.visible_closed
        cursor = next_cursor(None, self.now_s())
        encoded = wire.encode(
            event_payload(stream, page), stream.offset(stream.visible), cursor, up_to_date=True, closed=closed
        )
        if not closed:
            if self.step_stream is not stream or self.step_from != after or self.step_to != stream.visible:
                self.step_stream, self.step_from, self.step_to = stream, after, stream.visible
                self.step = {}
            self.step[wire.form] = encoded
        return encoded
