"""Two connections whose bytes pass each other on: what is left when a relayed one leaves HTTP."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.http.connection import HttpConnection
    from tailrace.http.server import HttpServer


class TunnelEnd(asyncio.Protocol):
    """One of the two. Its transport is read only as fast as the other's is written."""

    __slots__ = ("deadline", "other", "server", "transport")

    other: TunnelEnd

    def __init__(self, transport: asyncio.Transport, server: HttpServer | None = None) -> None:
        self.transport = transport
        self.server = server  # of the end that the server looks after
        self.deadline = inf

    def data_received(self, data: bytes) -> None:
        server = self.server
        if server is not None:
            server.bytes_in += len(data)
        elif self.other.server is not None:
            self.other.server.bytes_out += len(data)
        try:
            self.other.transport.write(data)
        except (RuntimeError, OSError):
            self.transport.abort()

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.server is not None:
            self.server.forget(self)
        self.other.transport.close()

    def on_sweep(self, now: float) -> None:
        """Whoever answers keeps the time."""

    def drain(self) -> None:
        """Whoever answers says goodbye, and its end is ours."""


def open_tunnel(connection: HttpConnection, far: asyncio.Transport) -> None:
    """From now on the client and the other process talk without us."""
    server = connection.server
    near_end, far_end = TunnelEnd(connection.transport, server), TunnelEnd(far)
    near_end.other, far_end.other = far_end, near_end
    far.set_protocol(far_end)
    held = connection.detach(near_end)
    server.watch(near_end)
    if held:
        server.loop.call_soon(near_end.data_received, held)
