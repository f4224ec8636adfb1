"""Requests to one upstream: its configured address, and the bounded pool of connections."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

from tailrace.common.errors import TailraceError
from tailrace.common.settings import SettingsError
from tailrace.http.client import (
    ConnectionPool,
    HeaderConnection,
    SocketAddress,
    UpstreamConnection,
    UpstreamLostError,
    UpstreamResponse,
)
from tailrace.http.exchange import LAST_CHUNK, chunk
from tailrace.http.streaming_request import BodyStream

_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(https?://.*)")


class UpstreamAddress(NamedTuple):
    """One configured upstream: `URL` or `name=URL`."""

    id: str
    host: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


def parse_upstreams(text: str) -> list[UpstreamAddress]:
    """Parses a comma-separated list of upstreams."""
    items = [text] if "@" in text else text.split(",")  # a password may contain a comma
    origins = [_parse_upstream(item.strip()) for item in items if item.strip()]
    if not origins:
        raise SettingsError("an edge needs an upstream: tailrace edge --upstream http://host:4437")
    if len({origin.id for origin in origins}) != len(origins):
        raise SettingsError("an upstream is configured twice")
    return origins


def _parse_upstream(text: str) -> UpstreamAddress:
    named = _NAMED.fullmatch(text)
    url = named[2] if named else text
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = parts.path in ("", "/") and not parts.query and not parts.username and not parts.password
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not plain:
        raise SettingsError(f"an upstream must be http://host:port or https://host:port{_redacted(text)}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = port or (443 if tls else 80)
    shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return UpstreamAddress(
        named[1] if named else f"{parts.scheme}://{shown}:{port}", parts.hostname, port, tls
    )


def _redacted(text: str) -> str:
    """The invalid text for the error, unless it may contain a password."""
    return ", without a user or a password" if "@" in text else f", not {text.partition('?')[0]!r}"


# An idle connection is not reused after this time: the upstream may be closing it.
IDLE_S_MAX = 20.0


class UpstreamPool(ConnectionPool):
    """Requests to one upstream, at most `connections_max` at a time, others wait in a bounded queue.

    Long responses and sockets use dedicated connections.
    """

    def __init__(
        self, origin: UpstreamAddress, connections_max: int, queue_max: int, answer_s: float
    ) -> None:
        address = SocketAddress(host=origin.host, port=origin.port, tls=origin.tls)
        super().__init__(
            address,
            asyncio.get_running_loop(),
            HeaderConnection,
            idle_max=connections_max,
            idle_s_max=IDLE_S_MAX,
        )
        self._free = connections_max
        self._queue_max = queue_max
        self.answer_s = answer_s  # time limit for the response header
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._slots: set[UpstreamConnection] = set()  # busy connections within the limit
        self.refused = 0  # requests rejected by the full queue

    @property
    def active(self) -> int:
        """Requests with a pooled connection."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def request(
        self, request: bytes, *, head_only: bool = False, again: bool = False
    ) -> UpstreamResponse:
        """Sends a request after queueing. With `again` it is retried once if there was no response."""
        queued_s = await self._turn()
        connection = await self._idle_or_new()
        try:
            reply = await self._send(connection, request, head_only=head_only)
        except UpstreamLostError:
            if not again:
                raise
            queued_s += await self._turn()
            connection = await self._new()
            reply = await self._send(connection, request, head_only=head_only)
        reply.queued_s = queued_s
        return reply

    async def request_streaming(
        self, head: bytes, body: BodyStream, *, head_only: bool = False
    ) -> UpstreamResponse:
        """Sends a request whose body is still being received, with back-pressure.

        Stops at an early response. Raises `BodyLostError` if the body is cut off.
        """
        queued_s = await self._turn()
        connection = await self._idle_or_new()
        reply = UpstreamResponse()
        reply.queued_s = queued_s
        reply.on_responded = body.wake
        connection.send(head, reply, is_head=head_only, more=True)
        try:
            while not reply.responded and not await self._pass_on(connection, body):
                async with asyncio.timeout(self.answer_s):
                    await connection.room()
            async with asyncio.timeout(self.answer_s):
                await reply.head()
        except BaseException as error:
            reply.abandon()
            if isinstance(error, TimeoutError):
                raise UpstreamLostError("the upstream response timed out", sent=True) from None
            raise
        return reply

    async def _pass_on(self, connection: UpstreamConnection, body: BodyStream) -> bool:
        """Sends the next piece of the body; True if it was the last."""
        piece = await body.read()
        if body.length is None:
            piece = chunk(piece) + (LAST_CHUNK if body.ended else b"")
        connection.send_more(piece, last=body.ended)
        return body.ended

    async def request_dedicated(self, request: bytes) -> tuple[UpstreamResponse, UpstreamConnection]:
        """Sends a request on a dedicated connection, for long responses."""
        connection = await self.connect()
        reply = UpstreamResponse()
        connection.send(request, reply)
        try:
            await reply.head()
        except asyncio.CancelledError:
            reply.abandon()
            raise
        return reply, connection

    # -- queue

    async def _turn(self) -> float:
        """Waits for a free slot; returns the waiting time."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return 0.0
        if len(self._waiting) >= self._queue_max:
            self.refused += 1
            raise TailraceError("overloaded", "the request queue of the upstream is full")
        begun = time.monotonic()
        turn = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise
        return time.monotonic() - begun

    def _give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    # -- connections

    async def _idle_or_new(self) -> UpstreamConnection:
        connection = self.pop_idle()
        if connection is None:
            return await self._new()
        self._slots.add(connection)
        return connection

    async def _new(self) -> UpstreamConnection:
        try:
            connection = await self.connect()
        except BaseException:
            self._give_back()
            raise
        self._slots.add(connection)
        return connection

    async def _send(
        self, connection: UpstreamConnection, request: bytes, *, head_only: bool
    ) -> UpstreamResponse:
        reply = UpstreamResponse()
        connection.send(request, reply, is_head=head_only)
        try:
            async with asyncio.timeout(self.answer_s):
                await reply.head()
        except asyncio.CancelledError:
            reply.abandon()
            raise
        except TimeoutError:
            reply.abandon()
            raise UpstreamLostError("the upstream response timed out", sent=True) from None
        return reply

    def release(self, reply: UpstreamResponse) -> None:
        """Releases the slot of a long response."""
        if reply.connection is not None:
            self._release_slot(reply.connection)

    def _release_slot(self, connection: UpstreamConnection) -> None:
        if connection in self._slots:
            self._slots.discard(connection)
            self._give_back()

    # -- called by connections

    def on_done(self, connection: UpstreamConnection, reusable: bool) -> None:
        # Only connections within the limit are reused.
        super().on_done(connection, reusable and connection in self._slots)
        self._release_slot(connection)

    def on_lost(self, connection: UpstreamConnection, *, pending: bool) -> None:
        super().on_lost(connection, pending=pending)
        self._release_slot(connection)
