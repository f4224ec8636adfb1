"""A hub session that reconnects: WebSocket, heartbeats, pending requests.

Questions that wait for their answers.

One WebSocket to the hub: opened, written, read, closed.

Staying connected: heartbeats, reconnecting with jitter, and what was open over it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from tailrace.client.errors import CONNECT_FAILED, INVALID_ANSWER, ClientError, error_from
from tailrace.client.hub import wire
from tailrace.client.hub.model import Message, Timeouts, Welcome, decode_answer
from tailrace.client.hub.wire import OutgoingRequest, connection_lost, error_from_message
from tailrace.client.transport import NOT_APPLIED_STATUSES, TRANSIENT_STATUSES, Retries
from tailrace.hub.envelope import new_id, parse_envelope
from tailrace.hub.errors import HubError


class PendingRequest:
    """One question, and what becomes of it."""

    __slots__ = ("answer", "on_part", "request")

    def __init__(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None) -> None:
        self.request = request
        self.on_part = on_part
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def fail(self, error: ClientError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class PendingRequests:
    """Open questions by the id of their request. A late answer finds nobody, and is dropped."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[str, PendingRequest] = {}

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._open.values()))

    def open(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None = None) -> PendingRequest:
        ask = self._open[request.id] = PendingRequest(request, on_part)
        return ask

    def close(self, ask: PendingRequest) -> None:
        self._open.pop(ask.request.id, None)
        if not ask.answer.cancel() and not ask.answer.cancelled():
            ask.answer.exception()  # looked at, so that asyncio does not complain that nobody did

    def take(self, message: Message) -> bool:
        """Whether somebody has waited for this."""
        ask = self._open.get(message.correlation_id or "")
        if ask is None or ask.answer.done():
            return False
        if message.type == "hub:broadcast_progress":
            return True
        if message.type == "hub:reply" and message.data.get("final") is False:
            if ask.on_part is not None:
                ask.on_part(message.data.get("data"))
            return True
        error = error_from_message(message)
        if error is None:
            ask.answer.set_result(message)
        else:
            ask.fail(error)
        return True

    def fail(self, error: ClientError) -> None:
        for ask in self:
            ask.fail(error)


# Larger than anything the hub sends, with room for its envelope.
_FRAME_BYTES_MAX: Final = 20 * 1024 * 1024
_CLOSE_S_MAX: Final = 2.0
_SUBPROTOCOL: Final = Subprotocol("signal-hub")


class HubConnection:
    """Errors of the socket become those of the client here, and nowhere else."""

    __slots__ = ("_socket",)

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame.decode())
        except ConnectionClosed as error:
            raise connection_lost(f"the connection to the hub was lost: {error}", sent=True) from error

    async def receive(self) -> bytes:
        try:
            text = await self._socket.recv()
        except ConnectionClosed as error:
            raise connection_lost(f"the connection to the hub was lost: {error}", sent=True) from error
        return text.encode() if isinstance(text, str) else text

    async def close(self) -> None:
        await self._socket.close()

    def abort(self) -> None:
        """The end without a goodbye, for a peer that does not answer."""
        self._socket.transport.abort()


async def open_connection(url: str, timeout_s: float) -> HubConnection:
    """A new socket. An answer that is no upgrade is the error that it tells."""
    try:
        socket = await connect(
            url,
            subprotocols=[_SUBPROTOCOL],
            compression=None,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S_MAX,
            # The heartbeat of the protocol tells more: that somebody reads what is sent.
            ping_interval=None,
            max_size=_FRAME_BYTES_MAX,
        )
    except InvalidStatus as error:
        answer = error.response
        headers = {name.lower(): value for name, value in answer.headers.raw_items()}
        raise error_from(answer.status_code, headers, bytes(answer.body or b"")) from error
    except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed) as error:
        raise ClientError(CONNECT_FAILED, f"no hub answers at {url}: {error}") from error
    except InvalidURI as error:
        raise ValueError(str(error)) from error
    return HubConnection(socket)


