"""The async hub client, and the sync one, which runs it on an event loop in its own thread.

So the sync client sends heartbeats and renews addresses while the caller does something else. Every operation
is implemented once, in `AsyncHub`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from tailrace.client.client import AsyncContextManaged, ContextManaged
from tailrace.client.errors import (
    CONNECTION_LOST,
    ClientError,
    check_choice,
    check_integer,
    check_seconds,
    check_text,
)
from tailrace.client.hub import wire
from tailrace.client.hub.model import (
    ACK_LEVELS,
    Ack,
    AckLevel,
    Actor,
    Broadcast,
    Committed,
    MailboxPage,
    Message,
    Presence,
    Published,
    Registration,
    Subscription,
    Timeouts,
    decode_response,
)
from tailrace.client.hub.resources import Inbox, SessionResources
from tailrace.client.hub.session import SessionOptions
from tailrace.client.hub.wire import SigningKey, connection_lost, without_none
from tailrace.client.methods import present_as
from tailrace.client.transport import Retries

# The first connection is tried three times. An established session reconnects without limit, with an
# exponential back-off from 1 s to 30 s and full jitter.
RETRIES: Final = Retries(attempts_max=3, delay_s_first=1.0, delay_s_max=30.0)
INBOX_MESSAGES_MAX: Final = 2000
INBOX_BYTES_MAX: Final = 8 * 1024 * 1024
PAGE_SIZE: Final = 100
TTL_S: Final = 300
COMMITS: Final = ("auto", "manual")
PRIORITY_MAX: Final = 2
PRODUCER_ID_BYTES_MAX: Final = 128


class AsyncHub(AsyncContextManaged):
    """A client of the hub for one actor. Use it as a context manager, or call `connect` and `close`."""

    def __init__(
        self,
        base_url: str,
        *,
        address: str | None = None,
        token: str | Callable[[], str] | None = None,
        capabilities: Sequence[str] = (),
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        signing_key: wire.SigningKey | None = None,
        on_notice: Callable[[Message], None] | None = None,
        inbox_messages_max: int = INBOX_MESSAGES_MAX,
        inbox_bytes_max: int = INBOX_BYTES_MAX,
    ) -> None:
        options = SessionOptions(
            url=wire.socket_url(base_url),
            address=address or f"@(python/{secrets.token_hex(8)})",
            token=token,
            capabilities=tuple(capabilities),
            timeouts=timeouts or Timeouts(),
            retries=retries or RETRIES,
            key=signing_key,
        )
        check_integer("inbox_messages_max", inbox_messages_max, least=1)
        check_integer("inbox_bytes_max", inbox_bytes_max, least=1)
        inbox = Inbox(messages_max=inbox_messages_max, bytes_max=inbox_bytes_max)
        self._resources = SessionResources(options, inbox, on_notice)

    # -- the session

    async def connect(self) -> None:
        await self._resources.open()

    async def close(self) -> None:
        await self._resources.close()

    async def __aenter__(self) -> AsyncHub:
        await self.connect()
        return self

    @property
    def identity(self) -> str:
        """The identity assigned by the hub."""
        return self._resources.session.identity

    @property
    def session_id(self) -> str:
        welcome = self._resources.session.welcome
        return "" if welcome is None else welcome.session_id

    @property
    def resumed(self) -> bool:
        """Whether the session was resumed after the last lost connection."""
        welcome = self._resources.session.welcome
        return welcome is not None and welcome.resumed

    async def request(
        self,
        type: str,  # noqa: A002 - as the member is called
        payload: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """Send any message of the protocol that has a response, for operations without a method here."""
        return await self._resources.ask(type, payload or {}, metadata=metadata, timeout_s=timeout_s)

    async def refresh_token(self, token: str | None = None) -> int | None:
        """Continue with a new token. Returns its expiry in milliseconds since 1970."""
        return await self._resources.refresh_token(token)

    # -- addresses

    async def register(
        self,
        address: str | None = None,
        *,
        capabilities: Sequence[str] = ("actor",),
        metadata: Mapping[str, Any] | None = None,
        ttl_s: int = TTL_S,
        durable: bool = False,
        commit: str = "auto",
        push: bool | None = None,
        in_flight_max: int | None = None,
        ack_timeout_s: int | None = None,
        deliveries_max: int | None = None,
    ) -> Registration:
        """Register an address. It is renewed automatically, and registered again by every new session."""
        check_seconds("ttl_s", ttl_s)
        check_choice("commit", commit, COMMITS)
        if not capabilities:
            raise ValueError("capabilities must not be empty")
        for name, value in (
            ("in_flight_max", in_flight_max),
            ("ack_timeout_s", ack_timeout_s),
            ("deliveries_max", deliveries_max),
        ):
            if value is not None:
                check_integer(name, value, least=1)
        payload = without_none(
            actorAddress=address or self.identity,
            capabilities=list(capabilities),
            metadata=dict(metadata or {}),
            ttlSeconds=ttl_s,
            durable=durable,
            commit=commit,
            push=push,
            maxInFlight=in_flight_max,
            ackTimeout=ack_timeout_s,
            maxDeliver=deliveries_max,
        )
        return await self._resources.register(payload)

    async def unregister(self, address: str, *, delete_mailbox: bool = False) -> None:
        self._resources.forget_registration(address)
        payload = without_none(actorAddress=address, deleteMailbox=delete_mailbox or None)
        await self._resources.ask("hub:unregister", payload)
        self._resources.forget_registration(address)  # a new session may have restored it meanwhile

    async def discover(
        self,
        pattern: str = "*",
        *,
        capabilities: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        as_of: int | str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[Actor]:
        """All actors that match, sorted by address, page by page as needed."""
        check_integer("page_size", page_size, least=1)
        query = without_none(
            pattern=pattern,
            capabilities=list(capabilities) or None,
            metadata=dict(metadata) if metadata else None,
            asOf=as_of,
            limit=page_size,
        )
        async for actor in self._resources.discover(query):
            yield actor

    async def watch(self, pattern: str = "*", *, capability: str | None = None) -> AsyncIterator[Presence]:
        """The present actors, then those that join, leave or change. Survives lost sessions."""
        watching = await self._resources.watch(
            without_none(action="watch", pattern=pattern, capability=capability)
        )
        try:
            while (event := await watching.next()) is not None:
                yield event
        finally:
            await self._resources.unwatch(watching)

    # -- messages

    async def send(
        self,
        to: str,
        type: str,  # noqa: A002
        data: Any = None,
        *,
        ack: AckLevel | None = None,
        sender: str | None = None,
        durable: bool | None = None,
        priority: int | None = None,
        producer: tuple[str, int, int] | None = None,
        correlation_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_ms: int | None = None,
        timeout_s: float | None = None,
    ) -> Ack:
        """Send a message. With `ack` it returns when that level is reached, otherwise once it is sent."""
        if ack is not None:
            check_choice("ack", ack, ACK_LEVELS)
        if ttl_ms is not None:
            check_integer("ttl_ms", ttl_ms, least=1)
        _check_timeout(timeout_s)
        extended = _metadata(metadata, priority, producer)
        await self._resources.wait_until_resumed(to)
        options: dict[str, Any] = {
            "metadata": extended,
            "sender": sender,
            "correlation_id": correlation_id,
            "ttl_ms": ttl_ms,
        }
        payload = {
            "to": to,
            "type": type,
            "data": wire.to_payload_data(data),
            **without_none(ack=ack, durable=durable),
        }
        if ack is None:
            return Ack(await self._resources.tell("hub:send", payload, **options), "sent")
        return decode_response(
            await self._resources.ask("hub:send", payload, timeout_s=timeout_s, **options), Ack
        )

    async def ask(
        self,
        to: str,
        type: str,  # noqa: A002
        data: Any = None,
        *,
        sender: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_part: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send a request to an actor and wait for the reply; `on_part` gets those before the final one."""
        _check_timeout(timeout_s)
        await self._resources.wait_until_resumed(to)
        wait_s = self._resources.timeouts.ask_s if timeout_s is None else timeout_s
        response = await self._resources.ask(
            "hub:send",
            {"to": to, "type": type, "data": wire.to_payload_data(data), "expectReply": True},
            metadata=metadata,
            sender=sender,
            ttl_ms=max(1, int(wait_s * 1000)),
            timeout_s=wait_s,
            on_part=on_part,
        )
        return wire.reply_data(response)

    async def reply(self, message: Message, data: Any = None, *, final: bool = True) -> None:
        """Reply to a message that expects it. All replies but the last one are sent with `final=False`."""
        await self._reply(message, {"ok": True, "data": wire.to_payload_data(data), "final": final})

    async def reply_error(self, message: Message, code: str, text: str) -> None:
        """Reply with an error. The asker gets an error with this code."""
        await self._reply(message, {"ok": False, "error": {"code": code, "message": text}, "final": True})

    async def broadcast(
        self,
        type: str,  # noqa: A002
        data: Any = None,
        *,
        pattern: str | None = None,
        capability: str | None = None,
        exclude_self: bool = True,
        sender: str | None = None,
        timeout_s: float | None = None,
    ) -> Broadcast:
        """Send to all registered actors, or to those that match."""
        _check_timeout(timeout_s)
        payload = {
            "type": type,
            "data": wire.to_payload_data(data),
            "excludeSelf": exclude_self,
            **without_none(pattern=pattern),
        }
        metadata = without_none(targetCapability=capability)
        response = await self._resources.ask(
            "hub:broadcast", payload, metadata=metadata, sender=sender, timeout_s=timeout_s, is_ask=False
        )
        return decode_response(response, Broadcast)

    async def messages(self) -> AsyncIterator[Message]:
        """Messages for all addresses and subscriptions of this client, until it is closed."""
        while (message := await self._resources.inbox.get()) is not None:
            yield message

    async def next_message(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after the timeout or when the client is closed."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._resources.inbox.get()
        except TimeoutError:
            return None

    # -- topics

    async def subscribe(
        self,
        topic: str,
        *,
        durable: bool = False,
        group: str | None = None,
        name: str | None = None,
        start: str | int | None = None,
        sender: str | None = None,
    ) -> Subscription:
        """Subscribe to a topic. `+` matches one segment, `#` at the end all remaining ones."""
        payload = without_none(topic=topic, durable=durable, group=group, name=name)
        if start is not None:
            payload["from"] = start
        return await self._resources.subscribe(payload, sender)

    async def unsubscribe(self, subscription: Subscription) -> None:
        identifier = self._resources.unfollow(subscription)
        await self._resources.ask("hub:unsubscribe", {"subscriptionId": identifier})

    async def publish(
        self,
        topic: str,
        type: str,  # noqa: A002
        data: Any = None,
        *,
        durable: bool | None = None,
        producer: tuple[str, int, int] | None = None,
        metadata: Mapping[str, Any] | None = None,
        sender: str | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        _check_timeout(timeout_s)
        payload = {
            "topic": topic,
            "type": type,
            "data": wire.to_payload_data(data),
            **without_none(durable=durable),
        }
        response = await self._resources.ask(
            "hub:publish",
            payload,
            metadata=_metadata(metadata, None, producer),
            sender=sender,
            timeout_s=timeout_s,
        )
        return decode_response(response, Published)

    # -- mailboxes

    async def read_mailbox(
        self,
        address: str | None = None,
        *,
        offset: str = "committed",
        since: int | str | None = None,
        limit: int = PAGE_SIZE,
        stream: str | None = None,
    ) -> MailboxPage:
        """A page of the messages stored for an address. Reading commits nothing."""
        check_integer("limit", limit, least=1)
        payload = without_none(
            actorAddress=address or self.identity, offset=offset, since=since, limit=limit, stream=stream
        )
        return decode_response(await self._resources.ask("hub:mailbox_read", payload), MailboxPage)

    async def commit_offset(
        self,
        offset: str,
        *,
        address: str | None = None,
        stream: str | None = None,
        reject: Mapping[str, str] | None = None,
    ) -> Committed:
        """Commit everything up to an offset; `reject` has the reasons for entries that were not processed."""
        rejected = [{"offset": at, "reason": reason} for at, reason in (reject or {}).items()]
        payload = without_none(
            actorAddress=address or self.identity, offset=offset, stream=stream, reject=rejected or None
        )
        return decode_response(await self._resources.ask("hub:mailbox_commit", payload), Committed)

    async def commit(self, message: Message, *, wait: bool = True) -> None:
        """Commit a stored message and those before it; in a durable group only the message itself.

        Without `wait` it does not wait for the response.
        """
        if message.offset is None:
            return
        payload = without_none(
            actorAddress=message.to,
            stream=message.stream,
            offset=message.offset,
            subscriptionId=message.subscription_id,
        )
        if wait:
            await self._resources.ask("hub:mailbox_commit", payload)
        else:
            await self._resources.tell("hub:mailbox_commit", payload)

    async def commit_each(self, messages: Sequence[Message]) -> None:
        """Commit exactly these stored messages, for durable groups."""
        places: dict[tuple[str, str | None, str | None], list[str]] = {}
        for message in messages:
            if message.offset is not None:
                place = (message.to, message.stream, message.subscription_id)
                places.setdefault(place, []).append(message.offset)
        for (address, stream, subscription_id), offsets in places.items():
            payload = without_none(
                actorAddress=address, stream=stream, subscriptionId=subscription_id, offsets=offsets
            )
            await self._resources.ask("hub:mailbox_commit", payload)

    async def follow(
        self, address: str | None = None, *, capabilities: Sequence[str] = ("actor",), **registering: Any
    ) -> AsyncIterator[Message]:
        """The messages of a durable address, with at-least-once processing.

        A message is committed when the next one is requested. If the caller stops before that, it is
        redelivered.
        """
        await self.register(address, capabilities=capabilities, durable=True, commit="manual", **registering)
        async for message in self.messages():
            yield message
            try:
                await self.commit(message, wait=False)
            except ClientError as error:
                # A commit that is lost with its connection only means that the message is redelivered.
                if error.code != CONNECTION_LOST:
                    raise

    async def _reply(self, message: Message, payload: dict[str, Any]) -> None:
        await self._resources.tell("hub:reply", payload, correlation_id=message.id, sender=message.to or None)


def _metadata(
    metadata: Mapping[str, Any] | None, priority: int | None, producer: tuple[str, int, int] | None
) -> dict[str, Any]:
    if priority is not None:
        check_integer("priority", priority, most=PRIORITY_MAX)
    parts = None
    if producer is not None:
        identifier, epoch, seq = producer
        check_text("producer id", identifier, PRODUCER_ID_BYTES_MAX)
        check_integer("producer epoch", epoch)
        check_integer("producer seq", seq)
        parts = {"id": identifier, "epoch": epoch, "seq": seq}
    return {**(metadata or {}), **without_none(priority=priority, producer=parts)}


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)


T = TypeVar("T")
P = ParamSpec("P")


def blocking(
    method: Callable[Concatenate[AsyncHub, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Hub, P], T]:
    """A method that runs one of the async client and blocks until its result is there."""

    def blocking_method(self: Hub, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(lambda hub: method(hub, *args, **kwargs))

    return present_as(blocking_method, method)


def blocking_iterator(
    method: Callable[Concatenate[AsyncHub, P], AsyncIterator[T]],
) -> Callable[Concatenate[Hub, P], Iterator[T]]:
    """A method that returns an async iterator of the async client as a blocking one."""

    def blocking_method(self: Hub, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self.iterate(lambda hub: method(hub, *args, **kwargs))

    return present_as(blocking_method, method, "Iterator[{}]")


class Hub(ContextManaged):
    """The sync client of the hub. Can be shared between threads. Use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        address: str | None = None,
        token: str | Callable[[], str] | None = None,
        capabilities: Sequence[str] = (),
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        signing_key: SigningKey | None = None,
        on_notice: Callable[[Message], None] | None = None,
    ) -> None:
        self._hub = AsyncHub(
            base_url,
            address=address,
            token=token,
            capabilities=capabilities,
            timeouts=timeouts,
            retries=retries,
            signing_key=signing_key,
            on_notice=on_notice,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tailrace-hub", daemon=True)

    def connect(self) -> None:
        self._thread.start()
        self.run(AsyncHub.connect)

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(AsyncHub.close)
            self.run(lambda _: self._loop.shutdown_asyncgens())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> Hub:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def identity(self) -> str:
        """The identity assigned by the hub."""
        return self._hub.identity

    @property
    def session_id(self) -> str:
        return self._hub.session_id

    @property
    def resumed(self) -> bool:
        """Whether the session was resumed after the last lost connection."""
        return self._hub.resumed

    request = blocking(AsyncHub.request)
    refresh_token = blocking(AsyncHub.refresh_token)
    register = blocking(AsyncHub.register)
    unregister = blocking(AsyncHub.unregister)
    discover = blocking_iterator(AsyncHub.discover)
    watch = blocking_iterator(AsyncHub.watch)
    send = blocking(AsyncHub.send)
    ask = blocking(AsyncHub.ask)
    reply = blocking(AsyncHub.reply)
    reply_error = blocking(AsyncHub.reply_error)
    broadcast = blocking(AsyncHub.broadcast)
    messages = blocking_iterator(AsyncHub.messages)
    next_message = blocking(AsyncHub.next_message)
    subscribe = blocking(AsyncHub.subscribe)
    unsubscribe = blocking(AsyncHub.unsubscribe)
    publish = blocking(AsyncHub.publish)
    read_mailbox = blocking(AsyncHub.read_mailbox)
    commit_offset = blocking(AsyncHub.commit_offset)
    commit = blocking(AsyncHub.commit)
    commit_each = blocking(AsyncHub.commit_each)
    follow = blocking_iterator(AsyncHub.follow)

    def run(self, work: Callable[[AsyncHub], Coroutine[Any, Any, T]]) -> T:
        """Run an operation of the async client and wait for it."""
        if not self._thread.is_alive():
            raise connection_lost("the client is not connected", sent=False)
        waiting = asyncio.run_coroutine_threadsafe(work(self._hub), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()  # for example on Ctrl-C: the caller no longer waits
            raise

    def iterate(self, begin: Callable[[AsyncHub], AsyncIterator[T]]) -> Iterator[T]:
        source, end = begin(self._hub), object()
        while (item := self.run(lambda _: _next_or_end(source, end))) is not end:
            yield item  # pyright: ignore[reportReturnType]


async def _next_or_end(source: AsyncIterator[T], end: object) -> T | object:
    return await anext(source, end)
