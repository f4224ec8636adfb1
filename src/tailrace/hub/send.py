"""Handler of `hub:send`: direct delivery, mailbox append, or dead letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
from msgspec import Raw

from tailrace.hub import requests
from tailrace.hub.addresses import parse_address
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.effects import AppendOutcome
from tailrace.hub.envelope import new_id
from tailrace.hub.errors import APPLIED, HubError, field_error
from tailrace.hub.flow_control import FULL, SENT, SLOW, WAITING
from tailrace.hub.pending_requests import ACK_LEVELS, REQUEST_TTL_MS_MAX, PendingRequest
from tailrace.hub.registry import Registration
from tailrace.hub.requests import Fields, HubRequest, OutgoingMessage
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

NULL: Final = Raw(b"null")
DIRECT, STORED, UNREACHABLE = "direct", "stored", "unreachable"
PRODUCER_BYTES_MAX: Final = 128
RETRY_WHEN_FULL_MS: Final = 1000  # expired entries are removed once a second
PLAIN_FIELDS: Final = frozenset(("to", "type", "data"))
# Metadata that requires the full parser.
ACKNOWLEDGED_FIELDS: Final = frozenset(("ack", "requireAck", "expectReply", "producer"))


class SendCommand(NamedTuple):
    """A parsed send."""

    target: str
    type: str
    data: Raw
    levels: list[str]
    expects_reply: bool
    durable: bool | None
    producer: tuple[str, int, int] | None

    @property
    def asks(self) -> bool:
        """Whether the sender expects an acknowledgement or a reply."""
        return bool(self.levels) or self.expects_reply


def send(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    wanted = read_send(hub, request)
    seen = check_duplicate(hub, session, request, now_ms)
    if seen is None:
        return
    pending: PendingRequest | None = None
    try:
        _check_policy(hub, session, wanted, now_ms)
        way, recipient = _choose_route(hub, wanted, now_ms)
        if wanted.asks:
            hub.pending.check_room(session)
            pending = _make_pending_request(hub, session, request, wanted, now_ms, stored=way == STORED)
        copy = _make_outgoing(hub, request, wanted, pending, now_ms)
        if way == DIRECT:
            assert recipient is not None
            _deliver_direct(hub, session, request, recipient, wanted, copy, pending, seen, now_ms)
        elif way == STORED:
            _store_in_mailbox(hub, session, request, wanted, copy, pending, seen, now_ms)
        else:
            _handle_unreachable(hub, session, request, wanted, copy, seen, now_ms)
    except HubError:
        seen[0].forget(request.id)
        raise


def read_send(hub: Hub, request: HubRequest) -> SendCommand:
    """The target is `to`, `targetAddress` or the envelope's `to`, in this order."""
    if request.wanted is not None:
        return request.wanted
    payload = request.payload
    to = payload.text("to") or payload.text("targetAddress")
    if to is None and request.envelope.to is not None and request.envelope.to not in hub.addresses:
        to = request.envelope.to
    if to is None:
        raise field_error("to", "to is missing")
    target = parse_address(to, "to")
    kind, data = read_type_and_data(payload)
    if payload.raw.keys() <= PLAIN_FIELDS and ACKNOWLEDGED_FIELDS.isdisjoint(request.metadata.raw):
        # Most messages.
        return SendCommand(target, kind, data, ["delivered"] if request.is_ask else [], False, None, None)
    asked = request.is_ask or request.truth("requireAck") is True
    expects_reply = request.truth("expectReply") is True
    levels = _read_ack_levels(request, asked=asked, expects_reply=expects_reply)
    return SendCommand(
        target, kind, data, levels, expects_reply, payload.truth("durable"), _read_producer(request)
    )


