"""Subscriptions: options, admission, and the messages subscribe, unsubscribe, ack and resume.

A resume continues exactly after its token or fails with `resync-required`; it never skips to the head.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.watch import names
from tailrace.watch.matcher import MATCHER_VERSION, Interest
from tailrace.watch.predicate import Predicate, PredicatePart
from tailrace.watch.query import Query, read_query
from tailrace.watch.realtime import envelopes
from tailrace.watch.resume_tokens import ResumePosition

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway, WatchedCollection
    from tailrace.watch.realtime.session import RealtimeSession
    from tailrace.watch.resume_tokens import TokenSigner


# live: changes are delivered as they happen. behind: reads the log at its own pace. snapshot: receives the
# current documents. paused: maxUnacked reached. invalid: must be subscribed again.
SubscriptionState = Literal["live", "behind", "snapshot", "paused", "invalid"]
PRIORITIES: Final = ("low", "normal", "high")


class SubscriptionOptions:
    __slots__ = ("auto_resync", "include_data", "max_unacked", "priority", "snapshot")

    def __init__(self) -> None:
        self.snapshot = False
        self.include_data = True
        self.priority = "normal"
        self.auto_resync = False
        self.max_unacked = 0


class Subscription:
    """One query of one connection. While live, its positions are those of the collection."""

    __slots__ = (
        "client_positions",
        "digest",
        "id",
        "interest",
        "newer",
        "options",
        "principal",
        "query",
        "query_hash",
        "session",
        "state",
        "summary_entry",
        "task",
        "token_position_sum",
        "unacked",
        "watched",
    )

    def __init__(
        self,
        session: RealtimeSession,
        sub_id: str,
        query: Query,
        options: SubscriptionOptions,
        watched: WatchedCollection,
        interest: Interest,
    ) -> None:
        self.session = session
        self.id = sub_id
        self.query = query
        self.options = options
        self.watched = watched
        self.interest = interest
        self.query_hash = b""
        self.digest = b""  # of the read rule and the claims it uses
        self.state: SubscriptionState = "behind"
        self.client_positions: list[int] = []
        self.newer: dict[str, int] | None = None  # snapshot rows newer than its start
        self.token_position_sum = -1  # at the last token sent
        self.unacked: deque[tuple[int, int]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.principal: str | None = None  # whose limit it counts against
        self.summary_entry = 0  # entry in the summaries stream for jobs; 0: none

    @property
    def key(self) -> str:
        """Its name in summaries and deliveries."""
        return f"{self.session.id}/{self.id}"

    @property
    def positions(self) -> list[int]:
        return self.watched.applied if self.state == "live" else self.client_positions

    def acknowledge(self, positions: dict[int, int]) -> None:
        """Drop unacknowledged events up to these positions."""
        self.unacked = deque(
            (partition, seq) for partition, seq in self.unacked if seq > positions.get(partition, 0)
        )

    @property
    def is_unacked_full(self) -> bool:
        return 0 < self.options.max_unacked <= len(self.unacked)


UNACKED_MAX: Final = 10_000
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


class MessageRefusedError(Exception):
    """A client message that is rejected with an error."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.more = more


def check_subscription_id(value: object, what: str) -> str:
    if not isinstance(value, str) or not _ID.match(value):
        raise MessageRefusedError(
            "bad_message", f"{what} must be 1 to 64 of A-Z, a-z, 0-9, '_', '.', ':', '-'"
        )
    return value


def default_database(identity: Identity) -> str | None:
    """The database if the client names none."""
    if identity.anonymous:
        return names.DATABASE_DEFAULT
    return identity.dbs[0] if identity.dbs is not None and len(identity.dbs) == 1 else None


