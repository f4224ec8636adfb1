"""`hub:queue_stats` and `hub:metrics`: how a session, or the whole hub, is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.hub.fields import HubRequest
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


def send_queue_stats(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    hub.reply(session, request, "hub:queue_stats_response", hub.flow.stats(session), now_ms)


def send_metrics(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """The last full minute of the caller's session; of the whole hub for whoever manages it."""
    whole = session.actor.admin and (request.payload.text("scope") == "server" or not hub.dev)
    session.minute.roll(session, now_ms)
    received = handed = errors = 0
    for one in hub.sessions.values() if whole else (session,):
        one.minute.roll(one, now_ms)
        counted = one.minute.last
        received, handed, errors = received + counted[0], handed + counted[1], errors + counted[2]
    payload: dict[str, Any] = {
        "messages_received": received,
        "messages_sent": handed,
        "errors": errors,
        "connections_opened": hub.counts[("connections", "opened")] if whole else 1,
        "connections_closed": hub.counts[("connections", "closed")] if whole else 0,
        "windowStart": session.minute.last_began_ms,
        "timestamp": now_ms,
        "scope": "server" if whole else "session",
    }
    hub.reply(session, request, "hub:metrics_response", payload, now_ms)
