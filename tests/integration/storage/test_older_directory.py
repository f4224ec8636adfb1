"""A backup on the bucket of the server that went on after it: refused, or kept apart, but never mixed up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import tailrace
from support.loss import seal
from support.server import ServerProcess
from support.workers import names_of
from tailrace.testing import ServerFailedError


def _append(server: ServerProcess, name: str, *entries: object) -> None:
    call = Caller(server)
    assert call("PUT", name, headers={"Content-Type": "application/json"}).status in (200, 201)
    assert call("POST", name, list(entries)).status == 204


def _read(server: ServerProcess, name: str) -> Any:
    answer = Caller(server)("GET", f"{name}?offset=-1")
    assert answer.status == 200, answer
    return answer.body


def _content(bucket: Path) -> dict[str, bytes]:
    files = (path for path in bucket.rglob("*") if path.is_file() and ".tailrace" not in path.parts)
    return {str(path): path.read_bytes() for path in files}


def _refused(data_dir: Path, *args: str) -> str:
    """The line that says why a server does not start; it is the same at the next try."""
    server = ServerProcess(data_dir, args=args)
    for _ in range(2):
        with pytest.raises(ServerFailedError), server:
            pass
        assert not server.running
    lines = [line for line in server.log.splitlines() if line.startswith("tailrace: ")]
    assert len(lines) == 2, server.log
    assert lines[0] == lines[1]
    return lines[0]


def test_a_backup_is_refused_by_a_bucket_that_is_newer(start_server: StartServer, tmp_path: Path) -> None:
    bucket, backup = tmp_path / "bucket", tmp_path / "backup"
    store = ("--object-store", bucket.as_uri())
    server = start_server(*store, data_dir=tmp_path / "data")
    _append(server, "orders", 1, 2, 3)
    seal(Caller(server))
    _append(server, "orders", 4)
    server.stop()
    shutil.copytree(server.data_dir, backup / "data")
    shutil.copytree(bucket, backup / "bucket")
    server = start_server(*store, data_dir=tmp_path / "data")
    _append(server, "orders", 5, 6)
    seal(Caller(server))
    server.stop()

    restored = tmp_path / "restored"
    shutil.copytree(backup / "data", restored)
    before = _content(bucket)
    why = _refused(restored, *store)
    assert "older than the object store" in why
    assert "'orders'" in why
    assert "--bootstrap" in why
    assert "--take-over" in why
    assert _content(bucket) == before
    # Another store would be one without the history, so that is no way out.
    assert "does not have the segments" in _refused(restored, "--object-store", (tmp_path / "none").as_uri())
    looked = start_server(*store, "--take-over", data_dir=restored)
    assert _read(looked, "orders") == [1, 2, 3, 4]
    looked.stop()

    # The two ways out that it names: the bucket alone, or the backup with the bucket of its time.
    again = start_server(*store, "--bootstrap", data_dir=tmp_path / "again")
    assert _read(again, "orders") == [1, 2, 3, 4, 5, 6]
    _append(again, "orders", 7)
    seal(Caller(again))
    assert _read(again, "orders") == [1, 2, 3, 4, 5, 6, 7]
    back = start_server("--object-store", (backup / "bucket").as_uri(), data_dir=restored)
    _append(back, "orders", "other")
    seal(Caller(back))
    assert _read(back, "orders") == [1, 2, 3, 4, "other"]
    for url in (bucket.as_uri(), (backup / "bucket").as_uri()):
        assert tailrace("verify", "--object-store", url).code == 0


def test_what_two_servers_on_copies_acknowledged_is_kept_apart(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    for name in ("orders", "deleted"):
        _append(first, name, 1, 2, 3)
    seal(Caller(first))
    first.stop()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first = start_server(*store, data_dir=tmp_path / "first")
    second = start_server(*store, data_dir=tmp_path / "second")
    for name in ("orders", "deleted"):
        _append(first, name, 4, 5)
        _append(second, name, "four", "five", "six")
    _append(second, "others", 1)
    seal(Caller(first))

    done = tailrace("seal", "orders", "--url", second.base_url)
    assert done.code == 1
    assert "other entries of 'orders'" in done.err
    assert "docs/operations.md" in done.err
    call = Caller(second)
    assert call("POST", "/v1/server/_seal?stream=others").status == 200  # nobody else is held up
    assert second.log.count("stream conflicts with the object store") == 1
    assert (_is_in_conflict(call, "orders"), _is_in_conflict(call, "others")) == (True, False)
    metrics = call("GET", "/metrics").raw.decode()
    assert "tailrace_seal_conflicts 1.0" in metrics
    assert "tailrace_object_store_ok 1.0" in metrics
    assert call("POST", "/v1/server/_seal").code == "conflict"
    ready = call("GET", "/readyz")
    assert ready.status == 200
    assert "conflict: it has other entries of stream" in ready.body["object_store"]
    assert call("DELETE", "deleted").status == 204
    names = [row["name"] for row in call("GET", "/v1/streams").body]
    assert [name for name in names if _is_in_conflict(call, name)] == ["orders"]

    # The way out: what only this server has is saved, and appended to what the bucket has.
    assert _read(first, "orders") == [1, 2, 3, 4, 5]
    first.stop()
    second.kill()
    second.args = (*store, "--take-over")
    second.start()
    saved = _read(second, "orders")
    assert saved == [1, 2, 3, "four", "five", "six"]
    second.stop()
    third = start_server(*store, "--bootstrap", data_dir=tmp_path / "third")
    _append(third, "orders", *saved[3:])
    seal(Caller(third))
    assert _read(third, "orders") == [1, 2, 3, 4, 5, "four", "five", "six"]
    assert tailrace("verify", *store).code == 0


def _is_in_conflict(call: Caller, name: str) -> bool:
    return call("GET", f"{name}/_details").body["stream"].get("seal_conflict", False)


@pytest.mark.nightly
def test_a_backup_of_several_workers_is_refused_too(start_server: StartServer, tmp_path: Path) -> None:
    store = ("--object-store", (tmp_path / "bucket").as_uri(), "--workers", "2")
    server = start_server(*store, data_dir=tmp_path / "data")
    name = next(names_of(1, 2, "orders/"))
    _append(server, name, 1, 2)
    seal(Caller(server))
    server.stop()
    shutil.copytree(server.data_dir, tmp_path / "restored")
    server = start_server(*store, data_dir=tmp_path / "data")
    _append(server, name, 3)
    seal(Caller(server))
    server.stop()
    refused = ServerProcess(tmp_path / "restored", args=store)
    with pytest.raises(ServerFailedError, match="older than the object store"), refused:
        pass
    one = ServerProcess(tmp_path / "restored", args=(*store[:2], "--workers", "1", "--take-over"))
    with one:
        assert _read(one, name) == [1, 2]
    bootstrapped = start_server(*store, "--bootstrap", data_dir=tmp_path / "again")
    assert _read(bootstrapped, name) == [1, 2, 3]
