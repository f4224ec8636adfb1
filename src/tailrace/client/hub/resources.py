"""Registrations, subscriptions and presence watches of a hub client over reconnects, and its inbox."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
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
    decode_response,
)
from tailrace.client.hub.session import HubSession, SessionOptions, now_ms
from tailrace.client.hub.wire import OutgoingRequest
from tailrace.common.tasks import TaskSet
from tailrace.hub.envelope import new_id


class Inbox:
    """Received messages in order, bounded in number and bytes. While it is full, the socket is not read."""

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
        """The next message; None after the end, or raises the error that ended it."""
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
        """No more messages will arrive. Those that are here can still be read."""
        self._ended = True
        self._error = error
        self._changed.set()

    def _is_full(self) -> bool:
        return len(self._messages) >= self._messages_max or self._bytes >= self._bytes_max

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


# At half of the time to live, so that one renewal may be lost.
_RENEW_AT_FRACTION: Final = 0.5
RETRY_S: Final = 5.0


class HeldRegistration(msgspec.Struct):
    """A registered address."""

    payload: dict[str, Any]
    registration: Registration
    renew_at: float = 0.0

    def renewed(self, registration: Registration) -> None:
        self.registration = registration
        # The hub may limit the TTL; one that does not report it granted the requested one.
        ttl_s = registration.ttl_seconds or float(self.payload["ttlSeconds"])
        self.renew_at = time.monotonic() + _RENEW_AT_FRACTION * ttl_s

    def schedule_retry(self) -> None:
        self.renew_at = time.monotonic() + RETRY_S


class HeldSubscription(msgspec.Struct):
    """A subscription. Its id changes when a new session recreates it."""

    payload: dict[str, Any]
    sender: str | None
    subscription: Subscription


class PausedTargets:
    """Recipients that the hub has paused."""

    __slots__ = ("_all", "_targets")

    def __init__(self) -> None:
        self._targets: set[str] = set()
        self._all = False

    def pause(self, targets: list[str] | None) -> None:
        self._all = self._all or targets is None
        self._targets.update(targets or ())

    def resume(self, targets: list[str] | None) -> None:
        if targets is None:
            self.clear()
        self._targets.difference_update(targets or ())

    def clear(self) -> None:
        self._targets.clear()
        self._all = False

    def __contains__(self, target: str) -> bool:
        return self._all or target in self._targets


EVENTS_MAX: Final = 10_000
GONE_EVENTS: Final = frozenset({"left", "expired"})


class PresenceWatch:
    """One presence watch. Events missed between connections appear as the difference of two snapshots."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.payload = payload
        self.id = ""  # in the current session; empty until the hub has the watch
        self._loading: PresencePage | None = None
        self._early: list[Presence] = []  # events after the snapshot that is loading
        self._present_actors: dict[str, Actor] = {}
        self._events: deque[Presence] = deque()
        self._changed = asyncio.Event()
        self._error: ClientError | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def begin_snapshot(self, page: PresencePage) -> None:
        """Start loading a snapshot, which replaces one that is still loading."""
        self.id, self._loading = page.watch_id, page
        self._early.clear()

    def is_loading(self, page: PresencePage) -> bool:
        return self._loading is page

    def apply_snapshot(self, actors: list[Actor]) -> None:
        """Replace the known actors by a snapshot, emit the differences, then apply the events after it."""
        # A durable address without a connection is registered, but its actor has left.
        now = {actor.address: actor for actor in actors if actor.connection_id != ""}
        for address in [address for address in self._present_actors if address not in now]:
            self._emit(Presence("left", address, [], self._present_actors.pop(address).version))
        for address, actor in now.items():
            known = self._present_actors.get(address)
            if known is None or known.version != actor.version:
                event = "joined" if known is None else "updated"
                self._emit(Presence(event, address, actor.capabilities, actor.version))
        self._present_actors = now
        self._loading, early, self._early = None, self._early, []
        for event in early:
            self.apply_event(event)

    def apply_event(self, event: Presence) -> None:
        """Apply an event: an actor joined, left or changed."""
        if self._loading is not None:
            self._early.append(event)
            if len(self._early) > EVENTS_MAX:
                self._end_overflown()
            return
        known = self._present_actors.get(event.actor_address)
        if event.event in GONE_EVENTS:
            if self._present_actors.pop(event.actor_address, None) is None:
                return
        elif known is not None and known.version >= event.version:
            return  # the snapshot already contained it
        else:
            self._present_actors[event.actor_address] = Actor(
                event.actor_address, event.capabilities, version=event.version
            )
        self._emit(event)

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

    def _emit(self, event: Presence) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._end_overflown()
        elif not self._ended:
            self._events.append(event)
            self._changed.set()

    def _end_overflown(self) -> None:
        self._events.clear()
        self._early.clear()
        self.end(ClientError("inbox_full", f"more than {EVENTS_MAX} unread presence events"))


