"""Several workers on one bucket: restored from it, and taking it over, as a single process would."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cli import tailrace
from support.loss import ENV, World, bootstrap, destroy, producing, seal
from support.server import ServerProcess
from support.workers import names_of, pid_of
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.object_store.interface import open_object_store
from tailrace.testing import ServerFailedError

TWO = ("--workers", "2")
JSON = {"Content-Type": "application/json"}


def lose(server: ServerProcess) -> None:
    """Killed, and the disk is gone when the last worker is."""
    pids = [pid_of(server, worker) for worker in range(2)]
    server.kill()
    eventually(lambda: [Path(f"/proc/{pid}").exists() for pid in pids], lambda found: not any(found))
    shutil.rmtree(server.data_dir)


def test_everything_sealed_comes_back_to_several_workers(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    first = start_server("--object-store", url, *TWO, env=ENV)
    call = Caller(first)
    world = World()
    world.build(call)
    config = {"type": "pull-wake", "pattern": "j*", "wake_stream": "text"}
    assert call("PUT", "__ds/subscriptions/s", config).status == 201
    seal(call)
    links = call("GET", "__ds/subscriptions/s").body["streams"]
    world.lose(call)
    lose(first)
    server = bootstrap(tmp_path / "again", url, None, *TWO).start()
    running.append(server)
    call = Caller(server)
    world.check(call)
    assert call("GET", "__ds/subscriptions/s").body["streams"] == links
    assert call("POST", "produced", b"[0]", headers=producing("one", 2, 2)).status == 204
    assert call("POST", "produced", b"[0]", headers=producing("one", 2, 4)).status == 409
    assert call("GET", "deleted").status == 404
    assert call("GET", "source/gone").status == 410
    world.check_lost(call)
    metrics = call("GET", "/metrics").raw.decode()
    assert 'tailrace_bootstraps_total{worker="0"} 1.0' in metrics
    assert 'tailrace_bootstrap_problems{worker="0"} 0.0' in metrics
    seal(call)
    assert tailrace("verify", "--object-store", url).code == 0
    # What it was asked for once is not done again: there are streams by now.
    server.stop()
    with pytest.raises(ServerFailedError, match="needs a data directory without streams"):
        server.start()


def segments_of(call: Caller, names: Iterable[str]) -> set[str]:
    """Which of these streams `__segments__` tells of."""
    told = call("GET", "__segments__?offset=-1")
    return {event["value"]["stream"] for event in told.body if "value" in event} & set(names)


def folded(call: Caller) -> set[str]:
    """What somebody who reads `__registry__` to its end knows of."""
    found: set[str] = set()
    for event in call("GET", "__registry__?offset=-1").body:
        headers = event["headers"]
        if headers.get("control") == "reset":
            found.clear()
        elif headers.get("operation") == "delete":
            found.discard(event["key"])
        elif "key" in event:
            found.add(event["key"])
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_after_a_bootstrap_the_registry_tells_of_the_streams_of_all(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess], workers: str
) -> None:
    url = (tmp_path / "bucket").as_uri()
    first = start_server("--object-store", url, "--workers", workers, env=ENV)
    call = Caller(first)
    homes = [names_of(worker, 2, "told/") for worker in range(2)]
    names = [next(home) for home in homes for _ in range(2)]
    for name in names:
        assert call("PUT", name, [1, 2]).status == 201
    seal(call)
    eventually(lambda: segments_of(call, names), lambda told: told == set(names))
    eventually(lambda: folded(call), lambda told: told == set(names))
    seal(call)
    assert call("DELETE", names[-1]).status == 204  # of which the bucket may never hear
    (lose if workers == "2" else destroy)(first)
    server = bootstrap(tmp_path / "again", url, None, *TWO).start()
    running.append(server)
    call = Caller(server)
    later = [next(home) for home in homes]
    for name in later:
        assert call("PUT", name, [3]).status == 201
    seal(call)
    # What a worker told before it told of these has arrived as well.
    eventually(lambda: segments_of(call, later), lambda told: told == set(later))
    eventually(lambda: folded(call), lambda told: told >= set(later))
    assert folded(call) == {one["name"] for one in call("GET", "/v1/streams").body}
    controls = [one["headers"].get("control") for one in call("GET", "__registry__?offset=-1").body]
    assert controls.count("reset") == 1
    events = [json.dumps(event) for event in call("GET", "__segments__?offset=-1").body]
    assert len(events) == len(set(events))


@pytest.mark.nightly
def test_a_bucket_is_taken_over_for_the_streams_of_all(tmp_path: Path, start_server: StartServer) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri(), *TWO)
    first = start_server(*store, data_dir=tmp_path / "first")
    names = [next(names_of(worker, 2, "orders/")) for worker in range(2)]
    for name in (*names, "deleted"):
        assert Caller(first)("PUT", name, [1, 2]).status == 201
    seal(Caller(first))
    assert Caller(first)("DELETE", "deleted").status == 204
    seal(Caller(first))
    first.stop()
    # Of a bucket with streams that another directory has, nothing is taken.
    with pytest.raises(ServerFailedError, match="has streams that this data directory does not have"):
        start_server(*store, "--take-over", data_dir=tmp_path / "mistaken")
    asyncio.run(_claim(bucket.as_uri()))
    with pytest.raises(ServerFailedError, match="--take-over"):
        start_server(*store, data_dir=tmp_path / "first")
    first = start_server(*store, "--take-over", data_dir=tmp_path / "first")
    for name in names:
        assert Caller(first)("POST", name, [3]).status == 204
    seal(Caller(first))
    for name in names:
        assert Caller(first)("GET", f"{name}?offset=-1").body == [1, 2, 3]
    assert tailrace("verify", "--object-store", bucket.as_uri()).code == 0


async def _claim(url: str) -> None:
    """Somebody becomes the owner, and is gone before it records anything."""
    objects = open_object_store(url)
    await BucketOwnership(objects).claim("somebody", take_over=True)
    await objects.close()
