"""Several servers behind one edge: doors to one deployment, or servers with streams of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy
from support.edge import Asked, EdgeProcess, Follower, Writer, all_live
from support.server import ServerProcess
from support.watch_client import Live

JSON = {"Content-Type": "application/json"}
STREAMS = 20


@pytest.fixture
def servers(start_server: StartServer) -> list[ServerProcess]:
    return [start_server(), start_server()]


@pytest.fixture
def sharded(servers: list[ServerProcess], tmp_path: Path) -> Iterator[EdgeProcess]:
    urls = [f"shard-{index}={server.base_url}" for index, server in enumerate(servers)]
    edge = EdgeProcess(tmp_path / "cache", *urls, args=["--upstream-mode", "sharded"])
    edge.start()
    yield edge
    edge.stop()


def test_e21_a_stream_lives_on_one_server_and_nowhere_else(
    servers: list[ServerProcess], sharded: EdgeProcess
) -> None:
    """E-21."""
    edge = Caller(sharded)
    names = [f"s/{number:02}" for number in range(STREAMS)]
    for name in names:
        assert edge("PUT", name, [1], headers=JSON).status == 201
        assert edge("GET", name).body == [1]
    homes = [{row["name"] for row in Caller(server)("GET", "/v1/streams").body} for server in servers]
    assert homes[0] | homes[1] == set(names)
    assert not homes[0] & homes[1]
    assert homes[0]
    assert homes[1]
    listed = edge("GET", "/v1/streams?limit=15")
    assert [row["name"] for row in listed.body] == names[:15]
    rest = edge("GET", f"/v1/streams?limit=15&after={names[14]}")
    assert [row["name"] for row in rest.body] == names[15:]
    servers[1].kill()
    lost = sorted(homes[1])[0]
    eventually(lambda: sharded.status("/readyz"), lambda status: status == 503)
    assert edge("GET", lost).status == 503
    assert edge("PUT", lost, headers=JSON).status == 503
    assert edge("GET", "/v1/streams").status == 503
    assert edge("POST", sorted(homes[0])[0], [2]).status == 204
    assert Caller(servers[0])("GET", lost).status == 404


def test_a_database_lives_on_one_server_with_all_that_belongs_to_it(
    servers: list[ServerProcess], sharded: EdgeProcess
) -> None:
    edge, homes = Caller(sharded), set[int]()
    for number in range(12):
        base = f"/v1/databases/db{number}"
        assert edge("PUT", base).status == 201
        live = Live(sharded, path=f"/realtime/ws?database=db{number}")
        live.send("subscribe", "s", query={"collection": "c"})
        assert live.take()["type"] == "subscribe_ack"
        assert edge("PUT", f"{base}/docs/c/a", {"n": number}).status == 201
        assert live.take()["payload"]["delta"]["doc"]["data"] == {"n": number}
        live.close()
        pulled = edge("GET", f"/replication/v1/databases/db{number}/pull?collection=c").body["documents"]
        assert [document["n"] for document in pulled] == [number]
        partition = next(place for place, seq in enumerate(_positions(edge, base)) if seq)
        assert edge("GET", f"__changes__/db{number}/c/{partition}?offset=-1").body[0]["after"] == {
            "n": number
        }
        found = [
            index
            for index, server in enumerate(servers)
            if Caller(server)("GET", f"{base}/docs/c/a").status == 200
        ]
        assert len(found) == 1
        homes.update(found)
        spelled = base.replace("/db", "/%64b")
        assert edge("GET", f"{spelled}/docs/c/a").status == 200, "however its name is written"
    assert homes == {0, 1}, "some of them here, some there"
    listed = [one["database"] for one in edge("GET", "/v1/databases").body]
    assert listed == sorted(["default", *(f"db{number}" for number in range(12))]), "each of them once"
    page = edge("GET", "/v1/databases?limit=5")
    assert [one["database"] for one in page.body] == listed[:5]
    assert page.headers["link"] == f'</v1/databases?limit=5&after={listed[4]}>; rel="next"'
    assert edge("GET", "/realtime/sse?collection=c").code == "invalid_request"


def _positions(call: Caller, base: str) -> list[int]:
    return call("GET", f"{base}/collections/c").body["positions"]


def test_e21_one_of_three_doors_is_killed_under_load(start_server: StartServer, tmp_path: Path) -> None:
    """E-21: the door of this very stream; writes through the edge go on, and no reader notices."""
    server = start_server()
    asked = [Asked() for _ in range(3)]
    with ExitStack() as stack:
        doors = [stack.enter_context(CuttingProxy(server.port, one)) for one in asked]
        urls = [door.base_url for door in doors]
        edge = EdgeProcess(tmp_path / "cache", *urls, args=["--upstream-mode", "any"])
        edge.start()
        writer = Writer(edge, "doors")
        writer.append()
        followers = [Follower(edge.port, "doors", mode) for mode in ("sse", "ws", "long-poll")]

        def kill_the_one_that_carries_it() -> None:
            carrying = [door for door, one in zip(doors, asked, strict=True) if one.sockets("doors")]
            assert len(carrying) == 1, "one stream goes through one door"
            assert all(one.count("POST", "doors") == 0 for one in asked if not one.sockets("doors"))
            eventually(lambda: writer.count, lambda count: count > 20)  # it is being written
            carrying[0].shut()

        async def watch() -> None:
            tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
            await all_live(followers)
            killing = asyncio.ensure_future(asyncio.to_thread(kill_the_one_that_carries_it))
            while not killing.done() or writer.count < 50:
                await asyncio.to_thread(writer.append)
            await killing
            for _ in range(10):
                await asyncio.to_thread(writer.append)
            await asyncio.to_thread(writer.close)
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)

        asyncio.run(watch())
        edge.stop()
    assert all(follower.entries == writer.numbers() for follower in followers)
    held = [follower for follower in followers if follower.mode != "long-poll"]
    assert {follower.connections for follower in held} == {1}


def test_what_the_upstreams_are_has_to_be_said_and_to_be_true(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    urls = [server.base_url for server in servers]
    wrong = {
        (): (2, "need --upstream-mode"),
        ("--upstream-mode", "any"): (1, "different servers"),
    }
    for args, (code, message) in wrong.items():
        edge = EdgeProcess(tmp_path / "cache", *urls, args=args)
        edge.start(ready=False)
        assert edge.wait_exit() == code
        assert message in edge.log
    twice = [f"a={urls[0]}", f"b={urls[0]}"]
    edge = EdgeProcess(tmp_path / "cache", *twice, args=["--upstream-mode", "sharded"])
    edge.start(ready=False)
    assert edge.wait_exit() == 1
    assert "two upstreams are the same server" in edge.log
