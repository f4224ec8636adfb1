"""An object store that cannot be used, is full of what waits for it, or belongs to somebody else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.sealing import SEALING_ENV, hot, wait_sealed, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.auth import create_token
from tailrace.protocol.offsets import encode_offset
from tailrace.testing import ServerFailedError

TEXT = "text/plain"
SECRET = "a secret that is long enough for HS256, 32 bytes"


class Bucket:
    """A directory as object store that can be taken away and given back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._away = path.with_name("away")

    @property
    def url(self) -> str:
        return self._path.as_uri()

    def take_away(self) -> None:
        """Not even root can make a file in what is not a directory."""
        if self._path.exists():
            self._path.rename(self._away)
        self._path.write_text("this is no bucket")

    def give_back(self) -> None:
        self._path.unlink()
        if self._away.exists():
            self._away.rename(self._path)


Started = Callable[..., tuple[ServerProcess, Wire]]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def started(start_server: StartServer, bucket: Bucket) -> Iterator[Started]:
    wires: list[Wire] = []

    def start(**more: str) -> tuple[ServerProcess, Wire]:
        server = start_server(env={**SEALING_ENV, "TAILRACE_OBJECT_STORE": bucket.url, **more})
        wires.append(Wire(server.port))
        return server, wires[-1]

    yield start
    for wire in wires:
        wire.close()


def object_store(server: ServerProcess) -> str:
    return Caller(server)("GET", "/readyz").body["object_store"]


def test_appends_and_hot_reads_go_on_and_everything_drains(started: Started, bucket: Bucket) -> None:
    server, http = started()
    assert http.put("a", TEXT).status == 201
    assert http.post("a", TEXT, "0,").status == 204
    wait_sealed(server.data_dir)
    assert object_store(server) == "ok"
    bucket.take_away()
    for number in range(1, 10):
        assert http.post("a", TEXT, f"{number},").status == 204
    wait_until(lambda: object_store(server).startswith("failing"), "the failure seen")
    assert server.status("/readyz") == 200
    assert http.get(f"a?offset={encode_offset(0, 1)}").body == b"1,2,3,4,5,6,7,8,9,"
    assert http.get("a").code == "unavailable"  # its first entry is out of reach
    http.close()
    server.restart(kill=True)
    assert object_store(server).startswith("failing")
    assert http.post("a", TEXT, "10,").status == 204
    bucket.give_back()
    wait_until(lambda: object_store(server) == "ok", "the store back")
    wait_sealed(server.data_dir)
    assert http.get("a").body == b"".join(b"%d," % number for number in range(11))


def test_what_the_store_answers_is_told_to_operators_only(started: Started, bucket: Bucket) -> None:
    bucket.take_away()
    server, _ = started(TAILRACE_AUTH_JWT_SECRET=SECRET)
    manager = Caller(server, create_token(SECRET, sub="m", scopes=["manage"]))

    def told(call: Caller) -> str:
        return call("GET", "/readyz").body["object_store"]

    wait_until(lambda: told(manager).startswith("failing: "), "the failure told")
    for who in (None, create_token(SECRET, sub="r", scopes=["read"]), "nonsense"):
        assert told(Caller(server, who)) == "failing"


def test_too_much_waiting_is_refused_until_it_has_drained(started: Started, bucket: Bucket) -> None:
    server, http = started(TAILRACE_SPOOL_BYTES="200000")
    assert http.put("a", TEXT).status == 201
    wait_until(lambda: hot(server.data_dir).get("heads"), "the first checkpoint")
    bucket.take_away()
    taken = 0
    while (answer := http.post("a", TEXT, b"x" * 10_000)).status == 204:
        taken += 1
        assert taken * 10_000 <= 200_000, "the bound is not kept"
    assert (answer.status, answer.code) == (503, "unavailable")
    assert "object store" in answer.json["error"]["message"]
    assert answer["retry-after"]
    assert server.status("/readyz") == 503
    assert http.get("a").status == 200
    assert taken >= 10
    bucket.give_back()
    wait_until(lambda: server.status("/readyz") == 200, "room again")
    assert http.post("a", TEXT, b"y").status == 204
    wait_sealed(server.data_dir)
    text = b""
    while len(text) < 10_000 * taken + 1:
        text += http.get(f"a?offset={encode_offset(0, len(text) // 10_000)}").body
    assert text == b"x" * 10_000 * taken + b"y"


def test_history_that_is_elsewhere_is_not_served_with_holes(
    started: Started, bucket: Bucket, tmp_path: Path
) -> None:
    server, http = started()
    assert http.put("a", TEXT, "x").status == 201
    wait_sealed(server.data_dir)
    http.close()
    server.stop()
    server.env["TAILRACE_OBJECT_STORE"] = (tmp_path / "another").as_uri()
    with pytest.raises(ServerFailedError, match="name the store that has it"):
        server.start()
    # All of it copied, it is as good as the one before.
    shutil.copytree(tmp_path / "bucket", tmp_path / "another")
    server.start()
    assert http.get("a").body == b"x"
    http.close()
    server.stop()
    server.env |= {"TAILRACE_OBJECT_STORE": (tmp_path / "third").as_uri(), "TAILRACE_TAKE_OVER": "yes"}
    server.start()
    assert http.get("a").code == "unavailable"
    assert http.put("b", TEXT, "y").status == 201


def test_a_bucket_has_one_owner(started: Started) -> None:
    first, http = started()
    assert http.put("a", TEXT).status == 201
    with pytest.raises(ServerFailedError, match="--take-over"):
        started()
    second, other = started(TAILRACE_BOOTSTRAP="yes", TAILRACE_BOOTSTRAP_SETTLE_MS="1")
    assert other.put("b", TEXT).status == 201
    # The one that lost the bucket finds out, says so, and takes nothing more.
    wait_until(lambda: first.status("/readyz") == 503, "the loss noticed")
    assert object_store(first).startswith("fenced")
    assert http.post("a", TEXT, "x").code == "unavailable"
    assert http.get("a").status == 200
    assert other.post("b", TEXT, "x").status == 204
    assert other.call("POST", "/v1/server/_seal?stream=b").json == {"sealed": True}
    assert other.get("b").body == b"x"
    assert first.running
    assert second.running
