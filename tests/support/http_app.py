"""A small application behind a real `HttpServer`, and a raw client for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.http import Exchange, HttpServer, ResponseStream, WebSocketConnection

HOST = b"Host: tailrace.test\r\n"
WAIT_S = 60
BIG_BYTES = 8 * 1024 * 1024


def on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on the loop the server is made for."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 120))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        turns = 0
        while not condition():
            # Most conditions hold after a few turns of the loop; the rest are not worth a busy core.
            turns += 1
            await asyncio.sleep(0 if turns < 100 else 0.001)


@dataclass
class EchoHandler:
    """A WebSocket endpoint that sends everything back and remembers what happened."""

    connection: WebSocketConnection | None = None
    messages: list[tuple[bytes, bool]] = field(default_factory=list)
    too_large: list[tuple[bytes, int]] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)
    drained: int = 0

    def on_message(self, data: bytes, is_text: bool) -> None:
        if data == b"raise":
            raise ValueError("asked for")
        self.messages.append((data, is_text))
        assert self.connection is not None
        if is_text:
            self.connection.send_text(data)
        else:
            self.connection.send_binary(data)

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        self.too_large.append((prefix, size_bytes))
        assert self.connection is not None
        self.connection.send_text(b"too large")

    def on_drain(self) -> None:
        self.drained += 1

    def on_silence(self) -> None:
        assert self.connection is not None
        self.connection.send_text(b"are you gone")

    def on_close(self, code: int, reason: str) -> None:
        self.closed.append((code, reason))


class TestApp:
    """Answers by path: /hold waits for the test, /stream opens an outlet, /ws upgrades, others echo."""

    __test__ = False
    fixed_headers: bytes | None = None

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.outlets: list[ResponseStream] = []
        self.sockets: list[EchoHandler] = []
        self.seen: list[bytes] = []
        self.gone: list[bytes] = []
        self.deflate = False

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def handle(self, exchange: Exchange) -> None:
        path = exchange.path
        self.seen.append(path)
        if path.startswith(b"/hold"):
            self.held.append(exchange)
            if path == b"/hold/wait":
                exchange.on_gone = lambda: self.gone.append(path)
        elif path == b"/stream":
            self.outlets.append(exchange.open_stream(200, b"Content-Type: text/event-stream\r\n"))
        elif path == b"/ws":
            handler = EchoHandler()
            self.sockets.append(handler)
            handler.connection = exchange.upgrade_websocket(handler, deflate=self.deflate)
        elif path == b"/big":
            exchange.respond(200, b"", [memoryview(b"x" * BIG_BYTES)])
        elif path == b"/empty":
            exchange.respond(204, b"X-Empty: yes\r\n", b"never sent")
        elif path == b"/raise":
            raise ValueError("a secret of the handler")
        elif path == b"/refuse":
            raise TailraceError("not_found", "no such thing", headers=(("X-Why", "because"),))
        else:
            exchange.respond(200, b"Content-Type: application/json\r\n", describe(exchange))

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers)
        return error.status, b"Content-Type: application/json\r\n" + lines.encode(), error.body()

    def common_headers(self, exchange: Exchange | None) -> bytes:
        return b"X-Common: 1\r\n"


def describe(exchange: Exchange) -> bytes:
    return orjson.dumps(
        {
            "method": exchange.method.decode(),
            "path": exchange.path.decode("latin-1"),
            "query": exchange.query.decode("latin-1"),
            "headers": {k.decode("latin-1"): v.decode("latin-1") for k, v in exchange.headers.items()},
            "repeated": sorted(name.decode() for name in exchange.repeated or ()),
            "body": exchange.body.decode("latin-1"),
        }
    )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]


class RawClient:
    """A socket that sends exactly the bytes it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(WAIT_S):
            block = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = block.decode("latin-1").split("\r\n")[:-2]
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def answer(self, *, is_head: bool = False) -> Answer:
        status, headers = await self.head()
        body = b""
        if not is_head and headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif not is_head and "content-length" in headers:
            async with asyncio.timeout(WAIT_S):
                body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while payload := await self.chunk():
            yield payload

    async def chunk(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        """Everything until the server closes; a reset counts as a close."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


class Site:
    """The application, its server and clients for it."""

    def __init__(self, app: TestApp, server: HttpServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self._clients: list[RawClient] = []

    async def connect(self, *, read_limit: int = 2**16, **options: Any) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=read_limit, **options)
        client = RawClient(reader, writer)
        self._clients.append(client)
        return client

    async def exchange(self, request: bytes) -> Answer:
        client = await self.connect()
        await client.send(request)
        answer = await client.answer()
        await client.close()
        return answer

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.close()


@asynccontextmanager
async def site(app: TestApp | None = None, *, tls: Any = None, **limits: Any) -> AsyncIterator[Site]:
    app = app or TestApp()
    server = HttpServer(app, Limits(**limits))
    opened = Site(app, server, await server.start("127.0.0.1", 0, ssl=tls))
    try:
        yield opened
    finally:
        await opened.close()


def get(path: str = "/", *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers).encode("latin-1")
    return b"GET %b HTTP/1.1\r\n" % path.encode() + HOST + lines + b"\r\n"


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers).encode("latin-1")
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n" % path.encode() + HOST + length + lines + b"\r\n" + body


def chunked(path: str, *pieces: bytes, trailers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\n" % path.encode() + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head + framed + b"0\r\n" + trailers + b"\r\n"
