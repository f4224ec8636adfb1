"""The short way to a mailbox: a plain send to a durable actor, with or without `ack: accepted`.

It comes to the same as on the way of all others: one entry, one record of the trace, one answer when the
entry is durable. All three are spliced from what messages of one sender to one recipient have in common.
What is not quite plain goes the other way, as if nobody had looked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from tailrace.hub.addresses import mailbox_stream
from tailrace.hub.asks import PendingRequest
from tailrace.hub.boxes import DeliveryQueue, Feed
from tailrace.hub.copies import OutgoingMessage
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.effects import Append, AppendOutcome
from tailrace.hub.errors import to_hub_error
from tailrace.hub.ids import new_id
from tailrace.hub.relay import (
    REPLAY_WINDOW_MS,
    ROUTE_CACHE_MAX,
    PlainSend,
    Route,
    may_send_plain,
    route_between,
)
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


class _StoreFragments(msgspec.Struct, frozen=True, gc=False):
    """What is said of all entries from one address to another."""

    stream: str
    key: bytes
    ack: bytes  # from after the id up to the message's id
    ack_middle: bytes  # from after the time up to the offset
    trace: bytes  # from after the copy's id up to the type
    trace_end: bytes  # from after the time up to the offset


@lru_cache(ROUTE_CACHE_MAX)
def _store_fragments(via: bytes, sender: str, target: str) -> _StoreFragments:
    """Addresses are ASCII without anything to escape."""
    stream = mailbox_stream(target)
    name = stream.encode()
    return _StoreFragments(
        stream,
        b"@(%b)" % sender.encode(),
        b'","from":%b,"to":"@(%b)","type":"hub:delivery_ack","payload":{"messageId":"'
        % (via, sender.encode()),
        b',"status":"accepted","level":"accepted","stream":"%b","offset":"' % name,
        b'","parent":null,"correlationId":null,"traceId":null,"from":"@(%b)","to":"@(%b)",'
        b'"kind":"send","topic":null,"type":"' % (sender.encode(), target.encode()),
        b',"stream":"%b","offset":"' % name,
    )


class _PendingStore(msgspec.Struct, eq=False, gc=False):
    """One message on its way to the disk, and what follows when it is there.

    The log holds it until then and nobody after: it is part of no cycle.
    """

    hub: Hub
    session: Session
    frame: bytes
    plain: PlainSend
    route: Route
    texts: _StoreFragments
    box: DeliveryQueue
    feed: Feed
    copy_id: str
    accepted_ms: int
    seq: int
    known: SeenMessages
    seen: SeenMessage
    ask: PendingRequest | None

    def settled(self, settled: AppendOutcome, now_ms: int) -> None:
        """Durable: acknowledged first, then handed over to whoever is there."""
        hub, box = self.hub, self.box
        box.appends -= 1
        if settled.error is not None:
            self._failed(settled, now_ms)
            return
        assert settled.offset is not None
        offset = settled.offset.encode()
        if self.ask is None:
            self.seen.finished = True
        else:
            self.ask.reached, self.ask.stream = "accepted", self.texts.stream
            self.ask.entry, self.ask.offset = settled.entry, settled.offset
            hub.asks.answered(self.ask, self._ack(offset, now_ms))
        hub.counts["deliveries", "stored"] += 1
        if hub.trace.is_on:
            hub.trace.add(self._record(offset, now_ms))
        handed = box.is_fed and hub.mailboxes.arrived(box, self.feed, settled.entry, self._copy(), now_ms)
        hub.counts["messages", "send/delivered" if handed else "send/queued"] += 1
        hub.mailboxes.rest(box)

    def _failed(self, settled: AppendOutcome, now_ms: int) -> None:
        assert settled.error is not None
        hub, error = self.hub, to_hub_error(settled.error)
        hub.count("messages", "send/refused")
        if self.ask is not None:
            hub.asks.failed(self.ask, error, now_ms)
        self.known.forget(self.plain.id)  # it may be sent again
        if self.ask is None:
            request = self.plain.request(self.frame)
            assert request is not None
            request.sender = self.route.sender
            hub.refuse_request(self.session, request, error, now_ms)
        hub.mailboxes.let_go(self.box)

    def _ack(self, offset: bytes, now_ms: int) -> bytes:
        texts, message_id = self.texts, self.plain.id.encode()
        now = str(now_ms).encode()
        return b"".join(
            (
                b'{"id":"',
                new_id(now_ms).encode(),
                texts.ack,
                message_id,
                b'","deliveredAt":',
                now,
                texts.ack_middle,
                offset,
                b'","duplicate":false},"pattern":"tell","correlationId":"',
                message_id,
                b'","timestamp":',
                now,
                b',"metadata":{},"ttl":null,"signature":null}',
            )
        )

    def _record(self, offset: bytes, now_ms: int) -> bytes:
        texts, payload = self.texts, self.plain.payload
        return b"".join(
            (
                b'{"ev":"accepted","at":',
                str(now_ms).encode(),
                b',"id":"',
                self.plain.id.encode(),
                b'","copy":"',
                self.copy_id.encode(),
                texts.trace,
                payload.type.encode(),
                b'","bytes":%d,"sentAt":%d' % (len(payload.data), self.accepted_ms),
                texts.trace_end,
                offset,
                b'","shard":"0"}',
            )
        )

    def _copy(self) -> OutgoingMessage:
        """As the way of all others makes it, for one who is there to get it."""
        plain, route = self.plain, self.route
        return OutgoingMessage(
            self.copy_id,
            f"@({route.sender})",
            f"@({route.target})",
            plain.payload.type,
            plain.payload.data,
            self.accepted_ms,
            b'{%b%b","hubSeq":%d' % (route.own, plain.id.encode(), self.seq),
        )


def store_plain_send(
    hub: Hub, session: Session, plain: PlainSend, frame: bytes, now_ms: int
) -> Append | None:
    """The entry for the mailbox of the recipient. If it is None, nothing has happened."""
    if plain.pattern == "ask" and plain.payload.ack is None:
        return None  # it asks to hear of the delivery
    if hub.options.verify is not None and abs(now_ms - plain.timestamp) > REPLAY_WINDOW_MS:
        return None
    payload, identifier = plain.payload, plain.id
    route = route_between(hub.via, plain.from_, payload.to)
    if route is None or not may_send_plain(hub, session, route, now_ms):
        return None
    found = hub.registry.by_path.get(route.target)
    if found is None or found.expires_ms <= now_ms or not found.options.durable:
        return None
    asks = payload.ack is not None
    if asks and len(session.asked) >= hub.limits.hub_session_asks:
        return None
    identity = session.actor.path
    known = hub.seen_of(identity)
    if identifier in known or hub.seen_memory.is_full:
        return None
    mailboxes = hub.mailboxes
    box = mailboxes.open(route.target)
    feed = box.mailbox
    is_new_owner = box.session is None and found.session is not None
    if (
        feed is None
        or is_new_owner
        or mailboxes.is_full(box)
        or not hub.rates.may_send(identity, len(frame), now_ms)
    ):
        mailboxes.let_go(box)
        return None
    seen = known.add(identifier, now_ms, plain.timestamp)
    copy_id, seq = new_id(now_ms), hub.next_seq(now_ms)
    ask: PendingRequest | None = None
    if asks:
        deadline_ms = now_ms + hub.limits.hub_ask_ms
        ask = PendingRequest(
            identifier, session, route.sender, route.target, deadline_ms, ["accepted"], False, b"{}", copy_id
        )
        ask.seen = (known, seen)
        hub.asks.begin(ask)
    texts = _store_fragments(hub.via, route.sender, route.target)
    kept = _PendingStore(
        hub, session, frame, plain, route, texts, box, feed, copy_id, now_ms, seq, known, seen, ask
    )
    box.appends += 1
    body = b"".join(
        (
            b'{"id":"',
            copy_id.encode(),
            route.head,
            payload.type.encode(),
            b'","payload":',
            payload.data,
            b',"pattern":"tell","correlationId":null,"timestamp":',
            str(now_ms).encode(),
            b',"metadata":{',
            route.own,
            identifier.encode(),
            b'","hubSeq":%d},"ttl":null,"signature":null}' % seq,
        )
    )
    return Append(texts.stream, body, kept.settled, texts.key)
