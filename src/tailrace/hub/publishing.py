"""`hub:publish`: one message to all who subscribed to its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tailrace.hub import copies
from tailrace.hub.addresses import durable_topic_error, parse_topic, topic_stream
from tailrace.hub.asks import REQUEST_TTL_MS_MAX, PendingRequest
from tailrace.hub.boxes import TOPIC
from tailrace.hub.copies import OutgoingMessage
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.effects import Append, AppendOutcome
from tailrace.hub.errors import field_error, to_hub_error
from tailrace.hub.fields import HubRequest
from tailrace.hub.flow import FULL, SENT, SLOW, WAITING
from tailrace.hub.ids import new_id
from tailrace.hub.message import SharedEnvelope, encode_shared
from tailrace.hub.send import check_duplicate, read_type_and_data
from tailrace.hub.session import Session
from tailrace.hub.spreading import Recipient, send_to_many
from tailrace.hub.subscription import TopicSubscription

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


class Publication:
    """One message on its way to its subscribers."""

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
        self.counts = [0, 0]  # handed over, queued

    def give(self, entry: int, now_ms: int) -> None:
        """To durable subscribers through their feeds, to others directly; a session gets one copy."""
        served: set[Session] = set()
        if entry:
            self._give_durable(entry, served, now_ms)
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
        self._give_directly(firsts, several, now_ms)
        for key in shared:
            self._give_group(key, now_ms)

    def _give_directly(
        self,
        firsts: dict[Session, TopicSubscription],
        several: dict[Session, list[TopicSubscription]],
        now_ms: int,
    ) -> None:
        policy, topic = self._hub.policy, self._topic
        is_open = policy.is_open(topic)
        recipients: list[Recipient] = []
        for session, first in firsts.items():
            if not (is_open and session.actor.has("subscribe")):
                if not policy.may_topic(session.actor, "subscribe", topic):
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
            self._frame = encode_shared(
                from_=copy.sender,
                type=copy.type,
                payload=copy.payload,
                timestamp=copy.timestamp,
                correlation_id=copy.correlation_id,
                metadata=copy.metadata + b"}",
                ttl=copy.ttl,
            )
        return self._frame

    def _offer(self, session: Session, frame: bytes, to: str, now_ms: int) -> str:
        hub = self._hub
        outcome = hub.flow.offer(session, frame, now_ms, self._session)
        if outcome == SENT:
            self.counts[0] += 1
        elif outcome == WAITING:
            self.counts[1] += 1
        elif outcome in (SLOW, FULL):
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=to)
            hub.dead.write("consumer_slow" if outcome == SLOW else "resume_buffer_full", copy, now_ms)
            if outcome == SLOW:
                hub.flow.drop(session, len(frame), now_ms)
        return outcome

    def _give_group(self, key: tuple[str, str], now_ms: int) -> None:
        """Exactly one member gets it."""
        hub = self._hub
        group = hub.topics.groups.get(key)
        member = None if group is None else group.choose()
        if member is None or member.session is None:
            hub.dead.write("no_member", self._copy, now_ms)
            return
        to = f"@({member.owner})"
        if not self._request.truth("expectReply"):
            self._offer(member.session, self._shared().frame(new_id(now_ms), to), to, now_ms)
            return
        ask = self._ask(member.owner, now_ms)
        ask.recipient_session = member.session
        copy = msgspec.structs.replace(self._copy, id=ask.copy_id, to=to, pattern="ask")
        if self._offer(member.session, copy.frame(ask.own), to, now_ms) in (SENT, WAITING):
            hub.asks.begin(ask)

    def _ask(self, recipient: str, now_ms: int) -> PendingRequest:
        request = self._request
        ttl_ms = request.envelope.ttl or self._hub.limits.hub_ask_ms
        return PendingRequest(
            request.id,
            self._session,
            request.sender,
            recipient,
            now_ms + min(ttl_ms, REQUEST_TTL_MS_MAX),
            [],
            True,
            copies.trace_metadata(request),
            copy_id=new_id(now_ms),
        )

    def _ask_group(self, found: TopicSubscription, entry: int, now_ms: int) -> None:
        """Whichever member is given the entry may answer it, also one that comes later."""
        ask, stream = self._ask(found.owner, now_ms), topic_stream(self._topic)
        self._hub.asks.begin(ask)
        offset = self._hub.streams.offset(stream, entry)
        self._hub.asks.committed(ask, stream, entry, offset, online=False, now_ms=now_ms)

    def _give_durable(self, entry: int, served: set[Session], now_ms: int) -> None:
        hub, asks = self._hub, self._request.truth("expectReply") is True
        for found in hub.topics.lasting.match(self._topic):
            if asks and found.group is not None:
                asks = False
                self._ask_group(found, entry, now_ms)
            box = hub.mailboxes.boxes.get(found.owner)
            there = box is not None and (
                box.online
                if found.group is not None
                else found.session is not None and box.session is found.session
            )
            if box is None or not there:
                self.counts[1] += 1
                continue
            if found.session is not None:
                if found.session in served:
                    continue
                served.add(found.session)
            feed = hub.mailboxes.feed(box, topic_stream(self._topic), TOPIC)
            feed.topic, feed.subscription_id = self._topic, found.id
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=f"@({found.owner})")
            hub.mailboxes.arrived(box, feed, entry, copy, now_ms)
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
    if not hub.policy.may_topic(session.actor, "publish", topic):
        raise hub.denied(session, "publish", "denied by policy", topic, now_ms)
    if request.truth("expectReply"):
        hub.asks.check_room(session)
    seen = check_duplicate(hub, session, request, now_ms)
    if seen is None:
        return
    own = b'"topic":%b,"publication":true,"via":%b' % (msgspec.json.encode(topic), hub.via)
    keeps = durable and problem is None
    if keeps:
        own += b',"hubSeq":%d' % hub.next_seq(now_ms)
    copy = OutgoingMessage(
        new_id(now_ms),
        f"@({request.sender})",
        hub.options.address,
        kind,
        data,
        now_ms,
        copies.append_metadata(copies.forwarded_metadata(request), own),
        correlation_id=request.id,
        ttl=request.envelope.ttl,
    )
    publication = Publication(hub, session, request, topic, copy)
    if not keeps:
        hub.count("messages", "publish/ok")
        publication.give(0, now_ms)
        _send_published(hub, session, request, topic, publication, None, seen, now_ms)
        return
    stream = topic_stream(topic)

    def then(settled: AppendOutcome, now_ms: int) -> None:
        if settled.error is not None:
            seen[0].forget(request.id)
            hub.count("messages", "publish/refused")
            hub.refuse_request(session, request, to_hub_error(settled.error), now_ms)
            return
        hub.count("messages", "publish/ok")
        hub.topics.kept.add(topic)
        hub.mailboxes.begun.setdefault(stream, settled.entry)
        hub.trace.note("accepted", copy, now_ms, kind="publish", stream=stream, offset=settled.offset)
        publication.give(settled.entry, now_ms)
        _send_published(hub, session, request, topic, publication, settled.offset, seen, now_ms)

    hub.append(Append(stream, copy.frame(), then, key=copy.sender.encode()))


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
    frame = hub.reply(session, request, "hub:published", payload, now_ms)
    for waiter in seen[0].answer(seen[1], frame):
        if waiter is not session and isinstance(waiter, Session):
            hub.control(waiter, frame)
