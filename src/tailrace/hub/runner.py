"""Runs hub effects on connections and on the log, and gives decisions read access to the hub's streams."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from tailrace.auth import Identity
from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.http.websocket import WebSocketConnection
from tailrace.hub import decide, session_lifecycle
from tailrace.hub.effects import (
    Append,
    AppendOutcome,
    Close,
    CreateStream,
    Defer,
    DeleteStream,
    Effect,
    ListStreams,
    Read,
    ReadResult,
    ResumeReading,
    Send,
    SendMany,
    StreamSummary,
)
from tailrace.hub.session import Session
from tailrace.hub.state import Hub
from tailrace.log import records
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.decide import AppendRequest, CreateRequest, offset_gone, resolve_position
from tailrace.log.history import MissingBlock
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.reader import Page
from tailrace.log.transaction import Transaction, ignore_reply
from tailrace.protocol import offsets
from tailrace.routing.context import Context

JSON_TYPE: Final = "application/json"
DAY_S: Final = 24 * 3600
PAGE_ENTRIES: Final = 1000
PAGE_BYTES: Final = 1024 * 1024
MISSING_NAMES_MAX: Final = 100_000

# Streams for operators have a retention; messages that actors still need do not.
STREAM_LIFETIMES: Final = {
    "hub/dead-letters": Lifetime(retention_s=30 * DAY_S, retention_bytes=1024**3),
    "hub/audit": Lifetime(retention_s=90 * DAY_S),
    "hub/trace": Lifetime(retention_s=7 * DAY_S),
    # Active records are rewritten once or twice a day.
    "hub/registry": Lifetime(retention_s=30 * DAY_S),
    "hub/subscriptions": Lifetime(retention_s=30 * DAY_S),
    "hub/cursors/0": Lifetime(retention_s=7 * DAY_S),
}


class LogStreams:
    """The hub's access to the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # Missing names. Only the hub creates streams under `hub/`, so the cache stays correct and saves
        # disk reads.
        self._absent: set[str] = set()

    def find(self, name: str) -> Stream | None:
        if name in self._absent:
            return None
        stream = self._log.find(name)
        if stream is None:
            if len(self._absent) >= MISSING_NAMES_MAX:
                self._absent.clear()
            self._absent.add(name)
            return None
        return None if stream.gone or stream.visible < 0 else stream

    def tail(self, stream: str) -> int | None:
        found = self.find(stream)
        return None if found is None else found.visible

    def earliest(self, stream: str) -> int:
        found = self.find(stream)
        return 0 if found is None else found.earliest

    def created_ms(self, stream: str) -> int:
        found = self.find(stream)
        return 0 if found is None else found.created_ns // 1_000_000

    def size_bytes(self, stream: str) -> int:
        found = self.find(stream)
        return 0 if found is None else found.size_bytes

    def offset(self, stream: str, entry: int) -> str:
        found = self.find(stream)
        return (
            offsets.encode_offset(self._log.streams.first_epoch, entry)
            if found is None
            else found.offset(entry)
        )

    def resolve(self, stream: str, offset: str) -> int:
        position = offsets.parse_offset(offset)
        found = self.find(stream)
        if found is None:
            if position[1] == 0:
                return 0
            raise TailraceError("offset_beyond_tail", "the offset is past the end of the stream")
        return resolve_position(found, position, found.earliest)

    def names(self, prefix: str, after: str, limit: int) -> list[StreamSummary]:
        """The next streams by name, without loading them."""
        return [
            StreamSummary(
                stream.name,
                stream.earliest,
                stream.visible,
                stream.size_bytes,
                stream.created_ns // 1_000_000,
                stream.last_ns // 1_000_000,
            )
            for stream in list_streams(self._log, after or prefix, prefix, limit, system=True)
        ]

    def get_or_create(self, name: str) -> Stream:
        """The stream to append to, created if missing."""
        self._absent.discard(name)
        stream = self._log.find(name)
        if stream is None:
            self._log.create(
                CreateRequest(name, JSON_TYPE, STREAM_LIFETIMES.get(name, NO_LIFETIME)), ignore_reply, None
            )
            stream = self._log.find(name)
            assert stream is not None
        if stream.gone:
            raise TailraceError("unavailable", "the stream is deleted and still has forks")
        return stream

    def try_read(self, stream: Stream, after: int, entries_max: int, bytes_max: int) -> ReadResult | None:
        """A page, if all of it is in memory."""
        if after < stream.earliest:
            return ReadResult(error=offset_gone(stream, stream.earliest))
        page = self._log.reader.try_read_labelled(stream, after, bytes_max, entries_max)
        return None if isinstance(page, MissingBlock) else _read_result(page)

    async def read(
        self, stream: Stream, after: int, entries_max: int, bytes_max: int, since_ns: int | None
    ) -> ReadResult:
        """A page, from memory, disk or object store."""
        try:
            if since_ns is not None:
                after = max(stream.earliest, await self._log.reader.find_before(stream, since_ns))
            if after < stream.earliest:
                raise offset_gone(stream, stream.earliest)
            return _read_result(await self._log.reader.read_labelled(stream, after, bytes_max, entries_max))
        except TailraceError as error:
            return ReadResult(error=error)

    async def read_all(self, name: str) -> AsyncIterator[bytes]:
        """Every entry of a stream, at start-up."""
        stream = self.find(name)
        if stream is None:
            return
        after = stream.earliest
        while after < stream.visible:
            page = await self._log.reader.read_labelled(stream, after, PAGE_BYTES, PAGE_ENTRIES)
            for part in page.parts:
                yield bytes(part)
            after = page.next_entry


