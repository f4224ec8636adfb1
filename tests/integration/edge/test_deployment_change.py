"""The server behind an edge is another one: of what was kept nothing is given, and nothing is sent astray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.edge import EdgeProcess, cached, metrics
from support.ports import KeptPort
from support.server import ServerProcess
from support.wire import Connection, request_bytes

PAGE = {"TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
STREAMS = 20


@pytest.fixture
def processes() -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for process in reversed(started):
        if process.running:
            process.kill()


def started(processes: list[ServerProcess], process: ServerProcess) -> ServerProcess:
    processes.append(process)
    process.start()
    return process


def server_at(processes: list[ServerProcess], data: Path, port: int = 0) -> ServerProcess:
    return started(processes, ServerProcess(data, port=port, env=PAGE))


def edge_of(processes: list[ServerProcess], directory: Path, *urls: str, mode: str = "single") -> EdgeProcess:
    args = ["--upstream-mode", mode, "--cache-dir", str(directory / "slices")]
    edge = EdgeProcess(directory / "cwd", *urls, args=args)
    started(processes, edge)
    return edge


def test_an_owner_that_begins_again_is_not_mistaken_for_the_old_one(
    processes: list[ServerProcess], tmp_path: Path
) -> None:
    """Same address, same name, same epoch; in memory and on disk are slices of the stream that was."""
    owner = server_at(processes, tmp_path / "first")
    edge = edge_of(processes, tmp_path, owner.base_url)
    call = Caller(edge)
    assert call("PUT", "orders", [1, 2, 3], headers=JSON).status == 201
    assert cached(call, "orders?offset=-1").body == [1, 2]
    eventually(lambda: metrics(edge)['tailrace_edge_cache_bytes{tier="disk"}'], lambda kept: kept > 0)
    reader = Connection(edge.port)
    reader.send(request_bytes("GET", "/v1/stream/orders?offset=now&live=sse"))
    assert reader.read_head().status == 200
    assert b"upToDate" in reader.read_chunk()
    owner.kill()
    server_at(processes, tmp_path / "second", owner.port)
    made = eventually(
        lambda: call("PUT", "orders", [7, 8, 9], headers=JSON).status, lambda status: status < 500
    )
    assert made == 201
    assert call("GET", "orders?offset=-1").body == [7, 8]
    assert cached(call, "orders?offset=-1").body == [7, 8]
    while reader.read_chunk():
        pass  # whatever is said, the answer ends: its stream is gone
    reader.close()


def test_nothing_of_other_streams_is_given_either(processes: list[ServerProcess], tmp_path: Path) -> None:
    """Made behind the edge's back, on the new server."""
    owner = server_at(processes, tmp_path / "first")
    edge = edge_of(processes, tmp_path, owner.base_url)
    call = Caller(edge)
    assert call("PUT", "orders", [1, 2, 3], headers=JSON).status == 201
    assert cached(call, "orders?offset=-1").body == [1, 2]
    owner.kill()
    second = server_at(processes, tmp_path / "second", owner.port)
    assert Caller(second)("PUT", "orders", [7, 8, 9], headers=JSON).status == 201
    eventually(
        lambda: metrics(edge).get('tailrace_edge_cache_invalidations_total{reason="deployment"}', 0),
        lambda dropped: dropped > 0,
    )
    assert call("GET", "orders?offset=-1").body == [7, 8]


def test_a_directory_of_slices_is_of_no_use_for_another_server(
    processes: list[ServerProcess], tmp_path: Path
) -> None:
    owners = [server_at(processes, tmp_path / name) for name in ("first", "second")]
    for number, owner in enumerate(owners):
        entries = [number * 10 + entry for entry in range(3)]
        assert Caller(owner)("PUT", "orders", entries, headers=JSON).status == 201
    for number, home in enumerate((0, 1, 0)):
        edge = edge_of(processes, tmp_path, owners[home].base_url)
        assert Caller(edge)("GET", "orders?offset=-1").body == [home * 10, home * 10 + 1], number
        assert cached(Caller(edge), "orders?offset=-1").body == [home * 10, home * 10 + 1]
        eventually(
            lambda edge=edge: metrics(edge)['tailrace_edge_cache_bytes{tier="disk"}'], lambda kept: kept > 0
        )
        edge.stop()


def test_a_door_that_opens_to_another_server_stays_shut(
    processes: list[ServerProcess], tmp_path: Path
) -> None:
    """Down at the start, it would have been given its share of the streams when it came up."""
    right, later = server_at(processes, tmp_path / "right"), KeptPort()
    urls = f"a={right.base_url}", f"b=http://127.0.0.1:{later.number}"
    edge = edge_of(processes, tmp_path, *urls, mode="any")
    call = Caller(edge)
    assert call("GET", "/readyz").body["status"] == "ready"
    other = server_at(processes, tmp_path / "other", later.number)
    told = eventually(lambda: call("GET", "/readyz").body, lambda body: "wrong" in body)
    assert told["status"] == "ready"
    assert list(told["wrong"]) == ["b"]
    assert "different servers" in told["wrong"]["b"]
    assert metrics(edge)['tailrace_edge_upstream_healthy{upstream="b"}'] == 0
    for number in range(STREAMS):
        assert call("PUT", f"s/{number}", [number], headers=JSON).status == 201
    assert len(Caller(right)("GET", "/v1/streams").body) == STREAMS
    assert Caller(other)("GET", "/v1/streams").body == []
    # Nor is it taken in place of the right one: its streams are not there.
    right.kill()
    eventually(lambda: call("GET", "/readyz").status, lambda status: status == 503)
    assert call("GET", "s/1").status == 503
    assert call("PUT", "s/new", headers=JSON).status == 503
    assert Caller(other)("GET", "/v1/streams").body == []


def test_a_shard_that_becomes_another_ones_double_stays_shut(
    processes: list[ServerProcess], tmp_path: Path
) -> None:
    first, second = (server_at(processes, tmp_path / name) for name in ("first", "second"))
    urls = f"a={first.base_url}", f"b={second.base_url}"
    edge = edge_of(processes, tmp_path, *urls, mode="sharded")
    call = Caller(edge)
    for server in (first, second):
        server.kill()
    server_at(processes, tmp_path / "first", second.port)  # the data of one behind the address of the other
    # Each upstream is probed at its own time: that one is gone may be noticed after that the other is wrong.
    told = eventually(
        lambda: call("GET", "/readyz").body, lambda body: "wrong" in body and len(body["upstreams"]) == 2
    )
    assert told["wrong"] == {
        "b": "two upstreams are the same server: upstream mode sharded needs different servers"
    }
    assert sorted(told["upstreams"]) == ["a", "b"]
    for number in range(STREAMS):
        assert call("PUT", f"s/{number}", headers=JSON).status == 503
