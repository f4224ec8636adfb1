"""Resume: a subscription goes on exactly behind a token, or is told that it cannot; never at the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import orjson

from tailrace.auth import Action, authorise
from tailrace.watch.query import Query, read_query
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.messages import check_subscription_id, read_options, read_positions
from tailrace.watch.realtime.subscribing import (
    check_admission,
    make_subscription,
    register_subscription,
    require_signer,
)
from tailrace.watch.realtime.subscription import Subscription, SubscriptionOptions
from tailrace.watch.tokens import ResumePosition

if TYPE_CHECKING:
    from tailrace.watch.realtime.session import RealtimeSession


class _ResumeFailedError(Exception):  # noqa: N818 - an answer like any other
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