_REGISTER_ATTEMPTS: Final = 3
EARLY_EVENTS_MAX: Final = 10_000


class SessionResources:
    """One session, its inbox, and the registrations and subscriptions of the client."""

    def __init__(
        self, options: SessionOptions, inbox: Inbox, on_notice: Callable[[Message], None] | None
    ) -> None:
        self.inbox = inbox
        self.timeouts = options.timeouts
        self.session = HubSession(
            options,
            deliver=inbox.put,
            notice=self._on_hub_notice,
            connected=self._on_connected,
            restore=self._restore,
            is_behind=lambda: inbox.full,
        )
        self._on_notice = on_notice
        self._held: dict[str, HeldRegistration] = {}
        self._followed: dict[str, HeldSubscription] = {}
        self._watches: dict[PresenceWatch, None] = {}
        self._watched: dict[str, PresenceWatch] = {}  # by their ids in the current session
        self._opening = 0  # watches whose id is not known yet
        self._unwatching: set[str] = set()
        # Messages of the hub with unknown ids, while watches are opened.
        self._early: deque[dict[str, Any]] = deque(maxlen=EARLY_EVENTS_MAX)
        self._paused = PausedTargets()
        self._flow_changed = asyncio.Event()
        self._held_changed = asyncio.Event()
        self._tasks = TaskSet()

    async def open(self) -> None:
        await self.session.start()
        self._tasks.start(self._renewals())
        self._tasks.start(self._watch_end())

    async def close(self) -> None:
        await self._tasks.close()
        await self.session.stop()
        self.inbox.end(None)
        for watching in self._watches:
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
        """Send, and wait for the response. Some messages are answered although they are tells."""
        wait_s = self.timeouts.ask_s if timeout_s is None else timeout_s
        request = _make_request(kind, payload, ask=is_ask, **options)
        return await self.session.ask(request, wait_s, urgent=urgent, on_part=on_part)

    async def tell(self, kind: str, payload: Mapping[str, Any], **options: Any) -> str:
        """Send, and return the message id."""
        request = _make_request(kind, payload, ask=False, **options)
        await self.session.tell(request)
        return request.id

    async def wait_until_resumed(self, target: str) -> None:
        """Wait while the hub has paused this recipient because it cannot keep up."""
        while target in self._paused:
            self._flow_changed.clear()
            await self._flow_changed.wait()

    async def refresh_token(self, token: str | None = None) -> int | None:
        new_token = token or self.session.options.token_now()
        if new_token is None:
            raise ValueError("no token to refresh the session with")
        metadata = {"authToken": new_token, "nonce": secrets.token_hex(16)}
        response = await self.ask("hub:refresh_token", {}, metadata=metadata)
        return response.data.get("tokenExpiresAt")

    # -- addresses

    async def register(self, payload: dict[str, Any], *, urgent: bool = False) -> Registration:
        tries = 0
        while True:
            tries += 1
            try:
                response = await self.ask(
                    "hub:register", payload, timeout_s=self.timeouts.register_s, urgent=urgent
                )
                break
            except ClientError as error:
                # Registering is idempotent.
                if error.code != wire.TIMEOUT or tries == _REGISTER_ATTEMPTS:
                    raise
        registration: Registration = decode_response(response, Registration)
        held = self._held.setdefault(registration.actor_address, HeldRegistration(payload, registration))
        held.payload = payload
        held.renewed(registration)
        self._held_changed.set()
        return registration

    def forget_registration(self, address: str) -> None:
        """Stop renewing and restoring a registration."""
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
        held.schedule_retry()  # unless it succeeds, it is retried soon
        try:
            response = await self.ask("hub:renew", {"renewalToken": held.registration.renewal_token})
            held.renewed(decode_response(response, Registration))
        except ClientError as error:
            if error.code == "invalid_token":
                await self._register_again(held)

    async def _register_again(self, held: HeldRegistration) -> None:
        if self._held.get(held.registration.actor_address) is not held:
            return  # it was unregistered meanwhile
        try:
            await self.register(held.payload)
        except ClientError:
            return

    # -- subscriptions

    async def subscribe(self, payload: dict[str, Any], sender: str | None) -> Subscription:
        subscription: Subscription = decode_response(
            await self.ask("hub:subscribe", payload, sender=sender), Subscription
        )
        self._followed[subscription.subscription_id] = HeldSubscription(payload, sender, subscription)
        return subscription

    def unfollow(self, subscription: Subscription) -> str:
        """The current id: each session that recreates a subscription gives it another."""
        followed = self._followed.pop(subscription.subscription_id, None)
        return (subscription if followed is None else followed.subscription).subscription_id

    async def _unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription that was restored while the caller ended it."""
        try:
            await self.ask("hub:unsubscribe", {"subscriptionId": subscription.subscription_id})
        except ClientError:
            return  # it ends with the session

    # -- presence

    async def discover(self, query: dict[str, Any], *, urgent: bool = False) -> AsyncIterator[Actor]:
        """All matching actors, page by page."""
        cursor: str | None = None
        while True:
            response = await self.ask(
                "hub:discover", {**query, **wire.without_none(cursor=cursor)}, urgent=urgent
            )
            page: ActorPage = decode_response(response, ActorPage)
            for actor in page.actors:
                yield actor
            cursor = page.cursor
            if not page.has_more or cursor is None:
                return

    async def watch(self, payload: dict[str, Any]) -> PresenceWatch:
        watching = PresenceWatch(payload)
        try:
            await self._open_watch(watching)
        except BaseException:
            self._end_watch(watching)
            self._tasks.start(self._unwatch(watching.id))
            raise
        return watching

    async def unwatch(self, watching: PresenceWatch) -> None:
        self._end_watch(watching)
        await self._unwatch(watching.id)

    async def _unwatch(self, watch_id: str, *, urgent: bool = False) -> None:
        if not watch_id or watch_id in self._unwatching:
            return
        self._unwatching.add(watch_id)
        try:
            await self.ask("hub:presence", {"action": "unwatch", "watchId": watch_id}, urgent=urgent)
        except ClientError:
            return  # it ends with the session
        finally:
            self._unwatching.discard(watch_id)

    def _end_watch(self, watching: PresenceWatch, error: ClientError | None = None) -> None:
        self._watches.pop(watching, None)
        self._watched.pop(watching.id, None)
        watching.end(error)

    async def _open_watch(self, watching: PresenceWatch, *, urgent: bool = False) -> None:
        self._opening += 1
        try:
            response = await self.ask("hub:presence", watching.payload, urgent=urgent)
            page: PresencePage = decode_response(response, PresencePage)
            if watching.ended:
                self._tasks.start(self._unwatch(page.watch_id))
                return
            watching.begin_snapshot(page)
            self._watches[watching] = None
            self._watched[watching.id] = watching
        finally:
            self._opening -= 1
            early, self._early = self._early, deque(maxlen=EARLY_EVENTS_MAX)
            for payload in early:
                self._on_presence(payload)
        await self._load_snapshot(watching, page, urgent=urgent)

    async def _load_snapshot(
        self, watching: PresenceWatch, page: PresencePage, *, urgent: bool = False
    ) -> None:
        """Load the snapshot at an offset, then apply the events after it."""
        actors = page.actors
        if page.has_more:
            named = {name: watching.payload.get(name) for name in ("pattern", "capability")}
            query = wire.without_none(asOf=page.offset, **named)
            try:
                actors = [actor async for actor in self.discover(query, urgent=urgent)]
            except ClientError:
                if watching.is_loading(page):
                    raise
        if watching.is_loading(page):
            watching.apply_snapshot(actors)

    async def _load_new_snapshot(self, watching: PresenceWatch, page: PresencePage) -> None:
        try:
            await self._load_snapshot(watching, page)
        except ClientError as error:
            self._end_watch(watching, error)
            await self._unwatch(page.watch_id)

    def _on_presence(self, payload: dict[str, Any]) -> None:
        watch_id: str = payload["watchId"]
        watching = self._watched.get(watch_id)
        if payload.get("event") == "unwatched":
            return  # the second response to a request that was sent twice
        if watching is None and self._opening:
            self._early.append(payload)
        elif watching is None:
            # The response with this id was lost, or the watch was ended. It counts towards the limit of the
            # session, so it is removed even before the session is ready.
            self._tasks.start(self._unwatch(watch_id, urgent=True))
        elif "actors" in payload:
            # Events were lost, so the hub sends a new snapshot.
            page = msgspec.convert(payload, PresencePage)
            watching.begin_snapshot(page)
            self._tasks.start(self._load_new_snapshot(watching, page))
        else:
            watching.apply_event(msgspec.convert(payload, Presence))

    # -- a new session

    def _on_connected(self, resumed: bool) -> None:
        """The hub keeps no pauses of a lost connection, and no watches of a lost session."""
        self._paused.clear()
        self._flow_changed.set()
        if not resumed:
            self._watched.clear()
            for watching in self._watches:
                watching.id = ""

    async def _restore(self) -> None:
        """Restore the state of the client in a new session."""
        for address, held in list(self._held.items()):
            try:
                await self.register(held.payload, urgent=True)
            except ClientError as error:
                if error.extra.get("retryable"):
                    raise
                self.forget_registration(address)
        for known_as, followed in list(self._followed.items()):
            # A durable subscription continues where it was; others start at the current end.
            payload = {name: value for name, value in followed.payload.items() if name != "from"}
            try:
                response = await self.ask("hub:subscribe", payload, urgent=True, sender=followed.sender)
            except ClientError as error:
                if error.extra.get("retryable"):
                    raise
                self._followed.pop(known_as, None)
            else:
                followed.subscription = decode_response(response, Subscription)
                if known_as not in self._followed:
                    self._tasks.start(self._unsubscribe(followed.subscription))
        # A session that was lost in the middle of this still has the watches with an id.
        for watching in [watching for watching in self._watches if not watching.id]:
            try:
                await self._open_watch(watching, urgent=True)
            except ClientError as error:
                if error.extra.get("retryable"):
                    raise
                self._end_watch(watching, error)

    # -- messages that the hub sends by itself

    def _on_hub_notice(self, message: Message) -> None:
        kind = message.type
        payload: dict[str, Any] = message.data or {}
        if kind == "hub:pause":
            self._paused.pause(payload.get("targets"))
        elif kind == "hub:resume":
            self._paused.resume(payload.get("targets"))
            self._flow_changed.set()
        elif kind == "hub:presence":
            self._on_presence(payload)
        elif kind == "hub:unregistered":
            self.forget_registration(payload.get("actorAddress", ""))
        elif kind == "hub:token_expiring" and callable(self.session.options.token):
            self._tasks.start(self._refresh())
        if self._on_notice is not None:
            self._on_notice(message)

    async def _refresh(self) -> None:
        try:
            await self.refresh_token()
        except ClientError:
            return  # the hub ends the session when the token expires, and reports it then

    async def _watch_end(self) -> None:
        await self.session.ended.wait()
        self.inbox.end(self.session.failure)
        for watching in self._watches:
            watching.end(self.session.failure)
        self._paused.clear()
        self._flow_changed.set()


def _make_request(kind: str, payload: Mapping[str, Any], *, ask: bool, **options: Any) -> OutgoingRequest:
    options["metadata"] = options.get("metadata") or {}
    return OutgoingRequest(id=new_id(now_ms()), type=kind, payload=payload, ask=ask, **options)
