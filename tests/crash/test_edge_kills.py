"""Servers and edges are killed while clients follow: nobody misses an event, nobody sees one twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.edge import EdgeProcess, Follower, Writer, all_live, metrics
from support.server import ServerProcess

MODES = ("sse", "ws", "long-poll")
KILLS = 3
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


def test_writes_through_an_edge_are_not_repeated_by_it(server: ServerProcess, edge: EdgeProcess) -> None:
    """The writer appends through the edge while its owner dies: each number is there once, in order."""
    writer = Writer(edge, "written")
    followers = [Follower(edge.port, "written", "sse")]
    asyncio.run(_follow_through(writer, followers, server))
    assert followers[0].entries == list(range(writer.count))
