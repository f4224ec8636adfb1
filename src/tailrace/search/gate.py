"""How many searches run at once, and how many may wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.common.errors import TailraceError


class ConcurrencyLimiter:
    """First come, first served. Beyond the queue a search is refused."""

    def __init__(self, running_max: int, waiting_max: int) -> None:
        self.running_max = running_max
        self._waiting_max = waiting_max
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return sum(1 for turn in self._waiting if not turn.done())

    async def enter(self, seconds_max: float) -> bool:
        """Whether it is our turn; False if it did not come in time. Who enters has to leave."""
        if self.running < self.running_max:
            self.running += 1
            return True
        if self.waiting >= self._waiting_max:
            raise TailraceError("overloaded", "too many searches are waiting; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(seconds_max):
                await turn
        except TimeoutError:
            return not turn.cancelled()  # else it was given in the same moment
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        return True

    def leave(self) -> None:
        """Hands the place to the next in the queue."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
