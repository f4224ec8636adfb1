"""Live readers of an edge: one upstream socket for all, the log and nothing but the log for each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy
from support.edge import (
    CONTENT_TYPES,
    Asked,
    EdgeProcess,
    Follower,
    Writer,
    all_live,
    entry_offset,
    metrics,
    upstream_sockets,
)
from support.server import ServerProcess
from support.wire import Connection, Wire, fresh, request_bytes
from tailrace.protocol.offsets import parse_offset

MODES = ("sse", "ws", "long-poll")
READERS = 200


@pytest.fixture(scope="module")
def edge(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    process = EdgeProcess(tmp_path_factory.mktemp("edge") / "cache", server.base_url)
    process.start()
    yield process
    process.stop()


async def _follow(writer: Writer, followers: list[Follower], batches: int, size: int = 1) -> None:
    """Appends while everybody reads, closes the stream, and waits until all have seen its end."""
    tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
    # Who waits at the tail with a long-poll is told nothing until there is something.
    await all_live([follower for follower in followers if follower.mode != "long-poll"])
    for _ in range(batches):
        await asyncio.to_thread(writer.append, size)
    await asyncio.to_thread(writer.close)
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


def test_e4_e24_many_readers_are_one_connection_upstream(server: ServerProcess, edge: EdgeProcess) -> None:
    """E-4, E-24: one socket, and one encoding of each batch for all of them."""
    name = fresh("edge-many")
    writer = Writer(server, name)
    writer.append(3)
    # The edge looks at the registry from when that is there, which may be seconds after its own start.
    before = eventually(lambda: upstream_sockets(server), bool)
    counted = metrics(edge)
    followers = [Follower(edge.port, name, "sse") for _ in range(READERS)]

    async def watch() -> float:
        tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
        await all_live(followers)
        # The one by which they caught up may be there for a moment longer.
        sockets = await asyncio.to_thread(
            eventually, lambda: upstream_sockets(server), lambda count: count - before <= 1
        )
        for _ in range(5):
            await asyncio.to_thread(writer.append)
        await asyncio.to_thread(writer.close)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        return sockets - before

    assert asyncio.run(watch()) == 1
    assert all(follower.entries == list(range(writer.count)) for follower in followers)
    assert {follower.connections for follower in followers} == {1}
    now = metrics(edge)
    batches, encodings = (
        now[name] - counted[name] for name in ("tailrace_edge_batches_total", "tailrace_edge_encodings_total")
    )
    assert 0 < encodings <= batches <= 6


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_e2_every_way_of_reading_shows_the_log(
    server: ServerProcess, edge: EdgeProcess, content_type: str
) -> None:
    """E-2: each from the entry that it has asked for, whatever the stream is made of, keyed and not."""
    name = fresh("edge-ways")
    writer = Writer(edge, name, content_type, keys=("a", "b"))
    writer.append(5)
    writer.append(5)
    places = [("-1", 0), ("0" * 26, 0), (entry_offset(4), 4), (entry_offset(10), 10)]
    wanted = [
        (Follower(edge.port, name, mode, offset, key, content_type), first, key)
        for mode in MODES
        for offset, first in places
        for key in ("", "a")
    ]
    asyncio.run(_follow(writer, [follower for follower, _, _ in wanted], 15, 2))
    for follower, first, key in wanted:
        assert follower.entries == writer.numbers(first, key), (follower.mode, first, key)


def test_e3_readers_join_at_any_place_while_much_is_written(
    start_server: StartServer, tmp_path: Path
) -> None:
    """E-3: between the batches of a ring, behind it and in front of it; all come to share one socket."""
    server, asked = start_server(), Asked()
    writer = Writer(server, "joins")
    writer.append(50)
    chance = random.Random(7)
    joined: list[tuple[int, Follower]] = []

    async def watch(edge: EdgeProcess) -> None:
        tasks: list[asyncio.Future[None]] = []
        for number in range(READERS):
            entry = chance.randrange(writer.count)
            mode = MODES[number % len(MODES)]
            follower = Follower(edge.port, "joins", mode, entry_offset(entry))
            joined.append((entry, follower))
            tasks.append(asyncio.ensure_future(follower.run()))
            await asyncio.to_thread(writer.append, chance.randint(1, 5))

        def behind() -> int:
            return sum(entry + len(follower.entries) < writer.count for entry, follower in joined)

        async def slices_for_one_more() -> int:
            before = asked.slices("joins")
            await asyncio.to_thread(writer.append)
            await asyncio.to_thread(eventually, behind, lambda readers: readers == 0)
            return asked.slices("joins") - before

        async with asyncio.timeout(60):
            while await slices_for_one_more():
                pass  # somebody has not arrived yet
        seen = await asyncio.to_thread(metrics, edge)
        assert (seen["tailrace_edge_channels"], seen["tailrace_edge_private_sockets"]) == (1, 0)
        await asyncio.to_thread(writer.close)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)

    with CuttingProxy(server.port, asked) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        asyncio.run(watch(edge))
        edge.stop()
    for entry, follower in joined:
        assert follower.entries == writer.numbers(entry), (follower.mode, entry)
        assert follower.connections == 1


def test_e3_readers_join_while_many_write_as_fast_as_they_can(
    start_server: StartServer, tmp_path: Path
) -> None:
    """E-3: hundreds of appends in a second; what they made of the log is what everybody gets."""
    server = start_server()
    edge = EdgeProcess(tmp_path / "cache", server.base_url)
    edge.start()
    assert Caller(server)("PUT", "rush", headers={"Content-Type": "application/json"}).status == 201
    chance = random.Random(3)
    joined: list[tuple[int, Follower]] = []

    def write(first: int) -> None:
        wire = Wire(server.port)
        for number in range(first, first + 500):
            assert wire.post("rush", "application/json", str(number)).status == 204
        wire.close()

    async def watch() -> None:
        writers = [asyncio.ensure_future(asyncio.to_thread(write, 1000 * number)) for number in range(8)]
        tasks: list[asyncio.Future[None]] = []
        for number in range(READERS):
            head = await asyncio.to_thread(Caller(server), "HEAD", "rush")
            entry = chance.randrange(parse_offset(head.headers["stream-next-offset"])[1] + 1)
            follower = Follower(edge.port, "rush", MODES[number % len(MODES)], entry_offset(entry))
            joined.append((entry, follower))
            tasks.append(asyncio.ensure_future(follower.run()))
        await asyncio.gather(*writers)
        await asyncio.to_thread(Caller(server), "POST", "rush", headers={"Stream-Closed": "true"})
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)

    asyncio.run(watch())
    edge.stop()
    whole = Follower(server.port, "rush", "sse")
    asyncio.run(whole.run())
    assert sorted(whole.entries) == [1000 * writer + number for writer in range(8) for number in range(500)]
    for entry, follower in joined:
        assert follower.entries == whole.entries[entry:], (follower.mode, entry)
        assert follower.connections == 1


def test_keyed_readers_get_their_own(server: ServerProcess, edge: EdgeProcess) -> None:
    name = fresh("edge-keys")
    call = Caller(server)
    assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
    followers = [Follower(edge.port, name, mode, key="a") for mode in MODES for _ in range(2)]

    async def watch() -> None:
        tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
        await all_live([follower for follower in followers if follower.mode != "long-poll"])
        for number in range(20):
            headers = {"Stream-Key": "ab"[number % 2]}
            reply = await asyncio.to_thread(call, "POST", name, number, headers=headers)
            assert reply.status == 204
        await asyncio.to_thread(call, "POST", name, headers={"Stream-Closed": "true"})
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)

    asyncio.run(watch())
    assert all(follower.entries == list(range(0, 20, 2)) for follower in followers)


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream"])
def test_e5_events_are_those_of_the_owner(
    server: ServerProcess, edge: EdgeProcess, content_type: str
) -> None:
    """E-5: the same closed stream, read from the owner and through the edge, twice."""
    name = fresh("edge-equal")
    call = Caller(server)
    call("PUT", name, headers={"Content-Type": content_type})
    for body in (b" two\r\nlines", b"[]", b"\xff\xfe not text", b"plain"):
        assert call("POST", name, body, headers={"Content-Type": content_type}).status == 204
    call("POST", name, headers={"Stream-Closed": "true"})
    target = f"{name}?offset=-1&live=sse"
    direct, first, second = (Caller(place)("GET", target) for place in (server, edge, edge))
    assert first.raw == direct.raw == second.raw
    encoding = "stream-sse-data-encoding"
    assert first.headers.get(encoding) == direct.headers.get(encoding)
    plain = [Caller(place)("GET", name) for place in (server, edge)]
    assert plain[0].raw == plain[1].raw
    assert plain[0].headers["etag"] == plain[1].headers["etag"]


def test_e8_now_is_asked_of_the_owner(server: ServerProcess, edge: EdgeProcess) -> None:
    """E-8: however far the edge is behind, a read from now never begins before an acknowledged append."""
    name = fresh("edge-now")
    call = Caller(server)
    call("PUT", name, headers={"Content-Type": "application/json"})
    for number in range(20):
        tail = call("POST", name, number).headers["stream-next-offset"]
        with Connection(edge.port) as connection:
            connection.send(request_bytes("GET", f"/v1/stream/{name}?offset=now&live=sse"))
            assert connection.read_head().status == 200
            event = connection.read_chunk().decode()
        assert event.startswith("event: control\n")
        control = json.loads(event.splitlines()[1].removeprefix("data:"))
        assert control["streamNextOffset"] == tail
        assert control["upToDate"] is True


def test_e6_cursors_always_grow(edge: EdgeProcess, server: ServerProcess) -> None:
    """E-6."""
    name = fresh("edge-cursor")
    call = Caller(edge)
    call("PUT", name, headers={"Content-Type": "application/json"})
    call("POST", name, [1])
    cursor = 10**9
    for _ in range(5):
        reply = call("GET", f"{name}?offset=-1&live=long-poll&cursor={cursor}")
        assert int(reply.headers["stream-cursor"]) > cursor
        cursor = int(reply.headers["stream-cursor"])


def test_a_deleted_stream_ends_its_readers(server: ServerProcess, edge: EdgeProcess) -> None:
    name = fresh("edge-deleted")
    call = Caller(server)
    call("PUT", name, headers={"Content-Type": "application/json"})
    tail = call("POST", name, [1]).headers["stream-next-offset"]

    async def watch() -> tuple[bytes, bytes]:
        async def read(mode: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
            target = f"/v1/stream/{name}?offset={tail}&live={mode}"
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            data = await reader.read()
            writer.close()
            return data

        waits = [asyncio.ensure_future(read(mode)) for mode in ("sse", "long-poll")]
        seen = await asyncio.to_thread(
            eventually,
            lambda: [
                metrics(edge)[f'tailrace_edge_clients{{mode="{mode}"}}'] for mode in ("sse", "long-poll")
            ],
            lambda clients: min(clients) >= 1,
        )
        assert seen
        assert (await asyncio.to_thread(call, "DELETE", name)).status == 204
        async with asyncio.timeout(30):
            events, answer = await asyncio.gather(*waits)
        return events, answer

    events, answer = asyncio.run(watch())
    assert events.endswith(b"0\r\n\r\n"), "ended at an event's end"
    assert answer.startswith(b"HTTP/1.1 404")


def test_e17_cut_sockets_are_opened_again_where_they_were(start_server: StartServer, tmp_path: Path) -> None:
    """E-17: the connection between edge and owner is cut again and again; no client notices."""
    server = start_server()
    name = "cut"
    writer = Writer(server, name)
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        followers = [Follower(edge.port, name, mode) for mode in ("sse", "ws")]

        async def watch() -> None:
            tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
            await all_live(followers)
            for number in range(30):
                await asyncio.to_thread(writer.append)
                if number % 5 == 0:
                    await asyncio.to_thread(proxy.cut_all)
            await asyncio.to_thread(writer.close)
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)

        asyncio.run(watch())
        edge.stop()
    assert all(follower.entries == list(range(writer.count)) for follower in followers)
    assert {follower.connections for follower in followers} == {1}


def test_a_small_ring_sends_readers_back_to_slices(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    writer = Writer(server, "ring")
    writer.append()
    env = {"TAILRACE_EDGE_RING_BYTES": "64", "TAILRACE_LIVE_UNSENT_BYTES": "1024"}
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=env)
    edge.start()
    followers = [Follower(edge.port, "ring", mode) for mode in MODES]
    asyncio.run(_follow(writer, followers, 50, 20))
    edge.stop()
    assert all(follower.entries == list(range(writer.count)) for follower in followers)


def test_a_stopping_edge_sends_its_readers_away(server: ServerProcess, tmp_path: Path) -> None:
    """At the end of an event, with where they are; a long-poll as if its time were up."""
    edge = EdgeProcess(tmp_path / "cache", server.base_url)
    edge.start()
    name = fresh("edge-stop")
    call = Caller(server)
    call("PUT", name, headers={"Content-Type": "application/json"})
    tail = call("POST", name, [1]).headers["stream-next-offset"]
    connections = [Connection(edge.port) for _ in range(2)]
    for connection, live in zip(connections, ("sse", "long-poll"), strict=True):
        connection.send(request_bytes("GET", f"/v1/stream/{name}?offset={tail}&live={live}"))
    sse, waiting = connections
    assert sse.read_head().status == 200
    assert b"upToDate" in sse.read_chunk()
    eventually(lambda: metrics(edge)['tailrace_edge_clients{mode="long-poll"}'], lambda clients: clients == 1)
    edge.stop()
    assert tail.encode() in sse.read_chunk()
    assert sse.read_chunk() == b"", "the end of the answer"
    idle = waiting.read_answer()
    assert (idle.status, idle["stream-next-offset"]) == (204, tail)
    for connection in connections:
        connection.close()


def test_e17_readers_are_let_go_when_the_owner_stays_away(start_server: StartServer, tmp_path: Path) -> None:
    """E-17: at the end of an event, when the time for which they are kept is over."""
    server = start_server()
    writer = Writer(server, "away")
    writer.append(3)
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env={"TAILRACE_EDGE_HOLD_MS": "500"})
    edge.start()

    async def watch() -> tuple[bytes, int]:
        reader, sender = await asyncio.open_connection("127.0.0.1", edge.port)
        sender.write(b"GET /v1/stream/away?offset=-1&live=sse HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'"upToDate":true}\n')
        await reader.readuntil(b"\n\n\r\n")
        url = f"ws://127.0.0.1:{edge.port}/v1/stream/away?offset=now&live=ws"
        async with connect(url, proxy=None) as socket:
            assert json.loads(await socket.recv())["upToDate"] is True
            await asyncio.to_thread(server.kill)
            async with asyncio.timeout(30):
                rest = await reader.readuntil(b"0\r\n\r\n")
                await socket.wait_closed()
        sender.close()
        assert socket.close_code is not None
        return rest, socket.close_code

    rest, code = asyncio.run(watch())
    assert rest == b"0\r\n\r\n", "nothing but the end"
    assert code == 1013
    edge.stop()


def test_e22_a_reader_that_does_not_read_delays_nobody(start_server: StartServer, tmp_path: Path) -> None:
    """E-22: it is left out until it reads again, and then gets everything, from slices and in order."""
    server = start_server()
    call = Caller(server)
    call("PUT", "slow", headers={"Content-Type": "application/json"})
    env = {"TAILRACE_LIVE_UNSENT_BYTES": "65536", "TAILRACE_EDGE_RING_BYTES": "1MiB"}
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=env)
    edge.start()
    stuck = Connection(edge.port)
    stuck.send(request_bytes("GET", "/v1/stream/slow?offset=-1&live=sse"))
    assert stuck.read_head().status == 200
    assert b"upToDate" in stuck.read_chunk()
    followers = [Follower(edge.port, "slow", mode) for mode in ("sse", "ws") for _ in range(4)]
    padding = "x" * 100_000

    async def watch() -> None:
        tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
        await all_live(followers)
        for number in range(100):
            await asyncio.to_thread(call, "POST", "slow", {"n": number, "padding": padding})
        await asyncio.to_thread(call, "POST", "slow", headers={"Stream-Closed": "true"})
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)

    asyncio.run(watch())
    for follower in followers:
        assert [entry["n"] for entry in follower.entries] == list(range(100)), follower.mode
        assert follower.connections == 1
    seen = metrics(edge)
    assert seen["tailrace_edge_detached_total"] > 0
    assert seen["tailrace_edge_ring_bytes"] <= 1.5 * 1024 * 1024, "the bound, and the newest batch"
    events = b""
    while chunk := stuck.read_chunk():
        events += chunk
    stuck.close()
    data = [line[5:] for line in events.split(b"\n") if line.startswith(b"data:[")]
    assert [entry["n"] for line in data for entry in json.loads(line)] == list(range(100))
    edge.stop()


@pytest.mark.nightly
def test_ten_thousand_readers(start_server: StartServer, tmp_path: Path) -> None:
    """E-24: all events to all, in order, over one connection; edge and owner are killed in between."""
    server = start_server()
    writer = Writer(server, "crowd")
    edge = EdgeProcess(tmp_path / "cache", server.base_url)
    edge.start()
    followers = [Follower(edge.port, "crowd", "sse") for _ in range(10_000)]

    async def watch() -> float:
        tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
        await all_live(followers, 600)
        sockets = await asyncio.to_thread(upstream_sockets, server)
        for number in range(30):
            await asyncio.to_thread(writer.append)
            if number == 10:
                await asyncio.to_thread(server.restart, kill=True)
            if number == 20:
                await asyncio.to_thread(edge.restart, kill=True)
        await asyncio.to_thread(writer.close)
        async with asyncio.timeout(600):
            await asyncio.gather(*tasks)
        return sockets

    assert asyncio.run(watch()) == 2, "the stream and the registry"
    edge.stop()
    assert all(follower.entries == list(range(writer.count)) for follower in followers)
