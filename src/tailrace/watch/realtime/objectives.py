"""Service level objectives of collections, and log samples of costly matching.

Service objectives of a collection: what was promised, how fast that is used up, and what is done then.

An allowance is the share of deliveries that may be late, or of resumes that may fail, over the last minutes.
Burning it faster than one to one is told once, written down, and answered: subscriptions that can wait do.

A look now and then at what costs more than it should: slow matching, many subscriptions, many replays.

Each kind is told at most once in a while, with hashes and shapes in place of what people ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from tailrace.routing.context import Context
from tailrace.watch.cel import expression_shape
from tailrace.watch.collection import Collection, Slo
from tailrace.watch.document import Change
from tailrace.watch.evaluation_cost import CostExceededError

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway, WatchedCollection
    from tailrace.watch.realtime.subscription import Subscription


logger = logging.getLogger("tailrace.watch")

MINUTES: Final = 5
BUCKET_S: Final = 60.0
DELIVERY_ALLOWED: Final = 0.01  # a 99th percentile is a promise about the other one in a hundred
SAMPLES_MIN: Final = 20  # fewer say nothing about a share
COLLECTIONS_MAX: Final = 1000  # collections that are measured
# Reasons to begin again that are ours; all others are the client's.
SERVER_FAULT_REASONS: Final = frozenset({"gap", "stale", "generation", "retention", "too-far-behind"})

Objective = Literal["delivery", "resume", "lag", "bloom"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("delivery", "resume", "lag", "bloom")
RESUME_RATIO: Final = 0.999
BLOOM_RATIO: Final = 0.01


class BurnWindow:
    """Good and bad over the last minutes."""

    __slots__ = ("_bad", "_begun", "_total")

    def __init__(self) -> None:
        self._total = [0] * MINUTES
        self._bad = [0] * MINUTES
        self._begun = -1

    def add(self, now: float, bad: bool) -> None:
        self._turn(now)
        place = self._begun % MINUTES
        self._total[place] += 1
        self._bad[place] += bad

    def _turn(self, now: float) -> None:
        minute = int(now // BUCKET_S)
        for later in range(max(self._begun + 1, minute - MINUTES + 1), minute + 1):
            self._total[later % MINUTES] = self._bad[later % MINUTES] = 0
        self._begun = max(self._begun, minute)

    def share(self, now: float, least: int = 1) -> float:
        """Of the bad ones; none as long as there are less than `least` in all."""
        self._turn(now)
        total = sum(self._total)
        return sum(self._bad) / total if total >= least else 0.0


class CollectionObjectives:
    """One collection."""

    __slots__ = ("burning", "delivery", "resume")

    def __init__(self) -> None:
        self.delivery = BurnWindow()
        self.resume = BurnWindow()
        self.burning: set[Objective] = set()


class ServiceObjectives:
    """Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._gateway = gateway
        self._limits = context.limits
        self._measured: dict[tuple[str, str], CollectionObjectives] = {}
        self._latency = context.telemetry.watch_delivery_latency_seconds
        # Behind its source; set by who knows them.
        self.lag_ms: Callable[[Collection], float] = lambda _: 0.0
        self.lag_changes: Callable[[Collection], int] = lambda _: 0

    def _of(self, database: str, name: str) -> CollectionObjectives | None:
        key = (database, name)
        found = self._measured.get(key)
        if found is None and len(self._measured) < COLLECTIONS_MAX:
            found = self._measured[key] = CollectionObjectives()
        return found

    # -- what happens ----------------------------------------------------------------------------------

    def delivered(self, watched: WatchedCollection, committed_ms: int) -> None:
        """A change was written to the sockets of those it concerns."""
        late_ms = max(0, self._context.clock.now_ns() // 1_000_000 - committed_ms)
        self._latency.observe(late_ms / 1000)
        measured = self._of(watched.database, watched.name)
        if measured is not None:
            target_ms = self.targets(watched.collection)["delivery"]
            measured.delivery.add(self._context.loop.time(), late_ms > target_ms)

    def resumed(self, watched: WatchedCollection) -> None:
        measured = self._of(watched.database, watched.name)
        if measured is not None:
            measured.resume.add(self._context.loop.time(), bad=False)

    def resume_failed(self, database: str, name: str, reason: str) -> None:
        """Without a token of ours it is not known which collection it was about: nothing was promised."""
        measured = self._of(database, name) if name and reason in SERVER_FAULT_REASONS else None
        if measured is not None:
            measured.resume.add(self._context.loop.time(), bad=True)

    def forget(self, collection: Collection) -> None:
        self._measured.pop((collection.database, collection.name), None)

    # -- what follows from it --------------------------------------------------------------------------

    def targets(self, collection: Collection | None) -> dict[Objective, float]:
        slo = Slo() if collection is None or collection.config.slo is None else collection.config.slo
        limits = self._limits
        return {
            "delivery": limits.watch_slo_delivery_ms if slo.delivery_ms is None else slo.delivery_ms,
            "resume": RESUME_RATIO if slo.resume_ratio is None else slo.resume_ratio,
            "lag": limits.watch_slo_lag_ms if slo.lag_ms is None else slo.lag_ms,
            "bloom": BLOOM_RATIO if slo.bloom_ratio is None else slo.bloom_ratio,
        }

    def burn(self, database: str, name: str, collection: Collection | None) -> dict[Objective, float]:
        """How many times faster than allowed each allowance is used up; above 1 a promise is broken."""
        now, targets = self._context.loop.time(), self.targets(collection)
        burn = dict[Objective, float].fromkeys(OBJECTIVES, 0.0)
        if collection is not None:
            burn["lag"] = self.lag_ms(collection) / max(1.0, targets["lag"])
            burn["bloom"] = (collection.bloom_ratio or 0.0) / targets["bloom"]
        measured = self._measured.get((database, name))
        if measured is not None:
            allowed = max(1e-6, 1 - targets["resume"])
            burn["delivery"] = measured.delivery.share(now, SAMPLES_MIN) / DELIVERY_ALLOWED
            burn["resume"] = measured.resume.share(now, SAMPLES_MIN) / allowed
        return burn

    def worst(self) -> list[tuple[list[str], float]]:
        """Of all collections, for the gauges."""
        found: dict[str, float] = dict.fromkeys(OBJECTIVES, 0.0)
        for database, name in self._measured:
            for objective, burn in self.burn(database, name, self._collection(database, name)).items():
                found[objective] = max(found[objective], burn)
        return [([objective], burn) for objective, burn in found.items()]

    def _collection(self, database: str, name: str) -> Collection | None:
        return self._gateway.book.databases.get(database, {}).get(name)

    def on_tick(self) -> None:
        """Looks whether a promise is broken now that was kept before, or the other way round."""
        for collection in self._gateway.book.collections():
            if self.lag_ms(collection) or collection.bloom_ratio:
                self._of(collection.database, collection.name)
        for (database, name), measured in tuple(self._measured.items()):
            collection = self._collection(database, name)
            if collection is None:
                continue
            for objective, burn in self.burn(database, name, collection).items():
                if burn > 1 and objective not in measured.burning:
                    measured.burning.add(objective)
                    self._alert(collection, objective, burn)
                elif burn < 0.5:
                    measured.burning.discard(objective)

    def _alert(self, collection: Collection, objective: Objective, burn: float) -> None:
        logger.warning(
            "%s/%s uses up its allowance for %s %.1f times too fast",
            *(collection.database, collection.name, objective, burn),
        )
        details: dict[str, Any] = {"objective": objective, "burn": round(burn, 2)}
        self._gateway.audit.event("slo.burning", collection, details)
        watched = self._gateway.watched_if_any(collection)
        if objective == "delivery" and watched is not None:
            self._gateway.shed_low(watched)

    def reason(self, collection: Collection, burn: dict[Objective, float]) -> str:
        """Why the collection is as it is, in one sentence."""
        targets = self.targets(collection)
        if collection.state == "stale":
            return "What is here may not be what its source has: it has to be read again."
        if collection.state == "loading":
            return "It is being read from its source; nobody is told anything before that is done."
        if collection.lagging:
            return "Some of its changes could not be applied yet."
        if burn["lag"] > 1:
            return f"It is more than {targets['lag']:g} ms behind its source."
        if burn["delivery"] > 1:
            return f"More than one event in a hundred took longer than {targets['delivery']:g} ms."
        if burn["resume"] > 1:
            return f"More resumes failed than the {1 - targets['resume']:.2%} that may."
        if burn["bloom"] > 1:
            return f"Of the answers of its Bloom filter, more than {targets['bloom']:.2%} were wrong."
        return "All is as it should be."


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
