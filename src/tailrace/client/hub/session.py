"""A hub session that reconnects: WebSocket, heartbeats, pending requests.

After a lost connection the session is resumed or restored, and pending requests are sent again under their
ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from tailrace.client.errors import CONNECT_FAILED, INVALID_ANSWER, ClientError, error_from
from tailrace.client.hub import wire
from tailrace.client.hub.model import Message, Timeouts, Welcome, decode_response
from tailrace.client.hub.wire import OutgoingRequest, connection_lost, error_from_message
from tailrace.client.transport import NOT_APPLIED_STATUSES, TRANSIENT_STATUSES, Retries
from tailrace.common.backoff import backoff_delay
from tailrace.common.tasks import TaskSet
from tailrace.hub.envelope import new_id, parse_envelope
from tailrace.hub.errors import HubError


class PendingRequest:
    """One request and its future response."""

    __slots__ = ("on_part", "request", "response")

    def __init__(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None) -> None:
        self.request = request
        self.on_part = on_part
        self.response: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def fail(self, error: ClientError) -> None:
        if not self.response.done():
            self.response.set_exception(error)


class PendingRequests:
    """Pending requests by id. A late response is dropped."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[str, PendingRequest] = {}

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._open.values()))

    def open(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None = None) -> PendingRequest:
        pending = self._open[request.id] = PendingRequest(request, on_part)
        return pending

    def close(self, pending: PendingRequest) -> None:
        self._open.pop(pending.request.id, None)
        if not pending.response.cancel() and not pending.response.cancelled():
            pending.response.exception()  # retrieved, so that asyncio does not warn about it

    def resolve(self, message: Message) -> bool:
        """Pass a message to the request that waits for it; False if there is none."""
        pending = self._open.get(message.correlation_id or "")
        if pending is None or pending.response.done():
            return False
        if message.type == "hub:broadcast_progress":
            return True
        if message.type == "hub:reply" and message.data.get("final") is False:
            if pending.on_part is not None:
                pending.on_part(message.data.get("data"))
            return True
        error = error_from_message(message)
        if error is None:
            pending.response.set_result(message)
        else:
            pending.fail(error)
        return True

    def fail(self, error: ClientError) -> None:
        for pending in self:
            pending.fail(error)


# Larger than anything the hub sends, including the envelope.
_FRAME_BYTES_MAX: Final = 20 * 1024 * 1024
_CLOSE_S_MAX: Final = 2.0
_SUBPROTOCOL: Final = Subprotocol("signal-hub")


class HubConnection:
    """One WebSocket to the hub; maps errors of the socket to client errors."""

    __slots__ = ("_socket",)

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame.decode())
        except ConnectionClosed as error:
            raise connection_lost(f"connection to the hub lost: {error}", sent=True) from error

    async def receive(self) -> bytes:
        try:
            text = await self._socket.recv()
        except ConnectionClosed as error:
            raise connection_lost(f"connection to the hub lost: {error}", sent=True) from error
        return text.encode() if isinstance(text, str) else text

    async def close(self) -> None:
        await self._socket.close()

    def abort(self) -> None:
        """Close without a close frame, for a peer that does not respond."""
        self._socket.transport.abort()


async def open_connection(url: str, timeout_s: float) -> HubConnection:
    """Open a socket. A response other than an upgrade becomes its error."""
    try:
        socket = await connect(
            url,
            subprotocols=[_SUBPROTOCOL],
            compression=None,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S_MAX,
            # The heartbeat of the protocol also shows that the hub processes messages.
            ping_interval=None,
            max_size=_FRAME_BYTES_MAX,
        )
    except InvalidStatus as error:
        response = error.response
        headers = {name.lower(): value for name, value in response.headers.raw_items()}
        raise error_from(response.status_code, headers, bytes(response.body or b"")) from error
    except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed) as error:
        raise ClientError(CONNECT_FAILED, f"cannot connect to the hub at {url}: {error}") from error
    except InvalidURI as error:
        raise ValueError(str(error)) from error
    return HubConnection(socket)


