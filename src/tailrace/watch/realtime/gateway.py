"""The realtime gateway: all sessions, the collections they watch, and delivery of each change.

A change that becomes durable is matched against the live subscriptions of its collection and written to their
sessions. Subscriptions that cannot keep up are demoted: they read the log at their own pace (`replay`) until
they have caught up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import orjson

from tailrace.auth import GrantStore, Identity, TokenVerifier
from tailrace.common.caches import LruCache
from tailrace.common.logging_setup import log_fields
from tailrace.routing.context import Context
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.audit import AuditLog
from tailrace.watch.collection import Collection, CollectionCounters, MetricLabels
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import Change
from tailrace.watch.evaluation_cost import StepBudget
from tailrace.watch.matcher import BATCH_MIN, Matcher, MatchResult
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.objectives import CostSampler, ServiceObjectives
from tailrace.watch.realtime.replay import DeliveryReader, Replayer
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import PRIORITIES, MessageRefusedError, Subscription
from tailrace.watch.resume_tokens import ResumePosition, TokenKeys, TokenSigner


class WatchedCollection:
    """A collection with subscriptions; it need not exist yet."""

    __slots__ = ("_counters", "_registry", "database", "matcher", "name", "subscriptions")

    def __init__(
        self, registry: CollectionRegistry, database: str, name: str, scan_max: int, budget: StepBudget
    ) -> None:
        self._registry = registry
        self.database = database
        self.name = name
        self.matcher: Matcher[Subscription] = Matcher(scan_max, budget)
        self.subscriptions: set[Subscription] = set()
        self._counters = registry.counters.others

    @property
    def collection(self) -> Collection | None:
        return self._registry.find(self.database, self.name)

    @property
    def counters(self) -> CollectionCounters:
        """The counters of the collection, also after it was deleted."""
        if (found := self.collection) is not None:
            self._counters = self._registry.counters.for_collection(found)
        return self._counters

    @property
    def applied(self) -> list[int]:
        found = self.collection
        return [0] * self._registry.partitions_for(self.name) if found is None else found.applied

    @property
    def earliest(self) -> list[int]:
        """The earliest position in the log, by partition."""
        found = self.collection
        return (
            [0] * self._registry.partitions_for(self.name)
            if found is None
            else self._registry.earliest(found)
        )

    @property
    def generation(self) -> int:
        found = self.collection
        if found is None:
            return self._registry.next_generation(self.database, self.name)
        return self._registry.generation(found)

    @property
    def state(self) -> str:
        found = self.collection
        return "live" if found is None or found.state == "lagging" else found.state


__all__ = ["Gateway", "WatchedCollection"]

logger = logging.getLogger("tailrace.watch")

TICK_S: Final = 1.0
SOFT, HARD, RECOVER = 0.7, 0.9, 0.6
RECENT_QUERIES: Final = 10_000
RECENT_S: Final = 180.0
REBALANCE_BATCH: Final = 200  # predicates per collection and tick
STATES: Final = ("live", "behind", "snapshot", "paused")


class Gateway:
    """All realtime sessions and subscriptions of the process. Owned by the loop thread."""

    def __init__(
        self,
        context: Context,
        registry: CollectionRegistry,
        access: AccessRules,
        verifier: TokenVerifier | None,
        grants: GrantStore | None = None,
    ) -> None:
        self.context = context
        self.limits = context.limits
        self.registry = registry
        self.access = access
        self.verifier = verifier
        self.grants = grants
        self.keys = TokenKeys(registry.log, context.clock, context.limits)
        self.audit = AuditLog(context)
        self.samples = CostSampler(context.loop)
        self.objectives = ServiceObjectives(context, self)
        self.sessions: set[RealtimeSession] = set()
        self._watched: dict[tuple[str, str], WatchedCollection] = {}
        self._principals: Counter[str] = Counter()
        self.delivered = DeliveryReader(context, self)
        self.replays = Replayer(self)
        self._timer: asyncio.TimerHandle | None = None
        self.outbound_bytes = 0  # unsent bytes of all connections at the last tick
        self.level = 0.0  # outbound_bytes as a share of the limit
        self.shedding = False
        self.deliveries = {"insert": 0, "update": 0, "delete": 0}
        self.demotions = 0
        self.resyncs: Counter[str] = Counter()
        self.resumes: Counter[tuple[str, str]] = Counter()  # by result and by the tier read from
        self.auth_failures: Counter[str] = Counter()
        self._recent: LruCache[bytes, tuple[float, bytes]] = LruCache(entries_max=RECENT_QUERIES)
        self._matched_ahead: dict[Change, MatchResult[Subscription]] = {}  # results of the current page
        self._matched_each_s = 0.0
        self._refill_pending = False
        self._step_budget = StepBudget(context.limits.watch_match_steps)
        # Starts a replication stream on a connection.
        self.on_stream: Callable[[RealtimeSession, str | None, dict[str, Any]], None] | None = None

    # -- start and shutdown ----------------------------------------------------------------------------

    @property
    def signer(self) -> TokenSigner | None:
        return self.keys.signer

    def start(self) -> None:
        self.keys.start()

    def close_all(self) -> None:
        """Shutdown: send final resume tokens and close all sessions."""
        for session in tuple(self.sessions):
            session.send_tokens()
            session.send_error(None, "going_away", "the server is stopping", retry_after_ms=1000)
            session.close(1001, "the server is stopping")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.audit.flush()

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """Close sessions whose token was revoked; returns how many."""
        lost = [one for one in self.sessions if one.identity is not None and not is_valid(one.identity)]
        for session in lost:
            self.count_auth_failure("invalid_auth")
            session.send_error(None, "invalid_auth", "the token was revoked")
            session.close(4401, "the token was revoked")
        return len(lost)

    def opened(self, session: RealtimeSession) -> None:
        self.sessions.add(session)
        if self._timer is None:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def closed(self, session: RealtimeSession) -> None:
        self.sessions.discard(session)

    def now_s(self) -> float:
        return self.context.clock.now_ns() / 1e9

    def _tick(self) -> None:
        self._timer = None
        sizes = {session: session.transport.unsent_bytes for session in self.sessions}
        self.outbound_bytes = sum(sizes.values())
        self.level = self.outbound_bytes / self.limits.watch_outbound_total_bytes
        if self.level < RECOVER:
            self.shedding = False
        if self.level >= SOFT:
            self.shedding = True
            self._shed(sizes)
        now = self.context.loop.time()
        for session in tuple(self.sessions):
            if sizes[session] or now >= session.due_at:
                session.on_tick(now)
        self.objectives.on_tick()
        for watched in self._watched.values():
            watched.matcher.index.rebalance(REBALANCE_BATCH)
        if self.sessions:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def _shed(self, sizes: dict[RealtimeSession, int]) -> None:
        """Demote low priority first, then the sessions with the most unsent bytes, high priority last.

        No events are lost: demoted subscriptions read them from the log.
        """
        for priority in PRIORITIES:
            if priority != "low" and self.level < HARD:
                return
            for session in sorted(sizes, key=sizes.__getitem__, reverse=True):
                if priority == "low" or sizes[session]:
                    self._demote_all(session, priority)

    def _demote_all(self, session: RealtimeSession, priority: str) -> None:
        for subscription in tuple(session.subscriptions.values()):
            if subscription.state == "live" and subscription.options.priority == priority:
                self.demote(subscription)

    def shed_low(self, watched: WatchedCollection) -> None:
        """Demote the low-priority subscriptions of one collection."""
        for subscription in tuple(watched.subscriptions):
            if subscription.state == "live" and subscription.options.priority == "low":
                self.demote(subscription)

    # -- subscriptions ---------------------------------------------------------------------------------

    def watched(self, database: str, name: str) -> WatchedCollection:
        key = (database, name)
        found = self._watched.get(key)
        if found is None:
            found = WatchedCollection(
                self.registry, database, name, self.limits.watch_scan_predicates, self._step_budget
            )
            self._watched[key] = found
        return found

    def watched_named(self, database: str, name: str) -> WatchedCollection | None:
        """None if it has no subscriptions."""
        return self._watched.get((database, name))

    def find_watched(self, collection: Collection) -> WatchedCollection | None:
        return self.watched_named(collection.database, collection.name)

    def check_room(self, subscription: Subscription) -> None:
        if not subscription.watched.matcher.has_room(subscription.interest.predicate):
            raise MessageRefusedError(
                "limit_exceeded",
                f"a collection may have at most {self.limits.watch_scan_predicates} predicates without index",
                limit="scanPredicates",
            )

    def count_subscriptions(self, identity: Identity | None) -> int:
        """Subscriptions of an identity on all connections; 0 for anonymous, which is not limited."""
        return 0 if identity is None or identity.anonymous else self._principals[identity.sub]

    def on_subscribed(self, subscription: Subscription) -> None:
        session = subscription.session
        identity = session.identity
        if identity is not None and not identity.anonymous:
            subscription.principal = identity.sub
            self._principals[identity.sub] += 1
        self.audit.subscription("subscription.created", subscription)
        self.samples.sample_subscription(subscription)

    def release(self, subscription: Subscription) -> None:
        """End a subscription: stop matching, reading and counting it."""
        watched = subscription.watched
        if subscription.state == "live":
            watched.matcher.discard(subscription.interest, subscription)
        subscription.state = "invalid"
        if subscription in watched.subscriptions:
            watched.subscriptions.discard(subscription)
            self.audit.subscription("subscription.destroyed", subscription)
        if subscription.principal is not None:
            self._principals[subscription.principal] -= 1
            if self._principals[subscription.principal] <= 0:
                del self._principals[subscription.principal]
            subscription.principal = None
        if subscription.task is not None and subscription.task is not asyncio.current_task():
            subscription.task.cancel()
        key = (watched.database, watched.name)
        if not watched.subscriptions and self._watched.get(key) is watched:
            del self._watched[key]
            watched.counters.add_matched(watched.matcher.counts())

    def all_watched(self) -> list[WatchedCollection]:
        return list(self._watched.values())

    def match_counts(self) -> dict[MetricLabels, tuple[int, int, int]]:
        """Candidates, hits and library evaluations since the start, by collection."""
        found = {counters.labels: counters.matched for counters in self.registry.counters.all()}
        for watched in self._watched.values():
            labels, more = watched.counters.labels, watched.matcher.counts()
            candidates, hits, fallbacks = found.get(labels, (0, 0, 0))
            found[labels] = (candidates + more[0], hits + more[1], fallbacks + more[2])
        return found

    def states(self) -> list[tuple[list[str], float]]:
        """The number of subscriptions by state and priority."""
        counts: dict[tuple[str, str], float] = {
            (state, priority): 0 for state in STATES for priority in PRIORITIES
        }
        for watched in self._watched.values():
            for subscription in watched.subscriptions:
                counts[subscription.state, subscription.options.priority] += 1
        return [([*key], count) for key, count in counts.items()]

    def go_live(self, subscription: Subscription) -> None:
        """Deliver changes as they happen; the client has all earlier ones."""
        assert subscription.client_positions == subscription.watched.applied
        subscription.watched.matcher.add(subscription.interest, subscription)
        subscription.state = "live"
        subscription.client_positions = []
        subscription.newer = None

    def demote(self, subscription: Subscription, *, paused: bool = False) -> None:
        """Stop live delivery; the subscription continues from the log at its client's pace."""
        assert subscription.state == "live"
        subscription.client_positions = list(subscription.watched.applied)
        subscription.watched.matcher.discard(subscription.interest, subscription)
        subscription.state = "paused" if paused else "behind"
        if not paused:
            self.demotions += 1
            self.replays.follow(subscription)

    def resume_token(self, subscription: Subscription, seqs: list[int] | None = None) -> str:
        """A token that covers exactly what was sent to the subscription so far."""
        signer = self.signer
        assert signer is not None
        watched = subscription.watched
        found = subscription.positions if seqs is None else seqs
        position = ResumePosition(
            watched.database,
            watched.name,
            watched.generation,
            subscription.query_hash,
            list(found),
            subscription.id,
        )
        return signer.position(position)

    def cache_query(self, query_hash: bytes, query: object) -> None:
        """Remember a query, so that a client that reconnects soon can resume with its token only."""
        self._recent.put(query_hash, (self.context.loop.time(), orjson.dumps(query)))

    def cached_query(self, query_hash: bytes) -> bytes | None:
        found = self._recent.get(query_hash)
        if found is None or self.context.loop.time() - found[0] > RECENT_S + self._recent_grace_s():
            return None
        return found[1]

    def _recent_grace_s(self) -> float:
        """The time until a dead connection is detected."""
        return self.limits.ws_dead_ms / 1000

    # -- counters and audit ---------------------------------------------------------------------------

    def count_auth_failure(self, code: str) -> None:
        self.auth_failures[code] += 1

    def count_resync(self, reason: str) -> None:
        self.resyncs[reason] += 1

    def record_resume(self, subscription: Subscription) -> None:
        self.resumes["ok", self._path_of(subscription)] += 1
        self.objectives.record_resume(subscription.watched)
        self.samples.sample_resume(subscription)

    def record_resume_failure(
        self, session: RealtimeSession, sub_id: str, reason: str, collection: str | None
    ) -> None:
        self.resumes["resync-required", "none"] += 1
        # A changed query or a foreign token does not count against the service objective.
        self.objectives.record_resume_failure(session.database or "", collection or "", reason)
        self.audit.resume_failed(session, sub_id, reason, collection)

    def _path_of(self, subscription: Subscription) -> str:
        """The tier a resume reads from: memory, local disk, or the object store."""
        collection = subscription.watched.collection
        found = "window"
        if collection is None:
            return found
        for partition, seq in enumerate(subscription.client_positions):
            stream = self.registry.log.find(collection.stream(partition))
            if stream is None or seq >= stream.visible:
                continue
            if seq < stream.sealed:
                return "cold"
            if seq < stream.stored:
                found = "hot"
        return found

    def on_rules(self, collection: Collection) -> None:
        """A rule changed: results that clients have may be different now."""
        self.audit.event("rule.changed", collection, {"ruleVersion": collection.config.rule_version})
        self.invalidate_all(collection, "rule-changed")

    def invalidate_all(self, collection: Collection, reason: str) -> None:
        found = self.find_watched(collection)
        for subscription in tuple(found.subscriptions) if found is not None else ():
            subscription.session.invalidate(subscription, reason)

    def on_before_image_lost(self, collection: Collection) -> None:
        """Before-images are missing, so deletes from results cannot be detected."""
        logger.error(
            "view is inconsistent with its change log",
            extra=log_fields(database=collection.database, collection=collection.name),
        )
        self.invalidate_all(collection, "gap")

    def on_state(self, collection: Collection, reason: str = "") -> None:
        """The collection became stale, loading or live.

        While it loads, subscriptions receive nothing; once live, they read the changes from the log.
        """
        if collection.state in ("stale", "live"):
            details = {"reason": reason} if reason else {}
            self.audit.event(f"partition.{collection.state}", collection, details)
        if collection.state == "stale":
            self.invalidate_all(collection, "stale")
        elif collection.state == "loading" and (watched := self.find_watched(collection)) is not None:
            for subscription in tuple(watched.subscriptions):
                if subscription.state == "live":
                    self.demote(subscription)

    # -- changes ---------------------------------------------------------------------------------------

    def on_page(self, collection: Collection, changes: list[Change]) -> None:
        """Match a page of changes in one batch, before they are applied one by one."""
        watched = self.find_watched(collection)
        self._matched_ahead, self._matched_each_s = {}, 0.0
        if watched is not None and len(watched.matcher) and len(changes) > BATCH_MIN:
            begun = time.perf_counter()
            self._matched_ahead = dict(zip(changes, watched.matcher.match_batch(changes), strict=True))
            self._refill_budget_later()
            self._matched_each_s = (time.perf_counter() - begun) / len(changes)

    def on_applied(self, collection: Collection, change: Change) -> None:
        """Deliver a durable change; the collection's position is still the one before it."""
        watched = self.find_watched(collection)
        if watched is None or not len(watched.matcher):
            return
        begun = time.perf_counter()
        found = self._matched_ahead.pop(change, None)
        if found is None:
            found = watched.matcher.match(change)
            self._refill_budget_later()
        groups: dict[tuple[RealtimeSession, str, str, bool], list[Subscription]] = {}
        for subscribers, op, reason in found.matches:
            for subscription in subscribers:
                key = (subscription.session, op, reason, subscription.options.include_data)
                groups.setdefault(key, []).append(subscription)
        match_s = time.perf_counter() - begun + self._matched_each_s
        watched.counters.latency.observe(match_s)
        self.samples.sample_match(watched, change, match_s)
        if groups:
            lsn = self.lsn(collection, change)
            deltas: dict[tuple[str, str, bool], bytes] = {}
            shared: dict[tuple[str, ...], envelopes.Envelope] = {}
            for (session, op, reason, include), subscriptions in groups.items():
                content = deltas.get((op, reason, include))
                if content is None:
                    content = deltas[op, reason, include] = envelopes.encode_delta(
                        change, op, reason, include
                    )
                session.deliver(change, lsn, op, content, (reason, str(include)), subscriptions, shared)
            self.objectives.record_delivery(watched, change.updated_ms)
        for subscription in found.too_costly:
            subscription.session.invalidate(subscription, "cost-exceeded")
        for subscription in found.postponed:
            if subscription.state == "live":
                self.demote(subscription)

    def _refill_budget_later(self) -> None:
        """Let the loop run other callbacks before more steps are spent on matching."""
        if self._step_budget.is_used and not self._refill_pending:
            self._refill_pending = True
            self.context.loop.call_soon(self._refill_budget)

    def _refill_budget(self) -> None:
        self._refill_pending = False
        self._step_budget.refill()

    def lsn(self, collection: Collection, change: Change) -> str:
        """The LSN at the source; for native changes the offset of the entry."""
        if change.lsn is not None:
            return change.lsn
        stream = self.registry.log.find(collection.stream(change.partition))
        assert stream is not None
        return stream.offset(change.seq)