def read_type_and_data(payload: Fields) -> tuple[str, Raw]:
    """`{type, data}`, or `{message: {type, payload}}` of older clients."""
    kind = payload.text("type")
    if kind is not None:
        data = payload.raw.get("data", NULL)
    else:
        inner = payload.inner("message")
        kind = None if inner is None else inner.text("type")
        if inner is None or kind is None:
            raise field_error("type", "type is missing")
        data = inner.raw.get("payload", inner.raw.get("data", NULL))
    if not 1 <= len(kind.encode()) <= 128:
        raise field_error("type", "type must have 1 to 128 bytes")
    return kind, data


def _read_ack_levels(request: HubRequest, *, asked: bool, expects_reply: bool) -> list[str]:
    """The requested acknowledgement levels, in the order in which they are reached."""
    found = request.payload.value("ack")
    if found is None:
        found = request.metadata.value("ack")
    if found is None:
        return ["delivered"] if asked and not expects_reply else []
    listed = cast("list[object]", found) if isinstance(found, list) else [found]
    names = [str(name) for name in listed]
    if any(name != "none" and name not in ACK_LEVELS for name in names):
        raise field_error("ack", "ack must be none, delivered, accepted or processed, or a list of them")
    return [level for level in ACK_LEVELS if level in names]


def _read_producer(request: HubRequest) -> tuple[str, int, int] | None:
    """The stored producer id includes the verified sender, so that a client can fence only itself."""
    given = request.metadata.inner("producer")
    if given is None:
        return None
    name, epoch, seq = given.text("id"), given.integer("epoch"), given.integer("seq")
    if not name or len(name.encode()) > PRODUCER_BYTES_MAX:
        raise field_error("producer", f"producer.id must have 1 to {PRODUCER_BYTES_MAX} bytes")
    if epoch is None or seq is None or not 0 <= epoch < 2**53 or not 0 <= seq < 2**53:
        raise field_error("producer", "producer.epoch and producer.seq must be integers from 0")
    return f"{request.sender.address} {name}", epoch, seq


def check_duplicate(
    hub: Hub, session: Session, request: HubRequest, now_ms: int
) -> tuple[SeenMessages, SeenMessage] | None:
    """Records the message. None if it is a repeat, after sending the stored answers."""
    known = hub.seen_messages_of(session.path)
    found = known.get(request.id, now_ms)
    if found is None:
        # After the lookup: a repeat of an accepted message gets its answers, however late.
        if request.envelope.is_expired(now_ms):
            raise HubError("message_expired", "the message has expired")
        if hub.options.signatures_required and request.envelope.timestamp <= known.floor_ms:
            raise HubError("replay_detected", "the message is older than the replay window")
        known.expire(now_ms)
        if hub.seen_memory.is_full:
            raise HubError(
                "unavailable", "the deduplication memory is full", {"retryAfter": RETRY_WHEN_FULL_MS}
            )
        return known, known.add(request.id, now_ms, request.envelope.timestamp)
    hub.count("duplicates", "seen")
    if found.answers_dropped and found.finished and _wants_answer(request):
        message = "this message was accepted before; its response is no longer stored"
        raise HubError("unavailable", message, {"outcome": APPLIED}, retryable=False)
    hub.count("messages", f"{request.envelope.type[4:]}/repeated")
    for answer in found.answers if _wants_answer(request) else ():
        hub.send_control(session, answer)
    if not found.finished:
        if not hub.pending.reattach(request.id, request.sender.path, session):
            known.add_waiter(found, session)
    elif not found.answers and session.on_http_answer is not None:
        session.on_http_answer(b"")
    return None


def _wants_answer(request: HubRequest) -> bool:
    """A plain tell gets no answers, even if some are stored."""
    if request.envelope.type != "hub:send" or request.is_ask:
        return True
    if request.wanted is not None:
        return request.wanted.asks
    return not (
        ACKNOWLEDGED_FIELDS.isdisjoint(request.payload.raw)
        and ACKNOWLEDGED_FIELDS.isdisjoint(request.metadata.raw)
    )


def mark_finished(seen: tuple[SeenMessages, SeenMessage]) -> None:
    """The message needs no answer."""
    seen[1].finished = True


