"""Handler of `hub:broadcast`, and the batching of broadcasts that are in progress.

A broadcast is delivered in batches of recipients, with other work between the batches. Broadcasts of one
session run in order. One that follows closely and has the same recipients joins those before it: it never
overtakes them, and a connection that gets several copies in one batch is written to once.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from tailrace.common import failpoints
from tailrace.hub import requests
from tailrace.hub.addresses import AddressPattern
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.delivery_queues import BROADCAST, BROADCAST_STREAM, BroadcastEntry, Cursor
from tailrace.hub.effects import Append, AppendOutcome, Defer
from tailrace.hub.envelope import SharedEnvelope, new_id
from tailrace.hub.errors import HubError, to_hub_error
from tailrace.hub.flow_control import FULL, SENT, SLOW, WAITING, Recipient, send_to_many
from tailrace.hub.registry import REGISTRY_STREAM, Registration, RegistryQuery
from tailrace.hub.requests import HubRequest, OutgoingMessage
from tailrace.hub.send import check_duplicate, read_type_and_data
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


BATCH_RECIPIENTS: Final = 100
CONCURRENT_BROADCASTS_MAX: Final = 4
# A broadcast that starts later than this waits: joining would delay those before it.
JOIN_RECIPIENTS_MAX: Final = 3 * BATCH_RECIPIENTS
BROADCAST_TYPE: Final = "hub:broadcast"


class _TypeOnly(msgspec.Struct, gc=False):
    type: str


_decode_type: Final = msgspec.json.Decoder(_TypeOnly).decode


class BroadcastBatching:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._under_way: dict[Session, list[ActiveBroadcast]] = {}  # in order of acceptance

    def accepts(self, session: Session, frame: bytes) -> bool:
        """Whether a frame may be processed while a broadcast of its session is in progress."""
        line = self._under_way.get(session)
        if not line or len(line) >= CONCURRENT_BROADCASTS_MAX or line[0].place > JOIN_RECIPIENTS_MAX:
            return False
        return line[0].is_direct and all(one.is_joined for one in line[1:]) and _is_broadcast(frame)

    def add(self, broadcast: ActiveBroadcast, now_ms: int) -> None:
        line = self._under_way.setdefault(broadcast.session, [])
        line.append(broadcast)
        if len(line) == 1:
            broadcast.begin(now_ms)
        elif broadcast.is_direct and broadcast.recipients == line[0].recipients:
            broadcast.is_joined = True
            self._hub.count("messages", "broadcast/ok")
            if line[0].place <= BATCH_RECIPIENTS:
                # Close behind: its first copies are written together with those of the one before.
                broadcast.deliver(line[0].place, now_ms)

    def remove(self, broadcast: ActiveBroadcast, now_ms: int) -> None:
        """The broadcast failed."""
        self._under_way[broadcast.session].remove(broadcast)
        self._next(broadcast.session, now_ms)

    def send_batch(self, session: Session, now_ms: int) -> None:
        """Delivers the next batch, then yields to other work."""
        failpoints.reached("hub.before_batch")
        line = self._under_way[session]
        abreast = [line[0], *takewhile(lambda one: one.is_joined, line[1:])]
        room = BATCH_RECIPIENTS
        for before, one in pairwise(abreast):
            # Broadcasts that joined late catch up first.
            room -= one.deliver(min(room, before.place - one.place), now_ms)
        if room == BATCH_RECIPIENTS:
            for one in abreast:
                one.deliver(BATCH_RECIPIENTS // len(abreast), now_ms)
        for one in abreast:
            if one.is_done:
                failpoints.reached("hub.before_broadcast_ack")
                line.remove(one)
                one.acknowledge(now_ms)
            else:
                one.send_progress(now_ms)
        if abreast[-1].is_done:
            self._next(session, now_ms)
        else:
            self._hub.effects.append(Defer(partial(self.send_batch, session)))
            self._hub.resume_frames(session, now_ms)

    def _next(self, session: Session, now_ms: int) -> None:
        """All joined broadcasts are done: starts the next one, or resumes the session."""
        line = self._under_way[session]
        if line:
            line[0].begin(now_ms)
            return
        del self._under_way[session]
        session.broadcasting = False
        self._hub.resume_frames(session, now_ms)


def _is_broadcast(frame: bytes) -> bool:
    if BROADCAST_TYPE.encode() not in frame:
        return False
    try:
        return _decode_type(frame).type == BROADCAST_TYPE
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


PROGRESS_RECIPIENTS: Final = 1000
PROGRESS_MS: Final = 100


class ActiveBroadcast:
    """One broadcast in progress; BroadcastBatching decides when its next batch is due."""

    __slots__ = (
        "_copy",
        "_frame",
        "_hub",
        "_progress_sent",
        "_query",
        "_request",
        "_seen",
        "_stored",
        "delivered",
        "entry",
        "failed",
        "is_joined",
        "offset",
        "place",
        "queued",
        "recipients",
        "session",
    )

    def __init__(
        self,
        hub: Hub,
        session: Session,
        request: HubRequest,
        recipients: list[Registration],
        copy: OutgoingMessage,
        seen: tuple[SeenMessages, SeenMessage],
        query: dict[str, object],
    ) -> None:
        self._hub = hub
        self.session = session
        self._request = request
        self.recipients = recipients
        self._query = query
        self._copy = copy
        self._seen = seen
        self._frame: SharedEnvelope = copy.shared()
        queues = hub.mailboxes.queues
        self._stored = {one.path for one in recipients if one.options.durable or one.path in queues}
        self.place = 0  # of the next recipient
        self.is_joined = False  # with the one before it
        self._progress_sent = (0, 0)
        self.delivered = self.queued = self.failed = 0
        self.entry = 0
        self.offset: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether nothing of it is stored."""
        return not self._stored

    @property
    def is_done(self) -> bool:
        return self.place == len(self.recipients)

    def begin(self, now_ms: int) -> None:
        hub = self._hub
        self.session.broadcasting = True
        if not self._stored:
            hub.count("messages", "broadcast/ok")
            hub.broadcasts.send_batch(self.session, now_ms)
            return
        streams = hub.streams
        entry = BroadcastEntry(
            Raw(self._frame.frame(self._copy.id, hub.options.address)),
            sorted(self._stored),
            self._query,
            streams.offset(REGISTRY_STREAM, streams.tail(REGISTRY_STREAM) or 0),
        )
        body = msgspec.json.encode(entry)
        hub.append(Append(BROADCAST_STREAM, body, self._on_stored, key=self._copy.sender.address.encode()))

    def _on_stored(self, settled: AppendOutcome, now_ms: int) -> None:
        hub = self._hub
        if settled.error is not None:
            self._seen[0].forget(self._request.id)
            hub.count("messages", "broadcast/refused")
            hub.send_request_error(self.session, self._request, to_hub_error(settled.error), now_ms)
            hub.broadcasts.remove(self, now_ms)
            return
        hub.count("messages", "broadcast/ok")
        self.entry, self.offset = settled.entry, settled.offset
        hub.mailboxes.first_entries.setdefault(BROADCAST_STREAM, settled.entry)
        offset, trace = settled.offset, hub.trace
        trace.record("accepted", self._copy, now_ms, kind="broadcast", stream=BROADCAST_STREAM, offset=offset)
        hub.broadcasts.send_batch(self.session, now_ms)

    def deliver(self, most: int, now_ms: int) -> int:
        """Delivers to at most `most` further recipients, and returns how many."""
        batch = self.recipients[self.place : self.place + most]
        self.place += len(batch)
        self._deliver(batch, now_ms)
        return len(batch)

    def acknowledge(self, now_ms: int) -> None:
        payload = {
            "messageId": self._request.id,
            "deliveredCount": self.delivered,
            "queuedCount": self.queued,
            "failedCount": self.failed,
            "total": len(self.recipients),
            "offset": self.offset,
        }
        if self._hub.options.on_broadcast is not None:
            self._hub.options.on_broadcast((now_ms - self._copy.timestamp) / 1000)
        frame = self._hub.send_reply(self.session, self._request, "hub:broadcast_ack", payload, now_ms)
        self._hub.answer_repeats(self._seen, frame, self.session)

    def _deliver(self, batch: list[Registration], now_ms: int) -> None:
        hub, session, stored = self._hub, self.session, self._stored
        known = hub.registry.by_path
        recipients: list[Recipient] = []
        for found in batch:
            path, recipient = found.path, found.session
            if path in stored:
                self._deliver_stored(found, now_ms)
            elif recipient is None or known.get(path) is not found:
                self.failed += 1
            else:
                recipients.append((recipient, path))
        left = send_to_many(hub, session, self._frame, recipients, now_ms)
        self.delivered += len(recipients) - len(left)
        for recipient, path in left:
            frame = self._frame.frame(new_id(now_ms), f"@({path})")
            outcome = hub.flow_control.offer(recipient, frame, now_ms, session)
            if outcome == SENT:
                self.delivered += 1
            else:
                self._not_sent(path, recipient, outcome, len(frame), now_ms)

    def _not_sent(self, path: str, recipient: Session, outcome: str, size: int, now_ms: int) -> None:
        if outcome == WAITING:
            self.queued += 1
            return
        self.failed += 1
        if outcome in (SLOW, FULL):
            hub = self._hub
            copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=f"@({path})")
            hub.dead_letters.write("consumer_slow" if outcome == SLOW else "resume_buffer_full", copy, now_ms)
            if outcome == SLOW:
                hub.flow_control.drop(recipient, size, now_ms)

    def _deliver_stored(self, found: Registration, now_ms: int) -> None:
        """The broadcast is in the log: a queue that is caught up gets it now, others when they read it."""
        queue = self._hub.mailboxes.queues.get(found.path)
        if queue is None or queue.session is None:
            self._set_cursor(found.path)
            self.queued += 1
            return
        feed = self._hub.mailboxes.feed(queue, BROADCAST_STREAM, BROADCAST, begin=self.entry - 1)
        copy = msgspec.structs.replace(self._copy, id=new_id(now_ms), to=found.address)
        self._hub.mailboxes.on_appended(queue, feed, self.entry, copy, now_ms)
        if feed.sent >= self.entry:
            self.delivered += 1
        else:
            self.queued += 1

    def _set_cursor(self, path: str) -> None:
        """Gives an offline actor without a cursor its start, so that the entry is not trimmed before."""
        cursors = self._hub.mailboxes.cursors
        if cursors.get(path, BROADCAST_STREAM) is None:
            cursors.set(path, BROADCAST_STREAM, Cursor(self.entry - 1, self.entry - 1))
            cursors.mark_dirty(path, BROADCAST_STREAM)

    def send_progress(self, now_ms: int) -> None:
        if "broadcast-progress" not in self.session.features:
            return
        place, at = self._progress_sent
        if self.place - place < PROGRESS_RECIPIENTS and (not at or now_ms - at < PROGRESS_MS):
            self._progress_sent = (place, at or now_ms)
            return
        self._progress_sent = (self.place, now_ms)
        total = len(self.recipients)
        payload = {
            "messageId": self._request.id,
            "deliveredCount": self.delivered,
            "queuedCount": self.queued,
            "failedCount": self.failed,
            "remaining": total - self.place,
            "total": total,
        }
        self._hub.send_reply(self.session, self._request, "hub:broadcast_progress", payload, now_ms)


