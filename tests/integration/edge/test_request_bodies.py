"""Request bodies pass an edge while they come: nothing is collected, nobody is stopped for long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Direction
from support.edge import EdgeProcess, metrics
from support.server import ServerProcess
from support.wire import Connection, fresh, request_bytes
from tailrace.http.streaming_request import BUFFERED_BODY_BYTES_MAX, STREAMED_BODY_BYTES_MIN

KIB = 1024
MIB = 1024 * KIB
BINARY = {"Content-Type": "application/octet-stream"}
ENV = {"TAILRACE_APPEND_BODY_BYTES": "64MiB", "TAILRACE_APPEND_QUEUE_MAX_BYTES": "256MiB"}


class Passed:
    """What has gone through to the server."""

    def __init__(self) -> None:
        self.data = b""

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        if direction == "request" and b"/readyz" not in piece:
            self.data += piece
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {**ENV, "TAILRACE_APPEND_BODY_BYTES": "2MiB"}
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env=env).start()
    yield process
    process.stop()


@pytest.fixture
def passed() -> Passed:
    return Passed()


@pytest.fixture
def edge(server: ServerProcess, tmp_path: Path, passed: Passed) -> Iterator[EdgeProcess]:
    with CuttingProxy(server.port, passed) as proxy:
        process = EdgeProcess(tmp_path / "cache", proxy.base_url, env=ENV)
        process.start()
        yield process
        process.stop()


def _made(server: ServerProcess) -> str:
    name = fresh("edge-body")
    assert Caller(server)("PUT", name, headers=BINARY).status == 201
    return name


def _chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def test_a_body_goes_on_before_it_is_all_there(
    server: ServerProcess, edge: EdgeProcess, passed: Passed
) -> None:
    """With a length, and in chunks; the connection is then good for the next request."""
    name = _made(server)
    body = bytes(range(256)) * (2 * KIB)
    begun, rest = body[: STREAMED_BODY_BYTES_MIN + KIB], body[STREAMED_BODY_BYTES_MIN + KIB :]
    with Connection(edge.port) as connection:
        head = request_bytes("POST", f"/v1/stream/{name}", {**BINARY, "Content-Length": str(len(body))})
        connection.send(head + begun)
        eventually(lambda: passed.data, lambda data: begun[-KIB:] in data)
        connection.send(rest)
        assert connection.read_answer("POST").status == 204
        head = request_bytes("POST", f"/v1/stream/{name}", {**BINARY, "Transfer-Encoding": "chunked"})
        passed.data = b""
        connection.send(head + _chunks(begun))
        eventually(lambda: passed.data, lambda data: begun[-KIB:] in data)
        connection.send(_chunks(rest) + b"0\r\n\r\n")
        assert connection.read_answer("POST").status == 204
        connection.send(request_bytes("GET", f"/v1/stream/{name}"))
        assert connection.read_answer().body == body + body
    assert metrics(edge)["tailrace_edge_body_bytes"] == 0


def test_a_refusal_before_the_end_arrives(server: ServerProcess, tmp_path: Path) -> None:
    """The server takes 2 MiB, the edge would take more: what the server says is passed on at once."""
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=ENV)
    edge.start()
    name = _made(server)
    with Connection(edge.port) as connection:
        connection.send(
            request_bytes("POST", f"/v1/stream/{name}", {**BINARY, "Content-Length": str(9 * MIB)})
        )
        connection.send(bytes(STREAMED_BODY_BYTES_MIN + KIB))
        refused = connection.read_answer("POST")
        assert (refused.status, refused.code) == (413, "payload_too_large")
        assert refused["connection"] == "close"
        assert connection.at_end()
    assert Caller(edge)("POST", name, b"x", headers=BINARY).status == 204
    assert Caller(edge)("GET", name).raw == b"x"
    edge.stop()


@pytest.mark.parametrize("more", [{}, {"Connection": "close"}])
def test_a_body_over_the_limit_of_the_edge_is_refused_as_soon_as_it_is(
    server: ServerProcess, tmp_path: Path, more: dict[str, str]
) -> None:
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env={"TAILRACE_APPEND_BODY_BYTES": "1MiB"})
    edge.start()
    try:
        name = _made(server)
        target = f"/v1/stream/{name}"
        with Connection(edge.port) as connection:
            connection.send(request_bytes("POST", target, {**BINARY, **more, "Content-Length": str(2 * MIB)}))
            assert connection.read_answer("POST").code == "payload_too_large"
        with Connection(edge.port) as connection:
            connection.send(request_bytes("POST", target, {**BINARY, **more, "Transfer-Encoding": "chunked"}))
            connection.send(_chunks(*[bytes(STREAMED_BODY_BYTES_MIN)] * 17))
            assert connection.read_answer("POST").code == "payload_too_large"
        assert Caller(edge)("GET", name).raw == b"", "nothing of it was appended"
        eventually(lambda: metrics(edge)["tailrace_edge_body_bytes"], lambda held: held == 0)
    finally:
        edge.stop()


def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    server: ServerProcess, edge: EdgeProcess, passed: Passed
) -> None:
    name = _made(server)
    with Connection(edge.port) as connection:
        connection.send(request_bytes("POST", f"/v1/stream/{name}", {**BINARY, "Content-Length": str(MIB)}))
        connection.send(b"half" * STREAMED_BODY_BYTES_MIN)
        eventually(lambda: passed.data, lambda data: b"half" in data)
    eventually(lambda: metrics(edge)["tailrace_edge_body_bytes"], lambda held: held == 0)
    eventually(lambda: metrics(edge)["tailrace_edge_connections"], lambda open_now: open_now == 1)
    assert Caller(edge)("GET", name).raw == b""


def test_a_server_that_stands_still_stops_the_client(start_server: StartServer, tmp_path: Path) -> None:
    """E-22: whatever a client wants to send, the edge holds no more of it than its bound."""
    total = 60 * MIB  # more than the kernel takes in between
    sent = 0
    server = start_server(env=ENV)
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=ENV)
    edge.start()
    server.signal(signal.SIGSTOP)
    with Connection(edge.port) as connection:

        def push() -> None:
            nonlocal sent
            head = {**BINARY, "Content-Length": str(total)}
            connection.send(request_bytes("POST", "/v1/stream/nowhere", head))
            for _ in range(total // (64 * KIB)):
                connection.send(bytes(64 * KIB))
                sent += 64 * KIB

        pushing = threading.Thread(target=push)
        try:
            pushing.start()
            held = eventually(
                lambda: metrics(edge)["tailrace_edge_body_bytes"], lambda held: held > BUFFERED_BODY_BYTES_MAX
            )
            assert held <= 2 * MIB
            assert sent < total
        finally:
            server.signal(signal.SIGCONT)
        assert connection.read_answer("POST").code == "not_found", "all of it went through"
        pushing.join()
    assert metrics(edge)["tailrace_edge_body_bytes"] == 0
    edge.stop()


def test_who_may_not_write_is_told_before_the_body_is_there(
    server: ServerProcess, tmp_path: Path, passed: Passed
) -> None:
    env = {**ENV, "TAILRACE_AUTH_JWT_SECRET": "a secret that is long enough for tokens"}
    with CuttingProxy(server.port, passed) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url, env=env)
        edge.start()
        try:
            with Connection(edge.port) as connection:
                head = {**BINARY, "Content-Length": str(9 * MIB)}
                connection.send(
                    request_bytes("POST", "/v1/stream/never", head)
                    + b"secret" * (STREAMED_BODY_BYTES_MIN // 5)
                )
                assert connection.read_answer("POST").status == 401
                assert connection.at_end()
            assert b"secret" not in passed.data
        finally:
            edge.stop()


def test_requests_behind_a_long_one_are_answered_in_their_turn(
    server: ServerProcess, edge: EdgeProcess
) -> None:
    """Sent in one go: the second and the third wait until the first is done."""
    name = _made(server)
    bodies = [bytes([number]) * size for number, size in ((1, 300 * KIB), (2, 10), (3, 300 * KIB))]
    with Connection(edge.port) as connection:
        connection.send(
            b"".join(request_bytes("POST", f"/v1/stream/{name}", BINARY, body) for body in bodies)
        )
        for _ in bodies:
            assert connection.read_answer("POST").status == 204
        connection.send(request_bytes("GET", f"/v1/stream/{name}"))
        assert connection.read_answer().body == b"".join(bodies)


def test_a_client_that_waits_to_be_asked_is_asked(server: ServerProcess, edge: EdgeProcess) -> None:
    name = _made(server)
    body = bytes(range(256)) * KIB
    head = {**BINARY, "Expect": "100-continue", "Content-Length": str(len(body))}
    with Connection(edge.port) as connection:
        connection.send(request_bytes("POST", f"/v1/stream/{name}", head))
        assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
        connection.send(body)
        assert connection.read_answer("POST").status == 204
    assert Caller(edge)("GET", name).raw == body


def test_a_client_that_falls_silent_is_not_waited_for(server: ServerProcess, tmp_path: Path) -> None:
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env={**ENV, "TAILRACE_BODY_IDLE_MS": "500"})
    edge.start()
    name = _made(server)
    head = request_bytes("POST", f"/v1/stream/{name}", {**BINARY, "Content-Length": str(MIB)})
    with Connection(edge.port) as connection:
        connection.send(head + bytes(STREAMED_BODY_BYTES_MIN))
        assert connection.read_answer("POST").code == "request_timeout"
        assert connection.at_end()
    assert metrics(edge)["tailrace_edge_body_bytes"] == 0
    assert Caller(edge)("GET", name).raw == b""
    edge.stop()
