"""The registry of actor addresses in memory, and presence notifications of its changes.

Changes are made durable as events of `hub/registry`; presence events follow the order of that stream.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sortedcontainers import SortedDict

from tailrace.hub.addresses import AddressPattern
from tailrace.hub.envelope import new_id
from tailrace.hub.errors import HubError, field_error
from tailrace.hub.flow_control import SENT, WAITING
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.requests import HubRequest
    from tailrace.hub.state import Hub


TTL_S_MIN: Final = 60
TTL_S_MAX: Final = 3600
TTL_S_DEFAULT: Final = 300
REGISTRY_PRESSURE_RATIO: Final = 0.9
REMEMBERED_VERSIONS_MAX: Final = 100_000  # of removed addresses
OLD_TOKEN_MS: Final = 10_000


class DeliveryOptions(msgspec.Struct, frozen=True):
    """Delivery options of an actor."""

    durable: bool = False
    commit: str = "auto"
    push: bool = True
    max_in_flight: int = 256
    ack_timeout_ms: int = 30_000
    max_deliver: int = 5

    @property
    def manual(self) -> bool:
        return self.commit == "manual"


class Registration(msgspec.Struct, eq=False):
    """One registered address."""

    path: str
    capabilities: list[str]
    metadata: dict[str, Any]
    ttl_ms: int
    options: DeliveryOptions
    registered_ms: int
    expires_ms: int
    version: int
    owner: str  # identity that registered it
    session: Session | None = None  # None while it is offline
    session_id: str = ""  # empty once its session has left; a restart keeps it
    renewal: str = ""
    old_renewal: str = ""
    old_renewal_until_ms: int = 0
    renews_on_heartbeat: bool = False
    used_ms: int = 0
    logged_ms: int = 0  # when it was last logged

    @property
    def online(self) -> bool:
        return self.session is not None and not self.session.detached

    @property
    def address(self) -> str:
        return f"@({self.path})"

    def to_view(self) -> dict[str, Any]:
        """As discovery returns it, without the renewal token."""
        return {
            "address": self.address,
            "actorAddress": self.address,
            "capabilities": self.capabilities,
            "metadata": self.metadata,
            "connectionId": self.session_id,
            "registeredAt": self.registered_ms,
            "expiresAt": self.expires_ms,
            "version": self.version,
            "online": self.online,
            "durable": self.options.durable,
        }


class RegistrationRecord(msgspec.Struct, rename="camel", omit_defaults=False):
    """A registration in hub/registry."""

    address: str
    capabilities: list[str]
    metadata: dict[str, Any]
    ttl_seconds: float
    registered_at: int
    expires_at: int
    version: int
    owner: str
    connection_id: str
    durable: bool = False
    commit: str = "auto"
    push: bool = True
    max_in_flight: int = 256
    ack_timeout_ms: int = 30_000
    max_deliver: int = 5


def to_record(found: Registration) -> RegistrationRecord:
    options = found.options
    return RegistrationRecord(
        found.address,
        found.capabilities,
        found.metadata,
        found.ttl_ms / 1000,
        found.registered_ms,
        found.expires_ms,
        found.version,
        found.owner,
        found.session_id,
        options.durable,
        options.commit,
        options.push,
        options.max_in_flight,
        options.ack_timeout_ms,
        options.max_deliver,
    )


def from_record(record: RegistrationRecord) -> Registration:
    options = DeliveryOptions(
        record.durable,
        record.commit,
        record.push,
        record.max_in_flight,
        record.ack_timeout_ms,
        record.max_deliver,
    )
    return Registration(
        record.address[2:-1],
        record.capabilities,
        record.metadata,
        int(record.ttl_seconds * 1000),
        options,
        record.registered_at,
        record.expires_at,
        record.version,
        record.owner,
        session_id=record.connection_id,
    )


class RegistryQuery(msgspec.Struct, frozen=True):
    """The filter of a discovery."""

    pattern: AddressPattern | None = None
    prefix: str = ""
    capabilities: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}

    @property
    def is_for_all(self) -> bool:
        return self.pattern is None and not (self.prefix or self.capabilities or self.metadata)

    def matches(self, found: Registration) -> bool:
        if self.pattern is not None and not self.pattern.matches(found.path):
            return False
        if self.capabilities and not all(wanted in found.capabilities for wanted in self.capabilities):
            return False
        if not self.metadata:
            return True
        have = found.metadata
        return all(name in have and json_equal(have[name], value) for name, value in self.metadata.items())


def json_equal(one: object, other: object) -> bool:
    """Equality of JSON values: true is not 1."""
    return one == other and type(one) is type(other)


class Registry:
    """Every registration by its path, in byte order. Paths are ASCII, so text order is byte order."""

    def __init__(self) -> None:
        self.by_path: SortedDict[str, Registration] = SortedDict()
        self.by_renewal: dict[str, Registration] = {}
        self._expiries: list[tuple[int, int, str]] = []  # time, version, path; outdated ones are skipped
        self._versions: dict[str, int] = {}  # assigned, of registrations whose events are not durable yet
        self._gone: OrderedDict[str, int] = OrderedDict()  # last versions of removed addresses
        self._floor = 0

    def __len__(self) -> int:
        return len(self.by_path)

    def find(self, path: str, now_ms: int) -> Registration | None:
        """The registration, unless expired."""
        found = self.by_path.get(path)
        return None if found is None or found.expires_ms <= now_ms else found

    def next_version(self, path: str) -> int:
        """Versions of an address only grow, also across removal."""
        found = self.by_path.get(path)
        known = found.version if found is not None else self._gone.get(path, self._floor)
        version = max(known, self._versions.get(path, 0)) + 1
        self._versions[path] = version
        return version

    def is_pending(self, path: str) -> bool:
        """Whether a newer registration of this address is being committed."""
        return path in self._versions

    def version_settled(self, path: str, version: int) -> None:
        if self._versions.get(path) == version:
            del self._versions[path]

    def put(self, found: Registration) -> None:
        old = self.by_path.get(found.path)
        if old is not None and old is not found:
            self._forget_tokens(old)
        self._gone.pop(found.path, None)
        self.by_path[found.path] = found
        self.schedule_expiry(found)

    def schedule_expiry(self, found: Registration) -> None:
        """Adds a changed expiry to the heap."""
        heapq.heappush(self._expiries, (found.expires_ms, found.version, found.path))

    def set_token(self, found: Registration, token: str, now_ms: int) -> None:
        """The old token works once more for a while: its holder may not have received the new one."""
        if found.old_renewal:
            self.by_renewal.pop(found.old_renewal, None)
        found.old_renewal, found.old_renewal_until_ms = found.renewal, now_ms + OLD_TOKEN_MS
        found.renewal = token
        self.by_renewal[token] = found

    def by_token(self, token: str, now_ms: int) -> Registration | None:
        found = self.by_renewal.get(token)
        if found is None or found.expires_ms <= now_ms:
            return None
        if token == found.renewal:
            return found
        return found if now_ms < found.old_renewal_until_ms else None

    def _forget_tokens(self, found: Registration) -> None:
        self.by_renewal.pop(found.renewal, None)
        self.by_renewal.pop(found.old_renewal, None)

    def remove(self, found: Registration) -> None:
        if self.by_path.get(found.path) is found:
            del self.by_path[found.path]
            self.remember(found.path, found.version)
        self._forget_tokens(found)

    def remember(self, path: str, version: int) -> None:
        """Stores the last version of a removed address. An evicted one raises all first versions."""
        self._gone[path] = max(version, self._gone.pop(path, 0))
        while len(self._gone) > REMEMBERED_VERSIONS_MAX:
            self._floor = max(self._floor, self._gone.popitem(last=False)[1])

    def pop_expired(self, now_ms: int, limit: int) -> list[Registration]:
        """Removes and returns expired registrations, earliest first."""
        due: list[Registration] = []
        heap = self._expiries
        while heap and heap[0][0] <= now_ms and len(due) < limit:
            _, _, path = heapq.heappop(heap)
            found = self.by_path.get(path)
            if found is not None and found.expires_ms <= now_ms:
                self.remove(found)
                due.append(found)
        if len(heap) > 4 * len(self.by_path) + 1000:
            # Renewals leave outdated times in the heap.
            self._expiries = [(one.expires_ms, one.version, path) for path, one in self.by_path.items()]
            heapq.heapify(self._expiries)
        return due

    def active(self, now_ms: int) -> list[Registration]:
        """All unexpired registrations in address order."""
        by_path = self.by_path
        return [found for path in by_path if (found := by_path[path]).expires_ms > now_ms]

    def matching(self, query: RegistryQuery, now_ms: int, after: str = "") -> Iterator[Registration]:
        """In address order, after `after`; a literal prefix narrows the search."""
        begin = max(after, query.prefix)
        # Iterating over all is faster than over a range.
        for path in self.by_path.irange(begin) if begin else self.by_path:
            if query.prefix and not path.startswith(query.prefix):
                return
            if after and path <= after:
                continue
            found = self.by_path[path]
            if found.expires_ms > now_ms and query.matches(found):
                yield found


REGISTRY_STREAM: Final = "hub/registry"
SNAPSHOT_MAX: Final = 100


class PresenceWatch(msgspec.Struct, eq=False):
    id: str
    session: Session
    query: RegistryQuery
    behind: bool = False  # it missed an event, and gets a new snapshot when it has room


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
            hub.send_reply(session, request, "hub:presence", payload, now_ms)
            return
        if action != "watch":
            raise field_error("action", "action must be watch or unwatch")
        if not hub.policy.may(session.principal, "presence"):
            raise hub.denied(session, "presence", "denied by policy", "", now_ms)
        watches = session.watches
        if watches is None:
            watches = session.watches = {}
        if len(watches) >= hub.limits.hub_session_watches:
            details = {"retryAfter": 1000, "kind": "presence", "reason": "watches"}
            raise HubError(
                "rate_limited",
                f"at most {hub.limits.hub_session_watches} presence watches per session",
                details,
            )
        pattern = AddressPattern(request.payload.text("pattern") or "*")
        capability = request.payload.text("capability")
        query = RegistryQuery(pattern, pattern.prefix, () if capability is None else (capability,))
        watch = PresenceWatch(f"watch-{new_id(now_ms)}", session, query)
        watches[watch.id] = watch
        self._watches[watch.id] = watch
        hub.send_reply(session, request, "hub:presence", self._snapshot(watch, now_ms), now_ms)

    def _snapshot(self, watch: PresenceWatch, now_ms: int) -> dict[str, Any]:
        hub = self._hub
        found = list(islice(hub.registry.matching(watch.query, now_ms), SNAPSHOT_MAX + 1))
        return {
            "watchId": watch.id,
            "actors": [one.to_view() for one in found[:SNAPSHOT_MAX]],
            "hasMore": len(found) > SNAPSHOT_MAX,
            "offset": hub.streams.offset(REGISTRY_STREAM, hub.streams.tail(REGISTRY_STREAM) or 0),
        }

    def notify(self, event: str, found: Registration, offset: str | None, now_ms: int) -> None:
        """Sends a durable event to all matching watches."""
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
        frame = hub.encode(f"@({session.path})", "hub:presence", msgspec.json.encode(payload), now_ms)
        return hub.flow_control.offer(session, frame, now_ms) in (SENT, WAITING)

    def tick(self, now_ms: int) -> None:
        for watch in tuple(self._watches.values()):
            if watch.behind and self._hub.flow_control.has_room(watch.session, now_ms):
                self._resync(watch, now_ms)

    def session_resumed(self, session: Session, now_ms: int) -> None:
        """Events that were written to the lost connection may not have arrived."""
        for watch in (session.watches or {}).values():
            self._resync(watch, now_ms)

    def _resync(self, watch: PresenceWatch, now_ms: int) -> None:
        payload = {**self._snapshot(watch, now_ms), "resync": True}
        watch.behind = not self._offer(watch, payload, now_ms)

    def session_ended(self, session: Session) -> None:
        for watch_id in session.watches or ():
            self._watches.pop(watch_id, None)
        session.watches = None
