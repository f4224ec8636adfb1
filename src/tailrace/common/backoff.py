"""Exponential back-off between retries."""

from __future__ import annotations

import random

_EXPONENT_MAX = 64  # a longer row of failures must not overflow


def backoff_delay(
    failures: int, first: float, longest: float, *, factor: float = 2.0, jitter: float = 0.0
) -> float:
    """The delay after this many failures in a row, in the unit of `first` and `longest`.

    It is `first` after one failure and grows by `factor` up to `longest`. `jitter` is the share of it that is
    random, so that what failed together is not retried together: with 1 the delay is anything from 0 up.
    """
    delay = min(longest, first * factor ** min(failures - 1, _EXPONENT_MAX))
    return delay * (1.0 - jitter * random.random()) if jitter else delay  # noqa: S311 - no secret


class Backoff:
    """The pauses between retries of one thing."""

    __slots__ = ("_first_s", "_jitter", "_max_s", "failures")

    def __init__(self, first_s: float, max_s: float, *, jitter: float = 0.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self.failures = 0  # since the last success

    def upcoming_s(self) -> float:
        """The pause after the next failure."""
        return backoff_delay(self.failures + 1, self._first_s, self._max_s, jitter=self._jitter)

    def next_s(self) -> float:
        """Count a failure and return the pause before the next try."""
        pause_s = self.upcoming_s()
        self.failures += 1
        return pause_s

    def reset(self) -> None:
        """It works again: the next pause is short."""
        self.failures = 0
