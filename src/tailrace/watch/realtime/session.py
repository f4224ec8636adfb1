"""A realtime session: authentication, delivery, flow control and heartbeats of one connection.

The session is independent of the transport (WebSocket or SSE, see `routes`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from tailrace.auth import ANONYMOUS, Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.document import Change
from tailrace.watch.matcher import MATCHER_VERSION
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.envelopes import Envelope
from tailrace.watch.realtime.subscription import (
    MessageRefusedError,
    Subscription,
    default_database,
    make_subscription,
    register_subscription,
)

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway


SOFT, HARD, RECOVER = 0.7, 0.9, 0.6
CHECK_INTERVAL_S_MAX: Final = 5.0  # between two checks of an idle connection
_RESYNC_REASONS: Final = frozenset(
    ("gap", "generation", "retention", "too-far-behind", "rule-changed", "overflow", "token-invalid")
) | frozenset(("query-changed", "auth-changed", "stale", "truncate"))


class RealtimeTransport(Protocol):
    """How envelopes reach the client."""

    name: str  # label in metrics
    each_token: bool  # every message carries a token for the whole connection

    def send(self, envelope: Envelope, token: str | None) -> int: ...
    def keep_alive(self) -> int:
        """Send a keep-alive after a silence, if the transport needs one; returns its bytes."""
        ...

    def close(self, code: int, reason: str) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class RealtimeSession:
    """One connection: its identity, database and subscriptions."""

    def __init__(
        self, gateway: Gateway, transport: RealtimeTransport, identity: Identity | None, database: str | None
    ) -> None:
        self.gateway = gateway
        self.transport = transport
        self.identity = identity  # None until authenticated
        self.database = database
        self.id = f"c_{secrets.token_hex(6)}"
        self.subscriptions: dict[str, Subscription] = {}
        self.snapshot_sizes: dict[str, tuple[int, int]] = {}
        self.streams: dict[str, asyncio.Task[None]] = {}  # replication streams
        self.drained = asyncio.Event()
        self.tokens_each = False
        self.checksum = False
        self.ended = False
        now = gateway.context.loop.time()
        self.opened_at = now
        self._written_bytes = 0
        self._drained_before = 0
        self._progress_at = now
        self._beat_at = now
        self._written_before: int = 0
        self._quiet_since = now
        self._expiry_sent = False
        self._was_idle = True
        self.due_at = 0.0  # next check; earlier if bytes are unsent
        gateway.opened(self)

    def set_identity(self, identity: Identity, database: str) -> None:
        self.identity, self.database, self._expiry_sent = identity, database, False
        self.due_at = 0.0

    # -- sending ---------------------------------------------------------------------------------------

    @property
    def drained_bytes(self) -> int:
        return self._written_bytes - self.transport.unsent_bytes

    @property
    def has_room(self) -> bool:
        return self.transport.unsent_bytes <= RECOVER * self.gateway.limits.watch_outbound_bytes

    def send(self, envelope: Envelope, token: str | None = None) -> None:
        if not self.ended:
            self._written_bytes += self.transport.send(envelope, token)

    def send_error(self, message_id: str | None, code: str, message: str, **more: Any) -> None:
        self.send(envelopes.error(message_id, code, message, **more))

    def close(self, code: int, reason: str) -> None:
        if not self.ended:
            self.transport.close(code, reason)
            self.on_gone()

    def on_gone(self) -> None:
        """The connection is closed: release all subscriptions."""
        if self.ended:
            return
        self.ended = True
        for subscription in self.subscriptions.values():
            if subscription.state != "invalid":
                self.gateway.release(subscription)
        for task in self.streams.values():
            task.cancel()
        self.streams.clear()
        self.subscriptions.clear()
        self.gateway.closed(self)

    def drop_invalid(self) -> None:
        living = {key: one for key, one in self.subscriptions.items() if one.state != "invalid"}
        self.subscriptions = living

    def on_drain(self) -> None:
        self.drained.set()

    def connection_token(self, after: tuple[Subscription, Change] | None = None) -> str | None:
        """For transports with one token per connection: the tokens of all subscriptions."""
        if not self.transport.each_token:
            return None
        found: dict[str, str] = {}
        for subscription in self.subscriptions.values():
            if subscription.state == "snapshot":
                return None  # an interrupted snapshot starts again
            if subscription.state == "invalid":
                continue
            seqs: list[int] | None = None
            if after is not None and after[0] is subscription and len(self.subscriptions) == 1:
                seqs = list(subscription.positions)
                seqs[after[1].partition] = after[1].seq
            found[subscription.id] = self.gateway.resume_token(subscription, seqs)
        return orjson.dumps(found).hex() if found else None

    # -- events ----------------------------------------------------------------------------------------

    def deliver(
        self,
        change: Change,
        lsn: str,
        op: str,
        content: bytes,
        variant: tuple[str, str],
        subscriptions: Sequence[Subscription],
        shared: dict[tuple[str, ...], Envelope],
    ) -> None:
        """Send a change to subscriptions of this connection that receive the same event."""
        ready: list[Subscription] = []
        for subscription in subscriptions:
            if subscription.state != "live":
                continue
            if self._can_send(subscription):
                ready.append(subscription)
            else:
                self.gateway.demote(subscription)
        if not ready:
            return
        self.gateway.deliveries[op] += len(ready)
        if self.tokens_each or self.transport.each_token:
            for subscription in ready:
                self._send_event(subscription, change, lsn, content)
        else:
            ids = tuple(subscription.id for subscription in ready)
            key = (op, *variant, str(self.checksum), *ids)
            envelope = shared.get(key)
            if envelope is None:
                envelope = shared[key] = envelopes.event(change, lsn, ids, content, None, self.checksum)
            self.send(envelope)
        for subscription in ready:
            if subscription.options.max_unacked:
                self._count_unacked(subscription, change)

    def _count_unacked(self, subscription: Subscription, change: Change) -> None:
        subscription.unacked.append((change.partition, change.seq))
        if subscription.is_unacked_full and subscription.state == "live":
            self.gateway.demote(subscription, paused=True)
            subscription.client_positions[change.partition] = change.seq  # already sent

    def _can_send(self, subscription: Subscription) -> bool:
        unsent = self.transport.unsent_bytes
        if not unsent:
            return True
        level = unsent / self.gateway.limits.watch_outbound_bytes
        return level < (SOFT if subscription.options.priority == "low" else HARD)

    def _send_event(self, subscription: Subscription, change: Change, lsn: str, content: bytes) -> None:
        token: str | None = None
        if self.tokens_each:
            seqs = list(subscription.positions)
            seqs[change.partition] = change.seq
            token = self.gateway.resume_token(subscription, seqs)
        envelope = envelopes.event(change, lsn, (subscription.id,), content, token, self.checksum)
        self.send(envelope, self.connection_token((subscription, change)))

    def send_replayed(
        self, subscription: Subscription, change: Change, lsn: str, op: str, content: bytes
    ) -> None:
        """Send an event read from the log; `client_positions` is still before it."""
        self.gateway.deliveries[op] += 1
        if subscription.state == "snapshot":
            envelope = envelopes.event(change, lsn, (subscription.id,), content, None, self.checksum)
            self.send(envelope)
            return
        self._send_event(subscription, change, lsn, content)
        if subscription.options.max_unacked:
            subscription.unacked.append((change.partition, change.seq))

    def send_snapshot(self, subscription: Subscription, page: int, rows: list[bytes]) -> None:
        assert self.database is not None
        payload = {
            "subId": subscription.id,
            "page": page,
            "documents": [orjson.Fragment(row) for row in rows],
        }
        self.send(envelopes.subscription_notice("snapshot", self.database, [subscription.id], payload))

    def end_snapshot(self, subscription: Subscription) -> None:
        assert self.database is not None
        pages, count = self.snapshot_sizes.pop(subscription.id, (0, 0))
        payload = {
            "subId": subscription.id,
            "pages": pages,
            "count": count,
            "positions": subscription.positions,
            "token": self.fresh_token(subscription),
        }
        self.send(
            envelopes.subscription_notice("snapshot-end", self.database, [subscription.id], payload),
            self.connection_token(),
        )

    def fresh_token(self, subscription: Subscription) -> str:
        subscription.token_position_sum = sum(subscription.positions)
        return self.gateway.resume_token(subscription)

    def invalidate(self, subscription: Subscription, reason: str, *, retry_after_ms: int = 0) -> None:
        """End a subscription whose results may be wrong: the client must resync."""
        if subscription.state == "invalid" or self.ended:
            return
        assert self.database is not None
        gateway = self.gateway
        gateway.release(subscription)
        gateway.count_resync(reason)
        again = subscription.options.auto_resync and reason in _RESYNC_REASONS
        payload = {
            "subId": subscription.id,
            "reason": reason,
            "generation": subscription.watched.generation,
            "retryAfterMs": retry_after_ms,
            "autoResync": again,
        }
        self.send(
            envelopes.subscription_notice("resync-required", self.database, [subscription.id], payload), ""
        )
        if reason == "cost-exceeded":
            self.send_error(
                None, "cost_exceeded", "the query exceeded its evaluation steps", sub_id=subscription.id
            )
        if again:
            fresh = make_subscription(self, subscription.id, subscription.query, subscription.options)
            register_subscription(fresh)
            gateway.replays.snapshot(fresh)
        elif self.transport.each_token:
            self.close(1000, "resync required")

    def fail(self, subscription: Subscription, code: str, message: str) -> None:
        """End a subscription whose snapshot failed; no snapshot-end is sent."""
        if subscription.state != "invalid":
            self.gateway.release(subscription)
            self.send_error(subscription.id, code, message, sub_id=subscription.id)

    # -- time ------------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        limits = self.gateway.limits
        unsent = self.transport.unsent_bytes
        drained = self._written_bytes - unsent
        was_idle, self._was_idle = self._was_idle, not unsent
        if drained > self._drained_before or was_idle or not unsent:
            self._drained_before, self._progress_at = drained, now
            self.drained.set()
        elif now - self._progress_at >= limits.watch_stall_ms / 1000:
            self.close(1013, "the client does not read")
            return
        if self.identity is None:
            if now - self.opened_at >= limits.watch_auth_ms / 1000:
                self.gateway.count_auth_failure("unauthorized")
                self.send_error(None, "unauthorized", "authentication timed out")
                self.close(4401, "authentication timed out")
            return
        if self._is_expired(self.identity):
            self.close(4401, "the token has expired")
            return
        if now - self._beat_at >= limits.watch_heartbeat_ms / 1000:
            self._beat_at = now
            self.send_tokens()
        if self._written_bytes != self._written_before:
            self._written_before, self._quiet_since = self._written_bytes, now
        elif now - self._quiet_since >= limits.sse_keep_alive_ms / 1000:
            self._written_bytes += self.transport.keep_alive()
        self.due_at = self._next_check_at(self.identity, now)

    def _next_check_at(self, identity: Identity, now: float) -> float:
        """Idle connections are checked rarely, since there are many of them."""
        if self.transport.each_token:
            return now  # measures silence for the keep-alive
        due = min(now + CHECK_INTERVAL_S_MAX, self._beat_at + self.gateway.limits.watch_heartbeat_ms / 1000)
        if identity.expires_at is not None:
            due = min(due, now + identity.expires_at - self.gateway.now_s())
        return due

    def _is_expired(self, identity: Identity) -> bool:
        """Whether token and grace period have expired; sends `token_expired` once."""
        expires, wall = identity.expires_at, self.gateway.now_s()
        if expires is None or wall < expires:
            return False
        if not self._expiry_sent:
            self._expiry_sent = True
            self.gateway.count_auth_failure("token_expired")
            self.send_error(None, "token_expired", "the token has expired", retry_after_ms=0)
        return wall >= (identity.until_s or expires) or self.transport.each_token

    def send_tokens(self) -> None:
        """Send a heartbeat with a token for each subscription that moved since its last token."""
        tokens: dict[str, str] = {}
        for subscription in self.subscriptions.values():
            moved = subscription.state in ("live", "behind", "paused")
            if moved and sum(subscription.positions) != subscription.token_position_sum:
                tokens[subscription.id] = self.fresh_token(subscription)
        now_ms = self.gateway.context.clock.now_ns() // 1_000_000
        self.send(
            envelopes.reply("heartbeat", None, {"ts": now_ms, "tokens": tokens}), self.connection_token()
        )


def authenticate(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    """Handle `auth`, also repeated with a newer token; its claims may change what rules allow."""
    gateway = session.gateway
    try:
        identity = _verified(session, payload.get("token"))
    except MessageRefusedError as refused:
        gateway.count_auth_failure(refused.code)
        raise
    database = payload.get("database", session.database)
    if database is None:
        database = default_database(identity)
    if not isinstance(database, str):
        gateway.count_auth_failure("invalid_auth")
        raise MessageRefusedError("invalid_auth", "auth must name the database", close=4401)
    names.check_database(database)
    if session.database is not None and database != session.database and session.subscriptions:
        raise MessageRefusedError("bad_message", "the database cannot change while there are subscriptions")
    try:
        authorise(identity, Action.WATCH, db=database)
    except TailraceError:
        gateway.count_auth_failure("forbidden")
        raise
    gateway.registry.database(database)
    session.set_identity(identity, database)
    session.tokens_each = payload.get("tokens") == "each"
    session.checksum = payload.get("checksum") is True
    expires, limits = identity.expires_at, gateway.limits
    acknowledged = {
        "status": "ok",
        "connectionId": session.id,
        "database": database,
        "expiresAt": None if expires is None else int(expires * 1000),
        "matcher": MATCHER_VERSION,
        "limits": {"subscriptions": limits.watch_subscriptions, "messageBytes": limits.watch_message_bytes},
    }
    session.send(envelopes.reply("auth_ack", message_id, acknowledged))
    for subscription in tuple(session.subscriptions.values()):
        digest = gateway.access.read_digest(identity, subscription.watched.collection)
        if subscription.state != "invalid" and digest != subscription.digest:
            session.invalidate(subscription, "auth-changed")


def _verified(session: RealtimeSession, token: object) -> Identity:
    verifier = session.gateway.verifier
    if verifier is None:
        return ANONYMOUS
    if token is None and session.identity is not None:
        return session.identity
    if not isinstance(token, str):
        raise MessageRefusedError("unauthorized", "auth needs a token", close=4401)
    try:
        return verifier.verify(b"Bearer " + token.encode("utf-8", "replace"))
    except TailraceError as error:
        raise MessageRefusedError("invalid_auth", error.message, close=4401) from None
