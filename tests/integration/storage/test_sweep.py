"""The server sweeps its bucket by itself: leftovers go, nothing else does, and being killed is no excuse."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import tailrace
from support.manifests import segment
from support.retention import TEXT, append, folder, texts, wait_idle
from support.sealing import SEALING_ENV, wait_sealed, wait_until
from support.server import ServerProcess
from support.wire import Wire
from support.workers import names_of
from tailrace.storage.segments.index_files import index_file_name

ENV = {
    **SEALING_ENV,
    "TAILRACE_SWEEP_INTERVAL_MS": "200",
    "TAILRACE_SWEEP_AGE_MS": "30m",
}
HOUR_S = 3600
LEFT_BEHIND = (
    "segments/0000000000-00000000000000000001-00000000000000000002.0123456789abcdef.parquet",
    "manifest/00000000000000000001-00000000000000000008.0123456789abcdef.json",
    "producers/0000000002.0123456789abcdef.json",
)

COMPANION = index_file_name(f"sha256:{'a' * 64}", "col", 1, 8, "0" * 64, "parquet")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", env=dict(ENV))
    yield process
    if process.running:
        process.stop()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Wire]:
    server.start()
    wire = Wire(server.port)
    yield wire
    wire.close()


def leave(directory: Path, *keys: str, hours: float = 2) -> list[Path]:
    """Objects that nobody names, and that are so old."""
    paths = [directory / key for key in keys]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left behind")
        then_s = time.time() - hours * HOUR_S
        os.utime(path, (then_s, then_s))
    return paths


def metric(http: Wire, name: str) -> float:
    lines = http.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"tailrace_{name} ")).split()[1])


def wait_swept(http: Wire) -> None:
    """Waits for a sweep that begins after now."""
    before = metric(http, "sweeps_total")
    wait_until(lambda: metric(http, "sweeps_total") >= before + 2, "a whole sweep")


def test_leftovers_go_by_themselves_and_the_rest_stays(server: ServerProcess, http: Wire) -> None:
    assert http.put("a", TEXT).status == 201
    append(http, "a", 1, 9)
    wait_sealed(server.data_dir)
    directory = folder(server.data_dir, "a")
    kept = leave(directory, segment(10, 12).key, "companions/x", "meta/touch.json")
    young = leave(directory, "producers/0000000003.0123456789abcdef.json", hours=0.1)
    unclaimed = leave(folder(server.data_dir, "never recorded"), LEFT_BEHIND[0])
    gone = leave(directory, *LEFT_BEHIND)
    wait_until(lambda: not any(path.exists() for path in gone), "leftovers swept")
    wait_swept(http)
    assert all(path.exists() for path in (*kept, *young, *unclaimed))
    assert metric(http, "swept_orphans_total") == len(gone)
    assert metric(http, "swept_orphan_bytes_total") == len(gone) * len(b"left behind")
    assert metric(http, "swept_objects_total") > 0
    assert http.get("a").body == texts(1, 9)
    assert tailrace("verify", "--data-dir", str(server.data_dir)).code == 0


def test_tombstones_are_forgotten_when_their_time_is_over(server: ServerProcess, http: Wire) -> None:
    for name in ("a", "b"):
        assert http.put(name, TEXT).status == 201
        append(http, name, 1, 4)
    wait_sealed(server.data_dir)
    assert http.delete("a").status == 204
    wait_idle(server.data_dir)
    wait_swept(http)
    tombstone = folder(server.data_dir, "a") / "manifest.json"
    assert tombstone.exists()
    http.close()
    server.env["TAILRACE_TOMBSTONE_MS"] = "1"
    server.restart()
    wait_until(lambda: not tombstone.exists(), "the tombstone forgotten")
    wait_until(lambda: metric(http, "swept_tombstones_total") == 1, "the tombstone counted")
    # The name is free, and what is made under it stays.
    assert http.put("a", TEXT).status == 201
    append(http, "a", 1, 5)
    wait_sealed(server.data_dir)
    wait_swept(http)
    assert (http.get("a").body, http.get("b").body) == (texts(1, 5), texts(1, 4))
    assert tailrace("verify", "--data-dir", str(server.data_dir)).code == 0


def test_several_workers_sweep_what_is_theirs(server: ServerProcess) -> None:
    server.args = ("--workers", "2")
    server.start()
    http = Wire(server.port)
    names = [next(names_of(worker, 2)) for worker in range(2)]
    for name in (*names, "dead"):
        assert http.put(name, TEXT).status == 201
        append(http, name, 1, 9)
    assert http.call("POST", "/v1/server/_seal").status == 200
    assert http.delete("dead").status == 204
    wait_until(lambda: not (folder(server.data_dir, "dead") / "segments").exists(), "the segments deleted")
    folders = [folder(server.data_dir, name) for name in names]
    kept = [path for one in folders for path in leave(one, segment(10, 12).key, "meta/touch.json")]
    # One is young for what a pipeline made, whose runs may take a day.
    kept += [path for one in folders for path in leave(one, COMPANION.replace("8", "9"))]
    gone = [path for one in folders for path in leave(one, *LEFT_BEHIND)]
    gone += [path for one in folders for path in leave(one, COMPANION, hours=25)]
    gone += leave(folder(server.data_dir, "dead"), LEFT_BEHIND[0])
    wait_until(lambda: not any(path.exists() for path in gone), "leftovers swept")
    assert all(path.exists() for path in kept)
    assert (folder(server.data_dir, "dead") / "manifest.json").exists()
    for name in names:
        assert http.get(name).body == texts(1, 9)
    assert tailrace("verify", "--data-dir", str(server.data_dir)).code == 0
    http.close()


@pytest.mark.parametrize("step", ["gc.before_sweep", "gc.after_sweep", "gc.before_forget"])
def test_a_sweep_that_is_killed_is_done_again(server: ServerProcess, step: str) -> None:
    server.env |= {
        "TAILRACE_FAILPOINT": step,
        "TAILRACE_TOMBSTONE_MS": "1",
        "TAILRACE_SWEEP_INTERVAL_MS": "0",
    }
    server.start()
    http = Wire(server.port)
    for name in ("a", "b"):
        assert http.put(name, TEXT).status == 201
        append(http, name, 1, 9)
    wait_sealed(server.data_dir)
    assert http.delete("b").status == 204
    wait_idle(server.data_dir)
    http.close()
    server.stop()
    gone = leave(folder(server.data_dir, "a"), *LEFT_BEHIND)
    server.env["TAILRACE_SWEEP_INTERVAL_MS"] = "200"
    server.start()
    http = Wire(server.port)
    append(http, "a", 10, 10)  # the sealer has something to do, and with it the server ends
    assert server.wait_exit() != 0
    del server.env["TAILRACE_FAILPOINT"]
    http.close()
    server.start()
    tombstone = folder(server.data_dir, "b") / "manifest.json"
    wait_until(lambda: not any(path.exists() for path in (*gone, tombstone)), "swept after the crash")
    wait_sealed(server.data_dir)
    assert http.get("a").body == texts(1, 10)
    assert tailrace("verify", "--data-dir", str(server.data_dir)).code == 0
    http.close()
