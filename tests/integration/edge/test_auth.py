"""Tokens at an edge: it checks them itself, and shares nothing with whom it cannot check."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import pytest

from support.calls import Caller, eventually
from support.cli import tailrace
from support.edge import EdgeProcess, metrics
from support.server import ServerProcess
from support.wire import Connection, request_bytes
from tailrace.auth import create_token
from tailrace.common.settings import Settings

SECRET = "a secret that is long enough for tokens"
OTHER_SECRET = "another secret that is long enough, too"
ENV = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}


def _token(
    *scopes: str, streams: list[str] | None = None, secret: str = SECRET, lifetime_s: int = 3600
) -> str:
    return create_token(secret, sub="somebody", scopes=list(scopes), streams=streams, lifetime_s=lifetime_s)


def _expired(scope: str) -> str:
    """Long enough ago that no difference of clocks excuses it."""
    claims = {"sub": "somebody", "scope": scope, "exp": int(time.time()) - 3600}
    return jwt.encode(claims, SECRET, algorithm="HS256")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env=ENV).start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def edge(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    directory = tmp_path_factory.mktemp("edge")
    token_file = directory / "token"
    token_file.write_text(_token("read"), encoding="utf-8")
    args = ["--token-file", str(token_file)]
    process = EdgeProcess(directory / "cache", server.base_url, args=args, env=ENV)
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def stream(server: ServerProcess) -> str:
    call = Caller(server, _token("manage"))
    assert call("PUT", "secrets/one", headers=JSON).status == 201
    assert call("POST", "secrets/one", [1, 2, 3]).status == 204
    return "secrets/one"


def test_e19_nobody_reads_what_is_kept_without_the_right_to(edge: EdgeProcess, stream: str) -> None:
    """E-19."""
    good = Caller(edge, _token("read"))
    eventually(lambda: good("GET", stream).headers["x-cache"], lambda cache: cache == "HIT")
    assert good("GET", stream).body == [1, 2]
    wrong = {
        None: 401,
        "rubbish.of.three": 401,
        _token("read", secret=OTHER_SECRET): 401,
        _expired("read"): 401,
        _token("write"): 403,
        _token("read", streams=["others/"]): 403,
    }
    for token, status in wrong.items():
        for name in (stream, "secrets/none"):
            for live in ("", "&live=sse", "&live=long-poll", "&live=ws"):
                reply = Caller(edge, token)("GET", f"{name}?offset=-1{live}")
                assert reply.status == status, (token, name, live)
                assert "www-authenticate" in reply.headers
        assert Caller(edge, token)("HEAD", stream).status == status
    for token in (_token("read"), _token("write", streams=["others/"])):
        assert Caller(edge, token)("POST", stream, [4]).status == 403
    assert Caller(edge)("GET", "/healthz").status == 200
    assert Caller(edge)("GET", "/metrics").status == 401
    assert Caller(edge, _token("manage"))("GET", "/metrics").status == 200


def test_e19_nobody_joins_a_read_without_the_right_to(
    server: ServerProcess, edge: EdgeProcess, stream: str
) -> None:
    """E-19: somebody's read is under way, and its owner stands still: who may not read is told at once."""
    manage = _token("manage")
    target = f"{stream}?offset=0000000000000000_0000000000000001"
    wrong = {None: 401, _expired("read"): 401, _token("write"): 403, _token("read", streams=["others/"]): 403}

    def joined() -> float:
        return metrics(edge, manage)["tailrace_edge_coalesced_total"]

    before = joined()
    server.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(Caller(edge, _token("read")), "GET", target) for _ in range(2)]
            try:
                eventually(joined, lambda count: count == before + 1)
                for token, status in wrong.items():
                    assert Caller(edge, token)("GET", target).status == status
                assert joined() == before + 1
            finally:
                server.signal(signal.SIGCONT)
            assert all(answer.result().body[0] == 2 for answer in answers)
    finally:
        server.signal(signal.SIGCONT)


def test_readers_with_rights_of_their_own_share_one_socket(
    server: ServerProcess, edge: EdgeProcess, stream: str
) -> None:
    manage = _token("manage")

    def sockets() -> float:
        return metrics(server, manage)['tailrace_live_connections{mode="ws"}']

    before = sockets()
    target = f"/v1/stream/{stream}?offset=now&live=sse"
    connections = [Connection(edge.port) for _ in range(5)]
    for number, connection in enumerate(connections):
        bearer = _token("read", streams=[f"secrets/{'one'[:number]}"])
        connection.send(request_bytes("GET", target, {"Authorization": f"Bearer {bearer}"}))
        assert connection.read_head().status == 200
        assert b"upToDate" in connection.read_chunk()
    assert sockets() == before + 1
    assert Caller(edge, _token("write"))("POST", stream, [9]).status == 204
    for connection in connections:
        assert b"data:[9]" in connection.read_chunk()
        connection.close()


