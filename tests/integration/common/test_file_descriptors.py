"""Many connections take no descriptor that the server needs for its files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.edge import EdgeProcess, metrics
from support.server import ServerProcess

LIMIT = 512
BYTES = {"Content-Type": "application/octet-stream"}


@contextmanager
def soft_limit(at_least: int) -> Iterator[int]:
    """The soft limit of processes that are started meanwhile: no lower than this process needs for itself."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(at_least, len(list(Path("/proc/self/fd").iterdir())) + 64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limit_of(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


def start_limited(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hard limit, which a process cannot raise."""
    launch = server.launch

    def limited(cwd: Path, output: int) -> object:
        process = launch(cwd, output)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        return process

    monkeypatch.setattr(server, "launch", limited)
    server.start()
    assert limit_of(server.pid) == (LIMIT, LIMIT)


@contextmanager
def idle_connections(port: int, wanted: int) -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    try:
        for _ in range(wanted):
            made.append(socket.create_connection(("127.0.0.1", port), 30))
        yield made
    finally:
        for one in made:
            one.close()


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("workers", [1, 2])
def test_idle_connections_do_not_stop_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    args = ("--workers", str(workers), "--journal-file-bytes", "1MiB", "--pipeline", "off")
    server = ServerProcess(tmp_path / "data", args=args, plain=True)
    start_limited(server, monkeypatch)
    try:
        call = Caller(server)
        with idle_connections(server.port, 1):
            kept = socket.create_connection(("127.0.0.1", server.port), 60)
            assert post(kept, "PUT", b"") == 201
            with idle_connections(server.port, LIMIT * workers + 200):
                eventually(lambda: refused(server), lambda found: found > 0)
                for _ in range(20):  # journal files
                    assert post(kept, "POST", bytes(512 * 1024)) == 204
            kept.close()
        eventually(lambda: call("POST", "s", b"after", headers=BYTES).status, lambda status: status == 204)
        failures = {name: value for name, value in metrics(server).items() if "journal_failures" in name}
        assert failures
        assert not any(failures.values())
        assert "file descriptor limit" in server.log
        assert "Too many open files" not in server.log
    finally:
        server.stop()


def refused(server: ServerProcess) -> int:
    """Whether a further connection is answered, refused or dropped."""
    try:
        with socket.create_connection(("127.0.0.1", server.port), 30) as probe:
            probe.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            return int(not probe.recv(100).startswith(b"HTTP/1.1 200"))
    except OSError:
        return 1


def post(kept: socket.socket, method: str, body: bytes) -> int:
    head = f"{method} /v1/stream/s HTTP/1.1\r\nHost: x\r\nContent-Type: {BYTES['Content-Type']}\r\n"
    kept.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        piece = kept.recv(65536)
        assert piece, "the server left"
        answer += piece
    return int(answer[9:12])


def test_the_soft_limit_is_raised_at_the_start(tmp_path: Path) -> None:
    with soft_limit(256) as inherited:
        server = ServerProcess(tmp_path / "data", plain=True).start()
    try:
        soft, hard = limit_of(server.pid)
        assert soft == hard > inherited
        assert metrics(server)["tailrace_connections_max"] > inherited
    finally:
        server.stop()


def test_an_edge_takes_fewer_connections_than_it_has_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerProcess(tmp_path / "data").start()
    edge = EdgeProcess(tmp_path / "edge", server.base_url, plain=True)
    try:
        start_limited(edge, monkeypatch)
        with idle_connections(edge.port, LIMIT + 200):
            eventually(lambda: open_files(edge.pid), lambda found: found > LIMIT // 6)
            assert refused(edge)
            assert open_files(edge.pid) < LIMIT - 32
        assert "file descriptor limit" in edge.log
        assert "Too many open files" not in edge.log
    finally:
        edge.stop()
        server.stop()
