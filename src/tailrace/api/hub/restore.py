"""Start-up: registrations, subscriptions, positions and topics as the log has them."""

from __future__ import annotations

from typing import Final

import msgspec

from tailrace.api.hub.storage import LogStreams
from tailrace.errors import TailraceError
from tailrace.hub.cursors import STREAM as CURSORS
from tailrace.hub.cursors import Cursor, CursorRecord
from tailrace.hub.discovery import read_event
from tailrace.hub.presence import REGISTRY
from tailrace.hub.registry import Registration
from tailrace.hub.state import Hub
from tailrace.hub.subscription import Record
from tailrace.hub.topics import STREAM as SUBSCRIPTIONS
from tailrace.log.listing import list_streams
from tailrace.log.log import Log

TOPICS: Final = "hub/topic/"
NAMES_AT_ONCE: Final = 1000


class SubscriptionMessage(msgspec.Struct):
    key: str
    value: Record | None = None


class CursorMessage(msgspec.Struct):
    key: str
    value: CursorRecord | None = None


async def restore(hub: Hub, streams: LogStreams, log: Log, now_ms: int) -> None:
    """Nobody is online yet: every registration has one whole TTL to be taken back."""
    await _registrations(hub, streams, now_ms)
    _topics(hub, log)
    subscriptions = msgspec.json.Decoder(SubscriptionMessage)
    async for body in streams.all_of(SUBSCRIPTIONS):
        message = subscriptions.decode(body)
        owner, _, key = message.key.partition(" ")
        hub.topics.restore(message.value, owner[2:-1], key)
    await _cursors(hub, streams)


async def _registrations(hub: Hub, streams: LogStreams, now_ms: int) -> None:
    found: dict[str, Registration] = {}
    async for body in streams.all_of(REGISTRY):
        path, registration = read_event(body)
        if registration is not None:
            found[path] = registration
        elif (ended := found.pop(path, None)) is not None:
            hub.registry.remember(path, ended.version)
    for registration in found.values():
        registration.expires_ms = now_ms + registration.ttl_ms
        hub.registry.put(registration)


def _topics(hub: Hub, log: Log) -> None:
    after = TOPICS
    while True:
        listed = list_streams(log, after, TOPICS, NAMES_AT_ONCE, system=True)
        for stream in listed:
            hub.topics.kept.add(stream.name[len(TOPICS) :])
        if len(listed) < NAMES_AT_ONCE:
            return
        after = listed[-1].name


async def _cursors(hub: Hub, streams: LogStreams) -> None:
    decoder = msgspec.json.Decoder(CursorMessage)
    latest: dict[str, CursorRecord | None] = {}
    async for body in streams.all_of(CURSORS):
        message = decoder.decode(body)
        latest[message.key] = message.value
    for key, record in latest.items():
        owner, _, stream = key.partition(" ")
        if record is None or streams.find(stream) is None:
            continue
        committed = _entry(streams, stream, record.committed)
        delivered = max(committed, _entry(streams, stream, record.delivered))
        hub.mailboxes.cursors.put(owner[2:-1], stream, Cursor(committed, delivered))


def _entry(streams: LogStreams, stream: str, offset: str) -> int:
    """A position that is not there any more is the first one that is."""
    try:
        return streams.resolve(stream, offset)
    except TailraceError:
        return streams.earliest(stream)
