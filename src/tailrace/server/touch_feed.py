"""Feeding a stream's entries to its touches, in order and in short steps, and from the past where needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.routing.context import Context
from tailrace.schema.json_values import UnusableRecordError, decode_json_record
from tailrace.schema.profiles.touch_keys import JournalLayer
from tailrace.schema.profiles.touch_state import StaleCursor, TouchState

STEP_ENTRIES = 500
STEP_BYTES = 256 * 1024
RETRY_S = 1.0
CURSOR_TOO_OLD = "cursor is too old; rerun/re-subscribe and start from cursor"

logger = logging.getLogger("tailrace.touch")


class TouchFeed:
    """One stream whose touches somebody has asked for. It follows the stream until it is closed."""

    def __init__(
        self, context: Context, stream: Stream, state: TouchState, on_ended: Callable[[TouchFeed], None]
    ) -> None:
        self._context = context
        self._reader = context.log.reader
        self.stream = stream
        self.state = state
        self.closed = False
        self._on_ended = on_ended
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._past: asyncio.Task[None] | None = None
        stream.readers = [*(stream.readers or ()), self]

    def on_published(self, stream: Stream) -> None:
        """New entries are taken in together, once per coalescing window."""
        if stream.removed or stream.gone:
            if stream.batch is None:  # else it is not durable yet, and this is called again when it is
                self._on_ended(self)
        elif self._timer is None and self._task is None and self.behind:
            window_s = self.state.config.touch_coalesce_window_ms / 1000
            self._timer = self._context.loop.call_later(window_s, self._start)

    @property
    def behind(self) -> bool:
        return not self.closed and self.state.journal.absorbed < self.stream.visible

    def close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._task, self._past):
            if task is not None:
                task.cancel()
        readers = self.stream.readers or ()
        self.stream.readers = [other for other in readers if other is not self] or None

    async def settle(self) -> None:
        """Takes in everything that is visible now, and wakes whom it touches."""
        while self.behind:
            self._start()
            assert self._task is not None
            await asyncio.shield(self._task)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and not self.closed:
            self._task = self._context.loop.create_task(self._absorb())
            self._task.add_done_callback(self._absorbed)

    def _absorbed(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("entries of %s could not be read for touches: %s", self.stream.name, error)
            if not self.closed:
                self._timer = self._context.loop.call_later(RETRY_S, self._start)
            return
        self.on_published(self.stream)

    async def _absorb(self) -> None:
        state, stream = self.state, self.stream
        while self.behind:
            after = state.journal.absorbed
            if after < stream.earliest:
                state.skip_to(stream.visible)
                state.flush()
                return
            page = await self._reader.read(stream, after, STEP_BYTES, STEP_ENTRIES, apart=True)
            state.budget.begin_batch(stream.visible - after)
            for entry, part in zip(page.entries(), page.parts, strict=True):
                state.absorb(entry - 1, _load_record(part))
            state.flush()
            await asyncio.sleep(0)

    async def reach_back(self, cursor: int) -> None:
        """Derives touches again from the cursor on, for everybody who comes with one as old."""
        while cursor < self.state.journal.floor:
            floor = self.state.journal.floor
            if floor - cursor > self._context.limits.touch_replay_max or cursor < self.stream.earliest:
                raise StaleCursor(CURSOR_TOO_OLD)
            if self._past is None:
                self._past = self._context.loop.create_task(self._derive(cursor, floor))
                self._past.add_done_callback(self._derived)
            await asyncio.shield(self._past)

    def _derived(self, task: asyncio.Task[None]) -> None:
        self._past = None
        if not task.cancelled():
            task.exception()  # those who wait for it are told; there may be none left

    async def _derive(self, cursor: int, floor: int) -> None:
        past = JournalLayer(cursor)
        keys_max = self.state.config.memory.pending_max_keys
        after = cursor
        while after < floor:
            try:
                page = await self._reader.read(
                    self.stream, after, STEP_BYTES, min(STEP_ENTRIES, floor - after), apart=True
                )
            except TailraceError:
                raise StaleCursor(CURSOR_TOO_OLD) from None
            for entry, part in zip(page.entries(), page.parts, strict=True):
                self.state.derive(past, entry - 1, _load_record(part))
            if len(past.keys) > keys_max:
                raise StaleCursor(CURSOR_TOO_OLD)
            after = page.next_entry
            await asyncio.sleep(0)
        self.state.journal.extend_back(past, floor)
        if self.state.journal.floor > cursor:
            raise StaleCursor(CURSOR_TOO_OLD)  # so much has come meanwhile that the journal moved on


def _load_record(part: bytes | memoryview) -> object:
    try:
        return decode_json_record(part)
    except UnusableRecordError:
        return None  # older than the profile: it tells of no change
