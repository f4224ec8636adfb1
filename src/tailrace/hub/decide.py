"""Dispatch of hub frames and events: `decide(hub, session, frame, now_ms)` returns effects.

Everything that changes a hub enters through a function of this module: a frame, the outcome of an effect, a
closed socket, a timer tick. None of them waits or does I/O; each returns the effects to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from tailrace.hub import broadcast, mailbox_commands, registration, send, session_lifecycle, topics
from tailrace.hub.effects import Defer, Effect, ResumeReading
from tailrace.hub.envelope import Envelope, parse_envelope
from tailrace.hub.errors import DeniedError, HubError
from tailrace.hub.fast_path import (
    REPLAY_WINDOW_MS,
    SEND_MARKER,
    PlainSend,
    parse_plain_send,
    relay_plain_send,
    store_plain_send,
)
from tailrace.hub.flow_control import in_token_grace
from tailrace.hub.requests import HubRequest
from tailrace.hub.sender_identity import stamp_sender
from tailrace.hub.session import CONNECTED, CONNECTING, Session
from tailrace.hub.session_lifecycle import check_signature
from tailrace.hub.state import Hub


def send_queue_stats(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    hub.send_reply(session, request, "hub:queue_stats_response", hub.flow_control.stats(session), now_ms)


def send_metrics(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """Counters of the last full minute: of the session, or of the whole hub for administrators."""
    whole = session.principal.admin and (request.payload.text("scope") == "server" or not hub.is_open)
    session.minute.roll(session, now_ms)
    received = delivered = errors = 0
    for one in hub.sessions.values() if whole else (session,):
        one.minute.roll(one, now_ms)
        counted = one.minute.last
        received, delivered, errors = received + counted[0], delivered + counted[1], errors + counted[2]
    payload: dict[str, Any] = {
        "messages_received": received,
        "messages_sent": delivered,
        "errors": errors,
        "connections_opened": hub.counts[("connections", "opened")] if whole else 1,
        "connections_closed": hub.counts[("connections", "closed")] if whole else 0,
        "windowStart": session.minute.last_began_ms,
        "timestamp": now_ms,
        "scope": "server" if whole else "session",
    }
    hub.send_reply(session, request, "hub:metrics_response", payload, now_ms)


PING_BYTES_MAX: Final = 64
PONG: Final = b'{"type":"pong"}'
EXPIRED_PER_TICK_MAX: Final = 1000
ITEMS_PER_SLICE: Final = 500  # sessions, or senders, in one time slice of a tick
TYPES_IN_GRACE: Final = frozenset(("hub:refresh_token", "hub:heartbeat", "hub:disconnect"))
TYPES_BY_HTTP: Final = frozenset(
    (
        *("hub:send", "hub:publish", "hub:broadcast", "hub:discover"),
        *("hub:list_actors", "hub:mailbox_read", "hub:mailbox_commit"),
    )
)

T = TypeVar("T")
Handler = Callable[[Hub, Session, HubRequest, int], None]
HANDLERS: Final[dict[str, Handler]] = {
    "hub:heartbeat": session_lifecycle.heartbeat,
    "hub:disconnect": session_lifecycle.disconnect,
    "hub:refresh_token": session_lifecycle.refresh_token,
    "hub:register": registration.register,
    "hub:renew": registration.renew,
    "hub:unregister": registration.unregister,
    "hub:discover": registration.discover,
    "hub:list_actors": registration.list_actors,
    "hub:presence": lambda hub, session, request, now: hub.presence.request(session, request, now),
    "hub:send": send.send,
    "hub:reply": lambda hub, session, request, now: hub.pending.reply(session, request, now),
    "hub:broadcast": broadcast.broadcast,
    "hub:subscribe": lambda hub, session, request, now: hub.topics.subscribe(session, request, now),
    "hub:unsubscribe": lambda hub, session, request, now: hub.topics.unsubscribe(session, request, now),
    "hub:publish": topics.publish,
    "hub:mailbox_read": mailbox_commands.read_mailbox,
    "hub:mailbox_commit": mailbox_commands.commit_mailbox,
    "hub:queue_stats": send_queue_stats,
    "hub:metrics": send_metrics,
}


class _IdOnly(msgspec.Struct):
    id: str | None = None


def on_opened(hub: Hub, session: Session) -> None:
    """A socket is open; `hub:connect` must follow within `hub_connect_ms`."""
    hub.connecting.add(session)


def decide(hub: Hub, session: Session, frame: bytes, now_ms: int) -> list[Effect]:
    """Processes one frame of a client."""
    if session.broadcasting and (session.held_frames or not hub.broadcasts.accepts(session, frame)):
        if session.held_frames is None:
            session.held_frames = []
        session.held_frames.append(frame)
    else:
        _receive(hub, session, frame, now_ms)
    return collect_effects(hub, now_ms)


def collect_effects(hub: Hub, now_ms: int) -> list[Effect]:
    """The effects so far, after held frames that may run now."""
    while hub.ready:
        session = hub.ready.popleft()
        held = session.held_frames
        had = bool(held)
        while held and (not session.broadcasting or hub.broadcasts.accepts(session, held[0])):
            _receive(hub, session, held.pop(0), now_ms)
        if not held and (had or not session.broadcasting):
            hub.effects.append(ResumeReading(session))
    taken, hub.effects = hub.effects, []
    return taken


def on_too_large(hub: Hub, session: Session, prefix: bytes, size: int, now_ms: int) -> list[Effect]:
    """A frame above the size limit; its id is read from `prefix` if possible."""
    bytes_max = hub.limits.hub_message_bytes
    details = {"messageSize": size, "maxSize": bytes_max}
    error = HubError("message_too_large", f"a message must have at most {bytes_max} bytes", details)
    hub.send_error(session, error, now_ms, request_id=_extract_id(prefix))
    return collect_effects(hub, now_ms)


def on_closed(hub: Hub, session: Session, code: int, now_ms: int) -> list[Effect]:
    hub.connecting.discard(session)
    session_lifecycle.socket_closed(hub, session, code, now_ms)
    return collect_effects(hub, now_ms)


def on_silence(hub: Hub, session: Session, now_ms: int) -> list[Effect]:
    """Heartbeat timeout: the notice is sent before the socket is closed."""
    if session.state == CONNECTED:
        session_lifecycle.send_disconnect(hub, session, "heartbeat_timeout", "no heartbeat received", now_ms)
    return collect_effects(hub, now_ms)


def on_drained(hub: Hub, session: Session, now_ms: int) -> list[Effect]:
    hub.flow_control.on_drain(session, now_ms)
    return collect_effects(hub, now_ms)


def tick(hub: Hub, now_ms: int) -> list[Effect]:
    """Once a second."""
    for session in tuple(hub.connecting):
        session_lifecycle.tick_session(hub, session, now_ms)
        if session.state != CONNECTING:
            hub.connecting.discard(session)
    _process_in_slices(hub, iter(tuple(hub.sessions.values())), partial(_tick_session, hub), now_ms)
    hub.pending.tick(now_ms)
    registration.expire_registrations(hub, now_ms, EXPIRED_PER_TICK_MAX)
    hub.entry_dead_letters.tick()
    hub.mailboxes.tick(now_ms)
    hub.presence.tick(now_ms)
    hub.sweep.tick(now_ms)
    _process_in_slices(hub, iter(tuple(hub.senders)), hub.expire_seen, now_ms)
    hub.mailboxes.cursors.rewrite_old(now_ms)
    flush(hub)
    return collect_effects(hub, now_ms)


def _process_in_slices(hub: Hub, items: Iterator[T], process: Callable[[T, int], None], now_ms: int) -> None:
    """Processes all items in time slices, so that no message waits for thousands of them."""
    some = list(islice(items, ITEMS_PER_SLICE))
    for item in some:
        process(item, now_ms)
    if len(some) == ITEMS_PER_SLICE:
        hub.effects.append(Defer(partial(_process_in_slices, hub, items, process)))


def _tick_session(hub: Hub, session: Session, now_ms: int) -> None:
    if hub.sessions.get(session.id) is session:  # it has not ended meanwhile
        session_lifecycle.tick_session(hub, session, now_ms)


def flush(hub: Hub) -> None:
    """Writes everything that is batched: dead letters, cursors, trace."""
    hub.dead_letters.flush()
    hub.mailboxes.cursors.flush()
    hub.trace.flush()


# -- one frame -------------------------------------------------------------------------------------------


def _receive(hub: Hub, session: Session, frame: bytes, now_ms: int) -> None:
    if session.state not in (CONNECTED, CONNECTING):
        return
    if len(frame) <= PING_BYTES_MAX and b"ping" in frame and _is_ping(frame):
        hub.send_frame(session, PONG)
        return
    session.received += 1
    plain = None
    if session.on_http_answer is None and session.state == CONNECTED and SEND_MARKER in frame:
        plain = parse_plain_send(frame)
        if plain is not None:
            short = relay_plain_send(hub, session, plain, len(frame), now_ms) if plain.is_tell else None
            short = short or store_plain_send(hub, session, plain, frame, now_ms)
            if short is not None:
                hub.effects.append(short)
                return
    request = _parse_request(hub, session, frame, plain, now_ms)
    if request is None:
        return
    try:
        _handle(hub, session, request, now_ms)
    except HubError as error:
        hub.count("messages", f"{_metric_kind(request.envelope.type)}/refused")
        if error.code == "rate_limited":
            hub.count("rate_limited", str(error.details.get("kind", "")))
        if isinstance(error, DeniedError):
            hub.send_denied(session, request, error)
        else:
            hub.send_request_error(session, request, error, now_ms)
    except Exception as error:
        if hub.options.on_bug is None:
            raise
        hub.options.on_bug(error)
        hub.count("messages", f"{_metric_kind(request.envelope.type)}/refused")
        bug = HubError("internal_error", "the hub failed to process this message")
        hub.send_request_error(session, request, bug, now_ms)


def _parse_request(
    hub: Hub, session: Session, frame: bytes, plain: PlainSend | None, now_ms: int
) -> HubRequest | None:
    """The request of a frame; None if it is malformed, after sending the error."""
    request = None if plain is None else plain.request(frame)
    if request is not None:
        return request
    request_id: str | None = None
    try:
        envelope = parse_envelope(frame, hub.limits.hub_message_bytes)
        request_id = envelope.id
        return HubRequest(envelope, frame)
    except HubError as error:
        hub.send_error(session, error, now_ms, request_id=request_id or _extract_id(frame))
        _count_malformed(hub, session, now_ms)
        return None


def _handle(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    envelope = request.envelope
    kind = envelope.type
    if session.state == CONNECTING:
        if kind != "hub:connect":
            details = {"action": kind, "reason": "not_connected"}
            raise HubError("unauthorized", "hub:connect must be the first message", details)
        hub.connecting.discard(session)
        session_lifecycle.connect(hub, session, request, now_ms)
        return
    if kind == "hub:connect":
        raise HubError("invalid_request", "the session is already connected", {"field": "type"})
    request.sender = stamp_sender(hub, session, envelope.from_)
    handler = HANDLERS.get(kind)
    if handler is None or (session.on_http_answer is not None and kind not in TYPES_BY_HTTP):
        raise HubError("unknown_type", f"unknown message type {kind[:128]!r}")
    if in_token_grace(session, now_ms) and kind not in TYPES_IN_GRACE:
        raise HubError("unauthorized", "the token has expired", {"action": kind, "reason": "token expired"})
    if not hub.is_open:
        _check_time(envelope, now_ms)
    check_signature(hub, session, session.path, request, now_ms)
    hub.rates.check(session.path, kind, len(request.frame), now_ms)
    handler(hub, session, request, now_ms)


def _check_time(envelope: Envelope, now_ms: int) -> None:
    if envelope.timestamp < now_ms - REPLAY_WINDOW_MS:
        raise HubError("replay_detected", "the timestamp is too old", {"serverTime": now_ms})
    if envelope.timestamp > now_ms + REPLAY_WINDOW_MS:
        raise HubError("clock_skew", "the timestamp is in the future", {"serverTime": now_ms})


def _count_malformed(hub: Hub, session: Session, now_ms: int) -> None:
    if session.count_malformed(now_ms) >= hub.limits.hub_strikes:
        hub.close(session, 1008, "too many malformed messages")


def _is_ping(frame: bytes) -> bool:
    try:
        return msgspec.json.decode(frame) == {"type": "ping"}
    except msgspec.DecodeError:
        return False


def _extract_id(frame: bytes) -> str | None:
    """The id of a malformed frame, if one can be found."""
    try:
        found = msgspec.json.decode(frame, type=_IdOnly).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = _extract_leading_id(frame)
    return found if found is not None and 1 <= len(found.encode("utf-8", "replace")) <= 128 else None


def _extract_leading_id(frame: bytes) -> str | None:
    """From `{"id":"..."`, if the rest is missing or malformed."""
    text = frame[:512].lstrip(b" \t\r\n{")
    name, colon, rest = text.partition(b":")
    if name.strip() != b'"id"' or not colon:
        return None
    rest = rest.lstrip()
    end = rest.find(b'"', 1)
    if rest[:1] != b'"' or end < 0:
        return None
    try:
        return msgspec.json.decode(rest[: end + 1], type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _metric_kind(message_type: str) -> str:
    return message_type[4:] if message_type in HANDLERS else "other"
