"""A real edge process for tests, and readers that come back after every cut."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from support.calls import Caller, Reply, eventually
from support.cutting_proxy import Direction
from support.server import ServerProcess

RETRY_S = 0.05
JSON_TYPE, TEXT_TYPE, BYTES_TYPE = CONTENT_TYPES = (
    "application/json",
    "text/plain",
    "application/octet-stream",
)
RECORD_BYTES = 8


class EdgeProcess(ServerProcess):
    """One ``tailrace edge`` in front of servers."""

    def __init__(
        self,
        directory: Path,
        *upstreams: str,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__(directory, args=args, env=env, plain=plain)
        self._upstreams = ",".join(upstreams)

    def arguments(self) -> list[str]:
        listen = f"127.0.0.1:{self.port}"
        return ["edge", "--listen", listen, "--upstream", self._upstreams, *self.args]


StartEdge = Callable[..., EdgeProcess]


def metrics(server: ServerProcess, token: str | None = None) -> dict[str, float]:
    """The numbers of a server or an edge, by name with labels."""
    text = Caller(server, token)("GET", "/metrics").raw.decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def upstream_sockets(server: ServerProcess) -> float:
    """WebSockets that follow streams on a server; one of them is the edge's look at the registry."""
    return metrics(server)['tailrace_live_connections{mode="ws"}']


class Asked:
    """What edges ask their owner for: given to a proxy between the two."""

    def __init__(self) -> None:
        self._heads: list[bytes] = []

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        if direction == "request":
            self._heads.append(piece)
        return False

    def reads(self, name: str, query: str = "") -> int:
        return self.count("GET", name, query)

    def renewals(self, name: str) -> int:
        return self.reads(name, "?offset=now ")

    def count(self, method: str, name: str, query: str = "") -> int:
        return sum(head.startswith(f"{method} /v1/stream/{name}{query}".encode()) for head in self._heads)

    def slices(self, name: str) -> int:
        """Reads that ask for what is there, and wait for nothing."""
        plain = f"GET /v1/stream/{name}?".encode()
        lines = [head.partition(b"\r\n")[0] for head in self._heads]
        return sum(line.startswith(plain) and b"live=" not in line for line in lines)

    def sockets(self, name: str) -> int:
        """How often the stream was followed anew."""
        plain = f"GET /v1/stream/{name}?live=ws".encode()
        return sum(head.startswith(plain) for head in self._heads)


def cached(call: Caller, path: str) -> Reply:
    """Reads until the answer comes from the cache: keeping it happens after the first answer."""
    return eventually(lambda: call("GET", path), lambda reply: reply.headers["x-cache"] == "HIT")


def record(number: int, content_type: str) -> bytes:
    """A number as an entry; all of a type are equally long, so that a page of them can be told apart."""
    if content_type == JSON_TYPE:
        return b"%d" % number
    return b"%07d\n" % number if content_type == TEXT_TYPE else struct.pack(">Q", number)


def numbers_in(payload: bytes, content_type: str) -> list[Any]:
    """The entries of a page. Nothing is cut in the middle, so that it is made of whole ones."""
    if content_type == JSON_TYPE:
        return json.loads(payload)
    records = [payload[at : at + RECORD_BYTES] for at in range(0, len(payload), RECORD_BYTES)]
    return [int(one) if content_type == TEXT_TYPE else struct.unpack(">Q", one)[0] for one in records]


def entry_offset(entry: int) -> str:
    """Where a reader begins that wants this entry first."""
    return f"{0:016}_{entry:016}"


