"""Start-up: registrations, subscriptions and positions are put back as the log has them."""

from __future__ import annotations

from typing import Final

import msgspec

from tailrace.errors import TailraceError
from tailrace.hub.cursors import Cursor, CursorRecord
from tailrace.hub.discovery import read_event
from tailrace.hub.registry import Registration
from tailrace.hub.state import Hub
from tailrace.hub.subscription import Record


class SubscriptionMessage(msgspec.Struct):
    key: str
    value: Record | None = None


class CursorMessage(msgspec.Struct):
    key: str
    value: CursorRecord | None = None


_subscriptions: Final = msgspec.json.Decoder(SubscriptionMessage)
_cursors: Final = msgspec.json.Decoder(CursorMessage)


class Restoring:
    """Takes what the streams hold, oldest first; `finish` makes it the hub's."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._registered: dict[str, Registration] = {}
        self._positions: dict[str, CursorRecord | None] = {}

    def registry(self, body: bytes) -> None:
        path, registration = read_event(body)
        if registration is not None:
            self._registered[path] = registration
        elif (ended := self._registered.pop(path, None)) is not None:
            self._hub.registry.remember(path, ended.version)

    def subscription(self, body: bytes) -> None:
        message = _subscriptions.decode(body)
        owner, _, key = message.key.partition(" ")
        self._hub.topics.restore(message.value, owner[2:-1], key)

    def cursor(self, body: bytes) -> None:
        message = _cursors.decode(body)
        self._positions[message.key] = message.value

    def finish(self, now_ms: int) -> None:
        """Nobody is online yet: every registration has one whole TTL to be taken back."""
        hub = self._hub
        for registration in self._registered.values():
            registration.expires_ms = now_ms + registration.ttl_ms
            hub.registry.put(registration)
        for key, record in self._positions.items():
            owner, _, stream = key.partition(" ")
            if record is None or hub.streams.tail(stream) is None:
                continue
            committed = self._entry(stream, record.committed)
            delivered = max(committed, self._entry(stream, record.delivered))
            tail = hub.streams.tail(stream) or 0
            hub.mailboxes.cursors.put(owner[2:-1], stream, Cursor(committed, delivered, unsure_upto=tail))

    def _entry(self, stream: str, offset: str) -> int:
        """A position that is not there any more is the first one that is."""
        try:
            return self._hub.streams.resolve(stream, offset)
        except TailraceError:
            return self._hub.streams.earliest(stream)
