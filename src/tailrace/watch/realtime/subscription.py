"""Subscriptions: client messages, admission, subscribe, acknowledge, unsubscribe and resume.

A subscription: one query of one connection, and how far it has come.

What realtime clients say, checked: options of a subscription, positions; and why something is refused.

Subscriptions come and go: made of a query and what its asker may read, counted, kept, given up.

Resume: a subscription goes on exactly behind a token, or is told that it cannot; never at the head.
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


# live: told of every change as it happens. behind: reads from the log at its own pace. snapshot: is sent what
# there is. paused: has as many events unacknowledged as it wants. invalid: has to be subscribed again.
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
    """`positions` is what the client has as long as it is not live; then it is what the collection has."""

    __slots__ = (
        "digest",
        "id",
        "interest",
        "newer",
        "options",
        "own",
        "principal",
        "query",
        "query_hash",
        "session",
        "state",
        "task",
        "told",
        "unacked",
        "watched",
        "written",
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
        self.digest = b""  # of the read rule and what it sees of the asker
        self.state: SubscriptionState = "behind"
        self.own: list[int] = []
        self.newer: dict[str, int] | None = None  # rows of a snapshot that are newer than where it began
        self.told = -1  # sum of the positions at the last token
        self.unacked: deque[tuple[int, int]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.principal: str | None = None  # who it counts for
        self.written = 0  # entry of the summaries by which jobs know of it; 0: they do not

    @property
    def key(self) -> str:
        """What jobs beside the gateway call it."""
        return f"{self.session.id}/{self.id}"

    @property
    def positions(self) -> list[int]:
        return self.watched.applied if self.state == "live" else self.own

    def acknowledge(self, positions: dict[int, int]) -> None:
        """Everything up to these was applied by the client; never moves back."""
        self.unacked = deque(
            (partition, seq) for partition, seq in self.unacked if seq > positions.get(partition, 0)
        )

    @property
    def full(self) -> bool:
        return 0 < self.options.max_unacked <= len(self.unacked)


UNACKED_MAX: Final = 10_000
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


class MessageRefusedError(Exception):
    """A message that is answered with an error."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.more = more


def check_subscription_id(given: object, what: str) -> str:
    """The id of a subscription."""
    if not isinstance(given, str) or not _ID.match(given):
        raise MessageRefusedError("bad_message", f"{what} is 1 to 64 of A-Z, a-z, 0-9, '_', '.', ':', '-'")
    return given


def default_database(identity: Identity) -> str | None:
    """The database that is meant when none is named."""
    if identity.anonymous:
        return names.DATABASE_DEFAULT
    return identity.dbs[0] if identity.dbs is not None and len(identity.dbs) == 1 else None


def read_options(payload: dict[str, Any], identity: Identity) -> SubscriptionOptions:
    options = SubscriptionOptions()
    truths = {"sendSnapshot": False, "includeData": True, "autoResync": False}
    found = {name: payload.get(name, default) for name, default in truths.items()}
    if not all(type(value) is bool for value in found.values()):
        raise MessageRefusedError("bad_message", "sendSnapshot, includeData and autoResync are true or false")
    options.snapshot, options.include_data = found["sendSnapshot"], found["includeData"]
    options.auto_resync = found["autoResync"]
    options.priority = payload.get("priority", "normal")
    if options.priority not in PRIORITIES:
        raise MessageRefusedError("bad_message", "priority is low, normal or high")
    if options.priority == "high" and not identity.anonymous and "manage" not in identity.scopes:
        raise MessageRefusedError("forbidden", "high priority needs the scope manage")
    unacked = payload.get("maxUnacked", 0)
    if type(unacked) is not int or not 0 <= unacked <= UNACKED_MAX:
        raise MessageRefusedError("bad_message", f"maxUnacked is a number from 0 to {UNACKED_MAX}")
    options.max_unacked = unacked
    return options


def read_positions(given: Any, partitions: int) -> dict[int, int]:
    """`{"10": 12345}`: the last that was applied, by partition."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise MessageRefusedError("bad_message", "positions is an object of numbers by partition")
    found: dict[int, int] = {}
    for key, seq in cast("dict[str, Any]", given).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 3 or int(key) >= partitions:
            raise MessageRefusedError("invalid_partition", f"there is no partition {key[:20]!r}")
        if type(seq) is not int or not 0 <= seq < 2**63:
            raise MessageRefusedError("bad_message", "a position is a number")
        found[int(key)] = seq
    return found


SOFT = 0.7  # of what may be unsent: from here on nothing optional begins


def make_subscription(
    session: RealtimeSession, sub_id: str, query: Query, options: SubscriptionOptions
) -> Subscription:
    """A subscription as the rules of this moment and the asker's identity have it; nobody knows it yet."""
    assert session.identity is not None
    assert session.database is not None
    gateway = session.gateway
    watched = gateway.watched(session.database, query.collection)
    rule: PredicatePart | None = gateway.access.read_part(session.identity, watched.collection)
    plain = Predicate(query.parts, query.documents)
    whole = plain if rule is None else Predicate([*query.parts, rule], query.documents)
    interest = Interest(whole, None if rule is None else Predicate([rule]))
    subscription = Subscription(session, sub_id, query, options, watched, interest)
    subscription.digest = gateway.access.read_digest(session.identity, watched.collection)
    about = b"\0".join((query.collection.encode(), plain.hash, subscription.digest))
    subscription.query_hash = hashlib.sha256(about).digest()[:16]
    return subscription


