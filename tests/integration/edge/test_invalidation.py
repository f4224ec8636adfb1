"""What an edge has kept of streams that are others by now, when nobody tells it: it asks before long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.edge import EdgeProcess, cached, upstream_sockets
from support.loss import destroy, seal
from support.server import ServerProcess
from support.wire import fresh
from tailrace.auth import create_token
from tailrace.protocol.offsets import encode_offset

SECRET = "a secret that is long enough for tokens"
AUTH = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
PAGE = {"TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
CONFIRM_S = 0.3
CONFIRM = {"TAILRACE_EDGE_CONFIRM_MS": "300"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env={**AUTH, **PAGE}).start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def untold(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    """An edge that has no token of its own, and therefore may not look at the registry."""
    directory = tmp_path_factory.mktemp("edge")
    args = ("--cache-dir", str(directory / "slices"))
    process = EdgeProcess(directory / "cache", server.base_url, args=args, env={**AUTH, **CONFIRM})
    process.start()
    yield process
    process.stop()


def _delete(owner: Caller, name: str) -> None:
    assert owner("DELETE", name).status == 204


def _replace(owner: Caller, name: str) -> None:
    _delete(owner, name)
    assert owner("PUT", name, [7, 8, 9], headers=JSON).status == 201


def _leave_to_a_fork(owner: Caller, name: str) -> None:
    forked = {"Stream-Forked-From": f"/v1/stream/{name}"}
    assert owner("PUT", f"{name}/fork", headers=forked).status == 201
    _delete(owner, name)


@pytest.mark.parametrize("end", [_delete, _replace, _leave_to_a_fork])
def test_e13_an_edge_that_is_not_told_asks_before_long(
    server: ServerProcess, untold: EdgeProcess, end: Callable[[Caller, str], None]
) -> None:
    """E-13: when the time is over for which an answer is trusted, the very next read is the owner's."""
    token = create_token(SECRET, sub="somebody", scopes=["manage"])
    edge, owner = Caller(untold, token), Caller(server, token)
    name = fresh("untold")
    assert owner("PUT", name, [0, 1, 2, 3, 4], headers=JSON).status == 201
    targets = (name, f"{name}?offset={encode_offset(0, 2)}")
    for target in targets:
        cached(edge, target)
    end(owner, name)
    time.sleep(CONFIRM_S)
    for target in targets:
        reply, direct = edge("GET", target), owner("GET", target)
        assert (reply.status, reply.raw) == (direct.status, direct.raw)
        assert reply.headers["x-cache"] == "MISS"


@pytest.mark.parametrize("followed", [True, False], ids=["told", "not told"])
def test_e13_what_a_restored_owner_has_lost_is_not_served(tmp_path: Path, followed: bool) -> None:
    """E-13: entries that were acknowledged and kept here, and that the bucket of their owner never saw."""
    bucket = ("--object-store", (tmp_path / "bucket").as_uri())
    secret = {} if followed else AUTH
    token = None if followed else create_token(SECRET, sub="somebody", scopes=["manage"])
    server = ServerProcess(tmp_path / "server" / "data", args=bucket, env={**PAGE, **secret}).start()
    owner = Caller(server, token)
    assert owner("PUT", "restored", headers=JSON).status == 201
    assert owner("POST", "restored", [0, 1, 2, 3]).status == 204
    seal(owner)
    args = ("--cache-dir", str(tmp_path / "slices"))
    process = EdgeProcess(tmp_path / "edge" / "cache", server.base_url, args=args, env={**CONFIRM, **secret})
    process.start()
    edge = Caller(process, token)
    if followed:
        eventually(lambda: upstream_sockets(server), bool)
    assert owner("POST", "restored", ["lost"] * 5).status == 204
    targets = [f"restored?offset={encode_offset(0, entry)}" for entry in range(8)]
    for target in targets:
        cached(edge, target)
    destroy(server)
    server.args = (*bucket, "--bootstrap")
    server.start()

    def unlike_the_owner() -> list[str]:
        pairs = [(target, edge("GET", target), owner("GET", target)) for target in ("restored", *targets)]
        return [
            target
            for target, reply, direct in pairs
            if (reply.status, reply.raw) != (direct.status, direct.raw)
        ]

    # That there is another server is seen by looking at it, which happens every few seconds.
    eventually(unlike_the_owner, lambda targets: not targets)
    assert owner("POST", "restored", ["new"] * 7).status == 204
    time.sleep(CONFIRM_S)
    assert unlike_the_owner() == []
    process.restart(kill=True)
    assert unlike_the_owner() == []
    process.stop()
    server.stop()