_DISCONNECT_S_MAX: Final = 2.0


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Address, identity, token, timeouts and retries of a client."""

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
    """A sequence of sessions, for as long as the client is open.

    `deliver` receives messages for actors, and may block reading. `notice` receives messages that the hub
    sends by itself. `connected` is called before the first message of each connection, with whether the
    session was resumed. `restore` recreates the state that a new session lacks.
    """

    def __init__(
        self,
        options: SessionOptions,
        *,
        deliver: Callable[[Message], Awaitable[None]],
        notice: Callable[[Message], None],
        connected: Callable[[bool], None],
        restore: Callable[[], Awaitable[None]],
        is_behind: Callable[[], bool],
    ) -> None:
        self.options = options
        self.identity = options.address
        self.welcome: Welcome | None = None
        self.failure: ClientError | None = None
        self.pending = PendingRequests()
        self.ended = asyncio.Event()
        self._deliver = deliver
        self._notice = notice
        self._connected = connected
        self._restore = restore
        self._is_behind = is_behind
        self._connection: HubConnection | None = None
        self._ready = asyncio.Event()
        self._heartbeat_received = asyncio.Event()
        self._disconnect_notice: dict[str, Any] = {}
        self._failures = 0
        self._started = False
        self._complete = False
        self._task: asyncio.Task[None] | None = None

    # -- used by callers

    async def start(self) -> None:
        """Connect. Returns when the first session is established, or raises."""
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
        """Send, and wait for the response. It is sent again after a lost connection, under the same id.

        Urgent requests are part of establishing a session, and are not sent again.
        """
        pending = self.pending.open(request, on_part)
        try:
            async with asyncio.timeout(timeout_s):
                if urgent or self._ready.is_set():
                    await self._write(request, ignore_loss=not urgent)
                if not urgent:
                    self._raise_failure()
                return await pending.response
        except TimeoutError:
            raise wire.timeout_error(request.type, timeout_s) from None
        finally:
            self.pending.close(pending)

    async def tell(self, request: OutgoingRequest) -> None:
        """Send once. Waits for a connection if there is none."""
        try:
            async with asyncio.timeout(self.options.timeouts.ask_s):
                await self._until_ready()
        except TimeoutError:
            raise wire.connection_lost("not connected to the hub", sent=False) from None
        await self._write(request)

    async def stop(self) -> None:
        """Disconnect from the hub, and end."""
        if self._task is None:
            return
        if self._connection is not None and self._ready.is_set():
            request = OutgoingRequest(
                id=new_id(now_ms()), type="hub:disconnect", payload={"reason": "client_requested"}
            )
            try:
                await self.ask(request, _DISCONNECT_S_MAX, urgent=True)
            except ClientError:
                pass  # the session ends in any case
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end(None)

    def drop(self) -> None:
        """Drop the connection as a broken network would; the session reconnects by itself."""
        if self._connection is not None:
            self._connection.abort()

    # -- lifecycle of the connection

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:
            # This task is not awaited, so waiting callers must get the error.
            self._end(ClientError(INVALID_ANSWER, f"the client failed: {error!r}"))
            raise

    async def _stay_connected(self) -> None:
        while True:
            pause_s: float
            try:
                connection = await self._open()
            except (ClientError, ValueError) as error:
                pause = self._pause_after(error)
                if pause is None:
                    self._end(error if isinstance(error, ClientError) else ClientError("usage", str(error)))
                    return
                pause_s = pause
            else:
                await self._serve(connection)
                reason = self._disconnect_notice.get("reason")
                if reason in wire.FATAL_CODES:
                    self._end(ClientError(str(reason), f"the hub ended the session: {reason}"))
                    return
                pause_s = self._pause_now()
            await asyncio.sleep(pause_s)

    async def _open(self) -> HubConnection:
        """Open a connection and complete the hub's handshake on it."""
        options = self.options
        connection = await open_connection(options.url, options.timeouts.connect_s)
        self._disconnect_notice = {}
        try:
            async with asyncio.timeout(options.timeouts.connect_s):
                await self._handshake(connection)
        except TimeoutError:
            await connection.close()
            raise ClientError(CONNECT_FAILED, "the hub did not respond in time") from None
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _handshake(self, connection: HubConnection) -> None:
        options = self.options
        request = wire.connect_request(
            new_id(now_ms()),
            token=options.token_now(),
            capabilities=options.capabilities,
            resume_token=None if self.welcome is None else self.welcome.resume_token,
            ttl_ms=int(options.timeouts.connect_s * 1000),
        )
        try:
            await connection.send(request.frame(options.address, now_ms(), options.key))
        except ClientError:
            pass  # a hub over its limit sends an error and closes: that can still be read
        while True:
            response = await self._receive(connection)
            if (error := wire.error_from_message(response)) is not None:
                raise error
            if response.correlation_id == request.id:
                break
        self.welcome = welcome = decode_response(response, Welcome)
        # A session that was lost before it was completely restored is resumed incomplete.
        self._complete = self._complete and welcome.resumed
        self._connected(welcome.resumed)
        self.identity = response.metadata.get("actorIdentity") or options.address

    async def _serve(self, connection: HubConnection) -> None:
        """Process messages until the connection ends."""
        assert self.welcome is not None
        self._connection = connection
        helpers = TaskSet()
        helpers.start(self._heartbeats(connection))
        helpers.start(self._resume(connection))
        try:
            while True:
                await self._handle(await self._receive(connection))
        except ClientError:
            pass
        finally:
            self._connection = None
            self._ready.clear()
            await helpers.close()
            await connection.close()

    async def _resume(self, connection: HubConnection) -> None:
        """Restore what a new session lacks, then send pending requests again."""
        try:
            if not self._complete:
                await self._restore()
                self._complete = True
            written = set[str]()
            while waiting := [
                pending.request for pending in self.pending if pending.request.id not in written
            ]:
                for request in waiting:
                    await self._write(request, ignore_loss=True)
                    written.add(request.id)
        except ClientError:
            connection.abort()  # the next session retries
            return
        self._failures = 0
        self._started = True
        self._ready.set()

    async def _heartbeats(self, connection: HubConnection) -> None:
        assert self.welcome is not None
        while True:
            await asyncio.sleep(self.welcome.heartbeat_interval / 1000)
            self._heartbeat_received.clear()
            moment_ms = now_ms()
            beat = OutgoingRequest(
                id=new_id(moment_ms), type="hub:heartbeat", payload={"timestamp": moment_ms}, ask=False
            )
            try:
                await self._write(beat)
                async with asyncio.timeout(self.options.timeouts.heartbeat_s):
                    await self._heartbeat_received.wait()
            except TimeoutError:
                # While the inbox is full, the response may be unread behind other messages.
                if not self._is_behind():
                    connection.abort()
            except ClientError:
                return

    # -- single messages

    async def _receive(self, connection: HubConnection) -> Message:
        frame = await connection.receive()
        try:
            return Message(parse_envelope(frame, _FRAME_BYTES_MAX))
        except HubError as error:
            raise ClientError(INVALID_ANSWER, f"invalid message from the hub: {error.message}") from error

    async def _handle(self, message: Message) -> None:
        kind = message.type
        if not kind.startswith("hub:"):
            await self._deliver(message)
        elif kind == "hub:heartbeat_ack":
            self._heartbeat_received.set()
        elif not self.pending.resolve(message):
            if kind == "hub:disconnect":
                self._disconnect_notice = message.data
            self._notice(message)

    async def _write(self, request: OutgoingRequest, *, ignore_loss: bool = False) -> None:
        """With `ignore_loss`, errors are ignored because the next session sends the request again."""
        connection = self._connection
        try:
            if connection is None:
                raise wire.connection_lost("not connected to the hub", sent=False)
            await connection.send(request.frame(self.identity, now_ms(), self.options.key))
        except ClientError:
            if not ignore_loss:
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
            # Without its traceback, which would grow with every caller that it is raised to.
            raise self.failure.with_traceback(None)
        if self.ended.is_set():
            raise wire.connection_lost("the client is closed", sent=False)

    def _end(self, error: ClientError | None) -> None:
        self.failure = error
        self._ready.clear()
        self.ended.set()
        self.pending.fail(error or wire.connection_lost("the client was closed", sent=True))

    def _pause_after(self, error: Exception) -> float | None:
        """How long to wait after a failed connection; None if another one would fail too."""
        if not isinstance(error, ClientError) or error.code in wire.FATAL_CODES:
            return None
        is_temporary = error.status == 0 or error.status in NOT_APPLIED_STATUSES | TRANSIENT_STATUSES
        if not is_temporary or (
            not self._started and self._failures + 1 >= self.options.retries.attempts_max
        ):
            return None
        return self._pause_now() + wire.retry_after_from(error)

    def _pause_now(self) -> float:
        """The pause requested by the hub, or an exponential back-off with full jitter."""
        requested_ms = self._disconnect_notice.get("reconnectAfter")
        if isinstance(requested_ms, int | float):
            return requested_ms / 1000
        retries = self.options.retries
        self._failures += 1
        return backoff_delay(self._failures, retries.delay_s_first, retries.delay_s_max, jitter=1.0)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
