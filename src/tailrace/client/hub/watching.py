"""Who is there: what the hub says of actors that come and go, kept over lost sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from tailrace.client.error import ClientError
from tailrace.client.hub.model import Actor, Presence

EVENTS_MAX: Final = 10_000
GONE_EVENTS: Final = frozenset({"left", "expired"})


class PresenceWatch:
    """One watch. Whatever is missed in between shows as the difference between two looks."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.payload = payload
        self.id = ""
        self._there: dict[str, Actor] = {}
        self._events: deque[Presence] = deque()
        self._changed = asyncio.Event()
        self._error: ClientError | None = None
        self._ended = False

    def look(self, actors: list[Actor]) -> None:
        """Everybody who is there now."""
        now = {actor.address: actor for actor in actors}
        for address in [address for address in self._there if address not in now]:
            self._tell(Presence("left", address, [], self._there.pop(address).version))
        for address, actor in now.items():
            known = self._there.get(address)
            if known is None or known.version != actor.version:
                event = "joined" if known is None else "updated"
                self._tell(Presence(event, address, actor.capabilities, actor.version))
        self._there = now

    def take(self, event: Presence) -> None:
        """Somebody came, went or changed."""
        known = self._there.get(event.actor_address)
        if event.event in GONE_EVENTS:
            if self._there.pop(event.actor_address, None) is None:
                return
        elif known is not None and known.version >= event.version:
            return  # the look before it had it already
        else:
            self._there[event.actor_address] = Actor(
                event.actor_address, event.capabilities, version=event.version
            )
        self._tell(event)

    async def next(self) -> Presence | None:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()

    def end(self, error: ClientError | None = None) -> None:
        self._ended, self._error = True, error
        self._changed.set()

    def _tell(self, event: Presence) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._events.clear()
            self.end(ClientError("inbox_full", "too many came and went while nobody looked"))
        elif not self._ended:
            self._events.append(event)
            self._changed.set()
