"""Live reads: SSE and WebSocket followers of a stream, long polls, and the encodings that readers share.

What a page of a stream looks like on the wire of a follower.

A read as it was asked for.

One live reader: catches up page by page, then waits at the stream's tail.

Live readers: server-sent events and WebSockets that follow a stream's tail.

A follower first catches up page by page, then waits in the stream's list. When something is published each
wire form is encoded once and the same bytes go to everybody who was at the same place. A follower whose
socket does not keep up is not written to until it has drained, and then reads on from the log.

Pages for those that catch up are shared, too: readers at one place read and encode a page once. A few of them
are sent in one turn of the loop, and none to a reader whose socket has not taken most of those before.

A long-poll that waits: for the next commit, or for one with the key or the match it asks for.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tailrace.auth import ANONYMOUS, Action, Identity, is_allowed, is_hub_stream
from tailrace.common.errors import TailraceError
from tailrace.http import live_transport
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange, ResponseStream, chunk
from tailrace.http.live_transport import LiveWebSocketHandler
from tailrace.http.server import WRITE_HIGH_WATER_BYTES
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol import sse
from tailrace.protocol.http_headers import is_text
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.sse import EVENT_STREAM_HEADERS
from tailrace.protocol.websocket_frames import encode_text
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.schema.stream_schema import StreamSchemaCache

if TYPE_CHECKING:
    from tailrace.server.read_routes import ReadRoutes


class FollowerTransport(live_transport.LiveTransport, Protocol):
    """How a follower's events reach its client."""

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes: ...


class SseFollowerTransport(live_transport.SseTransport):
    __slots__ = ("_text",)

    def __init__(self, outlet: ResponseStream, text: bool) -> None:
        super().__init__(outlet, "sse-text" if text else "sse-base64")
        self._text = text

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = sse.control_event(offset, cursor, up_to_date, closed)
        if payload is None:
            return chunk(control)
        event = sse.text_event(payload, offset) if self._text else sse.base64_event(payload, offset)
        return chunk(event + control)


class WebSocketFollowerTransport(live_transport.WebSocketTransport):
    __slots__ = ("_text",)

    def __init__(self, text: bool) -> None:
        super().__init__("ws-text" if text else "ws-base64")
        self._text = text

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = encode_text(sse.websocket_control(offset, cursor, up_to_date, closed))
        if payload is None:
            return control
        return encode_text(sse.websocket_data(payload, self._text)) + control


class ReadRequest(NamedTuple):
    """Parameters checked and positions resolved."""

    stream: Stream
    start: int
    at_now: bool
    mode: str
    shared: bool  # a long-poll that shared caches may collapse
    fmt: str
    fmt_given: bool
    key: str
    wait_ms: int
    cursor: str | None
    filter_text: str = ""
    scanned_bytes: int = 0  # that a filter has cost so far
    bytes_max: int = 0  # of a page of rows, as it was asked for
    entries_max: int = 0
    start_line: bytes = b""  # the header that tells which of several given starts was used
    identity: Identity = ANONYMOUS  # of a long-poll, which may lose its right while it waits


