"""Event streams that are requested while their upstream is unavailable.

A browser's `EventSource` gives up permanently on any status but 200; after a 200 that ends it reconnects with
the id of the last event. So a known event stream gets 200 and comments until the upstream is back or the hold
time is over, and then ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.edge.auth import Caller
from tailrace.edge.channels import ChannelTable
from tailrace.edge.context import EdgeContext
from tailrace.edge.requests import cache_line
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.upstreams import Upstream
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.protocol.query_params import live_mode, parse_query
from tailrace.protocol.sse import EVENT_STREAM_HEADERS, KEEP_ALIVE

TICK_S = 0.5
# Reconnect delay of a browser, random, to spread the load.
RETRY_MS = (1000, 3000)
KNOWN_MAX = 100_000
DIGEST_BYTES = 16
REALTIME = b"/realtime/sse"
REPLICATION = b"/replication/v1/databases/"

FindUpstream = Callable[[], Upstream]


@dataclass(slots=True)
class HeldResponse:
    """One held response."""

    find_upstream: FindUpstream
    until: float  # loop time
    silent_since: float


class HeldEventStreams:
    """Known event streams, and held responses."""

    def __init__(self, context: EdgeContext, channels: ChannelTable, book: StreamInfoCache) -> None:
        self._context = context
        self._clients = channels.clients
        self._book = book
        # Forwarded event streams with a 200 response, the most recent last.
        self._answered: LruCache[bytes, bool] = LruCache(entries_max=KNOWN_MAX)
        self._held: dict[ResponseStream, HeldResponse] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note_answered(self, exchange: Exchange) -> None:
        """Records an event stream that an upstream has served."""
        self._answered.put(_digest(exchange), True)

    def is_known(self, exchange: Exchange, name: str, caller: Caller) -> bool:
        """Whether a request is for an event stream that is known to exist.

        A client that sends `Last-Event-ID` has received events before, maybe before this edge was started.
        """
        if exchange.headers.get(b"last-event-id") or _digest(exchange) in self._answered:
            return True
        return caller.shared and bool(name) and self._book.contains(name)

    def hold(self, exchange: Exchange, find_upstream: FindUpstream) -> None:
        """Responds with an event stream of comments."""
        context, now = self._context, self._context.loop.time()
        try:
            find_upstream().mark_suspect()  # only a later health check counts as recovery
        except TailraceError:
            pass  # no upstream is usable
        outlet = exchange.open_stream(200, EVENT_STREAM_HEADERS + cache_line("BYPASS"))
        context.telemetry.edge_requests.add("sse", "BYPASS", 200)
        if outlet.closed:
            return
        retry_ms = random.randint(*RETRY_MS)  # noqa: S311 - spreads load
        outlet.write(b": upstream unavailable, waiting for it\nretry: %d\n\n" % retry_ms)
        self._held[outlet] = HeldResponse(find_upstream, now + context.limits.edge_hold_ms / 1000, now)
        self._clients["held"] += 1
        outlet.on_gone = lambda: self._forget(outlet)
        if self._timer is None:
            self._timer = context.loop.call_later(TICK_S, self._tick)

    def end_all(self) -> None:
        """Shutdown: the clients reconnect elsewhere."""
        for outlet in tuple(self._held):
            self._end(outlet)

    def _tick(self) -> None:
        self._timer = None
        now = self._context.loop.time()
        keep_alive_s = self._context.limits.sse_keep_alive_ms / 1000
        for outlet, held in tuple(self._held.items()):
            if now >= held.until or _is_back(held.find_upstream):
                self._end(outlet)
            elif now - held.silent_since >= keep_alive_s:
                held.silent_since = now
                outlet.write(KEEP_ALIVE)
        if self._held:
            self._timer = self._context.loop.call_later(TICK_S, self._tick)

    def _end(self, outlet: ResponseStream) -> None:
        self._forget(outlet)
        outlet.end()

    def _forget(self, outlet: ResponseStream) -> None:
        if self._held.pop(outlet, None) is not None:
            self._clients["held"] -= 1


def is_event_stream(exchange: Exchange, is_stream: bool) -> bool:
    """Whether a request is one of a browser's `EventSource`; `is_stream` if its path names a stream."""
    if exchange.method != b"GET":
        return False
    if not is_stream:
        path = exchange.path
        return path == REALTIME or (path.startswith(REPLICATION) and path.endswith(b"/stream"))
    try:
        return live_mode(parse_query(exchange.query)) == "sse"
    except TailraceError:
        return False


def _is_back(find_upstream: FindUpstream) -> bool:
    try:
        upstream = find_upstream()
    except TailraceError:
        return False
    return upstream.usable and upstream.suspect_since is None


def _digest(exchange: Exchange) -> bytes:
    """The key of an event stream. The query may contain a ticket, so only its digest is stored."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (exchange.path, exchange.query, exchange.headers.get(b"authorization", b"")):
        hashed.update(b"%d:%b" % (len(part), part))
    return hashed.digest()
