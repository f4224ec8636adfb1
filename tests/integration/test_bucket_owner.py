"""Two servers on one bucket: the second is refused, or it takes over and the first changes nothing more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import StartServer
from support.cli import Finished, tailrace
from support.server import ServerFailedError, ServerProcess
from tailrace.store.segments import stream_id, stream_prefix


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
    head = bucket / stream_prefix(stream_id("orders", 0)) / "manifest.json"
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


def test_an_owner_that_takes_its_bucket_back_goes_on_with_its_streams(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    store = ("--object-store", bucket.as_uri())
    first = start_server(*store, data_dir=tmp_path / "first")
    _on(first, "append", "orders", "1", "2", "3", "--create")
    _on(first, "seal", "orders")
    first.stop()
    mistaken = start_server(*store, "--take-over", data_dir=tmp_path / "mistaken")
    _on(mistaken, "append", "orders", "7", "--create")
    _on(mistaken, "append", "clicks", "8", "--create")
    _on(mistaken, "seal", "clicks")
    assert _on(mistaken, "read", "orders") == "7\n"
    mistaken.stop()

    first = start_server(*store, "--take-over", data_dir=tmp_path / "first")
    _on(first, "append", "orders", "4")
    _on(first, "seal", "orders")
    assert _on(first, "read", "orders") == "1\n2\n3\n4\n"
    head = json.loads((bucket / stream_prefix(stream_id("orders", 0)) / "manifest.json").read_bytes())
    assert (head["fence"], head["uploaded_through"]) == (3, 4)
    assert tailrace("verify", *store).code == 0
