"""A realtime connection: what its client says, what it is told, and how much of that is still unsent."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import orjson

from tailrace import __version__
from tailrace.api.watch import frames
from tailrace.api.watch.frames import Frame
from tailrace.api.watch.subscription import PRIORITIES, Options, Subscription
from tailrace.auth import ANONYMOUS, Action, Identity, authorise
from tailrace.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.change import Change
from tailrace.watch.matcher import Interest
from tailrace.watch.predicate import SEMANTICS, Part, Predicate
from tailrace.watch.query import Query, read_query

if TYPE_CHECKING:
    from tailrace.api.watch.gateway import Gateway

logger = logging.getLogger("tailrace.watch")

MATCHER: Final = f"{__version__}+{hashlib.sha256(SEMANTICS.encode()).hexdigest()[:4]}"
SOFT, HARD, RECOVER = 0.7, 0.9, 0.6
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_ONCE_MORE: Final = frozenset(
    ("gap", "generation", "retention", "too-far-behind", "rule-changed", "overflow", "token-invalid")
) | frozenset(("query-changed", "auth-changed"))


class Wire(Protocol):
    """How envelopes reach the client."""

    each_token: bool  # every envelope goes with a token for the whole connection

    def send(self, frame: Frame, token: str | None) -> int: ...
    def close(self, code: int, reason: str) -> None: ...
    @property
    def unsent_bytes(self) -> int: ...


class Refused(Exception):  # noqa: N818 - not a defect
    """A message that is answered with an error."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.more = more


