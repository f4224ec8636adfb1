"""Topic subscriptions, subscriber groups, and the handler of hub:publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub import requests
from tailrace.hub.addresses import TopicFilter, TopicTrie, durable_topic_error, parse_topic, topic_stream
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.delivery_queues import TOPIC, Cursor, DeliveryQueue, GroupMember, group_queue_path
from tailrace.hub.effects import Append, AppendOutcome, Read, ReadResult
from tailrace.hub.envelope import SharedEnvelope, new_id
from tailrace.hub.errors import HubError, field_error, to_hub_error
from tailrace.hub.flow_control import FULL, SENT, SLOW, WAITING, Recipient, send_to_many
from tailrace.hub.pending_requests import REQUEST_TTL_MS_MAX, PendingRequest
from tailrace.hub.registry import DeliveryOptions
from tailrace.hub.requests import HubRequest, OutgoingMessage, parse_time_ns
from tailrace.hub.send import check_duplicate, read_type_and_data
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


class TopicSubscription(msgspec.Struct, eq=False):
    """Ends with its session, unless it is durable: then it belongs to its owner."""

    id: str
    owner: str  # path of the address that copies go to
    filter: TopicFilter
    name: str | None = None
    group: str | None = None
    durable: bool = False
    session: Session | None = None  # None while the owner of a durable one is away
    logged_ms: int = 0  # when a durable one was last logged by this process

    @property
    def key(self) -> str:
        """Identifies a durable subscription of its owner."""
        return self.name or self.filter.text


class SubscriptionRecord(msgspec.Struct, rename="camel"):
    """What the log stores of a durable one."""

    owner: str
    topic: str
    subscription_id: str
    name: str | None = None
    group: str | None = None


class SubscriberGroup:
    """Members that share the work; each message goes to one of them."""

    __slots__ = ("members", "turn")

    def __init__(self) -> None:
        self.members: list[TopicSubscription] = []
        self.turn = 0

    def choose(self) -> TopicSubscription | None:
        """The member with the fewest unsent messages, then round robin."""
        living = [one for one in self.members if one.session is not None and one.session.alive]
        if not living:
            return None
        self.turn += 1
        start = self.turn % len(living)
        order = living[start:] + living[:start]
        return min(order, key=_member_load)


def _member_load(member: TopicSubscription) -> int:
    session = member.session
    return 0 if session is None else session.outbox.messages + len(session.resume_buffer or ())


SUBSCRIPTIONS_STREAM: Final = "hub/subscriptions"
SUBSCRIPTION_NAME_BYTES_MAX: Final = 128
SUBSCRIPTION_REWRITE_MS: Final = 24 * 3600 * 1000

SubscribeCallback = Callable[[AppendOutcome, int], None]


class Topics:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.live: TopicTrie[TopicSubscription] = TopicTrie()
        self.durable: TopicTrie[TopicSubscription] = TopicTrie()
        self.groups: dict[tuple[str, str], SubscriberGroup] = {}
        self.stored_topics: set[str] = set()  # topics with a stream
        self._durable: dict[str, dict[str, TopicSubscription]] = {}  # by owner, then by name or filter
        # Subscriptions being committed, and the callbacks that wait for them.
        self._starting: dict[tuple[str, str], list[SubscribeCallback]] = {}

    # -- durable ---------------------------------------------------------------------------------------

    def is_durable(self, topic: str) -> bool:
        """Whether publications are stored: the topic has a stream, a durable subscriber or a setting."""
        if topic in self.stored_topics or self.durable.match(topic):
            return True
        return any(pattern.matches(topic) for pattern in self._hub.durable_patterns)

    def durable_of(self, owner: str) -> list[tuple[str, str, str]]:
        """The streams of an actor's durable subscriptions: stream, topic, subscription."""
        found: list[tuple[str, str, str]] = []
        for subscription in self._durable.get(owner, {}).values():
            topics = (
                [subscription.filter.text]
                if subscription.filter.is_plain
                else sorted(topic for topic in self.stored_topics if subscription.filter.matches(topic))
            )
            found += [(topic_stream(topic), topic, subscription.id) for topic in topics]
        return found

    def restore(self, record: SubscriptionRecord | None, owner: str, key: str) -> None:
        """Applies one event of the log, at start-up."""
        known = self._durable.get(owner, {}).pop(key, None)
        if known is not None:
            self.durable.remove(known.filter, known)
        if record is not None:
            self._add_durable(
                TopicSubscription(
                    record.subscription_id,
                    owner,
                    TopicFilter(record.topic),
                    record.name,
                    record.group,
                    durable=True,
                )
            )

    def rewrite_old(self, now_ms: int) -> None:
        """Rewrites active subscriptions once a day, within the retention of the log."""
        for owned in self._durable.values():
            for found in owned.values():
                if now_ms - found.logged_ms >= SUBSCRIPTION_REWRITE_MS:
                    found.logged_ms = now_ms
                    self._hub.append(
                        Append(
                            SUBSCRIPTIONS_STREAM, encode_subscription_event(found), key=found.owner.encode()
                        )
                    )

    def _add_durable(self, subscription: TopicSubscription) -> None:
        self._durable.setdefault(subscription.owner, {})[subscription.key] = subscription
        self.durable.add(subscription.filter, subscription)

    # -- subscribing -----------------------------------------------------------------------------------

    def subscribe(self, session: Session, request: HubRequest, now_ms: int) -> None:
        hub = self._hub
        text = request.payload.text("topic")
        if text is None:
            raise field_error("topic", "topic is missing")
        wanted = TopicFilter(text)
        group, name = request.payload.text("group"), request.payload.text("name")
        for field, value in (("group", group), ("name", name)):
            if value is not None and not 1 <= len(value.encode()) <= SUBSCRIPTION_NAME_BYTES_MAX:
                raise field_error(field, f"{field} must have 1 to {SUBSCRIPTION_NAME_BYTES_MAX} bytes")
        durable = request.payload.truth("durable") is True
        if not hub.policy.may_filter(session.principal, text):
            raise hub.denied(session, "subscribe", "denied by policy", text, now_ms)
        for known in session.subscriptions.values():
            same = (known.filter.text, known.group, known.name) == (text, group, name)
            if same and known.durable == durable and known.owner == request.sender.path:
                self._subscribed(session, request, known, None, now_ms)
                return
        if len(session.subscriptions) >= hub.limits.hub_session_subscriptions:
            details = {"retryAfter": 1000, "kind": "subscribe", "reason": "subscriptions"}
            raise HubError(
                "rate_limited",
                f"at most {hub.limits.hub_session_subscriptions} subscriptions per session",
                details,
            )
        if durable:
            self._subscribe_durable(session, request, wanted, name, group, now_ms)
            return
        subscription = TopicSubscription(
            f"sub-{new_id(now_ms)}", request.sender.path, wanted, name, group, session=session
        )
        session.subscriptions[subscription.id] = subscription
        if group is None:
            self.live.add(wanted, subscription)
        else:
            shared = self.groups.setdefault((text, group), SubscriberGroup())
            if not shared.members:
                # The first member represents the whole group.
                self.live.add(wanted, subscription)
            shared.members.append(subscription)
        self._subscribed(session, request, subscription, None, now_ms)

    def _subscribed(
        self, session: Session, request: HubRequest, found: TopicSubscription, offset: str | None, now_ms: int
    ) -> None:
        payload = {
            "topic": found.filter.text,
            "subscriptionId": found.id,
            "durable": found.durable,
            "group": found.group,
            "offset": offset,
        }
        self._hub.send_reply(session, request, "hub:subscribed", payload, now_ms)

    def _subscribe_durable(
        self,
        session: Session,
        request: HubRequest,
        wanted: TopicFilter,
        name: str | None,
        group: str | None,
        now_ms: int,
    ) -> None:
        """A durable subscription belongs to the actor, or to the group that its members share."""
        hub = self._hub
        owner = request.sender.path if group is None else group_queue_path(group, wanted.text)
        key = (owner, wanted.text if group is not None else name or wanted.text)
        known = self._durable.get(owner, {}).get(key[1])
        if known is not None and known.filter.text != wanted.text:
            raise field_error("name", "a subscription with this name has another topic")

        def enter(settled: AppendOutcome, now_ms: int) -> None:
            if settled.error is not None:
                hub.send_request_error(session, request, to_hub_error(settled.error), now_ms)
                return
            there = self._durable[owner][key[1]]
            mine = self._join(session, request.sender.path, there, now_ms)
            self._subscribed(session, request, mine, self._position(there), now_ms)

        if known is not None:
            enter(AppendOutcome(), now_ms)
        elif key in self._starting:
            self._starting[key].append(enter)
        else:
            named = name if group is None else None
            new = TopicSubscription(f"sub-{new_id(now_ms)}", owner, wanted, named, group, durable=True)
            self._start(request.payload.value("from"), new, enter)

    def _start(self, begin: object, subscription: TopicSubscription, enter: SubscribeCallback) -> None:
        """Commits the start cursors, then the subscription."""
        hub, wanted = self._hub, subscription.filter
        key = (subscription.owner, subscription.key)

        def start(position: int | None) -> None:
            self._begin_cursors(subscription, begin, position)
            hub.mailboxes.cursors.flush()  # the start is durable before the subscription
            self._starting.setdefault(key, [enter])

            def then(settled: AppendOutcome, now_ms: int) -> None:
                if settled.error is None:
                    subscription.logged_ms = now_ms
                    self._add_durable(subscription)
                for waiting in self._starting.pop(key):
                    waiting(settled, now_ms)

            hub.append(
                Append(
                    SUBSCRIPTIONS_STREAM,
                    encode_subscription_event(subscription),
                    then,
                    key=subscription.owner.encode(),
                )
            )

        since = parse_time_ns(begin)
        stream = topic_stream(wanted.text)
        if since is None or not wanted.is_plain or hub.streams.tail(stream) is None:
            start(None)
            return

        self._starting[key] = [enter]

        def found_time(found: ReadResult, _: int) -> None:
            start(found.entries[0][0] - 1 if found.entries else hub.streams.tail(stream) or 0)

        hub.effects.append(Read(stream, 0, 1, 1, found_time, since))

    def _begin_cursors(self, found: TopicSubscription, begin: object, position: int | None) -> None:
        """Existing topics start at `begin`; later ones at their beginning."""
        hub = self._hub
        topics = [found.filter.text] if found.filter.is_plain else list(self.stored_topics)
        for topic in topics:
            stream = topic_stream(topic)
            tail = hub.streams.tail(stream)
            if tail is None or not found.filter.matches(topic):
                continue
            if position is not None:
                entry = position
            elif begin is None or begin == "now":
                entry = tail
            elif begin == "-1":
                entry = hub.streams.earliest(stream)
            elif isinstance(begin, str) and found.filter.is_plain:
                entry = hub.streams.resolve(stream, begin)
            else:
                raise field_error(
                    "from", "from must be now, -1, an offset, Unix milliseconds or an RFC 3339 timestamp"
                )
            hub.mailboxes.cursors.set(found.owner, stream, Cursor(entry, entry))
            hub.mailboxes.cursors.mark_dirty(found.owner, stream)

    def _position(self, found: TopicSubscription) -> str | None:
        if not found.filter.is_plain:
            return None
        stream = topic_stream(found.filter.text)
        cursor = self._hub.mailboxes.cursors.get(found.owner, stream)
        return None if cursor is None else self._hub.streams.offset(stream, cursor.committed)

    def _join(
        self, session: Session, sender: str, found: TopicSubscription, now_ms: int
    ) -> TopicSubscription:
        """Attaches the session to the subscription, or makes it a member of the group."""
        if not session.alive:
            return found
        if found.group is None:
            self._activate(session, found, now_ms)
            return found
        mailboxes = self._hub.mailboxes
        mine = TopicSubscription(
            f"sub-{new_id(now_ms)}",
            sender,
            found.filter,
            group=found.group,
            durable=True,
            session=session,
        )
        session.subscriptions[mine.id] = mine
        registered = self._hub.registry.find(sender, now_ms)
        own = registered is not None and registered.session is session
        queue = mailboxes.open_group(found.owner)
        queue.members.append(
            GroupMember(mine, registered.options if registered is not None and own else DeliveryOptions())
        )
        session.queues[queue.path] = None
        self._start_feeds(queue, found, now_ms)
        return mine

    def _activate(self, session: Session, found: TopicSubscription, now_ms: int) -> None:
        """The owner is online: pushes its feeds."""
        mailboxes = self._hub.mailboxes
        if found.session is not None and found.session is not session:
            found.session.subscriptions.pop(found.id, None)
        found.session = session
        session.subscriptions[found.id] = found
        queue = mailboxes.open(found.owner)
        registered = self._hub.registry.find(found.owner, now_ms)
        if registered is not None and registered.session is session:
            queue.options = registered.options
        mailboxes.assign_session(queue, session)
        self._start_feeds(queue, found, now_ms)

    def _start_feeds(self, queue: DeliveryQueue, found: TopicSubscription, now_ms: int) -> None:
        for topic in [topic for topic in self.stored_topics if found.filter.matches(topic)]:
            self.feed(queue, found, topic)
        queue.is_caught_up = False
        self._hub.mailboxes.deliver_next(queue, now_ms)

    def feed(self, queue: DeliveryQueue, found: TopicSubscription, topic: str) -> None:
        feed = self._hub.mailboxes.feed(queue, topic_stream(topic), TOPIC)
        feed.topic, feed.subscription_id = topic, found.id

    # -- ending ----------------------------------------------------------------------------------------

    def unsubscribe(self, session: Session, request: HubRequest, now_ms: int) -> None:
        """Ends the named subscription; an unknown one is not an error."""
        named = request.payload.text("subscriptionId") or request.payload.text("topic")
        if named is None:
            raise field_error("subscriptionId", "subscriptionId or topic is missing")
        found = session.subscriptions.get(named)
        if found is None:
            matching = [one for one in session.subscriptions.values() if one.filter.text == named]
            found = matching[0] if matching else None
        topic = named
        if found is not None:
            topic = found.filter.text
            self.drop(found)
            session.subscriptions.pop(found.id, None)
            if found.durable and found.group is None:
                self._forget(found)
            elif found.durable:
                self._end_group(found)
        if request.is_ask:
            payload = {
                "topic": topic,
                "subscriptionId": named if found is None else found.id,
                "unsubscribedAt": now_ms,
            }
            self._hub.send_reply(session, request, "hub:unsubscribed", payload, now_ms)

    def _end_group(self, found: TopicSubscription) -> None:
        """A group ends when its last member unsubscribes, not when it disconnects."""
        assert found.group is not None
        path = group_queue_path(found.group, found.filter.text)
        queue = self._hub.mailboxes.queues.get(path)
        whole = self._durable.get(path, {}).get(found.filter.text)
        if whole is not None and (queue is None or not queue.has_session):
            self._forget(whole)

    def _forget(self, found: TopicSubscription) -> None:
        hub = self._hub
        self._durable.get(found.owner, {}).pop(found.key, None)
        self.durable.remove(found.filter, found)
        # Before its cursors: a subscription without a cursor would start at the beginning after a crash.
        hub.append(
            Append(
                SUBSCRIPTIONS_STREAM, encode_subscription_event(found, ended=True), key=found.owner.encode()
            )
        )
        others = {stream for stream, _, _ in self.durable_of(found.owner)}
        queue = hub.mailboxes.queues.get(found.owner)
        for topic in [topic for topic in self.stored_topics if found.filter.matches(topic)]:
            stream = topic_stream(topic)
            if stream not in others:
                hub.mailboxes.cursors.delete(found.owner, stream)
                if queue is not None:
                    queue.feeds.pop(stream, None)

    def drop(self, found: TopicSubscription) -> None:
        """Detaches a subscription from its session."""
        if found.durable:
            if found.group is not None:
                self._hub.mailboxes.leave_group(found)
            found.session = None
            return
        if found.group is None:
            self.live.remove(found.filter, found)
            return
        shared = self.groups.get((found.filter.text, found.group))
        if shared is None or found not in shared.members:
            return
        first = shared.members[0] is found
        shared.members.remove(found)
        if first:
            self.live.remove(found.filter, found)
            if shared.members:
                self.live.add(found.filter, shared.members[0])
        if not shared.members:
            del self.groups[(found.filter.text, found.group)]

    def session_ended(self, session: Session) -> None:
        for found in session.subscriptions.values():
            self.drop(found)
        session.subscriptions.clear()


