"""A fork is recorded after what it inherits: a bucket never names entries that it does not have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.loss import ENV, bootstrap, destroy
from support.retention import TEXT, append, texts
from support.sealing import wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset
from tailrace.storage.segments.model import make_stream_id, stream_prefix

# Nothing is due by its age: only what a test asks for is sealed.
LAZY_ENV = {**ENV, "TAILRACE_SEAL_AGE_MS": "1h", "TAILRACE_SEAL_INTERVAL_MS": "20"}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def server(start_server: StartServer, bucket: Path) -> ServerProcess:
    return start_server("--object-store", bucket.as_uri(), env=LAZY_ENV)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Wire]:
    wire = Wire(server.port)
    yield wire
    wire.close()


def head(bucket: Path, name: str) -> dict[str, Any] | None:
    path = bucket / stream_prefix(make_stream_id(name, 0)) / "manifest.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def family(http: Wire) -> None:
    """A source, a fork of it with entries of its own, and a fork of that which shows entries of both."""
    assert http.put("source", TEXT).status == 201
    append(http, "source", 1, 6)
    assert http.put("fork", stream_forked_from="/v1/stream/source").status == 201
    append(http, "fork", 7, 9)
    below = {"stream_forked_from": "/v1/stream/fork", "stream_fork_offset": encode_offset(0, 4)}
    assert http.put("early", **below).status == 201
    assert http.put("late", stream_forked_from="/v1/stream/fork").status == 201


def seal(http: Wire, name: str) -> None:
    while (answer := http.call("POST", f"/v1/server/_seal?stream={name}")).status == 202:
        pass
    assert answer.json == {"sealed": True}


def restored(server: ServerProcess, bucket: Path, tmp_path: Path) -> Iterator[Wire]:
    destroy(server)
    again = bootstrap(tmp_path / "again", bucket.as_uri()).start()
    wire = Wire(again.port)
    yield wire
    wire.close()
    again.stop()


def test_sealing_a_fork_seals_what_it_inherits_first(
    server: ServerProcess, http: Wire, bucket: Path, tmp_path: Path
) -> None:
    family(http)
    seal(http, "fork")
    source = head(bucket, "source")
    assert source is not None
    assert source["uploaded_through"] == 6
    http.close()
    for after in restored(server, bucket, tmp_path):
        assert after.get("fork").body == texts(1, 9)
        assert after.get("source").body == texts(1, 6)


def test_forks_without_entries_are_recorded_after_what_they_inherit(
    server: ServerProcess, http: Wire, bucket: Path, tmp_path: Path
) -> None:
    family(http)
    assert http.put("other", TEXT, "x").status == 201
    seal(http, "other")  # everything is in the hot store now, and manifests are written
    wait_until(lambda: head(bucket, "early"), "a fork without entries recorded")
    source = head(bucket, "source")
    assert source is not None
    assert source["uploaded_through"] >= 4
    wait_until(lambda: head(bucket, "late"), "a fork of a fork recorded")
    fork, source = head(bucket, "fork"), head(bucket, "source")
    assert fork is not None
    assert source is not None
    assert (fork["uploaded_through"], source["uploaded_through"]) == (9, 6)
    http.close()
    for after in restored(server, bucket, tmp_path):
        assert after.get("early").body == texts(1, 4)
        assert after.get("late").body == texts(1, 9)