class Session:
    """Who is at the other end, and what they watch."""

    def __init__(self, gateway: Gateway, wire: Wire, identity: Identity | None, database: str | None) -> None:
        self._gateway = gateway
        self.wire = wire
        self.identity = identity  # None until they said who they are
        self.database = database
        self.id = f"c_{secrets.token_hex(6)}"
        self.subscriptions: dict[str, Subscription] = {}
        self.snapshot_sizes: dict[str, tuple[int, int]] = {}
        self.drained = asyncio.Event()
        self.tokens_each = False
        self.checksum = False
        self.ended = False
        now = gateway.context.loop.time()
        self.opened_at = now
        self._sent_bytes = 0
        self._taken_before = 0
        self._progress_at = now
        self._beat_at = now
        self._told_expiry = False
        gateway.opened(self)

    # -- sending ---------------------------------------------------------------------------------------

    @property
    def taken_bytes(self) -> int:
        return self._sent_bytes - self.wire.unsent_bytes

    @property
    def has_room(self) -> bool:
        return self.wire.unsent_bytes <= RECOVER * self._gateway.limits.watch_outbound_bytes

    def send(self, frame: Frame, token: str | None = None) -> None:
        if not self.ended:
            self._sent_bytes += self.wire.send(frame, token)

    def refuse(self, message_id: str | None, code: str, message: str, **more: Any) -> None:
        self.send(frames.error(message_id, code, message, **more))

    def close(self, code: int, reason: str) -> None:
        if not self.ended:
            self.wire.close(code, reason)
            self.gone()

    def gone(self) -> None:
        """The client left, or was sent away."""
        if self.ended:
            return
        self.ended = True
        for subscription in self.subscriptions.values():
            if subscription.state != "invalid":
                self._gateway.release(subscription)
        self.subscriptions.clear()
        self._gateway.closed(self)

    def on_drain(self) -> None:
        self.drained.set()

    def connection_token(self, after: tuple[Subscription, Change] | None = None) -> str | None:
        """For wires that know one token for everything: that of each subscription that has one."""
        found: dict[str, str] = {}
        for subscription in self.subscriptions.values():
            if subscription.state == "snapshot":
                return None  # cut off here, the snapshot has to begin again
            if subscription.state == "invalid":
                continue
            seqs: list[int] | None = None
            if after is not None and after[0] is subscription and len(self.subscriptions) == 1:
                seqs = list(subscription.positions)
                seqs[after[1].partition] = after[1].seq
            found[subscription.id] = self._gateway.position(subscription, seqs)
        return orjson.dumps(found).hex() if found else None

    def _token(self, after: tuple[Subscription, Change] | None = None) -> str | None:
        return self.connection_token(after) if self.wire.each_token else None

    # -- events ----------------------------------------------------------------------------------------

    def deliver(
        self,
        change: Change,
        lsn: str,
        op: str,
        content: bytes,
        variant: tuple[str, str],
        subscriptions: Sequence[Subscription],
        shared: dict[tuple[str, ...], Frame],
    ) -> None:
        """A change to those of the connection's subscriptions that it concerns in the same way."""
        ready: list[Subscription] = []
        for subscription in subscriptions:
            if subscription.state != "live":
                continue
            if self._takes(subscription):
                ready.append(subscription)
            else:
                self._gateway.demote(subscription)
        if not ready:
            return
        self._gateway.deliveries[op] += len(ready)
        if self.tokens_each or self.wire.each_token:
            for subscription in ready:
                self._send_event(subscription, change, lsn, content)
        else:
            ids = tuple(subscription.id for subscription in ready)
            key = (op, *variant, str(self.checksum), *ids)
            frame = shared.get(key)
            if frame is None:
                frame = shared[key] = frames.event(change, lsn, ids, content, None, self.checksum)
            self.send(frame)
        for subscription in ready:
            if subscription.options.max_unacked:
                self._count_unacked(subscription, change)

    def _count_unacked(self, subscription: Subscription, change: Change) -> None:
        subscription.unacked.append((change.partition, change.seq))
        if subscription.full and subscription.state == "live":
            self._gateway.demote(subscription, paused=True)
            subscription.own[change.partition] = change.seq  # which it has been sent

    def _takes(self, subscription: Subscription) -> bool:
        unsent = self.wire.unsent_bytes
        if not unsent:
            return True
        level = unsent / self._gateway.limits.watch_outbound_bytes
        return level < (SOFT if subscription.options.priority == "low" else HARD)

    def _send_event(self, subscription: Subscription, change: Change, lsn: str, content: bytes) -> None:
        token: str | None = None
        if self.tokens_each:
            seqs = list(subscription.positions)
            seqs[change.partition] = change.seq
            token = self._gateway.position(subscription, seqs)
        frame = frames.event(change, lsn, (subscription.id,), content, token, self.checksum)
        self.send(frame, self._token((subscription, change)))

    def replayed(self, subscription: Subscription, change: Change, lsn: str, op: str, content: bytes) -> None:
        """An event that was read from the log; `own` still is the position before it."""
        self._gateway.deliveries[op] += 1
        if subscription.state == "snapshot":
            frame = frames.event(change, lsn, (subscription.id,), content, None, self.checksum)
            self.send(frame)
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
        self.send(frames.about("snapshot", self.database, [subscription.id], payload))

    def end_snapshot(self, subscription: Subscription) -> None:
        assert self.database is not None
        pages, count = self.snapshot_sizes.pop(subscription.id, (0, 0))
        payload = {
            "subId": subscription.id,
            "pages": pages,
            "count": count,
            "positions": subscription.positions,
            "token": self._fresh_token(subscription),
        }
        self.send(frames.about("snapshot-end", self.database, [subscription.id], payload), self._token())

    def _fresh_token(self, subscription: Subscription) -> str:
        subscription.told = sum(subscription.positions)
        return self._gateway.position(subscription)

    def invalidate(self, subscription: Subscription, reason: str, *, retry_after_ms: int = 0) -> None:
        """What the client has may be wrong from here on: it is told so, and nothing else follows."""
        if subscription.state == "invalid" or self.ended:
            return
        assert self.database is not None
        gateway = self._gateway
        gateway.release(subscription)
        gateway.resyncs[reason] = gateway.resyncs.get(reason, 0) + 1
        again = subscription.options.auto_resync and reason in _ONCE_MORE
        payload = {
            "subId": subscription.id,
            "reason": reason,
            "generation": subscription.watched.generation,
            "retryAfterMs": retry_after_ms,
            "autoResync": again,
        }
        self.send(frames.about("resync-required", self.database, [subscription.id], payload), "")
        if reason == "cost-exceeded":
            self.refuse(None, "cost_exceeded", "the query took too many steps", sub_id=subscription.id)
        if again:
            fresh = self._made(subscription.id, subscription.query, subscription.options)
            self._keep(fresh)
            gateway.replays.snapshot(fresh)
        elif self.wire.each_token:
            self.close(1000, "the subscription has to be made again")

    def fail(self, subscription: Subscription, code: str, message: str) -> None:
        """A snapshot that cannot be completed gets no end."""
        if subscription.state != "invalid":
            self._gateway.release(subscription)
            self.refuse(subscription.id, code, message, sub_id=subscription.id)

    # -- subscribing -----------------------------------------------------------------------------------

    def _made(self, sub_id: str, query: Query, options: Options) -> Subscription:
        assert self.identity is not None
        assert self.database is not None
        gateway = self._gateway
        watched = gateway.watched(self.database, query.collection)
        rule: Part | None = gateway.access.read_part(self.identity, watched.collection)
        plain = Predicate(query.parts, query.documents)
        whole = plain if rule is None else Predicate([*query.parts, rule], query.documents)
        interest = Interest(whole, None if rule is None else Predicate([rule]))
        subscription = Subscription(self, sub_id, query, options, watched, interest)
        subscription.digest = gateway.access.read_digest(self.identity, watched.collection)
        about = b"\0".join((query.collection.encode(), plain.hash, subscription.digest))
        subscription.query_hash = hashlib.sha256(about).digest()[:16]
        return subscription

    def _keep(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.id] = subscription
        subscription.watched.subscriptions.add(subscription)

    def _admit(self, sub_id: str, options: Options) -> None:
        gateway = self._gateway
        known = self.subscriptions.get(sub_id)
        if known is not None and known.state != "invalid":
            raise Refused("duplicate_id", f"there is a subscription {sub_id!r} already")
        if len(self.subscriptions) >= gateway.limits.watch_subscriptions:
            living = {key: one for key, one in self.subscriptions.items() if one.state != "invalid"}
            self.subscriptions = living
            if len(self.subscriptions) >= gateway.limits.watch_subscriptions:
                raise Refused(
                    "limit_exceeded",
                    f"a connection has at most {gateway.limits.watch_subscriptions} subscriptions",
                    limit="subscriptions",
                )
        if gateway.level >= SOFT and (options.priority == "low" or options.snapshot):
            raise Refused("overloaded", "the gateway has too much unsent", retry_after_ms=1000)
        if gateway.signer is None:
            raise Refused("unavailable", "the server cannot sign tokens yet", retry_after_ms=1000)

    def subscribe(self, message_id: str | None, payload: dict[str, Any]) -> None:
        if message_id is None or not _ID.match(message_id):
            raise Refused(
                "bad_message", "the id of subscribe is 1 to 64 of A-Z, a-z, 0-9, '_', '.', ':', '-'"
            )
        assert self.identity is not None
        assert self.database is not None
        authorise(self.identity, Action.WATCH, db=self.database)
        options = read_options(payload, self.identity)
        query = read_query(payload.get("query"), live=True)
        self._admit(message_id, options)
        subscription = self._made(message_id, query, options)
        subscription.watched.matcher.index.check_room(subscription.interest.whole)
        self._keep(subscription)
        gateway, watched = self._gateway, subscription.watched
        gateway.remember(subscription.query_hash, payload.get("query"))
        subscription.own = list(watched.applied)
        if not options.snapshot:
            gateway.go_live(subscription)
        acknowledged = {
            "status": "ok",
            "subId": message_id,
            "kind": "query",
            "state": "live",
            "collection": query.collection,
            "generation": watched.generation,
            "partitions": len(watched.applied),
            "positions": watched.applied,
            "token": None if options.snapshot else self._fresh_token(subscription),
            "matcher": MATCHER,
            "snapshot": options.snapshot,
        }
        self.send(
            frames.reply("subscribe_ack", message_id, acknowledged),
            None if options.snapshot else self._token(),
        )
        if options.snapshot:
            gateway.replays.snapshot(subscription)

    def unsubscribe(self, message_id: str | None, payload: dict[str, Any]) -> None:
        sub_id = payload.get("id")
        found = self.subscriptions.pop(sub_id, None) if isinstance(sub_id, str) else None
        if found is None:
            raise Refused("not_found", "there is no such subscription")
        if found.state != "invalid":
            self._gateway.release(found)
        self.send(frames.reply("unsubscribe_ack", message_id, {"status": "ok"}))

    def resume(self, message_id: str | None, payload: dict[str, Any], *, seed_form: bool = False) -> None:
        """Goes on exactly behind a token, or says that it cannot; it never begins at the head."""
        assert self.identity is not None
        assert self.database is not None
        gateway = self._gateway
        sub_id = payload.get("subId")
        if not isinstance(sub_id, str) or not _ID.match(sub_id):
            raise Refused("bad_message", "resume names its subId")
        authorise(self.identity, Action.WATCH, db=self.database)
        options = read_options(payload, self.identity)
        options.snapshot = False
        self._admit(sub_id, options)
        assert gateway.signer is not None
        position = gateway.signer.read_position(payload.get("token"))
        if position is None:
            self._cannot_resume(message_id, sub_id, "token-invalid", options, None)
            return
        if position.database != self.database:
            self._cannot_resume(message_id, sub_id, "database-mismatch", options, None)
            return
        given = payload.get("query")
        if given is None:
            kept = gateway.recent_queries.get(position.query)
            if kept is None:
                self._cannot_resume(message_id, sub_id, "subscription-unknown", options, None)
                return
            given = orjson.loads(kept)
        query = read_query(given, live=True)
        subscription = self._made(sub_id, query, options)
        watched = subscription.watched
        if position.generation != watched.generation:
            self._cannot_resume(message_id, sub_id, "generation", options, query)
            return
        if position.collection != query.collection or position.query != subscription.query_hash:
            self._cannot_resume(message_id, sub_id, "query-changed", options, query)
            return
        own = self._advanced(position.seqs, watched.applied, payload)
        if own is None:
            self._cannot_resume(message_id, sub_id, "token-invalid", options, query)
            return
        if sum(watched.applied) - sum(own) > gateway.limits.watch_resume_changes:
            self._cannot_resume(message_id, sub_id, "too-far-behind", options, query)
            return
        self._keep(subscription)
        gateway.remember(subscription.query_hash, given)
        subscription.own = own
        gateway.resumes["ok"] += 1
        acknowledged = {
            "status": "ok",
            "subId": sub_id,
            "fromSeq": own[0] + 1 if len(own) == 1 else None,
            "from": [seq + 1 for seq in own],
            "generation": watched.generation,
            "replaying": own != watched.applied,
        }
        self.send(frames.reply("resume-ack", message_id, acknowledged))
        gateway.replays.follow(subscription)

    def _advanced(self, seqs: list[int], applied: list[int], payload: dict[str, Any]) -> list[int] | None:
        """The token's positions, moved on to what the client says it has applied; None if that cannot be."""
        if len(seqs) != len(applied):
            return None
        given = payload.get("positions")
        if given is None and "lastSeq" in payload and len(seqs) == 1:
            given = {"0": payload["lastSeq"]}
        own = list(seqs)
        for partition, seq in read_positions(given, len(applied)).items():
            if seq < own[partition]:
                return None
            own[partition] = seq
        return None if any(map(int.__gt__, own, applied)) else own

    def _cannot_resume(
        self, message_id: str | None, sub_id: str, reason: str, options: Options, query: Query | None
    ) -> None:
        assert self.database is not None
        gateway = self._gateway
        gateway.resumes["resync-required"] += 1
        answer = {"status": "resync-required", "subId": sub_id, "reason": reason}
        self.send(frames.reply("resume-ack", message_id, answer), "")
        if query is not None:
            subscription = self._made(sub_id, query, options)
            self._keep(subscription)
            self.invalidate(subscription, reason)
            return
        gateway.resyncs[reason] = gateway.resyncs.get(reason, 0) + 1
        told = {"subId": sub_id, "reason": reason, "generation": None, "retryAfterMs": 0, "autoResync": False}
        self.send(frames.about("resync-required", self.database, [sub_id], told), "")

    def acknowledge(self, payload: dict[str, Any]) -> None:
        subscription = self.subscriptions.get(str(payload.get("subId")))
        if subscription is None:
            raise Refused("not_found", "there is no such subscription")
        count = len(subscription.watched.applied)
        subscription.acknowledge(read_positions(payload.get("positions"), count))
        if subscription.state == "paused" and not subscription.full:
            subscription.state = "behind"
            self._gateway.replays.follow(subscription)

    # -- identity --------------------------------------------------------------------------------------

    def authenticate(self, message_id: str | None, payload: dict[str, Any]) -> None:
        gateway = self._gateway
        identity = ANONYMOUS
        if gateway.verifier is not None:
            token = payload.get("token")
            if token is None and self.identity is not None:
                identity = self.identity
            elif not isinstance(token, str):
                raise Refused("unauthorized", "auth needs a token", close=4401)
            else:
                try:
                    identity = gateway.verifier.verify(b"Bearer " + token.encode("utf-8", "replace"))
                except TailraceError as refusal:
                    raise Refused("invalid_auth", refusal.message, close=4401) from None
        database = payload.get("database", self.database)
        if database is None:
            database = only_database(identity)
        if not isinstance(database, str):
            raise Refused("invalid_auth", "auth names the database", close=4401)
        names.check_database(database)
        if self.database is not None and database != self.database and self.subscriptions:
            raise Refused("bad_message", "a connection with subscriptions cannot change its database")
        authorise(identity, Action.WATCH, db=database)
        gateway.book.database(database)
        self.identity, self.database, self._told_expiry = identity, database, False
        self.tokens_each = payload.get("tokens") == "each"
        self.checksum = payload.get("checksum") is True
        expires = identity.expires_at
        answer = {
            "status": "ok",
            "connectionId": self.id,
            "database": database,
            "expiresAt": None if expires is None else int(expires * 1000),
            "matcher": MATCHER,
            "limits": {
                "subscriptions": gateway.limits.watch_subscriptions,
                "messageBytes": gateway.limits.watch_message_bytes,
            },
        }
        self.send(frames.reply("auth_ack", message_id, answer))
        for subscription in tuple(self.subscriptions.values()):
            digest = gateway.access.read_digest(identity, subscription.watched.collection)
            if subscription.state != "invalid" and digest != subscription.digest:
                self.invalidate(subscription, "auth-changed")

    # -- time ------------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        limits = self._gateway.limits
        taken = self.taken_bytes
        if taken > self._taken_before or not self.wire.unsent_bytes:
            self._taken_before, self._progress_at = taken, now
            self.drained.set()
        elif now - self._progress_at >= limits.watch_stall_ms / 1000:
            self.close(1013, "the connection takes nothing")
            return
        if self.identity is None:
            if now - self.opened_at >= limits.watch_auth_ms / 1000:
                self.refuse(None, "unauthorized", "nobody said who they are")
                self.close(4401, "nobody said who they are")
            return
        expires, wall = self.identity.expires_at, self._gateway.now_s()
        if expires is not None and wall >= expires:
            if not self._told_expiry:
                self._told_expiry = True
                self.refuse(None, "token_expired", "the token has expired", retry_after_ms=0)
            if wall >= (self.identity.until_s or expires) or self.wire.each_token:
                self.close(4401, "the token has expired")
                return
        if now - self._beat_at >= limits.watch_heartbeat_ms / 1000:
            self._beat_at = now
            self.send_tokens()

    def send_tokens(self) -> None:
        """A heartbeat, with a token for each subscription that has moved since its last one."""
        tokens: dict[str, str] = {}
        for subscription in self.subscriptions.values():
            moved = subscription.state in ("live", "behind", "paused")
            if moved and sum(subscription.positions) != subscription.told:
                tokens[subscription.id] = self._fresh_token(subscription)
        now_ms = self._gateway.context.clock.now_ns() // 1_000_000
        self.send(frames.reply("heartbeat", None, {"ts": now_ms, "tokens": tokens}), self._token())


