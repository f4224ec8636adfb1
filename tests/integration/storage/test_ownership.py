"""Two servers on one bucket: the second is refused, or it takes over and the first changes nothing more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import Finished, tailrace
from support.server import ServerProcess
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.model import make_stream_id, stream_prefix
from tailrace.testing import ServerFailedError


def _try(server: ServerProcess, *args: str) -> Finished:
    return tailrace(*args, env={"TAILRACE_ENDPOINT": server.base_url})


def _on(server: ServerProcess, *args: str) -> str:
    done = _try(server, *args)
    assert done.code == 0, done.err
    return done.out


def test_the_second_server_is_refused_or_fences_the_first(start_server: StartServer, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store)
    _on(first, "append", "orders", "1", "2", "3", "--create")
    _on(first, "seal")
    with pytest.raises(ServerFailedError, match="belongs to deployment"):
        start_server(*store)

    second = start_server(*store, "--bootstrap")
    head = bucket / stream_prefix(make_stream_id("orders", 0)) / "manifest.json"
    adopted = head.read_bytes()
    assert json.loads(adopted)["fence"] == 2
    # The first may still take an entry before it notices, but it cannot seal it.
    assert _try(first, "append", "orders", "4").code != 0 or _try(first, "seal").code != 0
    assert _try(first, "append", "orders", "5").code != 0
    assert head.read_bytes() == adopted

    assert _on(second, "read", "orders") == "1\n2\n3\n"
    _on(second, "append", "orders", "6")
    _on(second, "seal")
    assert _on(second, "read", "orders") == "1\n2\n3\n6\n"
    done = tailrace("verify", *store)
    assert (done.code, done.out.endswith("no findings\n")) == (0, True), done.out


def test_a_bucket_with_streams_of_others_is_not_taken_over(start_server: StartServer, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    _on(first, "append", "orders", "1", "2", "3", "--create")
    _on(first, "seal")
    first.stop()
    before = _content(bucket)
    mistaken = ServerProcess(tmp_path / "mistaken", args=(*store, "--take-over"))
    with pytest.raises(ServerFailedError):
        mistaken.start()
    lines = [line for line in mistaken.log.splitlines() if "has streams that this" in line]
    assert len(lines) == 1, mistaken.log
    assert "--bootstrap" in lines[0]
    assert "another bucket or prefix" in lines[0]
    # Nothing happened: whoever owned it goes on, and is not asked to take anything over.
    assert _content(bucket) == before
    first = start_server(*store, data_dir=tmp_path / "first")
    assert _on(first, "read", "orders") == "1\n2\n3\n"


def test_an_owner_whose_streams_went_on_elsewhere_does_not_get_its_bucket_back(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    _on(first, "append", "orders", "1", "2", "3", "--create")
    _on(first, "seal")
    first.stop()
    second = start_server(*store, "--bootstrap", data_dir=tmp_path / "second")
    _on(second, "append", "orders", "4")
    _on(second, "seal")
    second.stop()
    with pytest.raises(ServerFailedError, match="has streams that this data directory does not have"):
        start_server(*store, "--take-over", data_dir=tmp_path / "first")
    second = start_server(*store, data_dir=tmp_path / "second")
    assert _on(second, "read", "orders") == "1\n2\n3\n4\n"


def test_an_owner_that_takes_its_bucket_back_goes_on_with_its_streams(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    for name in ("orders", "deleted"):
        _on(first, "append", name, "1", "2", "3", "--create")
    _on(first, "seal")
    assert Caller(first)("DELETE", "deleted").status == 204
    _on(first, "seal")
    first.stop()
    asyncio.run(_claim(bucket.as_uri()))
    with pytest.raises(ServerFailedError, match="--take-over"):
        start_server(*store, data_dir=tmp_path / "first")

    first = start_server(*store, "--take-over", data_dir=tmp_path / "first")
    _on(first, "append", "orders", "4")
    _on(first, "seal", "orders")
    assert _on(first, "read", "orders") == "1\n2\n3\n4\n"
    head = json.loads((bucket / stream_prefix(make_stream_id("orders", 0)) / "manifest.json").read_bytes())
    assert (head["fence"], head["uploaded_through"]) == (3, 4)
    assert tailrace("verify", *store).code == 0


async def _claim(url: str) -> None:
    """Somebody becomes the owner, and is gone before it records anything."""
    objects = open_object_store(url)
    await BucketOwnership(objects).claim("somebody", take_over=True)
    await objects.close()


def _content(bucket: Path) -> dict[str, bytes]:
    files = (path for path in bucket.rglob("*") if path.is_file() and ".tailrace" not in path.parts)
    return {str(path): path.read_bytes() for path in files}
