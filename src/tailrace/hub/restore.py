"""Start-up of the hub: registrations, subscriptions, cursors and recent messages from the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.hub import requests
from tailrace.hub.addresses import MAILBOX_PREFIX, TOPIC_PREFIX
from tailrace.hub.dead_letters import DEAD_LETTERS_STREAM as LETTERS
from tailrace.hub.delivery_queues import BROADCAST_STREAM, Cursor, CursorRecord, decode_broadcast
from tailrace.hub.delivery_queues import CURSORS_STREAM as CURSORS
from tailrace.hub.envelope import parse_envelope
from tailrace.hub.mailboxes import STORED_BYTES_MAX
from tailrace.hub.registration import parse_registry_event
from tailrace.hub.registry import REGISTRY_STREAM, Registration
from tailrace.hub.requests import OutgoingMessage
from tailrace.hub.runner import PAGE_BYTES, PAGE_ENTRIES, LogStreams
from tailrace.hub.state import Hub
from tailrace.hub.topics import SUBSCRIPTIONS_STREAM as SUBSCRIPTIONS
from tailrace.hub.topics import SubscriptionRecord
from tailrace.log.listing import list_streams
from tailrace.log.log import Log

logger = logging.getLogger("tailrace.hub")

# Streams of messages that a client may repeat.
MESSAGE_STREAMS: Final = (MAILBOX_PREFIX, TOPIC_PREFIX, BROADCAST_STREAM)


class SubscriptionEvent(msgspec.Struct):
    key: str
    value: SubscriptionRecord | None = None


class CursorEvent(msgspec.Struct):
    key: str
    value: CursorRecord | None = None


class DeadLetterPosition(msgspec.Struct, rename="camel"):
    """The position of a dead letter's message."""

    stream: str | None = None
    offset: str | None = None
    cursor: str | None = None
    accepted_at: int | None = None


_subscription_decoder: Final = msgspec.json.Decoder(SubscriptionEvent)
_cursor_decoder: Final = msgspec.json.Decoder(CursorEvent)
_dead_letter_decoder: Final = msgspec.json.Decoder(DeadLetterPosition)