def only_database(identity: Identity) -> str | None:
    """The database that is meant when none is named."""
    if identity.anonymous:
        return names.DATABASE_DEFAULT
    return identity.dbs[0] if identity.dbs is not None and len(identity.dbs) == 1 else None


def read_options(payload: dict[str, Any], identity: Identity) -> Options:
    options = Options()
    truths = {"sendSnapshot": False, "includeData": True, "autoResync": False}
    found = {name: payload.get(name, default) for name, default in truths.items()}
    if not all(type(value) is bool for value in found.values()):
        raise Refused("bad_message", "sendSnapshot, includeData and autoResync are true or false")
    options.snapshot, options.include_data = found["sendSnapshot"], found["includeData"]
    options.auto_resync = found["autoResync"]
    options.priority = payload.get("priority", "normal")
    if options.priority not in PRIORITIES:
        raise Refused("bad_message", "priority is low, normal or high")
    if options.priority == "high" and not identity.anonymous and "manage" not in identity.scopes:
        raise Refused("forbidden", "high priority needs the scope manage")
    unacked = payload.get("maxUnacked", 0)
    if type(unacked) is not int or not 0 <= unacked <= 10_000:
        raise Refused("bad_message", "maxUnacked is a number from 0 to 10000")
    options.max_unacked = unacked
    return options


def read_positions(given: Any, partitions: int) -> dict[int, int]:
    """`{"10": 12345}`: the last that was applied, by partition."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise Refused("bad_message", "positions is an object of numbers by partition")
    found: dict[int, int] = {}
    for key, seq in cast("dict[str, Any]", given).items():
        if not key.isdecimal() or len(key) > 3 or int(key) >= partitions:
            raise Refused("invalid_partition", f"there is no partition {key[:20]!r}")
        if type(seq) is not int or not 0 <= seq < 2**63:
            raise Refused("bad_message", "a position is a number")
        found[int(key)] = seq
    return found