def register_subscription(subscription: Subscription) -> None:
    """From here on the connection and the collection know it."""
    session = subscription.session
    session.subscriptions[subscription.id] = subscription
    subscription.watched.subscriptions.add(subscription)
    session.gateway.kept(subscription)


def check_admission(session: RealtimeSession, sub_id: str, options: SubscriptionOptions) -> None:
    """Refuses what there is no room for, before anything is made."""
    gateway, limits = session.gateway, session.gateway.limits
    known = session.subscriptions.get(sub_id)
    if sub_id in session.streams or (known is not None and known.state != "invalid"):
        raise MessageRefusedError("duplicate_id", f"there is a subscription {sub_id!r} already")
    if len(session.subscriptions) >= limits.watch_subscriptions:
        session.forget_invalid()
    if len(session.subscriptions) >= limits.watch_subscriptions and sub_id not in session.subscriptions:
        raise MessageRefusedError(
            "limit_exceeded",
            f"a connection has at most {limits.watch_subscriptions} subscriptions",
            limit="subscriptions",
        )
    if gateway.count_of(session.identity) >= limits.watch_principal_subscriptions:
        raise MessageRefusedError(
            "limit_exceeded",
            f"somebody has at most {limits.watch_principal_subscriptions} subscriptions on all connections",
            limit="principal",
        )
    if gateway.level >= SOFT and (options.priority == "low" or options.snapshot):
        raise MessageRefusedError("overloaded", "the gateway has too much unsent", retry_after_ms=1000)
    require_signer(gateway)


def require_signer(gateway: Gateway) -> TokenSigner:
    if gateway.signer is None:
        raise MessageRefusedError("unavailable", "the server cannot sign tokens yet", retry_after_ms=1000)
    return gateway.signer


def subscribe(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    sub_id = check_subscription_id(message_id, "the id of subscribe")
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
    gateway.remember(subscription.query_hash, payload.get("query"))
    subscription.own = list(watched.applied)
    state = watched.state
    if not options.snapshot:
        # One that may not be told anything yet reads from the log as soon as it may.
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
        None if options.snapshot else session.wire_token(),
    )
    if options.snapshot:
        gateway.replays.snapshot(subscription)


