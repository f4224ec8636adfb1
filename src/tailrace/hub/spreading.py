"""One message to many connections: what its copies share is encoded once, and each is written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.hub.effects import SendMany
from tailrace.hub.ids import HEX_PAIRS, ID_RUN_MAX, new_id
from tailrace.hub.message import SharedEnvelope
from tailrace.hub.session import CONNECTED, Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

Recipient = tuple[Session, str]  # and the path of the address that the copy is for


def send_to_many(
    hub: Hub, feeder: Session, shared: SharedEnvelope, recipients: list[Recipient], now_ms: int
) -> list[Recipient]:
    """Copies for all who can take one at once. The others are given back, and have been given nothing.

    It does what `Flow.offer` does for one, in one loop: that runs for every copy of every message.
    """
    left: list[Recipient] = []
    for begin in range(0, len(recipients), ID_RUN_MAX):
        some = recipients[begin : begin + ID_RUN_MAX] if len(recipients) > ID_RUN_MAX else recipients
        left += _send_run(hub, feeder, shared, some, now_ms)
    return left


def _send_run(
    hub: Hub, feeder: Session, shared: SharedEnvelope, recipients: list[Recipient], now_ms: int
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
            or not session.outbox.push_if_light(len(frame), bytes_max, messages_max)
        ):
            left.append(recipient)
            continue
        number += 1
        session.handed += 1
        noted = None if session.feeders is None else session.feeders.get(feeder)
        if noted is not None and noted[0] == second:
            noted[1] += 1
        elif session is not feeder:
            session.fed_by(feeder, now_ms)
        copies.append((session, frame))
    if copies:
        hub.counts["deliveries", "direct"] += len(copies)
        hub.effects.append(SendMany(copies))
    return left
