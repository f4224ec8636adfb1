"""Delivery queues of actors and groups over streams, and their committed cursors.

A queue reads one feed per stream: the mailbox, the broadcasts, durable topics. Cursors never move back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from msgspec import Raw

from tailrace.hub.addresses import MAILBOX_PREFIX
from tailrace.hub.effects import Append, AppendOutcome
from tailrace.hub.registry import DeliveryOptions
from tailrace.hub.requests import OutgoingMessage
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tailrace.hub.state import Hub
    from tailrace.hub.topics import TopicSubscription


CURSORS_STREAM: Final = "hub/cursors/0"
DIRTY_MAX: Final = 1000
CURSOR_REWRITE_MS: Final = 12 * 3600 * 1000
NEVER_WRITTEN: Final = -1


class Cursor(msgspec.Struct, eq=False):
    """Positions as entry numbers, equivalent to offsets within one stream."""

    committed: int = 0
    delivered: int = 0  # the last that was delivered; after a restart entries up to it are redelivered
    read_upto: int = 0  # by the actor itself
    # Entries up to here may have been delivered by a process that crashed before recording it.
    maybe_delivered_upto: int = 0
    moved_ms: int = 0  # last change, to the second
    acknowledged: set[int] = set()  # beyond the committed position, committed singly

    def has_passed(self, entry: int) -> bool:
        return entry <= self.committed or entry in self.acknowledged

    def acknowledge(self, entries: Iterable[int]) -> None:
        """Commits single entries; the committed position advances up to the first gap."""
        self.acknowledged.update(entry for entry in entries if entry > self.committed)
        self._advance()

    def commit_upto(self, entry: int) -> None:
        """Commits everything up to an entry. The committed position never moves back."""
        if entry > self.committed:
            self.committed = entry
            if self.acknowledged:
                self.acknowledged = {one for one in self.acknowledged if one > entry}
        self._advance()

    def _advance(self) -> None:
        while self.committed + 1 in self.acknowledged:
            self.committed += 1
            self.acknowledged.remove(self.committed)
        self.delivered = max(self.delivered, self.committed)


class CursorRecord(msgspec.Struct, rename="camel", omit_defaults=True):
    """A cursor in hub/cursors/0. `passed` are runs of entries, first and last of each."""

    committed: str
    delivered: str
    moved_at: int = 0
    passed: list[tuple[int, int]] = []
    read: str | None = None  # if the actor itself read beyond what was delivered


class Cursors:
    """All cursors, in memory. Changes are written in batches, explicit commits at once."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._cursors: dict[str, dict[str, Cursor]] = {}  # by owner, then by stream
        self._dirty: dict[tuple[str, str], int] = {}
        self._moved = 0
        self._holders: dict[str, set[str]] = {}  # owners, by shared stream
        self.now_ms = 0  # as of the last second
        # When each was last written, oldest first: rewritten before the log's retention ends.
        self._written: OrderedDict[tuple[str, str], int] = OrderedDict()

    def get(self, path: str, stream: str) -> Cursor | None:
        return self._cursors.get(path, {}).get(stream)

    def set(self, path: str, stream: str, cursor: Cursor, *, restored: bool = False) -> None:
        """Restored cursors may be old, and are rewritten soon."""
        self._cursors.setdefault(path, {})[stream] = cursor
        cursor.moved_ms = cursor.moved_ms or self.now_ms
        if not stream.startswith(MAILBOX_PREFIX):
            self._holders.setdefault(stream, set()).add(path)
        self._written.setdefault((path, stream), 0 if restored else NEVER_WRITTEN)

    def remove(self, path: str, stream: str) -> None:
        """Removes the cursor of a stream that does not exist, without an event."""
        self._pop(path, stream)

    def _pop(self, path: str, stream: str) -> bool:
        found = self._cursors.get(path, {})
        if found.pop(stream, None) is None:
            return False
        self._dirty.pop((path, stream), None)
        self._written.pop((path, stream), None)
        if not found:
            del self._cursors[path]
        holders = self._holders.get(stream, set())
        holders.discard(path)
        if not holders:
            self._holders.pop(stream, None)
        return True

    def streams_of(self, path: str) -> list[str]:
        return list(self._cursors.get(path, ()))

    def holders(self, stream: str) -> Iterator[Cursor]:
        """The cursors of all readers of a shared stream."""
        for path in self._holders.get(stream, ()):
            yield self._cursors[path][stream]

    def delete(self, path: str, stream: str) -> None:
        """Removes the cursor of a deleted stream, with an event."""
        if self._pop(path, stream):
            self.write_deleted(path, stream)

    def write_deleted(self, path: str, stream: str) -> None:
        """The event of a removed cursor: a new stream of the same name must not start at its position."""
        self._hub.append(Append(CURSORS_STREAM, _encode_cursor_event(path, stream, None), key=path.encode()))

    def mark_dirty(self, path: str, stream: str) -> None:
        cursor = self.get(path, stream)
        if cursor is not None:
            cursor.moved_ms = self.now_ms
        self._dirty[(path, stream)] = 1
        self._hub.has_unflushed = True
        self._moved += 1
        if self._moved >= DIRTY_MAX:
            self.flush()

    def flush(self) -> None:
        for path, stream in self._dirty:
            self._append(path, stream, None)
        self._dirty.clear()
        self._moved = 0

    def rewrite_old(self, now_ms: int) -> None:
        """Rewrites cursors that have not moved for long, a few per second."""
        self.now_ms = now_ms
        for (path, stream), at_ms in list(islice(self._written.items(), DIRTY_MAX)):
            if at_ms != NEVER_WRITTEN and now_ms - at_ms < CURSOR_REWRITE_MS:
                return
            self._written[(path, stream)] = now_ms
            self._written.move_to_end((path, stream))
            if at_ms != NEVER_WRITTEN:
                self._dirty[(path, stream)] = 1
                self._hub.has_unflushed = True

    def commit(self, path: str, stream: str, then: Callable[[AppendOutcome, int], None]) -> None:
        """Writes the cursor at once, for a client that waits."""
        self._dirty.pop((path, stream), None)
        self._append(path, stream, then)

    def _append(self, path: str, stream: str, then: Callable[[AppendOutcome, int], None] | None) -> None:
        """A cursor that could not be written is written again at the next flush."""
        cursor = self.get(path, stream)
        if cursor is None or self._hub.streams.tail(stream) is None:
            return
        streams = self._hub.streams
        record = CursorRecord(
            streams.offset(stream, cursor.committed),
            streams.offset(stream, cursor.delivered),
            cursor.moved_ms,
            to_ranges(cursor.acknowledged),
            streams.offset(stream, cursor.read_upto) if cursor.read_upto > cursor.delivered else None,
        )

        def settled(outcome: AppendOutcome, now_ms: int) -> None:
            if outcome.error is not None and self.get(path, stream) is cursor:
                self._dirty[(path, stream)] = 1
                self._hub.has_unflushed = True
            if then is not None:
                then(outcome, now_ms)

        self._hub.append(
            Append(CURSORS_STREAM, _encode_cursor_event(path, stream, record), settled, key=path.encode())
        )


