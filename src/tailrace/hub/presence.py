"""Presence: who is told when actors come and go. Events are those of the registry's log, in its order."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.hub.addresses import AddressPattern
from tailrace.hub.errors import HubError, field_error
from tailrace.hub.flow import SENT, WAITING
from tailrace.hub.ids import new_id
from tailrace.hub.message import encode_envelope
from tailrace.hub.registry import Registration, RegistryQuery
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.fields import HubRequest
    from tailrace.hub.state import Hub

REGISTRY_STREAM: Final = "hub/registry"
SNAPSHOT_MAX: Final = 100


class PresenceWatch(msgspec.Struct, eq=False):
    id: str
    session: Session
    query: RegistryQuery
    behind: bool = False  # it missed something, and gets a fresh snapshot as soon as it takes one


class PresenceWatches:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._watches: dict[str, PresenceWatch] = {}

    def __len__(self) -> int:
        return len(self._watches)

    def request(self, session: Session, request: HubRequest, now_ms: int) -> None:
        hub = self._hub
        action = request.payload.text("action") or "watch"
        if action == "unwatch":
            watch_id = request.payload.text("watchId")
            if watch_id is None:
                raise field_error("watchId", "watchId is missing")
            if session.watches is not None and session.watches.pop(watch_id, None) is not None:
                del self._watches[watch_id]
            payload = {"watchId": watch_id, "event": "unwatched"}
            hub.reply(session, request, "hub:presence", payload, now_ms)
            return
        if action != "watch":
            raise field_error("action", "action is watch or unwatch")
        if not hub.policy.may(session.actor, "presence"):
            raise hub.denied(session, "presence", "denied by policy", "", now_ms)
        watches = session.watches
        if watches is None:
            watches = session.watches = {}
        if len(watches) >= hub.limits.hub_session_watches:
            details = {"retryAfter": 1000, "kind": "presence", "reason": "watches"}
            raise HubError("rate_limited", "too many watches on this session", details)
        pattern = AddressPattern(request.payload.text("pattern") or "*")
        capability = request.payload.text("capability")
        query = RegistryQuery(pattern, pattern.prefix, () if capability is None else (capability,))
        watch = PresenceWatch(f"watch-{new_id(now_ms)}", session, query)
        watches[watch.id] = watch
        self._watches[watch.id] = watch
        hub.reply(session, request, "hub:presence", self._snapshot(watch, now_ms), now_ms)

    def _snapshot(self, watch: PresenceWatch, now_ms: int) -> dict[str, Any]:
        hub = self._hub
        found = list(islice(hub.registry.matching(watch.query, now_ms), SNAPSHOT_MAX + 1))
        return {
            "watchId": watch.id,
            "actors": [one.shown() for one in found[:SNAPSHOT_MAX]],
            "hasMore": len(found) > SNAPSHOT_MAX,
            "offset": hub.streams.offset(REGISTRY_STREAM, hub.streams.tail(REGISTRY_STREAM) or 0),
        }

    def tell(self, event: str, found: Registration, offset: str | None, now_ms: int) -> None:
        """A durable event, to everybody whom it concerns."""
        for watch in tuple(self._watches.values()):
            if watch.behind or not watch.query.matches(found):
                continue
            payload = {
                "event": event,
                "watchId": watch.id,
                "actorAddress": found.address,
                "capabilities": found.capabilities,
                "version": found.version,
                "at": now_ms,
                "offset": offset,
            }
            if not self._offer(watch, payload, now_ms):
                watch.behind = True

    def _offer(self, watch: PresenceWatch, payload: dict[str, Any], now_ms: int) -> bool:
        hub, session = self._hub, watch.session
        frame = encode_envelope(
            id=new_id(now_ms),
            from_=hub.options.address,
            to=f"@({session.path})",
            type="hub:presence",
            payload=msgspec.json.encode(payload),
            timestamp=now_ms,
        )
        return hub.flow.offer(session, frame, now_ms) in (SENT, WAITING)

    def tick(self, now_ms: int) -> None:
        for watch in tuple(self._watches.values()):
            if watch.behind and self._hub.flow.has_room(watch.session, now_ms):
                payload = {**self._snapshot(watch, now_ms), "resync": True}
                watch.behind = not self._offer(watch, payload, now_ms)

    def session_ended(self, session: Session) -> None:
        for watch_id in session.watches or ():
            self._watches.pop(watch_id, None)
        session.watches = None