def unsubscribe(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    sub_id = payload.get("id")
    found = session.subscriptions.pop(sub_id, None) if isinstance(sub_id, str) else None
    if found is None:
        raise MessageRefusedError("not_found", "there is no such subscription")
    if found.state != "invalid":
        session.gateway.release(found)
    session.send(envelopes.reply("unsubscribe_ack", message_id, {"status": "ok"}))


def acknowledge(session: RealtimeSession, payload: dict[str, Any]) -> None:
    """`ack`: what the client has applied, so that a subscription that was held back may go on."""
    subscription = session.subscriptions.get(str(payload.get("subId")))
    if subscription is None:
        raise MessageRefusedError("not_found", "there is no such subscription")
    count = len(subscription.watched.applied)
    subscription.acknowledge(read_positions(payload.get("positions"), count))
    if subscription.state == "paused" and not subscription.full:
        subscription.state = "behind"
        session.gateway.replays.follow(subscription)


class _ResumeFailedError(Exception):
    """Why a client has to begin again; with the query it can be made to do so by the server."""

    def __init__(self, reason: str, query: Query | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.query = query


def resume(
    session: RealtimeSession, message_id: str | None, payload: dict[str, Any], *, flat_form: bool = False
) -> None:
    """`flat_form`: the older form of the message, whose answer repeats two members beside `payload`."""
    assert session.identity is not None
    assert session.database is not None
    gateway = session.gateway
    authorise(session.identity, Action.WATCH, db=session.database)
    options = read_options(payload, session.identity)
    options.snapshot = False
    position = require_signer(gateway).read_position(payload.get("token"))
    sub_id = _sub_id(payload, position)
    try:
        if sub_id is None:
            raise _ResumeFailedError("token-invalid")
        check_admission(session, sub_id, options)
        subscription, given = _resumed(session, sub_id, position, payload, options)
    except _ResumeFailedError as failed:
        _resync(session, message_id, sub_id, options, failed, flat_form)
        return
    register_subscription(subscription)
    gateway.remember(subscription.query_hash, given)
    own, watched = subscription.own, subscription.watched
    gateway.resumed(subscription)
    following = [seq + 1 for seq in own]
    acknowledged = {
        "status": "ok",
        "subId": sub_id,
        "fromSeq": following[0] if len(following) == 1 else following,
        "from": following,
        "generation": watched.generation,
        "replaying": own != watched.applied,
        "token": session.fresh_token(subscription),
    }
    beside = {"status": "ok", "fromSeq": acknowledged["fromSeq"]} if flat_form else {}
    session.send(envelopes.reply("resume-ack", message_id, acknowledged, **beside))
    gateway.replays.follow(subscription)


def _sub_id(payload: dict[str, Any], position: ResumePosition | None) -> str | None:
    """The subscription that is meant; a token names the one it was made for. None: it cannot be known."""
    given = payload.get("subId")
    if given is None and position is None and isinstance(payload.get("token"), str):
        return None
    if given is None and position is not None and position.sub_id:
        given = position.sub_id
    return check_subscription_id(given, "the subId of resume")


def _resumed(
    session: RealtimeSession,
    sub_id: str,
    position: ResumePosition | None,
    payload: dict[str, Any],
    options: SubscriptionOptions,
) -> tuple[Subscription, object]:
    """The checks in their order: signature, database, generation, query, then what the log still has."""
    gateway = session.gateway
    if position is None:
        raise _ResumeFailedError("token-invalid", _query_of(payload))
    if position.database != session.database:
        raise _ResumeFailedError("database-mismatch")
    given = payload.get("query")
    if given is None:
        kept = gateway.recent_query(position.query)
        if kept is None:
            raise _ResumeFailedError("subscription-unknown")
        given = orjson.loads(kept)
    query = read_query(given, live=True)
    subscription = make_subscription(session, sub_id, query, options)
    if position.collection != query.collection:
        raise _ResumeFailedError("query-changed", query)
    if position.generation != subscription.watched.generation:
        raise _ResumeFailedError("generation", query)
    if position.query != subscription.query_hash:
        raise _ResumeFailedError("query-changed", query)
    subscription.own = _resume_positions(subscription, position, payload, query)
    return subscription, given


def _query_of(payload: dict[str, Any]) -> Query | None:
    """With the query, whoever asked for `autoResync` need not do anything."""
    given = payload.get("query")
    return None if given is None else read_query(given, live=True)


def _resume_positions(
    subscription: Subscription, position: ResumePosition, payload: dict[str, Any], query: Query
) -> list[int]:
    """Where to go on: the token's positions, moved to what was applied since, if the log has what follows."""
    watched, limits = subscription.watched, subscription.session.gateway.limits
    applied = watched.applied
    if len(position.seqs) != len(applied):
        raise _ResumeFailedError("token-invalid", query)
    given = payload.get("positions")
    if given is None and "lastSeq" in payload:
        # One number says nothing about several partitions: then the token alone does.
        last: Any = payload["lastSeq"]
        if isinstance(last, dict):
            given = cast("dict[str, Any]", last)
        elif len(applied) == 1:
            given = {"0": last}
    own = list(position.seqs)
    for partition, seq in read_positions(given, len(applied)).items():
        if seq < own[partition]:
            raise _ResumeFailedError("token-invalid", query)
        own[partition] = seq
    if any(map(int.__gt__, own, applied)):
        raise _ResumeFailedError("token-invalid", query)
    if any(map(int.__lt__, own, watched.earliest)):
        raise _ResumeFailedError("retention", query)
    befores = None if watched.collection is None else watched.collection.befores
    unknown = befores is not None and not befores.reaches(own)
    if unknown or sum(applied) - sum(own) > limits.watch_resume_changes:
        raise _ResumeFailedError("too-far-behind", query)
    return own


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
    gateway.resume_failed(session, sub_id or "", reason, about)
    answer = {"status": "resync-required", "subId": sub_id, "reason": reason}
    beside = {"status": "resync-required", "fromSeq": None} if flat_form else {}
    session.send(envelopes.reply("resume-ack", message_id, answer, **beside), "")
    if failed.query is not None and sub_id is not None:
        subscription = make_subscription(session, sub_id, failed.query, options)
        register_subscription(subscription)
        session.invalidate(subscription, reason)
        return
    gateway.resynced(reason)
    told = {"subId": sub_id, "reason": reason, "generation": None, "retryAfterMs": 0, "autoResync": False}
    session.send(
        envelopes.subscription_notice(
            "resync-required", session.database, [] if sub_id is None else [sub_id], told
        ),
        "",
    )
