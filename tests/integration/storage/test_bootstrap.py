"""A server whose disk is lost gets everything that was sealed back from the object store."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cli import tailrace
from support.loss import BYTES, ENV, JSON, TEXT, World, bootstrap, destroy, look, post, producing, put, seal
from support.ports import free_port
from support.s3 import S3Server
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from tailrace.storage.segments.model import make_stream_id, stream_prefix


class Lost:
    """A bucket whose server is gone, and what was in it. Copied for each test, so that none sees another."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        server = ServerProcess(
            directory / "data", args=("--object-store", self.bucket.as_uri()), env=ENV
        ).start()
        call = Caller(server)
        self.world = World()
        self.world.build(call)
        self.world.lose(call)
        destroy(server)

    def copy(self, to: Path) -> str:
        shutil.copytree(self.bucket, to)
        return to.as_uri()


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    return Lost(tmp_path_factory.mktemp("lost"))


def check_goes_on(world: World, call: Caller) -> None:
    """Everything is there, lost offsets are gone, and streams take new entries."""
    world.check(call)
    # Producers are where they were: repeats are duplicates, the next one is taken.
    for who, epoch, seq in (("one", 2, 2), ("one", 2, 0), ("two", 0, 0)):
        repeated = call("POST", "produced", b"[0]", headers=producing(who, epoch, seq))
        assert repeated.status == 204
    assert call("POST", "produced", b"[0]", headers=producing("one", 1, 0)).status == 403
    assert call("POST", "produced", b"[0]", headers=producing("one", 2, 4)).status == 409
    again = {**producing("closer", 0, 0), "Stream-Closed": "true"}
    assert call("POST", "closed/by", b"[1]", headers=again).status == 204
    assert call("POST", "closed", b"more", headers=TEXT).status == 409
    assert call("POST", "seq", b"1", headers={**JSON, "Stream-Seq": "a"}).status == 409
    assert [entry % 3 for entry in call("GET", "keyed?key=key-1").body] == [1] * 30
    assert call("GET", "deleted").status == 404
    assert call("DELETE", "deleted").status == 204
    assert call("GET", "source/gone").status == 410
    assert call("PUT", "source/gone", headers=TEXT).status == 409
    assert call("PUT", "fork", headers={"Stream-Forked-From": "/v1/stream/json"}).status == 200
    world.check_lost(call)


def remember(world: World, call: Caller) -> World:
    """What there is now, sealed."""
    seal(call)
    after = World()
    after.seen = {row["name"]: look(call, row["name"]) for row in call("GET", "/v1/streams?limit=1000").body}
    after.lose(call, "never/recorded/either")
    for name, offsets in world.lost.items():
        after.lost[name] = offsets + after.lost.get(name, [])
    return after


def test_everything_sealed_comes_back_and_goes_on(
    lost: Lost, tmp_path: Path, running: list[ServerProcess]
) -> None:
    url = lost.copy(tmp_path / "bucket")
    server = bootstrap(tmp_path / "first", url).start()
    running.append(server)
    call = Caller(server)
    check_goes_on(lost.world, call)
    metrics = call("GET", "/metrics").raw.decode()
    assert re.search(r"tailrace_bootstraps_total 1\.0", metrics)
    assert re.search(r"tailrace_bootstrap_problems 0\.0", metrics)
    # Two streams of the server itself, and a source that is gone.
    assert "restored 23 streams (5 of them forks)" in server.log
    # It is a server like any other: it restarts, and what it was asked for once is not done again.
    server.args = ("--object-store", url)
    seen = remember(lost.world, call)
    server.restart(kill=True)
    assert [row["name"] for row in Caller(server)("GET", "/v1/streams?limit=1000").body] == sorted(
        {*seen.seen, "never/recorded/either"}
    )
    # A second loss is not confused with the first.
    destroy(server)
    second = bootstrap(tmp_path / "second", url).start()
    running.append(second)
    seen.check(Caller(second))
    seen.check_lost(Caller(second))


