"""Live reads: SSE and WebSocket followers of a stream, long-polls, and the encodings that readers share.

The path of a live event: `ReadRoutes._serve` → `LiveReaders.open_sse` → `Follower.start`, then for each
commit the publisher → `Follower.on_published` → `SharedEncodings.encode_tail_step` → the transport.

A `Follower` (SSE or WebSocket) catches up page by page, then waits in `stream.readers` until the publisher
calls `on_published`. The step from the old tail to the new one is encoded once per transport form, and the
same bytes go to every follower that waited at the old tail. Catch-up pages are shared the same way: followers
at one position read and encode a page once, and only a few pages are sent per iteration of the event loop.

Nothing is written to a socket with too many unsent bytes: its follower continues from the log when the socket
has drained. A `LongPoll` waits in the same list and sends one response.

In this order: the request, shared encodings, the scheduler of pages, followers, long-polls, and
`LiveReaders`, which opens, counts and ends all of them. An event is encoded in `http/live_transport.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar, NamedTuple, Protocol

from tailrace.auth import ANONYMOUS, Action, Identity, authorise, invalid_token_error, is_hub_stream
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.http.cors import AllowedOrigins
from tailrace.http.exchange import Exchange
from tailrace.http.live_transport import (
    EventTransport,
    LiveWebSocketHandler,
    SseEventTransport,
    WebSocketEventTransport,
)
from tailrace.http.server import WRITE_HIGH_WATER_BYTES
from tailrace.log.history import MissingBlock
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.http_headers import is_text
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.sse import EVENT_STREAM_HEADERS
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.schema.stream_schema import StreamSchemaCache

logger = logging.getLogger("tailrace.api")


class ReadRequest(NamedTuple):
    """A read whose parameters are checked and whose start is an entry number."""

    stream: Stream
    start: int
    at_now: bool
    mode: str
    shared: bool  # a long-poll whose response shared caches may store
    fmt: str
    fmt_explicit: bool
    key: str
    wait_ms: int
    cursor: str | None
    filter_text: str = ""
    scanned_bytes: int = 0  # scanned by the filter so far
    bytes_max: int = 0  # requested size of an Arrow page
    entries_max: int = 0
    start_line: bytes = b""  # response header that names the start in use when the request has several
    identity: Identity = ANONYMOUS  # set for a long-poll, so that it can be rechecked while it waits


def event_payload(stream: Stream, page: Page) -> bytes:
    """The data of one event: a JSON array on JSON streams, else the concatenated entries."""
    if stream.json:
        return b"[" + b",".join(page.parts) + b"]"
    return b"".join(page.parts)


class TailStep:
    """The entries of a stream from `after` to its tail, as one event by transport form."""

    __slots__ = ("after", "encoded", "stream", "through")

    def __init__(self, stream: Stream | None, after: int, through: int) -> None:
        self.stream = stream
        self.after = after
        self.through = through
        self.encoded: dict[str, bytes] = {}


NO_STEP = TailStep(None, -1, -1)
CATCH_UP_PAGE_BYTES = 256 * 1024
# Encoded catch-up pages cached until the next tick.
ENCODED_BYTES_MAX = 16 * 1024 * 1024


class SharedEncodings:
    """Reads and encodes pages once for all followers that are at the same position.

    Two kinds are cached until the next tick: the step to the tail of the stream published last, and pages for
    followers that catch up. Both contain a cursor, which depends on the time.
    """

    def __init__(self, context: Context, contracts: StreamSchemaCache) -> None:
        self._loop = context.loop
        self._clock = context.clock
        self._log = context.log
        self._limits = context.limits
        self._contracts = contracts
        self._page_bytes = min(CATCH_UP_PAGE_BYTES, context.limits.read_page_bytes)
        self.tail_step = NO_STEP
        # A step known to be more than one page, or not in memory.
        self._unshared_step: tuple[Stream, int, int] | None = None
        self._reading: dict[tuple[Stream, int], asyncio.Task[Page]] = {}
        self._encoded_pages: dict[tuple[Stream, int, int, str], bytes] = {}
        self._encoded_bytes = 0

    def cursor(self) -> str:
        """The cursor of clients that sent none, or an older one."""
        return next_cursor(None, self._clock.now_ns() / 1e9)

    def discard_tail_step(self) -> None:
        """A schema registry changed: the encoded step was promoted with the old one."""
        self.tail_step = NO_STEP

    def expire(self) -> None:
        """Called every second: cursors get out of date."""
        self.tail_step = NO_STEP
        self._unshared_step = None
        self._clear_encoded_pages()

    # -- the step to the tail --------------------------------------------------------------------------

    def encode_tail_step(self, transport: EventTransport, stream: Stream, after: int) -> bytes | None:
        """All entries from `after` to the tail as one event, encoded once per transport form.

        None if they are more than one page, or not in memory.
        """
        step, through, closed = self.tail_step, stream.visible, stream.visible_closed
        is_current = step.stream is stream and step.after == after and step.through == through
        if is_current and not closed and (found := step.encoded.get(transport.form)) is not None:
            return found
        if self._unshared_step == (stream, after, through):
            return None
        page = self._read_in_memory(stream, after, None, self._limits.read_page_bytes)
        if page is None or page.next_entry < through:
            self._unshared_step = (stream, after, through)
            return None
        encoded = transport.encode(
            event_payload(stream, page), stream.offset(through), self.cursor(), up_to_date=True, closed=closed
        )
        if not closed:
            if not is_current:
                step = self.tail_step = TailStep(stream, after, through)
            step.encoded[transport.form] = encoded
        return encoded

    # -- pages for catching up -------------------------------------------------------------------------

    def page_in_memory(self, stream: Stream, after: int, key: bytes | None) -> Page | None:
        """The next page, unless it has to be read from the store."""
        return self._read_in_memory(stream, after, key, self._page_bytes)

    def _read_in_memory(self, stream: Stream, after: int, key: bytes | None, bytes_max: int) -> Page | None:
        limits = self._limits
        if stream.visible_documents is None:
            found = self._log.reader.try_read(stream, after, bytes_max, limits.read_page_entries, key)
            return found if isinstance(found, Page) else None
        page_bytes, entries_max, apart = self._contracts.page_limits(stream, after, limits)
        bytes_max = min(bytes_max, page_bytes)
        found = self._log.reader.try_read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, found) if isinstance(found, Page) else None

    async def read_page(self, stream: Stream, after: int, key: bytes | None) -> Page:
        """Read a page from the store, once for all followers that need it at the same time."""
        if key is not None:
            return await self._read(stream, after, key)
        reading = self._reading.get((stream, after))
        if reading is None:
            reading = self._reading[stream, after] = self._loop.create_task(self._read(stream, after, None))
            reading.add_done_callback(lambda done: self._on_page_read(stream, after, done))
        return await asyncio.shield(reading)

    def _on_page_read(self, stream: Stream, after: int, reading: asyncio.Task[Page]) -> None:
        self._reading.pop((stream, after), None)
        if not reading.cancelled():
            reading.exception()  # mark as retrieved: all waiters may have disconnected

    async def _read(self, stream: Stream, after: int, key: bytes | None) -> Page:
        bytes_max, entries_max, apart = self._contracts.page_limits(stream, after, self._limits)
        bytes_max = min(bytes_max, self._page_bytes)
        page = await self._log.reader.read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, page)

    def _promoted(self, stream: Stream, after: int, page: Page) -> Page:
        contract = self._contracts.get(stream.visible_documents)
        return page if contract is None else contract.promoted(stream, after, page)

    def encode_page(self, transport: EventTransport, stream: Stream, after: int, page: Page) -> bytes:
        """A page that does not reach the tail, encoded once per transport form for all followers."""
        key = (stream, after, page.next_entry, transport.form)
        found = self._encoded_pages.get(key)
        if found is None:
            payload = event_payload(stream, page) if page.count else None
            offset = stream.offset(page.next_entry)
            found = transport.encode(payload, offset, self.cursor(), up_to_date=False, closed=False)
            if self._encoded_bytes + len(found) > ENCODED_BYTES_MAX:
                self._clear_encoded_pages()
            self._encoded_pages[key] = found
            self._encoded_bytes += len(found)
        return found

    def _clear_encoded_pages(self) -> None:
        self._encoded_pages.clear()
        self._encoded_bytes = 0


# Catch-up pages sent in one iteration of the event loop, so that appends and other reads are not delayed.
PAGES_PER_SLICE = 4


class PageScheduler:
    """Lets followers send catch-up pages in turn, a few per iteration of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[Callable[[], None]] = deque()

    def schedule(self, send: Callable[[], None]) -> None:
        """Queue a callback that sends one page."""
        if not self._queue:
            self._loop.call_soon(self._run_slice)
        self._queue.append(send)

    async def wait(self) -> None:
        """Wait in the same queue, for a follower that has read its page already."""
        ready = asyncio.Event()
        self.schedule(ready.set)
        await ready.wait()

    def _run_slice(self) -> None:
        queue = self._queue
        for _ in range(min(PAGES_PER_SLICE, len(queue))):
            try:
                queue[0]()  # removed afterwards: `schedule` starts a slice only if the queue is empty
            except Exception:
                logger.exception("live reader failed")  # the others send their pages all the same
            queue.popleft()
        if queue:
            self._loop.call_soon(self._run_slice)


