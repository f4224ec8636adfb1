"""One at a time for each stream: whoever changes its manifest keeps others of this process out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class StreamLocks:
    """Locks by stream id; nothing is kept for a stream that nobody works on."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, stream_id: str) -> AsyncGenerator[None]:
        lock = self._locks.setdefault(stream_id, asyncio.Lock())
        self._users[stream_id] = self._users.get(stream_id, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[stream_id] -= 1
            if not self._users[stream_id]:
                del self._users[stream_id], self._locks[stream_id]
