"""Live readers: server-sent events and WebSockets that follow a stream's tail.

A follower first catches up page by page, then waits in the stream's list. When something is published each
wire form is encoded once and the same bytes go to everybody who was at the same place. A follower whose
socket does not keep up is not written to until it has drained, and then reads on from the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.contracts import Contracts
from tailrace.api.follower import Follower, payload_of
from tailrace.api.live_wires import SseWire, Wire, WsWire
from tailrace.api.origins import Origins
from tailrace.api.read_request import ReadRequest
from tailrace.auth import Action, Identity, is_hub, may
from tailrace.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.net.http1 import Exchange
from tailrace.net.live_wires import WsReader
from tailrace.protocol.content_types import is_text
from tailrace.protocol.cursor import next_cursor
from tailrace.protocol.sse import EVENT_STREAM

TICK_S = 1.0


class Live:
    """All live connections: admission, shared encodings, one timer for keep-alives and rotation."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._limits = context.limits
        self.loop = context.loop
        self._origins = Origins(context.settings)
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

    def open_sse(self, exchange: Exchange, request: ReadRequest, identity: Identity) -> None:
        stream = request.stream
        rotation_s = self._limits.sse_rotation_ms / 1000 * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load
        follower = self._open(request, rotation_s, identity)
        text = is_text(stream.content_type)
        head = EVENT_STREAM
        if not text:
            head += b"Stream-SSE-Data-Encoding: base64\r\n"
        head += answers.earliest(stream) + request.start_line
        outlet = exchange.open_stream(200, head)
        outlet.on_gone = follower.gone
        outlet.on_drain = follower.on_drain
        follower.start(SseWire(outlet, text))

    def open_ws(self, exchange: Exchange, request: ReadRequest, identity: Identity) -> None:
        if not exchange.wants_websocket():
            raise TailraceError(
                "upgrade_required", "live=ws needs a WebSocket upgrade", headers=(("Upgrade", "websocket"),)
            )
        self._origins.check(exchange)
        follower = self._open(request, None, identity)
        wire = WsWire(is_text(request.stream.content_type))
        try:
            wire.attach(
                exchange.upgrade_websocket(WsReader(follower), request.start_line, message_bytes=1024)
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
            if is_hub(name) and not may(follower.identity, Action.READ_STREAM, stream=name):
                follower.finish(1008)

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