def _read_result(page: Page) -> ReadResult:
    assert page.labels is not None
    numbers = page.entries()
    entries = zip(numbers, page.labels.times, page.parts, strict=True)
    return ReadResult(
        tuple((number, time_ns, bytes(part)) for number, time_ns, part in entries), page.next_entry
    )


logger = logging.getLogger("tailrace.hub")

TICK_S: Final = 1.0
FLUSH_S: Final = 0.2
RECONNECT_MS_MAX: Final = 30_000
# Failpoint names by the second segment of the stream name.
FAILPOINT_BY_STREAM: Final = {
    "mbox": "message",
    "topic": "message",
    "broadcast": "message",
    "cursors": "cursor",
    "dead-letters": "letter",
    "registry": "registration",
    "subscriptions": "subscription",
}


class EffectRunner:
    """Owned by the loop thread. Effects run in the order of their requests."""

    def __init__(
        self, context: Context, hub: Hub, streams: LogStreams, on_bounds: Callable[[], None]
    ) -> None:
        """`on_bounds` is called when a stream may be trimmed."""
        self._context = context
        self._log = context.log
        self.now_ns = context.clock.now_ns
        self.relay_seconds = context.telemetry.hub_relay_seconds
        self._commit_wait_seconds = context.telemetry.hub_commit_wait_seconds
        self._monotonic = time.monotonic
        self.hub = hub
        self._streams = streams
        self.connections: dict[Session, WebSocketConnection] = {}
        self._queue: deque[Effect] = deque()
        self._running = False
        self._settling = False  # append outcomes are in, and their effects have not run
        self._tasks = TaskSet()
        self._tick: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._on_bounds = on_bounds

    # -- time ------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def start(self) -> None:
        self._tick = self._context.loop.call_later(TICK_S, self._on_tick)

    def stop(self) -> None:
        for timer in (self._tick, self._flush):
            if timer is not None:
                timer.cancel()
        self._tick = self._flush = None
        self._tasks.cancel()

    def _on_tick(self) -> None:
        self._tick = self._context.loop.call_later(TICK_S, self._on_tick)
        try:
            self.run(decide.tick(self.hub, self.now_ms()))
        except Exception:
            logger.exception("hub tick failed")

    def _on_flush(self) -> None:
        self._flush = None
        decide.flush(self.hub)
        self.run(decide.collect_effects(self.hub, self.now_ms()))

    def shut_down(self) -> None:
        """Notifies all clients when to reconnect, at random delays."""
        delays = {
            session_id: random.randint(0, RECONNECT_MS_MAX)  # noqa: S311 - spreads load
            for session_id in self.hub.sessions
        }
        session_lifecycle.disconnect_all(self.hub, delays, self.now_ms())
        decide.flush(self.hub)
        self.run(decide.collect_effects(self.hub, self.now_ms()))

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """Disconnects sessions with revoked identities, and returns their number."""
        now_ms = self.now_ms()
        lost = session_lifecycle.disconnect_revoked(self.hub, is_valid, now_ms)
        self.run(decide.collect_effects(self.hub, now_ms))
        return lost

    # -- effects ---------------------------------------------------------------------------------------

    def run(self, effects: list[Effect]) -> None:
        """Runs effects in order; effects of callbacks come after those queued before."""
        queue, connections = self._queue, self.connections
        queue.extend(effects)
        if self._running:
            return
        self._running = True
        try:
            while queue:
                effect = queue.popleft()
                if type(effect) is not Send:
                    self._carry_out(effect)
                    continue
                # Most effects: inlined.
                session, frame = effect.session, effect.frame
                connection = connections.get(session)
                if connection is not None:
                    connection.send_text(frame)
                session.outbox.written(len(frame))
        finally:
            self._running = False
        if self.hub.has_unflushed and self._flush is None and self._tick is not None:
            self.hub.has_unflushed = False
            self._flush = self._context.loop.call_later(FLUSH_S, self._on_flush)

    def _carry_out(self, effect: Effect) -> None:
        if type(effect) is Append:
            self._append(effect)
        elif type(effect) is SendMany:
            self._spread(effect)
        elif type(effect) is Read:
            self._read(effect)
        elif type(effect) is Close:
            connection = self.connections.get(effect.session)
            if connection is not None:
                connection.close(effect.code, effect.reason)
        elif type(effect) is Defer:
            self._context.loop.call_soon(self._after, effect.then)
        elif type(effect) is ResumeReading:
            connection = self.connections.get(effect.session)
            if connection is not None:
                connection.resume_reading()
        elif type(effect) is CreateStream:
            self._create(effect)
        elif type(effect) is ListStreams:
            names = self._streams.names(effect.prefix, effect.after, effect.names_max)
            self._after(partial(effect.then, names))
            if self.hub.sweep.bounds:
                self._on_bounds()
        else:
            assert isinstance(effect, DeleteStream)
            self._remove(effect)

    def _spread(self, effect: SendMany) -> None:
        """Skips connections that closed after the decision."""
        connections = self.connections
        for session, frame in effect.copies:
            connection = connections.get(session)
            if connection is not None:
                connection.send_text(frame)
            session.outbox.written(len(frame))

    def _after(self, then: Callable[[int], None]) -> None:
        now_ms = self.now_ms()
        try:
            then(now_ms)
        except Exception:
            logger.exception("hub callback failed")
        self.run(decide.collect_effects(self.hub, now_ms))

    def _append(self, effect: Append) -> None:
        effect.begun_s = self._monotonic()
        if failpoints.ARMED:
            _reach_failpoint("before", effect.stream)
        try:
            self._submit(effect)
        except LogBackpressureError:
            self._log.backpressure_queue.call(
                partial(self._submit, effect),
                lambda error: self._complete_append(effect, AppendOutcome(error=error)),
            )
        except TailraceError as error:
            self._complete_append(effect, AppendOutcome(error=error))

    def _submit(self, effect: Append) -> None:
        stream = self._streams.get_or_create(effect.stream)
        if effect.producer is None and stream.lifetime is NO_LIFETIME and not stream.closed:
            # The hub's streams are JSON, and have no documents: there is nothing to decide.
            self._log.append_plain(stream, effect.body, effect.lengths, self._settled, effect, effect.key)
            return
        request = AppendRequest(
            effect.body, JSON_TYPE, effect.lengths, key=effect.key, producer=effect.producer
        )
        self._log.append(stream, request, self._settled, effect)

    def _settled(self, transaction: Transaction, error: TailraceError | None) -> None:
        effect = transaction.context
        assert isinstance(effect, Append)
        self._commit_wait_seconds.observe(self._monotonic() - effect.begun_s)
        if error is not None:
            self._complete_append(effect, AppendOutcome(error=error))
            return
        if failpoints.ARMED:
            _reach_failpoint("after", effect.stream)
        stream = transaction.subject
        assert stream is not None
        if transaction.duplicate:
            self._complete_append(effect, AppendOutcome(duplicate=True))
            return
        op = transaction.append
        if op is None:
            op = next(one for one in transaction.ops if isinstance(one, records.Append))
        self._complete_append(effect, AppendOutcome(op.first, stream.offset(op.first)))

    def _complete_append(self, effect: Append, settled: AppendOutcome) -> None:
        """One commit settles many appends: their effects run together."""
        if effect.then is None:
            return
        try:
            effect.then(settled, self.now_ms())
        except Exception:
            logger.exception("hub callback failed")
        if not self._settling:
            self._settling = True
            self._context.loop.call_soon(self._run_pending)

    def _run_pending(self) -> None:
        self._settling = False
        failpoints.reached("hub.before_publish")
        self.run(decide.collect_effects(self.hub, self.now_ms()))

    def _create(self, effect: CreateStream) -> None:
        def refuse(error: TailraceError) -> None:
            logger.warning(
                "cannot create hub stream", extra=log_fields(stream=effect.stream, error=str(error))
            )

        self._log.backpressure_queue.call(partial(self._streams.get_or_create, effect.stream), refuse)

    def _remove(self, effect: DeleteStream) -> None:
        def remove() -> None:
            if self._log.must_queue:  # an append that waits would create the stream again
                raise LogBackpressureError("other changes are waiting for room", 0)
            stream = self._log.find(effect.stream)
            if stream is not None and not stream.gone:
                self._log.remove(stream, "deleted", ignore_reply, None)

        def refuse(error: TailraceError) -> None:
            logger.warning(
                "cannot delete hub stream", extra=log_fields(stream=effect.stream, error=str(error))
            )

        self._log.backpressure_queue.call(remove, refuse)

    def _read(self, effect: Read) -> None:
        stream = self._streams.find(effect.stream)
        if stream is None:
            self._after(partial(effect.then, ReadResult(next_entry=effect.after)))
            return
        if effect.since_ns is None:
            found = self._streams.try_read(stream, effect.after, effect.entries_max, effect.bytes_max)
            if found is not None:
                self._after(partial(effect.then, found))
                return

        async def later() -> None:
            found = await self._streams.read(
                stream, effect.after, effect.entries_max, effect.bytes_max, effect.since_ns
            )
            self._after(partial(effect.then, found))

        self._tasks.start(later())


def _reach_failpoint(when: str, stream: str) -> None:
    name = FAILPOINT_BY_STREAM.get(stream.split("/")[1])
    if name is not None:
        failpoints.reached(f"hub.{when}_{name}")
