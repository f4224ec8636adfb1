"""Many realtime connections to one server: how late events are, and what one costs that only waits."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import secrets
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.processes import Running, free_port, launch

DATABASE = "/v1/databases/default"
OPEN_AT_ONCE = 100

Queries = Sequence[dict[str, Any]]  # of one connection


class Client(asyncio.Protocol):
    """As little of a WebSocket client as will do: text frames in, its subscriptions out."""

    def __init__(self, queries: Queries, late_ms: list[float]) -> None:
        self._queries = queries
        self._unanswered = len(queries)
        self._late_ms = late_ms
        self._buffer = b""
        self._open = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        transport.write(
            f"GET /realtime/ws HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )

    def send(self, message: dict[str, Any]) -> None:
        raw = json.dumps(message).encode()
        size = bytes((0x80 | len(raw),)) if len(raw) < 126 else b"\xfe" + struct.pack(">H", len(raw))
        assert self.transport is not None
        self.transport.write(b"\x81" + size + b"\0\0\0\0" + raw)  # a mask of zeros changes nothing

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._open:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head:
                self.ready.set_exception(ConnectionError(head.decode("latin-1")[:200]))
                return
            self._open, self._buffer = True, rest
            for number, query in enumerate(self._queries):
                self.send({"id": f"s{number}", "type": "subscribe", "payload": {"query": query}})
        self._frames()

    def _frames(self) -> None:
        buffer, place = self._buffer, 0
        while len(buffer) - place >= 2:
            opcode, size, begin = buffer[place] & 15, buffer[place + 1], place + 2
            if size == 126:
                if len(buffer) < begin + 2:
                    break
                size, begin = struct.unpack_from(">H", buffer, begin)[0], begin + 2
            elif size == 127:
                if len(buffer) < begin + 8:
                    break
                size, begin = struct.unpack_from(">Q", buffer, begin)[0], begin + 8
            if len(buffer) < begin + size:
                break
            if opcode == 1:
                self._take(buffer[begin : begin + size])
            elif opcode == 9 and self.transport is not None:
                self.transport.write(
                    b"\x8a" + bytes((0x80 | size,)) + b"\0\0\0\0" + buffer[begin : begin + size]
                )
            place = begin + size
        self._buffer = buffer[place:]

    def _take(self, raw: bytes) -> None:
        if not self.ready.done():
            kind = json.loads(raw)["type"]
            if kind == "subscribe_ack":
                self._unanswered -= 1
                if not self._unanswered:
                    self.ready.set_result(None)
            else:
                self.ready.set_exception(ConnectionError(raw.decode()[:200]))
            return
        mark = raw.find(b'"sent":')
        if mark >= 0:
            self.events += 1
            sent_ns = int(raw[mark + 7 :].split(b"}", 1)[0].split(b",", 1)[0])
            self._late_ms.append((time.monotonic_ns() - sent_ns) / 1e6)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("the server closed the connection"))


class Bench:
    """One server on an empty directory."""

    def __init__(self, cpus: frozenset[int] | None, connections: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="watch-bench-", dir=os.environ.get("BENCH_DIR")))
        bound = str(max(20_000, connections + 100))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, connections + 500)), hard))
        port = free_port()
        argv = [sys.executable, "-m", "tailrace", "serve", "--data-dir", str(self._directory / "data")]
        argv += ["--port", str(port), "--pipeline", "off"]
        argv += ["--watch-connections", bound, "--connections", bound]
        self.server: Running = launch(argv, {}, port, "/readyz", self._directory / "log", cpus)

    async def connect(self, queries: Sequence[Queries], late_ms: list[float]) -> list[Client]:
        """A connection for each of these."""
        loop, port = asyncio.get_running_loop(), self.server.port
        clients: list[Client] = []
        for begin in range(0, len(queries), OPEN_AT_ONCE):
            some = queries[begin : begin + OPEN_AT_ONCE]
            made = await asyncio.gather(
                *(
                    loop.create_connection(lambda asked=asked: Client(asked, late_ms), "127.0.0.1", port)
                    for asked in some
                )
            )
            opened = [protocol for _, protocol in made]
            await asyncio.gather(*(client.ready for client in opened))
            clients += opened
        return clients

    def close(self) -> None:
        self.server.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _write(port: int, rate: int, seconds: float, rooms: int) -> int:
    """Batches of changes at fixed times, whatever became of those before; how many changes were made."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    each = max(1, rate // 100)
    loop = asyncio.get_running_loop()
    begun, number, written = loop.time(), 0, 0
    while loop.time() - begun < seconds:
        due = begun + number * each / rate
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        number += 1
        sent = time.monotonic_ns()
        writes = [
            {
                "op": "put",
                "path": f"rooms/d{(written + one) % 5000}",
                "data": {"room": (written + one) * 7919 % rooms, "text": "x" * 100, "sent": sent},
            }
            for one in range(each)
        ]
        body = json.dumps({"writes": writes}).encode()
        head = f"POST {DATABASE}/batch HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in status.split(b"\r\n", 1)[0], status
        length = next(
            int(line.split(b":")[1])
            for line in status.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        written += each
    writer.close()
    return written


def _of_room(number: int) -> dict[str, Any]:
    return {"collection": "rooms", "filters": [{"field": "room", "op": "==", "value": number}]}


class Late(NamedTuple):
    """How late events were."""

    connections: int
    subscriptions: int
    stalled: int
    changes_per_s: float
    events: int
    p50_ms: float
    p99_ms: float
    cores: float

    def __str__(self) -> str:
        beside = f" beside {self.stalled} that read nothing" if self.stalled else ""
        return (
            f"{self.connections:>8,} connections, {self.subscriptions:,} subscriptions{beside}, "
            f"{self.changes_per_s:,.0f} changes/s: "
            f"write to client p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms "
            f"over {self.events:,} events; "
            f"server {self.cores:.2f} cores"
        )


def latency(
    connections: int, rate: int, seconds: float, cpus: frozenset[int] | None, stalled: int, each: int = 1
) -> Late:
    """Each connection watches rooms of its own, each of them by itself; each change is in one room.

    Those that are stalled ask for everything and read nothing, and talk nonsense before that.
    """
    bench = Bench(cpus, connections + stalled)
    late_ms: list[float] = []

    async def main() -> int:
        rooms = [_of_room(number) for number in range(connections * each)]
        await bench.connect([rooms[place::connections] for place in range(connections)], late_ms)
        for client in await bench.connect([[{"collection": "rooms"}]] * stalled, []):
            assert client.transport is not None
            for _ in range(2):
                client.send({"type": "nonsense", "payload": {}})
            client.transport.pause_reading()
        await _write(bench.server.port, rate, 1.0, connections * each)
        late_ms.clear()
        written = await _write(bench.server.port, rate, seconds, connections * each)
        await asyncio.sleep(3.0)  # for the last of them to arrive
        return written

    try:
        before_s = bench.server.cpu_seconds()
        written = asyncio.run(main())
        spent_s = bench.server.cpu_seconds() - before_s
    finally:
        bench.close()
    late_ms.sort()
    # A document that changes its room concerns two of them.
    p50, p99 = (late_ms[int(len(late_ms) * share)] for share in (0.5, 0.99))
    cores, count = spent_s / (seconds + 1), connections * each
    found = Late(connections, count, stalled, written / seconds, len(late_ms), p50, p99, cores)
    print(found)
    return found


class Fanned(NamedTuple):
    """What it costs to tell many of one change."""

    connections: int
    events_per_s: float
    cores: float
    each_us: float | None  # of the server's time, for each delivery more than in the step before

    def __str__(self) -> str:
        each = "" if self.each_us is None else f"; {self.each_us:.1f} us for each delivery more"
        return (
            f"{self.connections:>8,} connections: {self.events_per_s:,.0f} deliveries/s, "
            f"server {self.cores:.2f} cores{each}"
        )


def deliveries(steps: list[int], rate: int, seconds: float, cpus: frozenset[int] | None) -> list[Fanned]:
    """Everybody is told of every change, in the same words."""
    found: list[Fanned] = []
    for count in steps:
        events, spent_s = _fanned(count, rate, seconds, cpus)
        each_us: float | None = None
        if found:
            before = found[-1]
            more = events / seconds - before.events_per_s
            each_us = (spent_s / seconds - before.cores) / more * 1e6
        found.append(Fanned(count, events / seconds, spent_s / seconds, each_us))
        print(found[-1])
    return found


def _fanned(count: int, rate: int, seconds: float, cpus: frozenset[int] | None) -> tuple[int, float]:
    """Events that arrived, and the processor time of the server."""
    bench = Bench(cpus, count)

    async def main() -> tuple[int, float]:
        clients = await bench.connect([[{"collection": "rooms"}]] * count, [])
        before_s = bench.server.cpu_seconds()
        await _write(bench.server.port, rate, seconds, count)
        await asyncio.sleep(2.0)  # for the last of them to arrive
        return sum(client.events for client in clients), bench.server.cpu_seconds() - before_s

    try:
        return asyncio.run(main())
    finally:
        bench.close()


class Idle(NamedTuple):
    """What connections cost that only wait."""

    connections: int
    each_bytes: float
    all_bytes: int
    opened_per_s: float
    cores: float

    def __str__(self) -> str:
        return (
            f"{self.connections:>8,} connections: {self.each_bytes:,.0f} bytes each, "
            f"{self.all_bytes / 1e6:,.0f} MB in all; {self.opened_per_s:,.0f} opened/s; "
            f"idle {self.cores:.3f} cores"
        )


def idle(steps: list[int], cpus: frozenset[int] | None) -> list[Idle]:
    """Connections with one subscription each that nothing happens to."""
    bench = Bench(cpus, max(steps))
    found: list[Idle] = []

    async def main() -> None:
        empty = bench.server.rss_bytes()
        clients: list[Client] = []
        for count in steps:
            queries = [[_of_room(number)] for number in range(len(clients), count)]
            begun = time.monotonic()
            clients += await bench.connect(queries, [])
            opened_s = time.monotonic() - begun
            await asyncio.sleep(2)
            before_s, begun = bench.server.cpu_seconds(), time.monotonic()
            await asyncio.sleep(3)
            cores = (bench.server.cpu_seconds() - before_s) / (time.monotonic() - begun)
            used = bench.server.rss_bytes() - empty
            found.append(Idle(count, used / count, used, len(queries) / opened_s, cores))
            print(found[-1])

    try:
        asyncio.run(main())
    finally:
        bench.close()
    return found
