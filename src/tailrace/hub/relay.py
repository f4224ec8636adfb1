"""The way of most messages: a plain tell, written as clients write it, to an actor that is there.

It comes to the same as the way of all others, in fewer steps: the frame is decoded once, and nothing is made
of it but the frame for the recipient. What is not quite plain goes the other way, as if nobody had looked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from tailrace.hub.address import parse_address
from tailrace.hub.effects import Send
from tailrace.hub.errors import HubError
from tailrace.hub.members import check_text
from tailrace.hub.message import NAME_BYTES_MAX, new_id

if TYPE_CHECKING:
    from tailrace.hub.session import Session
    from tailrace.hub.state import Hub

MARK: Final = b'"type":"hub:send","payload":{"to":"'
REPLAY_MS: Final = 300_000

Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]


class _Nothing(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    pass


class _Payload(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    to: str
    type: Name
    data: Raw


class _Tell(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """All eleven members, none of which asks for anything in particular."""

    id: Name
    from_: str = msgspec.field(name="from")
    to: str
    type: Literal["hub:send"]
    payload: _Payload
    pattern: Literal["tell"]
    correlation_id: None = msgspec.field(name="correlationId")
    timestamp: Annotated[int, Meta(ge=10**12, lt=10**13)]  # of thirteen digits
    metadata: _Nothing
    ttl: None
    signature: None


_tells: Final = msgspec.json.Decoder(_Tell)
# What a frame has beside the texts that vary. It is as long as that and those together only if each member
# comes once, without space around it, and all texts are plain ASCII: then they can be copied as they are.
_AROUND: Final = len(
    b'{"id":"","from":"","to":"","type":"hub:send","payload":{"to":"","type":"","data":},"pattern":"tell",'
    b'"correlationId":null,"timestamp":1234567890123,"metadata":{},"ttl":null,"signature":null}'
)


def relay(hub: Hub, session: Session, frame: bytes, now_ms: int) -> bool:
    """Whether the frame was such a message, and is on its way. If not, nothing has happened."""
    try:
        tell = _tells.decode(frame)
        payload = tell.payload
        texts = len(tell.id) + len(tell.from_) + len(tell.to) + len(payload.to) + len(payload.type)
        if _AROUND + texts + len(payload.data) != len(frame):
            return False
        check_text(frame)
        target = parse_address(payload.to)
    except (msgspec.MsgspecError, RecursionError, HubError):
        return False
    recipient = _recipient(hub, session, tell, target, now_ms)
    if recipient is None:
        return False
    seen = hub.seen_of(session.path)
    if seen.get(tell.id, now_ms) is not None:
        return False
    try:
        hub.rates.check(session.path, "hub:send", len(frame), now_ms)
    except HubError:
        return False
    seen.add(tell.id, now_ms, tell.timestamp).finished = True
    sender = b"@(%b)" % tell.from_[2:-1].encode()
    copy = (
        b'{"id":"%b","from":"%b","to":"%b","type":"%b","payload":%b,"pattern":"tell","correlationId":null,'
        b'"timestamp":%d,"metadata":{"forwarded":true,"via":%b,"originalFrom":"%b","originalMessageId":"%b"},'
        b'"ttl":null,"signature":null}'
        % (
            new_id(now_ms).encode(),
            sender,
            b"@(%b)" % target.encode(),
            payload.type.encode(),
            payload.data,
            now_ms,
            hub.via,
            sender,
            tell.id.encode(),
        )
    )
    recipient.outbox.push(len(copy))
    hub.effects.append(Send(recipient, copy))
    hub.counts["messages", "send/ok"] += 1
    hub.counts["deliveries", "push"] += 1
    recipient.minute.add("messages_sent", now_ms)
    if recipient is not session:
        recipient.fed_by(session, now_ms)
    return True


def _recipient(hub: Hub, session: Session, tell: _Tell, target: str, now_ms: int) -> Session | None:
    """Who gets it, if there is nothing about sender, recipient or rules that has to be looked at closer."""
    options, path = hub.options, tell.from_[2:-1]
    if path != session.path and path not in session.addresses:
        return None
    if session.expires_ms is not None and now_ms >= session.expires_ms:
        return None
    if options.verify is not None and abs(now_ms - tell.timestamp) > REPLAY_MS:
        return None
    if options.signatures_required or options.trace == "all" or session.paused_by:
        return None
    found = hub.registry.by_path.get(target)
    if found is None or found.session is None or found.expires_ms <= now_ms or found.options.durable:
        return None
    box = hub.mailboxes.boxes.get(target)
    if box is not None and (box.appends or not box.live):
        return None
    recipient = found.session
    if not recipient.alive or recipient.detached_until_ms or recipient.answer is not None:
        return None
    if recipient.expires_ms is not None and now_ms >= recipient.expires_ms:
        return None
    limits, held = hub.limits, recipient.outbox.bytes
    if held and (held > limits.hub_pause_bytes or recipient.outbox.messages > limits.hub_pause_messages):
        return None
    return recipient if hub.policy.may_send(session.actor, target) else None
