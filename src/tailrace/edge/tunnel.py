"""Upgraded connections that pass the edge byte for byte."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from tailrace.edge.connection import Reply, UpstreamConnection
from tailrace.edge.headers import RESPONSE_OWN
from tailrace.net.http1 import Exchange
from tailrace.net.wire import status_line

if TYPE_CHECKING:
    from tailrace.net.server import HttpServer


class End(asyncio.Protocol):
    """One end of a tunnel: what comes in here goes out at the other."""

    deadline = inf  # the two ends look after each other; nobody has to sweep them

    def __init__(self, transport: asyncio.Transport, server: HttpServer | None) -> None:
        self.transport = transport
        self.other: End | None = None
        self._server = server  # None for the upstream's end

    def data_received(self, data: bytes) -> None:
        if self._server is not None:
            self._server.bytes_in += len(data)
        if self.other is not None:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        if self._server is not None:
            self._server.bytes_out += len(data)
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.forget(self)
        other, self.other = self.other, None
        if other is not None:
            other.transport.close()

    def on_sweep(self, now: float) -> None:
        """Never due."""

    def drain(self) -> None:
        """The edge stops: both ends are closed, and the client comes back elsewhere."""
        self.transport.close()


def tunnel(exchange: Exchange, reply: Reply, connection: UpstreamConnection) -> None:
    """Joins a client and an upstream that has agreed to leave HTTP."""
    client = exchange.connection
    if exchange.answered or connection.closed:
        connection.abort()
        client.transport.abort()
        return
    server = client.server
    kept = [(name, value) for name, value in reply.fields if name.lower() not in RESPONSE_OWN]
    lines = b"".join(b"%b: %b\r\n" % field for field in kept if not _is_cors(field[0]))
    head = status_line(101) + lines + server.app.common_headers(exchange) + b"X-Cache: BYPASS\r\n\r\n"
    exchange.answered = True
    exchange.on_gone = None
    client.write(head)
    near, far = End(client.transport, server), End(connection.transport, None)
    near.other, far.other = far, near
    early = connection.take_over(far)
    held = client.detach(near)
    server.watch(near)
    if early:
        near.write(early)
    if held:
        far.write(held)


def _is_cors(name: bytes) -> bool:
    return name.lower().startswith(b"access-control-")