class LiveConnection(ABC):
    """A connection, or a request that waits, which `LiveReaders` counts and can end."""

    renews_ttl: ClassVar[bool] = True  # the stream does not expire while it is open
    __slots__ = ("identity", "mode", "stream")

    def __init__(self, mode: str, stream: Stream, identity: Identity) -> None:
        self.mode = mode
        self.stream = stream
        self.identity = identity

    @abstractmethod
    def close(self) -> None:
        """The server stops: end in such a way that the client reconnects."""

    @abstractmethod
    def refuse(self, error: TailraceError) -> None:
        """The client may no longer read the stream."""


class FollowerState(Enum):
    """What a follower waits for."""

    CATCHING_UP = auto()  # its task, which reads pages from the store
    QUEUED = auto()  # its slice of the event loop, to send a page from memory
    DRAINING = auto()  # its socket, which has too many unsent bytes
    AT_TAIL = auto()  # the next publication: everything is sent
    ENDED = auto()


class Follower(LiveConnection):
    """One SSE or WebSocket connection."""

    __slots__ = (
        "_cursor",
        "_has_slot",
        "_key",
        "_live",
        "_position",
        "_registered",
        "_rotate_at",
        "_sent_any",
        "_shareable",
        "_shared",
        "_silent_since",
        "_skipped",
        "_task",
        "_transport",
        "_type_was_unset",
        "state",
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
        identity: Identity = ANONYMOUS,
    ) -> None:
        super().__init__("ws" if rotate_s is None else "sse", stream, identity)
        self._live = live
        self._shared = live.shared
        self._position = position
        self._key = key.encode() or None
        self._cursor = cursor
        self._transport: EventTransport | None = None
        self._type_was_unset = stream.content_type is None
        self._shareable = self._key is None and cursor is None
        self._task: asyncio.Task[None] | None = None
        self._registered = False  # with the stream, on which the publisher calls `on_published`
        self._has_slot = False  # one page that does not reach the tail may be sent now
        self._skipped = False  # the position moved but nothing was sent (no entry has the key)
        self._sent_any = False  # else a control event is sent even when there are no entries
        self.state = FollowerState.CATCHING_UP
        self.until_s = identity.until_s  # wall time at which the token expires
        self._silent_since = live.now
        self._rotate_at = None if rotate_s is None else live.loop.time() + rotate_s

    @property
    def ended(self) -> bool:
        return self.state is FollowerState.ENDED

    def start(self, transport: EventTransport) -> None:
        self._transport = transport
        self._advance_or_read()

    # -- sending ---------------------------------------------------------------------------------------

    def _advance_or_read(self) -> None:
        if self._advance() is FollowerState.CATCHING_UP:
            self._task = self._live.loop.create_task(self._catch_up())

    def _advance(self) -> FollowerState:
        """Send what is in memory. Returns CATCHING_UP if the next page has to be read from the store."""
        try:
            self.state = self._send_available()
        except TailraceError:
            self.finish(1011)  # an entry cannot be promoted; a catch-up read returns the error
        return self.state

    def _send_available(self) -> FollowerState:
        stream, live, shared, transport = self.stream, self._live, self._shared, self._transport
        assert transport is not None
        while not self.ended:
            if (stream.removed or stream.gone) and stream.batch is None:  # with a batch: not durable yet
                self.finish(4404)
                break
            if (self._type_was_unset and stream.content_type is not None) or self._position < stream.earliest:
                # The client reconnects, and gets the right encoding or an `offset_gone` error.
                self.finish(1001)
                break
            if self._position >= stream.visible:
                if not self._sent_any or stream.visible_closed:
                    self._send(None, stream.visible_closed)
                    continue
                self._register()
                return FollowerState.AT_TAIL
            if transport.unsent_bytes > live.unsent_bytes_max:
                live.demoted += 1
                return FollowerState.DRAINING
            encoded = shared.encode_tail_step(transport, stream, self._position) if self._shareable else None
            if encoded is not None:
                self._position = stream.visible
                self._write(encoded, stream.visible_closed)
                continue
            if transport.unsent_bytes > live.catch_up_unsent_bytes_max:
                live.demoted += 1
                return FollowerState.DRAINING
            if not self._has_slot:
                live.pages.schedule(self._on_slot)
                return FollowerState.QUEUED
            self._has_slot = False
            page = shared.page_in_memory(stream, self._position, self._key)
            if page is None:
                return FollowerState.CATCHING_UP
            self._send_page(page)
        return FollowerState.ENDED

    def _on_slot(self) -> None:
        """Send one page, if there still is one to send."""
        if not self.ended:
            self._has_slot = True
            self.on_published(self.stream)
            self._has_slot = False

    def _send_page(self, page: Page) -> None:
        transport, after = self._transport, self._position
        assert transport is not None
        if self._shareable and page.count and page.next_entry < self.stream.visible:
            self._position = page.next_entry
            self._write(self._shared.encode_page(transport, self.stream, after, page), False)
            return
        self._position = page.next_entry
        at_end = self.stream.visible_closed and self._position >= self.stream.visible
        if page.count or at_end:
            self._send(event_payload(self.stream, page) if page.count else None, at_end)
        else:
            self._skipped = True

    def _send(self, payload: bytes | None, closed: bool) -> None:
        assert self._transport is not None
        stream = self.stream
        up_to_date = self._position >= stream.visible
        offset = stream.offset(self._position)
        cursor = next_cursor(self._cursor, self._live.now_s())
        if self._cursor is not None:
            self._cursor = cursor if int(cursor) > int(self._shared.cursor()) else None
            self._shareable = self._key is None and self._cursor is None
        self._write(
            self._transport.encode(payload, offset, cursor, up_to_date, closed), closed and up_to_date
        )

    def _write(self, encoded: bytes, closed: bool) -> None:
        assert self._transport is not None
        self._transport.send(encoded)
        self._sent_any = True
        self._skipped = False
        self._silent_since = self._live.now
        if closed:
            self.finish(1000)

    async def _catch_up(self) -> None:
        """Read pages from the store, as fast as the client receives them."""
        try:
            while not self.ended and self._transport is not None:
                if self._transport.unsent_bytes > self._live.catch_up_unsent_bytes_max:
                    self.state = FollowerState.DRAINING
                    return
                page = await self._shared.read_page(self.stream, self._position, self._key)
                await self._live.pages.wait()
                if not self.ended:
                    self._send_page(page)
                    if self._advance() is not FollowerState.CATCHING_UP:
                        return
        except asyncio.CancelledError:
            raise
        except TailraceError as refusal:
            # The client reconnects and gets the error as a response.
            self.finish(1001 if refusal.code == "offset_gone" else 1013)
        except Exception:
            self.finish(1011)
            raise
        finally:
            self._task = None

    def _register(self) -> None:
        if not self._registered:
            self._registered = True
            self.stream.add_reader(self)

    # -- events ----------------------------------------------------------------------------------------

    def on_published(self, stream: Stream) -> None:
        if self._task is not None:
            return
        transport, live, step = self._transport, self._live, self._shared.tail_step
        assert transport is not None
        if (
            self._position == step.after
            and stream is step.stream
            and stream.visible == step.through
            and self._shareable
            and not (stream.visible_closed or stream.removed or stream.gone)
        ):
            # Already encoded for another follower at the same position.
            encoded = step.encoded.get(transport.form)
            if encoded is not None and transport.offer(encoded, live.unsent_bytes_max):
                self._position = step.through
                self._silent_since = live.now
                return
        self._advance_or_read()

    def on_drain(self) -> None:
        if not self.ended:
            self.on_published(self.stream)

    def on_tick(self, now: float, keep_alive_s: float) -> None:
        assert self._transport is not None
        if self.until_s is not None and self._live.now_s() >= self.until_s:
            self.finish(1008)
        elif self._rotate_at is not None and now >= self._rotate_at and self._position >= self.stream.visible:
            self._send(None, self.stream.visible_closed)
            self.finish(1001)
        elif now - self._silent_since >= keep_alive_s and self._transport.unsent_bytes == 0:
            self._silent_since = now
            if self._skipped:
                self._send(None, False)
            else:
                self._transport.keep_alive()

    def close(self) -> None:
        self.finish(1001)

    def refuse(self, error: TailraceError) -> None:
        self.finish(1008)

    def finish(self, code: int) -> None:
        """End the connection with a WebSocket close code (SSE only ends the response)."""
        if not self.ended:
            self.gone()
            if self._transport is not None:
                self._transport.end(code)

    def gone(self) -> None:
        """The client disconnected, or `finish` ends the connection: remove every reference to it."""
        if self.ended:
            return
        self.state = FollowerState.ENDED
        self.stream.remove_reader(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._live.remove(self)


class LongPollResponder(Protocol):
    """Reads for a long-poll, and sends its response; implemented by the read routes."""

    def next_match(self, request: ReadRequest, position: int) -> Page | MissingBlock | None: ...
    def respond(self, exchange: Exchange, request: ReadRequest) -> None: ...
    def respond_empty(self, exchange: Exchange, request: ReadRequest, position: int) -> None: ...


class LongPoll(LiveConnection):
    """A long-poll that waits at the tail for the next entry (with its key, or that matches its filter)."""

    __slots__ = ("_exchange", "_live", "_position", "_request", "_responder", "_timer")

    def __init__(
        self, live: LiveReaders, responder: LongPollResponder, exchange: Exchange, request: ReadRequest
    ) -> None:
        super().__init__("long-poll", request.stream, request.identity)
        self._live = live
        self._responder = responder
        self._exchange = exchange
        self._request = request
        self._position = request.start
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        stream = self.stream
        if stream.removed or stream.gone:
            self.on_published(stream)
            return
        if stream.visible_closed or self._request.wait_ms == 0:
            self._responder.respond_empty(self._exchange, self._request, self._position)
            return
        self._live.add(self)
        stream.add_reader(self)
        self._timer = self._live.loop.call_later(self._request.wait_ms / 1000, self.close)
        self._exchange.on_gone = self._leave

    def on_published(self, stream: Stream) -> None:
        request = self._request
        if stream.removed or stream.gone:
            self.refuse(responses.stream_deleted(stream))
            return
        if stream.visible > self._position:
            if request.key or request.filter_text:
                # Check only the new entries; those that do not match are skipped.
                found = self._responder.next_match(request, self._position)
                if isinstance(found, Page) and not found.count:
                    self._position = found.next_entry
                    if not stream.visible_closed:
                        return
                    self.close()
                    return
            self._leave()
            # The stream may have had no content type when the wait began; the first append set it.
            fmt = request.fmt if request.fmt_explicit else "json" if stream.json else "raw"
            self._responder.respond(self._exchange, request._replace(start=self._position, fmt=fmt))
        elif stream.visible_closed:
            self.close()

    def close(self) -> None:
        """Respond without entries: at the timeout, at the end of the stream, or when the server stops."""
        self._leave()
        self._responder.respond_empty(self._exchange, self._request, self._position)

    def refuse(self, error: TailraceError) -> None:
        self._leave()
        responses.respond_error(self._exchange, error)

    def _leave(self) -> None:
        if self._timer is None:
            return
        if self._live.server_timing:
            responses.add_phase(self._exchange, "wait", time.monotonic() - self._exchange.started)
        self._timer.cancel()
        self._timer = None
        self.stream.remove_reader(self)
        self._live.remove(self)


TICK_S = 1.0


class LiveReaders:
    """All live connections: admission, one timer for keep-alives and rotation, rechecks, shutdown."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._limits = context.limits
        self.loop = context.loop
        self._origins = AllowedOrigins(context.settings)
        self.unsent_bytes_max = context.limits.live_unsent_bytes
        self.contracts = StreamSchemaCache(context.limits.key_bytes)
        self._followers: set[Follower] = set()
        self._waits: set[LiveConnection] = set()  # long-polls of entries and of details
        self.server_timing = context.settings.server_timing
        self._timer: asyncio.TimerHandle | None = None
        self.now = self.loop.time()  # advanced by the tick
        self.shared = SharedEncodings(context, self.contracts)
        self.pages = PageScheduler(context.loop)
        # Above this a transport calls `on_drain` when most of it is sent.
        self.catch_up_unsent_bytes_max = min(WRITE_HIGH_WATER_BYTES, context.limits.live_unsent_bytes)
        self.connections = 0
        self.open_by_mode = {"long-poll": 0, "sse": 0, "ws": 0}
        self.by_stream: dict[Stream, int] = {}
        self.demoted = 0

    def register_metrics(self, metrics: ServerMetrics) -> None:
        for mode in self.open_by_mode:
            metrics.live_connections.reads[(mode,)] = lambda mode=mode: self.open_by_mode[mode]
        metrics.live_demoted.read = lambda: self.demoted

    # -- opening ---------------------------------------------------------------------------------------

    def add(self, connection: LiveConnection) -> None:
        """Count a connection, and register it until it is removed. Raises if there are too many."""
        limit, stream = self._limits.live_connections, connection.stream
        if self.connections >= limit:
            raise TailraceError("overloaded", f"the limit of {limit} live connections is reached")
        self.connections += 1
        self.open_by_mode[connection.mode] += 1
        self.by_stream[stream] = self.by_stream.get(stream, 0) + 1
        if connection.renews_ttl:
            stream.live += 1
        if isinstance(connection, Follower):
            self._followers.add(connection)
        else:
            self._waits.add(connection)

    def remove(self, connection: LiveConnection) -> None:
        stream = connection.stream
        self.connections -= 1
        self.open_by_mode[connection.mode] -= 1
        left = self.by_stream[stream] - 1
        if left:
            self.by_stream[stream] = left
        else:
            del self.by_stream[stream]
        if connection.renews_ttl:
            stream.live -= 1
            self._log.touch(stream)
        if isinstance(connection, Follower):
            self._followers.discard(connection)
        else:
            self._waits.discard(connection)

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
        follower.start(SseEventTransport(outlet, text))

    def open_ws(self, exchange: Exchange, request: ReadRequest, identity: Identity) -> None:
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required",
                "live=ws requires a WebSocket upgrade",
                headers=(("Upgrade", "websocket"),),
            )
        self._origins.check_websocket(exchange)
        follower = self._open(request, None, identity)
        transport = WebSocketEventTransport(is_text(request.stream.content_type))
        try:
            transport.attach(
                exchange.upgrade_websocket(
                    LiveWebSocketHandler(follower), request.start_line, message_bytes=1024
                )
            )
        except TailraceError:
            follower.gone()
            raise
        follower.start(transport)

    def _open(self, request: ReadRequest, rotation_s: float | None, identity: Identity) -> Follower:
        follower = Follower(
            self, request.stream, request.start, request.key, request.cursor, rotation_s, identity
        )
        self.add(follower)
        if self._timer is None:
            self.now = self.loop.time()
            self._timer = self.loop.call_later(TICK_S, self._tick)
        return follower

    def open_long_poll(self, exchange: Exchange, request: ReadRequest, responder: LongPollResponder) -> None:
        LongPoll(self, responder, exchange, request).begin()

    # -- ending ----------------------------------------------------------------------------------------

    def _all(self) -> list[LiveConnection]:
        return [*self._waits, *self._followers]

    def end_all(self) -> None:
        """Shutdown: end all connections and waits; clients reconnect."""
        for connection in self._all():
            connection.close()

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """End what was opened with credentials that are no longer valid, and return how many."""
        lost = [connection for connection in self._all() if not is_valid(connection.identity)]
        for connection in lost:
            connection.refuse(invalid_token_error("the token was revoked"))
        return len(lost)

    def recheck_hub(self) -> None:
        """The hub's rules changed: end what may no longer read its hub stream."""
        for connection in self._all():
            name = connection.stream.name
            if is_hub_stream(name):
                try:
                    authorise(connection.identity, Action.READ_STREAM, stream=name)
                except TailraceError as error:
                    connection.refuse(error)

    # -- while open ------------------------------------------------------------------------------------

    def discard_encoded_step(self) -> None:
        """A schema registry changed: the encoded step was promoted with the old one."""
        self.shared.discard_tail_step()

    def now_s(self) -> float:
        return self._context.clock.now_ns() / 1e9

    def _tick(self) -> None:
        self._timer = None
        self.now = now = self.loop.time()
        self.shared.expire()
        keep_alive_s = self._limits.sse_keep_alive_ms / 1000
        for follower in tuple(self._followers):
            follower.on_tick(now, keep_alive_s)
        if self._followers:
            self._timer = self.loop.call_later(TICK_S, self._tick)
