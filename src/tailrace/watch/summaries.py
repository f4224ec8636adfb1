"""`__subs__/<gateway>`: what is being watched, written down for matchers outside this process.

Nobody pays for it as long as nobody asks: summaries are written while a job has said that it needs them, and
for a while after it was last heard of, or always if that is set. One entry in each round keeps all of them
alive; without it they are over after their time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import orjson

from tailrace.api.context import Context
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.log import append_to_streams
from tailrace.log.model import Lifetime
from tailrace.log.transaction import Transaction
from tailrace.storage.retention_service import NO_END, RetentionBound
from tailrace.watch.deliveries import DELIVERIES_PREFIX
from tailrace.watch.predicate import canonical_predicate
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.realtime.subscription import Subscription
from tailrace.watch.summary import (
    SUMMARIES_PREFIX,
    SUMMARY_TTL_MS,
    SubscriptionSummary,
    encode_predicate_part,
)

logger = logging.getLogger("tailrace.watch")

REFRESH_S: Final = 30.0
FULL_REWRITE_MS: Final = 3_600_000  # after which everything is written anew, so that what was before may go
SUMMARIES_KEPT_S: Final = 600
DELIVERIES_KEPT_S: Final = 86_400
LEASE_S_MAX: Final = 3600
SUMMARY_PAGE_BYTES: Final = 1024 * 1024
SUMMARY_PAGE_ENTRIES: Final = 500

Json = dict[str, Any]


class SubscriptionSummaries:
    """Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._log = context.log
        self._gateway = gateway
        self.name = f"g_{hashlib.sha256(context.deployment.encode()).hexdigest()[:12]}"
        self.stream = SUMMARIES_PREFIX + self.name
        self.deliveries = DELIVERIES_PREFIX + self.name
        self._written: dict[str, int] = {}  # by key: what was written last, as a hash
        self._begun = False
        self._begun_ms = 0
        self._begins = 0  # the entry in front of the last mark that everything begins anew
        self._fresh: list[Subscription] = []  # whose summaries are in the page
        self._until_s = 0.0
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._context.settings.watch_summaries:
            self._keep(0)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @property
    def _wanted(self) -> bool:
        always = self._context.settings.watch_summaries
        return always or self._context.loop.time() < self._until_s

    async def announce(self, seconds: int, asker: Identity) -> Json:
        """Somebody needs summaries for so long: where they are, and up to where they are complete now.

        0 says that nobody does any more.
        """
        loop = self._context.loop
        self._until_s = max(self._until_s, loop.time() + seconds) if seconds else 0.0
        upto = self._tail()
        if seconds:
            upto = await self._write()
            self._keep(REFRESH_S)
        stream = self._log.find(self.stream)
        grants = self._gateway.grants if seconds else None
        # To append deliveries with and nothing else, for as long as the job was announced.
        who = Identity(sub="watch-job", scopes=frozenset({"read", "system"}), streams=(self.deliveries,))
        return {
            "gateway": self.name,
            "stream": self.stream,
            "deliveries": self.deliveries,
            "offset": "" if stream is None else stream.offset(upto),
            "subscriptions": len(self._written),
            "expires": self._now_ms() + seconds * 1000,
            "token": None if grants is None else grants.give(who, seconds, asker),
        }

    def _keep(self, pause_s: float) -> None:
        if self._task is None or self._task.done():
            self._task = self._context.loop.create_task(self._refresh(pause_s))

    async def _refresh(self, pause_s: float) -> None:
        """Again and again, until nobody needs them."""
        await asyncio.sleep(pause_s)
        while self._wanted:
            try:
                await self._write()
            except TailraceError as error:
                logger.warning("summaries of subscriptions cannot be written: %s", error.message)
            await asyncio.sleep(REFRESH_S)

    def _now_ms(self) -> int:
        return self._context.clock.now_ns() // 1_000_000

    # -- one round -------------------------------------------------------------------------------------

    async def _write(self) -> int:
        """What has changed since the last round; now and then everything, behind a mark.

        Tells the entry up to which they are complete.
        """
        async with self._lock:
            page: list[bytes] = []
            self._fresh = []
            now_ms = self._now_ms()
            # A round that is broken off is followed by one that begins anew.
            begun, self._begun = self._begun, False
            if not begun or now_ms - self._begun_ms >= FULL_REWRITE_MS:
                self._begun_ms = now_ms
                self._written.clear()
                self._begins = self._tail()
                page.append(self._entry("reset", None, None))
                if self._log.find(self.deliveries) is None:
                    begin = orjson.dumps({"v": 1, "kind": "control", "control": "begin"})
                    await self._append(self.deliveries, [begin])
                self._gateway.delivered.follow(self.deliveries)
            async for entry in self._changes():
                page.append(entry)
                if len(page) >= SUMMARY_PAGE_ENTRIES or sum(map(len, page)) >= SUMMARY_PAGE_BYTES:
                    await self._summarise(page)
                    page = []
            page.append(self._entry("gateway", self.name, {"expires": self._now_ms() + SUMMARY_TTL_MS}))
            await self._summarise(page)
            self._begun = True
            return self._tail()

    async def _summarise(self, page: list[bytes]) -> None:
        await self._append(self.stream, page)
        fresh, self._fresh = self._fresh, []
        for subscription in fresh:
            # Whoever reads on from here knows of it; that it is written down once more changes nothing.
            subscription.written = subscription.written or self._tail()

    def _tail(self) -> int:
        stream = self._log.find(self.stream)
        return 0 if stream is None else max(0, stream.visible)

    def bounds(self) -> list[RetentionBound]:
        """What may go of both streams: summaries that were all written anew since, and old deliveries."""
        found: list[RetentionBound] = []
        kept = ((self.stream, SUMMARIES_KEPT_S, self._begins), (self.deliveries, DELIVERIES_KEPT_S, NO_END))
        for name, kept_s, upto in kept:
            stream = self._log.find(name)
            if stream is not None and stream.earliest < min(upto, stream.visible):
                found.append(RetentionBound(stream.number, Lifetime(retention_s=kept_s), upto))
        return found

    async def _changes(self) -> AsyncIterator[bytes]:
        current: dict[str, int] = {}
        known, self._written = self._written, current
        for watched in self._gateway.all_watched():
            for place, subscription in enumerate(tuple(watched.subscriptions)):
                if place % 100 == 99:
                    await asyncio.sleep(0)  # others have something to do, too
                if subscription.state == "invalid":
                    continue
                key = subscription.key
                current[key] = hash((subscription.interest.whole.hash, subscription.options.priority))
                before = known.pop(key, None)
                if before == current[key]:
                    subscription.written = subscription.written or self._tail()
                else:
                    self._fresh.append(subscription)
                    operation = "insert" if before is None else "update"
                    yield self._entry("sub", key, self._value(subscription), operation)
        for key in known:
            yield self._entry("sub", key, None, "delete")

    def _value(self, subscription: Subscription) -> Json:
        query, whole = subscription.query, subscription.interest.whole
        identity = subscription.session.identity
        assert identity is not None
        watched = subscription.watched
        rule = self._gateway.access.read_part(identity, watched.collection)
        summary = SubscriptionSummary(
            database=watched.database,
            collection=watched.name,
            predicate=canonical_predicate(
                query.parts if rule is None else [*query.parts, rule], query.documents
            ),
            predicateHash=whole.hash.hex(),
            parts=[encode_predicate_part(part) for part in query.parts],
            ruleInputs=None if rule is None else encode_predicate_part(rule),
            documents=None if query.documents is None else sorted(query.documents),
            priority=subscription.options.priority,
            position=list(subscription.positions),
            expires=self._now_ms() + SUMMARY_TTL_MS,
        )
        return msgspec.to_builtins(summary)

    def _entry(self, kind: str, key: str | None, value: Json | None, operation: str = "update") -> bytes:
        """A state message; `reset` says that what was there before is over."""
        timestamp = format_rfc3339(self._context.clock.now_ns())
        if kind == "reset":
            return orjson.dumps({"headers": {"control": "reset", "timestamp": timestamp}})
        message: Json = {"type": kind, "key": key}
        if value is not None:
            message["value"] = value
        message["headers"] = {"operation": operation, "timestamp": timestamp}
        return orjson.dumps(message)

    async def _append(self, name: str, entries: list[bytes]) -> None:
        done: asyncio.Future[None] = self._context.loop.create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        append_to_streams(self._log, [(name, entries)], self._context.clock.now_ns(), reply, None)
        await done
