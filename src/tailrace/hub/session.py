"""One client session: its state, outbox and counters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tailrace.auth import ANONYMOUS, Identity
from tailrace.hub.policy import Principal

if TYPE_CHECKING:
    from tailrace.hub.registry import PresenceWatch, Registration
    from tailrace.hub.topics import TopicSubscription


RATE_WINDOW_S: Final = 10
# Of an idle connection; shared, because most are idle most of the time.
_IDLE_RATES: Final = [0] * RATE_WINDOW_S


class OutboundConnection(Protocol):
    """The part of a connection that flow control reads."""

    @property
    def unsent_bytes(self) -> int: ...
    @property
    def unsent_bytes_most(self) -> int:
        """An upper bound of `unsent_bytes` that is faster to read."""
        ...


class _NoConnection:
    @property
    def unsent_bytes(self) -> int:
        return 0

    unsent_bytes_most = unsent_bytes


NO_CONNECTION: Final = _NoConnection()


class Outbox:
    """Counts of unsent messages; the bytes themselves are in the transport.

    `_decided` counts bytes that are not written yet; the connection counts those that are.
    """

    __slots__ = ("_decided", "_ends", "_pushed", "_rates", "_second", "connection", "messages_total")

    def __init__(self, connection: OutboundConnection = NO_CONNECTION) -> None:
        self.connection = connection
        self._decided = 0
        self._pushed = 0  # bytes, in total
        self._ends: list[int] = []  # end of each message that may be unsent, in total bytes
        self.messages_total = 0
        self._rates: list[int] = []  # messages sent in each of the last seconds
        self._second = 0

    @property
    def bytes(self) -> int:
        return self._decided + self.connection.unsent_bytes

    @property
    def messages(self) -> int:
        ends = self._ends
        if not ends:
            return 0
        held = self.bytes
        if not held:
            ends.clear()
            return 0
        taken = self._pushed - held
        if ends[0] <= taken:
            del ends[: bisect_right(ends, taken)]
        return len(ends)

    def is_below(self, bytes_max: int, messages_max: int) -> bool:
        """Whether it is certainly within the limits. If False, the exact counts decide."""
        return (
            len(self._ends) <= messages_max and self._decided + self.connection.unsent_bytes_most <= bytes_max
        )

    def push_if_below(self, size: int, bytes_max: int, messages_max: int) -> bool:
        """`push` if `is_below`, in one call, for fan-out."""
        ends = self._ends
        if len(ends) > messages_max or self._decided + self.connection.unsent_bytes_most > bytes_max:
            return False
        pushed = self._pushed = self._pushed + size
        self._decided += size
        ends.append(pushed)
        self.messages_total += 1
        return True

    def push(self, size: int) -> None:
        """Counts a message that will be written."""
        self._pushed += size
        self._decided += size
        self._ends.append(self._pushed)
        self.messages_total += 1

    def written(self, size: int) -> None:
        """The message was written to the transport."""
        self._decided -= size
        if len(self._ends) > 256:
            _ = self.messages  # drops what was sent long ago

    def on_second(self) -> None:
        taken = self.messages_total - self.messages
        if taken == self._second and self._rates is _IDLE_RATES:
            return
        rates = [*self._rates, taken - self._second][-RATE_WINDOW_S:]
        self._rates = _IDLE_RATES if rates == _IDLE_RATES else rates
        self._second = taken

    @property
    def rate(self) -> float:
        """Messages sent per second, over the last ten seconds."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0


CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
DISCONNECTING: Final = "disconnecting"
DISCONNECTED: Final = "disconnected"

# Client capabilities that enable messages which older clients do not know.
FEATURES: Final = frozenset(("resume", "delivery-notices", "token-refresh", "broadcast-progress", "mailbox"))
NO_PRINCIPAL: Final = Principal("")
MALFORMED_WINDOW_MS: Final = 60_000
SENDERS_TRACKED_MAX: Final = 1024
MINUTE_MS: Final = 60_000
SessionCounts = tuple[int, ...]  # messages received, messages delivered, errors
NO_COUNTS: Final[SessionCounts] = (0, 0, 0)
NOTHING_DROPPED: Final[tuple[int, int, int]] = (0, 0, 0)


