"""How an edge reconnects to its upstreams: back-off between attempts, and the load of one that recovered.

An upstream that recovered gets its load step by step, because its caches are cold and all clients reconnect
at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

import xxhash

from tailrace.common.backoff import backoff_delay

# Back-off before a lost socket is reopened: doubled with each failure, full jitter.
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 10.0
# A socket that was open this long resets the back-off.
SETTLED_S = 10.0


class ReconnectBackoff:
    """Back-off of one follower, for sockets that are refused or closed by a healthy upstream."""

    def __init__(self) -> None:
        self._count = 0

    def record_refusal(self) -> None:
        """Counts an attempt that the upstream refused."""
        self._count += 1

    def record_close(self, open_s: float) -> bool:
        """Counts a closed socket; True if it is the first failure in a row."""
        if open_s >= SETTLED_S:
            self._count = 0
        self.record_refusal()
        return self._count == 1

    async def pause(self) -> None:
        """No pause after the first failure, then doubled each time, full jitter."""
        if self._count > 1:
            await asyncio.sleep(backoff_delay(self._count, BACKOFF_S_MIN, BACKOFF_S_MAX, jitter=1.0))


FIRST_SHARE = 0.1
RAMP_S = 10.0
# Sockets that are opened concurrently.
OPENING_MAX = 64


class LoadRamp:
    """The share of the full load that an upstream gets now."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._since = -inf

    def begin(self) -> None:
        self._since = self._time()

    @property
    def share(self) -> float:
        passed = (self._time() - self._since) / RAMP_S
        return min(1.0, FIRST_SHARE + (1.0 - FIRST_SHARE) * passed)

    def includes(self, key: str) -> bool:
        """Whether the share includes a stream; it stays included as the share grows."""
        share = self.share
        return share >= 1.0 or xxhash.xxh3_64_intdigest(key.encode(), seed=1) < share * 2**64


class OpenLimiter:
    """Limits concurrent socket openings by the ramp."""

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
                self.active += 1  # for the waiter that continues
                turn.set_result(None)