class Follower:
    """One live connection, from its offset to the tail and on."""

    __slots__ = (
        "_cursor",
        "_greeted",
        "_in_turn",
        "_key",
        "_live",
        "_position",
        "_rotate_at",
        "_shareable",
        "_silent_since",
        "_skipped",
        "_task",
        "_type_was_unset",
        "_waiting",
        "_wire",
        "ended",
        "identity",
        "mode",
        "stream",
        "until_s",
    )

    def __init__(
        self,
        live: LiveReaders,
        stream: Stream,
        position: int,
        key: str,
        cursor: str | None,
        rotate_s: float | None,
    ) -> None:
        self._live = live
        self.mode = "ws" if rotate_s is None else "sse"
        self.stream = stream
        self._position = position
        self._key = key.encode() or None
        self._cursor = cursor
        self._wire: FollowerTransport | None = None
        self._type_was_unset = stream.content_type is None
        self._shareable = self._key is None and cursor is None
        self._task: asyncio.Task[None] | None = None
        self._waiting = False  # in the stream's list of readers
        self._in_turn = False  # a page that does not reach the tail may be sent
        self._skipped = False  # position moved without anything being sent
        self._greeted = False  # something was sent: the first thing may be a control alone
        self.ended = False
        self.identity = ANONYMOUS
        self.until_s: float | None = None  # wall time at which the reader's permission ends
        self._silent_since = live.now
        self._rotate_at = None if rotate_s is None else live.loop.time() + rotate_s

    def start(self, wire: FollowerTransport) -> None:
        self._wire = wire
        if not self._advance():
            self._task = self._live.loop.create_task(self._catch_up())

    # -- moving on -------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Sends what memory has. True if the follower now waits at the tail, or is done."""
        try:
            return self._go_on()
        except TailraceError:
            self.finish(1011)  # an entry that cannot be shown; a plain read says which, and why
            return True

    def _go_on(self) -> bool:
        stream, live = self.stream, self._live
        while not self.ended:
            if (stream.removed or stream.gone) and stream.batch is None:  # else it is not durable yet
                self.finish(4404)
                return True
            if (self._type_was_unset and stream.content_type is not None) or self._position < stream.earliest:
                # It comes back: to the right encoding, or to be told that it has missed something.
                self.finish(1001)
                return True
            if self._position >= stream.visible:
                if not self._greeted or stream.visible_closed:
                    self._send(None, stream.visible_closed)
                self._wait()
                return True
            assert self._wire is not None
            if self._wire.unsent_bytes > live.unsent_bytes_max:
                live.demoted += 1
                return True  # `on_drain` continues from here
            encoded = live.encoded(self._wire, stream, self._position) if self._shareable else None
            if encoded is not None:
                self._position = stream.visible
                self._emit(encoded, stream.visible_closed)
                continue
            if self._wire.unsent_bytes > live.catch_up_unsent_bytes_max:
                live.demoted += 1
                return True
            if not self._in_turn:
                live.in_turn(self._on_turn)
                return True
            self._in_turn = False
            page = live.try_page(stream, self._position, self._key, live.page_bytes)
            if page is None:
                return False
            self._send_page(page)
        return True

    def _on_turn(self) -> None:
        """One page may be sent now, if there is still one to send."""
        if not self.ended:
            self._in_turn = True
            self.on_published(self.stream)
            self._in_turn = False

    def _send_page(self, page: Page) -> None:
        wire, after = self._wire, self._position
        assert wire is not None
        if self._shareable and page.count and page.next_entry < self.stream.visible:
            self._position = page.next_entry
            self._emit(self._live.encoded_page(wire, self.stream, after, page), False)
            return
        self._position = page.next_entry
        at_end = self.stream.visible_closed and self._position >= self.stream.visible
        if page.count or at_end:
            self._send(event_payload(self.stream, page) if page.count else None, at_end)
        else:
            self._skipped = True

    def _send(self, payload: bytes | None, closed: bool) -> None:
        assert self._wire is not None
        stream = self.stream
        up_to_date = self._position >= stream.visible
        offset = stream.offset(self._position)
        cursor = next_cursor(self._cursor, self._live.now_s())
        if self._cursor is not None:
            self._cursor = cursor if int(cursor) > self._live.interval() else None
            self._shareable = self._key is None and self._cursor is None
        self._emit(self._wire.encode(payload, offset, cursor, up_to_date, closed), closed and up_to_date)

    def _emit(self, encoded: bytes, closed: bool) -> None:
        assert self._wire is not None
        self._wire.send(encoded)
        self._greeted = True
        self._skipped = False
        self._silent_since = self._live.now
        if closed:
            self.finish(1000)

    async def _catch_up(self) -> None:
        """Reads pages that are not in memory, as fast as the client takes them."""
        try:
            while not self.ended and self._wire is not None:
                if self._wire.unsent_bytes > self._live.catch_up_unsent_bytes_max:
                    return  # `on_drain` continues from here
                page = await self._live.page(self.stream, self._position, self._key)
                await self._live.turn()
                if not self.ended:
                    self._send_page(page)
                    if self._advance():
                        return
        except asyncio.CancelledError:
            raise
        except TailraceError as refusal:
            # The client comes back and is answered properly.
            self.finish(1001 if refusal.code == "offset_gone" else 1013)
        except Exception:
            self.finish(1011)
            raise
        finally:
            self._task = None

    def _wait(self) -> None:
        if not self._waiting and not self.ended:
            self._waiting = True
            if self.stream.readers is None:
                self.stream.readers = []
            self.stream.readers.append(self)

    # -- events ----------------------------------------------------------------------------------------

    def on_published(self, stream: Stream) -> None:
        if self._task is not None:
            return
        wire, live = self._wire, self._live
        assert wire is not None
        if (
            self._position == live.step_from
            and stream is live.step_stream
            and stream.visible == live.step_to
            and self._shareable
            and not (stream.visible_closed or stream.removed or stream.gone)
        ):
            # Somebody at the same place was just served: the same bytes will do.
            encoded = live.step.get(wire.form)
            if encoded is not None and wire.offer(encoded, live.unsent_bytes_max):
                self._position = live.step_to
                self._silent_since = live.now
                return
        if not self._advance():
            self._task = live.loop.create_task(self._catch_up())

    def on_drain(self) -> None:
        if not self.ended:
            self.on_published(self.stream)

    def on_tick(self, now: float, keep_alive_s: float) -> None:
        assert self._wire is not None
        if self.until_s is not None and self._live.now_s() >= self.until_s:
            self.finish(1008)
        elif self._rotate_at is not None and now >= self._rotate_at and self._position >= self.stream.visible:
            self._send(None, self.stream.visible_closed)
            self.finish(1001)
        elif now - self._silent_since >= keep_alive_s and self._wire.unsent_bytes == 0:
            self._silent_since = now
            if self._skipped:
                self._send(None, False)
            else:
                self._wire.keep_alive()

    def finish(self, code: int) -> None:
        """Ends the connection; the code is what a WebSocket client gets to see."""
        if not self.ended:
            self.gone()
            if self._wire is not None:
                self._wire.end(code)

    def gone(self) -> None:
        """The client left, or is being left: no trace remains."""
        if self.ended:
            return
        self.ended = True
        stream = self.stream
        if stream.readers is not None:
            stream.readers = [reader for reader in stream.readers if reader is not self] or None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._live.closed(self, stream)


