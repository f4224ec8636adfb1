"""Live readers: server-sent events and WebSockets that follow a stream's tail.

A follower first catches up page by page, then waits in the stream's list. When something is published each
wire form is encoded once and the same bytes go to everybody who was at the same place. A follower whose
socket does not keep up is not written to until it has drained, and then reads on from the log.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.contracts import Contracts
from tailrace.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.net.http1 import Exchange, Outlet, chunk
from tailrace.net.websocket import WebSocketConnection, encode_text
from tailrace.protocol import sse
from tailrace.protocol.content_types import is_text
from tailrace.protocol.cursor import next_cursor

TICK_S = 1.0


class Wire(Protocol):
    """How a follower's events reach its client."""

    form: str

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes: ...
    def send(self, encoded: bytes) -> None: ...
    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool: ...
    def keep_alive(self) -> None: ...
    def end(self, code: int) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class SseWire:
    __slots__ = ("_outlet", "_text", "form", "offer")

    def __init__(self, outlet: Outlet, text: bool) -> None:
        self._outlet = outlet
        self.offer = outlet.offer_raw
        self._text = text
        self.form = "sse-text" if text else "sse-base64"

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        event = (
            b"" if payload is None else sse.text_event(payload) if self._text else sse.base64_event(payload)
        )
        return chunk(event + sse.control_event(offset, cursor, up_to_date, closed))

    def send(self, encoded: bytes) -> None:
        self._outlet.write_raw(encoded)

    def keep_alive(self) -> None:
        self._outlet.write(sse.KEEP_ALIVE)

    def end(self, code: int) -> None:
        self._outlet.end()

    @property
    def unsent_bytes(self) -> int:
        return self._outlet.unsent_bytes


