"""What an actor is fed from: its mailbox, the broadcasts, the durable topics it subscribed to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub.copies import Copy
from tailrace.hub.registry import Options
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.cursors import Cursor

MAILBOX, BROADCAST, TOPIC = "mailbox", "broadcast", "topic"
BROADCASTS: Final = "hub/broadcast/0"
IN_FLIGHT_BYTES_MAX: Final = 1024 * 1024


class Flight(msgspec.Struct, eq=False, gc=False):
    """An entry that was handed over and is not committed."""

    at_ms: int
    size: int
    copy: Copy  # without its payload


class Ahead(msgspec.Struct, eq=False, gc=False):
    """An entry that was read and is not handed over."""

    entry: int
    time_ns: int
    copy: Copy
    seq: int
    mine: bool = True  # False: a broadcast to others


class Feed:
    """One stream as one actor reads it."""

    __slots__ = (
        "ahead",
        "cursor",
        "deliveries",
        "flights",
        "flights_bytes",
        "handed_before",
        "kind",
        "passed",
        "reading",
        "sent",
        "stream",
        "subscription_id",
        "topic",
    )

    def __init__(self, stream: str, kind: str, cursor: Cursor) -> None:
        self.stream = stream
        self.kind = kind
        self.cursor = cursor
        self.topic = ""
        self.subscription_id: str | None = None
        self.sent = cursor.committed  # the last entry that was handed over, or passed over
        self.handed_before = cursor.delivered  # up to here an earlier session may have it
        self.flights: dict[int, Flight] = {}
        self.flights_bytes = 0
        self.deliveries: dict[int, int] = {}  # of entries that are not committed
        self.passed: set[int] = set()  # beyond the committed position, done with one by one
        self.ahead: deque[Ahead] = deque()
        self.reading = False

    def next_to_read(self) -> int:
        """Entries are read from beyond this one."""
        return self.ahead[-1].entry if self.ahead else self.sent

    def land(self, upto: int) -> None:
        """These are committed: nothing of them is in flight any more."""
        for entry in [entry for entry in self.flights if entry <= upto]:
            self.flights_bytes -= self.flights.pop(entry).size
        for entry in [entry for entry in self.deliveries if entry <= upto]:
            del self.deliveries[entry]
        self.passed = {entry for entry in self.passed if entry > upto}
        if self.sent < upto:
            self.sent = upto
            while self.ahead and self.ahead[0].entry <= upto:
                self.ahead.popleft()

    def rewind(self) -> None:
        """What is not committed is handed over again."""
        self.sent = self.cursor.committed
        self.ahead.clear()
        self.flights.clear()
        self.flights_bytes = 0


class Box:
    """All feeds of one actor, in memory while its owner is online or something is being appended."""

    __slots__ = ("appends", "feeds", "live", "options", "path", "session")

    def __init__(self, path: str) -> None:
        self.path = path
        self.feeds: dict[str, Feed] = {}
        self.session: Session | None = None
        self.options = Options()
        self.appends = 0  # being committed
        self.live = True  # everything durable was handed over: what comes next can be, at once

    @property
    def online(self) -> bool:
        return self.session is not None and self.session.alive and not self.session.detached

    def in_flight(self) -> int:
        return sum(len(feed.flights) for feed in self.feeds.values())

    def flight_full(self) -> bool:
        if not self.options.manual:
            return False
        held = sum(feed.flights_bytes for feed in self.feeds.values())
        return held >= IN_FLIGHT_BYTES_MAX or self.in_flight() >= self.options.max_in_flight
