"""A proxy in front of an S3 server that does to requests what networks and clouds do.

It runs in a thread of its own, so that a test, or a server process that the test started, can use it. A
`Fault` names what happens, to which requests and how often; requests that no fault fits pass unharmed.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal[
    "hang",  # the request is read and never answered, and does not reach the server
    "reset",  # the connection is reset instead of an answer, and nothing reaches the server
    "answer",  # `status` and `code` are answered, and nothing reaches the server
    "delay",  # the request waits for `delay_s`, and is then carried out
    "hold",  # the request waits until the test says `let_go`, and is then carried out
    "cut",  # the answer's body ends in the middle
    "lost",  # the request is carried out, and the connection reset instead of the answer
    "lost_answer",  # the request is carried out, and `status` and `code` are answered
    "stale",  # a listing is answered as it was when it was last asked for
]
ANYTIME = 1_000_000
WAIT_S_MAX = 60.0


@dataclass
class Fault:
    kind: Kind
    methods: str = "GET|HEAD|PUT|POST|DELETE"
    key: str = ""  # a regular expression that is searched for in the path
    times: int = 1
    skip: int = 0  # requests that it spares first
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 0.0
    listings: bool | None = None  # only listings, or only what is none

    def fits(self, request: Request) -> bool:
        return (
            self.times > 0
            and re.fullmatch(self.methods, request.method) is not None
            and re.search(self.key, request.path) is not None
            and self.listings in (None, request.is_listing)
        )


class Request(NamedTuple):
    method: str
    target: str
    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def is_listing(self) -> bool:
        return "list-type" in parse_qs(urlsplit(self.target).query)


class Passed(NamedTuple):
    """A request that reached the server, and what that answered."""

    method: str
    path: str
    status: int


class FaultyS3:
    """``with FaultyS3(server.port) as proxy``: clients use `proxy.endpoint`, tests `inject` and `passed`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Condition()
        self._faults: list[Fault] = []
        self._passed: list[Passed] = []
        self._listings: dict[str, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._gate = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.harmed = 0

    # -- for tests -------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, *faults: Fault) -> None:
        with self._lock:
            self._faults.extend(faults)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def passed(self, methods: str = ".*", key: str = "") -> list[Passed]:
        """What reached the server so far."""
        with self._lock:
            return [
                one for one in self._passed if re.fullmatch(methods, one.method) and re.search(key, one.path)
            ]

    def let_go(self) -> None:
        """Carry out what is held, and hold nothing from now on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def wait_for(self, condition: Callable[[FaultyS3], object]) -> None:
        """Return when a request has made the condition true."""
        with self._lock:
            assert self._lock.wait_for(lambda: condition(self), WAIT_S_MAX), "no request made it true"

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the loop -----------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                answer = await self._handle(request, reader)
                if answer is None:
                    break
                writer.write(answer.content)
                await writer.drain()
                if answer.broken:
                    break
            else:
                writer.close()
                return
            _reset(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _handle(self, request: Request, reader: asyncio.StreamReader) -> Answer | None:
        fault = self._pick(request)
        kind = fault.kind if fault else None
        if fault is None or kind is None:
            return Answer(await self._forward(request))
        if kind == "hang":
            await reader.read()  # ends when the client gives up
            return None
        if kind == "reset":
            return None
        if kind == "answer":
            return Answer(_error(fault, request))
        if kind in ("delay", "hold"):
            await (asyncio.sleep(fault.delay_s) if kind == "delay" else self._gate.wait())
            return Answer(await self._forward(request))
        if kind == "stale" and request.target in self._listings:
            return Answer(self._listings[request.target])
        content = await self._forward(request)
        if kind == "lost":
            return None
        if kind == "lost_answer":
            return Answer(_error(fault, request))
        if kind == "cut":
            start = content.index(b"\r\n\r\n") + 4
            return Answer(content[: start + (len(content) - start) // 2], broken=True)
        return Answer(content)

    def _pick(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.fits(request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    self.harmed += 1
                    self._lock.notify_all()
                    return fault
        return None

    async def _forward(self, request: Request) -> bytes:
        """Carry the request out on a connection of its own, and read the answer to its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target, limit=2**20)
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            content = await _read_answer(reader, request.method)
        finally:
            writer.close()
        status = int(content.split(b" ", 2)[1])
        with self._lock:
            self._passed.append(Passed(request.method, request.path, status))
            self._lock.notify_all()
            if request.is_listing:
                self._listings[request.target] = content
        return content


class Answer(NamedTuple):
    content: bytes
    broken: bool = False


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    body = await reader.readexactly(int(_header(head, b"content-length") or 0))
    return Request(method, target, head, body)


async def _read_answer(reader: asyncio.StreamReader, method: str) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if method == "HEAD" or status in (204, 304):
        return head
    if (_header(head, b"transfer-encoding") or b"").lower() == b"chunked":
        return head + await _read_chunks(reader)
    return head + await reader.readexactly(int(_header(head, b"content-length") or 0))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        parts += [line, await reader.readexactly(size + 2)]
        if size == 0:
            return b"".join(parts)


def _header(head: bytes, name: bytes) -> bytes | None:
    found = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return found[1].strip() if found else None


def _error(fault: Fault, request: Request) -> bytes:
    body = b""
    if request.method != "HEAD":
        said = f"<Error><Code>{fault.code}</Code><Message>Injected.</Message></Error>"
        body = f"<?xml version='1.0'?>{said}".encode()
    return b"HTTP/1.1 %d Injected\r\ncontent-type: application/xml\r\ncontent-length: %d\r\n\r\n%b" % (
        fault.status,
        len(body),
        body,
    )


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a machine does that has lost its state."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
