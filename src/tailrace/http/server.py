"""The listener: accepts connections, sweeps them for deadlines, drains them at shutdown."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.file_descriptors import accept_backlog, refused_connections_max
from tailrace.common.limits import Limits
from tailrace.common.tasks import wait_event
from tailrace.http.connection import CACHED_HEADS_MAX, CachedHead, HttpConnection
from tailrace.http.exchange import App, Exchange, date_line, status_line
from tailrace.http.request_body import RequestBodyConnection

# One coarse timer checks all deadlines of all connections.
SWEEP_S = 0.5
# Reads longer than this are parsed in slices.
SLICE_BYTES_MAX = 64 * 1024
WRITE_HIGH_WATER_BYTES = 256 * 1024


class SweptConnection(Protocol):
    """A connection that the sweeper checks."""

    deadline: float

    def on_sweep(self, now: float) -> None: ...
    def drain(self) -> None: ...
    @property
    def transport(self) -> asyncio.Transport: ...


class BufferedConnection(Protocol):
    """A connection that gathers the writes of one iteration of the event loop."""

    def flush(self) -> None: ...


class HttpServer:
    """Serves one application on one or more sockets."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_drain: Callable[[], None] | None = None,
        admit_body: Callable[[Exchange], bool] | None = None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.draining = False
        # Called once when draining begins: the application must end its streams and long waits.
        self.on_drain = on_drain
        # Called before waiting for a body that did not arrive with its head: returns whether the client is
        # authenticated, or raises to respond without reading the body.
        self.admit_body = admit_body
        # Counters.
        self.requests = 0
        self.responses: dict[tuple[bytes, int], int] = {}  # by method and status
        self.bytes_in = 0
        self.bytes_out = 0
        self.parse_errors = 0
        self.connections_total = 0
        self.connections_refused = 0
        self.body_bytes_held = 0  # of incomplete bodies
        self.bodies_waiting: deque[RequestBodyConnection] = deque()  # connections that wait for body memory
        self.bodies_reserved = 0  # bodies that have reserved their whole size
        self._granting = False
        self.unauthenticated_body_bytes = 0  # as `body_bytes_held`, of unauthenticated clients
        # Read by connections on every request.
        self.fixed_headers = app.fixed_headers or b""
        self.varying_headers = app.common_headers if app.fixed_headers is None else None
        self.status_heads: dict[int, bytes] = {}
        self.cached_heads: dict[bytes, CachedHead] = {}
        self.heads_parsed = 0  # heads that were not cached; one in a few of them is added
        self.cached_hosts: set[bytes | None] = set()
        self.body_bytes_max = limits.append_body_bytes
        self.body_digits = len(str(limits.append_body_bytes))
        self.slice_bytes = min(SLICE_BYTES_MAX, limits.header_bytes)
        # Coarse loop time, updated by the sweeper.
        self.now = self.loop.time()
        self.idle_deadline = self.now + limits.idle_ms / 1000
        # Connections over the limit get an error response up to this number, and are dropped beyond it.
        self._dropped_from = limits.connections + refused_connections_max(limits.connections)
        self._backlog = accept_backlog(limits.connections)
        self._clock = clock
        self._date = b""
        self._date_s = 0
        self._swept: set[SweptConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server] = []
        self._unflushed: list[BufferedConnection] = []
        self._emptied: asyncio.Event = asyncio.Event()
        self._emptied.set()

    # --- lifecycle

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl: ssl.SSLContext | None = None,
        sock: socket.socket | None = None,
        reuse_port: bool = False,
    ) -> int:
        """Listen, and return the port. May be called again for another address."""
        handshake_s = self.limits.header_ms / 1000 if ssl is not None else None
        if sock is not None:
            listener = await self.loop.create_server(
                self._connection,
                sock=sock,
                ssl=ssl,
                backlog=self._backlog,
                ssl_handshake_timeout=handshake_s,
            )
        else:
            listener = await self.loop.create_server(
                self._connection,
                host,
                port,
                ssl=ssl,
                backlog=self._backlog,
                reuse_port=reuse_port or None,
                ssl_handshake_timeout=handshake_s,
            )
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def start_unix(self, path: str) -> None:
        """Listen on a unix socket, for other processes of the same server."""
        self._listeners.append(
            await self.loop.create_unix_server(self._connection, path, backlog=self._backlog)
        )

    async def drain(self, ms: int | None = None) -> bool:
        """Stop accepting, finish running requests, then close. False if some had to be aborted at the end."""
        self._stop_accepting()
        if not self.draining:
            self.draining = True
            if self.on_drain is not None:
                self.on_drain()
            for swept in tuple(self._swept):
                swept.drain()
        wait_s = (self.limits.drain_ms if ms is None else ms) / 1000
        drained = await wait_event(self._emptied, wait_s)
        if not drained:
            await self.close()
        return drained

    async def close(self) -> None:
        """Stop at once: abort every connection."""
        self._stop_accepting()
        self.draining = True
        for swept in tuple(self._swept):
            swept.transport.abort()
        await self._emptied.wait()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    # --- connections

    @property
    def connections_open(self) -> int:
        return len(self._swept)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self)

    def admit(self, connection: HttpConnection) -> None:
        """Add an accepted connection, or refuse it if there are too many."""
        self.connections_total += 1
        is_full = len(self._swept) >= self.limits.connections
        if is_full and len(self._swept) >= self._dropped_from:
            self.connections_refused += 1
            connection.transport.abort()
            return
        self.add(connection)
        # A live reader pauses above `live_unsent_bytes` and continues at the low-water mark, so the
        # transport's high-water mark must not be above that.
        high_bytes = min(WRITE_HIGH_WATER_BYTES, self.limits.live_unsent_bytes)
        connection.transport.set_write_buffer_limits(high_bytes)
        connection.deadline = self.idle_deadline
        if is_full or self.draining:
            self.connections_refused += 1
            connection.refuse(
                TailraceError("overloaded", "too many connections")
                if is_full
                else TailraceError("unavailable", "the server is stopping")
            )

    def cache_head(self, head: bytes, known: CachedHead) -> None:
        """Cache a parsed head."""
        if len(self.cached_heads) >= CACHED_HEADS_MAX:
            self.cached_heads.clear()
        self.cached_heads[head] = known

    def hold_body(self, size: int) -> bool:
        """Count a body that waits in memory; False if the budget for bodies is exhausted."""
        if self.body_bytes_held + size > self.limits.append_queue_max_bytes:
            return False
        self.body_bytes_held += size
        self.bodies_reserved += 1
        return True

    def release_body(self, size: int) -> None:
        self.body_bytes_held -= size
        self.bodies_reserved -= 1
        if self.bodies_waiting:
            self.grant_body_memory()

    def has_body_memory(self, size: int) -> bool:
        """Whether another body of this size may be received now. A single one always may."""
        fits = self.body_bytes_held + size <= self.limits.append_queue_max_bytes
        return fits or not self.bodies_reserved

    def grant_body_memory(self) -> None:
        """Body memory was released: resume waiting connections in order, in the next loop iteration."""
        if not self._granting:
            self._granting = True
            self.loop.call_soon(self._grant_body_memory)

    def _grant_body_memory(self) -> None:
        self._granting = False
        waiting = self.bodies_waiting
        while waiting:
            needed = waiting[0].body_memory_needed
            if needed is not None:
                if not self.has_body_memory(needed):
                    return
                waiting[0].reserve_body_memory()
            waiting.popleft()

    def add(self, swept: SweptConnection) -> None:
        """Have the sweeper check `swept` until `remove`."""
        self._swept.add(swept)
        self._emptied.clear()
        if self._sweep_timer is None:
            self._set_time(self.loop.time())
            self._sweep_timer = self.loop.call_later(SWEEP_S, self._on_timer)

    def remove(self, swept: SweptConnection) -> None:
        self._swept.discard(swept)
        if not self._swept:
            self._emptied.set()

    def flush_later(self, connection: BufferedConnection) -> None:
        """Have `connection.flush` called at the end of this loop iteration."""
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    # --- time

    def _on_timer(self) -> None:
        self._sweep_timer = None
        self.sweep(self.loop.time())
        if self._swept:
            self._sweep_timer = self.loop.call_later(SWEEP_S, self._on_timer)

    def sweep(self, now: float) -> None:
        """Handle every connection whose deadline is before `now`."""
        self._set_time(now)
        late = [swept for swept in self._swept if swept.deadline <= now]
        for swept in late:
            swept.on_sweep(now)

    def _set_time(self, now: float) -> None:
        self.now = now
        self.idle_deadline = now + self.limits.idle_ms / 1000
        date_s = self._clock.now_ns() // 1_000_000_000
        if date_s != self._date_s:
            self._date_s = date_s
            self._date = date_line(date_s)
            self.status_heads.clear()

    def status_head(self, status: int) -> bytes:
        """The start of every response with this status, built once per second and status."""
        head = self.status_heads.get(status)
        if head is None:
            head = self.status_heads[status] = status_line(status) + self._date + self.fixed_headers
        return head

    def response_start(self, status: int, exchange: Exchange | None) -> bytes:
        """The status line and the headers that every response has."""
        head = self.status_head(status)
        return head if self.varying_headers is None else head + self.varying_headers(exchange)
