"""The HTTP client of relay and edge: forms of responses, bounded memory, reuse of connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.http_app import until
from tailrace.http.client import (
    HELD_BYTES_MAX,
    ConnectionPool,
    HeaderConnection,
    SocketAddress,
    UpstreamConnection,
    UpstreamLostError,
    UpstreamResponse,
)

REQUEST = b"GET / HTTP/1.1\r\nHost: upstream\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """A pool, and the scripted server that it connects to."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.connections = 0

    async def ask(self, *, is_head: bool = False) -> UpstreamResponse:
        connection = self.pool.pop_idle() or await self.pool.connect()
        response = UpstreamResponse()
        connection.send(REQUEST, response, is_head=is_head)
        await response.head()
        return response


@asynccontextmanager
async def upstream(
    serve: Serve,
    connection_type: type[UpstreamConnection] = HeaderConnection,
    *,
    unix: bool = True,
    idle_s_max: float = inf,
) -> AsyncIterator[Upstream]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    with TemporaryDirectory() as directory:
        if unix:
            path = str(Path(directory) / "upstream")
            server, address = await asyncio.start_unix_server(accept, path), SocketAddress(path=path)
        else:
            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            address = SocketAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        found = Upstream(ConnectionPool(address, loop, connection_type, idle_max=2, idle_s_max=idle_s_max))
        async with asyncio.timeout(30):
            yield found
        found.pool.close()
        server.close()


def replying(*responses: bytes) -> Serve:
    """Sends one of the responses to each request of a connection, then waits for the client."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for response in responses:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
        await reader.read()

    return serve


FORMS = {
    "length": OK,
    "chunks": CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    "after 103": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK,
}


@pytest.mark.parametrize("connection_type", [UpstreamConnection, HeaderConnection])
@pytest.mark.parametrize("form", FORMS)
def test_a_response_may_be_split_anywhere(form: str, connection_type: type[UpstreamConnection]) -> None:
    whole = FORMS[form]

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for at in range(1, len(whole)):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(whole[:at])
                await asyncio.sleep(0)  # let the first part be read on its own
                writer.write(whole[at:])
            await reader.read()

        async with upstream(serve, connection_type) as found:
            for _ in range(1, len(whole)):
                response = await found.ask()
                assert (response.status, await response.body(100)) == (200, b"ok")
                assert response.get(b"link") is None
                assert response.get(b"x-trailer") is None
            assert found.connections == 1

    asyncio.run(main())


@pytest.mark.parametrize("unix", [True, False])
def test_header_lines_are_unchanged_and_found_by_name(unix: bool) -> None:
    async def main() -> None:
        reply = b"HTTP/1.1 204 No Content\r\nX-One: 1\r\nx-one:  2 \r\nX-Number: 12x\r\n\r\n"
        async with upstream(replying(reply), unix=unix) as found:
            response = await found.ask()
            assert response.fields == [(b"X-One", b"1"), (b"x-one", b"2"), (b"X-Number", b"12x")]
            assert response.get(b"x-one") == b"2"
            assert response.number(b"x-one") == 2
            assert response.number(b"x-number") is None
            assert response.complete
            assert await response.body(0) == b""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("response", "is_head", "connections"),
    [
        (OK, False, 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", False, 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", False, 2),
        (OK + OK, False, 2),  # bytes that belong to no request
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", True, 1),
        (b"HTTP/1.1 200 OK\r\n\r\n", True, 1),
        (b"HTTP/1.1 200 OK\r\nconnection: Close\r\n\r\n", True, 2),
    ],
    ids=["kept", "close", "HTTP/1.0", "excess", "HEAD", "HEAD without length", "HEAD and close"],
)
def test_a_connection_is_reused_after_a_complete_response(
    response: bytes, is_head: bool, connections: int
) -> None:
    async def main() -> None:
        async with upstream(replying(response, response)) as found:
            for _ in range(2):
                reply = await found.ask(is_head=is_head)
                assert await reply.body(100) == (b"" if is_head else b"ok")
            assert found.connections == connections

    asyncio.run(main())


def test_a_connection_that_was_idle_for_long_is_not_reused() -> None:
    async def main() -> None:
        async with upstream(replying(OK, OK), idle_s_max=-1.0) as found:
            for _ in range(2):
                await found.ask()
            assert found.connections == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"", "was lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "was lost"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "malformed"),
    ],
)
def test_a_missing_header_is_an_error(response: bytes, reason: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)

        async with upstream(serve) as found:
            with pytest.raises(UpstreamLostError, match=reason) as lost:
                await found.ask()
            assert lost.value.sent

    asyncio.run(main())


def test_an_upstream_that_does_not_listen_has_not_seen_the_request() -> None:
    async def main() -> None:
        address = SocketAddress(path="/nonexistent/upstream")
        pool = ConnectionPool(address, asyncio.get_running_loop(), UpstreamConnection, idle_max=1)
        with pytest.raises(UpstreamLostError) as lost:
            await pool.connect()
        assert not lost.value.sent

    asyncio.run(main())


def test_what_arrived_before_the_end_of_a_cut_body_is_read_first() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")

        async with upstream(serve) as found:
            response = await found.ask()
            assert await response.piece() == b"half"
            with pytest.raises(UpstreamLostError):
                await response.piece()
            assert not response.complete

    asyncio.run(main())


def test_a_body_that_is_not_read_is_held_back() -> None:
    total = 64 * 1024 * 1024

    async def main() -> None:
        sent = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            while sent < total:
                writer.write(bytes(1024 * 1024))
                sent += 1024 * 1024
                await writer.drain()
            await reader.read()

        async with upstream(serve) as found:
            response = await found.ask()
            piece = await response.piece()
            size = largest = len(piece)
            while piece := await response.piece():
                size += len(piece)
                largest = max(largest, len(piece))
            assert size == total
            # One read of the socket may exceed the mark, by at most 256 KiB.
            assert largest <= HELD_BYTES_MAX + 256 * 1024
            assert found.pool.pop_idle() is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 100,
        CHUNKED + b"65\r\n" + b"x" * 101 + b"\r\n",
    ],
    ids=["length", "chunks"],
)
def test_a_body_above_the_limit_is_dropped_with_its_connection(response: bytes) -> None:
    async def main() -> None:
        async with upstream(replying(response)) as found:
            reply = await found.ask()
            connection = reply.connection
            assert connection is not None
            assert await reply.body(100) is None
            await until(lambda: connection.closed)
            assert found.pool.pop_idle() is None

    asyncio.run(main())


def test_a_response_abandoned_before_its_request_is_sent_ends_the_connection() -> None:
    async def main() -> None:
        async with upstream(replying(OK)) as found:
            connection, response = await found.pool.connect(), UpstreamResponse()
            response.abandon()
            connection.send(REQUEST, response)
            with pytest.raises(UpstreamLostError):
                await response.head()

    asyncio.run(main())


class Collecting(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


def test_bytes_after_an_upgrade_belong_to_the_next_protocol() -> None:
    switching = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async def main() -> None:
        more = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(switching + b"early")
            await more.wait()
            writer.write(b" and late")
            await reader.read()

        async with upstream(serve) as found:
            response, protocol = await found.ask(), Collecting()
            assert response.status == 101
            assert response.get(b"upgrade") == b"websocket"
            connection = response.connection
            assert connection is not None
            assert connection.take_over(protocol) == b"early"
            more.set()
            await until(lambda: protocol.data == b" and late")
            found.pool.close()  # no longer has this connection
            assert not connection.transport.is_closing()
            connection.transport.close()

    asyncio.run(main())