def encode_subscription_event(found: TopicSubscription, *, ended: bool = False) -> bytes:
    key = f"@({found.owner}) {found.key}"
    if ended:
        return msgspec.json.encode({"type": "subscription", "key": key, "headers": {"operation": "delete"}})
    value = SubscriptionRecord(f"@({found.owner})", found.filter.text, found.id, found.name, found.group)
    headers = {"operation": "insert"}
    return msgspec.json.encode({"type": "subscription", "key": key, "value": value, "headers": headers})


class Publication:
    """One message that is being delivered to subscribers."""

    __slots__ = ("_copy", "_frame", "_hub", "_request", "_session", "_topic", "counts")

    def __init__(
        self, hub: Hub, session: Session, request: HubRequest, topic: str, copy: OutgoingMessage
    ) -> None:
        self._hub = hub
        self._session = session
        self._request = request
        self._topic = topic
        self._copy = copy
        self._frame: SharedEnvelope | None = None
        self.counts = [0, 0]  # delivered, queued

    def deliver(self, entry: int, now_ms: int) -> None:
        """Delivers to durable subscribers through their feeds, to others directly; one copy per session."""
        served: set[Session] = set()
        if entry:
            self._deliver_durable(entry, served, now_ms)
        firsts: dict[Session, TopicSubscription] = {}
        several: dict[Session, list[TopicSubscription]] = {}
        shared: list[tuple[str, str]] = []
        for found in self._hub.topics.live.match(self._topic):
            session = found.session
            if found.group is not None:
                shared.append((found.filter.text, found.group))
            elif session is not None and session not in served:
                first = firsts.setdefault(session, found)
                if first is not found:
                    several.setdefault(session, [first]).append(found)
        self._deliver_directly(firsts, several, now_ms)
        for key in shared:
            self._deliver_to_group(key, now_ms)

    def _deliver_directly(
        self,
        firsts: dict[Session, TopicSubscription],
        several: dict[Session, list[TopicSubscription]],
        now_ms: int,
    ) -> None:
        policy, topic = self._hub.policy, self._topic
        is_open = policy.is_open(topic)
        recipients: list[Recipient] = []
        for session, first in firsts.items():
            if not (is_open and session.principal.has("subscribe")):
                if not policy.may_topic(session.principal, "subscribe", topic):
                    continue
            if session not in several:
                recipients.append((session, first.owner))
                continue
            to, ids = f"@({first.owner})", msgspec.json.encode([one.id for one in several[session]])
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=to)
            self._offer(session, copy.frame(b',"subscriptionIds":' + ids), to, now_ms)
        left = send_to_many(self._hub, self._session, self._shared(), recipients, now_ms)
        self.counts[0] += len(recipients) - len(left)
        for session, owner in left:
            to = f"@({owner})"
            self._offer(session, self._shared().frame(new_id(now_ms), to), to, now_ms)

    def _shared(self) -> SharedEnvelope:
        if self._frame is None:
            copy = self._copy
            self._frame = copy.shared()
        return self._frame

    def _offer(self, session: Session, frame: bytes, to: str, now_ms: int) -> str:
        hub = self._hub
        outcome = hub.flow_control.offer(session, frame, now_ms, self._session)
        if outcome == SENT:
            self.counts[0] += 1
        elif outcome == WAITING:
            self.counts[1] += 1
        elif outcome in (SLOW, FULL):
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=to)
            hub.dead_letters.write("consumer_slow" if outcome == SLOW else "resume_buffer_full", copy, now_ms)
            if outcome == SLOW:
                hub.flow_control.drop(session, len(frame), now_ms)
        return outcome

    def _deliver_to_group(self, key: tuple[str, str], now_ms: int) -> None:
        """Delivers to exactly one member."""
        hub = self._hub
        group = hub.topics.groups.get(key)
        member = None if group is None else group.choose()
        if member is None or member.session is None:
            hub.dead_letters.write("no_member", self._copy, now_ms)
            return
        to = f"@({member.owner})"
        if not self._request.truth("expectReply"):
            self._offer(member.session, self._shared().frame(new_id(now_ms), to), to, now_ms)
            return
        pending = self._pending_request(member.owner, now_ms)
        pending.recipient_session = member.session
        copy = msgspec.structs.replace(self._copy, id=pending.message_id, to=to, pattern="ask")
        if self._offer(member.session, copy.frame(pending.reply_metadata), to, now_ms) in (SENT, WAITING):
            hub.pending.begin(pending)

    def _pending_request(self, recipient: str, now_ms: int) -> PendingRequest:
        request = self._request
        ttl_ms = request.envelope.ttl or self._hub.limits.hub_ask_ms
        return PendingRequest(
            request.id,
            self._session,
            request.sender.path,
            recipient,
            now_ms + min(ttl_ms, REQUEST_TTL_MS_MAX),
            [],
            True,
            requests.trace_metadata(request),
            message_id=new_id(now_ms),
        )

    def _expect_group_reply(self, found: TopicSubscription, entry: int, now_ms: int) -> None:
        """Any member that gets the entry may reply, also one that joins later."""
        pending, stream = self._pending_request(found.owner, now_ms), topic_stream(self._topic)
        self._hub.pending.begin(pending)
        offset = self._hub.streams.offset(stream, entry)
        self._hub.pending.on_stored(pending, stream, entry, offset, online=False, now_ms=now_ms)

    def _deliver_durable(self, entry: int, served: set[Session], now_ms: int) -> None:
        hub, asks = self._hub, self._request.truth("expectReply") is True
        for found in hub.topics.durable.match(self._topic):
            if asks and found.group is not None:
                asks = False
                self._expect_group_reply(found, entry, now_ms)
            queue = hub.mailboxes.queues.get(found.owner)
            there = queue is not None and (
                queue.online
                if found.group is not None
                else found.session is not None and queue.session is found.session
            )
            if queue is None or not there:
                self.counts[1] += 1
                continue
            if found.session is not None:
                if found.session in served:
                    continue
                served.add(found.session)
            feed = hub.mailboxes.feed(queue, topic_stream(self._topic), TOPIC)
            feed.topic, feed.subscription_id = self._topic, found.id
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=f"@({found.owner})")
            hub.mailboxes.on_appended(queue, feed, entry, copy, now_ms)
            self.counts[0 if feed.sent >= entry else 1] += 1


