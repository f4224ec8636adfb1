"""Who is at the other end of a realtime connection: said once, renewed, and over at some time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.auth import ANONYMOUS, Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.matcher import MATCHER_VERSION
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.messages import MessageRefusedError, default_database

if TYPE_CHECKING:
    from tailrace.watch.realtime.session import RealtimeSession


def authenticate(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
    """`auth`: the first time, or again with a newer token. Claims that a rule uses may be others now."""
    gateway = session.gateway
    try:
        identity = _verified(session, payload.get("token"))
    except MessageRefusedError as refused:
        gateway.auth_failed(refused.code)
        raise
    database = payload.get("database", session.database)
    if database is None:
        database = default_database(identity)
    if not isinstance(database, str):
        gateway.auth_failed("invalid_auth")
        raise MessageRefusedError("invalid_auth", "auth names the database", close=4401)
    names.check_database(database)
    if session.database is not None and database != session.database and session.subscriptions:
        raise MessageRefusedError("bad_message", "a connection with subscriptions cannot change its database")
    try:
        authorise(identity, Action.WATCH, db=database)
    except TailraceError:
        gateway.auth_failed("forbidden")
        raise
    gateway.book.database(database)
    session.known_as(identity, database)
    session.tokens_each = payload.get("tokens") == "each"
    session.checksum = payload.get("checksum") is True
    expires, limits = identity.expires_at, gateway.limits
    answer = {
        "status": "ok",
        "connectionId": session.id,
        "database": database,
        "expiresAt": None if expires is None else int(expires * 1000),
        "matcher": MATCHER_VERSION,
        "limits": {"subscriptions": limits.watch_subscriptions, "messageBytes": limits.watch_message_bytes},
    }
    session.send(envelopes.reply("auth_ack", message_id, answer))
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
    except TailraceError as refusal:
        raise MessageRefusedError("invalid_auth", refusal.message, close=4401) from None
