"""A look now and then at what costs more than it should: slow matching, many subscriptions, many replays.

Each kind is told at most once in a while, with hashes and shapes in place of what people ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from tailrace.watch.change import Change
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.syntax import expression_shape

if TYPE_CHECKING:
    from tailrace.watch.realtime.subscription import Subscription
    from tailrace.watch.realtime.watched import WatchedCollection

samples_logger = logging.getLogger("tailrace.watch.samples")

SAMPLE_INTERVAL_S: Final = 10.0
SLOW_S: Final = 0.001
SAMPLE_S: Final = 0.01  # that measuring candidates once more may take
MANY_SUBSCRIPTIONS: Final = 50
REPLAYS_S: Final = 600.0
REPLAYS_MANY: Final = 3
REPLAYS_KEPT: Final = 10_000


class CostSampler:
    """Owned by the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told_at: dict[str, float] = {}
        self._replays: dict[bytes, deque[float]] = {}
        self.slow = 0

    def _may_tell(self, kind: str) -> bool:
        now = self._loop.time()
        if now - self._told_at.get(kind, -SAMPLE_INTERVAL_S) < SAMPLE_INTERVAL_S:
            return False
        self._told_at[kind] = now
        return True

    def matched(self, watched: WatchedCollection, change: Change, seconds: float) -> None:
        if seconds < SLOW_S:
            return
        self.slow += 1
        if self._may_tell("slow"):
            slowest, slowest_ms = _slowest(watched, change)
            samples_logger.info(
                "matching a change of %s/%s took %.1f ms; slowest predicate %s, %.2f ms",
                *(watched.database, watched.name, seconds * 1000, slowest, slowest_ms),
            )

    def subscribed(self, subscription: Subscription) -> None:
        session, whole = subscription.session, subscription.interest.whole
        if len(session.subscriptions) > MANY_SUBSCRIPTIONS and self._may_tell("many"):
            samples_logger.info("connection %s has %d subscriptions", session.id, len(session.subscriptions))
        if not whole.branches and subscription.query.parts and self._may_tell("scan"):
            shapes = " && ".join(expression_shape(part.node) for part in subscription.query.parts)[:500]
            samples_logger.info(
                "predicate %s of %s/%s is looked at for every change: %s",
                *(whole.hash.hex()[:16], subscription.watched.database, subscription.watched.name, shapes),
            )

    def replayed(self, subscription: Subscription) -> None:
        """A resume: a client that comes back all the time has trouble that it may not know of."""
        now = self._loop.time()
        key = subscription.query_hash + subscription.id.encode()
        times = self._replays.pop(key, None) or deque[float](maxlen=REPLAYS_MANY + 1)
        times.append(now)
        self._replays[key] = times
        while len(self._replays) > REPLAYS_KEPT:
            del self._replays[next(iter(self._replays))]
        if len(times) > REPLAYS_MANY and now - times[0] <= REPLAYS_S and self._may_tell("replays"):
            samples_logger.info(
                "subscription %s of %s/%s was resumed %d times in 10 minutes",
                subscription.id,
                subscription.watched.database,
                subscription.watched.name,
                len(times),
            )


def _slowest(watched: WatchedCollection, change: Change) -> tuple[str, float]:
    """Which candidate took longest, measured once more: that much is only done for a sample."""
    worst = ("none", 0.0)
    until = time.perf_counter() + SAMPLE_S
    for interest in watched.matcher.candidates_of(change):
        begun = time.perf_counter()
        if begun >= until:
            break
        try:
            interest.event(change)
        except CostExceededError:
            pass
        spent_ms = (time.perf_counter() - begun) * 1000
        if spent_ms > worst[1]:
            worst = (interest.whole.hash.hex()[:16], spent_ms)
    return worst
