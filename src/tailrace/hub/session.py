"""A session: one connection after its `hub:connect`, with one verified identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.auth import ANONYMOUS, Identity
from tailrace.hub.outbox import NO_CONNECTION, OutboundConnection, Outbox
from tailrace.hub.policy import Principal

if TYPE_CHECKING:
    from tailrace.hub.presence import PresenceWatch
    from tailrace.hub.registry import Registration
    from tailrace.hub.subscription import TopicSubscription

CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
DISCONNECTING: Final = "disconnecting"
DISCONNECTED: Final = "disconnected"

# Words among a client's capabilities that switch on messages which older clients do not know.
FEATURES: Final = frozenset(("resume", "delivery-notices", "token-refresh", "broadcast-progress", "mailbox"))
NO_PRINCIPAL: Final = Principal("")
MALFORMED_WINDOW_MS: Final = 60_000
SENDERS_TRACKED_MAX: Final = 1024
MINUTE_MS: Final = 60_000
SessionCounts = tuple[int, ...]  # messages received, messages handed over, errors
NO_COUNTS: Final[SessionCounts] = (0, 0, 0)
NOTHING_DROPPED: Final[tuple[int, int, int]] = (0, 0, 0)


class Session:
    """Owned by the loop thread. A connection that came back goes on with the session it had."""

    __slots__ = (
        "actor",
        "addresses",
        "answer",
        "asked",
        "boxes",
        "broadcasting",
        "closed_with",
        "detached_bytes",
        "detached_until_ms",
        "dropped",
        "errors",
        "expires_ms",
        "features",
        "feeders",
        "frames_held",
        "handed",
        "id",
        "identity",
        "minute",
        "nonces",
        "opened_ms",
        "outbox",
        "overfull_since_ms",
        "owner_of",
        "paused_by",
        "peer",
        "received",
        "refreshed_ms",
        "registering",
        "reserve",
        "resume_token",
        "state",
        "strikes",
        "subscriptions",
        "told_expiring",
        "upgrade_token",
        "waiting",
        "watches",
    )

    def __init__(self, session_id: str, now_ms: int, wire: OutboundConnection = NO_CONNECTION) -> None:
        self.id = session_id
        self.state = CONNECTING
        self.identity: Identity = ANONYMOUS
        self.actor: Principal = NO_PRINCIPAL
        self.features: frozenset[str] = frozenset()
        self.peer = ""
        self.upgrade_token: str | None = None  # of the upgrade request, if the message has none
        self.outbox = Outbox(wire)
        self.opened_ms = now_ms
        self.closed_with: int | None = None
        # What it owns; the cost of its end depends on nothing else.
        self.addresses: dict[str, Registration] = {}
        self.registering = 0  # registrations that are being committed
        self.subscriptions: dict[str, TopicSubscription] = {}
        # None, here and below: there are ten thousand sessions, of which most never need it.
        self.watches: dict[str, PresenceWatch] | None = None
        self.boxes: dict[str, None] = {}  # addresses whose feeds come to this session
        self.asked: dict[str, None] = {}  # ids of the copies of its own asks
        self.owner_of: dict[str, None] = {}  # ids of pending asks that went to this session
        # Coming back.
        self.resume_token: str | None = None
        self.detached_until_ms = 0
        self.waiting: list[bytes] | None = None
        self.detached_bytes = 0
        # The token.
        self.expires_ms: int | None = None
        self.told_expiring = False
        self.refreshed_ms = 0
        self.nonces: dict[str, int] | None = None
        # Flow.
        self.feeders: dict[Session, list[int]] | None = None  # who sent to it lately: [second, count]
        self.paused_by: dict[Session, None] | None = None  # whom it was told to pause for
        self.overfull_since_ms = 0
        self.dropped = NOTHING_DROPPED  # count, bytes, since
        self.reserve = 0
        self.broadcasting = False
        self.frames_held: list[bytes] | None = None
        # Trouble and counts.
        self.strikes: tuple[int, ...] = ()
        self.received = 0
        self.handed = 0  # messages of others, not answers
        self.errors = 0
        self.minute = MinuteCounters(now_ms, now_ms)
        # A request over HTTP has no connection to write to: its one answer goes here.
        self.answer: Callable[[bytes], None] | None = None

    @property
    def path(self) -> str:
        """The verified identity, as the path of an address."""
        return self.actor.path

    @property
    def alive(self) -> bool:
        return self.state == CONNECTED

    @property
    def detached(self) -> bool:
        return self.detached_until_ms > 0

    def strike(self, now_ms: int) -> int:
        """Counts a frame that made no sense; how many there were within a minute."""
        young = [at_ms for at_ms in self.strikes if at_ms > now_ms - MALFORMED_WINDOW_MS]
        self.strikes = (*young, now_ms)
        return len(self.strikes)

    def fed_by(self, feeder: Session, now_ms: int) -> None:
        """Notes who sends here, so that it can be asked to wait."""
        second, feeders = now_ms // 1000, self.feeders
        noted = None if feeders is None else feeders.get(feeder)
        if noted is not None and noted[0] == second:
            noted[1] += 1
            return
        if feeders is not None and len(feeders) >= SENDERS_TRACKED_MAX:
            self.forget_feeders(now_ms)
        if self.feeders is None:
            self.feeders = {}
        self.feeders[feeder] = [second, 1]

    def forget_feeders(self, now_ms: int) -> None:
        """Those who have sent nothing for a second, so that nobody is kept who may be gone."""
        young, known = now_ms // 1000 - 1, self.feeders or {}
        self.feeders = {feeder: noted for feeder, noted in known.items() if noted[0] >= young} or None


class MinuteCounters(msgspec.Struct, eq=False, gc=False):
    """What a session counted in the last full minute. Rolled once a second, and before it is read."""

    began_ms: int
    last_began_ms: int = 0
    before: SessionCounts = NO_COUNTS  # when this minute began
    last: SessionCounts = NO_COUNTS

    def roll(self, session: Session, now_ms: int) -> None:
        passed = now_ms - self.began_ms
        if passed < MINUTE_MS:
            return
        counts = (session.received, session.handed, session.errors)
        self.last = NO_COUNTS
        if passed < 2 * MINUTE_MS and counts != self.before:
            self.last = tuple(now - then for now, then in zip(counts, self.before, strict=True))
        self.before = counts
        self.began_ms = now_ms - passed % MINUTE_MS
        self.last_began_ms = self.began_ms - MINUTE_MS