def publish(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    text = request.payload.text("topic")
    if text is None:
        raise field_error("topic", "topic is missing")
    topic = parse_topic(text)
    kind, data = read_type_and_data(request.payload)
    durable = request.payload.truth("durable") is True or hub.topics.is_durable(topic)
    problem = durable_topic_error(topic) if durable else None
    if problem is not None and request.payload.truth("durable") is True:
        raise field_error("topic", problem)
    if not hub.policy.may_topic(session.principal, "publish", topic):
        raise hub.denied(session, "publish", "denied by policy", topic, now_ms)
    if request.truth("expectReply"):
        hub.pending.check_room(session)
    seen = check_duplicate(hub, session, request, now_ms)
    if seen is None:
        return
    own = b'"topic":%b,"publication":true,"via":%b' % (msgspec.json.encode(topic), hub.via)
    stores = durable and problem is None
    if stores:
        own += b',"hubSeq":%d' % hub.next_seq(now_ms)
    copy = OutgoingMessage(
        new_id(now_ms),
        request.sender,
        hub.options.address,
        kind,
        data,
        now_ms,
        requests.append_metadata(requests.forwarded_metadata(request), own),
        correlation_id=request.id,
        ttl=request.envelope.ttl,
    )
    publication = Publication(hub, session, request, topic, copy)
    if not stores:
        hub.count("messages", "publish/ok")
        publication.deliver(0, now_ms)
        _send_published(hub, session, request, topic, publication, None, seen, now_ms)
        return
    stream = topic_stream(topic)

    def then(settled: AppendOutcome, now_ms: int) -> None:
        if settled.error is not None:
            seen[0].forget(request.id)
            hub.count("messages", "publish/refused")
            hub.send_request_error(session, request, to_hub_error(settled.error), now_ms)
            return
        hub.count("messages", "publish/ok")
        hub.topics.stored_topics.add(topic)
        hub.mailboxes.first_entries.setdefault(stream, settled.entry)
        hub.trace.record("accepted", copy, now_ms, kind="publish", stream=stream, offset=settled.offset)
        publication.deliver(settled.entry, now_ms)
        _send_published(hub, session, request, topic, publication, settled.offset, seen, now_ms)

    hub.append(Append(stream, copy.frame(), then, key=copy.sender.address.encode()))


def _send_published(
    hub: Hub,
    session: Session,
    request: HubRequest,
    topic: str,
    publication: Publication,
    offset: str | None,
    seen: tuple[SeenMessages, SeenMessage],
    now_ms: int,
) -> None:
    payload = {
        "topic": topic,
        "subscriberCount": publication.counts[0],
        "queuedCount": publication.counts[1],
        "stream": None if offset is None else topic_stream(topic),
        "offset": offset,
    }
    frame = hub.send_reply(session, request, "hub:published", payload, now_ms)
    hub.answer_repeats(seen, frame, session)