def to_ranges(entries: Iterable[int]) -> list[tuple[int, int]]:
    """Entry numbers as runs (first, last)."""
    found: list[tuple[int, int]] = []
    for entry in sorted(entries):
        if found and found[-1][1] == entry - 1:
            found[-1] = (found[-1][0], entry)
        else:
            found.append((entry, entry))
    return found


def cursor_key(path: str, stream: str) -> str:
    """The key of a cursor event."""
    return f"@({path}) {stream}"


def _encode_cursor_event(path: str, stream: str, record: CursorRecord | None) -> bytes:
    key = cursor_key(path, stream)
    if record is None:
        return msgspec.json.encode({"type": "cursor", "key": key, "headers": {"operation": "delete"}})
    return msgspec.json.encode(
        {"type": "cursor", "key": key, "value": record, "headers": {"operation": "update"}}
    )


MAILBOX, BROADCAST, TOPIC = "mailbox", "broadcast", "topic"
BROADCAST_STREAM: Final = "hub/broadcast/0"
IN_FLIGHT_BYTES_MAX: Final = 1024 * 1024
# Distance of a group's reads from its oldest uncommitted entry: entries in between are in its cursor record.
GROUP_WINDOW_MAX: Final = 4096

DEFAULT_OPTIONS: Final = DeliveryOptions()

HasRoom = Callable[[Session], bool]


class BroadcastEntry(msgspec.Struct, rename="camel"):
    """One broadcast in its stream, with its recipients."""

    message: Raw
    recipients: list[str]
    filter: dict[str, object] = {}
    registry_offset: str | None = None


decode_broadcast: Final = msgspec.json.Decoder(BroadcastEntry).decode


class InFlightEntry(msgspec.Struct, eq=False, gc=False):
    """An entry that was delivered and is not committed."""

    due_ms: int  # when it is redelivered
    size: int
    copy: OutgoingMessage  # without its payload
    holder: GroupMember | None = None  # of a group


class PrefetchedEntry(msgspec.Struct, eq=False, gc=False):
    """An entry that was read and is not delivered."""

    entry: int
    time_ns: int
    copy: OutgoingMessage
    seq: int
    mine: bool = True  # False: a broadcast to others