class Follower:
    """Follows a stream over all its reconnects, and remembers every entry that it was given.

    What came without its control is not counted: the client would read it again.
    """

    def __init__(
        self,
        port: int,
        name: str,
        mode: str,
        offset: str = "-1",
        key: str = "",
        content_type: str = JSON_TYPE,
    ) -> None:
        self.port = port
        self.mode = mode
        self.offset = offset
        self._content_type = content_type
        self.entries: list[Any] = []
        self.connections = 0
        self.closed = False
        self.live = asyncio.Event()  # told to be up to date at least once
        self._cursor = ""
        self._path = f"/v1/stream/{quote(name)}"
        self._key = f"&key={quote(key)}" if key else ""

    async def run(self) -> None:
        """Until the stream is closed and all of it was seen."""
        sessions = {"sse": self._sse, "ws": self._ws, "long-poll": self._long_poll}
        while not self.closed:
            self.connections += 1
            try:
                await sessions[self.mode]()
            except (OSError, EOFError, WebSocketException, asyncio.IncompleteReadError, _Refused):
                pass
            if not self.closed:
                await asyncio.sleep(RETRY_S)

    def _target(self) -> str:
        cursor = f"&cursor={self._cursor}" if self._cursor else ""
        return f"{self._path}?offset={self.offset}&live={self.mode}{cursor}{self._key}"

    def _take(self, payload: bytes | None, control: dict[str, Any]) -> None:
        if payload is not None:
            self.entries += numbers_in(payload, self._content_type)
        self.offset = control["streamNextOffset"]
        self._cursor = control.get("streamCursor", "")
        if control.get("upToDate"):
            self.live.set()
        self.closed |= control.get("streamClosed", False)

    async def _sse(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            writer.write(f"GET {self._target()} HTTP/1.1\r\nHost: edge.test\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise _Refused(head)
            packed = b"stream-sse-data-encoding: base64" in head.lower()
            payload: bytes | None = None
            buffer = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                buffer += (await reader.readexactly(size + 2))[:-2]
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    kind, _, rest = event.partition(b"\n")
                    lines = [line[5:] for line in rest.split(b"\n") if line.startswith(b"data:")]
                    if kind == b"event: data":
                        payload = b"\n".join(lines)
                        payload = base64.b64decode(payload) if packed else payload
                    elif kind == b"event: control":
                        self._take(payload, json.loads(lines[0]))
                        payload = None
        finally:
            writer.close()

    async def _ws(self) -> None:
        url = f"ws://127.0.0.1:{self.port}{self._target()}"
        async with connect(url, max_size=2**24, open_timeout=30, proxy=None) as socket:
            payload: bytes | None = None
            async for raw in socket:
                message = json.loads(raw)
                if message["type"] == "data":
                    payload = payload_in(message)
                else:
                    self._take(payload, message)
                    payload = None

    async def _long_poll(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            while not self.closed:
                writer.write(f"GET {self._target()} HTTP/1.1\r\nHost: edge.test\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")[:-2]
                fields = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
                status = int(first.split(" ")[1])
                if status not in (200, 204):
                    raise _Refused(head)
                body = b"" if status == 204 else await reader.readexactly(int(fields["content-length"]))
                control: dict[str, Any] = {"streamNextOffset": fields["stream-next-offset"]}
                control["streamCursor"] = fields.get("stream-cursor", "")
                control["upToDate"] = "stream-up-to-date" in fields
                control["streamClosed"] = "stream-closed" in fields
                self._take(body or None, control)
        finally:
            writer.close()


async def all_live(followers: list[Follower], patience_s: float = 60) -> None:
    """Waits until everybody is at the tail."""
    async with asyncio.timeout(patience_s):
        await asyncio.gather(*(follower.live.wait() for follower in followers))


class _Refused(Exception):  # noqa: N818 - not an error of the test
    pass


def payload_in(message: dict[str, Any]) -> bytes:
    """The bytes of a `data` message of `live=ws`."""
    text: str = message["payload"]
    return base64.b64decode(text) if message.get("encoding") == "base64" else text.encode()


class Writer:
    """Appends numbers, each exactly once, over cuts and restarts. With keys, each append has the next one."""

    def __init__(
        self, server: ServerProcess, name: str, content_type: str = JSON_TYPE, keys: Sequence[str] = ()
    ) -> None:
        self._call = Caller(server)
        self._name = name
        self._type = {"Content-Type": content_type}
        self._keys = keys
        self._key_of: list[str] = []  # by entry
        self._seq = 0
        assert self._call("PUT", name, headers=self._type).status in (200, 201)

    @property
    def count(self) -> int:
        return len(self._key_of)

    def numbers(self, first: int = 0, key: str = "") -> list[int]:
        """What a reader gets that begins at an entry."""
        return [number for number in range(first, self.count) if not key or self._key_of[number] == key]

    def append(self, entries: int = 1) -> None:
        """As one append, if the type of the stream allows that."""
        if self._type["Content-Type"] == JSON_TYPE:
            numbers = list(range(self.count, self.count + entries))
            self._append(json.dumps(numbers).encode(), entries)
            return
        for number in range(self.count, self.count + entries):
            self._append(record(number, self._type["Content-Type"]), 1)

    def _append(self, body: bytes, entries: int) -> None:
        headers = {"Producer-Id": "writer", "Producer-Epoch": "0", "Producer-Seq": str(self._seq)}
        key = self._keys[self._seq % len(self._keys)] if self._keys else ""
        if key:
            headers["Stream-Key"] = key
        eventually(lambda: self._try(body, headers), lambda status: status in (200, 204), 60)
        self._key_of += [key] * entries
        self._seq += 1

    def _try(self, body: bytes, headers: dict[str, str]) -> int:
        try:
            return self._call("POST", self._name, body, headers={**self._type, **headers}).status
        except OSError:
            return 0

    def close(self) -> None:
        def attempt() -> int:
            try:
                return self._call("POST", self._name, headers={"Stream-Closed": "true"}).status
            except OSError:
                return 0

        eventually(attempt, lambda status: status == 204, 60)
