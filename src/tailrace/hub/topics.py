"""Topics: who subscribed to what, and which of them are kept in streams."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub.addresses import TopicFilter, TopicTrie, topic_stream
from tailrace.hub.boxes import TOPIC, DeliveryQueue, GroupMember, group_queue_path
from tailrace.hub.cursors import Cursor
from tailrace.hub.effects import Append, AppendOutcome, Read, ReadResult
from tailrace.hub.errors import HubError, field_error, to_hub_error
from tailrace.hub.fields import HubRequest
from tailrace.hub.ids import new_id
from tailrace.hub.registry import DeliveryOptions
from tailrace.hub.session import Session
from tailrace.hub.subscription import SubscriberGroup, SubscriptionRecord, TopicSubscription

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

SUBSCRIPTIONS_STREAM: Final = "hub/subscriptions"
SUBSCRIPTION_NAME_BYTES_MAX: Final = 128
SUBSCRIPTION_REWRITE_MS: Final = 24 * 3600 * 1000

SubscribeCallback = Callable[[AppendOutcome, int], None]


class Topics:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.live: TopicTrie[TopicSubscription] = TopicTrie()
        self.lasting: TopicTrie[TopicSubscription] = TopicTrie()
        self.groups: dict[tuple[str, str], SubscriberGroup] = {}
        self.kept: set[str] = set()  # topics that have a stream
        self._durable: dict[str, dict[str, TopicSubscription]] = {}  # by owner, then by name or filter
        # Those that are being written down, and who else asked for them meanwhile.
        self._starting: dict[tuple[str, str], list[SubscribeCallback]] = {}

    # -- durable ones ----------------------------------------------------------------------------------

    def is_durable(self, topic: str) -> bool:
        """Whether a publication is kept: the topic was, or somebody wants it to be."""
        if topic in self.kept or self.lasting.match(topic):
            return True
        return any(pattern.matches(topic) for pattern in self._hub.durable_patterns)

    def durable_of(self, owner: str) -> list[tuple[str, str, str]]:
        """The streams that an actor's durable subscriptions take from: stream, topic, subscription."""
        found: list[tuple[str, str, str]] = []
        for subscription in self._durable.get(owner, {}).values():
            topics = (
                [subscription.filter.text]
                if subscription.filter.is_plain
                else sorted(topic for topic in self.kept if subscription.filter.matches(topic))
            )
            found += [(topic_stream(topic), topic, subscription.id) for topic in topics]
        return found

    def restore(self, record: SubscriptionRecord | None, owner: str, key: str) -> None:
        """One message of the log, at start-up."""
        known = self._durable.get(owner, {}).pop(key, None)
        if known is not None:
            self.lasting.remove(known.filter, known)
        if record is not None:
            self._keep(
                TopicSubscription(
                    record.subscription_id,
                    owner,
                    TopicFilter(record.topic),
                    record.name,
                    record.group,
                    durable=True,
                )
            )

    def write_again(self, now_ms: int) -> None:
        """What still holds is written down once a day, so the log need not keep what is older."""
        for owned in self._durable.values():
            for found in owned.values():
                if now_ms - found.logged_ms >= SUBSCRIPTION_REWRITE_MS:
                    found.logged_ms = now_ms
                    self._hub.append(
                        Append(
                            SUBSCRIPTIONS_STREAM, encode_subscription_event(found), key=found.owner.encode()
                        )
                    )

    def _keep(self, subscription: TopicSubscription) -> None:
        self._durable.setdefault(subscription.owner, {})[subscription.key] = subscription
        self.lasting.add(subscription.filter, subscription)

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
                raise field_error(field, f"{field} has 1 to {SUBSCRIPTION_NAME_BYTES_MAX} bytes")
        durable = request.payload.truth("durable") is True
        if not hub.policy.may_filter(session.actor, text):
            raise hub.denied(session, "subscribe", "denied by policy", text, now_ms)
        for known in session.subscriptions.values():
            same = (known.filter.text, known.group, known.name) == (text, group, name)
            if same and known.durable == durable and known.owner == request.sender:
                self._subscribed(session, request, known, None, now_ms)
                return
        if len(session.subscriptions) >= hub.limits.hub_session_subscriptions:
            details = {"retryAfter": 1000, "kind": "subscribe", "reason": "subscriptions"}
            raise HubError("rate_limited", "too many subscriptions on this session", details)
        if durable:
            self._subscribe_durable(session, request, wanted, name, group, now_ms)
            return
        subscription = TopicSubscription(
            f"sub-{new_id(now_ms)}", request.sender, wanted, name, group, session=session
        )
        session.subscriptions[subscription.id] = subscription
        if group is None:
            self.live.add(wanted, subscription)
        else:
            shared = self.groups.setdefault((text, group), SubscriberGroup())
            if not shared.members:
                # One entry for the whole group: whoever is first stands for all.
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
        self._hub.reply(session, request, "hub:subscribed", payload, now_ms)

    def _subscribe_durable(
        self,
        session: Session,
        request: HubRequest,
        wanted: TopicFilter,
        name: str | None,
        group: str | None,
        now_ms: int,
    ) -> None:
        """One of an actor is its own; one of a group is everybody's who takes part in it."""
        hub = self._hub
        owner = request.sender if group is None else group_queue_path(group, wanted.text)
        key = (owner, wanted.text if group is not None else name or wanted.text)
        known = self._durable.get(owner, {}).get(key[1])
        if known is not None and known.filter.text != wanted.text:
            raise field_error("name", "there is a subscription of this name to another topic")

        def enter(settled: AppendOutcome, now_ms: int) -> None:
            if settled.error is not None:
                hub.refuse_request(session, request, to_hub_error(settled.error), now_ms)
                return
            there = self._durable[owner][key[1]]
            mine = self._entered(session, request.sender, there, now_ms)
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
        """Writes down where it begins, then that it does."""
        hub, wanted = self._hub, subscription.filter
        key = (subscription.owner, subscription.key)

        def start(position: int | None) -> None:
            self._begin_cursors(subscription, begin, position)
            hub.mailboxes.cursors.flush()  # where it begins is durable before the subscription is
            self._starting.setdefault(key, [enter])

            def then(settled: AppendOutcome, now_ms: int) -> None:
                if settled.error is None:
                    subscription.logged_ms = now_ms
                    self._keep(subscription)
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

        since = _parse_start_ns(begin)
        stream = topic_stream(wanted.text)
        if since is None or not wanted.is_plain or hub.streams.tail(stream) is None:
            start(None)
            return

        self._starting[key] = [enter]

        def found_time(found: ReadResult, _: int) -> None:
            start(found.entries[0][0] - 1 if found.entries else hub.streams.tail(stream) or 0)

        hub.effects.append(Read(stream, 0, 1, 1, found_time, since))

    def _begin_cursors(self, found: TopicSubscription, begin: object, position: int | None) -> None:
        """A topic that exists begins where it is asked to; one that comes later begins at its start."""
        hub = self._hub
        topics = [found.filter.text] if found.filter.is_plain else list(self.kept)
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
                raise field_error("from", "from is now, -1, an offset or a time")
            hub.mailboxes.cursors.put(found.owner, stream, Cursor(entry, entry))
            hub.mailboxes.cursors.moved(found.owner, stream)

    def _position(self, found: TopicSubscription) -> str | None:
        if not found.filter.is_plain:
            return None
        stream = topic_stream(found.filter.text)
        cursor = self._hub.mailboxes.cursors.of(found.owner, stream)
        return None if cursor is None else self._hub.streams.offset(stream, cursor.committed)

    def _entered(
        self, session: Session, sender: str, found: TopicSubscription, now_ms: int
    ) -> TopicSubscription:
        """What the session has of it: the subscription itself, or a part in its group."""
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
        box = mailboxes.open_group(found.owner)
        box.members.append(
            GroupMember(mine, registered.options if registered is not None and own else DeliveryOptions())
        )
        session.boxes[box.path] = None
        self._flow(box, found, now_ms)
        return mine

    def _activate(self, session: Session, found: TopicSubscription, now_ms: int) -> None:
        """The owner is here: its feeds flow."""
        mailboxes = self._hub.mailboxes
        if found.session is not None and found.session is not session:
            found.session.subscriptions.pop(found.id, None)
        found.session = session
        session.subscriptions[found.id] = found
        box = mailboxes.open(found.owner)
        registered = self._hub.registry.find(found.owner, now_ms)
        if registered is not None and registered.session is session:
            box.options = registered.options
        mailboxes.take(box, session)
        self._flow(box, found, now_ms)

    def _flow(self, box: DeliveryQueue, found: TopicSubscription, now_ms: int) -> None:
        for topic in [topic for topic in self.kept if found.filter.matches(topic)]:
            self.feed(box, found, topic)
        box.live = False
        self._hub.mailboxes.pump(box, now_ms)

    def feed(self, box: DeliveryQueue, found: TopicSubscription, topic: str) -> None:
        feed = self._hub.mailboxes.feed(box, topic_stream(topic), TOPIC)
        feed.topic, feed.subscription_id = topic, found.id

    # -- ending ----------------------------------------------------------------------------------------

    def unsubscribe(self, session: Session, request: HubRequest, now_ms: int) -> None:
        """Touches only the one that is named; an unknown one is no error."""
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
            self._hub.reply(session, request, "hub:unsubscribed", payload, now_ms)

    def _end_group(self, found: TopicSubscription) -> None:
        """A group ends when the last of its members says so; one that only lost its connection does not."""
        assert found.group is not None
        path = group_queue_path(found.group, found.filter.text)
        box = self._hub.mailboxes.boxes.get(path)
        whole = self._durable.get(path, {}).get(found.filter.text)
        if whole is not None and (box is None or not box.attended):
            self._forget(whole)

    def _forget(self, found: TopicSubscription) -> None:
        hub = self._hub
        self._durable.get(found.owner, {}).pop(found.key, None)
        self.lasting.remove(found.filter, found)
        others = {stream for stream, _, _ in self.durable_of(found.owner)}
        box = hub.mailboxes.boxes.get(found.owner)
        for topic in [topic for topic in self.kept if found.filter.matches(topic)]:
            stream = topic_stream(topic)
            if stream not in others:
                hub.mailboxes.cursors.forget(found.owner, stream)
                if box is not None:
                    box.feeds.pop(stream, None)
        hub.append(
            Append(
                SUBSCRIPTIONS_STREAM, encode_subscription_event(found, ended=True), key=found.owner.encode()
            )
        )

    def drop(self, found: TopicSubscription) -> None:
        """It is not a session's any more."""
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


def _parse_start_ns(begin: object) -> int | None:
    if isinstance(begin, int) and not isinstance(begin, bool):
        return begin * 1_000_000
    if isinstance(begin, str) and "T" in begin and "-" in begin:
        try:
            return int(datetime.fromisoformat(begin).timestamp() * 1e9)
        except ValueError:
            return None
    return None