def test_the_same_from_a_real_bucket(
    s3: S3Server, tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url, env = s3.url("bootstrap"), {**ENV, **s3.env()}
    first = start_server("--object-store", url, env=env)
    world = World()
    world.build(Caller(first))
    name = "__ds/subscriptions/%F0%9F%8C%8A%20=%25"
    config = {"type": "pull-wake", "pattern": "j*", "wake_stream": "text"}
    assert Caller(first)("PUT", name, config).status == 201
    seal(Caller(first))
    links = Caller(first)("GET", name).body["streams"]
    world.lose(Caller(first))
    destroy(first)
    server = bootstrap(tmp_path / "again", url, s3.env()).start()
    running.append(server)
    assert Caller(server)("GET", name).body["streams"] == links
    check_goes_on(world, Caller(server))


@pytest.mark.parametrize(
    "moment",
    [
        "after_claim",
        "after_list",
        "after_take:1",
        "after_take:9",
        "after_batch:2",
        "before_rename",
        "after_rename",
    ],
)
def test_killed_anywhere_it_begins_again(
    lost: Lost, tmp_path: Path, running: list[ServerProcess], moment: str
) -> None:
    url = lost.copy(tmp_path / "bucket")
    server = bootstrap(tmp_path / "data", url, {"TAILRACE_FAILPOINT": f"bootstrap.{moment}"})
    server.start(ready=False)
    assert server.wait_exit() == 137
    server.env.pop("TAILRACE_FAILPOINT")
    server.start()
    running.append(server)
    assert not (server.data_dir / "bootstrap").exists()
    lost.world.check(Caller(server))
    lost.world.check_lost(Caller(server))


def test_a_directory_with_streams_is_left_alone(
    lost: Lost, tmp_path: Path, start_server: StartServer
) -> None:
    url = lost.copy(tmp_path / "bucket")
    server = start_server("--object-store", (tmp_path / "other").as_uri())
    put(Caller(server), "mine", JSON, b"[1]")
    server.stop()
    refused = bootstrap(server.data_dir, url)
    refused.start(ready=False)
    assert refused.wait_exit() == 1
    assert "needs a data directory without streams" in refused.log
    server.start()
    assert Caller(server)("GET", "mine").body == [1]


def test_a_start_by_mistake_does_not_stand_in_the_way(
    lost: Lost, tmp_path: Path, running: list[ServerProcess]
) -> None:
    url = lost.copy(tmp_path / "bucket")
    server = ServerProcess(tmp_path / "data", args=("--object-store", url), env=ENV)
    server.start(ready=False)
    assert server.wait_exit() == 1
    assert "--bootstrap" in server.log
    again = bootstrap(tmp_path / "data", url).start()
    running.append(again)
    lost.world.check(Caller(again))


def test_the_server_before_can_change_nothing_any_more(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    env = {**ENV, "TAILRACE_SEAL_INTERVAL_MS": "100"}
    old = start_server("--object-store", url, env=env)
    before = Caller(old)
    put(before, "shared", JSON, b"[1,2]")
    seal(before)
    post(before, "shared", b"[0]", JSON)
    new = bootstrap(tmp_path / "new", url, {"TAILRACE_BOOTSTRAP_SETTLE_MS": "8000"}).start()
    running.append(new)
    call = Caller(new)
    assert call("GET", "shared").body == [1, 2]
    post(call, "shared", b"[3]", JSON)
    seal(call)
    seen = look(call, "shared")
    # The old one notices within a moment, takes nothing in, and what it still has to seal stays with it.
    refused = eventually(
        lambda: before("POST", "shared", b"[4]", headers=JSON), lambda answer: answer.status == 503
    )
    assert refused.code == "unavailable"
    assert before("POST", "/v1/server/_seal").status == 503
    assert before("GET", "shared").status == 200
    assert look(call, "shared") == seen
    post(call, "shared", b"[5]", JSON)
    put(call, "other", JSON, b"[6]")
    seal(call)
    assert call("GET", "shared").body == [1, 2, 3, 5]
    destroy(new)
    third = bootstrap(tmp_path / "third", url).start()
    running.append(third)
    assert Caller(third)("GET", "shared").body == [1, 2, 3, 5]
    assert Caller(third)("GET", "other").body == [6]


def test_what_cannot_be_restored_is_told_and_the_rest_is_there(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    bucket = tmp_path / "bucket"
    server = start_server("--object-store", bucket.as_uri(), env=ENV)
    call = Caller(server)
    for name in ("broken", "source", "whole"):
        put(call, name, BYTES, name.encode())
    put(call, "fork", {**BYTES, "Stream-Forked-From": "/v1/stream/source"}, b" and more")
    seal(call)
    destroy(server)
    for head in bucket.glob("streams/*/*/manifest.json"):
        name = json.loads(head.read_bytes())["name"]
        if name == "broken":
            head.write_bytes(head.read_bytes()[:50])
        if name == "source":
            head.unlink()
    again = bootstrap(tmp_path / "again", bucket.as_uri()).start()
    running.append(again)
    call = Caller(again)
    assert call("GET", "whole").raw == b"whole"
    assert call("GET", "fork").raw == b" and more"
    assert call("GET", f"fork?offset={'0' * 26}").status == 410
    assert call("GET", "broken").status == 404
    assert "its source source is missing" in again.log
    assert "2 problems" in again.log
    post(call, "fork", b" and new", BYTES)
    seal(call)
    assert call("GET", "fork").raw == b" and more and new"


def test_forks_of_what_was_not_sealed_show_what_there_is(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env=ENV)
    call = Caller(server)
    put(call, "source", JSON, b"[1,2]")
    seal(call)
    folder = tmp_path / "bucket" / stream_prefix(make_stream_id("source", 0))
    shutil.copytree(folder, tmp_path / "before")
    post(call, "source", b"[3,4]", JSON)
    source = {**JSON, "Stream-Forked-From": "/v1/stream/source"}
    put(call, "bare", source)
    put(call, "bare/again", {**JSON, "Stream-Forked-From": "/v1/stream/bare"})
    put(call, "own", source, b"[5]")
    answer = call("POST", "/v1/server/_seal?stream=own")
    assert answer.status == 200
    lost = call("HEAD", "bare").headers["stream-next-offset"]
    destroy(server)
    # As a version left it that recorded forks before what they inherit.
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    again = bootstrap(tmp_path / "again", url).start()
    running.append(again)
    call = Caller(again)
    assert call("GET", "source").body == [1, 2]
    # What was sealed of the source is there; where something is missing in between, readers are told.
    for name in ("bare", "bare/again"):
        assert call("GET", name).body == [1, 2]
        assert call("GET", f"{name}?offset={lost}").status == 410
        post(call, name, b'["new"]', JSON)
        assert call("GET", name).body == [1, 2, "new"]
    assert call("GET", "own").body == [5]
    assert call("GET", f"own?offset={'0' * 26}").status == 410
    assert "3 problems" in again.log
    post(call, "own", b'["new"]', JSON)
    seal(call)
    assert call("GET", "own").body == [5, "new"]
    assert call("GET", "bare").body == [1, 2, "new"]


def test_what_retention_took_stays_gone_and_what_forks_show_stays(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env=SEALING_ENV)
    call = Caller(server)
    put(call, "trimmed", {**TEXT, "Stream-Retention-Bytes": "20"})
    source = {**TEXT, "Stream-Forked-From": "/v1/stream/trimmed", "Stream-Retention-Bytes": "1000000"}
    for entry in range(30):
        post(call, "trimmed", b"%04d" % entry, TEXT)
        if entry == 20:
            shown = call("HEAD", "trimmed").headers["stream-earliest-offset"]
            put(call, "fork", source, b"own")
            forked = call("HEAD", "fork").headers["stream-earliest-offset"]
            assert forked >= shown
    seal(call)

    def earliest(caller: Caller) -> str:
        return caller("HEAD", "trimmed").headers["stream-earliest-offset"]

    eventually(lambda: len(call("GET", "trimmed").raw), lambda size: size <= 28)
    seal(call)
    seen = {name: look(call, name) for name in ("trimmed", "fork")}
    last = earliest(call)
    destroy(server)
    again = bootstrap(tmp_path / "again", url, SEALING_ENV).start()
    running.append(again)
    call = Caller(again)
    assert {name: look(call, name) for name in seen} == seen
    assert call("GET", f"trimmed?offset={'0' * 26}").status == 410
    assert "0 problems" in again.log
    for entry in range(30, 40):
        post(call, "trimmed", b"%04d" % entry, TEXT)
    eventually(lambda: earliest(call), lambda offset: offset > last)
    assert look(call, "fork") == seen["fork"]


def test_the_registry_tells_everything_again(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env=ENV)
    call = Caller(server)
    put(call, "a", JSON)
    put(call, "deleted", JSON)
    seal(call)
    # Their manifests get to the bucket, what the registry says about them does not.
    put(call, "b", {**TEXT, "Stream-Closed": "true"}, b"x")
    assert call("DELETE", "deleted").status == 204
    assert call("POST", "/v1/server/_seal?stream=a").status == 200
    destroy(server)
    again = bootstrap(tmp_path / "again", url).start()
    running.append(again)
    call = Caller(again)
    told = call("GET", "__registry__").body
    controls = [message["headers"].get("control") for message in told]
    start, end = controls.index("reset"), controls.index("snapshot-end")
    assert controls[start + 1] == "snapshot-start"
    assert {message["key"] for message in told[:start]} == {"a", "deleted"}
    assert {message["key"]: message["value"]["closed"] for message in told[start + 2 : end]} == {
        "a": False,
        "b": True,
    }
    assert end == len(told) - 1
    again.args = ("--object-store", url)
    again.restart()
    assert call("GET", "__registry__").body == told


def test_a_bootstrap_can_be_stopped(lost: Lost, tmp_path: Path, running: list[ServerProcess]) -> None:
    url = lost.copy(tmp_path / "bucket")
    server = bootstrap(tmp_path / "data", url, {"TAILRACE_BOOTSTRAP_SETTLE_MS": "600000"})
    server.start(ready=False)
    eventually(lambda: server.log, lambda log: "bootstrap started" in log)
    server.stop()
    server.env = dict(ENV)
    server.start()
    running.append(server)
    lost.world.check(Caller(server))


def test_a_bucket_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "TAILRACE_OBJECT_MS": "500",
    }
    server = bootstrap(tmp_path / "data", "s3://nowhere/prefix", env)
    server.start(ready=False)
    assert server.wait_exit() == 1
    assert "the bootstrap failed and can be started again" in server.log


def test_a_busy_server_is_taken_over_in_the_midst_of_its_work(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    old = start_server("--object-store", url, env=SEALING_ENV)
    before = Caller(old)
    made: list[str] = []
    ended = threading.Event()

    def work() -> None:
        """New streams and more entries in old ones, until nothing is taken any more."""
        while not ended.is_set():
            name = f"w/{len(made)}"
            if before("PUT", name, b"[0]", headers=JSON).status != 201:
                break
            made.append(name)
            for other in made[-5:]:
                before("POST", other, b"[1,2,3]", headers=JSON)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        eventually(lambda: len(made), lambda count: count > 40)
        # What was not recorded yet is not there to be taken over; on a quick machine that may be all of it.
        eventually(lambda: len(list((tmp_path / "bucket").rglob("manifest.json"))), lambda count: count > 10)
        new = bootstrap(
            tmp_path / "new", url, {**SEALING_ENV, "TAILRACE_BOOTSTRAP_SETTLE_MS": "8000"}
        ).start()
        running.append(new)
        worker.join(60)
        assert not worker.is_alive(), "the old server still takes entries"
    finally:
        ended.set()
        worker.join()
    call = Caller(new)
    known = {row["name"] for row in call("GET", "/v1/streams?limit=1000&prefix=w/").body}
    assert known
    assert known <= set(made)
    # Whatever the old server did last: every name can be used, sealed and read.
    for name in made:
        if name not in known:
            put(call, name, JSON)
        post(call, name, b'["new"]', JSON)
    seal(call)
    seen = {name: look(call, name) for name in made}
    assert all(call("GET", f"{name}?offset=-1").body[-1] == "new" for name in made)
    assert tailrace("verify", "--object-store", url).code == 0
    destroy(new)
    third = bootstrap(tmp_path / "third", url).start()
    running.append(third)
    assert {name: look(Caller(third), name) for name in made} == seen
