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
from tailrace.http.connection import CACHED_HEADS_MAX, CachedHead, HttpConnection
from tailrace.http.exchange import App, Exchange, date_line, status_line
from tailrace.http.request_body import RequestBodyConnection

# One coarse timer serves every deadline of every connection.
SWEEP_S = 0.5
# Reads longer than this are parsed in slices.
SLICE_BYTES_MAX = 64 * 1024
WRITE_HIGH_WATER_BYTES = 256 * 1024


class SweptConnection(Protocol):
    """Anything the sweeper looks after."""

    deadline: float

    def on_sweep(self, now: float) -> None: ...
    def drain(self) -> None: ...
    @property
    def transport(self) -> asyncio.Transport: ...


class BufferedConnection(Protocol):
    """A connection that gathers the writes of one turn of the loop."""

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
    ) -> None:
        self.app = app
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.draining = False
        # Called once when draining begins: the application ends its streams and long waits.
        self.on_drain = on_drain
        # Asked before a body is waited for that did not come with its head: whether its client is known.
        # Raises if it is to be refused without its body.
        self.admit_body: Callable[[Exchange], bool] | None = None
        # Counters.
        self.requests = 0
        self.answers: dict[tuple[bytes, int], int] = {}  # by method and status
        self.bytes_in = 0
        self.bytes_out = 0
        self.parse_errors = 0
        self.connections_total = 0
        self.connections_refused = 0
        self.body_bytes_held = 0  # of bodies that are not all there
        self.bodies_waiting: deque[RequestBodyConnection] = (
            deque()
        )  # connections whose bodies wait for memory
        self.body_shares = 0  # bodies that are in memory, or will be, as a whole
        self._sharing_out = False
        self.stranger_bytes_held = 0  # the same, of clients that are not known
        # What connections read on every request.
        self.fixed_headers = app.fixed_headers or b""
        self.varying_headers = app.common_headers if app.fixed_headers is None else None
        self.status_heads: dict[int, bytes] = {}
        self.heads_known: dict[bytes, CachedHead] = {}
        self.heads_parsed = 0  # because they were not known; of these one in a few is learnt
        self.hosts_known: set[bytes | None] = set()
        self.body_bytes_max = limits.append_body_bytes
        self.body_digits = len(str(limits.append_body_bytes))
        self.slice_bytes = min(SLICE_BYTES_MAX, limits.header_bytes)
        # Coarse loop time, moved by the sweeper.
        self.now = self.loop.time()
        self.idle_deadline = self.now + limits.idle_ms / 1000
        # Connections over the limit are answered with a refusal up to this number, and dropped beyond it.
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

    # --- life

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl: ssl.SSLContext | None = None,
        sock: socket.socket | None = None,
        reuse_port: bool = False,
    ) -> int:
        """Listen, and return the port. May be called again for a further address."""
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
        """Listen on a socket of this machine, for other processes of the same server."""
        self._listeners.append(
            await self.loop.create_unix_server(self._connection, path, backlog=self._backlog)
        )

    async def drain(self, ms: int | None = None) -> bool:
        """Stop accepting, finish what runs, then close. False if some had to be cut off at the end."""
        self._stop_accepting()
        if not self.draining:
            self.draining = True
            if self.on_drain is not None:
                self.on_drain()
            for swept in tuple(self._swept):
                swept.drain()
        wait_s = (self.limits.drain_ms if ms is None else ms) / 1000
        try:
            await asyncio.wait_for(self._emptied.wait(), wait_s)
        except TimeoutError:
            await self.close()
            return False
        return True

    async def close(self) -> None:
        """Stop at once: every connection is cut."""
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
        """A connection was accepted: look after it, or tell it that there are too many."""
        self.connections_total += 1
        is_full = len(self._swept) >= self.limits.connections
        if is_full and len(self._swept) >= self._dropped_from:
            self.connections_refused += 1
            connection.transport.abort()
            return
        self.watch(connection)
        # A live reader is held back above `live_unsent_bytes` and goes on at the low-water mark, so the
        # transport has to count that much as high.
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

    def learn(self, head: bytes, known: CachedHead) -> None:
        """Remembers what the parser made of a head."""
        if len(self.heads_known) >= CACHED_HEADS_MAX:
            self.heads_known.clear()
        self.heads_known[head] = known

    def hold_body(self, size: int) -> bool:
        """Count a body that waits in memory for its turn; False if bodies take too much memory already."""
        if self.body_bytes_held + size > self.limits.append_queue_max_bytes:
            return False
        self.body_bytes_held += size
        self.body_shares += 1
        return True

    def release_body(self, size: int) -> None:
        self.body_bytes_held -= size
        self.body_shares -= 1
        if self.bodies_waiting:
            self.share_out()

    def has_share(self, size: int) -> bool:
        """Whether a further body of this size may be received now. One alone always may."""
        fits = self.body_bytes_held + size <= self.limits.append_queue_max_bytes
        return fits or not self.body_shares

    def share_out(self) -> None:
        """Memory for bodies was given back: those that wait for it are read further, soon and in order."""
        if not self._sharing_out:
            self._sharing_out = True
            self.loop.call_soon(self._share_out)

    def _share_out(self) -> None:
        self._sharing_out = False
        waiting = self.bodies_waiting
        while waiting:
            wanted = waiting[0].share_wanted
            if wanted is not None:
                if not self.has_share(wanted):
                    return
                waiting[0].take_share()
            waiting.popleft()

    def watch(self, swept: SweptConnection) -> None:
        """Have the sweeper look after `swept` until `forget`."""
        self._swept.add(swept)
        self._emptied.clear()
        if self._sweep_timer is None:
            self._set_time(self.loop.time())
            self._sweep_timer = self.loop.call_later(SWEEP_S, self._on_timer)

    def forget(self, swept: SweptConnection) -> None:
        self._swept.discard(swept)
        if not self._swept:
            self._emptied.set()

    def flush_later(self, connection: BufferedConnection) -> None:
        """Have `connection.flush` called at the end of this turn of the loop."""
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
        """Look at every connection whose deadline lies before `now`."""
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
        """What every answer with this status begins with, made once per second and status."""
        head = self.status_heads.get(status)
        if head is None:
            head = self.status_heads[status] = status_line(status) + self._date + self.fixed_headers
        return head

    def start_of_answer(self, status: int, exchange: Exchange | None) -> bytes:
        """The status line and the headers that every response carries."""
        head = self.status_head(status)
        return head if self.varying_headers is None else head + self.varying_headers(exchange)
