"""A session: one connection after its `hub:connect`, with one verified identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tailrace.auth import ANONYMOUS, Identity
from tailrace.hub.outbox import Outbox
from tailrace.hub.policy import Actor

if TYPE_CHECKING:
    from tailrace.hub.presence import Watch
    from tailrace.hub.registry import Registration
    from tailrace.hub.subscription import Subscription

CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
DISCONNECTING: Final = "disconnecting"
DISCONNECTED: Final = "disconnected"

# Words among a client's capabilities that switch on messages which older clients do not know.
FEATURES: Final = frozenset(
    ("typed-errors", "resume", "delivery-notices", "token-refresh", "broadcast-progress", "mailbox")
)
NOBODY: Final = Actor("")
STRIKE_WINDOW_MS: Final = 60_000
MINUTE_MS: Final = 60_000


class Session:
    """Owned by the loop thread. A connection that came back goes on with the session it had."""

    __slots__ = (
        "actor",
        "addresses",
        "answer",
        "asked",
        "boxes",
        "broadcasting",
        "capabilities",
        "closed_with",
        "closing_at_ms",
        "detached_bytes",
        "detached_until_ms",
        "expires_ms",
        "features",
        "feeders",
        "frames_held",
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
        "told_dropped",
        "told_expiring",
        "upgrade_token",
        "waiting",
        "watches",
    )

    def __init__(self, session_id: str, unsent: Callable[[], int], now_ms: int) -> None:
        self.id = session_id
        self.state = CONNECTING
        self.identity: Identity = ANONYMOUS
        self.actor: Actor = NOBODY
        self.features: frozenset[str] = frozenset()
        self.capabilities: list[str] = []
        self.peer = ""
        self.upgrade_token: str | None = None  # of the upgrade request, if the message has none
        self.outbox = Outbox(unsent)
        self.opened_ms = now_ms
        self.closing_at_ms = 0
        self.closed_with: int | None = None
        # What it owns; the cost of its end depends on nothing else.
        self.addresses: dict[str, Registration] = {}
        self.registering = 0  # registrations that are being committed
        self.subscriptions: dict[str, Subscription] = {}
        self.watches: dict[str, Watch] = {}
        self.boxes: dict[str, None] = {}  # addresses whose feeds come to this session
        self.asked: dict[str, None] = {}  # ids of the copies of its own asks
        self.owner_of: dict[str, None] = {}  # ids of pending asks that went to this session
        # Coming back.
        self.resume_token: str | None = None
        self.detached_until_ms = 0
        # Lists, here and below: ten thousand sessions of which most never need them, and a deque is large.
        self.waiting: list[bytes] = []
        self.detached_bytes = 0
        # The token.
        self.expires_ms: int | None = None
        self.told_expiring = False
        self.refreshed_ms = 0
        self.nonces: dict[str, int] = {}
        # Flow.
        self.feeders: dict[Session, list[int]] = {}  # who sent to it lately: [second, count]
        self.paused_by: dict[Session, None] = {}  # whom it was told to pause for
        self.overfull_since_ms = 0
        self.told_dropped = [0, 0, 0]  # count, bytes, since
        self.reserve = 0
        self.broadcasting = False
        self.frames_held: list[bytes] = []
        # Trouble and counts.
        self.strikes: list[int] = []
        self.received = 0
        self.minute = Minute(now_ms)
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
        strikes = self.strikes
        strikes.append(now_ms)
        while strikes[0] <= now_ms - STRIKE_WINDOW_MS:
            del strikes[0]
        return len(strikes)

    def fed_by(self, feeder: Session, now_ms: int) -> None:
        """Notes who sends here, so that it can be asked to wait."""
        second = now_ms // 1000
        noted = self.feeders.get(feeder)
        if noted is None or noted[0] != second:
            if len(self.feeders) >= 1024:
                self.feeders = {known: seen for known, seen in self.feeders.items() if seen[0] >= second - 1}
            self.feeders[feeder] = [second, 1]
        else:
            noted[1] += 1


class Minute:
    """What happened in the last full minute."""

    __slots__ = ("began_ms", "counts", "last", "last_began_ms")

    def __init__(self, now_ms: int) -> None:
        self.began_ms = self.last_began_ms = now_ms
        self.counts: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def add(self, name: str, now_ms: int) -> None:
        if now_ms - self.began_ms >= MINUTE_MS:
            self.roll(now_ms)
        self.counts[name] = self.counts.get(name, 0) + 1

    def roll(self, now_ms: int) -> None:
        passed = now_ms - self.began_ms
        if passed >= MINUTE_MS:
            self.last = self.counts if passed < 2 * MINUTE_MS else {}
            self.last_began_ms = now_ms - passed % MINUTE_MS - MINUTE_MS
            self.began_ms = now_ms - passed % MINUTE_MS
            self.counts = {}
