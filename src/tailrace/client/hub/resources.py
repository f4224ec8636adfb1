"""Registrations, subscriptions and presence watches kept over reconnects, and the inbox.

Messages that have come and were not taken yet, bounded in number and bytes.

What a session has to be told again: addresses and subscriptions, and when they are renewed.

Who is there: what the hub says of actors that come and go, kept over lost sessions.

An actor's place at the hub: what it holds there, kept over renewals, pauses and lost sessions.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from tailrace.client.errors import ClientError
from tailrace.client.hub import wire
from tailrace.client.hub.model import (
    Actor,
    ActorPage,
    Message,
    Presence,
    PresencePage,
    Registration,
    Subscription,
    decode_answer,
)
from tailrace.client.hub.session import HubSession, SessionOptions, now_ms
from tailrace.client.hub.wire import OutgoingRequest
from tailrace.hub.envelope import new_id


class Inbox:
    """First in, first out. Whoever fills it waits while it is full: then the socket is not read either."""

    __slots__ = ("_bytes", "_bytes_max", "_changed", "_ended", "_error", "_messages", "_messages_max", "full")

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self._messages: deque[Message] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: ClientError | None = None
        self.full = False

    async def put(self, message: Message) -> None:
        while not self._ended and self._is_full():
            self.full = True
            await self._wait()
        self.full = False
        self._messages.append(message)
        self._bytes += message.size_bytes
        self._changed.set()

    async def get(self) -> Message | None:
        """The next message; None after the end, or the error that it ended with."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            await self._wait()
        message = self._messages.popleft()
        self._bytes -= message.size_bytes
        self._changed.set()
        return message

    def end(self, error: ClientError | None) -> None:
        """Nothing more will come. What is there can still be taken."""
        self._ended = True
        self._error = error
        self._changed.set()

    def _is_full(self) -> bool:
        return len(self._messages) >= self._messages_max or self._bytes >= self._bytes_max

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


# Half of the time to live: one renewal may be lost, and the address is still ours.
_RENEW_AT_FRACTION: Final = 0.5
RETRY_S: Final = 5.0


class HeldRegistration(msgspec.Struct):
    """An address of ours."""

    payload: dict[str, Any]
    registration: Registration
    renew_at: float = 0.0

    def renewed(self, registration: Registration) -> None:
        self.registration = registration
        # What was given, which the hub bounds; a hub that does not tell gave what was asked for.
        ttl_s = registration.ttl_seconds or float(self.payload["ttlSeconds"])
        self.renew_at = time.monotonic() + _RENEW_AT_FRACTION * ttl_s

    def postponed(self) -> None:
        self.renew_at = time.monotonic() + RETRY_S


class HeldSubscription(msgspec.Struct):
    """A subscription of ours. Its id changes when a new session makes it again."""

    payload: dict[str, Any]
    sender: str | None
    subscription: Subscription


class PausedTargets:
    """Whom the hub has asked us not to write to for now."""

    __slots__ = ("_everybody", "_targets")

    def __init__(self) -> None:
        self._targets: set[str] = set()
        self._everybody = False

    def pause(self, targets: list[str] | None) -> None:
        self._everybody = self._everybody or targets is None
        self._targets.update(targets or ())

    def resume(self, targets: list[str] | None) -> None:
        if targets is None:
            self.clear()
        self._targets.difference_update(targets or ())

    def clear(self) -> None:
        self._targets.clear()
        self._everybody = False

    def __contains__(self, target: str) -> bool:
        return self._everybody or target in self._targets


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


_REGISTER_ATTEMPTS: Final = 3
EARLY_EVENTS_MAX: Final = 10_000


