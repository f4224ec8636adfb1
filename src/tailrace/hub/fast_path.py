"""Fast path for plain sends: direct relay, and mailbox append with spliced frames.

Most messages are a plain `hub:send` in the form that clients write. The frame is decoded once; what all
messages between two addresses share is encoded once and cached. The result is equivalent to the general path
(`decide`, `send`). Functions return None, without side effects, for a message that needs the general path.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from tailrace.hub.addresses import ADDRESS_BYTES_MAX, mailbox_stream, parse_address
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.delivery_queues import DeliveryQueue, Feed
from tailrace.hub.effects import Append, AppendOutcome, Send
from tailrace.hub.envelope import DEPTH_MAX, NAME_BYTES_MAX, Envelope, check_frame_text, new_id
from tailrace.hub.errors import HubError, to_hub_error
from tailrace.hub.pending_requests import PendingRequest
from tailrace.hub.requests import HubRequest, OutgoingMessage
from tailrace.hub.send import SendCommand
from tailrace.hub.sender_identity import Sender, may_send_as, unverified_sender
from tailrace.hub.session import CONNECTED, Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


SEND_MARKER: Final = b'"type":"hub:send","payload":{"to":"'
REPLAY_WINDOW_MS: Final = 300_000
ROUTE_CACHE_MAX: Final = 8192  # a full cache holds about 6 MiB

Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]


class _EmptyMetadata(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    pass


class _Payload(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    to: str
    type: Name
    data: Raw
    ack: Literal["accepted"] | None = None  # never written as null here: that is longer than expected


class PlainSend(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """All eleven members, without options that need the general path."""

    id: Name
    from_: str = msgspec.field(name="from")
    to: str
    type: Literal["hub:send"]
    payload: _Payload
    pattern: Literal["tell", "ask"]
    correlation_id: None = msgspec.field(name="correlationId")
    timestamp: Annotated[int, Meta(ge=10**12, lt=10**13)]  # of thirteen digits
    metadata: _EmptyMetadata
    ttl: None
    signature: None

    @property
    def is_tell(self) -> bool:
        return self.pattern == "tell" and self.payload.ack is None

    def request(self, frame: bytes) -> HubRequest | None:
        """The request for the general path, already parsed; None if the target is invalid."""
        payload = self.payload
        try:
            target = parse_address(payload.to)
        except HubError:
            return None
        envelope = Envelope(
            id=self.id,
            type=self.type,
            timestamp=self.timestamp,
            from_=self.from_,
            to=self.to,
            pattern=self.pattern,
        )
        levels = ["delivered"] if self.pattern == "ask" else []
        if payload.ack is not None:
            levels = [payload.ack]
        return HubRequest(
            envelope, frame, SendCommand(target, payload.type, payload.data, levels, False, None, None)
        )


_decode_plain_send: Final = msgspec.json.Decoder(PlainSend).decode
# The length of a frame's fixed parts. A frame has that length plus its values only if each member
# occurs once, without whitespace, and all strings are ASCII without escapes: they can be copied.
_FIXED_BYTES: Final = len(
    b'{"id":"","from":"","to":"","type":"hub:send","payload":{"to":"","type":"","data":},"pattern":"",'
    b'"correlationId":null,"timestamp":1234567890123,"metadata":{},"ttl":null,"signature":null}'
)
_ACK_BYTES: Final = len(b',"ack":"accepted"')
# Data without lists that is shorter than this is not too deep: two levels are the envelope and its payload.
_DEEP_BYTES: Final = (DEPTH_MAX - 1) * len(b'{"":}')


class Route(msgspec.Struct, eq=False, gc=False):
    """The parts that all messages from one address to another share."""

    sender: Sender  # as claimed, until may_send_plain has checked it
    target: str
    head: bytes  # from after the id up to the type
    own: bytes  # the hub's own metadata up to the original id


@lru_cache(ROUTE_CACHE_MAX)
def route_between(via: bytes, claimed: str, to: str) -> Route | None:
    """None if `to` is not an address. The claimed sender is checked per message, by `may_send_plain`."""
    if not claimed.isascii():
        return None
    try:
        target = parse_address(to)
    except HubError:
        return None
    sender = unverified_sender(claimed)
    return Route(
        sender,
        target,
        b'",%b,"to":"%b","type":"' % (sender.from_member, to.encode()),
        b'"forwarded":true,"via":%b,%b,"originalMessageId":"' % (via, sender.original_from_member),
    )


def parse_plain_send(frame: bytes) -> PlainSend | None:
    """The message, if it has the plain form."""
    try:
        plain = _decode_plain_send(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
    payload = plain.payload
    sender, to = len(plain.from_), len(payload.to)
    if sender > ADDRESS_BYTES_MAX or to > ADDRESS_BYTES_MAX:
        return None
    size = len(plain.id) + sender + len(plain.to) + to + len(payload.type) + len(plain.pattern)
    if payload.ack is not None:
        size += _ACK_BYTES
    data = len(payload.data)
    if _FIXED_BYTES + size + data != len(frame) or not _is_valid_text(frame, data):
        return None
    return plain


def relay_plain_send(hub: Hub, session: Session, tell: PlainSend, size: int, now_ms: int) -> Send | None:
    """Relays a plain tell of `size` bytes to its connected recipient."""
    if hub.options.verify is not None and abs(now_ms - tell.timestamp) > REPLAY_WINDOW_MS:
        return None
    identifier, payload = tell.id, tell.payload
    route = route_between(hub.via, tell.from_, payload.to)
    recipient = None if route is None else _find_recipient(hub, session, route, now_ms)
    if route is None or recipient is None:
        return None
    identity = session.principal.path
    seen = hub.seen_messages_of(identity)
    if not seen.add_bare(identifier, now_ms):
        return None
    if not hub.rates.may_send(identity, size, now_ms):
        seen.forget(identifier)
        return None
    # Joining takes half the time of formatting.
    copy = b"".join(
        (
            b'{"id":"',
            new_id(now_ms).encode(),
            route.head,
            payload.type.encode(),
            b'","payload":',
            payload.data,
            b',"pattern":"tell","correlationId":null,"timestamp":',
            str(now_ms).encode(),
            b',"metadata":{',
            route.own,
            identifier.encode(),
            b'"},"ttl":null,"signature":null}',
        )
    )
    recipient.outbox.push(len(copy))
    recipient.delivered += 1
    hub.counts["messages", "send/delivered"] += 1
    hub.counts["deliveries", "direct"] += 1
    noted = None if recipient.recent_senders is None else recipient.recent_senders.get(session)
    if noted is not None and noted[0] == now_ms // 1000:
        noted[1] += 1
    elif recipient is not session:
        recipient.note_sender(session, now_ms)
    return Send(recipient, copy)


def _is_valid_text(frame: bytes, data: int) -> bool:
    """UTF-8 within the depth limit. Short data without lists needs no counting."""
    if frame.isascii() and b"[" not in frame and (data < _DEEP_BYTES or frame.count(b"{") <= DEPTH_MAX):
        return True
    try:
        check_frame_text(frame)
    except HubError:
        return False
    return True


def may_send_plain(hub: Hub, session: Session, route: Route, now_ms: int) -> bool:
    """Whether sender and policy allow the send without the general path."""
    actor = session.principal
    if not may_send_as(session, route.sender.path):
        return False
    if session.expires_ms is not None and now_ms >= session.expires_ms:
        return False
    if hub.options.signatures_required:
        return False
    if hub.policy.has_rules or not (actor.open or actor.named is None):
        return hub.policy.may_send(actor, route.target)
    return True


def _find_recipient(hub: Hub, session: Session, route: Route, now_ms: int) -> Session | None:
    """The recipient's session, if sender, recipient and policy allow direct delivery."""
    target = route.target
    found = hub.registry.by_path.get(target)
    if found is None or found.expires_ms <= now_ms or found.options.durable:
        return None
    recipient = found.session
    if recipient is None or recipient.state != CONNECTED or recipient.detached_until_ms:
        return None
    if recipient.on_http_answer is not None or (
        recipient.expires_ms is not None and now_ms >= recipient.expires_ms
    ):
        return None
    if session.paused_by or hub.options.trace == "all" or not may_send_plain(hub, session, route, now_ms):
        return None
    queue = hub.mailboxes.queues.get(target)
    if queue is not None and (queue.appends or not queue.is_caught_up):
        return None
    limits = hub.limits
    if not recipient.outbox.is_below(limits.hub_pause_bytes, limits.hub_pause_messages):
        return None
    return recipient


