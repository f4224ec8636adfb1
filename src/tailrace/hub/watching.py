"""`hub:queue_stats` and `hub:metrics`: how a session, or the whole hub, is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.hub.fields import Request
from tailrace.hub.session import Minute, Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


def queue_stats(hub: Hub, session: Session, request: Request, now_ms: int) -> None:
    hub.reply(session, request, "hub:queue_stats_response", hub.flow.stats(session), now_ms)


def metrics(hub: Hub, session: Session, request: Request, now_ms: int) -> None:
    """The last full minute of the caller's session; of the whole hub for whoever manages it."""
    whole = session.actor.admin and (request.payload.text("scope") == "server" or not hub.dev)
    counted: dict[str, int] = {}
    if whole:
        for one in hub.sessions.values():
            one.minute.roll(now_ms)
            for name, count in one.minute.last.items():
                counted[name] = counted.get(name, 0) + count
    session.minute.roll(now_ms)
    minute: Minute = session.minute
    if not whole:
        counted = minute.last
    payload: dict[str, Any] = {
        "messages_received": counted.get("messages_received", 0),
        "messages_sent": counted.get("messages_sent", 0),
        "errors": counted.get("errors", 0),
        "connections_opened": hub.counts[("connections", "opened")] if whole else 1,
        "connections_closed": hub.counts[("connections", "closed")] if whole else 0,
        "windowStart": minute.last_began_ms,
        "timestamp": now_ms,
        "scope": "server" if whole else "session",
    }
    hub.reply(session, request, "hub:metrics_response", payload, now_ms)
