"""Retention and the commands that look after a bucket, on a real S3 server."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from conftest import StartServer
from support.buckets import overwrite, upload
from support.cli import tailrace
from support.manifests import segment
from support.retention import ENTRY_BYTES, TEXT, append, earliest, texts, wait_trimmed
from support.s3 import S3Server
from support.sealing import SEALING_ENV, hot, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.object_store.listing import entry_range_of_key, list_objects
from tailrace.storage.segments.model import make_stream_id, stream_prefix

BOUND = {"stream_retention_bytes": str(5 * ENTRY_BYTES)}
T = TypeVar("T")


class Store:
    """A prefix of the bucket, as the tests and the commands see it."""

    def __init__(self, s3: S3Server) -> None:
        self.url = s3.url(f"history/{secrets.token_hex(8)}")
        self.env = {**s3.env(), "TAILRACE_OBJECT_STORE": self.url}

    def do(self, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
        async def run() -> T:
            objects = open_object_store(self.url)
            try:
                return await work(objects)
            finally:
                await objects.close()

        return asyncio.run(run())

    def keys(self, name: str, below: str = "") -> set[str]:
        prefix = stream_prefix(make_stream_id(name, 0))

        async def listed(objects: ObjectStore) -> set[str]:
            return {info.key.removeprefix(prefix) async for info in list_objects(objects, prefix + below)}

        return self.do(listed)

    def stored(self, name: str) -> set[int]:
        """Entries of a stream that lie in segments, recorded or not."""
        ranges = [entry_range_of_key(key) for key in self.keys(name, "segments/")]
        return {entry for found in ranges if found for entry in range(found[0], found[1] + 1)}


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    return Store(s3)


@pytest.fixture
def server(start_server: StartServer, store: Store) -> ServerProcess:
    return start_server(env={**SEALING_ENV, **store.env})


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Wire]:
    wire = Wire(server.port)
    yield wire
    wire.close()


def wait_idle(server: ServerProcess) -> None:
    def done() -> bool:
        rows = hot(server.data_dir)
        return bool(rows) and not rows["blocks"] and not rows["graves"] and not rows["trims"]

    wait_until(done, "nothing left to do", 60)


def test_retention_deletes_segments_and_keeps_what_forks_show(
    server: ServerProcess, http: Wire, store: Store
) -> None:
    assert http.put("a", TEXT, **BOUND).status == 201
    append(http, "a", 1, 4)
    large = {"stream_forked_from": "/v1/stream/a", "stream_retention_bytes": str(10**9)}
    assert http.put("f", stream_fork_offset=encode_offset(0, 3), **large).status == 201
    append(http, "a", 5, 40)
    gone = wait_trimmed(http, server.data_dir, "a", 40)
    kept = {1, 2, 3} | set(range(gone + 1, 41))
    wait_until(lambda: kept <= store.stored("a") and len(store.stored("a")) <= len(kept) + 4, "deleted", 60)
    assert (http.get("a").body, http.get("f").body) == (texts(gone + 1, 40), texts(1, 3))
    assert http.get(f"a?offset={'0' * 26}").code == "offset_gone"
    assert http.delete("f").status == 204
    wait_idle(server)
    assert tailrace("verify", env=store.env).code == 0
    http.close()
    server.restart(kill=True)
    assert earliest(http, "a") == gone
    assert http.get("a").body == texts(gone + 1, 40)
    assert http.delete("a").status == 204
    wait_until(lambda: store.keys("a") == {"manifest.json"}, "all but the tombstone gone", 60)


def test_verify_gc_and_inspect(server: ServerProcess, http: Wire, store: Store, tmp_path: Path) -> None:
    assert http.put("orders", "application/json").status == 201
    for number in range(1, 10):
        assert http.post("orders", "application/json", f'{{"n":{number}}}').status == 204
    while (answer := http.call("POST", "/v1/server/_seal")).status == 202:
        pass
    assert answer.json == {"sealed": True}
    wait_idle(server)
    done = tailrace("verify", "--stream", "orders", env=store.env)
    assert (done.code, "9 entries" in done.out) == (0, True), done.out
    before = store.keys("orders")

    # What nobody names goes; what may yet be named stays.
    async def leave(objects: ObjectStore) -> str:
        info = await upload(objects, tmp_path, "orders", 1, 3, word="other")
        await objects.create(stream_prefix(make_stream_id("orders", 0)) + segment(10, 12).key, b"under way")
        return info.key

    orphan = store.do(leave)
    done = tailrace("gc", "--dry-run", "--grace", "1h", env=store.env)
    assert (done.code, "would delete 0 (" in done.out) == (0, True), done.out
    rows = tailrace("gc", "--grace", "0s", "--json", env=store.env).rows
    assert [row["key"].partition("/segments/")[2] for row in rows[:-1]] == [orphan.removeprefix("segments/")]
    assert rows[-1]["summary"]["orphans"] == 1
    assert store.keys("orders") == before | {segment(10, 12).key}

    shown = tailrace("inspect", "manifest", "orders", "--json", env=store.env)
    assert shown.code == 0, shown.err
    head = shown.rows[0]
    assert (head["name"], head["uploaded_through"]) == ("orders", 9)
    key = stream_prefix(make_stream_id("orders", 0)) + next(
        key for key in sorted(before) if "segments/" in key
    )
    shown = tailrace("inspect", "segment", key, "--json", env=store.env)
    assert shown.code == 0, shown.err
    assert json.loads(shown.out.splitlines()[0])["name"] == "orders"

    # Damage is found.
    async def damage(objects: ObjectStore) -> None:
        data = bytearray((await objects.get(key))[0])
        data[100] ^= 255
        await overwrite(objects, key, bytes(data))

    store.do(damage)
    done = tailrace("verify", env=store.env)
    assert done.code == 1
    assert key.partition("segments/")[2] in done.out
