"""Service level objectives of collections, and log samples of expensive matching.

An objective allows a share of late deliveries or failed resumes over the last minutes. When that allowance is
used up faster than allowed (burn rate above 1), this is logged and audited once, and low-priority
subscriptions are demoted.

`CostSampler` logs slow matching, connections with many subscriptions and frequent resumes, each kind at most
once per interval, with hashes and shapes instead of the users' queries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from tailrace.common.caches import LruCache
from tailrace.common.logging_setup import log_fields
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
DELIVERY_ALLOWED: Final = 0.01  # the objective is the 99th percentile
SAMPLES_MIN: Final = 20  # fewer are not significant
COLLECTIONS_MAX: Final = 1000  # measured collections
# Resync reasons caused by the server; all others are caused by the client.
SERVER_FAULT_REASONS: Final = frozenset({"gap", "stale", "generation", "retention", "too-far-behind"})

Objective = Literal["delivery", "resume", "lag", "bloom"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("delivery", "resume", "lag", "bloom")
RESUME_RATIO: Final = 0.999
BLOOM_RATIO: Final = 0.01


class BurnWindow:
    """Counts of good and bad events over the last minutes."""

    __slots__ = ("_bad", "_minute", "_total")

    def __init__(self) -> None:
        self._total = [0] * MINUTES
        self._bad = [0] * MINUTES
        self._minute = -1

    def add(self, now: float, bad: bool) -> None:
        self._rotate(now)
        index = self._minute % MINUTES
        self._total[index] += 1
        self._bad[index] += bad

    def _rotate(self, now: float) -> None:
        minute = int(now // BUCKET_S)
        for later in range(max(self._minute + 1, minute - MINUTES + 1), minute + 1):
            self._total[later % MINUTES] = self._bad[later % MINUTES] = 0
        self._minute = max(self._minute, minute)

    def bad_ratio(self, now: float, least: int = 1) -> float:
        """The share of bad events; 0 with fewer than `least` events."""
        self._rotate(now)
        total = sum(self._total)
        return sum(self._bad) / total if total >= least else 0.0


class CollectionObjectives:
    """The measurements of one collection."""

    __slots__ = ("burning", "delivery", "resume")

    def __init__(self) -> None:
        self.delivery = BurnWindow()
        self.resume = BurnWindow()
        self.burning: set[Objective] = set()


class ServiceObjectives:
    """Measures all collections against their objectives. Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._gateway = gateway
        self._limits = context.limits
        self._measured: dict[tuple[str, str], CollectionObjectives] = {}
        self._latency = context.telemetry.watch_delivery_latency_seconds
        # Lag behind the source; set by the source manager.
        self.lag_ms: Callable[[Collection], float] = lambda _: 0.0
        self.lag_changes: Callable[[Collection], int] = lambda _: 0

    def _measure(self, database: str, name: str) -> CollectionObjectives | None:
        key = (database, name)
        found = self._measured.get(key)
        if found is None and len(self._measured) < COLLECTIONS_MAX:
            found = self._measured[key] = CollectionObjectives()
        return found

    # -- measuring -------------------------------------------------------------------------------------

    def record_delivery(self, watched: WatchedCollection, committed_ms: int) -> None:
        """A change was written to the sockets of its subscribers."""
        late_ms = max(0, self._context.clock.now_ns() // 1_000_000 - committed_ms)
        self._latency.observe(late_ms / 1000)
        measured = self._measure(watched.database, watched.name)
        if measured is not None:
            target_ms = self.targets(watched.collection)["delivery"]
            measured.delivery.add(self._context.loop.time(), late_ms > target_ms)

    def record_resume(self, watched: WatchedCollection) -> None:
        measured = self._measure(watched.database, watched.name)
        if measured is not None:
            measured.resume.add(self._context.loop.time(), bad=False)

    def record_resume_failure(self, database: str, name: str, reason: str) -> None:
        """Counted only if the token named a collection and the server caused the failure."""
        measured = self._measure(database, name) if name and reason in SERVER_FAULT_REASONS else None
        if measured is not None:
            measured.resume.add(self._context.loop.time(), bad=True)

    def forget(self, collection: Collection) -> None:
        self._measured.pop((collection.database, collection.name), None)

    # -- evaluating ------------------------------------------------------------------------------------

    def targets(self, collection: Collection | None) -> dict[Objective, float]:
        slo = Slo() if collection is None or collection.config.slo is None else collection.config.slo
        limits = self._limits
        return {
            "delivery": limits.watch_slo_delivery_ms if slo.delivery_ms is None else slo.delivery_ms,
            "resume": RESUME_RATIO if slo.resume_ratio is None else slo.resume_ratio,
            "lag": limits.watch_slo_lag_ms if slo.lag_ms is None else slo.lag_ms,
            "bloom": BLOOM_RATIO if slo.bloom_ratio is None else slo.bloom_ratio,
        }

    def burn_rates(self, database: str, name: str, collection: Collection | None) -> dict[Objective, float]:
        """The burn rate of each objective; above 1 the objective is violated."""
        now, targets = self._context.loop.time(), self.targets(collection)
        burn = dict[Objective, float].fromkeys(OBJECTIVES, 0.0)
        if collection is not None:
            burn["lag"] = self.lag_ms(collection) / max(1.0, targets["lag"])
            burn["bloom"] = (collection.bloom_ratio or 0.0) / targets["bloom"]
        measured = self._measured.get((database, name))
        if measured is not None:
            allowed = max(1e-6, 1 - targets["resume"])
            burn["delivery"] = measured.delivery.bad_ratio(now, SAMPLES_MIN) / DELIVERY_ALLOWED
            burn["resume"] = measured.resume.bad_ratio(now, SAMPLES_MIN) / allowed
        return burn

    def worst_burn_rates(self) -> list[tuple[list[str], float]]:
        """The highest burn rate per objective over all collections, for metrics."""
        found: dict[str, float] = dict.fromkeys(OBJECTIVES, 0.0)
        for database, name in self._measured:
            for objective, burn in self.burn_rates(database, name, self._collection(database, name)).items():
                found[objective] = max(found[objective], burn)
        return [([objective], burn) for objective, burn in found.items()]

    def _collection(self, database: str, name: str) -> Collection | None:
        return self._gateway.registry.databases.get(database, {}).get(name)

    def on_tick(self) -> None:
        """Detect objectives that became violated or recovered."""
        for collection in self._gateway.registry.collections():
            if self.lag_ms(collection) or collection.bloom_ratio:
                self._measure(collection.database, collection.name)
        for (database, name), measured in tuple(self._measured.items()):
            collection = self._collection(database, name)
            if collection is None:
                continue
            for objective, burn in self.burn_rates(database, name, collection).items():
                if burn > 1 and objective not in measured.burning:
                    measured.burning.add(objective)
                    self._alert(collection, objective, burn)
                elif burn < 0.5:
                    measured.burning.discard(objective)

    def _alert(self, collection: Collection, objective: Objective, burn: float) -> None:
        logger.warning(
            "service objective violated",
            extra=log_fields(
                database=collection.database,
                collection=collection.name,
                objective=objective,
                burn_rate=round(burn, 2),
            ),
        )
        details: dict[str, Any] = {"objective": objective, "burn": round(burn, 2)}
        self._gateway.audit.event("slo.burning", collection, details)
        watched = self._gateway.find_watched(collection)
        if objective == "delivery" and watched is not None:
            self._gateway.shed_low(watched)

    def explain(self, collection: Collection, burn: dict[Objective, float]) -> str:
        """The state of the collection in one sentence, for the status route."""
        targets = self.targets(collection)
        if collection.state == "stale":
            return "The collection may differ from its source and must be loaded again."
        if collection.state == "loading":
            return "The collection is loading from its source; no changes are delivered meanwhile."
        if collection.lagging:
            return "Some changes could not be applied to the view yet."
        if burn["lag"] > 1:
            return f"The collection is more than {targets['lag']:g} ms behind its source."
        if burn["delivery"] > 1:
            return f"More than 1% of events took longer than {targets['delivery']:g} ms."
        if burn["resume"] > 1:
            return f"More than {1 - targets['resume']:.2%} of resumes failed."
        if burn["bloom"] > 1:
            return f"The Bloom filter has more than {targets['bloom']:.2%} false positives."
        return "All objectives are met."


samples_logger = logging.getLogger("tailrace.watch.samples")

SAMPLE_INTERVAL_S: Final = 10.0
SLOW_S: Final = 0.001
SAMPLE_S: Final = 0.01  # time for measuring the candidates again
MANY_SUBSCRIPTIONS: Final = 50
REPLAYS_S: Final = 600.0
REPLAYS_MANY: Final = 3
REPLAYS_TRACKED: Final = 10_000


class CostSampler:
    """Logs samples of expensive work. Owned by the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._logged_at: dict[str, float] = {}
        self._replays: LruCache[bytes, deque[float]] = LruCache(entries_max=REPLAYS_TRACKED)
        self.slow = 0

    def _is_due(self, kind: str) -> bool:
        now = self._loop.time()
        if now - self._logged_at.get(kind, -SAMPLE_INTERVAL_S) < SAMPLE_INTERVAL_S:
            return False
        self._logged_at[kind] = now
        return True

    def sample_match(self, watched: WatchedCollection, change: Change, seconds: float) -> None:
        if seconds < SLOW_S:
            return
        self.slow += 1
        if self._is_due("slow"):
            slowest, slowest_ms = _slowest(watched, change)
            samples_logger.info(
                "slow matching",
                extra=log_fields(
                    database=watched.database,
                    collection=watched.name,
                    ms=round(seconds * 1000, 1),
                    slowest_predicate=slowest,
                    slowest_ms=round(slowest_ms, 2),
                ),
            )

    def sample_subscription(self, subscription: Subscription) -> None:
        session, whole = subscription.session, subscription.interest.predicate
        if len(session.subscriptions) > MANY_SUBSCRIPTIONS and self._is_due("many"):
            samples_logger.info(
                "connection has many subscriptions",
                extra=log_fields(connection=session.id, subscriptions=len(session.subscriptions)),
            )
        if not whole.branches and subscription.query.parts and self._is_due("scan"):
            shapes = " && ".join(expression_shape(part.node) for part in subscription.query.parts)[:500]
            samples_logger.info(
                "predicate without index",
                extra=log_fields(
                    database=subscription.watched.database,
                    collection=subscription.watched.name,
                    predicate=whole.hash.hex()[:16],
                    shape=shapes,
                ),
            )

    def sample_resume(self, subscription: Subscription) -> None:
        """Detect a client that resumes again and again."""
        now = self._loop.time()
        key = subscription.query_hash + subscription.id.encode()
        times = self._replays.pop(key) or deque[float](maxlen=REPLAYS_MANY + 1)
        times.append(now)
        self._replays.put(key, times)
        if len(times) > REPLAYS_MANY and now - times[0] <= REPLAYS_S and self._is_due("replays"):
            samples_logger.info(
                "subscription resumed often",
                extra=log_fields(
                    database=subscription.watched.database,
                    collection=subscription.watched.name,
                    subscription=subscription.id,
                    resumes=len(times),
                    window_s=REPLAYS_S,
                ),
            )


def _slowest(watched: WatchedCollection, change: Change) -> tuple[str, float]:
    """The candidate that takes longest, by evaluating all again; done only for samples."""
    worst = ("none", 0.0)
    until = time.perf_counter() + SAMPLE_S
    for interest in watched.matcher.find_candidates(change):
        begun = time.perf_counter()
        if begun >= until:
            break
        try:
            interest.classify(change)
        except CostExceededError:
            pass
        spent_ms = (time.perf_counter() - begun) * 1000
        if spent_ms > worst[1]:
            worst = (interest.predicate.hash.hex()[:16], spent_ms)
    return worst
