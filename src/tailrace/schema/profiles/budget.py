"""How many fine keys may be worked out now. Running out costs precision, never a wake-up."""

from __future__ import annotations

from typing import Final

from tailrace.common.clock import Clock
from tailrace.schema.profiles.profiles_touch_config import TouchConfig

COARSE_ONLY_FACTOR: Final = 4  # times the lag at which fine keys are restricted


class FineBudget:
    """Tokens by time and by batch; a stream that is far behind gets fewer of them."""

    def __init__(self, config: TouchConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._tokens = float(config.fine_burst_tokens)
        self._filled = clock.monotonic()
        self._batch = config.fine_touch_budget_per_batch
        self.mode = "fine"

    def begin_batch(self, lag: int) -> None:
        config = self._config
        degrade = config.lag_degrade_fine_touches_at_source_offsets
        if lag > degrade * COARSE_ONLY_FACTOR:
            self.mode = "coarseOnly"
        elif lag > degrade:
            self.mode = "restricted"
        elif lag <= config.lag_recover_fine_touches_at_source_offsets:
            self.mode = "fine"
        now = self._clock.monotonic()
        earned = (now - self._filled) * config.fine_tokens_per_second
        self._tokens = min(float(config.fine_burst_tokens), self._tokens + earned)
        self._filled = now
        if self.mode == "fine":
            self._batch = config.fine_touch_budget_per_batch
        else:
            reserved = config.lag_reserved_fine_touch_budget_per_batch
            self._batch = reserved if self.mode == "restricted" else 0

    def take(self, keys: int) -> bool:
        """Whether that many fine keys may be worked out."""
        if keys > self._batch or keys > self._tokens:
            return False
        self._batch -= keys
        self._tokens -= keys
        return True
