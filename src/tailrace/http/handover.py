"""Hands a client connection over to another process of the same server, with its current request.

Relaying costs two processes work for each request. A connection that keeps requesting streams of another
process is better served there: its descriptor is sent over a unix socket, and nothing of it remains here.
This is done only between two requests, when no response is pending, and never with TLS, whose state cannot be
moved.
"""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tailrace.common.tasks import TaskSet
from tailrace.http.connection import HttpConnection
from tailrace.http.exchange import MODE_ADMISSION_CHECKED, MODE_UPGRADE, Exchange
from tailrace.http.relay import encode_request

if TYPE_CHECKING:
    from tailrace.http.server import HttpServer

# A larger request is relayed instead.
REQUEST_BYTES_MAX: Final = 64 * 1024
ACCEPTED_PER_TURN: Final = 64


class HandoverSender:
    """The sending side."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.handed_over = 0

    def hand_over(self, exchange: Exchange, path: str) -> bool:
        """Returns whether the other process has taken the connection and its request."""
        connection = exchange.connection
        if (
            connection.scheme != b"http"
            or not connection.is_only_request(exchange)
            or connection.unsent_bytes
            or exchange.mode & ~(MODE_UPGRADE | MODE_ADMISSION_CHECKED)
            or exchange.repeated is not None
            or len(exchange.body) > REQUEST_BYTES_MAX // 2
        ):
            return False
        request = encode_request(exchange)
        client: socket.socket | None = connection.transport.get_extra_info("socket")
        if client is None or len(request) > REQUEST_BYTES_MAX:
            return False
        try:
            # Not `send_fds`, which ignores the address before Python 3.12.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [client.fileno()]))
            self._socket.sendmsg([request], [rights], 0, path)
        except OSError:
            return False  # it does not run, or its queue is full
        self.handed_over += 1
        exchange.answered = True
        # The other process holds the connection open; this only closes our descriptor.
        connection.transport.abort()
        return True

    def close(self) -> None:
        self._socket.close()


class HandoverReceiver:
    """The receiving side: a received connection is served like an accepted one."""

    def __init__(self, http: HttpServer, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._http = http
        self._loop = loop
        self._tasks = TaskSet()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path)
        loop.add_reader(self._socket, self._on_readable)

    def close(self) -> None:
        """Stop receiving; connections still in the queue are cut off, as by any closed listener."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _on_readable(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                request, descriptors, _, _ = socket.recv_fds(self._socket, 2 * REQUEST_BYTES_MAX, 1)
            except OSError:
                return
            for descriptor in descriptors:
                self._accept(descriptor, request)

    def _accept(self, descriptor: int, request: bytes) -> None:
        try:
            client = socket.socket(fileno=descriptor)
            client.setblocking(False)
        except OSError:
            os.close(descriptor)
            return
        self._tasks.start(self._connect(lambda: HandedOverConnection(self._http, request), client))

    async def _connect(self, factory: Callable[[], HandedOverConnection], client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(factory, client)
        except OSError:
            client.close()


class HandedOverConnection(HttpConnection):
    """A connection whose first request was received by another process."""

    __slots__ = ("_first",)

    def __init__(self, server: HttpServer, first: bytes) -> None:
        super().__init__(server)
        self._first = first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        first, self._first = self._first, b""
        self.data_received(first)
