"""A backup on the bucket of the server that went on after it: refused, or kept apart, but never mixed up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import Finished, tailrace
from support.server import ServerProcess
from support.workers import names_of
from tailrace.testing import ServerFailedError


def _try(server: ServerProcess, *args: str) -> Finished:
    return tailrace(*args, env={"TAILRACE_ENDPOINT": server.base_url})


def _on(server: ServerProcess, *args: str) -> str:
    done = _try(server, *args)
    assert done.code == 0, done.err
    return done.out


def _content(directory: Path) -> dict[str, bytes]:
    """Of everything that tells something: the lock and half-made files do not."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".tailrace" not in path.parts)
    return {str(path): path.read_bytes() for path in files if path.suffix not in (".db-shm", ".jnl")}


def _refused(data_dir: Path, *args: str) -> str:
    """The line that says why a server does not start; it is the same at the next try."""
    server = ServerProcess(data_dir, args=args)
    for _ in range(2):
        with pytest.raises(ServerFailedError):
            server.start()
        assert not server.running
    lines = [line for line in server.log.splitlines() if line.startswith("tailrace: ")]
    assert len(lines) == 2, server.log
    assert lines[0] == lines[1]
    return lines[0]


def test_a_backup_is_refused_by_a_bucket_that_is_newer(start_server: StartServer, tmp_path: Path) -> None:
    bucket, backup = tmp_path / "bucket", tmp_path / "backup"
    store = ("--object-store", bucket.as_uri())
    server = start_server(*store, data_dir=tmp_path / "data")
    _on(server, "append", "orders", "1", "2", "3", "--create")
    _on(server, "seal")
    _on(server, "append", "orders", "4")
    server.stop()
    shutil.copytree(server.data_dir, backup / "data")
    shutil.copytree(bucket, backup / "bucket")
    server = start_server(*store, data_dir=tmp_path / "data")
    _on(server, "append", "orders", "5", "6")
    _on(server, "seal")
    server.stop()
    shutil.rmtree(server.data_dir)

    restored = tmp_path / "restored"
    shutil.copytree(backup / "data", restored)
    before = _content(bucket)
    why = _refused(restored, *store)
    assert "older than the object store" in why
    assert "'orders'" in why
    assert "--bootstrap" in why
    assert _content(bucket) == before
    # Another store would be one without the history, so that is no way out.
    assert "has nothing of the history" in _refused(restored, "--object-store", (tmp_path / "none").as_uri())

    # The two ways out that it names: the bucket alone, or the backup with the bucket of its time.
    again = start_server(*store, "--bootstrap", data_dir=tmp_path / "again")
    assert _on(again, "read", "orders") == "1\n2\n3\n4\n5\n6\n"
    _on(again, "append", "orders", "7")
    _on(again, "seal")
    assert _on(again, "read", "orders") == "1\n2\n3\n4\n5\n6\n7\n"
    back = start_server("--object-store", (backup / "bucket").as_uri(), data_dir=restored)
    _on(back, "append", "orders", '"other"')
    _on(back, "seal")
    assert _on(back, "read", "orders") == '1\n2\n3\n4\n"other"\n'
    for url in (bucket.as_uri(), (backup / "bucket").as_uri()):
        assert tailrace("verify", "--object-store", url).code == 0


def test_what_two_servers_on_copies_acknowledged_is_kept_apart(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    _on(first, "append", "orders", "1", "2", "3", "--create")
    _on(first, "seal")
    first.stop()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first = start_server(*store, data_dir=tmp_path / "first")
    second = start_server(*store, data_dir=tmp_path / "second")
    _on(first, "append", "orders", "4", "5")
    _on(first, "seal", "orders")
    _on(second, "append", "orders", '"four"', '"five"', '"six"')
    _on(second, "append", "others", "1", "--create")

    done = _try(second, "seal", "orders")
    assert done.code != 0
    assert "other entries of 'orders'" in done.err
    assert "docs/operations.md" in done.err
    _on(second, "seal", "others")  # nobody else is held up
    assert _on(second, "read", "orders") == '1\n2\n3\n"four"\n"five"\n"six"\n'
    call = Caller(second)
    ready = call("GET", "/readyz")
    assert ready.status == 200
    assert "conflict: it has other entries of 1 streams" in ready.body["object_store"]
    assert call("GET", "orders/_details").body["stream"]["seal_conflict"] is True
    assert "seal_conflict" not in call("GET", "others/_details").body["stream"]
    metrics = call("GET", "/metrics").raw.decode()
    assert "tailrace_seal_conflicts 1.0" in metrics
    assert "tailrace_object_store_ok 1.0" in metrics
    assert second.log.count("stream 'orders' is not sealed any more") == 1
    second.restart(kill=True)
    assert _on(second, "read", "orders") == '1\n2\n3\n"four"\n"five"\n"six"\n'

    assert _on(first, "read", "orders") == "1\n2\n3\n4\n5\n"
    assert tailrace("verify", *store).code == 0
    # Who is deleted is in nobody's way any more.
    assert call("DELETE", "orders").status == 204


@pytest.mark.nightly
def test_a_backup_of_several_workers_is_refused_too(start_server: StartServer, tmp_path: Path) -> None:
    store = ("--object-store", (tmp_path / "bucket").as_uri(), "--workers", "2")
    server = start_server(*store, data_dir=tmp_path / "data")
    name = next(names_of(1, 2, "orders/"))
    _on(server, "append", name, "1", "2", "--create")
    _on(server, "seal")
    server.stop()
    shutil.copytree(server.data_dir, tmp_path / "restored")
    server = start_server(*store, data_dir=tmp_path / "data")
    _on(server, "append", name, "3")
    _on(server, "seal")
    server.stop()
    refused = ServerProcess(tmp_path / "restored", args=store)
    with pytest.raises(ServerFailedError, match="older than the object store"):
        refused.start()
    bootstrapped = start_server(*store, "--bootstrap", data_dir=tmp_path / "again")
    assert _on(bootstrapped, "read", name) == "1\n2\n3\n"
