"""Mailboxes: messages that wait in a stream until their actor has them. Pushed from the log, in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub import requests
from tailrace.hub.addresses import mailbox_stream
from tailrace.hub.delivery_queues import (
    BROADCAST,
    BROADCAST_STREAM,
    MAILBOX,
    TOPIC,
    Cursor,
    Cursors,
    DeliveryQueue,
    Feed,
    GroupQueue,
    HasRoom,
    InFlightEntry,
    PrefetchedEntry,
    cursor_key,
    decode_broadcast,
    group_queue_path,
)
from tailrace.hub.effects import Append, AppendOutcome, CreateStream, Read, ReadResult
from tailrace.hub.envelope import new_id, parse_envelope
from tailrace.hub.errors import HubError, to_hub_error
from tailrace.hub.flow_control import SENT
from tailrace.hub.pending_requests import PendingRequest
from tailrace.hub.registry import Registration
from tailrace.hub.requests import OutgoingMessage
from tailrace.hub.session import Session
from tailrace.hub.topics import TopicSubscription

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

PAGE_ENTRIES: Final = 100
PAGE_BYTES: Final = 256 * 1024
TRACE_KIND_BY_FEED: Final = {MAILBOX: "send", BROADCAST: "broadcast", TOPIC: "publish"}
STORED_BYTES_MAX: Final = 2**30  # what is in a stream was let in before

RefusedCallback = Callable[[HubError, int], None]
StoredCallback = Callable[[AppendOutcome, bool], None]  # and whether it was handed over at once


class Mailboxes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.boxes: dict[str, DeliveryQueue] = {}
        self.begun: dict[str, int] = {}  # by stream that many read: its first entry of this process
        self.cursors = Cursors(hub)
        self._resting: dict[DeliveryQueue, None] = {}  # nobody is there, but more may come in a moment

    # -- finding ---------------------------------------------------------------------------------------

    def has(self, path: str) -> bool:
        """Whether messages for this address can wait."""
        box = self.boxes.get(path)
        if box is not None and (box.appends or box.options.durable):
            return True
        return self._hub.streams.tail(mailbox_stream(path)) is not None

    def open(self, path: str) -> DeliveryQueue:
        box = self.boxes.get(path)
        if box is None:
            box = self.boxes[path] = DeliveryQueue(path)
        if box.mailbox is None:
            box.mailbox = self.feed(box, mailbox_stream(path), MAILBOX)
        return box

    def open_group(self, path: str) -> GroupQueue:
        box = self.boxes.get(path)
        if box is None:
            box = self.boxes[path] = GroupQueue(path)
        assert isinstance(box, GroupQueue)
        return box

    def feed(self, box: DeliveryQueue, stream: str, kind: str, *, begin: int = 0) -> Feed:
        """The feed from a stream; `begin` if it never had one."""
        found = box.feeds.get(stream)
        if found is None:
            cursor = self.cursors.of(box.path, stream)
            if cursor is None:
                # What an earlier process appended it may have handed over, too.
                cursor = Cursor(begin, begin, unsure_upto=self._inherited(stream, kind))
                self.cursors.put(box.path, stream, cursor)
                if begin:
                    self.cursors.moved(box.path, stream)
            found = box.feeds[stream] = Feed(stream, kind, cursor)
        return found

    def _inherited(self, stream: str, kind: str) -> int:
        """The last entry of an earlier process. A mailbox is opened before anything is appended to it."""
        tail = self._hub.streams.tail(stream) or 0
        return tail if kind == MAILBOX else self.begun.get(stream, tail + 1) - 1

    def uncommitted(self, box: DeliveryQueue) -> int:
        feed = box.mailbox
        if feed is None:
            return 0
        return (self._hub.streams.tail(feed.stream) or 0) - feed.cursor.committed + box.appends

    # -- owners ----------------------------------------------------------------------------------------

    def attach(self, found: Registration, session: Session, now_ms: int) -> None:
        """The owner of an address is online: what waits for it is pushed."""
        path, hub = found.path, self._hub
        if not (found.options.durable or self.has(path)):
            return
        stream = mailbox_stream(path)
        is_new = hub.streams.tail(stream) is None
        if found.options.durable and is_new:
            hub.effects.append(CreateStream(stream))
        box = self.open(path)
        box.options = found.options
        # Broadcasts name whom they are for. Whoever was here before begins where it was, or at the beginning.
        begin = (hub.streams.tail(BROADCAST_STREAM) or 0) if is_new else 0
        self.feed(box, BROADCAST_STREAM, BROADCAST, begin=begin)
        self.take(box, session)
        box.live = False
        self.pump(box, now_ms)

    def take(self, box: DeliveryQueue, session: Session) -> None:
        """From here on the feeds of an actor come to this session."""
        if box.session is session:
            return
        if box.session is not None:
            box.session.boxes.pop(box.path, None)
        box.session = session
        session.boxes[box.path] = None
        for feed in box.feeds.values():
            feed.rewind()

    def came_back(self, session: Session, now_ms: int) -> None:
        """A session was resumed: what it did not commit is handed over again."""
        for path in tuple(session.boxes):
            box = self.boxes.get(path)
            if box is not None and box.serves(session):
                if isinstance(box, GroupQueue):
                    box.resumed(session)
                elif box.options.manual:
                    for feed in box.feeds.values():
                        feed.rewind()
                box.live = False
                self.pump(box, now_ms)

    def leave(self, path: str, session: Session) -> None:
        """The owner is gone; its cursors stay."""
        box = self.boxes.get(path)
        if box is not None and box.session is session:
            box.session = None
            session.boxes.pop(path, None)
            for stream in [stream for stream, feed in box.feeds.items() if feed.kind == TOPIC]:
                del box.feeds[stream]
            self.let_go(box)

    def leave_group(self, found: TopicSubscription) -> None:
        """A member is gone; what it had goes to the others, and without any it waits."""
        assert found.group is not None
        box = self.boxes.get(group_queue_path(found.group, found.filter.text))
        if not isinstance(box, GroupQueue):
            return
        box.leave(found)
        if found.session is not None and not box.serves(found.session):
            found.session.boxes.pop(box.path, None)
        self.let_go(box)

    def let_go(self, box: DeliveryQueue) -> None:
        """Nobody is here, and nothing is on its way: the cursors remember enough."""
        waits = box.attended or box.appends or any(feed.deliveries for feed in box.feeds.values())
        if not waits and self.boxes.get(box.path) is box:
            del self.boxes[box.path]
            for stream in box.feeds:
                if self._hub.streams.tail(stream) is None:
                    self.cursors.drop(box.path, stream)

    def rest(self, box: DeliveryQueue) -> None:
        """Lets go of it a moment later: where one message is kept, another often follows."""
        if box.session is None:
            self._resting[box] = None
        else:
            self.let_go(box)

    # -- storing ---------------------------------------------------------------------------------------

    def is_full(self, box: DeliveryQueue) -> bool:
        """Whether a mailbox takes nothing more before some of it is committed."""
        assert box.mailbox is not None
        limits, streams, stream = self._hub.limits, self._hub.streams, box.mailbox.stream
        tail = streams.tail(stream) or 0
        waiting = tail - box.mailbox.cursor.committed + box.appends
        size = streams.size_bytes(stream)
        if waiting < tail:  # those that are not durable yet count, and their bytes are in the size already
            size = size * waiting // tail
        return waiting >= limits.hub_mailbox_entries or size >= limits.hub_mailbox_bytes

    def check_room(self, path: str) -> None:
        box = self.open(path)
        if self.is_full(box):
            self.let_go(box)
            raise HubError("mailbox_full", "the recipient's mailbox is full", {"actorAddress": f"@({path})"})

    def store(
        self,
        path: str,
        copy: OutgoingMessage,
        ask: PendingRequest | None,
        now_ms: int,
        *,
        producer: tuple[str, int, int] | None = None,
        refused: RefusedCallback | None = None,
        outcome: StoredCallback | None = None,
    ) -> None:
        """Appends, then delivers: nobody sees a message before it is durable."""
        hub = self._hub
        box = self.open(path)
        registered = hub.registry.find(path, now_ms)
        if box.session is None and registered is not None and registered.session is not None:
            box.options = registered.options
            self.take(box, registered.session)
        feed = box.mailbox
        assert feed is not None
        copy.metadata = requests.append_metadata(copy.metadata, b'"hubSeq":%d' % hub.next_seq(now_ms))
        box.appends += 1

        def then(settled: AppendOutcome, now_ms: int) -> None:
            box.appends -= 1
            if settled.error is not None:
                error = to_hub_error(settled.error)
                if ask is not None:
                    hub.asks.failed(ask, error, now_ms)
                    if ask.seen is not None:
                        ask.seen[0].forget(ask.request_id)  # it may be sent again
                elif refused is not None:
                    refused(error, now_ms)
                if outcome is not None:
                    outcome(settled, False)
                self.let_go(box)
                return
            if ask is not None:
                ask.duplicate = settled.duplicate
                hub.asks.committed(
                    ask, feed.stream, settled.entry, settled.offset, online=box.online, now_ms=now_ms
                )
                if settled.duplicate:
                    hub.asks.handed(ask, now_ms, waits=not box.online)
            handed = False
            if not settled.duplicate:
                hub.trace.note("accepted", copy, now_ms, stream=feed.stream, offset=settled.offset)
                handed = self.arrived(box, feed, settled.entry, copy, now_ms)
            if outcome is not None:
                outcome(settled, handed)
            self.let_go(box)

        hub.append(
            Append(feed.stream, copy.frame(), then, key=copy.sender.address.encode(), producer=producer)
        )

    def arrived(self, box: DeliveryQueue, feed: Feed, entry: int, copy: OutgoingMessage, now_ms: int) -> bool:
        """An entry is durable: handed over at once if everything before it was, and whether it was."""
        if not box.is_fed:
            return False
        if box.live and feed.sent == entry - 1 and box.is_ready(self._room(feed, now_ms), at_once=True):
            self._hand(box, feed, PrefetchedEntry(entry, now_ms * 1_000_000, copy, 0), now_ms)
            if feed.sent == entry:
                return feed.cursor.delivered >= entry
        box.live = False
        self.pump(box, now_ms)
        return feed.cursor.delivered >= entry

    # -- handing over ----------------------------------------------------------------------------------

    def pump(self, box: DeliveryQueue, now_ms: int) -> None:
        """Hands over what is durable and was not, as long as there is room for it."""
        while box.is_ready(self._room(None, now_ms)):
            behind = [feed for feed in box.feeds.values() if feed.ahead or self._is_behind(feed)]
            if not behind:
                box.live = True
                return
            waits = False
            for feed in behind:
                if not feed.ahead:
                    waits = True
                    self._read(box, feed)
            if waits:
                return
            feed = min(behind, key=lambda one: one.ahead[0].seq)
            if isinstance(box, GroupQueue) and not box.is_ready(self._room(feed, now_ms)):
                return  # nobody who may have it is here
            ahead = feed.ahead[0]
            self._hand(box, feed, ahead, now_ms)
            if feed.sent < ahead.entry:
                return  # the connection takes nothing more
            if feed.ahead and feed.ahead[0] is ahead:
                feed.ahead.popleft()

    def _room(self, feed: Feed | None, now_ms: int) -> HasRoom:
        """Who can be given something now: something of this feed, if there is one."""
        hub = self._hub
        if feed is None or feed.kind != TOPIC:
            return lambda session: hub.flow.has_room(session, now_ms)
        topic = feed.topic
        return lambda session: (
            hub.flow.has_room(session, now_ms) and hub.policy.may_topic(session.actor, "subscribe", topic)
        )

    def _is_behind(self, feed: Feed) -> bool:
        return (self._hub.streams.tail(feed.stream) or 0) > feed.sent

    def _read(self, box: DeliveryQueue, feed: Feed) -> None:
        if feed.reading:
            return
        feed.reading = True
        after = feed.sent

        def then(found: ReadResult, now_ms: int) -> None:
            feed.reading = False
            if found.error is not None or feed.sent != after or feed.ahead:
                if found.error is not None and found.error.code == "offset_gone":
                    feed.sent = max(feed.sent, self._hub.streams.earliest(feed.stream))
                elif found.error is not None:
                    return  # tried again when something happens
                self.pump(box, now_ms)
                return
            for number, time_ns, body in found.entries:
                feed.ahead.append(self._ahead(box, feed, number, time_ns, body, now_ms))
            self.pump(box, now_ms)

        self._hub.effects.append(Read(feed.stream, after, PAGE_ENTRIES, PAGE_BYTES, then))

    def _ahead(
        self, box: DeliveryQueue, feed: Feed, number: int, time_ns: int, body: bytes, now_ms: int
    ) -> PrefetchedEntry:
        mine = True
        if feed.kind == BROADCAST:
            entry = decode_broadcast(body)
            mine = box.path in entry.recipients
            body = bytes(entry.message)
        copy = requests.outgoing_from_envelope(parse_envelope(body, STORED_BYTES_MAX))
        if feed.kind != MAILBOX:
            copy.id = new_id(now_ms)
        seq = requests.parse_metadata(copy).get("hubSeq")
        return PrefetchedEntry(number, time_ns, copy, int(bytes(seq)) if seq is not None else 0, mine)

    def _hand(self, box: DeliveryQueue, feed: Feed, ahead: PrefetchedEntry, now_ms: int) -> None:
        """To the connection; `feed.sent` tells whether it was taken."""
        hub, entry, copy = self._hub, ahead.entry, ahead.copy
        assert box.session is not None
        if feed.kind != MAILBOX:
            copy.to = box.address
        cursor = feed.cursor
        if not ahead.mine or entry in feed.flights or entry <= cursor.committed or entry in cursor.passed:
            if not ahead.mine:
                self._pass(box, feed, entry)
            feed.sent = max(feed.sent, entry)
            return
        before = feed.deliveries.get(entry, 0)
        reason = self._undeliverable(box, feed, ahead, before, now_ms)
        if reason is not None:
            if reason != "denied":
                self.bury(box, feed, entry, copy, reason, before, ahead.time_ns, now_ms)
            self._pass(box, feed, entry)
            return
        offset = hub.streams.offset(feed.stream, entry)
        more = b',"mailbox":{"stream":%b,"offset":"%b"' % (
            msgspec.json.encode(feed.stream),
            offset.encode(),
        )
        holder = box.holder
        subscription_id = feed.subscription_id if holder is None else holder.subscription.id
        if subscription_id is not None:
            more += b',"subscriptionId":"%b"' % subscription_id.encode()
        more += b"}"
        if before or entry <= max(feed.handed_before, feed.cursor.unsure_upto):
            more += b',"redelivered":true,"deliveryCount":%d' % (before + 1)
        ask = hub.asks.stored_at(feed.stream, entry, box.path)
        if ask is not None and feed.kind == TOPIC:
            copy = msgspec.structs.replace(copy, id=ask.copy_id, pattern="ask")
            more += ask.own
        frame = copy.frame(more)
        if hub.flow.offer(box.session, frame, now_ms, mode="log") != SENT:
            return
        feed.sent = max(feed.sent, entry)
        feed.cursor.delivered = max(feed.cursor.delivered, entry)
        if ask is None and feed.kind == MAILBOX and copy.pattern == "ask":
            ask = hub.asks.rebuild(copy, box.path, feed.stream, entry, offset, now_ms)
        if box.options.manual:
            due_ms = now_ms + box.options.ack_timeout_ms
            light = msgspec.structs.replace(copy, payload=b"")
            feed.take_off(entry, InFlightEntry(due_ms, len(frame), light, holder))
            feed.deliveries[entry] = before + 1
            self.cursors.moved(box.path, feed.stream)
        else:
            self.done_with(box, feed, {entry})
        hub.trace.note(
            "delivered", copy, now_ms, kind=TRACE_KIND_BY_FEED[feed.kind], stream=feed.stream, offset=offset
        )
        if ask is not None and not ask.done:
            hub.asks.sent_to(ask, box.session)
            hub.asks.handed(ask, now_ms, processed=not box.options.manual)

    def _undeliverable(
        self, box: DeliveryQueue, feed: Feed, ahead: PrefetchedEntry, before: int, now_ms: int
    ) -> str | None:
        hub = self._hub
        if ahead.copy.is_expired(now_ms):
            return "message_expired"
        if now_ms - ahead.time_ns // 1_000_000 > hub.limits.hub_mailbox_ms:
            return "mailbox_expired"
        if box.options.manual and before >= box.options.max_deliver:
            return "max_deliveries"
        if feed.kind == TOPIC and box.session is not None:
            if not hub.policy.may_topic(box.session.actor, "subscribe", feed.topic):
                return "denied"
        return None

    def bury(
        self,
        box: DeliveryQueue,
        feed: Feed,
        entry: int,
        copy: OutgoingMessage,
        reason: str,
        attempts: int,
        time_ns: int,
        now_ms: int,
        *,
        then: Callable[[AppendOutcome, int], None] | None = None,
    ) -> None:
        """An accepted message that nobody will get."""
        hub = self._hub
        hub.dead.write(
            reason,
            copy,
            now_ms,
            stream=feed.stream,
            offset=hub.streams.offset(feed.stream, entry),
            cursor=cursor_key(box.path, feed.stream),
            attempts=attempts,
            accepted_ms=time_ns // 1_000_000,
            then=then,
        )
        ask = hub.asks.stored_at(feed.stream, entry, box.path)
        if ask is not None:
            code = "message_expired" if reason == "message_expired" else "timeout"
            hub.asks.failed(ask, HubError(code, f"not delivered: {reason}", {"outcome": "unknown"}), now_ms)

    def _pass(self, box: DeliveryQueue, feed: Feed, entry: int) -> None:
        """Done with an entry that was not handed over."""
        feed.sent = max(feed.sent, entry)
        self.done_with(box, feed, {entry})

    def done_with(self, box: DeliveryQueue, feed: Feed, entries: set[int]) -> None:
        """One by one; the committed position follows as far as there is no gap."""
        cursor = feed.cursor
        for entry in entries:
            feed.touch_down(entry)
            feed.deliveries.pop(entry, None)
        if box.one_by_one:
            cursor.passed |= {entry for entry in entries if entry > cursor.committed}
        else:
            cursor.committed = max(cursor.committed, *entries)
        cursor.follow_passed()
        self.cursors.moved(box.path, feed.stream)

    # -- time and room ---------------------------------------------------------------------------------

    def on_room(self, session: Session, now_ms: int) -> None:
        for path in tuple(session.boxes):
            box = self.boxes.get(path)
            if box is not None and box.serves(session) and not box.live:
                self.pump(box, now_ms)

    def tick(self, now_ms: int) -> None:
        """What was handed over and not committed in time is handed over again."""
        resting, self._resting = self._resting, {}
        for box in resting:
            self.let_go(box)
        for box in tuple(self.boxes.values()):
            if not box.online:
                continue
            if box.one_by_one:
                for feed in box.feeds.values():
                    self._take_back(box, feed, now_ms)
            if not box.live:
                self.pump(box, now_ms)

    def _take_back(self, box: DeliveryQueue, feed: Feed, now_ms: int) -> None:
        due = [entry for entry, flight in feed.flights.items() if flight.due_ms <= now_ms]
        if due:
            feed.take_back(due)
            box.live = False

    def summary(self, session: Session) -> tuple[int, int, bool]:
        """Entries that wait, entries in flight, and whether everything is pushed at once."""
        lag, flights, live = 0, 0, True
        for path in tuple(session.boxes):
            box = self.boxes.get(path)
            if box is not None:
                lag += self.uncommitted(box)
                flights += box.in_flight()
                live = live and box.live
        return lag, flights, live