class Session:
    """One connection after `hub:connect`, with one verified identity. A resumed connection continues it."""

    __slots__ = (
        "addresses",
        "broadcasting",
        "closed_with",
        "delivered",
        "detached_bytes",
        "detached_until_ms",
        "dropped",
        "errors",
        "expires_ms",
        "expiry_notified",
        "features",
        "held_frames",
        "id",
        "identity",
        "malformed_times",
        "minute",
        "nonces",
        "on_http_answer",
        "opened_ms",
        "outbox",
        "over_limit_messages",
        "over_limit_since_ms",
        "paused_by",
        "peer",
        "principal",
        "queues",
        "received",
        "received_requests",
        "recent_senders",
        "refreshed_ms",
        "registering",
        "resume_buffer",
        "resume_token",
        "sent_requests",
        "state",
        "subscriptions",
        "upgrade_token",
        "watches",
    )

    def __init__(self, session_id: str, now_ms: int, connection: OutboundConnection = NO_CONNECTION) -> None:
        self.id = session_id
        self.state = CONNECTING
        self.identity: Identity = ANONYMOUS
        self.principal: Principal = NO_PRINCIPAL
        self.features: frozenset[str] = frozenset()
        self.peer = ""
        self.upgrade_token: str | None = None  # from the upgrade request, used if hub:connect has none
        self.outbox = Outbox(connection)
        self.opened_ms = now_ms
        self.closed_with: int | None = None
        # What it owns; the cost of ending the session depends only on this.
        self.addresses: dict[str, Registration] = {}
        self.registering = 0  # registrations that are being committed
        self.subscriptions: dict[str, TopicSubscription] = {}
        # None, here and below, saves memory: most sessions never need it.
        self.watches: dict[str, PresenceWatch] | None = None
        self.queues: dict[str, None] = {}  # paths of delivery queues that push to this session
        self.sent_requests: dict[str, None] = {}  # message ids of its own pending requests
        self.received_requests: dict[str, None] = {}  # message ids of pending requests delivered to it
        # Resume.
        self.resume_token: str | None = None
        self.detached_until_ms = 0
        self.resume_buffer: list[bytes] | None = None
        self.detached_bytes = 0
        # The token.
        self.expires_ms: int | None = None
        self.expiry_notified = False
        self.refreshed_ms = 0
        self.nonces: dict[str, int] | None = None
        # Flow control.
        self.recent_senders: dict[Session, list[int]] | None = (
            None  # sessions that sent to it recently: [second, count]
        )
        self.paused_by: dict[Session, None] | None = None  # recipients that paused it
        self.over_limit_since_ms = 0
        self.dropped = NOTHING_DROPPED  # count, bytes, since
        self.over_limit_messages = 0
        self.broadcasting = False
        self.held_frames: list[bytes] | None = None
        # Counters.
        self.malformed_times: tuple[int, ...] = ()
        self.received = 0
        self.delivered = 0  # messages of other actors, without replies of the hub
        self.errors = 0
        self.minute = MinuteCounters(now_ms, now_ms)
        # Receives the response of a request over HTTP, which has no connection.
        self.on_http_answer: Callable[[bytes], None] | None = None

    @property
    def path(self) -> str:
        """The verified identity, as the path of an address."""
        return self.principal.path

    @property
    def alive(self) -> bool:
        return self.state == CONNECTED

    @property
    def detached(self) -> bool:
        return self.detached_until_ms > 0

    def count_malformed(self, now_ms: int) -> int:
        """Counts a malformed frame; returns how many there were within a minute."""
        young = [at_ms for at_ms in self.malformed_times if at_ms > now_ms - MALFORMED_WINDOW_MS]
        self.malformed_times = (*young, now_ms)
        return len(self.malformed_times)

    def note_sender(self, sending: Session, now_ms: int) -> None:
        """Records a sender, so that it can be paused."""
        second, recent_senders = now_ms // 1000, self.recent_senders
        noted = None if recent_senders is None else recent_senders.get(sending)
        if noted is not None and noted[0] == second:
            noted[1] += 1
            return
        if recent_senders is not None and len(recent_senders) >= SENDERS_TRACKED_MAX:
            self.expire_senders(now_ms)
        if self.recent_senders is None:
            self.recent_senders = {}
        self.recent_senders[sending] = [second, 1]

    def expire_senders(self, now_ms: int) -> None:
        """Removes senders that sent nothing for a second, so that ended sessions are not referenced."""
        young, known = now_ms // 1000 - 1, self.recent_senders or {}
        self.recent_senders = {
            sending: noted for sending, noted in known.items() if noted[0] >= young
        } or None


class MinuteCounters(msgspec.Struct, eq=False, gc=False):
    """Counters of the last full minute. Rolled once a second, and before reading."""

    began_ms: int
    last_began_ms: int = 0
    before: SessionCounts = NO_COUNTS  # at the start of this minute
    last: SessionCounts = NO_COUNTS

    def roll(self, session: Session, now_ms: int) -> None:
        passed = now_ms - self.began_ms
        if passed < MINUTE_MS:
            return
        counts = (session.received, session.delivered, session.errors)
        self.last = NO_COUNTS
        if passed < 2 * MINUTE_MS and counts != self.before:
            self.last = tuple(now - then for now, then in zip(counts, self.before, strict=True))
        self.before = counts
        self.began_ms = now_ms - passed % MINUTE_MS
        self.last_began_ms = self.began_ms - MINUTE_MS
