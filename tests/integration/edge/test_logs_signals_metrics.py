"""Running an edge: its log of requests, its signals, and its numbers on a port of their own."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import EdgeProcess, cached, metrics
from support.ports import KeptPort
from support.server import ServerProcess
from support.wire import Connection, Wire, fresh, request_bytes
from tailrace.auth import create_token
from tailrace.http.tls import self_signed_certificate

JSON = {"Content-Type": "application/json"}
SECRET = "a secret that is long enough for tokens"
LOGGED = ("--log-requests", "all", "--log-format", "json")


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server(*LOGGED)


@pytest.fixture
def edges() -> Iterator[list[EdgeProcess]]:
    started: list[EdgeProcess] = []
    yield started
    for edge in started:
        if edge.running:
            edge.stop()


def lines(process: ServerProcess, path: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    return [line for line in found if line.get("path") == path]


def test_every_request_has_a_line_by_the_same_id_as_at_the_server(
    server: ServerProcess, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    edge = EdgeProcess(tmp_path / "cwd", server.base_url, args=LOGGED)
    edges.append(edge)
    edge.start()
    call, name = Caller(edge), fresh("logged")
    path = f"/v1/stream/{name}"
    secret = {"Authorization": "Bearer hush", "X-Request-Id": "mine"}
    assert call("PUT", name, headers=JSON).status == 201
    assert call("POST", name, ["hush"], headers=secret).headers["x-request-id"] == "mine"
    read = call("GET", f"{name}?offset=-1&hint=hush")
    assert read.headers["x-cache"] == "MISS"
    assert call("GET", f"{name}?offset=now").headers["x-cache"] == "BYPASS"
    live = f"ws://127.0.0.1:{edge.port}{path}?offset=-1&live=ws"
    with connect(live) as opened:
        assert "hush" in str(opened.recv())
    told = eventually(lambda: lines(edge, path), lambda found: len(found) == 5)
    assert [(line["method"], line["status"], line.get("cache")) for line in told] == [
        ("PUT", 201, None),
        ("POST", 204, None),
        ("GET", 200, "MISS"),
        ("GET", 200, "BYPASS"),
        ("GET", 101, "MISS"),
    ]
    assert all(line["ms"] >= 0 and line["peer"].startswith("127.0.0.1:") for line in told)
    assert told[1]["request_id"] == "mine"
    assert told[2]["request_id"] == read.headers["x-request-id"]
    ids = {line["request_id"] for line in lines(server, path)}
    assert {line["request_id"] for line in told[:4]} <= ids, "found by the same id at the server"
    assert "hush" not in edge.log


def test_what_an_edge_cannot_do_is_logged_once_with_the_reason(
    start_server: StartServer, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    """By default, too; and what is nobody's fault is not."""
    server = start_server()
    edge = EdgeProcess(tmp_path / "cwd", server.base_url, args=["--log-format", "json"])
    edges.append(edge)
    edge.start()
    call = Caller(edge)
    assert call("GET", "missing").status == 404
    server.kill()
    lost = eventually(lambda: call("GET", "lost"), lambda reply: reply.status == 503)
    assert lost.headers["x-cache"] == "BYPASS"
    (line,) = eventually(
        lambda: [one for one in lines(edge, "/v1/stream/lost") if one["status"] == 503],
        lambda found: found,
    )[:1]
    assert line["code"] == "unavailable"
    assert line["reason"] == "the upstream is unavailable"
    assert line["request_id"] == lost.headers["x-request-id"]
    assert lines(edge, "/v1/stream/missing") == []


def test_what_is_kept_for_others_has_the_id_of_nobody(
    server: ServerProcess, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    edge = EdgeProcess(tmp_path / "cwd", server.base_url)
    edges.append(edge)
    edge.start()
    call, name = Caller(edge), fresh("unnamed")
    call("PUT", name, [1], headers=JSON)
    assert call("GET", f"{name}?offset=-1", headers={"X-Request-Id": "mine"}).status == 200
    again = cached(call, f"{name}?offset=-1")
    assert "x-request-id" not in again.headers
    assert "X-Request-Id" not in again.headers["access-control-expose-headers"].split(", ")[-1:]


def _certificate(port: int) -> bytes | None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 30) as plain, trusting.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True)


def test_sighup_reads_the_certificate_again(
    start_server: StartServer, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    """And readers stay: an edge that is told to look again does not end."""
    server = start_server()
    pairs = [self_signed_certificate(tmp_path / name, "127.0.0.1") for name in ("first", "second")]
    files = [tmp_path / "cert.pem", tmp_path / "key.pem"]

    def put(pair: tuple[Path, Path]) -> None:
        for file, source in zip(files, pair, strict=True):
            file.write_bytes(source.read_bytes())

    put(pairs[0])
    args = ["--tls-cert", str(files[0]), "--tls-key", str(files[1])]
    edge = EdgeProcess(tmp_path / "cwd", server.base_url, args=args)
    edges.append(edge)
    edge.start(ready=False)
    eventually(lambda: edge.log, lambda log: "tailrace ready" in log)
    before = _certificate(edge.port)
    put(pairs[1])
    edge.signal(signal.SIGHUP)
    eventually(lambda: _certificate(edge.port), lambda found: found != before)
    files[1].write_text("not a key", encoding="utf-8")
    edge.signal(signal.SIGHUP)
    eventually(lambda: edge.log, lambda log: "certificate reload failed, keeping the last one" in log)
    assert _certificate(edge.port) is not None
    assert edge.running


def test_numbers_on_a_port_of_their_own_need_no_token(
    start_server: StartServer, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
    server, port = start_server(env=env), KeptPort()
    args = ["--metrics-port", str(port.number)]
    edge = EdgeProcess(tmp_path / "cwd", server.base_url, args=args, env=env)
    edges.append(edge)
    edge.start()
    assert Caller(edge)("GET", "/metrics").status == 401
    wire = Connection(port.number)
    for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 200), ("/v1/streams", 404)):
        wire.send(request_bytes("GET", path))
        head = wire.read_head()
        body = wire.read_exactly(int(head["content-length"]))
        assert head.status == status, path
        assert path != "/metrics" or b"tailrace_edge_ready 1.0" in body
    wire.close()
    seen = metrics(edge, create_token(SECRET, sub="m", scopes=["manage"]))
    requests = f'tailrace_edge_upstream_requests{{state="%s",upstream="{server.base_url}"}}'
    assert seen[requests % "queued"] == 0
    assert seen[requests % "active"] >= 0
    assert seen['tailrace_edge_overload_total{limit="upstream_queue"}'] == 0
    assert seen['tailrace_edge_overload_total{limit="connections"}'] == 0
    assert 'tailrace_edge_following{what="registry"}' in seen


def test_x_cache_is_on_every_answer_to_a_read(
    server: ServerProcess, edges: list[EdgeProcess], tmp_path: Path
) -> None:
    edge = EdgeProcess(tmp_path / "cwd", server.base_url)
    edges.append(edge)
    edge.start()
    wire = Wire(edge.port)
    for path in (
        "/healthz",
        "/readyz",
        "/v1/streams",
        "/v1/server/_mem",
        "missing",
        "a?offset=nonsense",
    ):
        assert wire.get(path)["x-cache"] in ("MISS", "BYPASS"), path
    assert "x-cache" not in wire.post("missing", "application/json", "[1]")
    wire.close()
