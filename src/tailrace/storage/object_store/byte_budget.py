"""A bound on the bytes that are held at once, for coroutines: whoever would exceed it waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class ByteBudget:
    """First come, first served. Something larger than everything is let in alone."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def has_room(self, size: int) -> bool:
        """Whether so many bytes could be held at once, without waiting."""
        return not self._waiting and self.held + size <= self.bytes_max

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncGenerator[None]:
        size = min(size, self.bytes_max)
        if not self.has_room(size):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(size)
                raise
        else:
            self.held += size
        try:
            yield
        finally:
            self._release(size)

    def _release(self, size: int) -> None:
        self.held -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self.held + wanted <= self.bytes_max:
                self._waiting.popleft()
                self.held += wanted
                turn.set_result(None)
            else:
                break