def event_payload(stream: Stream, page: Page) -> bytes:
    """A batch as one event's data: an array on JSON streams, else the bytes one after the other."""
    if stream.json:
        return b"[" + b",".join(page.parts) + b"]"
    return b"".join(page.parts)


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
        self._origins.check_websocket(exchange)
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

    def discard_encoded_step(self) -> None:
        """A registry changed: what was encoded for the last reader was promoted by the old one."""
        self.step_stream = None

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
        page_bytes, entries_max, apart = self.contracts.page_limits(stream, after, limits)
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
        bytes_max, entries_max, apart = self.contracts.page_limits(stream, after, self._limits)
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
        contract = self.contracts.get(stream.visible_documents)
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


class LongPoll:
    """One waiting reader: a place in the stream's list and one timer."""

    __slots__ = ("_exchange", "_position", "_request", "_routes", "_timer")

    def __init__(self, routes: ReadRoutes, exchange: Exchange, request: ReadRequest) -> None:
        self._routes = routes
        self._exchange = exchange
        self._request = request
        self._position = request.start
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        stream = self._request.stream
        if stream.removed or stream.gone:
            self.on_published(stream)
            return
        if stream.visible_closed or self._request.wait_ms == 0:
            self._routes.answer_idle(self._exchange, self._request, self._position)
            return
        self._routes.live_opened(stream)
        if stream.readers is None:
            stream.readers = []
        stream.readers.append(self)
        self._timer = self._routes.later(self._request.wait_ms, self._time_is_up)
        self._exchange.on_gone = self._leave

    def on_published(self, stream: Stream) -> None:
        request = self._request
        if stream.removed or stream.gone:
            self._leave()
            responses.respond_error(self._exchange, responses.stream_deleted(stream))
            return
        if stream.visible > self._position:
            if request.key or request.filter_text:
                # Only what is new has to be looked at; what does not match is passed over for good.
                found = self._routes.next_match(request, self._position)
                if isinstance(found, Page) and not found.count:
                    self._position = found.next_entry
                    if not stream.visible_closed:
                        return
                    self._leave()
                    self._routes.answer_idle(self._exchange, request, self._position)
                    return
            self._leave()
            # The stream may have had no type when the wait began; the append that ended it gave it one.
            fmt = request.fmt if request.fmt_given else "json" if stream.json else "raw"
            self._routes.answer(self._exchange, request._replace(start=self._position, fmt=fmt))
        elif stream.visible_closed:
            self._leave()
            self._routes.answer_idle(self._exchange, request, self._position)

    def _time_is_up(self) -> None:
        self._leave()
        self._routes.answer_idle(self._exchange, self._request, self._position)

    def end(self) -> None:
        """The server stops: the client is told to come back, as if the time were up."""
        self._time_is_up()

    @property
    def identity(self) -> Identity:
        return self._request.identity

    @property
    def stream(self) -> Stream:
        return self._request.stream

    def refuse(self, refusal: TailraceError) -> None:
        """The client may not wait any longer."""
        self._leave()
        responses.respond_error(self._exchange, refusal)

    def _leave(self) -> None:
        if self._timer is None:
            return
        self._routes.note_wait(self._exchange)
        self._timer.cancel()
        self._timer = None
        stream = self._request.stream
        remove_reader(stream, self)
        self._routes.live_ended(stream)


def remove_reader(stream: Stream, reader: object) -> None:
    """Takes a reader off the stream's list; an empty list is no list at all."""
    readers = stream.readers
    if readers is not None:
        stream.readers = [other for other in readers if other is not reader] or None