def _check_policy(hub: Hub, session: Session, wanted: SendCommand, now_ms: int) -> None:
    if hub.policy.may_send(session.principal, wanted.target):
        return
    if not hub.policy.may(session.principal, "discover"):
        # Without the right to discover, do not disclose which actors exist.
        raise unknown_actor(wanted.target)
    raise hub.denied(session, "send", "denied by policy", f"@({wanted.target})", now_ms)


def unknown_actor(path: str) -> HubError:
    return HubError("unknown_actor", "not registered", {"actorAddress": f"@({path})"})


def _make_pending_request(
    hub: Hub, session: Session, request: HubRequest, wanted: SendCommand, now_ms: int, *, stored: bool
) -> PendingRequest:
    """A stored request may have any ttl; one in memory is limited to REQUEST_TTL_MS_MAX."""
    ttl = request.envelope.ttl
    deadline = now_ms + hub.limits.hub_ask_ms if ttl is None else request.envelope.timestamp + ttl
    if not stored:
        deadline = min(deadline, now_ms + REQUEST_TTL_MS_MAX)
    return PendingRequest(
        request.id,
        session,
        request.sender.path,
        wanted.target,
        deadline,
        list(wanted.levels),
        wanted.expects_reply,
        requests.trace_metadata(request),
        message_id=new_id(now_ms),
    )


def _make_outgoing(
    hub: Hub, request: HubRequest, wanted: SendCommand, pending: PendingRequest | None, now_ms: int
) -> OutgoingMessage:
    sender = request.sender
    own = b'"forwarded":true,"via":%b,%b,"originalMessageId":%b' % (
        hub.via,
        sender.original_from_member,
        msgspec.json.encode(request.id),
    )
    if wanted.expects_reply and pending is not None:
        own += b',"replyBy":%d' % pending.deadline_ms
    if request.verified:
        own += b',"verified":"hmac"'
    return OutgoingMessage(
        new_id(now_ms) if pending is None else pending.message_id,
        sender,
        f"@({wanted.target})",
        wanted.type,
        wanted.data,
        now_ms,
        requests.append_metadata(requests.forwarded_metadata(request), own),
        "ask" if wanted.expects_reply else "tell",
        request.envelope.correlation_id,
        request.envelope.ttl,
    )


# -- routes ----------------------------------------------------------------------------------------------


def _choose_route(hub: Hub, wanted: SendCommand, now_ms: int) -> tuple[str, Session | None]:
    """The route of a message, and the recipient's session if there is one."""
    found = hub.registry.find(wanted.target, now_ms)
    recipient = None if found is None else found.session
    stores = wanted.durable is True or wanted.producer is not None
    stores = stores or "accepted" in wanted.levels or "processed" in wanted.levels
    if recipient is None and not hub.mailboxes.has(wanted.target):
        if found is None or not (stores or found.options.durable):
            return UNREACHABLE, None
    if stores or _must_store(hub, found, wanted):
        return STORED, recipient
    return DIRECT, recipient


def _must_store(hub: Hub, found: Registration | None, wanted: SendCommand) -> bool:
    """Whether the actor is durable, or has unread entries that must come first."""
    if found is None or found.session is None:
        return True
    queue = hub.mailboxes.queues.get(wanted.target)
    if queue is not None and (queue.appends or not queue.is_caught_up):
        return True
    skips = wanted.durable is False and not wanted.asks
    return found.options.durable and not skips