def broadcast(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    kind, data = read_type_and_data(request.payload)
    capability, text = request.text("targetCapability"), request.payload.text("pattern")
    excludes = request.truth("excludeSelf") is True
    pattern = None if text is None else AddressPattern(text)
    if not hub.policy.may(session.principal, "broadcast"):
        raise hub.denied(session, "broadcast", "denied by policy", "", now_ms)
    seen = check_duplicate(hub, session, request, now_ms)
    if seen is None:
        return
    query = RegistryQuery(
        pattern,
        "" if pattern is None else pattern.prefix,
        () if capability is None else (capability,),
    )
    registry = hub.registry
    recipients = [
        found
        for found in (registry.active(now_ms) if query.is_for_all else registry.matching(query, now_ms))
        if not (excludes and found.session is session)
        and (found.session is not None or found.options.durable)
    ]
    try:
        hub.rates.consume(session.path, "recipients", max(1, len(recipients)), now_ms)
    except HubError:
        seen[0].forget(request.id)
        raise
    own = b'"broadcast":true,"via":%b,"hubSeq":%d' % (hub.via, hub.next_seq(now_ms))
    copy = OutgoingMessage(
        new_id(now_ms),
        request.sender,
        "",
        kind,
        data,
        now_ms,
        requests.append_metadata(requests.forwarded_metadata(request), own),
        correlation_id=request.id,
        ttl=request.envelope.ttl,
    )
    asked: dict[str, object] = {"pattern": text, "capability": capability, "excludeSelf": excludes}
    hub.broadcasts.add(ActiveBroadcast(hub, session, request, recipients, copy, seen, asked), now_ms)
