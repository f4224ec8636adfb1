"""Cursors keep shared caches from serving one stale live answer for ever."""

from __future__ import annotations

import math
import random

CURSOR_ORIGIN_S = 1_728_432_000  # 2024-10-09T00:00:00Z
CURSOR_INTERVAL_S = 20
CURSOR_JITTER_S_MAX = 3600


def next_cursor(requested: str | None, now_s: float) -> str:
    """The interval number, or something greater than what the client sent."""
    interval = int((now_s - CURSOR_ORIGIN_S) // CURSOR_INTERVAL_S)
    if requested is None or not requested.isascii() or not requested.isdigit() or len(requested) > 18:
        return str(interval)
    current = int(requested)
    if current < interval:
        return str(interval)
    jitter_s = random.randint(1, CURSOR_JITTER_S_MAX)  # noqa: S311 - spreads cache keys, guards nothing
    return str(current + max(1, math.ceil(jitter_s / CURSOR_INTERVAL_S)))
