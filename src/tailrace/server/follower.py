"""One live reader: catches up page by page, then waits at the stream's tail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tailrace.auth import ANONYMOUS
from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.offsets import next_cursor
from tailrace.server.live_wires import FollowerTransport

if TYPE_CHECKING:
    from tailrace.server.live import LiveReaders


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
