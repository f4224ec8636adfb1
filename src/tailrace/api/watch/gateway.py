"""The gateway: every realtime connection, what they watch, and who is told of a change."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

import orjson

from tailrace.api.context import Context
from tailrace.api.watch import frames
from tailrace.api.watch.access import Access
from tailrace.api.watch.book import Book, Collection
from tailrace.api.watch.replay import Replays
from tailrace.api.watch.session import Session
from tailrace.api.watch.subscription import Subscription
from tailrace.auth import TokenVerifier
from tailrace.log.transaction import Transaction
from tailrace.watch.change import Change
from tailrace.watch.matcher import Matcher
from tailrace.watch.tokens import Position, Signer

logger = logging.getLogger("tailrace.watch")

KEY: Final = "secret/watch-token-key"
TICK_S: Final = 1.0
SOFT, HARD, RECOVER = 0.7, 0.9, 0.6
RECENT_QUERIES: Final = 10_000


class Watched:
    """A collection that somebody watches; it need not exist yet."""

    __slots__ = ("_book", "_partitions", "database", "matcher", "name", "subscriptions")

    def __init__(self, book: Book, database: str, name: str, scan_max: int, partitions: int) -> None:
        self._book = book
        self._partitions = partitions
        self.database = database
        self.name = name
        self.matcher: Matcher[Subscription] = Matcher(scan_max)
        self.subscriptions: set[Subscription] = set()

    @property
    def collection(self) -> Collection | None:
        return self._book.find(self.database, self.name)

    @property
    def applied(self) -> list[int]:
        found = self.collection
        return [0] * self._partitions if found is None else found.applied

    @property
    def generation(self) -> int:
        found = self.collection
        return 1 + self._book.log.streams.first_epoch if found is None else self._book.generation(found)


class Gateway:
    """Owned by the loop thread."""

    def __init__(self, context: Context, book: Book, access: Access, verifier: TokenVerifier | None) -> None:
        self.context = context
        self.limits = context.limits
        self.book = book
        self.access = access
        self.verifier = verifier
        self.signer: Signer | None = None
        self.sessions: set[Session] = set()
        self._watched: dict[tuple[str, str], Watched] = {}
        self.replays = Replays(self)
        self._timer: asyncio.TimerHandle | None = None
        self.outbound_bytes = 0  # of all connections, at the last tick
        self.level = 0.0  # of what may be unsent
        self.deliveries = {"insert": 0, "update": 0, "delete": 0}
        self.demotions = 0
        self.resyncs: dict[str, int] = {}
        self.resumes = {"ok": 0, "resync-required": 0}
        self.recent_queries: dict[bytes, bytes] = {}
        self._past = (0, 0)  # candidates and hits of what is watched no more

    # -- beginning and end -----------------------------------------------------------------------------

    def start(self) -> None:
        """Tokens have to be good after a crash, so the key is in the log."""
        log = self.book.log
        key = log.streams.meta.get(KEY)
        if key is not None:
            self.signer = Signer(key)
        elif log.refusal is None:
            fresh = secrets.token_bytes(32)

            def durable(_: Transaction, error: Exception | None) -> None:
                if error is None:
                    self.signer = Signer(fresh)

            log.put_meta(KEY, fresh, durable)

    def end_all(self) -> None:
        """Shutdown: everybody gets their last tokens and comes back."""
        for session in tuple(self.sessions):
            session.send_tokens()
            session.refuse(None, "going_away", "the server is stopping", retry_after_ms=1000)
            session.close(1001, "the server is stopping")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def opened(self, session: Session) -> None:
        self.sessions.add(session)
        if self._timer is None:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def closed(self, session: Session) -> None:
        self.sessions.discard(session)

    def now_s(self) -> float:
        return self.context.clock.now_ns() / 1e9

    def _tick(self) -> None:
        self._timer = None
        sizes = {session: session.wire.unsent_bytes for session in self.sessions}
        self.outbound_bytes = sum(sizes.values())
        self.level = self.outbound_bytes / self.limits.watch_outbound_total_bytes
        if self.level >= SOFT:
            self._shed(sizes)
        now = self.context.loop.time()
        for session in tuple(self.sessions):
            session.on_tick(now)
        if self.sessions:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def _shed(self, sizes: dict[Session, int]) -> None:
        """Optional load first, then those that have the most unsent; they go on from the log."""
        for session in sorted(sizes, key=sizes.__getitem__, reverse=True):
            for subscription in tuple(session.subscriptions.values()):
                low = subscription.options.priority == "low"
                if subscription.state == "live" and (low or (self.level >= HARD and sizes[session])):
                    self.demote(subscription)

    # -- subscriptions ---------------------------------------------------------------------------------

    def watched(self, database: str, name: str) -> Watched:
        key = (database, name)
        found = self._watched.get(key)
        if found is None:
            limits = self.limits
            found = Watched(self.book, database, name, limits.watch_scan_predicates, limits.watch_partitions)
            self._watched[key] = found
        return found

    def release(self, subscription: Subscription) -> None:
        """Nothing more comes of it."""
        watched = subscription.watched
        if subscription.state == "live":
            watched.matcher.discard(subscription.interest, subscription)
        subscription.state = "invalid"
        watched.subscriptions.discard(subscription)
        if subscription.task is not None and subscription.task is not asyncio.current_task():
            subscription.task.cancel()
        if not watched.subscriptions and self._watched.pop((watched.database, watched.name), None):
            matcher = watched.matcher
            self._past = (self._past[0] + matcher.candidates, self._past[1] + matcher.hits)

    def all_watched(self) -> list[Watched]:
        return list(self._watched.values())

    def totals(self) -> tuple[int, int]:
        """Candidates and hits of all that is or was watched."""
        candidates, hits = self._past
        for watched in self._watched.values():
            candidates += watched.matcher.candidates
            hits += watched.matcher.hits
        return candidates, hits

    def states(self) -> list[tuple[list[str], float]]:
        """How many subscriptions there are, by state."""
        counts: dict[str, float] = dict.fromkeys(("live", "behind", "snapshot", "paused"), 0)
        for watched in self._watched.values():
            for subscription in watched.subscriptions:
                counts[subscription.state] += 1
        return [([state], count) for state, count in counts.items()]

    def go_live(self, subscription: Subscription) -> None:
        """From here on it is told of changes as they happen: it has all of those before."""
        assert subscription.own == subscription.watched.applied
        subscription.watched.matcher.add(subscription.interest, subscription)
        subscription.state = "live"
        subscription.own = []
        subscription.newer = None

    def demote(self, subscription: Subscription, *, paused: bool = False) -> None:
        """What it is not sent now it reads from the log, as soon as its client takes it."""
        assert subscription.state == "live"
        subscription.own = list(subscription.watched.applied)
        subscription.watched.matcher.discard(subscription.interest, subscription)
        subscription.state = "paused" if paused else "behind"
        if not paused:
            self.demotions += 1
            self.replays.follow(subscription)

    def position(self, subscription: Subscription, seqs: list[int] | None = None) -> str:
        """A token that covers exactly what was written for the subscription so far."""
        assert self.signer is not None
        watched = subscription.watched
        found = subscription.positions if seqs is None else seqs
        position = Position(
            watched.database, watched.name, watched.generation, subscription.query_hash, list(found)
        )
        return self.signer.position(position)

    def remember(self, query_hash: bytes, query: object) -> None:
        """So that a client that comes back soon need not say again what it watched."""
        self.recent_queries.pop(query_hash, None)
        self.recent_queries[query_hash] = orjson.dumps(query)
        while len(self.recent_queries) > RECENT_QUERIES:
            del self.recent_queries[next(iter(self.recent_queries))]

    def on_rules(self, collection: Collection) -> None:
        """Another rule: what everybody has seen may be something else now."""
        found = self._watched.get((collection.database, collection.name))
        for subscription in tuple(found.subscriptions) if found is not None else ():
            subscription.session.invalidate(subscription, "rule-changed")

    # -- changes ---------------------------------------------------------------------------------------

    def on_applied(self, collection: Collection, change: Change) -> None:
        """A change is durable. The collection's position is still the one before it."""
        watched = self._watched.get((collection.database, collection.name))
        if watched is None or not len(watched.matcher):
            return
        costly: set[Subscription] = set()
        groups: dict[tuple[Session, str, str, bool], list[Subscription]] = {}
        for subscribers, op, reason in watched.matcher.matches(change, costly):
            for subscription in subscribers:
                key = (subscription.session, op, reason, subscription.options.include_data)
                groups.setdefault(key, []).append(subscription)
        if groups:
            lsn = self.lsn(collection, change)
            deltas: dict[tuple[str, str, bool], bytes] = {}
            shared: dict[tuple[str, ...], frames.Frame] = {}
            for (session, op, reason, include), subscriptions in groups.items():
                content = deltas.get((op, reason, include))
                if content is None:
                    content = deltas[op, reason, include] = frames.delta(change, op, reason, include)
                session.deliver(change, lsn, op, content, (reason, str(include)), subscriptions, shared)
        for subscription in costly:
            subscription.session.invalidate(subscription, "cost-exceeded")

    def lsn(self, collection: Collection, change: Change) -> str:
        """Of a native change: the offset of its entry."""
        stream = self.book.log.find(collection.stream(change.partition))
        assert stream is not None
        return stream.offset(change.seq)
