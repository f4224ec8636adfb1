"""What actors, and groups of them, are fed from: mailboxes, the broadcasts, durable topics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from msgspec import Raw

from tailrace.hub.copies import OutgoingMessage
from tailrace.hub.registry import DeliveryOptions
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.cursors import Cursor
    from tailrace.hub.subscription import TopicSubscription

MAILBOX, BROADCAST, TOPIC = "mailbox", "broadcast", "topic"
BROADCAST_STREAM: Final = "hub/broadcast/0"
IN_FLIGHT_BYTES_MAX: Final = 1024 * 1024
# How far a group goes beyond its oldest message that is not committed: what lies between is written down.
GROUP_WINDOW_MAX: Final = 4096

DEFAULT_OPTIONS: Final = DeliveryOptions()

HasRoom = Callable[[Session], bool]


class BroadcastEntry(msgspec.Struct, rename="camel"):
    """One broadcast in its stream: who it was for is part of it."""

    message: Raw
    recipients: list[str]
    filter: dict[str, object] = {}
    registry_offset: str | None = None


decode_broadcast: Final = msgspec.json.Decoder(BroadcastEntry).decode


class InFlightEntry(msgspec.Struct, eq=False, gc=False):
    """An entry that was handed over and is not committed."""

    due_ms: int  # when it is handed over again
    size: int
    copy: OutgoingMessage  # without its payload
    holder: GroupMember | None = None  # of a group


class PrefetchedEntry(msgspec.Struct, eq=False, gc=False):
    """An entry that was read and is not handed over."""

    entry: int
    time_ns: int
    copy: OutgoingMessage
    seq: int
    mine: bool = True  # False: a broadcast to others


class Feed:
    """One stream as one box reads it."""

    __slots__ = (
        "ahead",
        "cursor",
        "deliveries",
        "flights",
        "flights_bytes",
        "handed_before",
        "kind",
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
        self.flights: dict[int, InFlightEntry] = {}
        self.flights_bytes = 0
        self.deliveries: dict[int, int] = {}  # of entries that are not committed
        self.ahead: deque[PrefetchedEntry] = deque()
        self.reading = False

    def take_off(self, entry: int, flight: InFlightEntry) -> None:
        self.flights[entry] = flight
        self.flights_bytes += flight.size
        if flight.holder is not None:
            flight.holder.in_flight += 1
            flight.holder.bytes += flight.size

    def touch_down(self, entry: int) -> None:
        """It is in flight no more, whatever became of it."""
        flight = self.flights.pop(entry, None)
        if flight is not None:
            self.flights_bytes -= flight.size
            if flight.holder is not None:
                flight.holder.in_flight -= 1
                flight.holder.bytes -= flight.size

    def land(self, upto: int) -> None:
        """These are committed: nothing of them is in flight any more."""
        for entry in [entry for entry in self.flights if entry <= upto]:
            self.touch_down(entry)
        for entry in [entry for entry in self.deliveries if entry <= upto]:
            del self.deliveries[entry]
        self.cursor.passed = {entry for entry in self.cursor.passed if entry > upto}
        if self.sent < upto:
            self.sent = upto
            while self.ahead and self.ahead[0].entry <= upto:
                self.ahead.popleft()

    def take_back(self, entries: list[int]) -> None:
        """These are handed over again, to whoever is next."""
        for entry in entries:
            self.touch_down(entry)
        self.sent = min(self.sent, min(entries) - 1)
        self.ahead.clear()

    def rewind(self) -> None:
        """What is not committed is handed over again."""
        self.sent = self.cursor.committed
        self.ahead.clear()
        for entry in list(self.flights):
            self.touch_down(entry)


class DeliveryQueue:
    """All feeds of one actor, in memory while its owner is online or something is being appended."""

    __slots__ = ("appends", "feeds", "live", "mailbox", "options", "path", "session")

    def __init__(self, path: str) -> None:
        self.path = path
        self.feeds: dict[str, Feed] = {}
        self.mailbox: Feed | None = None  # one of them; a group has none
        self.session: Session | None = None
        self.options = DEFAULT_OPTIONS
        self.appends = 0  # being committed
        self.live = True  # everything durable was handed over: what comes next can be, at once

    @property
    def address(self) -> str:
        """Whom the next message is for."""
        return f"@({self.path})"

    @property
    def holder(self) -> GroupMember | None:
        return None

    @property
    def online(self) -> bool:
        return self.session is not None and self.session.alive and not self.session.detached

    @property
    def attended(self) -> bool:
        """Whether somebody is there, or away for a moment."""
        return self.session is not None

    @property
    def is_fed(self) -> bool:
        """Whether what comes is given to somebody who is there."""
        return self.session is not None and self.options.push

    @property
    def one_by_one(self) -> bool:
        """Whether a message can be done with before those that came before it."""
        return self.options.manual

    def serves(self, session: Session) -> bool:
        return self.session is session

    def in_flight(self) -> int:
        return sum(len(feed.flights) for feed in self.feeds.values())

    def is_full(self) -> bool:
        if not self.options.manual:
            return False
        held = sum(feed.flights_bytes for feed in self.feeds.values())
        return held >= IN_FLIGHT_BYTES_MAX or self.in_flight() >= self.options.max_in_flight

    def is_ready(self, has_room: HasRoom, *, at_once: bool = False) -> bool:
        """Whether the next message can be handed over; `at_once`, even if others wait in the connection."""
        session = self.session
        if session is None or not self.options.push or self.is_full():
            return False
        return self.online if at_once else has_room(session)


class GroupMember(msgspec.Struct, eq=False):
    """One session's part in a durable group."""

    subscription: TopicSubscription
    options: DeliveryOptions
    in_flight: int = 0
    bytes: int = 0

    def is_full(self) -> bool:
        return self.options.manual and (
            self.in_flight >= self.options.max_in_flight or self.bytes >= IN_FLIGHT_BYTES_MAX
        )