class _StoreFragments(msgspec.Struct, frozen=True, gc=False):
    """The parts of acknowledgements and trace records that two addresses share."""

    stream: str
    key: bytes
    ack: bytes  # from after the id up to the message's id
    ack_middle: bytes  # from after the time up to the offset
    trace: bytes  # from after the copy's id up to the type
    trace_end: bytes  # from after the time up to the offset


@lru_cache(ROUTE_CACHE_MAX)
def _store_fragments(hub_sender: Sender, sender: Sender, target: str) -> _StoreFragments:
    """Addresses are ASCII without anything to escape."""
    stream = mailbox_stream(target)
    name = stream.encode()
    return _StoreFragments(
        stream,
        sender.address.encode(),
        b'",%b,"to":%b,"type":"hub:delivery_ack","payload":{"messageId":"'
        % (hub_sender.from_member, sender.quoted),
        b',"status":"accepted","level":"accepted","stream":"%b","offset":"' % name,
        b'","parent":null,"correlationId":null,"traceId":null,%b,"to":"@(%b)",'
        b'"kind":"send","topic":null,"type":"' % (sender.from_member, target.encode()),
        b',"stream":"%b","offset":"' % name,
    )


class _PendingStore(msgspec.Struct, eq=False, gc=False):
    """One message that is being appended, and what follows when it is durable.

    Only the log refers to it, so it is not part of a reference cycle.
    """

    hub: Hub
    session: Session
    frame: bytes
    plain: PlainSend
    route: Route
    texts: _StoreFragments
    queue: DeliveryQueue
    feed: Feed
    message_id: str
    accepted_ms: int
    seq: int
    known: SeenMessages
    seen: SeenMessage
    pending: PendingRequest | None

    def settled(self, settled: AppendOutcome, now_ms: int) -> None:
        """The message is durable: acknowledges it, then delivers it if the recipient is connected."""
        hub, queue = self.hub, self.queue
        queue.appends -= 1
        if settled.error is not None:
            self._failed(settled, now_ms)
            return
        assert settled.offset is not None
        offset = settled.offset.encode()
        if self.pending is None:
            self.seen.finished = True
        else:
            self.pending.reached, self.pending.stream = "accepted", self.texts.stream
            self.pending.entry, self.pending.offset = settled.entry, settled.offset
            hub.pending.on_response(self.pending, self._ack(offset, now_ms))
        hub.counts["deliveries", "stored"] += 1
        if hub.trace.is_on:
            hub.trace.add(self._record(offset, now_ms))
        delivered = queue.is_pushed and hub.mailboxes.on_appended(
            queue, self.feed, settled.entry, self._copy(), now_ms
        )
        hub.counts["messages", "send/delivered" if delivered else "send/queued"] += 1
        hub.mailboxes.release_later(queue)

    def _failed(self, settled: AppendOutcome, now_ms: int) -> None:
        assert settled.error is not None
        hub, error = self.hub, to_hub_error(settled.error)
        hub.count("messages", "send/refused")
        if self.pending is not None:
            hub.pending.fail(self.pending, error, now_ms)
        self.known.forget(self.plain.id)  # it may be sent again
        if self.pending is None:
            request = self.plain.request(self.frame)
            assert request is not None
            request.sender = self.route.sender
            hub.send_request_error(self.session, request, error, now_ms)
        hub.mailboxes.release(self.queue)

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
                self.message_id.encode(),
                texts.trace,
                payload.type.encode(),
                b'","bytes":%d,"sentAt":%d' % (len(payload.data), self.accepted_ms),
                texts.trace_end,
                offset,
                b'","shard":"0"}',
            )
        )

    def _copy(self) -> OutgoingMessage:
        """The same outgoing message as the general path makes."""
        plain, route = self.plain, self.route
        return OutgoingMessage(
            self.message_id,
            route.sender,
            f"@({route.target})",
            plain.payload.type,
            plain.payload.data,
            self.accepted_ms,
            b'{%b%b","hubSeq":%d' % (route.own, plain.id.encode(), self.seq),
        )


