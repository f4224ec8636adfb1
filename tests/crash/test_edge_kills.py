"""Servers and edges are killed while clients follow: nobody misses an event, nobody sees one twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cutting_proxy import CuttingProxy, at_random
from support.edge import EdgeProcess, Follower, Writer, all_live, metrics
from support.server import ServerProcess

MODES = ("sse", "ws", "long-poll")
KILLS = 2
APPENDS = 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "server" / "data").start()
    yield process
    process.kill()


@pytest.fixture
def edge(tmp_path: Path, server: ServerProcess) -> Iterator[EdgeProcess]:
    process = EdgeProcess(tmp_path / "edge" / "cache", server.base_url)
    process.start()
    yield process
    process.kill()


async def _follow_through(writer: Writer, followers: list[Follower], victim: ServerProcess) -> None:
    tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
    await all_live(followers)
    for _ in range(KILLS):
        for _ in range(APPENDS):
            await asyncio.to_thread(writer.append)
        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(victim.start)
    for _ in range(APPENDS):
        await asyncio.to_thread(writer.append)
    await asyncio.to_thread(writer.close)
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


def test_the_owner_is_killed_and_the_readers_stay(server: ServerProcess, edge: EdgeProcess) -> None:
    writer = Writer(server, "kept")
    writer.append(5)
    followers = [Follower(edge.port, "kept", mode) for mode in MODES for _ in range(5)]
    asyncio.run(_follow_through(writer, followers, server))
    for follower in followers:
        assert follower.entries == list(range(writer.count)), follower.mode
    held = [follower for follower in followers if follower.mode != "long-poll"]
    assert {follower.connections for follower in held} == {1}, "live readers are kept over a restart"
    assert metrics(edge)['tailrace_edge_reconnects_total{reason="lost"}'] >= 1


def test_the_edge_is_killed_and_its_clients_come_back(server: ServerProcess, edge: EdgeProcess) -> None:
    writer = Writer(server, "resumed")
    writer.append(5)
    followers = [Follower(edge.port, "resumed", mode) for mode in MODES for _ in range(5)]
    asyncio.run(_follow_through(writer, followers, edge))
    for follower in followers:
        assert follower.entries == list(range(writer.count)), follower.mode
        assert follower.connections > KILLS or follower.mode == "long-poll"


def test_e18_writes_through_an_edge_are_not_repeated_by_it(server: ServerProcess, edge: EdgeProcess) -> None:
    """E-18: the writer appends through the edge while its owner dies: each number is there once, in order."""
    writer = Writer(edge, "written")
    followers = [Follower(edge.port, "written", "sse")]
    asyncio.run(_follow_through(writer, followers, server))
    assert followers[0].entries == list(range(writer.count))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_everything_at_once(tmp_path: Path, seed: int) -> None:
    """E-2: cuts on both sides of an edge, small rings and pages, joins anywhere, and everybody is killed."""
    chance = random.Random(seed)
    server = ServerProcess(tmp_path / "server" / "data", env={"TAILRACE_READ_PAGE_ENTRIES": "7"}).start()
    writer = Writer(server, "torn")
    env = {
        "TAILRACE_EDGE_RING_BYTES": str(chance.choice([20, 200, 100_000])),
        "TAILRACE_EDGE_LINGER_MS": "500",
        "TAILRACE_SSE_ROTATION_MS": "1500",
    }
    followers: list[tuple[int, Follower]] = []

    async def watch(edge: EdgeProcess, port: int) -> None:
        tasks: list[asyncio.Future[None]] = []
        for number in range(250):
            if number % 6 == 0:
                entry = chance.randrange(writer.count + 1)
                follower = Follower(port, "torn", chance.choice(MODES), f"{0:016}_{entry:016}")
                followers.append((entry, follower))
                tasks.append(asyncio.ensure_future(follower.run()))
            await asyncio.to_thread(writer.append, chance.randint(1, 4))
            if number == 120:
                await asyncio.to_thread(edge.restart, kill=True)
            if number == 180:
                await asyncio.to_thread(server.restart, kill=True)
        await asyncio.to_thread(writer.close)
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)

    with CuttingProxy(server.port, at_random(seed, 0.02)) as far:
        args = ["--cache-dir", str(tmp_path / "slices")]
        edge = EdgeProcess(tmp_path / "edge" / "cache", far.base_url, args=args, env=env)
        edge.start()
        with CuttingProxy(edge.port, at_random(seed + 1, 0.01)) as near:
            asyncio.run(watch(edge, int(near.base_url.rpartition(":")[2])))
        edge.kill()
    server.kill()
    for entry, follower in followers:
        assert follower.entries == list(range(entry, writer.count)), (follower.mode, entry)
