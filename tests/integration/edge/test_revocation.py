"""What the server has revoked is good at no edge, though all that has is the secret and its own token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jwt
import pytest

from support.calls import Caller, eventually
from support.edge import EdgeProcess, cached, metrics
from support.server import ServerProcess
from support.wire import Connection, request_bytes
from tailrace.auth import IdentityStore, create_api_key, create_token
from tailrace.auth.identities import IdentityFile

SECRET = "a secret that is long enough for tokens"
ENV = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
REVOKED = "/v1/server/_revoked"


def token(*scopes: str, sub: str = "somebody", streams: list[str] | None = None) -> str:
    return create_token(SECRET, sub=sub, scopes=list(scopes), streams=streams)


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def jti_of(value: str) -> str:
    return jwt.decode(value, options={"verify_signature": False})["jti"]


MANAGER = token("manage", sub="admin")


@pytest.fixture(scope="module", params=["1", "2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    args = ["--workers", request.param]
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env=ENV, args=args).start()
    call = Caller(process, MANAGER)
    assert call("PUT", "secrets/one", headers=JSON).status == 201
    assert call("POST", "secrets/one", [1, 2, 3]).status == 204
    yield process
    process.stop()


@pytest.fixture(scope="module")
def edge(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    """Its data directory is its own, as on another machine."""
    directory = tmp_path_factory.mktemp("edge")
    (directory / "token").write_text(token("read", sub="edge"), encoding="utf-8")
    args = ["--token-file", str(directory / "token")]
    process = EdgeProcess(directory / "cache", server.base_url, args=args, env=ENV)
    process.start()
    yield process
    process.stop()


def follow(edge: EdgeProcess, value: str, live: str) -> Connection:
    connection = Connection(edge.port)
    target = f"/v1/stream/secrets/one?offset=now&live={live}"
    connection.send(request_bytes("GET", target, bearer(value)))
    return connection


def number(edge: EdgeProcess, name: str) -> Callable[[], float]:
    return lambda: metrics(edge, MANAGER)[f"tailrace_edge_{name}"]


def opened(edge: EdgeProcess, value: str) -> Connection:
    connection = follow(edge, value, "sse")
    assert connection.read_head().status == 200
    assert b"upToDate" in connection.read_chunk()
    return connection


@pytest.mark.parametrize("by", ["jti", "sub"])
def test_a_revoked_token_reads_nothing_that_is_kept_or_shared(
    server: ServerProcess, edge: EdgeProcess, by: str
) -> None:
    """E-19: the kept slice, the open reader, one who comes to its socket, and the waiting long-poll."""
    lost, stays = token("read", sub=f"lost by {by}"), token("read", sub="stays")
    assert cached(Caller(edge, lost), "secrets/one?offset=-1").body == [1, 2]
    leaving, staying = opened(edge, lost), opened(edge, stays)
    waiting = follow(edge, lost, "long-poll")
    eventually(number(edge, 'clients{mode="long-poll"}'), lambda waiting: waiting == 1)
    revoked = {"jti": jti_of(lost)} if by == "jti" else {"sub": f"lost by {by}"}
    assert Caller(server, MANAGER)("POST", "/v1/server/_revocations", revoked).status == 200
    assert leaving.read_chunk() == b"", "the end of the answer"
    assert waiting.read_answer().status == 401
    refused = Caller(edge, lost)("GET", "secrets/one?offset=-1")
    assert (refused.status, refused.code) == (401, "unauthorized")
    assert Caller(edge, lost)("GET", "secrets/one?offset=now&live=sse").status == 401
    assert Caller(edge, stays)("GET", "secrets/one?offset=-1").headers["x-cache"] == "HIT"
    assert Caller(edge, MANAGER)("POST", "secrets/one", [4]).status == 204
    assert b"data:[4]" in staying.read_chunk()
    for connection in (leaving, staying, waiting):
        connection.close()


def test_revocations_are_told_by_hashes_and_only_when_they_are_new(
    server: ServerProcess, edge: EdgeProcess
) -> None:
    follower = Caller(server, token("read"))
    assert Caller(server, MANAGER)("POST", "/v1/server/_revocations", {"jti": "a-plain-id"}).status == 200
    first = follower("GET", REVOKED)
    assert first.status == 200
    assert set(first.body) == {"tokens", "subjects"}
    assert b"a-plain-id" not in first.raw
    newest = eventually(lambda: follower("GET", REVOKED), lambda reply: reply.body["tokens"])
    again = eventually(
        lambda: follower("GET", REVOKED, headers={"If-None-Match": newest.headers["etag"]}),
        lambda reply: reply.status == 304,
    )
    assert again.raw == b""
    assert Caller(server, token("manage", streams=["others/"]))("GET", REVOKED).status == 200
    assert Caller(server, token("read", streams=["others/"]))("GET", REVOKED).status == 403
    assert Caller(server, token("write"))("GET", REVOKED).status == 403
    assert Caller(server)("GET", REVOKED).status == 401
    assert follower("POST", REVOKED, {}).status == 405
    # An edge in front of an edge follows through it; the rest of the server stays hidden.
    assert Caller(edge, token("read"))("GET", REVOKED).body.keys() == {"tokens", "subjects"}
    assert Caller(edge, MANAGER)("GET", "/v1/server/_revocations").status == 404
    assert metrics(edge, MANAGER)['tailrace_edge_following{what="revocations"}'] == 1


def test_an_edge_that_may_not_follow_says_so_once(server: ServerProcess, tmp_path: Path) -> None:
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=ENV)
    edge.start()
    try:
        assert edge.log.count("cannot read revocations") == 1
        assert "--token-file" in edge.log
        assert metrics(edge, MANAGER)['tailrace_edge_following{what="revocations"}'] == 0
    finally:
        edge.stop()


def test_a_token_that_is_replaced_is_read_again(server: ServerProcess, tmp_path: Path) -> None:
    """While the edge's own is refused readers' tokens open the sockets: what is shared stays shared."""
    claims = {"sub": "edge", "scope": "read", "exp": int(time.time()) - 3600}
    file = tmp_path / "token"
    file.write_text(jwt.encode(claims, SECRET, algorithm="HS256"), encoding="utf-8")
    edge = EdgeProcess(tmp_path / "cache", server.base_url, args=["--token-file", str(file)], env=ENV)
    edge.start()
    try:
        assert edge.log.count("upstream refuses the edge token") == 1
        assert metrics(edge, MANAGER)["tailrace_edge_token_refused"] == 1
        readers = [opened(edge, token("read", sub=name)) for name in ("ada", "bob")]
        assert metrics(edge, MANAGER)["tailrace_edge_channels"] == 1, "they share a socket all the same"
        file.write_text(token("read", sub="edge"), encoding="utf-8")
        eventually(number(edge, "token_refused"), lambda refused: refused == 0)
        eventually(number(edge, 'following{what="revocations"}'), lambda told: told == 1)
        for reader in readers:
            reader.close()
    finally:
        edge.stop()
    assert edge.log.count("upstream refuses the edge token") == 1


def test_a_token_that_was_made_for_an_api_key_is_judged_by_the_server(
    server: ServerProcess, edge: EdgeProcess
) -> None:
    """The edge does not have the server's keys: such a client is passed on, and shares nothing."""
    key, _ = create_api_key(sub="ci", scopes=["read"])
    IdentityStore(IdentityFile(server.data_dir / "identity.json")).add_key(key)
    claims = jwt.decode(token("read", sub="ci"), options={"verify_signature": False})
    made = jwt.encode(claims | {"trVouched": f"key {key.fingerprint}"}, SECRET, algorithm="HS256")
    answer = eventually(
        lambda: Caller(edge, made)("GET", "secrets/one?offset=-1"), lambda reply: reply.status == 200
    )
    assert answer.headers["x-cache"] == "BYPASS"
