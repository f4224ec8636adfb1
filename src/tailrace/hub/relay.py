"""The way of most messages: a plain tell, written as clients write it, to an actor that is there.

It comes to the same as the way of all others, in fewer steps: the frame is decoded once, and nothing is made
of it but the frame for the recipient. What is not quite plain goes the other way, as if nobody had looked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from tailrace.hub.address import ADDRESS_BYTES_MAX, parse_address
from tailrace.hub.effects import Send
from tailrace.hub.errors import HubError
from tailrace.hub.members import DEPTH_MAX, check_text
from tailrace.hub.message import NAME_BYTES_MAX, new_id
from tailrace.hub.session import CONNECTED, Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

MARK: Final = b'"type":"hub:send","payload":{"to":"'
REPLAY_MS: Final = 300_000
ROUTES_MAX: Final = 8192  # a full cache holds about 6 MiB

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


_decode: Final = msgspec.json.Decoder(_Tell).decode
# What a frame has beside the texts that vary. It is as long as that and those together only if each member
# comes once, without space around it, and all texts are plain ASCII: then they can be copied as they are.
_AROUND: Final = len(
    b'{"id":"","from":"","to":"","type":"hub:send","payload":{"to":"","type":"","data":},"pattern":"tell",'
    b'"correlationId":null,"timestamp":1234567890123,"metadata":{},"ttl":null,"signature":null}'
)


class _Route(msgspec.Struct, eq=False, gc=False):
    """What all copies from one address to another have in common."""

    sender: str  # path
    target: str
    head: bytes  # from after the id up to the type
    tail: bytes  # from after the timestamp up to the original id


@lru_cache(ROUTES_MAX)
def _route(via: bytes, sender: str, to: str) -> _Route | None:
    """None if there is no such address. Whether the sender is who it says is not looked at here."""
    try:
        path, target = sender[2:-1].encode("ascii"), parse_address(to)
    except (HubError, UnicodeEncodeError):
        return None
    return _Route(
        sender[2:-1],
        target,
        b'","from":"@(%b)","to":"%b","type":"' % (path, to.encode()),
        b',"metadata":{"forwarded":true,"via":%b,"originalFrom":"@(%b)","originalMessageId":"' % (via, path),
    )


def relay(hub: Hub, session: Session, frame: bytes, now_ms: int) -> Send | None:
    """What goes to the recipient, if the frame was such a message. If not, nothing has happened."""
    try:
        tell = _decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
    identifier, sender, payload = tell.id, tell.from_, tell.payload
    to, kind, data = payload.to, payload.type, payload.data
    if len(sender) > ADDRESS_BYTES_MAX or len(to) > ADDRESS_BYTES_MAX:
        return None
    texts = len(identifier) + len(sender) + len(tell.to) + len(to) + len(kind)
    if _AROUND + texts + len(data) != len(frame) or not _is_sound(frame):
        return None
    if hub.options.verify is not None and abs(now_ms - tell.timestamp) > REPLAY_MS:
        return None
    route = _route(hub.via, sender, to)
    recipient = None if route is None else _recipient(hub, session, route, now_ms)
    if route is None or recipient is None:
        return None
    identity = session.actor.path
    seen = hub.seen_of(identity)
    if identifier in seen or not hub.rates.may_send(identity, len(frame), now_ms):
        return None
    seen.note(identifier, now_ms)
    copy = (
        b'{"id":"%b%b%b","payload":%b,"pattern":"tell","correlationId":null,"timestamp":%d%b%b"},'
        b'"ttl":null,"signature":null}'
        % (
            new_id(now_ms).encode(),
            route.head,
            kind.encode(),
            data,
            now_ms,
            route.tail,
            identifier.encode(),
        )
    )
    recipient.outbox.push(len(copy))
    recipient.handed += 1
    hub.counts["messages", "send/ok"] += 1
    hub.counts["deliveries", "push"] += 1
    if recipient is not session:
        recipient.fed_by(session, now_ms)
    return Send(recipient, copy)


def _is_sound(frame: bytes) -> bool:
    if frame.isascii() and frame.count(b"[") + frame.count(b"{") <= DEPTH_MAX:
        return True
    try:
        check_text(frame)
    except HubError:
        return False
    return True


def _recipient(hub: Hub, session: Session, route: _Route, now_ms: int) -> Session | None:
    """Who gets it, if there is nothing about sender, recipient or rules that has to be looked at closer."""
    actor, options = session.actor, hub.options
    if route.sender != actor.path and route.sender not in session.addresses:
        return None
    if session.paused_by or (session.expires_ms is not None and now_ms >= session.expires_ms):
        return None
    if options.signatures_required or options.trace == "all":
        return None
    target = route.target
    found = hub.registry.by_path.get(target)
    if found is None or found.expires_ms <= now_ms or found.options.durable:
        return None
    recipient = found.session
    if recipient is None or recipient.state != CONNECTED or recipient.detached_until_ms:
        return None
    if recipient.answer is not None or (recipient.expires_ms is not None and now_ms >= recipient.expires_ms):
        return None
    box = hub.mailboxes.boxes.get(target)
    if box is not None and (box.appends or not box.live):
        return None
    limits = hub.limits
    if not recipient.outbox.is_light(limits.hub_pause_bytes, limits.hub_pause_messages):
        return None
    return recipient if hub.policy.may_send(actor, target) else None
