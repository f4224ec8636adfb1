"""Servers and edges are killed while clients follow: nobody misses an event, nobody sees one twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller
from support.cutting_proxy import CuttingProxy, Direction, at_random
from support.edge import (
    CONTENT_TYPES,
    Asked,
    EdgeProcess,
    Follower,
    Writer,
    all_live,
    entry_offset,
    metrics,
)
from support.server import ServerProcess

MODES = ("sse", "ws", "long-poll")
KILLS = 2
APPENDS = 10
JSON = {"Content-Type": "application/json"}


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


def test_writes_through_an_edge_go_on_when_their_owner_dies(server: ServerProcess, edge: EdgeProcess) -> None:
    """The writer repeats what it does not know of, and the owner knows: each number is there once."""
    writer = Writer(edge, "written")
    followers = [Follower(edge.port, "written", "sse")]
    asyncio.run(_follow_through(writer, followers, server))
    assert followers[0].entries == list(range(writer.count))


class AskedInVain(Asked):
    """Counts what is asked, and loses the first answers that have a status: the owner did as it was told."""

    def __init__(self, status: int, answers: int) -> None:
        super().__init__()
        self._mark = b"HTTP/1.1 %d " % status
        self._left = answers

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        super().__call__(direction, piece)
        lost = direction == "answer" and self._left > 0 and piece.startswith(self._mark)
        self._left -= lost
        return lost


@pytest.mark.parametrize("padding_bytes", [0, 300_000], ids=["whole", "streamed"])
def test_e18_a_write_whose_answer_is_lost_is_not_sent_again(
    server: ServerProcess, tmp_path: Path, padding_bytes: int
) -> None:
    """E-18: plain appends, which the owner would take twice; the client is told that nobody knows."""
    padding = "x" * padding_bytes
    asked = AskedInVain(204, 5)
    with CuttingProxy(server.port, asked) as proxy:
        edge = EdgeProcess(tmp_path / "edge" / "cache", proxy.base_url)
        edge.start()
        call = Caller(edge)
        assert call("PUT", "once", headers=JSON).status == 201
        statuses: list[int] = []
        for number in range(10):
            if number == 7:
                proxy.cut_all()  # connections that the edge has kept
            reply = call("POST", "once", {"number": number, "padding": padding})
            assert reply.status != 503 or "outcome is unknown" in reply.body["error"]["message"]
            statuses.append(reply.status)
            assert asked.count("POST", "once") == number + 1
        edge.stop()
    assert statuses == [503] * 5 + [204] * 5
    found = [entry["number"] for entry in _everything(Caller(server), "once")]
    assert found == list(range(10)), "the owner took each of them, and none twice"


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_e18_other_writes_are_sent_once_as_well(server: ServerProcess, tmp_path: Path, method: str) -> None:
    """E-18: what a repetition would tell the client is not what has happened."""
    assert Caller(server)("PUT", "there", headers=JSON).status == 201
    asked = AskedInVain(201 if method == "PUT" else 204, 1)
    with CuttingProxy(server.port, asked) as proxy:
        edge = EdgeProcess(tmp_path / "edge" / "cache", proxy.base_url)
        edge.start()
        name = "made" if method == "PUT" else "there"
        reply = Caller(edge)(method, name, headers=JSON)
        edge.stop()
    assert reply.status == 503
    assert "outcome is unknown" in reply.body["error"]["message"]
    assert asked.count(method, name) == 1
    assert Caller(server)("HEAD", name).status == (200 if method == "PUT" else 404)


def _everything(call: Caller, name: str) -> list[Any]:
    entries: list[Any] = []
    offset = "-1"
    while True:
        page = call("GET", f"{name}?offset={offset}")
        entries += page.body
        if "stream-up-to-date" in page.headers:
            return entries
        offset = page.headers["stream-next-offset"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("keys", [(), ("a", "b", "c")], ids=["plain", "keyed"])
@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_e2_everything_at_once(tmp_path: Path, content_type: str, keys: tuple[str, ...], seed: int) -> None:
    """E-2: cuts on both sides of an edge, small rings and pages, joins anywhere, and everybody is killed."""
    chance = random.Random(seed)
    server = ServerProcess(tmp_path / "server" / "data", env={"TAILRACE_READ_PAGE_ENTRIES": "7"}).start()
    writer = Writer(server, "torn", content_type, keys)
    env = {
        "TAILRACE_EDGE_RING_BYTES": str(chance.choice([20, 200, 100_000])),
        "TAILRACE_EDGE_LINGER_MS": "500",
        "TAILRACE_SSE_ROTATION_MS": "1500",
    }
    followers: list[tuple[int, str, Follower]] = []

    async def watch(edge: EdgeProcess, port: int) -> None:
        tasks: list[asyncio.Future[None]] = []
        for number in range(250):
            if number % 6 == 0:
                entry = chance.randrange(writer.count + 1)
                key = chance.choice(keys) if keys else ""
                mode = chance.choice(MODES)
                follower = Follower(port, "torn", mode, entry_offset(entry), key, content_type)
                followers.append((entry, key, follower))
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
    for entry, key, follower in followers:
        assert follower.entries == writer.numbers(entry, key), (follower.mode, entry, key)
