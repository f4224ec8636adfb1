"""How live readers of an edge get to the shared socket, and what is kept for them there."""

from __future__ import annotations

import asyncio
import random

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, at_random
from support.edge import EdgeProcess, Follower, StartEdge, all_live, metrics
from support.wire import Connection, request_bytes

JSON = {"Content-Type": "application/json"}
READERS = 30
MIB = 1024 * 1024


def _joins(edge: EdgeProcess) -> dict[str, float]:
    """How many readers have joined a channel, by the way that they took."""
    prefix = 'tailrace_edge_join_total{path="'
    found = metrics(edge).items()
    return {name[len(prefix) : -2]: count for name, count in found if name.startswith(prefix)}


def test_e4_keyed_readers_share_a_socket_while_other_keys_are_written(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """E-4: their channel hears of other keys only now and then; that costs nobody a socket of their own."""
    server = start_server()
    call = Caller(server)
    call("PUT", "keys", headers=JSON)

    def write(key: str, value: int) -> None:
        assert call("POST", "keys", value, headers={"Stream-Key": key}).status == 204

    write("a", 0)
    edge = start_edge(server.base_url, edge_recent_ms="0")
    followers: list[Follower] = []

    async def watch() -> dict[str, float]:
        tasks: list[asyncio.Future[None]] = []

        async def join(mode: str) -> None:
            followers.append(Follower(edge.port, "keys", mode, key="a"))
            tasks.append(asyncio.ensure_future(followers[-1].run()))

        await join("sse")
        await all_live(followers)
        for number in range(READERS):
            await asyncio.to_thread(write, "b", number)
            await join(("sse", "ws")[number % 2])
        await all_live(followers)
        ways = await asyncio.to_thread(
            eventually, lambda: _joins(edge), lambda ways: sum(ways.values()) >= len(followers)
        )
        for number in range(1, 10):
            for key in ("b", "a", "b"):
                await asyncio.to_thread(write, key, number)
            await join("sse")
        await asyncio.to_thread(call, "POST", "keys", headers={"Stream-Closed": "true"})
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        return ways

    assert "private" not in asyncio.run(watch())
    assert all(follower.entries == list(range(10)) for follower in followers)
    assert {follower.connections for follower in followers} == {1}


def test_e22_all_rings_together_keep_their_bound(start_server: StartServer, start_edge: StartEdge) -> None:
    """E-22: what one stream brings makes room in the rings of others; nobody misses anything for that."""
    server = start_server()
    call = Caller(server)
    names = [f"wide/{number}" for number in range(8)]
    for name in names:
        call("PUT", name, headers=JSON)
    edge = start_edge(server.base_url, edge_rings_bytes="1MiB")
    followers = [Follower(edge.port, name, "sse") for name in names]
    padding = "x" * 400_000
    held: list[float] = []

    async def watch() -> None:
        tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
        await all_live(followers)
        for number in range(3):
            for name in names:
                await asyncio.to_thread(call, "POST", name, {"n": number, "padding": padding})
                held.append((await asyncio.to_thread(metrics, edge))["tailrace_edge_ring_bytes"])
        for name in names:
            await asyncio.to_thread(call, "POST", name, headers={"Stream-Closed": "true"})
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)

    asyncio.run(watch())
    assert 0 < max(held) <= MIB
    assert metrics(edge)["tailrace_edge_ring_bytes"] == 0, "nothing is counted twice, or stays counted"
    for follower in followers:
        assert [entry["n"] for entry in follower.entries] == [0, 1, 2]


def test_an_answer_of_a_moment_ago_does_not_keep_a_reader_from_the_tail(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """It says that nothing follows; the channel was opened later and begins after what does."""
    server = start_server()
    call = Caller(server)
    call("PUT", "recent", headers=JSON)
    tail = call("POST", "recent", [1]).headers["stream-next-offset"]
    edge = start_edge(server.base_url, edge_recent_ms="600000")
    read = Caller(edge)
    eventually(
        lambda: read("GET", f"recent?offset={tail}").headers["x-cache"], lambda outcome: outcome == "HIT"
    )
    call("POST", "recent", [2])
    assert read("GET", f"recent?offset={tail}").body == [], "given again"
    with Connection(edge.port) as reader:
        reader.send(request_bytes("GET", f"/v1/stream/recent?offset={tail}&live=sse"))
        assert reader.read_head().status == 200
        assert b"data:[2]" in reader.read_chunk()


def test_a_reader_that_falls_behind_is_not_counted_for_every_batch(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    server = start_server()
    call = Caller(server)
    call("PUT", "stuck", headers=JSON)
    edge = start_edge(server.base_url, live_unsent_bytes="65536")
    with Connection(edge.port) as stuck:
        stuck.shrink_receive_buffer()
        stuck.send(request_bytes("GET", "/v1/stream/stuck?offset=-1&live=sse"))
        assert stuck.read_head().status == 200
        assert b"upToDate" in stuck.read_chunk()
        for number in range(100):
            call("POST", "stuck", {"n": number, "padding": "x" * 100_000})
        eventually(lambda: metrics(edge)["tailrace_edge_batches_total"], lambda batches: batches == 100)
        assert 1 <= metrics(edge)["tailrace_edge_detached_total"] <= 5


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_e2_readers_by_key_join_anywhere(start_server: StartServer, start_edge: StartEdge, seed: int) -> None:
    """E-2: keys that are written often and hardly ever, small rings and pages, and cuts to the owner."""
    chance = random.Random(seed)
    server = start_server(env={"TAILRACE_READ_PAGE_ENTRIES": "7"})
    call = Caller(server)
    call("PUT", "keyed", headers=JSON)
    written: list[tuple[str, int]] = []
    followers: list[tuple[str, int, Follower]] = []
    ring_bytes = str(chance.choice([20, 2000, 100_000]))

    def write() -> None:
        key = chance.choices("abc", weights=[100, 10, 1])[0]
        values = range(len(written), len(written) + chance.randint(1, 4))
        assert call("POST", "keyed", list(values), headers={"Stream-Key": key}).status == 204
        written.extend((key, value) for value in values)

    async def watch(port: int) -> None:
        tasks: list[asyncio.Future[None]] = []
        for number in range(250):
            if number % 5 == 0:
                key, mode = chance.choice("abc"), chance.choice(["sse", "ws", "long-poll"])
                entry = chance.randrange(len(written) + 1)
                follower = Follower(port, "keyed", mode, f"{0:016}_{entry:016}", key)
                followers.append((key, entry, follower))
                tasks.append(asyncio.ensure_future(follower.run()))
            await asyncio.to_thread(write)
        await asyncio.to_thread(call, "POST", "keyed", headers={"Stream-Closed": "true"})
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)

    with CuttingProxy(server.port, at_random(seed, 0.01)) as proxy:
        edge = start_edge(proxy.base_url, edge_ring_bytes=ring_bytes)
        asyncio.run(watch(edge.port))
    assert "Traceback" not in edge.log
    for key, entry, follower in followers:
        wanted = [value for of_key, value in written[entry:] if of_key == key]
        assert follower.entries == wanted, (follower.mode, key, entry)