def store_plain_send(
    hub: Hub, session: Session, plain: PlainSend, frame: bytes, now_ms: int
) -> Append | None:
    """Appends a plain send to the mailbox of a durable recipient."""
    if plain.pattern == "ask" and plain.payload.ack is None:
        return None  # it wants a delivery acknowledgement
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
    if asks and len(session.sent_requests) >= hub.limits.hub_session_asks:
        return None
    identity = session.principal.path
    known = hub.seen_messages_of(identity)
    if identifier in known or hub.seen_memory.is_full:
        return None
    mailboxes = hub.mailboxes
    queue = mailboxes.open(route.target)
    feed = queue.mailbox
    is_new_owner = queue.session is None and found.session is not None
    if (
        feed is None
        or is_new_owner
        or mailboxes.is_full(queue)
        or not hub.rates.may_send(identity, len(frame), now_ms)
    ):
        mailboxes.release(queue)
        return None
    seen = known.add(identifier, now_ms, plain.timestamp)
    message_id, seq = new_id(now_ms), hub.next_seq(now_ms)
    pending: PendingRequest | None = None
    if asks:
        deadline_ms, path = now_ms + hub.limits.hub_ask_ms, route.sender.path
        pending = PendingRequest(
            identifier, session, path, route.target, deadline_ms, ["accepted"], False, b"{}", message_id
        )
        pending.seen = (known, seen)
        hub.pending.begin(pending)
    texts = _store_fragments(hub.sender, route.sender, route.target)
    kept = _PendingStore(
        hub, session, frame, plain, route, texts, queue, feed, message_id, now_ms, seq, known, seen, pending
    )
    queue.appends += 1
    body = b"".join(
        (
            b'{"id":"',
            message_id.encode(),
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