def test_a_reader_leaves_when_its_token_ends(edge: EdgeProcess, stream: str) -> None:
    """Tokens are good for half a minute longer than they say; this one has a few seconds left."""
    claims = {"sub": "somebody", "scope": "read", "exp": int(time.time()) - 24}
    bearer = {"Authorization": f"Bearer {jwt.encode(claims, SECRET, algorithm='HS256')}"}
    with Connection(edge.port) as connection:
        connection.send(request_bytes("GET", f"/v1/stream/{stream}?offset=now&live=sse", bearer))
        assert connection.read_head().status == 200
        assert b"upToDate" in connection.read_chunk()
        while connection.read_chunk():
            pass  # until the answer ends
        connection.send(request_bytes("GET", f"/v1/stream/{stream}", bearer))
        assert connection.read_answer().status == 401


def test_a_revoked_key_ends_its_readers(tmp_path: Path) -> None:
    """E-19: the server and the edge read one file; the reader shares its socket with one who stays."""
    keys = tmp_path / "keys.json"
    secrets = {
        who: tailrace("key", "create", "--file", str(keys), "--sub", who, "--scope", "manage").out.strip()
        for who in ("leaves", "stays")
    }
    env = {"TAILRACE_AUTH_KEYS_FILE": str(keys)}
    server = ServerProcess(tmp_path / "server" / "data", env=env).start()
    edge = EdgeProcess(tmp_path / "edge" / "cache", server.base_url, env=env)
    edge.start()
    try:
        call = {who: Caller(edge, secret) for who, secret in secrets.items()}
        assert call["leaves"]("PUT", "keyed", headers=JSON).status == 201
        connections = {who: Connection(edge.port) for who in secrets}
        for who, connection in connections.items():
            bearer = {"Authorization": f"Bearer {secrets[who]}"}
            connection.send(request_bytes("GET", "/v1/stream/keyed?offset=-1&live=sse", bearer))
            assert connection.read_head().status == 200
            assert b"upToDate" in connection.read_chunk()
        revoked = tailrace("key", "revoke", "--file", str(keys), secrets["leaves"])
        assert revoked.code == 0, revoked.err
        assert connections["leaves"].read_chunk() == b"", "the end of the answer"
        # The server reads the file in its own time; until then the edge leaves such a key to it.
        eventually(lambda: call["leaves"]("GET", "keyed").status, lambda status: status == 401)
        assert call["stays"]("POST", "keyed", [1]).status == 204
        assert b"data:[1]" in connections["stays"].read_chunk()
        for connection in connections.values():
            connection.close()
    finally:
        edge.stop()
        server.stop()


def test_credentials_that_cannot_be_checked_are_the_owners_to_judge(
    server: ServerProcess, tmp_path: Path, stream: str
) -> None:
    """An edge without keys in front of a server with some: nothing is shared, nothing is let through."""
    edge = EdgeProcess(tmp_path / "cache", server.base_url)
    edge.start()
    try:
        good = Caller(edge, _token("read"))
        for _ in range(3):
            reply = good("GET", stream)
            assert (reply.status, reply.headers["x-cache"]) == (200, "BYPASS")
        assert Caller(edge)("GET", stream).status == 401
        assert Caller(edge)("GET", f"{stream}?offset=-1&live=sse").status == 401
        with Connection(edge.port) as connection:
            bearer = {"Authorization": f"Bearer {_token('read')}"}
            connection.send(request_bytes("GET", f"/v1/stream/{stream}?offset=-1&live=sse", bearer))
            head = connection.read_head()
            assert (head.status, head["x-cache"]) == (200, "BYPASS")
            assert b"data:[1,2" in connection.read_chunk()
    finally:
        edge.stop()


def test_an_edge_without_keys_is_for_this_machine_only() -> None:
    assert Settings().edge_listen.startswith("127.0.0.1:")
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0"):
        refused = tailrace("edge", "--listen", address, "--upstream", "http://127.0.0.1:1")
        assert refused.code != 0
        assert "refusing to listen" in refused.err
        assert "without authentication" in refused.err