def read_options(payload: dict[str, Any], identity: Identity) -> SubscriptionOptions:
    options = SubscriptionOptions()
    truths = {"sendSnapshot": False, "includeData": True, "autoResync": False}
    found = {name: payload.get(name, default) for name, default in truths.items()}
    if not all(type(value) is bool for value in found.values()):
        raise MessageRefusedError(
            "bad_message", "sendSnapshot, includeData and autoResync must be true or false"
        )
    options.snapshot, options.include_data = found["sendSnapshot"], found["includeData"]
    options.auto_resync = found["autoResync"]
    options.priority = payload.get("priority", "normal")
    if options.priority not in PRIORITIES:
        raise MessageRefusedError("bad_message", "priority must be low, normal or high")
    if options.priority == "high" and not identity.anonymous and "manage" not in identity.scopes:
        raise MessageRefusedError("forbidden", "high priority requires the scope manage")
    unacked = payload.get("maxUnacked", 0)
    if type(unacked) is not int or not 0 <= unacked <= UNACKED_MAX:
        raise MessageRefusedError("bad_message", f"maxUnacked must be an integer from 0 to {UNACKED_MAX}")
    options.max_unacked = unacked
    return options


def read_positions(value: Any, partitions: int) -> dict[int, int]:
    """Parse `{"10": 12345}`: the last applied change by partition."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MessageRefusedError("bad_message", "positions must be an object of integers by partition")
    found: dict[int, int] = {}
    for key, seq in cast("dict[str, Any]", value).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 3 or int(key) >= partitions:
            raise MessageRefusedError("invalid_partition", f"partition {key[:20]!r} does not exist")
        if type(seq) is not int or not 0 <= seq < 2**63:
            raise MessageRefusedError("bad_message", "a position must be a non-negative integer")
        found[int(key)] = seq
    return found


SOFT = 0.7  # of the outbound limit: no optional work is admitted above it


def make_subscription(
    session: RealtimeSession, sub_id: str, query: Query, options: SubscriptionOptions
) -> Subscription:
    """Build a subscription with the current rules and identity; not registered yet."""
    assert session.identity is not None
    assert session.database is not None
    gateway = session.gateway
    watched = gateway.watched(session.database, query.collection)
    rule: PredicatePart | None = gateway.access.read_predicate_part(session.identity, watched.collection)
    plain = Predicate(query.parts, query.documents)
    whole = plain if rule is None else Predicate([*query.parts, rule], query.documents)
    interest = Interest(whole, None if rule is None else Predicate([rule]))
    subscription = Subscription(session, sub_id, query, options, watched, interest)
    subscription.digest = gateway.access.read_digest(session.identity, watched.collection)
    about = b"\0".join((query.collection.encode(), plain.hash, subscription.digest))
    subscription.query_hash = hashlib.sha256(about).digest()[:16]
    return subscription


def register_subscription(subscription: Subscription) -> None:
    """Add it to its connection and collection."""
    session = subscription.session
    session.subscriptions[subscription.id] = subscription
    subscription.watched.subscriptions.add(subscription)
    session.gateway.on_subscribed(subscription)


def check_admission(session: RealtimeSession, sub_id: str, options: SubscriptionOptions) -> None:
    """Reject duplicates and subscriptions over a limit."""
    gateway, limits = session.gateway, session.gateway.limits
    known = session.subscriptions.get(sub_id)
    if sub_id in session.streams or (known is not None and known.state != "invalid"):
        raise MessageRefusedError("duplicate_id", f"subscription {sub_id!r} already exists")
    if len(session.subscriptions) >= limits.watch_subscriptions:
        session.drop_invalid()
    if len(session.subscriptions) >= limits.watch_subscriptions and sub_id not in session.subscriptions:
        raise MessageRefusedError(
            "limit_exceeded",
            f"a connection may have at most {limits.watch_subscriptions} subscriptions",
            limit="subscriptions",
        )
    if gateway.count_subscriptions(session.identity) >= limits.watch_principal_subscriptions:
        raise MessageRefusedError(
            "limit_exceeded",
            f"an identity may have at most {limits.watch_principal_subscriptions} subscriptions",
            limit="principal",
        )
    if gateway.level >= SOFT and (options.priority == "low" or options.snapshot):
        raise MessageRefusedError("overloaded", "the gateway has too many unsent bytes", retry_after_ms=1000)
    require_signer(gateway)


def require_signer(gateway: Gateway) -> TokenSigner:
    if gateway.signer is None:
        raise MessageRefusedError(
            "unavailable", "the token signing key is not available yet, retry", retry_after_ms=1000
        )
    return gateway.signer


def subscribe(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    sub_id = check_subscription_id(message_id, "the id of the subscribe message")
    assert session.identity is not None
    assert session.database is not None
    authorise(session.identity, Action.WATCH, db=session.database)
    options = read_options(payload, session.identity)
    query = read_query(payload.get("query"), live=True)
    check_admission(session, sub_id, options)
    subscription = make_subscription(session, sub_id, query, options)
    gateway, watched = session.gateway, subscription.watched
    gateway.check_room(subscription)
    register_subscription(subscription)
    gateway.cache_query(subscription.query_hash, payload.get("query"))
    subscription.client_positions = list(watched.applied)
    state = watched.state
    if not options.snapshot:
        # While the collection loads, the subscription waits and then reads from the log.
        if state == "live":
            gateway.go_live(subscription)
        else:
            gateway.replays.follow(subscription)
    acknowledged = {
        "status": "ok",
        "subId": sub_id,
        "kind": "query",
        "state": state,
        "collection": query.collection,
        "generation": watched.generation,
        "partitions": len(watched.applied),
        "positions": watched.applied,
        "token": None if options.snapshot else session.fresh_token(subscription),
        "matcher": MATCHER_VERSION,
        "snapshot": options.snapshot,
    }
    session.send(
        envelopes.reply("subscribe_ack", message_id, acknowledged),
        None if options.snapshot else session.connection_token(),
    )
    if options.snapshot:
        gateway.replays.snapshot(subscription)


def unsubscribe(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    sub_id = payload.get("id")
    found = session.subscriptions.pop(sub_id, None) if isinstance(sub_id, str) else None
    if found is None:
        raise MessageRefusedError("not_found", "subscription not found")
    if found.state != "invalid":
        session.gateway.release(found)
    session.send(envelopes.reply("unsubscribe_ack", message_id, {"status": "ok"}))


def acknowledge(session: RealtimeSession, payload: dict[str, Any]) -> None:
    """Handle `ack`: positions that the client has applied; a paused subscription may continue."""
    subscription = session.subscriptions.get(str(payload.get("subId")))
    if subscription is None:
        raise MessageRefusedError("not_found", "subscription not found")
    count = len(subscription.watched.applied)
    subscription.acknowledge(read_positions(payload.get("positions"), count))
    if subscription.state == "paused" and not subscription.is_unacked_full:
        subscription.state = "behind"
        session.gateway.replays.follow(subscription)


class _ResumeFailedError(Exception):
    """Why the client must resync; with the query the server can do it (autoResync)."""

    def __init__(self, reason: str, query: Query | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.query = query


def resume(
    session: RealtimeSession, message_id: str | None, payload: dict[str, Any], *, flat_form: bool = False
) -> None:
    """`flat_form`: the older form of the message, whose reply repeats two members next to `payload`."""
    assert session.identity is not None
    assert session.database is not None
    gateway = session.gateway
    authorise(session.identity, Action.WATCH, db=session.database)
    options = read_options(payload, session.identity)
    options.snapshot = False
    position = require_signer(gateway).read_position(payload.get("token"))
    sub_id = _read_sub_id(payload, position)
    try:
        if sub_id is None:
            raise _ResumeFailedError("token-invalid")
        check_admission(session, sub_id, options)
        subscription, value = _make_resumed(session, sub_id, position, payload, options)
    except _ResumeFailedError as failed:
        _resync(session, message_id, sub_id, options, failed, flat_form)
        return
    register_subscription(subscription)
    gateway.cache_query(subscription.query_hash, value)
    positions, watched = subscription.client_positions, subscription.watched
    gateway.record_resume(subscription)
    following = [seq + 1 for seq in positions]
    acknowledged = {
        "status": "ok",
        "subId": sub_id,
        "fromSeq": following[0] if len(following) == 1 else following,
        "from": following,
        "generation": watched.generation,
        "replaying": positions != watched.applied,
        "token": session.fresh_token(subscription),
    }
    extra = {"status": "ok", "fromSeq": acknowledged["fromSeq"]} if flat_form else {}
    session.send(envelopes.reply("resume-ack", message_id, acknowledged, **extra))
    gateway.replays.follow(subscription)


def _read_sub_id(payload: dict[str, Any], position: ResumePosition | None) -> str | None:
    """The id from the payload or the token; None without an id if the token is invalid."""
    value = payload.get("subId")
    if value is None and position is None and isinstance(payload.get("token"), str):
        return None
    if value is None and position is not None and position.sub_id:
        value = position.sub_id
    return check_subscription_id(value, "the subId of the resume message")


def _make_resumed(
    session: RealtimeSession,
    sub_id: str,
    position: ResumePosition | None,
    payload: dict[str, Any],
    options: SubscriptionOptions,
) -> tuple[Subscription, object]:
    """Checks in order: signature, database, query, generation, then what the log still has."""
    gateway = session.gateway
    if position is None:
        raise _ResumeFailedError("token-invalid", _payload_query(payload))
    if position.database != session.database:
        raise _ResumeFailedError("database-mismatch")
    value = payload.get("query")
    if value is None:
        cached = gateway.cached_query(position.query)
        if cached is None:
            raise _ResumeFailedError("subscription-unknown")
        value = orjson.loads(cached)
    query = read_query(value, live=True)
    subscription = make_subscription(session, sub_id, query, options)
    if position.collection != query.collection:
        raise _ResumeFailedError("query-changed", query)
    if position.generation != subscription.watched.generation:
        raise _ResumeFailedError("generation", query)
    if position.query != subscription.query_hash:
        raise _ResumeFailedError("query-changed", query)
    subscription.client_positions = _resume_positions(subscription, position, payload, query)
    return subscription, value


def _payload_query(payload: dict[str, Any]) -> Query | None:
    """The query in the payload, needed for `autoResync`."""
    value = payload.get("query")
    return None if value is None else read_query(value, live=True)


def _resume_positions(
    subscription: Subscription, position: ResumePosition, payload: dict[str, Any], query: Query
) -> list[int]:
    """The token's positions, advanced to those the client applied; the log must have what follows."""
    watched, limits = subscription.watched, subscription.session.gateway.limits
    applied = watched.applied
    if len(position.seqs) != len(applied):
        raise _ResumeFailedError("token-invalid", query)
    value = payload.get("positions")
    if value is None and "lastSeq" in payload:
        # A single number is ambiguous with several partitions: then only the token counts.
        last: Any = payload["lastSeq"]
        if isinstance(last, dict):
            value = cast("dict[str, Any]", last)
        elif len(applied) == 1:
            value = {"0": last}
    positions = list(position.seqs)
    for partition, seq in read_positions(value, len(applied)).items():
        if seq < positions[partition]:
            raise _ResumeFailedError("token-invalid", query)
        positions[partition] = seq
    if any(map(int.__gt__, positions, applied)):
        raise _ResumeFailedError("token-invalid", query)
    if any(map(int.__lt__, positions, watched.earliest)):
        raise _ResumeFailedError("retention", query)
    images = None if watched.collection is None else watched.collection.before_images
    unknown = images is not None and not images.covers(positions)
    if unknown or sum(applied) - sum(positions) > limits.watch_resume_changes:
        raise _ResumeFailedError("too-far-behind", query)
    return positions


def _resync(
    session: RealtimeSession,
    message_id: str | None,
    sub_id: str | None,
    options: SubscriptionOptions,
    failed: _ResumeFailedError,
    flat_form: bool,
) -> None:
    assert session.database is not None
    gateway, reason = session.gateway, failed.reason
    about = None if failed.query is None else failed.query.collection
    gateway.record_resume_failure(session, sub_id or "", reason, about)
    acknowledged = {"status": "resync-required", "subId": sub_id, "reason": reason}
    extra = {"status": "resync-required", "fromSeq": None} if flat_form else {}
    session.send(envelopes.reply("resume-ack", message_id, acknowledged, **extra), "")
    if failed.query is not None and sub_id is not None:
        subscription = make_subscription(session, sub_id, failed.query, options)
        register_subscription(subscription)
        session.invalidate(subscription, reason)
        return
    gateway.count_resync(reason)
    payload = {"subId": sub_id, "reason": reason, "generation": None, "retryAfterMs": 0, "autoResync": False}
    session.send(
        envelopes.subscription_notice(
            "resync-required", session.database, [] if sub_id is None else [sub_id], payload
        ),
        "",
    )
