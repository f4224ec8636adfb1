"""An actor's place at the hub: what it holds there, kept over renewals, pauses and lost sessions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from tailrace.client.error import ClientError
from tailrace.client.hub import wire
from tailrace.client.hub.inbox import Inbox
from tailrace.client.hub.keeping import HeldRegistration, HeldSubscription, PausedTargets
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
from tailrace.client.hub.watching import PresenceWatch
from tailrace.client.hub.wire import OutgoingRequest
from tailrace.hub.ids import new_id

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