class Feed:
    """One stream as one queue reads it."""

    __slots__ = (
        "cursor",
        "delivered_before",
        "deliveries",
        "in_flight",
        "in_flight_bytes",
        "kind",
        "prefetched",
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
        self.sent = cursor.committed  # the last entry that was delivered or skipped
        self.delivered_before = cursor.delivered  # up to here an earlier session may have received it
        self.in_flight: dict[int, InFlightEntry] = {}
        self.in_flight_bytes = 0
        self.deliveries: dict[int, int] = {}  # of entries that are not committed
        self.prefetched: deque[PrefetchedEntry] = deque()
        self.reading = False

    def add_in_flight(self, entry: int, flight: InFlightEntry) -> None:
        self.in_flight[entry] = flight
        self.in_flight_bytes += flight.size
        if flight.holder is not None:
            flight.holder.in_flight += 1
            flight.holder.bytes += flight.size

    def remove_in_flight(self, entry: int) -> None:
        """The entry is committed, skipped or requeued."""
        flight = self.in_flight.pop(entry, None)
        if flight is not None:
            self.in_flight_bytes -= flight.size
            if flight.holder is not None:
                flight.holder.in_flight -= 1
                flight.holder.bytes -= flight.size

    def commit_upto(self, upto: int) -> None:
        """Entries up to `upto` are committed."""
        for entry in [entry for entry in self.in_flight if entry <= upto]:
            self.remove_in_flight(entry)
        for entry in [entry for entry in self.deliveries if entry <= upto]:
            del self.deliveries[entry]
        if self.sent < upto:
            self.sent = upto
            while self.prefetched and self.prefetched[0].entry <= upto:
                self.prefetched.popleft()

    def requeue(self, entries: list[int]) -> None:
        """These entries are delivered again."""
        for entry in entries:
            self.remove_in_flight(entry)
        self.sent = min(self.sent, min(entries) - 1)
        self.prefetched.clear()

    def rewind(self) -> None:
        """Everything not committed is delivered again."""
        self.sent = self.cursor.committed
        self.prefetched.clear()
        for entry in list(self.in_flight):
            self.remove_in_flight(entry)


class DeliveryQueue:
    """All feeds of one actor, in memory while its owner is online or something is being appended."""

    __slots__ = ("appends", "feeds", "is_caught_up", "mailbox", "options", "path", "session")

    def __init__(self, path: str) -> None:
        self.path = path
        self.feeds: dict[str, Feed] = {}
        self.mailbox: Feed | None = None  # one of them; a group has none
        self.session: Session | None = None
        self.options = DEFAULT_OPTIONS
        self.appends = 0  # being committed
        self.is_caught_up = True  # every durable entry was delivered: a new one can be delivered directly

    @property
    def address(self) -> str:
        """The recipient of the next message."""
        return f"@({self.path})"

    @property
    def holder(self) -> GroupMember | None:
        return None

    @property
    def online(self) -> bool:
        return self.session is not None and self.session.alive and not self.session.detached

    @property
    def has_session(self) -> bool:
        """Whether a session, connected or resumable, reads this queue."""
        return self.session is not None

    @property
    def is_pushed(self) -> bool:
        """Whether new entries are pushed to a session."""
        return self.session is not None and self.options.push

    @property
    def commits_single(self) -> bool:
        """Whether entries are committed singly, out of order."""
        return self.options.manual

    def serves(self, session: Session) -> bool:
        return self.session is session

    def in_flight(self) -> int:
        return sum(len(feed.in_flight) for feed in self.feeds.values())

    def is_full(self) -> bool:
        if not self.options.manual:
            return False
        held = sum(feed.in_flight_bytes for feed in self.feeds.values())
        return held >= IN_FLIGHT_BYTES_MAX or self.in_flight() >= self.options.max_in_flight

    def is_ready(self, has_room: HasRoom, *, at_once: bool = False) -> bool:
        """Whether the next message can be delivered; `at_once`: even after unsent messages."""
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
    def has_session(self) -> bool:
        return bool(self.members)

    @property
    def is_pushed(self) -> bool:
        return bool(self.members)

    @property
    def commits_single(self) -> bool:
        return True

    def serves(self, session: Session) -> bool:
        return any(member.subscription.session is session for member in self.members)

    def is_ready(self, has_room: HasRoom, *, at_once: bool = False) -> bool:
        """Chooses the member with the fewest messages in flight, then round robin."""
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
        """Requeues what the member had in flight."""
        for member in [one for one in self.members if one.subscription is subscription]:
            self.members.remove(member)
            self._requeue(member)
            if self.chosen is member:
                self.chosen = self.session = None

    def resumed(self, session: Session) -> None:
        """Requeues what was in flight on a broken connection."""
        for member in self.members:
            if member.subscription.session is session:
                self._requeue(member)

    def _requeue(self, member: GroupMember) -> None:
        for feed in self.feeds.values():
            held = [entry for entry, flight in feed.in_flight.items() if flight.holder is member]
            if held:
                feed.requeue(held)
        self.is_caught_up = False


def group_queue_path(group: str, topics: str) -> str:
    """The path of a durable group's queue. It is never a valid address."""
    return f"_group/{quote(group, safe='')}/{topics}"