class WsWire:
    __slots__ = ("_connection", "_text", "form")

    def __init__(self, text: bool) -> None:
        self._connection: WebSocketConnection | None = None
        self._text = text
        self.form = "ws-text" if text else "ws-base64"

    def attach(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        control = encode_text(sse.ws_control(offset, cursor, up_to_date, closed))
        if payload is None:
            return control
        return encode_text(sse.ws_data(payload, self._text)) + control

    def send(self, encoded: bytes) -> None:
        if self._connection is not None:
            self._connection.send_encoded(encoded)

    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        if self.unsent_bytes > unsent_bytes_max:
            return False
        self.send(encoded)
        return True

    def keep_alive(self) -> None:
        """The connection sends its own pings."""

    def end(self, code: int) -> None:
        if self._connection is not None:
            self._connection.close(code)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes


class Follower:
    """One live connection, from its offset to the tail and on."""

    __slots__ = (
        "_cursor",
        "_greeted",
        "_key",
        "_live",
        "_position",
        "_rotate_at",
        "_shareable",
        "_silent_since",
        "_skipped",
        "_stream",
        "_task",
        "_type_was_unset",
        "_waiting",
        "_wire",
        "ended",
        "mode",
        "until_s",
    )

    def __init__(
        self, live: Live, stream: Stream, position: int, key: str, cursor: str | None, rotate_s: float | None
    ) -> None:
        self._live = live
        self.mode = "ws" if rotate_s is None else "sse"
        self._stream = stream
        self._position = position
        self._key = key.encode() or None
        self._cursor = cursor
        self._wire: Wire | None = None
        self._type_was_unset = stream.content_type is None
        self._shareable = self._key is None and cursor is None
        self._task: asyncio.Task[None] | None = None
        self._waiting = False  # in the stream's list of readers
        self._skipped = False  # position moved without anything being sent
        self._greeted = False  # something was sent: the first thing may be a control alone
        self.ended = False
        self.until_s: float | None = None  # wall time at which the reader's permission ends
        self._silent_since = live.now
        self._rotate_at = None if rotate_s is None else live.loop.time() + rotate_s

    def start(self, wire: Wire) -> None:
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
        stream, live = self._stream, self._live
        while not self.ended:
            if stream.removed or stream.gone:
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
                return True  # `on_drain` goes on from here
            encoded = live.encoded(self._wire, stream, self._position) if self._shareable else None
            if encoded is not None:
                self._position = stream.visible
                self._emit(encoded, stream.visible_closed)
            else:
                page = live.try_page(stream, self._position, self._key)
                if page is None:
                    return False
                self._send_page(page)
        return True

    def _send_page(self, page: Page) -> None:
        self._position = page.next_entry
        at_end = self._stream.visible_closed and self._position >= self._stream.visible
        if page.count or at_end:
            self._send(payload_of(self._stream, page) if page.count else None, at_end)
        else:
            self._skipped = True

    def _send(self, payload: bytes | None, closed: bool) -> None:
        assert self._wire is not None
        stream = self._stream
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
                if self._wire.unsent_bytes > self._live.unsent_bytes_max:
                    return
                page = await self._live.page(self._stream, self._position, self._key)
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
            if self._stream.readers is None:
                self._stream.readers = []
            self._stream.readers.append(self)

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
        self.on_published(self._stream)

    def on_tick(self, now: float, keep_alive_s: float) -> None:
        assert self._wire is not None
        if self.until_s is not None and self._live.now_s() >= self.until_s:
            self.finish(1008)
        elif (
            self._rotate_at is not None and now >= self._rotate_at and self._position >= self._stream.visible
        ):
            self._send(None, self._stream.visible_closed)
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
        stream = self._stream
        if stream.readers is not None:
            stream.readers = [reader for reader in stream.readers if reader is not self] or None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._live.closed(self, stream)


class WsFollower:
    """What the WebSocket layer calls; clients have nothing to say here."""

    __slots__ = ("_follower",)

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Frames from the client are ignored."""

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        """So are long ones."""

    def on_drain(self) -> None:
        self._follower.on_drain()

    def on_close(self, code: int, reason: str) -> None:
        self._follower.gone()


class Live:
    """All live connections: admission, shared encodings, one timer for keep-alives and rotation."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._limits = context.limits
        self.loop = context.loop
        self.unsent_bytes_max = context.limits.live_unsent_bytes
        self.contracts = Contracts(context.limits.key_bytes)
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.now = self.loop.time()  # moved by the tick
        # The last step of a stream, `(step_from, step_to]`, in every wire form that was asked for.
        self.step_stream: Stream | None = None
        self.step_from = -1
        self.step_to = -1
        self.step: dict[str, bytes] = {}
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

    def open_sse(
        self,
        exchange: Exchange,
        stream: Stream,
        start: int,
        key: str,
        cursor: str | None,
        until_s: float | None,
    ) -> None:
        rotation_s = self._limits.sse_rotation_ms / 1000 * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load
        follower = self._open(stream, start, key, cursor, rotation_s, until_s)
        text = is_text(stream.content_type)
        head = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
        if not text:
            head += b"Stream-SSE-Data-Encoding: base64\r\n"
        head += answers.earliest(stream)
        outlet = exchange.open_stream(200, head)
        outlet.on_gone = follower.gone
        outlet.on_drain = follower.on_drain
        follower.start(SseWire(outlet, text))

    def open_ws(
        self,
        exchange: Exchange,
        stream: Stream,
        start: int,
        key: str,
        cursor: str | None,
        until_s: float | None,
    ) -> None:
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required", "live=ws needs a WebSocket upgrade", headers=(("Upgrade", "websocket"),)
            )
        follower = self._open(stream, start, key, cursor, None, until_s)
        wire = WsWire(is_text(stream.content_type))
        try:
            wire.attach(exchange.upgrade_websocket(WsFollower(follower), message_bytes=1024))
        except TailraceError:
            follower.gone()
            raise
        follower.start(wire)

    def _open(
        self,
        stream: Stream,
        start: int,
        key: str,
        cursor: str | None,
        rotation_s: float | None,
        until_s: float | None,
    ) -> Follower:
        self.admit("ws" if rotation_s is None else "sse", stream)
        follower = Follower(self, stream, start, key, cursor, rotation_s)
        follower.until_s = until_s
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

    def _tick(self) -> None:
        self._timer = None
        self.now = now = self.loop.time()
        self.step_stream = None  # what it says about the cursor grows old
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

    def try_page(self, stream: Stream, after: int, key: bytes | None) -> Page | None:
        limits = self._limits
        if stream.visible_documents is None:
            found = self._log.reader.try_read(
                stream, after, limits.read_page_bytes, limits.read_page_entries, key
            )
            return found if isinstance(found, Page) else None
        bytes_max, entries_max, apart = self.contracts.page_of(stream, after, limits)
        found = self._log.reader.try_read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, found) if isinstance(found, Page) else None

    async def page(self, stream: Stream, after: int, key: bytes | None) -> Page:
        bytes_max, entries_max, apart = self.contracts.page_of(stream, after, self._limits)
        page = await self._log.reader.read(stream, after, bytes_max, entries_max, key, apart=apart)
        return self._promoted(stream, after, page)

    def _promoted(self, stream: Stream, after: int, page: Page) -> Page:
        contract = self.contracts.of(stream.visible_documents)
        return page if contract is None else contract.promoted(stream, after, page)

    def encoded(self, wire: Wire, stream: Stream, after: int) -> bytes | None:
        """The step from `after` to the tail in one wire form, made once for all who take it now."""
        if self.step_stream is stream and self.step_from == after and self.step_to == stream.visible:
            found = self.step.get(wire.form)
            if found is not None and not stream.visible_closed:
                return found
        page = self.try_page(stream, after, None)
        if page is None or page.next_entry < stream.visible:
            return None
        closed = stream.visible_closed
        cursor = next_cursor(None, self.now_s())
        encoded = wire.encode(
            payload_of(stream, page), stream.offset(stream.visible), cursor, up_to_date=True, closed=closed
        )
        if not closed:
            if self.step_stream is not stream or self.step_from != after or self.step_to != stream.visible:
                self.step_stream, self.step_from, self.step_to = stream, after, stream.visible
                self.step = {}
            self.step[wire.form] = encoded
        return encoded


def payload_of(stream: Stream, page: Page) -> bytes:
    """A batch as one event's data: an array on JSON streams, else the bytes one after the other."""
    if stream.json:
        return b"[" + b",".join(page.parts) + b"]"
    return b"".join(page.parts)
