"""Another number of workers: every stream is what it was, wherever it lives, also if that is interrupted."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from support.calls import Caller, eventually
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from support.workers import pid_of
from tailrace.cluster.layout import Layout, read_layout, refuse_leftover_generation
from tailrace.cluster.migration import fold_journal
from tailrace.cluster.peers import Placement
from tailrace.cluster.system_streams import DELIVERED_FACT
from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.log.stored_streams import StreamImage

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
    """What a server left when it was stopped."""

    data_dir: Path
    picture: dict[str, Any]


def filled_by(directory: Path, workers: int) -> Filled:
    server = start(directory, workers)
    fill(Caller(server))
    seen = picture(Caller(server))
    server.stop()
    return Filled(server.data_dir, seen)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """By two workers."""
    return filled_by(tmp_path_factory.mktemp("filled"), 2)


@pytest.fixture(scope="module")
def filled_alone(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return filled_by(tmp_path_factory.mktemp("filled-alone"), 1)


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
@pytest.mark.parametrize(
    ("present", "workers"),
    [("filled", 1), ("filled_alone", 2), pytest.param("filled", 3, marks=pytest.mark.nightly)],
)
def test_a_change_that_is_killed_is_done_again(
    tmp_path: Path, request: pytest.FixtureRequest, present: str, workers: int, step: str
) -> None:
    before: Filled = request.getfixturevalue(present)
    generation = read_layout(before.data_dir).generation
    shutil.copytree(before.data_dir, tmp_path / "data")
    args, env = ("--workers", str(workers)), {"TAILRACE_FAILPOINT": step}
    dying = ServerProcess(tmp_path / "data", args=args, env=env).start(ready=False)
    assert dying.wait_exit() == failpoints.EXIT_CODE
    server = start(tmp_path, workers)
    assert picture(Caller(server)) == before.picture
    server.stop()
    assert [path.name for path in (tmp_path / "data" / "workers").iterdir()] == [str(generation + 1)]


def test_what_an_attempt_left_is_not_taken_for_streams(tmp_path: Path) -> None:
    """As if it could not be removed."""
    left = tmp_path / "workers" / "2" / "0"
    left.mkdir(parents=True)
    (left / "hot.db").touch()
    refuse_leftover_generation(tmp_path, Layout(workers=2, generation=1))
    with pytest.raises(TailraceError, match="left over from an earlier attempt"):
        refuse_leftover_generation(tmp_path, Layout(workers=2, generation=2))


def test_two_streams_of_one_name_are_not_made_one(tmp_path: Path, filled: Filled) -> None:
    """A fork lives on one worker, and as if the note about it had been lost, its name's home has a stream."""
    data_dir = tmp_path / "data"
    shutil.copytree(filled.data_dir, data_dir)
    layout, placement = read_layout(data_dir), Placement(2)
    stores = [fold_journal(layout.path(data_dir, index), tombstone_ms=86_400_000) for index in range(2)]
    fork, lives = next(
        (name, index)
        for name in ("fork/a", "fork/b", "fork/c", "fork/d")
        for index, store in enumerate(stores)
        if store.image_by_name(name) is not None and placement.owner(name) != index
    )
    raw = stores[lives].image_by_name(fork)
    assert raw is not None
    image = msgspec.msgpack.decode(raw, type=StreamImage)
    image.number, image.parent = 9999, 0
    stores[1 - lives].put_stream(image.number, fork, False, None, msgspec.msgpack.encode(image))
    for store in stores:
        store.close()
    refused = ServerProcess(data_dir, args=("--workers", "3")).start(ready=False)
    assert refused.wait_exit() == 1
    assert f"both have a stream '{fork}'" in refused.log


def test_what_a_worker_has_yet_to_tell_is_not_given_up(tmp_path: Path, filled: Filled) -> None:
    """As if it had been killed before its news arrived: the number stays until they have."""
    data_dir = tmp_path / "data"
    shutil.copytree(filled.data_dir, data_dir)
    first = fold_journal(read_layout(data_dir).path(data_dir, 0), tombstone_ms=86_400_000)
    first.put_meta(f"{DELIVERED_FACT}1/__registry__", b"1")
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
    assert "workers did not stop in time" not in server.log
    assert "supervisor has exited" not in server.log