class HubRestore:
    """Collects the events of the hub's streams, oldest first; `finish` applies them to the hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._registered: dict[str, Registration] = {}
        self._positions: dict[str, CursorRecord | None] = {}

    def registry(self, body: bytes) -> None:
        path, registration = parse_registry_event(body)
        if registration is not None:
            self._registered[path] = registration
        elif (ended := self._registered.pop(path, None)) is not None:
            self._hub.registry.remember(path, ended.version)

    def subscription(self, body: bytes) -> None:
        message = _subscription_decoder.decode(body)
        owner, _, key = message.key.partition(" ")
        self._hub.topics.restore(message.value, owner[2:-1], key)

    def cursor(self, body: bytes) -> None:
        message = _cursor_decoder.decode(body)
        self._positions[message.key] = message.value

    def letter(self, body: bytes) -> None:
        """Acknowledges a dead-lettered message whose cursor may not have been written. After `finish`.

        The cursor is written soon: later letters may displace this one from those replayed at start-up.
        """
        letter = _dead_letter_decoder.decode(body)
        if letter.cursor is None or letter.stream is None or letter.offset is None:
            return
        hub, stream = self._hub, letter.stream
        path = letter.cursor.partition(" ")[0][2:-1]
        try:
            entry = hub.streams.resolve(stream, letter.offset)
        except TailraceError:
            return  # deleted or trimmed
        if (letter.accepted_at or 0) < hub.streams.created_ms(stream):
            return  # of a deleted stream that had the same name
        cursor = self._cursor_of_letter(path, stream)
        if cursor is not None and not cursor.has_passed(entry):
            cursor.acknowledge((entry,))
            hub.mailboxes.cursors.mark_dirty(path, stream)

    def _cursor_of_letter(self, path: str, stream: str) -> Cursor | None:
        """A cursor that was never written starts at the beginning of a mailbox, or of a new topic."""
        hub, cursors = self._hub, self._hub.mailboxes.cursors
        cursor = cursors.get(path, stream)
        if cursor is None and (
            stream.startswith(MAILBOX_PREFIX)
            or any(stream == subscribed for subscribed, _, _ in hub.topics.durable_of(path))
        ):
            cursor = Cursor(maybe_delivered_upto=hub.streams.tail(stream) or 0)
            cursors.set(path, stream, cursor, restored=True)
        return cursor

    def broadcast(self, entry: int, body: bytes) -> None:
        """A recent broadcast: the process may have crashed before it wrote the cursors of all recipients,
        which protect unread entries from trimming. After `finish`.
        """
        hub = self._hub
        cursors, tail = hub.mailboxes.cursors, hub.streams.tail(BROADCAST_STREAM) or 0
        for path in decode_broadcast(body).recipients:
            if path in hub.registry.by_path and cursors.get(path, BROADCAST_STREAM) is None:
                cursor = Cursor(entry - 1, entry - 1, maybe_delivered_upto=tail)
                cursors.set(path, BROADCAST_STREAM, cursor, restored=True)
                cursors.mark_dirty(path, BROADCAST_STREAM)

    def message(self, stream: str, entry: int, time_ns: int, body: bytes) -> None:
        """A recently accepted message, so that a repeat is detected. After `finish`."""
        hub = self._hub
        recipients: list[str] = []
        if stream == BROADCAST_STREAM:
            stored = decode_broadcast(body)
            recipients, body = stored.recipients, bytes(stored.message)
        copy = requests.outgoing_from_envelope(parse_envelope(body, STORED_BYTES_MAX))
        original = requests.parse_metadata(copy).get("originalMessageId")
        request_id = copy.correlation_id if original is None else msgspec.json.decode(original, type=str)
        if request_id is None or copy.type == "hub:reply":
            return
        sender = copy.sender.path
        known = hub.registry.by_path.get(sender)
        seen = hub.seen_messages_of(sender if known is None else known.owner)
        at_ms = time_ns // 1_000_000
        if seen.get(request_id, at_ms) is not None:
            return
        pending = None
        if stream.startswith(MAILBOX_PREFIX):
            path, offset = stream.removeprefix(MAILBOX_PREFIX), hub.streams.offset(stream, entry)
            pending = hub.pending.rebuild(copy, path, stream, entry, offset, hub.mailboxes.cursors.now_ms)
        if pending is not None:
            pending.seen = (seen, seen.add(request_id, at_ms, copy.timestamp))
            return
        answer = self._answer(stream, entry, request_id, copy, recipients, at_ms)
        seen.add(request_id, at_ms, copy.timestamp, answers=(answer,))

    def _answer(
        self,
        stream: str,
        entry: int,
        request_id: str,
        copy: OutgoingMessage,
        recipients: list[str],
        at_ms: int,
    ) -> bytes:
        """An answer for repeats of a message whose own answer is lost."""
        offset = self._hub.streams.offset(stream, entry)
        payload: dict[str, object]
        if stream == BROADCAST_STREAM:
            kind = "hub:broadcast_ack"
            payload = {"messageId": request_id, "deliveredCount": 0, "queuedCount": len(recipients)}
            payload |= {"failedCount": 0, "total": len(recipients), "offset": offset}
        elif stream.startswith(TOPIC_PREFIX):
            kind = "hub:published"
            payload = {"topic": stream.removeprefix(TOPIC_PREFIX), "subscriberCount": 0, "queuedCount": 0}
            payload |= {"stream": stream, "offset": offset}
        else:
            kind = "hub:delivery_ack"
            payload = {"messageId": request_id, "deliveredAt": at_ms, "status": "accepted"}
            payload |= {"level": "accepted", "stream": stream, "offset": offset, "duplicate": True}
        body = msgspec.json.encode(payload)
        return self._hub.encode(copy.sender.address, kind, body, at_ms, correlation_id=request_id)

    def finish(self, now_ms: int) -> None:
        """No client is online yet: every registration has a full TTL to be taken back."""
        hub = self._hub
        hub.mailboxes.cursors.now_ms = now_ms
        for registration in self._registered.values():
            registration.expires_ms = now_ms + registration.ttl_ms
            registration.logged_ms = registration.registered_ms
            hub.registry.put(registration)
        for key, record in self._positions.items():
            owner, _, stream = key.partition(" ")
            if record is None:
                continue
            if hub.streams.tail(stream) is None:
                hub.mailboxes.cursors.write_deleted(owner[2:-1], stream)  # killed between both deletions
                continue
            committed = self._entry(stream, record.committed)
            delivered = max(committed, self._entry(stream, record.delivered))
            tail = hub.streams.tail(stream) or 0
            passed = {entry for first, last in record.passed for entry in range(first, last + 1)}
            cursor = Cursor(
                committed,
                delivered,
                read_upto=delivered if record.read is None else self._entry(stream, record.read),
                maybe_delivered_upto=tail,
                moved_ms=record.moved_at or now_ms,
                acknowledged={entry for entry in passed if committed < entry <= tail},
            )
            hub.mailboxes.cursors.set(owner[2:-1], stream, cursor, restored=True)

    def _entry(self, stream: str, offset: str) -> int:
        """A trimmed position becomes the earliest one."""
        try:
            return self._hub.streams.resolve(stream, offset)
        except TailraceError:
            return self._hub.streams.earliest(stream)


NAMES_AT_ONCE: Final = 1000
# Cursors are flushed a fraction of a second after they moved; longer in a starved process.
UNFLUSHED_NS: Final = 60 * 10**9


async def restore_hub(hub: Hub, streams: LogStreams, log: Log, now_ms: int) -> None:
    restoring = HubRestore(hub)
    _restore_topics(hub, log)
    for name, apply in (
        (REGISTRY_STREAM, restoring.registry),
        (SUBSCRIPTIONS, restoring.subscription),
        (CURSORS, restoring.cursor),
    ):
        async for body in streams.read_all(name):
            apply(body)
    restoring.finish(now_ms)
    await _replay_last(streams, BROADCAST_STREAM, restoring.broadcast)
    await _replay_last(streams, LETTERS, lambda _, body: restoring.letter(body))
    await _restore_messages(restoring, streams, log, (now_ms - hub.limits.hub_seen_ttl_ms) * 1_000_000)


async def _replay_last(streams: LogStreams, name: str, apply: Callable[[int, bytes], None]) -> None:
    """Replays the last entries, whose cursors may not have been written before a crash."""
    stream = streams.find(name)
    if stream is None:
        return
    after, since = stream.earliest, stream.last_ns - UNFLUSHED_NS
    while after < stream.visible:
        found = await streams.read(stream, after, PAGE_ENTRIES, PAGE_BYTES, since or None)
        if found.error is not None:
            # Segments in the object store are old enough: their cursors have been written.
            logger.warning(
                "cannot read the last entries of a hub stream at start-up",
                extra=log_fields(stream=name, error=str(found.error)),
            )
            break
        if not found.entries:
            break
        for number, _, body in found.entries:
            apply(number, body)
        after, since = found.next_entry, 0


async def _restore_messages(restoring: HubRestore, streams: LogStreams, log: Log, since_ns: int) -> None:
    """Recent messages are in the journal, so their streams are in memory."""
    recent = [
        stream
        for name, stream in list(log.streams.by_name.items())
        if name.startswith(MESSAGE_STREAMS) and stream.last_ns >= since_ns and stream.visible > 0
    ]
    for stream in recent:
        after, since = stream.earliest, since_ns
        while after < stream.visible:
            found = await streams.read(stream, after, PAGE_ENTRIES, PAGE_BYTES, since or None)
            if found.error is not None or not found.entries:
                break
            for number, time_ns, body in found.entries:
                restoring.message(stream.name, number, time_ns, body)
            after, since = found.next_entry, 0


def _restore_topics(hub: Hub, log: Log) -> None:
    after = TOPIC_PREFIX
    while True:
        listed = list_streams(log, after, TOPIC_PREFIX, NAMES_AT_ONCE, system=True)
        for stream in listed:
            hub.topics.stored_topics.add(stream.name[len(TOPIC_PREFIX) :])
        if len(listed) < NAMES_AT_ONCE:
            return
        after = listed[-1].name
