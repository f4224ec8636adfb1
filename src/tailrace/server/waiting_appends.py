"""Appends that the log has no room for yet: they wait, in order, for as long as `append_wait_ms`.

A queue and not a refusal: clients that retry send their bodies again, in any order. The body is held once, as
it was received; it is cut and checked when there is room for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.log import Log
from tailrace.routing import responses

# How often requests are looked for that have waited too long.
WAIT_CHECK_S = 0.1
# Bodies that are let in during one turn of the loop: those of others are not to wait for many of them.
TURN_BYTES = 4 * 1024 * 1024

AppendHandler = Callable[[Exchange], None]


class WaitingAppends:
    """One queue for all streams: all of them wait for the same journal and the same memory."""

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._loop = loop
        self._wait_s = log.limits.append_wait_ms / 1000
        self._queue: deque[tuple[float, Exchange, AppendHandler, LogBackpressureError]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._turn_scheduled = False
        self._letting_in = False
        self.bytes = 0  # of bodies that wait
        self.waited = 0  # requests that have, or do

    @property
    def count(self) -> int:
        return len(self._queue)

    @property
    def holds_back(self) -> bool:
        """Whether a request that has just come has others before it."""
        return bool(self._queue) and not self._letting_in

    def add(self, exchange: Exchange, handle: AppendHandler, lack: LogBackpressureError) -> None:
        """Has `handle` called when there is room, or raises `lack` if this one cannot wait."""
        if not self._wait_s or not exchange.hold_body():
            raise lack
        self.waited += 1
        self.bytes += len(exchange.body)
        self._queue.append((self._loop.time() + self._wait_s, exchange, handle, lack))
        self._log.on_room = self._schedule_turn
        if self._timer is None:
            self._timer = self._loop.call_later(WAIT_CHECK_S, self._expire)
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Lets in what there is room for, from the front."""
        self._turn_scheduled = False
        left_bytes = TURN_BYTES
        while self._queue and left_bytes > 0:
            deadline, exchange, handle, lack = self._queue[0]
            size = len(exchange.body)
            if not exchange.answered and not self._log.has_room(lack.stream, size):
                return
            self._remove_first()
            left_bytes -= size
            again = self._let_in(exchange, handle)
            if again is not None:
                self._put_back(deadline, exchange, handle, again)
                return
        if self._queue:
            self._schedule_turn()

    def _let_in(self, exchange: Exchange, handle: AppendHandler) -> LogBackpressureError | None:
        """The answer is what there is still no room in: the stream, which is not known before."""
        found: list[LogBackpressureError] = []

        def attempt(exchange: Exchange) -> None:
            try:
                handle(exchange)
            except LogBackpressureError as lack:
                found.append(lack)

        self._letting_in = True
        try:
            exchange.run(attempt)
        finally:
            self._letting_in = False
        return found[0] if found else None

    def _remove_first(self) -> Exchange:
        exchange = self._queue.popleft()[1]
        self.bytes -= len(exchange.body)
        exchange.release_body()
        if not self._queue:
            self._log.on_room = None
        return exchange

    def _put_back(
        self, deadline: float, exchange: Exchange, handle: AppendHandler, lack: LogBackpressureError
    ) -> None:
        if not exchange.hold_body():
            responses.respond_error(exchange, lack)
            return
        self.bytes += len(exchange.body)
        self._queue.appendleft((deadline, exchange, handle, lack))
        self._log.on_room = self._schedule_turn

    def _expire(self) -> None:
        """All wait for the same time, so the first is the first that has waited too long."""
        self._timer = None
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            lack: TailraceError = self._queue[0][3]
            responses.respond_error(self._remove_first(), lack)
        if self._queue:
            self._timer = self._loop.call_later(WAIT_CHECK_S, self._expire)
            self._schedule_turn()
