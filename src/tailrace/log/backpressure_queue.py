"""Changes that the log has no room for: they wait, in order, for at most `append_wait_ms`.

Rejecting such a change would make clients send it again, in any order. There is one queue for all streams and
all kinds of changes, as all wait for the same journal and the same memory. While the queue is not empty,
`CommitPath` raises `LogBackpressureError` for every other change, so that it is queued as well.

A waiting change has assigned nothing: it is decided when there is room for it, on the state of that time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.commit_path import CommitPath, LogBackpressureError

# How often changes that have waited too long are expired.
WAIT_CHECK_S = 0.1
# Bytes admitted in one iteration of the event loop, so that other requests are not delayed.
SLICE_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


def _never() -> bool:
    return False


class WaitingChange(msgspec.Struct, eq=False):
    """A change in the queue. Exactly one of `make` and `refuse` ends its wait."""

    size: int  # bytes that it holds in memory
    make: Callable[[], None]  # raises LogBackpressureError if there is no room, else ends the wait
    refuse: Callable[[TailraceError], None]
    is_cancelled: Callable[[], bool] = _never  # its client is gone: `make` has no effect
    deadline_s: float = 0.0


class BackpressureQueue:
    """The waiting changes of one log. Owned by the loop thread."""

    def __init__(self, log: CommitPath, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._loop = loop
        self._wait_s = log.limits.append_wait_ms / 1000
        self._queue: deque[tuple[WaitingChange, LogBackpressureError]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._admission_scheduled = False
        self.bytes = 0  # held by the queued changes
        self.waited = 0  # changes queued so far

    @property
    def count(self) -> int:
        return len(self._queue)

    def add(self, change: WaitingChange, shortage: LogBackpressureError) -> None:
        """Makes the change when there is room; raises `shortage` if it cannot wait."""
        if not self._wait_s or not self._may_wait(change, shortage):
            raise shortage
        self.waited += 1
        self.bytes += change.size
        change.deadline_s = self._loop.time() + self._wait_s
        self._queue.append((change, shortage))
        self._log.on_room = self._schedule_admission
        if self._timer is None:
            self._timer = self._loop.call_later(WAIT_CHECK_S, self._expire)
        self._schedule_admission()

    def call(
        self,
        make: Callable[[], object],
        refuse: Callable[[TailraceError], None],
        is_cancelled: Callable[[], bool] = _never,
    ) -> None:
        """Calls `make` now, or when there is room for its change; `refuse` gets the error if it fails."""

        def attempt() -> None:
            try:
                make()
            except LogBackpressureError:
                raise
            except TailraceError as error:
                refuse(error)

        try:
            attempt()
        except LogBackpressureError as shortage:
            try:
                self.add(WaitingChange(shortage.size, attempt, refuse, is_cancelled), shortage)
            except LogBackpressureError:
                refuse(shortage)

    async def submit(self, make: Callable[[], T]) -> T:
        """As `call`, for coroutines: returns or raises what `make` does, without a pause if there is room."""
        done: asyncio.Future[T] = self._loop.create_future()

        def attempt() -> None:
            if done.done():
                return  # the waiting task was cancelled
            try:
                made = make()
            except LogBackpressureError:
                raise
            except Exception as error:  # noqa: BLE001 - raised in the waiting task
                done.set_exception(error)
            else:
                done.set_result(made)

        def refuse(error: TailraceError) -> None:
            if not done.done():
                done.set_exception(error)

        self.call(attempt, refuse, done.done)
        return await done

    def _may_wait(self, change: WaitingChange, shortage: LogBackpressureError) -> bool:
        """Whether the queue has memory for the change, and the log can ever have room for it."""
        limits = self._log.limits
        size_max = limits.append_queue_max_bytes
        if shortage.stream is not None:
            size_max = min(size_max, limits.append_queue_stream_bytes)
        return shortage.size <= size_max and self.bytes + change.size <= limits.append_queue_max_bytes

    def _schedule_admission(self) -> None:
        if not self._admission_scheduled:
            self._admission_scheduled = True
            self._loop.call_soon(self._admit_queued)

    def _admit_queued(self) -> None:
        """Makes changes from the front of the queue while there is room."""
        self._admission_scheduled = False
        left_bytes = SLICE_BYTES
        while self._queue and left_bytes > 0:
            change, shortage = self._queue[0]
            size = max(change.size, shortage.size)
            if not change.is_cancelled() and not self._log.has_room(shortage.stream, size):
                return
            left_bytes -= size
            if not self._make_first(change):
                return
        if self._queue:
            self._schedule_admission()

    def _make_first(self, change: WaitingChange) -> bool:
        """Makes the first change; False if there is no room for it, which only its decision shows."""
        self._log.admitting = True
        try:
            change.make()
        except LogBackpressureError as shortage:
            self._queue[0] = change, shortage
            return False
        except BaseException:
            self._remove_first()
            raise
        finally:
            self._log.admitting = False
        self._remove_first()
        return True

    def _remove_first(self) -> None:
        change, _ = self._queue.popleft()
        self.bytes -= change.size
        if not self._queue:
            self._log.on_room = None

    def _expire(self) -> None:
        """All changes wait equally long, so the first in the queue expires first."""
        self._timer = None
        now_s = self._loop.time()
        while self._queue and self._queue[0][0].deadline_s <= now_s:
            change, shortage = self._queue[0]
            self._remove_first()
            change.refuse(shortage)
        if self._queue:
            self._timer = self._loop.call_later(WAIT_CHECK_S, self._expire)
            self._schedule_admission()
