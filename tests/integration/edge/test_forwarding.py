"""What passes an edge: requests, bodies, refusals, sockets; and what it answers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import EdgeProcess, metrics
from support.ports import free_port
from support.server import ServerProcess
from support.wire import Connection, Wire, fresh, request_bytes

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def edge(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    process = EdgeProcess(tmp_path_factory.mktemp("edge") / "cache", server.base_url)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def wire(edge: EdgeProcess) -> Iterator[Wire]:
    wire = Wire(edge.port)
    yield wire
    wire.close()


def test_a_stream_lives_its_whole_life_through_an_edge(wire: Wire) -> None:
    name = fresh("edge-life")
    created = wire.call("PUT", name, {"Content-Type": "application/json"})
    assert created.status == 201
    assert created["location"] == f"http://tailrace.test/v1/stream/{name}"
    appended = wire.call("POST", name, {"Content-Type": "application/json"}, '[{"n":1},{"n":2}]')
    assert appended.status == 204
    read = wire.call("GET", name)
    assert read.json == [{"n": 1}, {"n": 2}]
    assert read["stream-next-offset"] == appended["stream-next-offset"]
    assert wire.call("HEAD", name)["x-cache"] == "BYPASS"
    assert wire.call("POST", name, {"Stream-Closed": "true"}).status == 204
    assert wire.call("GET", name)["stream-closed"] == "true"
    assert wire.call("DELETE", name).status == 204
    assert wire.call("GET", name).code == "not_found"


def test_large_bodies_pass_in_both_directions(wire: Wire) -> None:
    name = fresh("edge-large")
    assert wire.call("PUT", name, {"Content-Type": "application/octet-stream"}).status == 201
    body = bytes(range(256)) * (4 * 4096)
    assert len(body) == 4 * MIB
    assert wire.call("POST", name, {"Content-Type": "application/octet-stream"}, body).status == 204
    assert wire.call("GET", name, {"Cache-Control": "no-cache"}).body == body
    shared = wire.call("GET", name)
    assert shared.body == body
    assert int(shared["content-length"]) == len(body)
    too_large = wire.call("POST", name, {"Content-Type": "application/octet-stream"}, b"x" * (65 * MIB))
    assert too_large.code == "payload_too_large"


def test_the_owner_decides_and_its_refusals_arrive_as_they_are(wire: Wire) -> None:
    name = fresh("edge-refusals")
    assert wire.call("GET", name).code == "not_found"
    assert wire.call("GET", f"{name}?offset=-1&live=sse").code == "not_found"
    assert wire.call("GET", f"{name}?offset=now&live=long-poll").code == "not_found"
    assert wire.call("PUT", "__mine").code == "reserved_name"
    wire.call("PUT", name, {"Content-Type": "text/plain"})
    assert wire.call("GET", f"{name}?offset=17").code == "invalid_offset"
    assert wire.call("GET", f"{name}?offset=-1&offset=-1").code == "invalid_offset"
    assert wire.call("GET", f"{name}?live=never").code == "invalid_request"
    assert wire.call("GET", f"{name}?live=sse").code == "missing_offset"
    beyond = "00000000000000000004000000"
    for live in ("", "&live=sse", "&live=long-poll"):
        assert wire.call("GET", f"{name}?offset={beyond}{live}").code == "offset_beyond_tail"
    assert wire.call("GET", f"{name}?offset=-1&live=ws").code == "upgrade_required"
    twice = [("Content-Type", "text/plain"), ("Stream-Key", "a"), ("Stream-Key", "b")]
    assert wire.call("POST", name, twice, b"x").code == "invalid_header"


def test_what_a_client_says_about_the_way_is_not_believed(edge: EdgeProcess, wire: Wire) -> None:
    """E-20."""
    name = fresh("edge-headers")
    sent = {"X-Forwarded-Host": "evil.test", "X-Forwarded-Proto": "https", "Tailrace-Edge": "v1;id=x"}
    created = wire.call("PUT", name, {**sent, "Content-Type": "text/plain"})
    assert created["location"].startswith("http://tailrace.test/")
    assert "via" not in created


def test_an_edge_that_is_its_own_upstream_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port()
    process = EdgeProcess(tmp_path_factory.mktemp("loop") / "cache", f"http://127.0.0.1:{port}")
    process.port = port
    process.start(ready=False)
    try:
        eventually(lambda: process.status("/healthz"), lambda status: status == 200)
        wire = Wire(port)
        assert wire.call("GET", "anything").code == "internal"
        wire.close()
        eventually(lambda: process.log, lambda log: "proxy loop detected" in log)
    finally:
        process.stop()


def test_health_and_metrics_are_the_edges_own(edge: EdgeProcess, server: ServerProcess, wire: Wire) -> None:
    assert wire.call("GET", "/healthz").json == {"status": "ok"}
    ready = wire.call("GET", "/readyz").json
    assert ready["status"] == "ready"
    assert ready["deployment"] == Caller(server)("GET", "/readyz").body["deployment"]
    assert metrics(edge)["tailrace_edge_ready"] == 1
    assert wire.call("GET", "/v1/server/_details").code == "not_found"
    assert wire.call("OPTIONS", "/v1/stream/any").status == 204


def test_other_routes_and_their_sockets_pass_as_they_are(edge: EdgeProcess, wire: Wire) -> None:
    assert wire.call("GET", "/openapi.json").json["openapi"].startswith("3.")
    assert wire.call("GET", "/v1/streams").status == 200
    name = fresh("edge-schema")
    wire.call("PUT", name, {"Content-Type": "application/json"})
    assert wire.call("GET", f"{name}/_details").status == 200
    with connect(
        f"ws://127.0.0.1:{edge.port}/v1/stream/__registry__?offset=-1&live=ws", proxy=None
    ) as socket:
        first = json.loads(socket.recv(timeout=20))
        assert first["type"] == "data"
        assert name in first["payload"]
        assert json.loads(socket.recv(timeout=20))["type"] == "control"


def test_an_edge_may_stand_in_front_of_an_edge(edge: EdgeProcess, tmp_path: Path) -> None:
    outer = EdgeProcess(tmp_path / "cache", edge.base_url, args=["--server-timing"])
    outer.start()
    try:
        call = Caller(outer)
        name = fresh("edge-chain")
        assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
        tail = call("POST", name, [1]).headers["stream-next-offset"]
        read = call("GET", name)
        assert (read.body, read.headers["stream-next-offset"]) == ([1], tail)
        assert "edge-total;dur=" in read.headers["server-timing"]
        with Connection(outer.port) as connection:
            connection.send(request_bytes("GET", f"/v1/stream/{name}?offset={tail}&live=sse"))
            assert connection.read_head()["x-cache"] == "MISS"
            assert b"upToDate" in connection.read_chunk()
            call("POST", name, [2])
            assert b"data:[2]" in connection.read_chunk()
    finally:
        outer.stop()


def test_without_its_upstream_an_edge_says_so(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = start_server()
    edge = EdgeProcess(tmp_path_factory.mktemp("edge") / "cache", server.base_url)
    edge.start()
    try:
        call = Caller(edge)
        assert call("PUT", "left", headers={"Content-Type": "text/plain"}).status == 201
        server.kill()
        refused = call("POST", "left", b"x", headers={"Content-Type": "text/plain"})
        assert (refused.status, refused.code) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert call("GET", "left").status == 503
        unready = eventually(lambda: call("GET", "/readyz"), lambda reply: reply.status == 503)
        assert unready.body["upstreams"] == [server.base_url]
        server.start()
        eventually(lambda: call("GET", "/readyz").status, lambda status: status == 200)
        assert call("POST", "left", b"x", headers={"Content-Type": "text/plain"}).status == 204
        assert call("GET", "left").raw == b"x"
    finally:
        edge.stop()