class GroupQueue(DeliveryQueue):
    """The feeds of a durable group. Each message goes to one member, and is committed by itself."""

    __slots__ = ("_turn", "chosen", "members")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.members: list[GroupMember] = []
        self.chosen: GroupMember | None = None
        self._turn = 0

    @property
    def address(self) -> str:
        return "" if self.chosen is None else f"@({self.chosen.subscription.owner})"

    @property
    def holder(self) -> GroupMember | None:
        return self.chosen

    @property
    def online(self) -> bool:
        sessions = (member.subscription.session for member in self.members)
        return any(one is not None and one.alive and not one.detached for one in sessions)

    @property
    def attended(self) -> bool:
        return bool(self.members)

    @property
    def is_fed(self) -> bool:
        return bool(self.members)

    @property
    def one_by_one(self) -> bool:
        return True

    def serves(self, session: Session) -> bool:
        return any(member.subscription.session is session for member in self.members)

    def is_ready(self, has_room: HasRoom, *, at_once: bool = False) -> bool:
        """Chooses the member with the fewest messages in flight, then in turn."""
        self._turn += 1
        best: GroupMember | None = None
        for place in range(len(self.members)):
            member = self.members[(self._turn + place) % len(self.members)]
            session = member.subscription.session
            if session is None or member.is_full() or not has_room(session):
                continue
            if best is None or member.in_flight < best.in_flight:
                best = member
        self.chosen = best
        if best is None or any(
            feed.sent - feed.cursor.committed >= GROUP_WINDOW_MAX for feed in self.feeds.values()
        ):
            return False
        self.session, self.options = best.subscription.session, best.options
        return True

    def leave(self, subscription: TopicSubscription) -> None:
        """What a member had in its hands goes to the others."""
        for member in [one for one in self.members if one.subscription is subscription]:
            self.members.remove(member)
            self._give_back(member)
            if self.chosen is member:
                self.chosen = self.session = None

    def resumed(self, session: Session) -> None:
        """What was on its way to a connection that broke may not have come."""
        for member in self.members:
            if member.subscription.session is session:
                self._give_back(member)

    def _give_back(self, member: GroupMember) -> None:
        for feed in self.feeds.values():
            held = [entry for entry, flight in feed.flights.items() if flight.holder is member]
            if held:
                feed.take_back(held)
        self.live = False


def group_queue_path(group: str, topics: str) -> str:
    """What stands for a durable group where an actor has its path. No address looks like this."""
    return f"_group/{quote(group, safe='')}/{topics}"
