"""Mailboxes: messages are appended to a stream, then pushed to the owner in log order."""

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
STORED_BYTES_MAX: Final = 2**30  # checked when it was accepted

RefusedCallback = Callable[[HubError, int], None]
StoredCallback = Callable[[AppendOutcome, bool], None]  # and whether it was delivered at once


class Mailboxes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.queues: dict[str, DeliveryQueue] = {}
        self.first_entries: dict[str, int] = {}  # by shared stream: its first entry of this process
        self.cursors = Cursors(hub)
        self._to_release: dict[DeliveryQueue, None] = {}  # without a session; released at the next tick

    # -- finding ---------------------------------------------------------------------------------------

    def has(self, path: str) -> bool:
        """Whether this address has a mailbox."""
        queue = self.queues.get(path)
        if queue is not None and (queue.appends or queue.options.durable):
            return True
        return self._hub.streams.tail(mailbox_stream(path)) is not None

    def open(self, path: str) -> DeliveryQueue:
        queue = self.queues.get(path)
        if queue is None:
            queue = self.queues[path] = DeliveryQueue(path)
        if queue.mailbox is None:
            queue.mailbox = self.feed(queue, mailbox_stream(path), MAILBOX)
        return queue

    def open_group(self, path: str) -> GroupQueue:
        queue = self.queues.get(path)
        if queue is None:
            queue = self.queues[path] = GroupQueue(path)
        assert isinstance(queue, GroupQueue)
        return queue

    def feed(self, queue: DeliveryQueue, stream: str, kind: str, *, begin: int = 0) -> Feed:
        """The feed of a stream; `begin` is the position of a new one."""
        found = queue.feeds.get(stream)
        if found is None:
            cursor = self.cursors.get(queue.path, stream)
            if cursor is None:
                # An earlier process may have delivered what it appended.
                cursor = Cursor(begin, begin, maybe_delivered_upto=self._inherited(stream, kind))
                self.cursors.set(queue.path, stream, cursor)
                if begin:
                    self.cursors.mark_dirty(queue.path, stream)
            found = queue.feeds[stream] = Feed(stream, kind, cursor)
        return found

    def _inherited(self, stream: str, kind: str) -> int:
        """The last entry of an earlier process. A mailbox is opened before anything is appended to it."""
        tail = self._hub.streams.tail(stream) or 0
        return tail if kind == MAILBOX else self.first_entries.get(stream, tail + 1) - 1

    def uncommitted(self, queue: DeliveryQueue) -> int:
        feed = queue.mailbox
        if feed is None:
            return 0
        return (self._hub.streams.tail(feed.stream) or 0) - feed.cursor.committed + queue.appends

    # -- owners ----------------------------------------------------------------------------------------

    def attach(self, found: Registration, session: Session, now_ms: int) -> None:
        """The owner of an address is online: pushes its mailbox."""
        path, hub = found.path, self._hub
        if not (found.options.durable or self.has(path)):
            return
        stream = mailbox_stream(path)
        is_new = hub.streams.tail(stream) is None
        if found.options.durable and is_new:
            hub.effects.append(CreateStream(stream))
        queue = self.open(path)
        queue.options = found.options
        # Broadcast entries name their recipients. A known mailbox starts at its cursor, or at the beginning.
        begin = (hub.streams.tail(BROADCAST_STREAM) or 0) if is_new else 0
        self.feed(queue, BROADCAST_STREAM, BROADCAST, begin=begin)
        self.assign_session(queue, session)
        queue.is_caught_up = False
        self.deliver_next(queue, now_ms)

    def assign_session(self, queue: DeliveryQueue, session: Session) -> None:
        """Pushes the feeds of an actor to this session from here on."""
        if queue.session is session:
            return
        if queue.session is not None:
            queue.session.queues.pop(queue.path, None)
        queue.session = session
        session.queues[queue.path] = None
        for feed in queue.feeds.values():
            feed.rewind()

    def on_resumed(self, session: Session, now_ms: int) -> None:
        """A session was resumed: redelivers what it did not commit."""
        for path in tuple(session.queues):
            queue = self.queues.get(path)
            if queue is not None and queue.serves(session):
                if isinstance(queue, GroupQueue):
                    queue.resumed(session)
                elif queue.options.manual:
                    for feed in queue.feeds.values():
                        feed.rewind()
                queue.is_caught_up = False
                self.deliver_next(queue, now_ms)

    def leave(self, path: str, session: Session) -> None:
        """The owner is offline; its cursors stay."""
        queue = self.queues.get(path)
        if queue is not None and queue.session is session:
            queue.session = None
            session.queues.pop(path, None)
            for stream in [stream for stream, feed in queue.feeds.items() if feed.kind == TOPIC]:
                del queue.feeds[stream]
            self.release(queue)

    def leave_group(self, found: TopicSubscription) -> None:
        """A member left; what it had in flight is requeued for the others."""
        assert found.group is not None
        queue = self.queues.get(group_queue_path(found.group, found.filter.text))
        if not isinstance(queue, GroupQueue):
            return
        queue.leave(found)
        if found.session is not None and not queue.serves(found.session):
            found.session.queues.pop(queue.path, None)
        self.release(queue)

    def release(self, queue: DeliveryQueue) -> None:
        """Drops a queue without session and pending appends: its cursors are enough to rebuild it."""
        waits = queue.has_session or queue.appends or any(feed.deliveries for feed in queue.feeds.values())
        if not waits and self.queues.get(queue.path) is queue:
            del self.queues[queue.path]
            for stream in queue.feeds:
                if self._hub.streams.tail(stream) is None:
                    self.cursors.remove(queue.path, stream)

    def release_later(self, queue: DeliveryQueue) -> None:
        """Releases a queue without session at the next tick: another append often follows."""
        if queue.session is None:
            self._to_release[queue] = None
        else:
            self.release(queue)

    # -- storing ---------------------------------------------------------------------------------------

    def is_full(self, queue: DeliveryQueue) -> bool:
        """Whether the mailbox is at its limit of entries or bytes."""
        assert queue.mailbox is not None
        limits, streams, stream = self._hub.limits, self._hub.streams, queue.mailbox.stream
        tail = streams.tail(stream) or 0
        waiting = tail - queue.mailbox.cursor.committed + queue.appends
        size = streams.size_bytes(stream)
        if waiting < tail:  # includes entries that are not durable yet; the size includes their bytes
            size = size * waiting // tail
        return waiting >= limits.hub_mailbox_entries or size >= limits.hub_mailbox_bytes

    def check_room(self, path: str) -> None:
        queue = self.open(path)
        if self.is_full(queue):
            self.release(queue)
            raise HubError("mailbox_full", "the recipient's mailbox is full", {"actorAddress": f"@({path})"})

    def store(
        self,
        path: str,
        copy: OutgoingMessage,
        pending: PendingRequest | None,
        now_ms: int,
        *,
        producer: tuple[str, int, int] | None = None,
        refused: RefusedCallback | None = None,
        outcome: StoredCallback | None = None,
    ) -> None:
        """Appends, then delivers: no message is visible before it is durable."""
        hub = self._hub
        queue = self.open(path)
        registered = hub.registry.find(path, now_ms)
        if queue.session is None and registered is not None and registered.session is not None:
            queue.options = registered.options
            self.assign_session(queue, registered.session)
        feed = queue.mailbox
        assert feed is not None
        copy.metadata = requests.append_metadata(copy.metadata, b'"hubSeq":%d' % hub.next_seq(now_ms))
        queue.appends += 1

        def then(settled: AppendOutcome, now_ms: int) -> None:
            queue.appends -= 1
            if settled.error is not None:
                error = to_hub_error(settled.error)
                if pending is not None:
                    hub.pending.fail(pending, error, now_ms)
                    if pending.seen is not None:
                        pending.seen[0].forget(pending.request_id)  # it may be sent again
                elif refused is not None:
                    refused(error, now_ms)
                if outcome is not None:
                    outcome(settled, False)
                self.release(queue)
                return
            if pending is not None:
                pending.duplicate = settled.duplicate
                hub.pending.on_stored(
                    pending, feed.stream, settled.entry, settled.offset, online=queue.online, now_ms=now_ms
                )
                if settled.duplicate:
                    hub.pending.on_delivered(pending, now_ms, waits=not queue.online)
            delivered = False
            if not settled.duplicate:
                hub.trace.record("accepted", copy, now_ms, stream=feed.stream, offset=settled.offset)
                delivered = self.on_appended(queue, feed, settled.entry, copy, now_ms)
            if outcome is not None:
                outcome(settled, delivered)
            self.release(queue)

        hub.append(
            Append(feed.stream, copy.frame(), then, key=copy.sender.address.encode(), producer=producer)
        )

    def on_appended(
        self, queue: DeliveryQueue, feed: Feed, entry: int, copy: OutgoingMessage, now_ms: int
    ) -> bool:
        """A durable entry: delivered at once if everything before it was. Returns whether it was."""
        if not queue.is_pushed:
            return False
        if (
            queue.is_caught_up
            and feed.sent == entry - 1
            and queue.is_ready(self._room(feed, now_ms), at_once=True)
        ):
            self._deliver(queue, feed, PrefetchedEntry(entry, now_ms * 1_000_000, copy, 0), now_ms)
            if feed.sent == entry:
                return feed.cursor.delivered >= entry
        queue.is_caught_up = False
        self.deliver_next(queue, now_ms)
        return feed.cursor.delivered >= entry

    # -- delivering ------------------------------------------------------------------------------------

    def deliver_next(self, queue: DeliveryQueue, now_ms: int) -> None:
        """Delivers durable entries in order while there is room."""
        while queue.is_ready(self._room(None, now_ms)):
            behind = [feed for feed in queue.feeds.values() if feed.prefetched or self._is_behind(feed)]
            if not behind:
                queue.is_caught_up = True
                return
            waits = False
            for feed in behind:
                if not feed.prefetched:
                    waits = True
                    self._read(queue, feed)
            if waits:
                return
            feed = min(behind, key=lambda one: one.prefetched[0].seq)
            if isinstance(queue, GroupQueue) and not queue.is_ready(self._room(feed, now_ms)):
                return  # no member may receive it
            prefetched = feed.prefetched[0]
            self._deliver(queue, feed, prefetched, now_ms)
            if feed.sent < prefetched.entry:
                return  # the connection is full
            if feed.prefetched and feed.prefetched[0] is prefetched:
                feed.prefetched.popleft()

    def _room(self, feed: Feed | None, now_ms: int) -> HasRoom:
        """A check whether a session has room, and may receive this feed."""
        hub = self._hub
        if feed is None or feed.kind != TOPIC:
            return lambda session: hub.flow_control.has_room(session, now_ms)
        topic = feed.topic
        return lambda session: (
            hub.flow_control.has_room(session, now_ms)
            and hub.policy.may_topic(session.principal, "subscribe", topic)
        )

    def _is_behind(self, feed: Feed) -> bool:
        return (self._hub.streams.tail(feed.stream) or 0) > feed.sent

    def _read(self, queue: DeliveryQueue, feed: Feed) -> None:
        if feed.reading:
            return
        feed.reading = True
        after = feed.sent

        def then(found: ReadResult, now_ms: int) -> None:
            feed.reading = False
            if found.error is not None or feed.sent != after or feed.prefetched:
                if found.error is not None and found.error.code == "offset_gone":
                    feed.sent = max(feed.sent, self._hub.streams.earliest(feed.stream))
                elif found.error is not None:
                    return  # retried at the next event
                self.deliver_next(queue, now_ms)
                return
            for number, time_ns, body in found.entries:
                feed.prefetched.append(self._prefetch(queue, feed, number, time_ns, body, now_ms))
            self.deliver_next(queue, now_ms)

        self._hub.effects.append(Read(feed.stream, after, PAGE_ENTRIES, PAGE_BYTES, then))

    def _prefetch(
        self, queue: DeliveryQueue, feed: Feed, number: int, time_ns: int, body: bytes, now_ms: int
    ) -> PrefetchedEntry:
        mine = True
        if feed.kind == BROADCAST:
            entry = decode_broadcast(body)
            mine = queue.path in entry.recipients
            body = bytes(entry.message)
        copy = requests.outgoing_from_envelope(parse_envelope(body, STORED_BYTES_MAX))
        if feed.kind != MAILBOX:
            copy.id = new_id(now_ms)
        seq = requests.parse_metadata(copy).get("hubSeq")
        return PrefetchedEntry(number, time_ns, copy, int(bytes(seq)) if seq is not None else 0, mine)

    def _deliver(self, queue: DeliveryQueue, feed: Feed, prefetched: PrefetchedEntry, now_ms: int) -> None:
        """Sends an entry to the connection; `feed.sent` shows whether it was accepted."""
        hub, entry, copy = self._hub, prefetched.entry, prefetched.copy
        assert queue.session is not None
        if feed.kind != MAILBOX:
            copy.to = queue.address
        cursor = feed.cursor
        if (
            not prefetched.mine
            or entry in feed.in_flight
            or cursor.has_passed(entry)
            or entry in hub.entry_dead_letters.entries(cursor)
        ):
            if not prefetched.mine:
                self._skip(queue, feed, entry)
            feed.sent = max(feed.sent, entry)
            return
        before = feed.deliveries.get(entry, 0)
        reason = self._undeliverable(queue, feed, prefetched, before, now_ms)
        if reason == "denied":
            self._skip(queue, feed, entry)
            return
        if reason is not None:
            feed.sent = max(feed.sent, entry)
            time_ns = prefetched.time_ns
            hub.entry_dead_letters.write(queue, feed, entry, copy, reason, before, time_ns, now_ms)
            return
        offset = hub.streams.offset(feed.stream, entry)
        more = b',"mailbox":{"stream":%b,"offset":"%b"' % (
            msgspec.json.encode(feed.stream),
            offset.encode(),
        )
        holder = queue.holder
        subscription_id = feed.subscription_id if holder is None else holder.subscription.id
        if subscription_id is not None:
            more += b',"subscriptionId":"%b"' % subscription_id.encode()
        more += b"}"
        if before or entry <= max(feed.delivered_before, feed.cursor.maybe_delivered_upto):
            more += b',"redelivered":true,"deliveryCount":%d' % (before + 1)
        pending = hub.pending.stored_at(feed.stream, entry, queue.path)
        if pending is not None and feed.kind == TOPIC:
            copy = msgspec.structs.replace(copy, id=pending.message_id, pattern="ask")
            more += pending.reply_metadata
        frame = copy.frame(more)
        if hub.flow_control.offer(queue.session, frame, now_ms, mode="log") != SENT:
            return
        feed.sent = max(feed.sent, entry)
        feed.cursor.delivered = max(feed.cursor.delivered, entry)
        if pending is None and feed.kind == MAILBOX and copy.pattern == "ask":
            pending = hub.pending.rebuild(copy, queue.path, feed.stream, entry, offset, now_ms)
        if queue.options.manual:
            due_ms = now_ms + queue.options.ack_timeout_ms
            light = msgspec.structs.replace(copy, payload=b"")
            feed.add_in_flight(entry, InFlightEntry(due_ms, len(frame), light, holder))
            feed.deliveries[entry] = before + 1
            self.cursors.mark_dirty(queue.path, feed.stream)
        else:
            self.mark_done(queue, feed, {entry})
        hub.trace.record(
            "delivered", copy, now_ms, kind=TRACE_KIND_BY_FEED[feed.kind], stream=feed.stream, offset=offset
        )
        if pending is not None and not pending.done:
            hub.pending.sent_to(pending, queue.session)
            hub.pending.on_delivered(pending, now_ms, processed=not queue.options.manual)

    def _undeliverable(
        self, queue: DeliveryQueue, feed: Feed, prefetched: PrefetchedEntry, before: int, now_ms: int
    ) -> str | None:
        hub = self._hub
        if prefetched.copy.is_expired(now_ms):
            return "message_expired"
        if now_ms - prefetched.time_ns // 1_000_000 > hub.limits.hub_mailbox_ms:
            return "mailbox_expired"
        if queue.options.manual and before >= queue.options.max_deliver:
            return "max_deliveries"
        if feed.kind == TOPIC and queue.session is not None:
            if not hub.policy.may_topic(queue.session.principal, "subscribe", feed.topic):
                return "denied"
        return None

    def _skip(self, queue: DeliveryQueue, feed: Feed, entry: int) -> None:
        """Commits an entry without delivering it."""
        feed.sent = max(feed.sent, entry)
        self.mark_done(queue, feed, {entry})

    def mark_done(self, queue: DeliveryQueue, feed: Feed, entries: set[int]) -> None:
        """Commits entries; the committed position advances up to the first gap."""
        cursor = feed.cursor
        for entry in entries:
            feed.remove_in_flight(entry)
            feed.deliveries.pop(entry, None)
        if queue.commits_single or self._hub.entry_dead_letters.entries(cursor):
            cursor.acknowledge(entries)
        else:
            cursor.commit_upto(max(entries))
        self.cursors.mark_dirty(queue.path, feed.stream)

    # -- dead letters ----------------------------------------------------------------------------------

    def pass_entry(self, path: str, feed: Feed, entry: int) -> None:
        """The dead letter of an entry is durable."""
        feed.cursor.acknowledge((entry,))
        if (current := self._current_feed(path, feed)) is not None:
            current.remove_in_flight(entry)
            current.deliveries.pop(entry, None)
        if self.cursors.get(path, feed.stream) is feed.cursor:
            self.cursors.mark_dirty(path, feed.stream)

    def requeue_entry(self, path: str, feed: Feed, entry: int) -> None:
        """A rejection failed: the entry is delivered again if no reader holds it any more."""
        current = self._current_feed(path, feed)
        if current is not None and entry not in current.in_flight and not feed.cursor.has_passed(entry):
            current.requeue([entry])
            self.queues[path].is_caught_up = False

    def resume_delivery(self, path: str, now_ms: int) -> None:
        queue = self.queues.get(path)
        if queue is not None:
            if not queue.is_caught_up:
                self.deliver_next(queue, now_ms)
            self.release(queue)

    def _current_feed(self, path: str, feed: Feed) -> Feed | None:
        """The feed with the same cursor: its queue may have been released and opened again."""
        queue = self.queues.get(path)
        found = None if queue is None else queue.feeds.get(feed.stream)
        return found if found is not None and found.cursor is feed.cursor else None

    # -- time and room ---------------------------------------------------------------------------------

    def on_room(self, session: Session, now_ms: int) -> None:
        for path in tuple(session.queues):
            queue = self.queues.get(path)
            if queue is not None and queue.serves(session) and not queue.is_caught_up:
                self.deliver_next(queue, now_ms)

    def tick(self, now_ms: int) -> None:
        """Redelivers what was not committed in time."""
        to_release, self._to_release = self._to_release, {}
        for queue in to_release:
            self.release(queue)
        for queue in tuple(self.queues.values()):
            if not queue.online:
                continue
            if queue.commits_single:
                for feed in queue.feeds.values():
                    self._requeue_due(queue, feed, now_ms)
            if not queue.is_caught_up:
                self.deliver_next(queue, now_ms)

    def _requeue_due(self, queue: DeliveryQueue, feed: Feed, now_ms: int) -> None:
        due = [entry for entry, flight in feed.in_flight.items() if flight.due_ms <= now_ms]
        if due:
            feed.requeue(due)
            queue.is_caught_up = False

    def session_lag(self, session: Session) -> tuple[int, int, bool]:
        """Uncommitted entries, entries in flight, and whether all queues are caught up."""
        lag, in_flight, live = 0, 0, True
        for path in tuple(session.queues):
            queue = self.queues.get(path)
            if queue is not None:
                lag += self.uncommitted(queue)
                in_flight += queue.in_flight()
                live = live and queue.is_caught_up
        return lag, in_flight, live
