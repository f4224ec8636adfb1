"""Removal of expired streams: one timer for the next deadline, and a periodic search of the hot store."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

from tailrace.log.model import Stream
from tailrace.log.transaction import ignore_reply

if TYPE_CHECKING:
    from tailrace.log.log import Log

# Deadlines are exact on access; the removal of streams without access may lag by this much.
EXPIRY_LAG_S = 0.25
STORE_SWEEP_S = 60.0
SWEEP_COUNT_MAX = 500


class Expiry:
    """Removes expired streams without waiting for an access, to free their space and their ancestors."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._deadlines: list[tuple[int, int]] = []  # (ns, stream number), a heap
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._stored_timer: asyncio.TimerHandle | None = None
        self._stored_seen = (-(2**63), 0)  # deadline and number up to which the hot store was searched

    def recovered(self) -> None:
        """Schedules the deadlines of streams that the journal replay has loaded."""
        for stream in list(self._log.streams.by_number.values()):
            stream.extend_window()
            self.loaded(stream)
        self.sweep_stored()

    def loaded(self, stream: Stream) -> None:
        deadline_ns = stream.deadline_ns()
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, stream.number))
            self._arm()

    def stop(self) -> None:
        for timer in (self._timer, self._stored_timer):
            if timer is not None:
                timer.cancel()

    def _arm(self) -> None:
        deadline_ns = self._deadlines[0][0]
        if self._timer is not None:
            if self._timer_ns <= deadline_ns:
                return
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - self._log.clock.now_ns()) / 1e9) + EXPIRY_LAG_S
        self._timer_ns = deadline_ns
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(delay_s, 3600.0), self.sweep)

    def sweep(self) -> None:
        self._timer = None
        log = self._log
        now_ns = log.clock.now_ns()
        budget = SWEEP_COUNT_MAX
        while self._deadlines and self._deadlines[0][0] <= now_ns and budget:
            budget -= 1
            _, number = heapq.heappop(self._deadlines)
            stream = log.streams.get(number)
            if stream is None or stream.removed or stream.gone:
                continue
            if log.refusal is None and stream.expired(now_ns):
                log.remove(stream, "expired", ignore_reply, None)
                continue
            deadline_ns = stream.deadline_ns()
            if deadline_ns is not None:
                # Renewed, or in use by a live reader: check again later.
                heapq.heappush(self._deadlines, (max(deadline_ns, now_ns + 1_000_000_000), number))
        if self._deadlines:
            self._arm()

    def sweep_stored(self) -> None:
        """Removes expired streams that are not in memory, by their deadline in the hot store."""
        log = self._log
        now_ns = log.clock.now_ns()
        delay_s = STORE_SWEEP_S
        # Rows stay until the next checkpoint, so the search continues after those already handled.
        found = (
            log.store.db.deadlines_after(*self._stored_seen, SWEEP_COUNT_MAX) if log.refusal is None else []
        )
        for deadline_ns, number in found:
            if deadline_ns > now_ns:
                delay_s = min(delay_s, (deadline_ns - now_ns) / 1e9 + EXPIRY_LAG_S)
                break
            self._stored_seen = (deadline_ns, number)
            # If it was renewed, loading it has put its current deadline on the heap.
            stream = log.streams.get(number)
            if stream is not None and not stream.gone and stream.expired(now_ns):
                log.remove(stream, "expired", ignore_reply, None)
        else:
            if found:
                delay_s = EXPIRY_LAG_S
        if self._stored_timer is not None:
            self._stored_timer.cancel()
        self._stored_timer = asyncio.get_running_loop().call_later(delay_s, self.sweep_stored)
