"""The audit stream `__audit__`: subscriptions, rule changes and failed resumes.

Predicates are recorded by hash and shape, without the values of users. Events are buffered shortly and
appended together; if they arrive faster than they can be written, the newest are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.log import append_to_streams
from tailrace.log.model import Lifetime
from tailrace.log.system_streams import AUDIT_STREAM
from tailrace.log.transaction import Transaction
from tailrace.routing.context import Context
from tailrace.watch.cel import expression_shape
from tailrace.watch.collection import Collection

if TYPE_CHECKING:
    from tailrace.watch.realtime.session import RealtimeSession
    from tailrace.watch.realtime.subscription import Subscription

logger = logging.getLogger("tailrace.watch")

FLUSH_DELAY_S: Final = 0.1
EVENTS_MAX: Final = 20_000  # buffered
ENTRIES_MAX: Final = 1000  # per record
SHAPE_CHARS_MAX: Final = 500

Json = dict[str, Any]


class AuditLog:
    """Buffers and appends audit events. Owned by the loop thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._retention_ms = context.limits.watch_audit_retention_ms
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    @property
    def enabled(self) -> bool:
        return self._retention_ms > 0

    def event(self, event: str, collection: Collection | None, details: Json, principal: str = "") -> None:
        """Record an event, about a collection if given."""
        database = None if collection is None else collection.database
        name = None if collection is None else collection.name
        self._add(event, principal, database, name, None, details)

    def subscription(self, event: str, subscription: Subscription) -> None:
        if not self.enabled:
            return
        watched, identity = subscription.watched, subscription.session.identity
        details: Json = {"connection": subscription.session.id}
        if event == "subscription.created":
            shapes = sorted(expression_shape(part.node) for part in subscription.query.parts)
            details["predicate"] = subscription.interest.predicate.hash.hex()
            details["shape"] = " && ".join(shapes)[:SHAPE_CHARS_MAX]
        principal = "" if identity is None else identity.sub
        self._add(event, principal, watched.database, watched.name, subscription.id, details)

    def resume_failed(
        self, session: RealtimeSession, sub_id: str, reason: str, collection: str | None
    ) -> None:
        principal = "" if session.identity is None else session.identity.sub
        self._add("resume.failed", principal, session.database, collection, sub_id, {"reason": reason})

    def _add(
        self,
        event: str,
        principal: str,
        database: str | None,
        collection: str | None,
        sub_id: str | None,
        details: Json,
    ) -> None:
        if not self.enabled:
            return
        if len(self._waiting) >= EVENTS_MAX:
            self.dropped += 1
            return
        message: Json = {
            "ts": format_rfc3339(self._context.clock.now_ns()),
            "event": event,
            "principal": principal,
            "database": database,
            "collection": collection,
            "subId": sub_id,
            "details": details,
        }
        self._waiting.append(orjson.dumps(message))
        if self._timer is None:
            self._timer = self._context.loop.call_later(FLUSH_DELAY_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._waiting = self._waiting[:ENTRIES_MAX], self._waiting[ENTRIES_MAX:]
        if not entries:
            return
        self._log.backpressure_queue.call(
            partial(self._append, entries), lambda error: self._count_dropped(len(entries), error)
        )
        if self._waiting:
            self._timer = self._context.loop.call_later(FLUSH_DELAY_S, self.flush)

    def _append(self, entries: list[bytes]) -> None:
        now_ns = self._context.clock.now_ns()
        append_to_streams(self._log, [(AUDIT_STREAM, entries)], now_ns, self._on_written, None)
        stream = self._log.find(AUDIT_STREAM)
        expected = Lifetime(retention_s=-(-self._retention_ms // 1000))
        if stream is not None and stream.lifetime != expected:
            # The retention is a setting, which may have changed since the last start.
            stream.lifetime = expected

    def _on_written(self, _: Transaction, error: TailraceError | None) -> None:
        if error is not None:
            self._count_dropped(ENTRIES_MAX, error)

    def _count_dropped(self, count: int, error: TailraceError) -> None:
        if not self.dropped:
            logger.warning(
                "cannot write audit events, dropping them",
                extra=log_fields(events=count, error=error.message),
            )
        self.dropped += count
