"""How an upstream that came back is given its load again: a little at first, all of it after a while.

What has just started is slow: its caches are empty, and everybody wants to come back at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

import xxhash

FIRST_SHARE = 0.1
RAMP_S = 10.0
# Sockets that are opened at a time.
OPENING_MAX = 64


class LoadRamp:
    """The share of its usual load that an upstream is given now."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._since = -inf

    def begin(self) -> None:
        self._since = self._time()

    @property
    def share(self) -> float:
        passed = (self._time() - self._since) / RAMP_S
        return min(1.0, FIRST_SHARE + (1.0 - FIRST_SHARE) * passed)

    def takes(self, key: str) -> bool:
        """Whether a stream is among those it is given already; once it is, it stays."""
        share = self.share
        return share >= 1.0 or xxhash.xxh3_64_intdigest(key.encode(), seed=1) < share * 2**64


class OpenLimiter:
    """Turns to open a socket: so many at a time, and fewer at first."""

    def __init__(self, ramp: LoadRamp) -> None:
        self._ramp = ramp
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.active = 0

    @property
    def allowed(self) -> int:
        return max(1, int(OPENING_MAX * self._ramp.share))

    async def __aenter__(self) -> None:
        if self.active < self.allowed and not self._waiting:
            self.active += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self.active -= 1
        while self._waiting and self.active < self.allowed:
            turn = self._waiting.popleft()
            if not turn.done():
                self.active += 1  # on behalf of whoever is let in
                turn.set_result(None)
