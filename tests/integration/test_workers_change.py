"""Another number of workers: every stream is what it was, wherever it lives, also if that is interrupted."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.calls import Caller, eventually
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from support.workers import pid_of
from tailrace import failpoints
from tailrace.workers.delivery import FACT
from tailrace.workers.layout import read_layout
from tailrace.workers.migrate import fold

STEPS = [name for name in failpoints.NAMES if name.startswith("workers.")]
JSON = {"Content-Type": "application/json"}
PLAIN = [f"plain/{number}" for number in range(12)]
PRODUCER = {**JSON, "Producer-Id": "p", "Producer-Epoch": "3"}


def start(directory: Path, workers: int, **env: str) -> ServerProcess:
    return ServerProcess(directory / "data", args=("--workers", str(workers)), env=env).start()


def fill(call: Caller) -> None:
    """Streams of all kinds: plain, closed, with a lifetime, producers or a schema, forked, deleted."""
    for number, name in enumerate(PLAIN):
        assert call("PUT", name, list(range(number + 1))).status == 201
    assert call("PUT", "closed", [1], headers={**JSON, "Stream-Closed": "true"}).status == 201
    assert call("PUT", "lasting", [1], headers={**JSON, "Stream-TTL": "86400"}).status == 201
    call("PUT", "produced", headers=JSON)
    for seq in range(3):
        assert call("POST", "produced", seq, headers={**PRODUCER, "Producer-Seq": str(seq)}).status in (
            200,
            204,
        )
    call("PUT", "strict", headers=JSON)
    assert call("POST", "strict/_schema", {"schema": {"type": "object", "required": ["id"]}}).status == 200
    for source, fork in (
        ("plain/3", "fork/a"),
        ("plain/4", "fork/b"),
        ("fork/a", "fork/c"),
        ("fork/b", "fork/d"),
    ):
        made = call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
        assert made.status == 201, made
        assert call("POST", fork, fork).status == 204
    call("PUT", "dead", [1])
    assert call("DELETE", "dead").status == 204
    assert call("DELETE", "plain/4").status == 204
    config = {"type": "pull-wake", "pattern": "plain/*", "wake_stream": "wake"}
    call("PUT", "wake", headers=JSON)
    assert call("PUT", "__ds/subscriptions/s", config).status == 201


def picture(call: Caller) -> dict[str, Any]:
    """All that a client can see."""
    names = [one["name"] for one in call("GET", "/v1/streams").body]
    seen: dict[str, Any] = {"names": names}
    for name in names:
        head = call("HEAD", name)
        kept = ("stream-next-offset", "stream-closed", "content-type", "stream-earliest-offset")
        seen[name] = [call("GET", f"{name}?offset=-1").body, *(head.headers.get(key) for key in kept)]
    seen["dead"] = [call(method, "dead").status for method in ("GET", "DELETE")]
    seen["soft"] = call("GET", "plain/4").status
    seen["schema"] = call("GET", "strict/_schema").body
    links = call("GET", "__ds/subscriptions/s").body["streams"]
    seen["links"] = sorted((one["path"], one["acked_offset"]) for one in links)
    return seen


def check_goes_on(call: Caller, seq: int) -> None:
    """What was true of producers, schemas and forks holds on."""
    again = call("POST", "produced", seq - 1, headers={**PRODUCER, "Producer-Seq": str(seq - 1)})
    assert again.status == 204, again
    assert call("POST", "produced", 9, headers={**PRODUCER, "Producer-Seq": "99"}).code == "producer_gap"
    assert call("POST", "produced", seq, headers={**PRODUCER, "Producer-Seq": str(seq)}).status in (200, 204)
    assert call("POST", "strict", {}).status == 400
    assert call("POST", "closed", 2).code == "stream_closed"


class Filled(NamedTuple):
    """What a server with two workers left when it was stopped."""

    data_dir: Path
    picture: dict[str, Any]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    directory = tmp_path_factory.mktemp("filled")
    server = start(directory, 2)
    fill(Caller(server))
    seen = picture(Caller(server))
    server.stop()
    return Filled(server.data_dir, seen)


@pytest.mark.parametrize(
    "sealed", [pytest.param(False, marks=pytest.mark.nightly, id="hot"), pytest.param(True, id="sealed")]
)
def test_streams_move_with_everything_they_have(tmp_path: Path, sealed: bool) -> None:
    env = SEALING_ENV if sealed else {}
    server = start(tmp_path, 1, **env)
    fill(Caller(server))
    if sealed:
        assert Caller(server)("POST", "/v1/server/_seal").body == {"sealed": True}
    for seq, workers in enumerate((2, 3, 1), 3):
        before = picture(Caller(server))
        server.stop()
        server = start(tmp_path, workers, **env)
        call = Caller(server)
        eventually(lambda call=call: picture(call), lambda seen, before=before: seen == before)
        check_goes_on(call, seq)
        assert read_layout(tmp_path / "data").workers == workers
    server.stop()


@pytest.mark.parametrize("step", STEPS)
def test_a_change_that_is_killed_is_done_again(tmp_path: Path, filled: Filled, step: str) -> None:
    shutil.copytree(filled.data_dir, tmp_path / "data")
    dying = ServerProcess(tmp_path / "data", args=("--workers", "3"), env={"TAILRACE_FAILPOINT": step})
    dying.start(ready=False)
    assert dying.wait_exit() == failpoints.EXIT_CODE
    server = start(tmp_path, 3)
    assert picture(Caller(server)) == filled.picture
    server.stop()
    assert [path.name for path in (tmp_path / "data" / "workers").iterdir()] == ["2"]


def test_what_a_worker_has_yet_to_tell_is_not_given_up(tmp_path: Path, filled: Filled) -> None:
    """As if it had been killed before its news arrived: the number stays until they have."""
    data_dir = tmp_path / "data"
    shutil.copytree(filled.data_dir, data_dir)
    first = fold(read_layout(data_dir).path(data_dir, 0), tombstone_ms=86_400_000)
    first.put_meta(f"{FACT}1/__registry__", b"1")
    first.close()
    refused = ServerProcess(data_dir, args=("--workers", "1")).start(ready=False)
    assert refused.wait_exit() == 1
    assert "start with --workers 2" in refused.log
    server = start(tmp_path, 2)
    assert picture(Caller(server)) == filled.picture
    server.stop()


def test_a_port_that_one_process_has_just_left_can_be_shared(tmp_path: Path) -> None:
    """The kernel remembers for a minute the connections that a server has ended, and whose they were."""
    server = ServerProcess(tmp_path / "data").start()
    assert Caller(server)("GET", "/healthz", headers={"Connection": "close"}).status == 200
    server.stop()
    server.args = ("--workers", "2")
    server.start()
    assert Caller(server)("GET", "/healthz").status == 200
    server.stop()


@pytest.mark.parametrize("workers", ["1", "3"])
def test_on_a_port_that_is_in_use_nothing_is_shared_out(tmp_path: Path, filled: Filled, workers: str) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(filled.data_dir, data_dir)
    before = on_disk(data_dir)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for directory in (data_dir, tmp_path / "new"):
            refused = ServerProcess(directory, port=port, args=("--workers", workers)).start(ready=False)
            assert refused.wait_exit() == 1
            assert f"cannot listen on 127.0.0.1 port {port}" in refused.log
            if workers == "1":
                break  # a single server looks at nothing but its own directory
    assert on_disk(data_dir) == before
    assert not on_disk(tmp_path / "new")


def on_disk(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file but the server's output, with when it was changed."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size) for path in found
    }


def test_a_server_that_is_stopped_while_its_workers_begin_leaves_at_once(tmp_path: Path) -> None:
    # Told to drain before it has read its setup, a worker finds both in its input at the same time.
    server = ServerProcess(tmp_path / "data", args=("--workers", "2")).start(ready=False)
    eventually(lambda: pid_of(server, 1), lambda pid: pid is not None)
    server.signal(signal.SIGINT)
    assert server.wait_exit() == 0
    assert "took longer" not in server.log
    assert "the supervisor is gone" not in server.log