class SessionResources:
    """One session, the messages that have come, and the addresses and subscriptions that are ours."""

    def __init__(
        self, options: SessionOptions, inbox: Inbox, on_notice: Callable[[Message], None] | None
    ) -> None:
        self.inbox = inbox
        self.timeouts = options.timeouts
        self.session = HubSession(
            options,
            deliver=inbox.put,
            notice=self._noticed,
            restore=self._restore,
            is_behind=lambda: inbox.full,
        )
        self._on_notice = on_notice
        self._held: dict[str, HeldRegistration] = {}
        self._followed: dict[str, HeldSubscription] = {}
        self._watched: dict[str, PresenceWatch] = {}
        self._early: deque[dict[str, Any]] = deque(
            maxlen=EARLY_EVENTS_MAX
        )  # events of watches that just begin
        self._paused = PausedTargets()
        self._flow_changed = asyncio.Event()
        self._held_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self.session.start()
        self._begin(self._renewals())
        self._begin(self._watch_end())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.stop()
        self.inbox.end(None)
        for watching in self._watched.values():
            watching.end()

    # -- requests

    async def ask(
        self,
        kind: str,
        payload: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        on_part: Callable[[Any], None] | None = None,
        urgent: bool = False,
        is_ask: bool = True,
        **options: Any,
    ) -> Message:
        """Send, and wait for the answer. Some messages are answered though they are tells."""
        wait_s = self.timeouts.ask_s if timeout_s is None else timeout_s
        request = _make_request(kind, payload, ask=is_ask, **options)
        return await self.session.ask(request, wait_s, urgent=urgent, on_part=on_part)

    async def tell(self, kind: str, payload: Mapping[str, Any], **options: Any) -> str:
        """Send, and give the id of what was sent."""
        request = _make_request(kind, payload, ask=False, **options)
        await self.session.tell(request)
        return request.id

    async def until_open(self, target: str) -> None:
        """The hub asks for a pause when a recipient cannot keep up."""
        while target in self._paused:
            self._flow_changed.clear()
            await self._flow_changed.wait()

    async def refresh_token(self, token: str | None = None) -> int | None:
        fresh = token or self.session.options.token_now()
        if fresh is None:
            raise ValueError("there is no token to go on with")
        metadata = {"authToken": fresh, "nonce": secrets.token_hex(16)}
        answer = await self.ask("hub:refresh_token", {}, metadata=metadata)
        return answer.data.get("tokenExpiresAt")

    # -- addresses

    async def register(self, payload: dict[str, Any], *, urgent: bool = False) -> Registration:
        tries = 0
        while True:
            tries += 1
            try:
                answer = await self.ask(
                    "hub:register", payload, timeout_s=self.timeouts.register_s, urgent=urgent
                )
                break
            except ClientError as error:
                # Registering twice is registering once.
                if error.code != wire.TIMEOUT or tries == _REGISTER_ATTEMPTS:
                    raise
        registration: Registration = decode_answer(answer, Registration)
        held = self._held.setdefault(registration.actor_address, HeldRegistration(payload, registration))
        held.payload = payload
        held.renewed(registration)
        self._held_changed.set()
        return registration

    def let_go(self, address: str) -> None:
        """It is not renewed, nor taken again."""
        self._held.pop(address, None)

    async def _renewals(self) -> None:
        while True:
            due = min((held.renew_at for held in self._held.values()), default=None)
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._held_changed.wait()
                self._held_changed.clear()
            except TimeoutError:
                for held in [held for held in self._held.values() if held.renew_at <= time.monotonic()]:
                    await self._renew(held)

    async def _renew(self, held: HeldRegistration) -> None:
        held.postponed()  # unless it goes well, it is tried again soon
        try:
            answer = await self.ask("hub:renew", {"renewalToken": held.registration.renewal_token})
            held.renewed(decode_answer(answer, Registration))
        except ClientError as error:
            if error.code == "invalid_token":
                await self._register_again(held)

    async def _register_again(self, held: HeldRegistration) -> None:
        try:
            await self.register(held.payload)
        except ClientError:
            return

    # -- subscriptions

    async def subscribe(self, payload: dict[str, Any], sender: str | None) -> Subscription:
        subscription: Subscription = decode_answer(
            await self.ask("hub:subscribe", payload, sender=sender), Subscription
        )
        self._followed[subscription.subscription_id] = HeldSubscription(payload, sender, subscription)
        return subscription

    def unfollow(self, subscription: Subscription) -> str:
        """The id that it has by now: each session that makes it anew gives it another."""
        followed = self._followed.pop(subscription.subscription_id, None)
        return (subscription if followed is None else followed.subscription).subscription_id

    # -- presence

    async def discover(self, query: dict[str, Any], *, urgent: bool = False) -> AsyncIterator[Actor]:
        """All who match, page by page."""
        cursor: str | None = None
        while True:
            answer = await self.ask(
                "hub:discover", {**query, **wire.without_none(cursor=cursor)}, urgent=urgent
            )
            page: ActorPage = decode_answer(answer, ActorPage)
            for actor in page.actors:
                yield actor
            cursor = page.cursor
            if not page.has_more or cursor is None:
                return

    async def watch(self, payload: dict[str, Any]) -> PresenceWatch:
        watching = PresenceWatch(payload)
        await self._watch(watching)
        return watching

    async def unwatch(self, watching: PresenceWatch) -> None:
        if self._watched.pop(watching.id, None) is None:
            return
        try:
            await self.ask("hub:presence", {"action": "unwatch", "watchId": watching.id})
        except ClientError:
            return  # it ends with the session

    async def _watch(self, watching: PresenceWatch, *, urgent: bool = False) -> None:
        answer = await self.ask("hub:presence", watching.payload, urgent=urgent)
        await self._look(watching, decode_answer(answer, PresencePage), urgent=urgent)

    async def _look(self, watching: PresenceWatch, page: PresencePage, *, urgent: bool = False) -> None:
        """Everybody who was there at an offset; what came after it is told after it."""
        actors = page.actors
        if page.has_more:
            named = {name: watching.payload.get(name) for name in ("pattern", "capability")}
            query = wire.without_none(asOf=page.offset, **named)
            actors = [actor async for actor in self.discover(query, urgent=urgent)]
        watching.look(actors)
        watching.id = page.watch_id
        self._watched[watching.id] = watching
        early, self._early = self._early, deque(maxlen=EARLY_EVENTS_MAX)
        for payload in early:
            self._present(payload)

    def _present(self, payload: dict[str, Any]) -> None:
        watching = self._watched.get(payload["watchId"])
        if watching is None:
            self._early.append(payload)
        elif "actors" in payload:
            # We fell behind, and are told from the start.
            del self._watched[watching.id]
            self._begin(self._look(watching, msgspec.convert(payload, PresencePage)))
        else:
            watching.take(msgspec.convert(payload, Presence))

    # -- a new session

    async def _restore(self) -> None:
        """It knows nothing of the one before."""
        self._paused.clear()
        self._flow_changed.set()
        for address, held in list(self._held.items()):
            try:
                await self.register(held.payload, urgent=True)
            except ClientError as error:
                if error.extra.get("retryable"):
                    raise
                self.let_go(address)
        for known_as, followed in list(self._followed.items()):
            # A durable subscription goes on where it was; others begin anew, and that is now.
            payload = {name: value for name, value in followed.payload.items() if name != "from"}
            try:
                answer = await self.ask("hub:subscribe", payload, urgent=True, sender=followed.sender)
            except ClientError as error:
                if error.extra.get("retryable"):
                    raise
                del self._followed[known_as]
            else:
                followed.subscription = decode_answer(answer, Subscription)
        watched, self._watched = list(self._watched.values()), {}
        for watching in watched:
            await self._watch(watching, urgent=True)

    # -- what the hub says by itself

    def _noticed(self, message: Message) -> None:
        kind = message.type
        payload: dict[str, Any] = message.data or {}
        if kind == "hub:pause":
            self._paused.pause(payload.get("targets"))
        elif kind == "hub:resume":
            self._paused.resume(payload.get("targets"))
            self._flow_changed.set()
        elif kind == "hub:presence":
            self._present(payload)
        elif kind == "hub:unregistered":
            self.let_go(payload.get("actorAddress", ""))
        elif kind == "hub:token_expiring" and callable(self.session.options.token):
            self._begin(self._refresh())
        if self._on_notice is not None:
            self._on_notice(message)

    async def _refresh(self) -> None:
        try:
            await self.refresh_token()
        except ClientError:
            return  # the hub ends the session when the token's time is over, and that is told then

    async def _watch_end(self) -> None:
        await self.session.ended.wait()
        self.inbox.end(self.session.failure)
        for watching in self._watched.values():
            watching.end(self.session.failure)
        self._paused.clear()
        self._flow_changed.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make_request(kind: str, payload: Mapping[str, Any], *, ask: bool, **options: Any) -> OutgoingRequest:
    options["metadata"] = options.get("metadata") or {}
    return OutgoingRequest(id=new_id(now_ms()), type=kind, payload=payload, ask=ask, **options)
