"""Delivery to connections: back-pressure, pause and resume, fan-out of one message to many.

A recipient above the pause threshold pauses its recent senders; above the outbound limit, messages are
dropped and counted; a connection that stays there is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tailrace.hub.effects import Send, SendMany
from tailrace.hub.envelope import HEX_PAIRS, ID_RUN_MAX, SharedEnvelope, new_id
from tailrace.hub.errors import HubError
from tailrace.hub.session import CONNECTED, NOTHING_DROPPED, Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


PAUSED_SENDERS_MAX: Final = 64
SLOW_CONSUMER: Final = "the client does not read its messages"
SENT, WAITING, SLOW, GONE, FULL = "sent", "waiting", "slow", "gone", "full"


class FlowControl:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._pausing: dict[Session, list[Session]] = {}  # recipients, and the senders they pause
        self.pauses = 0
        self.dropped = 0

    # -- delivering ------------------------------------------------------------------------------------

    def offer(
        self,
        session: Session,
        frame: bytes,
        now_ms: int,
        sending: Session | None = None,
        *,
        mode: str = "direct",
    ) -> str:
        """Sends a message to a session; the caller handles every outcome but SENT."""
        if session.state != CONNECTED:
            return GONE
        if session.detached_until_ms or (session.expires_ms is not None and now_ms >= session.expires_ms):
            if not self.buffer_for_resume(session, frame):
                return FULL
            self._hub.counts["deliveries", "waiting"] += 1
            return WAITING
        hub, outbox = self._hub, session.outbox
        limits = hub.limits
        if not outbox.is_below(limits.hub_pause_bytes, limits.hub_pause_messages):
            if self._is_over_limit(session, now_ms):
                return SLOW
        outbox.push(len(frame))
        hub.effects.append(Send(session, frame))
        hub.counts["deliveries", mode] += 1
        session.delivered += 1
        if sending is not None and sending is not session:
            session.note_sender(sending, now_ms)
        return SENT

    def _is_over_limit(self, session: Session, now_ms: int) -> bool:
        """Whether the outbound limit is reached. Below it, above the threshold, senders are paused."""
        limits, outbox = self._hub.limits, session.outbox
        held = outbox.bytes
        if not held:
            return False
        messages = outbox.messages
        if held > limits.hub_outbound_bytes or messages > limits.hub_outbound_messages:
            if not session.over_limit_since_ms:
                session.over_limit_since_ms = now_ms
            return True
        if held > limits.hub_pause_bytes or messages > limits.hub_pause_messages:
            self._pause(session, now_ms)
        return False

    def has_room(self, session: Session, now_ms: int) -> bool:
        """Whether log reads may be pushed: below the threshold at which senders resume."""
        if not session.alive or session.detached or in_token_grace(session, now_ms):
            return False
        limits = self._hub.limits
        held = session.outbox.bytes
        return held <= limits.hub_pause_bytes // 2 and (
            not held or session.outbox.messages <= limits.hub_pause_messages // 2
        )

    def buffer_for_resume(self, session: Session, frame: bytes) -> bool:
        """Buffers a frame for a disconnected session that may resume. False if the buffer is full."""
        limits = self._hub.limits
        waiting = session.resume_buffer
        if waiting is None:
            waiting = session.resume_buffer = []
        if (
            len(waiting) >= limits.hub_resume_messages
            or session.detached_bytes + len(frame) > limits.hub_resume_bytes
        ):
            return False
        waiting.append(frame)
        session.detached_bytes += len(frame)
        return True

    def release(self, session: Session) -> None:
        """The session was resumed: sends its buffered frames."""
        waiting, session.resume_buffer, session.detached_bytes = session.resume_buffer, None, 0
        for frame in waiting or ():
            self._hub.send_frame(session, frame)

    def drop(self, session: Session, size: int, now_ms: int) -> None:
        """Counts a dropped message; the recipient is notified when it has room."""
        count, size_before, since_ms = session.dropped
        session.dropped = (count + 1, size_before + size, since_ms if count else now_ms)
        self.dropped += 1

    # -- pausing ---------------------------------------------------------------------------------------

    def _pause(self, session: Session, now_ms: int) -> None:
        if session in self._pausing:
            return
        recent = [
            (noted[1], sending)
            for sending, noted in (session.recent_senders or {}).items()
            # A client starts each connection without pauses, so one without a connection is not paused.
            if noted[0] >= now_ms // 1000 - 1 and sending.alive and not sending.detached
        ]
        recent.sort(key=lambda one: one[0], reverse=True)
        recent_senders = [sending for _, sending in recent[:PAUSED_SENDERS_MAX]]
        self._pausing[session] = recent_senders
        payload = {
            "reason": "consumer_slow",
            "targets": session_targets(session),
            "queueDepth": session.outbox.messages,
            "queueBytes": session.outbox.bytes,
        }
        for sending in recent_senders:
            if sending.paused_by is None:
                sending.paused_by = {}
            sending.paused_by[session] = None
            self.pauses += 1
            self._hub.send_notice(sending, "hub:pause", payload, now_ms)

    def on_drain(self, session: Session, now_ms: int) -> None:
        """Resumes paused senders and reads once the outbox is below half the threshold."""
        limits = self._hub.limits
        held = session.outbox.bytes
        messages = session.outbox.messages
        if held <= limits.hub_outbound_bytes and messages <= limits.hub_outbound_messages:
            session.over_limit_since_ms = 0
        if held < limits.hub_pause_bytes // 2 and messages < max(1, limits.hub_pause_messages // 2):
            self._resume(session, now_ms)
            self._notify_dropped(session, now_ms)
            self._hub.mailboxes.on_room(session, now_ms)

    def _resume(self, session: Session, now_ms: int) -> None:
        recent_senders = self._pausing.pop(session, None)
        for sending in recent_senders or ():
            if sending.paused_by is not None:
                sending.paused_by.pop(session, None)
            if sending.alive:
                self._hub.send_notice(sending, "hub:resume", {"targets": session_targets(session)}, now_ms)

    def _notify_dropped(self, session: Session, now_ms: int) -> None:
        count, size, since = session.dropped
        if not count:
            return
        session.dropped = NOTHING_DROPPED
        payload: dict[str, Any] = {"count": count, "bytes": size, "since": since, "reason": "slow_consumer"}
        if "delivery-notices" in session.features:
            self._hub.send_notice(session, "hub:dropped", payload, now_ms)
        else:
            self._hub.send_error(session, HubError("consumer_slow", "messages were dropped", payload), now_ms)

    def check_paused(self, sending: Session, recipient: Session) -> None:
        """Refuses a paused sender while the recipient is over its limit."""
        if sending.paused_by and recipient in sending.paused_by and recipient.over_limit_since_ms:
            details = {"retryAfter": 1000, "kind": "send", "reason": "paused"}
            raise HubError("rate_limited", "the recipient is too slow: wait for hub:resume", details)

    def ended(self, session: Session, now_ms: int) -> None:
        """A recipient that leaves resumes its producers; a producer that leaves is forgotten."""
        self._resume(session, now_ms)
        for recipient in session.paused_by or ():
            recent_senders = self._pausing.get(recipient)
            if recent_senders is not None and session in recent_senders:
                recent_senders.remove(session)
            if recipient.recent_senders is not None:
                recipient.recent_senders.pop(session, None)
        session.paused_by = None

    def on_second(self, session: Session, now_ms: int) -> None:
        session.outbox.on_second()
        if session.recent_senders:
            session.expire_senders(now_ms)
        if session.over_limit_since_ms or session in self._pausing or session.dropped[0]:
            self.on_drain(session, now_ms)
        stalled = session.over_limit_since_ms and now_ms - session.over_limit_since_ms >= (
            self._hub.limits.hub_stall_ms
        )
        if stalled:
            payload = {"reason": "slow_consumer", "message": SLOW_CONSUMER}
            self._hub.send_notice(session, "hub:disconnect", payload, now_ms)
            self._hub.close(session, 1013, SLOW_CONSUMER)

    def stats(self, session: Session) -> dict[str, Any]:
        limits, hub = self._hub.limits, self._hub
        lag, in_flight, live = hub.mailboxes.session_lag(session)
        return {
            "queueDepth": session.outbox.messages,
            "queueBytes": session.outbox.bytes,
            "processingRate": session.outbox.rate,
            "pauseThreshold": limits.hub_pause_messages,
            "resumeThreshold": limits.hub_pause_messages // 2,
            "pauseBytes": limits.hub_pause_bytes,
            "resumeBytes": limits.hub_pause_bytes // 2,
            "paused": session in self._pausing,
            "inFlight": in_flight,
            "mailboxLag": lag,
            "mode": "push" if live else "catch-up",
        }


def session_targets(session: Session) -> list[str]:
    return [f"@({path})" for path in session.addresses] or [f"@({session.path})"]


def in_token_grace(session: Session, now_ms: int) -> bool:
    """Whether the token has expired and may still be refreshed: deliveries wait."""
    return session.expires_ms is not None and now_ms >= session.expires_ms


Recipient = tuple[Session, str]  # and the path of the address that the copy is for


def send_to_many(
    hub: Hub, sending: Session, shared: SharedEnvelope, recipients: list[Recipient], now_ms: int
) -> list[Recipient]:
    """Sends to all recipients that have room, and returns the others, which got nothing.

    The same as `FlowControl.offer` in one loop, because it runs for every copy of every message.
    """
    left: list[Recipient] = []
    for begin in range(0, len(recipients), ID_RUN_MAX):
        some = recipients[begin : begin + ID_RUN_MAX] if len(recipients) > ID_RUN_MAX else recipients
        left += _send_run(hub, sending, shared, some, now_ms)
    return left


def _send_run(
    hub: Hub, sending: Session, shared: SharedEnvelope, recipients: list[Recipient], now_ms: int
) -> list[Recipient]:
    limits, second = hub.limits, now_ms // 1000
    bytes_max, messages_max = limits.hub_pause_bytes, limits.hub_pause_messages
    start, number, end = new_id.run(now_ms, len(recipients))
    start, end, rest = b'{"id":"' + start, end + shared.middle + b"@(", b")" + shared.rest
    copies: list[tuple[Session, bytes]] = []
    left: list[Recipient] = []
    for recipient in recipients:
        session, path = recipient
        frame = b"".join((start, HEX_PAIRS[number >> 8], HEX_PAIRS[number & 255], end, path.encode(), rest))
        if (
            session.state != CONNECTED
            or session.detached_until_ms
            or (session.expires_ms is not None and now_ms >= session.expires_ms)
            or not session.outbox.push_if_below(len(frame), bytes_max, messages_max)
        ):
            left.append(recipient)
            continue
        number += 1
        session.delivered += 1
        noted = None if session.recent_senders is None else session.recent_senders.get(sending)
        if noted is not None and noted[0] == second:
            noted[1] += 1
        elif session is not sending:
            session.note_sender(sending, now_ms)
        copies.append((session, frame))
    if copies:
        hub.counts["deliveries", "direct"] += len(copies)
        hub.effects.append(SendMany(copies))
    return left