def _store_in_mailbox(
    hub: Hub,
    session: Session,
    request: HubRequest,
    wanted: SendCommand,
    copy: OutgoingMessage,
    pending: PendingRequest | None,
    seen: tuple[SeenMessages, SeenMessage],
    now_ms: int,
) -> None:
    try:
        hub.mailboxes.check_room(wanted.target)
    except HubError as error:
        if pending is not None:
            raise
        _write_dead_letter(hub, session, request, copy, error.code, seen, now_ms)
        return
    if pending is not None:
        pending.seen = seen
        hub.pending.begin(pending)

    def refused(error: HubError, now_ms: int) -> None:
        seen[0].forget(request.id)
        hub.send_request_error(session, request, error, now_ms)

    def outcome(settled: AppendOutcome, delivered: bool) -> None:
        if settled.error is not None:
            hub.count("messages", "send/refused")
            return
        if settled.duplicate:
            hub.count("duplicates", "producer")
            hub.count("messages", "send/repeated")
        else:
            hub.count("deliveries", "stored")
            hub.count("messages", "send/delivered" if delivered else "send/queued")
        if pending is None:
            mark_finished(seen)

    hub.mailboxes.store(
        wanted.target, copy, pending, now_ms, producer=wanted.producer, refused=refused, outcome=outcome
    )


def _deliver_direct(
    hub: Hub,
    session: Session,
    request: HubRequest,
    recipient: Session,
    wanted: SendCommand,
    copy: OutgoingMessage,
    pending: PendingRequest | None,
    seen: tuple[SeenMessages, SeenMessage],
    now_ms: int,
) -> None:
    """Sends to the connection; nothing is stored."""
    hub.flow_control.check_paused(session, recipient)
    frame = copy.frame()
    outcome = hub.flow_control.offer(recipient, frame, now_ms, session)
    if outcome in (SENT, WAITING):
        hub.count("messages", "send/delivered" if outcome == SENT else "send/queued")
        hub.trace.record("accepted", copy, now_ms)
        hub.trace.record("delivered", copy, now_ms)
        if pending is None:
            mark_finished(seen)
            return
        pending.seen, pending.recipient_session = seen, recipient
        hub.pending.begin(pending)
        hub.pending.on_delivered(pending, now_ms, waits=outcome == WAITING, processed=True)
        return
    if outcome == FULL and hub.mailboxes.has(wanted.target):
        _store_in_mailbox(hub, session, request, wanted, copy, pending, seen, now_ms)
        return
    if outcome not in (SLOW, FULL):
        _handle_unreachable(hub, session, request, wanted, copy, seen, now_ms)
        return
    reason = "consumer_slow" if outcome == SLOW else "resume_buffer_full"
    hub.dead_letters.write(reason, copy, now_ms)
    if outcome == SLOW:
        hub.flow_control.drop(recipient, len(frame), now_ms)
    if pending is not None:
        raise HubError("consumer_slow", "the recipient is too slow", {"actorAddress": copy.to})
    hub.count("messages", "send/dead")
    mark_finished(seen)


def _handle_unreachable(
    hub: Hub,
    session: Session,
    request: HubRequest,
    wanted: SendCommand,
    copy: OutgoingMessage,
    seen: tuple[SeenMessages, SeenMessage],
    now_ms: int,
) -> None:
    """A request gets an error; a tell becomes a dead letter."""
    if request.is_ask or wanted.asks:
        raise unknown_actor(wanted.target)
    _write_dead_letter(hub, session, request, copy, "unknown_actor", seen, now_ms)


def _write_dead_letter(
    hub: Hub,
    session: Session,
    request: HubRequest,
    copy: OutgoingMessage,
    reason: str,
    seen: tuple[SeenMessages, SeenMessage],
    now_ms: int,
) -> None:
    """For a message without acknowledgement; the sender may get a delivery notice."""
    hub.count("messages", "send/dead")
    mark_finished(seen)
    notices = "delivery-notices" in session.features

    def then(settled: AppendOutcome, now_ms: int) -> None:
        payload = {
            "messageId": request.id,
            "actorAddress": copy.to,
            "reason": reason,
            "deadLetterOffset": settled.offset,
        }
        hub.send_reply(session, request, "hub:undeliverable", payload, now_ms)

    hub.dead_letters.write(reason, copy, now_ms, then=then if notices else None)
