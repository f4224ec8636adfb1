"""Requests that go upstream as they are, and their answers on the way back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.edge.connection import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.edge.context import EdgeContext
from tailrace.edge.gate import Caller
from tailrace.edge.headers import (
    cache_line,
    framing_header,
    request_bytes,
    request_head,
    request_lines,
    response_lines,
)
from tailrace.edge.tunnel import open_tunnel
from tailrace.edge.upstreams import Upstream
from tailrace.http.exchange import BODILESS_STATUSES, Exchange, ResponseStream
from tailrace.http.streaming_request import BodyLostError, BodyStream, StreamingExchange

READ_METHODS = frozenset((b"GET", b"HEAD"))
# Answers up to this size go out in one piece.
WHOLE_BYTES_MAX = 64 * 1024
UNKNOWN_OUTCOME = "append outcome is unknown, check Stream-Next-Offset before retrying"
# Headers that mean nothing when they come twice; joined into one they would mean something else.
SINGLE_HEADERS = frozenset((b"authorization", b"content-type"))

ReplyObserver = Callable[[UpstreamResponse], None]


class Forwarder:
    """Passes requests on, one upstream request for each."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._unsent_bytes_max = context.limits.live_unsent_bytes

    async def forward(
        self,
        exchange: Exchange,
        upstream: Upstream,
        caller: Caller | None,
        *,
        apart: bool = False,
        observe: ReplyObserver | None = None,
    ) -> None:
        """Answers with what the upstream says; `apart` is for answers that may take long.

        `observe` sees the head of the answer before the client does. If it raises, the client gets that.
        """
        check_single_headers(exchange)
        if exchange.wants_websocket():
            await self._upgrade(exchange, upstream, caller)
            return
        context = self._context
        lines = request_lines(exchange, context.edge_id, context.mark_of(exchange, caller))
        is_read = exchange.method in READ_METHODS
        begun = time.monotonic()
        try:
            reply, connection = await self._ask(exchange, upstream, lines, apart=apart)
        except BodyLostError:
            return  # the client knows why, or is gone
        except UpstreamLostError as lost:
            upstream.note_failed(context.loop.time())
            raise upstream_unavailable(lost, exchange.method) from None
        theirs = reply.get(b"server-timing") or b""
        context.note_upstream(exchange, time.monotonic() - begun, reply.queued_s, theirs)
        try:
            if observe is not None:
                observe(reply)
            if (reply.get(b"content-type") or b"").startswith(b"text/event-stream"):
                upstream.pool.let_go(reply)
            await self.relay(exchange, reply, "BYPASS" if is_read else "")
        finally:
            if connection is not None:
                connection.abort()

    async def _ask(
        self, exchange: Exchange, upstream: Upstream, lines: bytes, *, apart: bool
    ) -> tuple[UpstreamResponse, UpstreamConnection | None]:
        """The answer, and the connection if it has one of its own. Writes are sent once, whatever happens."""
        intake = pending_body(exchange)
        is_head, is_read = exchange.method == b"HEAD", exchange.method in READ_METHODS
        if intake is not None:
            head = request_head(exchange, lines, framing_header(intake))
            return await upstream.uploads.ask_while_coming(head, intake, head_only=is_head), None
        request = request_bytes(exchange, lines)
        if apart:
            return await upstream.pool.ask_apart(request)
        return await upstream.pool.ask(request, head_only=is_head, again=is_read), None

    async def _upgrade(self, exchange: Exchange, upstream: Upstream, caller: Caller | None) -> None:
        mark = self._context.mark_of(exchange, caller)
        lines = request_lines(exchange, self._context.edge_id, mark, upgrade=True)
        try:
            reply, connection = await upstream.pool.ask_apart(request_bytes(exchange, lines))
        except UpstreamLostError as lost:
            upstream.note_failed(self._context.loop.time())
            raise upstream_unavailable(lost, exchange.method) from None
        if reply.status != 101:
            try:
                await self.relay(exchange, reply, "BYPASS")
            finally:
                connection.abort()
            return
        open_tunnel(exchange, reply, connection)

    async def relay(self, exchange: Exchange, reply: UpstreamResponse, cache: str) -> None:
        """Gives the client an upstream's answer, as fast as it takes it."""
        head = response_lines(reply.fields, cache_line(cache) if cache else b"")
        length = reply.length
        if exchange.is_head or reply.status in BODILESS_STATUSES:
            exchange.respond(reply.status, head)
            reply.abandon()
        elif length is not None and length <= WHOLE_BYTES_MAX:
            try:
                body = await reply.body(WHOLE_BYTES_MAX)
            except UpstreamLostError as lost:
                raise upstream_unavailable(lost, exchange.method) from None
            exchange.respond(reply.status, head, body or b"")
        else:
            await self._stream(exchange, reply, head, length)

    async def _stream(
        self, exchange: Exchange, reply: UpstreamResponse, head: bytes, length: int | None
    ) -> None:
        outlet = exchange.open_stream(reply.status, head, length)
        if outlet.closed:
            reply.abandon()  # the client has left
            return
        drained = ClientDrain(outlet)

        def gone() -> None:
            drained.open()
            reply.abandon()

        outlet.on_gone = gone
        try:
            while piece := await reply.piece():
                outlet.write(piece)
                if outlet.unsent_bytes > self._unsent_bytes_max:
                    await drained.wait()
        except UpstreamLostError:
            # Half an answer: the client must not take it for a whole one.
            exchange.connection.transport.abort()
            return
        outlet.end()


class ClientDrain:
    """Waits until a client has taken what was written to it, or is gone."""

    def __init__(self, outlet: ResponseStream) -> None:
        self._event = asyncio.Event()
        outlet.on_drain = self._event.set
        self._outlet = outlet

    def open(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        self._event.clear()
        if not self._outlet.closed:
            await self._event.wait()


def upstream_unavailable(lost: UpstreamLostError, method: bytes) -> TailraceError:
    """What a client is told when its request did not come through."""
    if lost.sent and method not in READ_METHODS:
        return TailraceError("unavailable", UNKNOWN_OUTCOME)
    return TailraceError("unavailable", "the upstream does not answer")


def pending_body(exchange: Exchange) -> BodyStream | None:
    """The body, if it was not all here when the request was."""
    return exchange.intake if isinstance(exchange, StreamingExchange) else None


def check_single_headers(exchange: Exchange) -> None:
    for name in exchange.repeated or ():
        if name in SINGLE_HEADERS or name.startswith((b"stream-", b"producer-")):
            text = name.decode("latin-1")
            raise TailraceError("invalid_header", f"{text} is given more than once", header=text)
