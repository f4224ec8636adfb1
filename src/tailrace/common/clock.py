"""The only source of time, so that tests can control it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall time, nanoseconds since 1970 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards, for durations and deadlines."""
        ...


class SystemClock:
    """The machine's clocks, bound once: `now_ns` is on the append path."""

    now_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, start_ns: int = 1_767_225_600_000_000_000) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic(self) -> float:
        return self._now_ns / 1e9

    def advance(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)


SYSTEM_CLOCK: Clock = SystemClock()
