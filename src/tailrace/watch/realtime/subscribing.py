"""Subscriptions come and go: made of a query and what its asker may read, counted, kept, given up."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tailrace.auth import Action, authorise
from tailrace.watch.matcher import MATCHER_VERSION, Interest
from tailrace.watch.predicate import Predicate, PredicatePart
from tailrace.watch.query import Query, read_query
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.messages import (
    MessageRefusedError,
    check_subscription_id,
    read_options,
    read_positions,
)
from tailrace.watch.realtime.subscription import Subscription, SubscriptionOptions

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway
    from tailrace.watch.realtime.session import RealtimeSession
    from tailrace.watch.tokens import TokenSigner

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
