"""A real edge process for tests, and readers that come back after every cut."""

from __future__ import annotations

import asyncio
import json
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
        return sum(head.startswith(f"GET /v1/stream/{name}{query}".encode()) for head in self._heads)

    def renewals(self, name: str) -> int:
        return self.reads(name, "?offset=now ")


def cached(call: Caller, path: str) -> Reply:
    """Reads until the answer comes from the cache: keeping it happens after the first answer."""
    return eventually(lambda: call("GET", path), lambda reply: reply.headers["x-cache"] == "HIT")


class Follower:
    """Follows a JSON stream over all its reconnects, and remembers every entry that it was given.

    What came without its control is not counted: the client would read it again.
    """

    def __init__(self, port: int, name: str, mode: str, offset: str = "-1", key: str = "") -> None:
        self.port = port
        self.mode = mode
        self.offset = offset
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

    def _take(self, payload: str | None, control: dict[str, Any]) -> None:
        if payload is not None:
            self.entries += json.loads(payload)
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
            payload: str | None = None
            buffer = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                buffer += (await reader.readexactly(size + 2))[:-2]
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    kind, _, rest = event.partition(b"\n")
                    lines = [line.removeprefix(b"data:") for line in rest.split(b"\n")]
                    if kind == b"event: data":
                        payload = b"\n".join(lines).decode()
                    elif kind == b"event: control":
                        self._take(payload, json.loads(lines[0]))
                        payload = None
        finally:
            writer.close()

    async def _ws(self) -> None:
        url = f"ws://127.0.0.1:{self.port}{self._target()}"
        async with connect(url, max_size=2**24, open_timeout=30, proxy=None) as socket:
            payload: str | None = None
            async for raw in socket:
                message = json.loads(raw)
                if message["type"] == "data":
                    payload = message["payload"]
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
                self._take(body.decode() or None, control)
        finally:
            writer.close()


async def all_live(followers: list[Follower], patience_s: float = 60) -> None:
    """Waits until everybody is at the tail."""
    async with asyncio.timeout(patience_s):
        await asyncio.gather(*(follower.live.wait() for follower in followers))


class _Refused(Exception):  # noqa: N818 - not an error of the test
    pass


class Writer:
    """Appends numbers, each exactly once, over cuts and restarts."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self._call = Caller(server)
        self._name = name
        self.count = 0
        assert self._call("PUT", name, headers={"Content-Type": "application/json"}).status in (200, 201)

    def append(self, entries: int = 1) -> None:
        numbers = list(range(self.count, self.count + entries))
        producer = {"Producer-Id": "writer", "Producer-Epoch": "0", "Producer-Seq": str(self._seq)}
        eventually(lambda: self._try(numbers, producer), lambda status: status in (200, 204), 60)
        self.count += entries
        self._seq += 1

    _seq = 0

    def _try(self, numbers: list[int], producer: dict[str, str]) -> int:
        try:
            return self._call("POST", self._name, numbers, headers=producer).status
        except OSError:
            return 0

    def close(self) -> None:
        def attempt() -> int:
            try:
                return self._call("POST", self._name, headers={"Stream-Closed": "true"}).status
            except OSError:
                return 0

        eventually(attempt, lambda status: status == 204, 60)
