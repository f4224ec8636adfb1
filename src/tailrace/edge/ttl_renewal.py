"""Renews streams with a TTL at their owner for reads that the edge served."""

from __future__ import annotations

import asyncio
import logging

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.edge.channels import ChannelTable
from tailrace.edge.context import EdgeContext
from tailrace.edge.requests import build_request, build_stream_target
from tailrace.edge.stream_info import StreamInfo, StreamInfoCache, renewal_due_at
from tailrace.http.client import UpstreamLostError

logger = logging.getLogger("tailrace.edge")

# At shutdown, due renewals are sent at once, and awaited this long.
STOP_S = 2.0


class PendingRenewal:
    """A due renewal of a stream that was read here."""

    __slots__ = ("authorization", "facts", "generation", "hit_at", "timer", "window_s")

    def __init__(self, facts: StreamInfo, window_s: int) -> None:
        self.facts = facts
        self.generation = facts.generation
        self.window_s = window_s
        self.hit_at = 0.0  # loop time of the last read served here
        self.authorization: bytes | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the stream was replaced, or its owner has seen a later read."""
        return self.facts.generation != self.generation or self.facts.read_at > self.hit_at


class TtlRenewals:
    """Renews with `GET ?offset=now`, at most once per quarter of the TTL."""

    def __init__(self, context: EdgeContext, book: StreamInfoCache, channels: ChannelTable) -> None:
        self._context = context
        self._book = book
        self._channels = channels
        self._due: dict[str, PendingRenewal] = {}

    def note_hit(self, name: str, facts: StreamInfo, authorization: bytes | None) -> None:
        """A read was served without the owner."""
        if facts.lifetime is None or facts.lifetime.window_s is None:
            return
        due = self._due.get(name)
        if due is None or due.facts is not facts or due.generation != facts.generation:
            if due is not None and due.timer is not None:
                due.timer.cancel()
            due = self._due[name] = PendingRenewal(facts, facts.lifetime.window_s)
        due.hit_at = self._context.loop.time()
        due.authorization = authorization
        if due.timer is None:
            self._schedule(name, due)

    def _schedule(self, name: str, due: PendingRenewal) -> None:
        loop, facts = self._context.loop, due.facts
        at = renewal_due_at(due.window_s, facts.read_at, facts.renewal_at, loop.time())
        due.timer = loop.call_at(at, self._on_time, name, due)

    def _on_time(self, name: str, due: PendingRenewal) -> None:
        due.timer = None
        now = self._context.loop.time()
        # A live reader keeps its stream alive at the owner, and renews it at its end.
        if due.is_settled or self._channels.follows(name):
            self._due.pop(name, None)
        elif renewal_due_at(due.window_s, due.facts.read_at, due.facts.renewal_at, now) > now:
            self._schedule(name, due)
        else:
            del self._due[name]
            self._context.tasks.start(self._renew(name, due))

    async def _renew(self, name: str, due: PendingRenewal) -> None:
        loop, facts = self._context.loop, due.facts
        facts.renewal_at = sent_at = loop.time()
        outcome = await self._ask(name, due, sent_at)
        self._context.telemetry.edge_ttl_renewals.add(outcome)
        if outcome in ("renewed", "gone") or due.is_settled or name in self._due:
            return
        if loop.time() < facts.read_at + due.window_s:  # else it has expired
            self._due[name] = due
            self._schedule(name, due)

    async def _ask(self, name: str, due: PendingRenewal, sent_at: float) -> str:
        context = self._context
        try:
            upstream = context.upstreams.for_stream(name)
            request = build_request(
                b"GET",
                build_stream_target(name, {"offset": "now"}),
                upstream.origin.host_header,
                context.edge_id,
                context.token or due.authorization,
            )
            reply = await upstream.pool.request(request, again=True)
            await reply.body(context.limits.edge_frame_bytes)
        except (UpstreamLostError, TailraceError):
            return "lost"
        if due.facts.generation == due.generation:
            self._book.note_reply(name, reply, sent_at)
        if reply.status in (404, 410):
            return "gone"
        if reply.status != 200:
            logger.debug("TTL renewal refused", extra=log_fields(status=reply.status))
            return "refused"
        due.facts.note_read(sent_at, due.generation)
        return "renewed"

    async def stop(self) -> None:
        """Sends due renewals now, so that a stop of the edge does not shorten a TTL."""
        left = [(name, due) for name, due in self._due.items() if not due.is_settled]
        self._due.clear()
        for _, due in left:
            if due.timer is not None:
                due.timer.cancel()
        if left:
            told = [self._context.tasks.start(self._renew(name, due)) for name, due in left]
            await asyncio.wait(told, timeout=STOP_S)