_DISCONNECT_S_MAX: Final = 2.0


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client reaches its hub, and who it says it is."""

    url: str
    address: str
    token: str | Callable[[], str] | None
    capabilities: tuple[str, ...]
    timeouts: Timeouts
    retries: Retries
    key: wire.SigningKey | None

    def token_now(self) -> str | None:
        return self.token() if callable(self.token) else self.token


class HubSession:
    """One session after the other, for as long as the client wants one.

    `deliver` takes messages for actors, and may make the socket wait. `notice` gets what the hub says by
    itself. `restore` brings back what a new session has forgotten.
    """

    def __init__(
        self,
        options: SessionOptions,
        *,
        deliver: Callable[[Message], Awaitable[None]],
        notice: Callable[[Message], None],
        restore: Callable[[], Awaitable[None]],
        is_behind: Callable[[], bool],
    ) -> None:
        self.options = options
        self.identity = options.address
        self.welcome: Welcome | None = None
        self.failure: ClientError | None = None
        self.asks = PendingRequests()
        self.ended = asyncio.Event()
        self._deliver = deliver
        self._notice = notice
        self._restore = restore
        self._is_behind = is_behind
        self._link: HubConnection | None = None
        self._ready = asyncio.Event()
        self._beat = asyncio.Event()
        self._goodbye: dict[str, Any] = {}
        self._failures = 0
        self._started = False
        self._complete = False
        self._task: asyncio.Task[None] | None = None

    # -- what callers use

    async def start(self) -> None:
        """Connect. Returns when the first session is there, or raises what prevented it."""
        assert self._task is None, "already connected"
        self._task = asyncio.create_task(self._run())
        await self._until_ready()

    async def ask(
        self,
        request: OutgoingRequest,
        timeout_s: float,
        *,
        urgent: bool = False,
        on_part: Callable[[Any], None] | None = None,
    ) -> Message:
        """Send, and wait for the answer. It is sent again after a lost connection, under the same id.

        What is urgent belongs to the making of a session, and is not sent again.
        """
        ask = self.asks.open(request, on_part)
        try:
            async with asyncio.timeout(timeout_s):
                if urgent or self._ready.is_set():
                    await self._write(request, quietly=not urgent)
                if not urgent:
                    self._raise_failure()
                return await ask.answer
        except TimeoutError:
            raise wire.timeout_error(request.type, timeout_s) from None
        finally:
            self.asks.close(ask)

    async def tell(self, request: OutgoingRequest) -> None:
        """Send, once. While there is no connection it waits for one."""
        try:
            async with asyncio.timeout(self.options.timeouts.ask_s):
                await self._until_ready()
        except TimeoutError:
            raise wire.connection_lost("there is no connection to the hub", sent=False) from None
        await self._write(request)

    async def stop(self) -> None:
        """Say goodbye, and end."""
        if self._task is None:
            return
        if self._link is not None and self._ready.is_set():
            request = OutgoingRequest(
                id=new_id(now_ms()), type="hub:disconnect", payload={"reason": "client_requested"}
            )
            try:
                await self.ask(request, _DISCONNECT_S_MAX, urgent=True)
            except ClientError:
                pass  # it ends in any case
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end(None)

    def drop(self) -> None:
        """Lose the connection as a broken network would; the session comes back by itself."""
        if self._link is not None:
            self._link.abort()

    # -- the life of the connection

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:
            # Nobody waits for this task: whoever waits for a message or an answer has to learn of it.
            self._end(ClientError(INVALID_ANSWER, f"the client failed: {error!r}"))
            raise

    async def _stay_connected(self) -> None:
        while True:
            pause_s: float
            try:
                link = await self._open()
            except (ClientError, ValueError) as error:
                pause = self._pause_after(error)
                if pause is None:
                    self._end(error if isinstance(error, ClientError) else ClientError("usage", str(error)))
                    return
                pause_s = pause
            else:
                await self._serve(link)
                reason = self._goodbye.get("reason")
                if reason in wire.FATAL_CODES:
                    self._end(ClientError(str(reason), f"the hub ended the session: {reason}"))
                    return
                pause_s = self._pause_now()
            await asyncio.sleep(pause_s)

    async def _open(self) -> HubConnection:
        """A socket on which the hub has said that we are connected."""
        options = self.options
        link = await open_connection(options.url, options.timeouts.connect_s)
        self._goodbye = {}
        try:
            async with asyncio.timeout(options.timeouts.connect_s):
                await self._introduce(link)
        except TimeoutError:
            await link.close()
            raise ClientError(CONNECT_FAILED, "the hub did not answer in time") from None
        except BaseException:
            link.abort()
            raise
        return link

    async def _introduce(self, link: HubConnection) -> None:
        options = self.options
        request = wire.connect_request(
            new_id(now_ms()),
            token=options.token_now(),
            capabilities=options.capabilities,
            resume_token=None if self.welcome is None else self.welcome.resume_token,
            ttl_ms=int(options.timeouts.connect_s * 1000),
        )
        try:
            await link.send(request.frame(options.address, now_ms(), options.key))
        except ClientError:
            pass  # a hub that takes no more connections says so and closes: what it said can still be read
        while True:
            answer = await self._receive(link)
            if (error := wire.error_from_message(answer)) is not None:
                raise error
            if answer.correlation_id == request.id:
                break
        self.welcome = decode_answer(answer, Welcome)
        self.identity = answer.metadata.get("actorIdentity") or options.address

    async def _serve(self, link: HubConnection) -> None:
        """Until the connection ends, however it does."""
        assert self.welcome is not None
        self._link = link
        helpers = [asyncio.create_task(self._heartbeats(link)), asyncio.create_task(self._resume(link))]
        try:
            while True:
                await self._take(await self._receive(link))
        except ClientError:
            pass
        finally:
            self._link = None
            self._ready.clear()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await link.close()

    async def _resume(self, link: HubConnection) -> None:
        """Bring back what a new session lacks, then what was asked before and not answered."""
        assert self.welcome is not None
        try:
            # A session that was lost before it had everything back is resumed without it.
            self._complete = self._complete and self.welcome.resumed
            if not self._complete:
                await self._restore()
                self._complete = True
            written = set[str]()
            while waiting := [ask.request for ask in self.asks if ask.request.id not in written]:
                for request in waiting:
                    await self._write(request, quietly=True)
                    written.add(request.id)
        except ClientError:
            link.abort()  # the next session tries again
            return
        self._failures = 0
        self._started = True
        self._ready.set()

    async def _heartbeats(self, link: HubConnection) -> None:
        assert self.welcome is not None
        while True:
            await asyncio.sleep(self.welcome.heartbeat_interval / 1000)
            self._beat.clear()
            moment_ms = now_ms()
            beat = OutgoingRequest(
                id=new_id(moment_ms), type="hub:heartbeat", payload={"timestamp": moment_ms}, ask=False
            )
            try:
                await self._write(beat)
                async with asyncio.timeout(self.options.timeouts.heartbeat_s):
                    await self._beat.wait()
            except TimeoutError:
                # While nobody takes the messages that came before it, the answer cannot have been read.
                if not self._is_behind():
                    link.abort()
            except ClientError:
                return

    # -- single messages

    async def _receive(self, link: HubConnection) -> Message:
        frame = await link.receive()
        try:
            return Message(parse_envelope(frame, _FRAME_BYTES_MAX))
        except HubError as error:
            raise ClientError(INVALID_ANSWER, f"the hub sent no envelope: {error.message}") from error

    async def _take(self, message: Message) -> None:
        kind = message.type
        if not kind.startswith("hub:"):
            await self._deliver(message)
        elif kind == "hub:heartbeat_ack":
            self._beat.set()
        elif not self.asks.take(message):
            if kind == "hub:disconnect":
                self._goodbye = message.data
            self._notice(message)

    async def _write(self, request: OutgoingRequest, *, quietly: bool = False) -> None:
        """`quietly`: whoever waits for the answer will see it sent again by the next session."""
        link = self._link
        try:
            if link is None:
                raise wire.connection_lost("there is no connection to the hub", sent=False)
            await link.send(request.frame(self.identity, now_ms(), self.options.key))
        except ClientError:
            if not quietly:
                raise

    # -- the end

    async def _until_ready(self) -> None:
        while not self._ready.is_set():
            self._raise_failure()
            waiting = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.ended)]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.ended.is_set():
            raise wire.connection_lost("the client is closed", sent=False)

    def _end(self, error: ClientError | None) -> None:
        self.failure = error
        self._ready.clear()
        self.ended.set()
        self.asks.fail(error or wire.connection_lost("the client was closed", sent=True))

    def _pause_after(self, error: Exception) -> float | None:
        """How long to wait after a connection that failed; None if another would fail as well."""
        if not isinstance(error, ClientError) or error.code in wire.FATAL_CODES:
            return None
        passing = error.status == 0 or error.status in NOT_APPLIED_STATUSES | TRANSIENT_STATUSES
        if not passing or (not self._started and self._failures + 1 >= self.options.retries.attempts_max):
            return None
        return self._pause_now() + wire.retry_after_from(error)

    def _pause_now(self) -> float:
        """What the hub has asked for; else longer each time, and never at once with everybody else."""
        asked_ms = self._goodbye.get("reconnectAfter")
        if isinstance(asked_ms, int | float):
            return asked_ms / 1000
        retries = self.options.retries
        ceiling = min(retries.delay_s_max, retries.delay_s_first * 2 ** min(self._failures, 30))
        self._failures += 1
        return ceiling * random.random()  # noqa: S311 - jitter, not a secret


def now_ms() -> int:
    return time.time_ns() // 1_000_000
