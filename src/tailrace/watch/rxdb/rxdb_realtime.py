"""`stream` on `/realtime/ws`: replication over a connection that has subscriptions, too."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.envelopes import Envelope
from tailrace.watch.realtime.messages import MessageRefusedError, check_subscription_id
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.rxdb.checkpoint import read_checkpoint
from tailrace.watch.rxdb.rxdb import LIMIT_DEFAULT, LIMIT_MAX, Replication
from tailrace.watch.rxdb.rxdb_feed import POLL_S, ReplicationFeed
from tailrace.watch.rxdb.rxdb_pages import DocumentShape


class StreamListener:
    """A stream of a realtime connection: ends with the connection, or when it has to be begun again."""

    def __init__(self, replication: Replication, session: RealtimeSession, stream_id: str) -> None:
        self._replication = replication
        self._session = session
        self._id = stream_id
        self._over = False

    @property
    def identity(self) -> Identity:
        assert self._session.identity is not None
        return self._session.identity

    async def room(self) -> bool:
        session = self._session
        while not session.ended and not self._over:
            if session.has_room and not self._replication.is_crowded:
                return True
            session.drained.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(session.drained.wait(), POLL_S)
        return False

    async def tell(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None:
        database = feed.database
        if pos is None:
            self._end()
            told = {
                "subId": self._id,
                "reason": "gap",
                "generation": None,
                "retryAfterMs": 0,
                "autoResync": False,
            }
            self._session.send(envelopes.subscription_notice("resync-required", database, [self._id], told))
            return
        payload = b'{"streamId":%b,%b,"upToDate":%b}' % (
            orjson.dumps(self._id),
            result[1:-1],
            b"true" if feed.is_up_to_date else b"false",
        )
        self._session.send(
            Envelope(
                b'{"type":"stream-event","version":1,"database":%b,"payload":%b,"extensions":{}}'
                % (orjson.dumps(database), payload)
            )
        )

    def fail(self, refusal: TailraceError) -> None:
        self._end()
        self._session.refuse(self._id, refusal.code, refusal.message, sub_id=self._id)

    def _end(self) -> None:
        self._over = True
        self._session.streams.pop(self._id, None)


class RealtimeStreams:
    """Begins the streams of realtime connections."""

    def __init__(self, replication: Replication) -> None:
        self._replication = replication

    def start(self, session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> None:
        replication = self._replication
        stream_id = check_subscription_id(message_id, "the id of stream")
        assert session.identity is not None
        assert session.database is not None
        authorise(session.identity, Action.REPLICATION_PULL, db=session.database)
        name, limit = payload.get("collection"), payload.get("batchSize", LIMIT_DEFAULT)
        if not isinstance(name, str):
            raise MessageRefusedError("bad_message", "stream names its collection")
        if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
            raise MessageRefusedError("bad_message", f"batchSize is a number from 1 to {LIMIT_MAX}")
        self._admit(session, stream_id)
        names.check_collection(name)
        checkpoint = read_checkpoint(payload.get("checkpoint"), replication.signer)
        collection = replication.find(session.database, name)
        walk = None if collection is None else replication.walk(session.identity, collection, checkpoint)
        listener = StreamListener(replication, session, stream_id)
        feed = ReplicationFeed(replication, listener, session.database, name, DocumentShape(), limit, walk)
        generation = 1 if feed.walk is None else feed.walk.generation
        acknowledged = {"status": "ok", "subId": stream_id, "kind": "stream", "generation": generation}
        session.send(envelopes.reply("subscribe_ack", message_id, acknowledged))
        session.streams[stream_id] = replication.follow(feed)

    def _admit(self, session: RealtimeSession, stream_id: str) -> None:
        known = session.subscriptions.get(stream_id)
        if stream_id in session.streams or (known is not None and known.state != "invalid"):
            raise MessageRefusedError("duplicate_id", f"there is a subscription {stream_id!r} already")
        count = len(session.streams) + len(session.subscriptions)
        if count >= self._replication.limits.watch_subscriptions:
            raise MessageRefusedError(
                "limit_exceeded",
                f"a connection has at most {self._replication.limits.watch_subscriptions} subscriptions",
                limit="subscriptions",
            )


def stop_stream(session: RealtimeSession, message_id: str | None, payload: dict[str, Any]) -> bool:
    """Ends a stream; False if there is none of this name."""
    given = payload.get("id")
    task = session.streams.pop(given, None) if isinstance(given, str) else None
    if task is None:
        return False
    task.cancel()
    session.send(envelopes.reply("unsubscribe_ack", message_id, {"status": "ok"}))
    return True
