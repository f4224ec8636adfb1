"""How long to wait before the next try, and when to stop trying."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from tailrace.client.arguments import check_integer, check_seconds

# These answers promise that nothing was changed, so that even an append may be sent again.
NOT_APPLIED_STATUSES = frozenset({429, 507})
# These may hide a request that took effect; only repeatable requests are sent again after them.
TRANSIENT_STATUSES = frozenset({408, 500, 502, 503, 504})


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """The patience of a client: exponential delays with jitter, bounded in number and in time."""

    attempts_max: int = 6
    delay_s_first: float = 0.1
    delay_s_max: float = 5.0
    elapsed_s_max: float = 60.0

    def __post_init__(self) -> None:
        check_integer("attempts_max", self.attempts_max, least=1)
        for name in ("delay_s_first", "delay_s_max", "elapsed_s_max"):
            check_seconds(name, getattr(self, name), may_be_zero=True)


class Backoff:
    """The delays of one operation. `reset` after progress starts them anew."""

    __slots__ = ("_attempts", "_attempts_max", "_elapsed_s_max", "_monotonic", "_retries", "_started")

    def __init__(
        self,
        retries: Retries,
        *,
        attempts_max: int | None = None,
        elapsed_s_max: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retries = retries
        self._attempts_max = retries.attempts_max if attempts_max is None else attempts_max
        self._elapsed_s_max = retries.elapsed_s_max if elapsed_s_max is None else elapsed_s_max
        self._monotonic = monotonic
        self._attempts = 0
        self._started = 0.0

    @property
    def attempts(self) -> int:
        """Failed attempts since the start or the last progress."""
        return self._attempts

    def reset(self) -> None:
        self._attempts = 0

    def next_delay(self, retry_after_s: float | None = None) -> float | None:
        """Seconds to wait before the next attempt, or None if it is time to give up."""
        now = self._monotonic()
        if self._attempts == 0:
            # Patience is counted from the first failure: a stream may have been idle for hours before it.
            self._started = now
        self._attempts += 1
        if self._attempts >= self._attempts_max:
            return None
        ceiling = min(
            self._retries.delay_s_max, self._retries.delay_s_first * 2 ** min(self._attempts - 1, 30)
        )
        # Half of the delay is random: clients that failed together do not come back together.
        delay = ceiling * (0.5 + random.random() / 2)  # noqa: S311 - jitter, not a secret
        if retry_after_s is not None:
            # The server's word is a lower bound; the jitter goes on top of it.
            delay += retry_after_s
        if now + delay - self._started > self._elapsed_s_max:
            return None
        return delay


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `Retry-After`, which is a number or a date; None if there is none to understand."""
    text = headers.get("retry-after")
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
