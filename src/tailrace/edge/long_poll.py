"""Long-polls: readers wait at a channel, and one upstream request serves all that wait at one offset.

The response is the owner's: body, ETag and cache lifetime are as without an edge; only the cursor differs.
"""

from __future__ import annotations

import asyncio
import time

from tailrace.common.errors import TailraceError
from tailrace.common.tasks import SingleFlight
from tailrace.edge.auth import Authenticator, Caller
from tailrace.edge.channels import Channel, ChannelKey, ChannelTable, ChannelWaiter
from tailrace.edge.context import EdgeContext
from tailrace.edge.requests import (
    SharedRead,
    build_stream_target,
    cache_line,
    response_lines,
    without_request_id,
)
from tailrace.edge.slices import UNSHARED_STATUSES
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.upstream_feed import UpstreamAnswer, UpstreamRefusedError
from tailrace.http.client import UpstreamLostError
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import NO_STORE, header_line
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.query_params import wait_limit_lines, wait_ms

# Reads at the tail: the response is not cached.
FROM_NOW = "true"


class LongPolls:
    """Readers that wait for the next batch and get one response."""

    def __init__(
        self, context: EdgeContext, gate: Authenticator, channels: ChannelTable, book: StreamInfoCache
    ) -> None:
        self._context = context
        self._gate = gate
        self._channels = channels
        self._book = book
        self._asked: SingleFlight[tuple[str | int | None, ...], UpstreamAnswer] = SingleFlight()
        self._bells: dict[ChannelWaiter, Caller] = {}
        self._stopping = False

    async def answer(self, exchange: Exchange, reading: SharedRead, caller: Caller) -> bool:
        """Responds now or later. False, without a response, if the owner has to decide."""
        limits = self._context.limits
        patience_ms = wait_ms(reading.query, limits.long_poll_default_ms, limits.long_poll_max_ms)
        until = exchange.started + patience_ms / 1000
        self._channels.clients["long-poll"] += 1
        try:
            return await self._wait(exchange, reading, caller, until)
        except UpstreamRefusedError:
            return False
        except UpstreamLostError:
            raise TailraceError("unavailable", "the upstream is unavailable") from None
        finally:
            self._channels.clients["long-poll"] -= 1

    async def _wait(self, exchange: Exchange, reading: SharedRead, caller: Caller, until: float) -> bool:
        context = self._context
        outcome = "HIT"
        if reading.offset == "now":
            outcome = "MISS"
            reply = await self._channels.head(reading.name, context.token or caller.authorization)
            if reply.get(b"stream-closed") is not None:
                return False
            tail = (reply.get(b"stream-next-offset") or b"").decode("latin-1")
            reading = reading._replace(offset=tail, raw_live=FROM_NOW)
        key = ChannelKey(reading.name, "", reading.key)
        while True:
            channel, known = await self._channels.open(key, caller.authorization)
            outcome = outcome if known else "MISS"
            if not channel.waits_at(reading.offset):
                outcome = "MISS"
                answer = await self._ask(reading, caller)
                if answer.status != 204 or _is_closed(answer):
                    self._pass_on(exchange, reading, answer, outcome)
                    return True
                reading = reading._replace(offset=_next_offset(answer))
            left_s = until - context.loop.time()
            rung = channel.end > reading.offset or channel.closed or channel.over
            if left_s > 0 and not rung and not self._stopping:
                begun = time.monotonic()
                rung = await self._hear(channel, caller, left_s)
                context.note(exchange, "edge-wait", time.monotonic() - begun)
            self._gate.check_still(caller, context.now_s())
            if not rung or left_s <= 0 or self._stopping:
                self._idle(exchange, reading, channel, outcome)
                return True

    async def _hear(self, channel: Channel, caller: Caller, seconds: float) -> bool:
        bell = ChannelWaiter(channel, caller.authorization, caller.until_s)
        self._bells[bell] = caller
        try:
            return await bell.wait(seconds)
        finally:
            del self._bells[bell]

    def recheck(self) -> None:
        """Keys or revocations changed: ends waits with revoked tokens."""
        for bell, caller in tuple(self._bells.items()):
            if not self._gate.is_valid(caller):
                bell.on_batches()

    def end_all(self) -> None:
        """Shutdown: responds to all waits as after a timeout."""
        self._stopping = True
        for bell in tuple(self._bells):
            bell.on_batches()

    # -- upstream requests

    async def _ask(self, reading: SharedRead, caller: Caller) -> UpstreamAnswer:
        """The owner's response; equal concurrent reads share one request."""
        facts = self._book.get(reading.name)
        key = (reading.name, reading.offset, reading.fmt, reading.key, reading.raw_live, facts.writes)
        running = self._asked.get(key)
        if running is not None:
            self._context.telemetry.edge_coalesced.value += 1
            try:
                return await asyncio.shield(running)
            except UpstreamRefusedError as refused:
                if refused.refusal.status not in UNSHARED_STATUSES:
                    raise
        return await asyncio.shield(self._asked.start(key, self._fetch(reading, caller)))

    async def _fetch(self, reading: SharedRead, caller: Caller) -> UpstreamAnswer:
        context = self._context
        upstream = context.upstreams.for_stream(reading.name)
        parameters = {**reading.parameters, "live": reading.raw_live, "timeout_ms": "0"}
        request = context.request_for(caller, upstream, build_stream_target(reading.name, parameters))
        sent_at = context.loop.time()
        reply = await upstream.pool.request(request, again=True)
        body = await reply.body(context.limits.edge_frame_bytes)
        self._book.note_reply(reading.name, reply, sent_at)
        if body is None:
            raise TailraceError("unavailable", "the upstream response is too large for this edge")
        answer = UpstreamAnswer(reply.status, reply.fields, body)
        if reply.status >= 400:
            raise UpstreamRefusedError(answer)
        return answer

    # -- responses

    def _pass_on(self, exchange: Exchange, reading: SharedRead, answer: UpstreamAnswer, outcome: str) -> None:
        dropped = (b"stream-cursor", b"etag") if reading.query.get("offset") == "now" else (b"stream-cursor",)
        fields = [field for field in without_request_id(answer.fields) if field[0].lower() not in dropped]
        self._context.telemetry.edge_requests.add("long-poll", outcome, answer.status)
        cursor = b"" if _is_closed(answer) else self._cursor(reading)
        head = response_lines(fields, cursor, reading.start_line, cache_line(outcome))
        exchange.respond(answer.status, head, answer.body)

    def _idle(self, exchange: Exchange, reading: SharedRead, channel: Channel, outcome: str) -> None:
        """Timeout. Up to date means: has everything that is known here."""
        head = header_line("Stream-Next-Offset", reading.offset) + NO_STORE + self._cursor(reading)
        head += reading.start_line
        head += header_line("Stream-End-Offset", max(channel.end, reading.offset))
        head += wait_limit_lines(reading.query, self._context.limits.long_poll_max_ms)
        if channel.connected and channel.end <= reading.offset:
            head += b"Stream-Up-To-Date: true\r\n"
        self._context.telemetry.edge_requests.add("long-poll", outcome, 204)
        exchange.respond(204, head + cache_line(outcome))

    def _cursor(self, reading: SharedRead) -> bytes:
        return header_line("Stream-Cursor", next_cursor(reading.cursor, self._context.now_s()))


def _is_closed(answer: UpstreamAnswer) -> bool:
    return any(name.lower() == b"stream-closed" for name, _ in answer.fields)


def _next_offset(answer: UpstreamAnswer) -> str:
    found = (value for name, value in answer.fields if name.lower() == b"stream-next-offset")
    return next(found, b"").decode("latin-1")
