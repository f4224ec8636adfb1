"""The commands that look after an object store, on a real one in a directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from support.buckets import fill, named, overwrite, upload
from support.cli import tailrace
from support.manifests import CREATED_NS
from tailrace.storage.manifests.model import ManifestHead
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.model import stream_prefix


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two streams, a tombstone, and a segment that was uploaded twice with different content."""

    async def make() -> None:
        objects = open_object_store((tmp_path / "data" / "objects").as_uri())
        manifests = ManifestStore(objects, 1, segments_max=2)
        await fill(objects, manifests, tmp_path, "orders", 5)
        await fill(objects, manifests, tmp_path, "clicks/eu", 1)
        await fill(objects, manifests, tmp_path, "gone", 1)
        await manifests.delete_stream(named("gone", 10), CREATED_NS + 1, "deleted")
        await upload(objects, tmp_path, "orders", 1, 10, word="other")
        await objects.close()

    asyncio.run(make())
    return tmp_path / "data"


def _head(data_dir: Path, name: str) -> ManifestHead:
    async def load() -> ManifestHead:
        objects = open_object_store((data_dir / "objects").as_uri())
        stored = await ManifestStore(objects, 1).load(named(name, 0).stream_id)
        await objects.close()
        assert stored is not None
        return stored.head

    return asyncio.run(load())


def _age(data_dir: Path) -> None:
    """Everything was made yesterday."""
    for path in (data_dir / "objects").rglob("*"):
        if path.is_file():
            then_ns = path.stat().st_mtime_ns - 24 * 3600 * 10**9
            os.utime(path, ns=(then_ns, then_ns))


def test_verify_says_by_its_exit_code_whether_all_is_well(data_dir: Path) -> None:
    done = tailrace("verify", "--data-dir", str(data_dir))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("3 streams, 6 segments, 60 entries")
    assert done.out.endswith("no findings\n")
    url = (data_dir / "objects").as_uri()
    (summary,) = tailrace("verify", "--object-store", url, "--stream", "orders", "--json").rows
    assert summary["summary"]["entries"] == 50

    head = _head(data_dir, "orders")
    key = stream_prefix(head.stream_id) + head.segments[-1].key

    async def damage() -> None:
        objects = open_object_store(url)
        data = bytearray((await objects.get(key))[0])
        data[100] ^= 255
        await overwrite(objects, key, bytes(data))
        await objects.close()

    asyncio.run(damage())
    done = tailrace("verify", env={"TAILRACE_OBJECT_STORE": url}, cwd=data_dir)
    assert done.code == 1
    assert f"orders  {head.segments[-1].key}: " in done.out
    finding, summary = tailrace("verify", "--data-dir", str(data_dir), "--json").rows[-2:]
    assert finding["stream_id"] == head.stream_id
    assert summary["summary"]["findings"] >= 1
    assert tailrace("verify", "--data-dir", str(data_dir), "--stream", "clicks/eu").code == 0
    assert tailrace("verify", "--data-dir", str(data_dir), "--stream", "nobody").code == 1


def test_a_store_that_cannot_be_read_is_exit_code_2(tmp_path: Path) -> None:
    for args in (("--data-dir", str(tmp_path / "none")), ("--object-store", "ftp://somewhere")):
        for verb in ("verify", "gc"):
            done = tailrace(verb, *args)
            assert (done.code, done.out) == (2, ""), done.err


def test_gc_deletes_what_nobody_names(data_dir: Path) -> None:
    young = tailrace("gc", "--data-dir", str(data_dir))
    assert (young.code, "deleted 0 (" in young.out) == (0, True), young.out
    _age(data_dir)
    done = tailrace("gc", "--data-dir", str(data_dir), "--dry-run", "--grace", "2h")
    assert "other segments have replaced it" in done.out
    assert "would delete 1 (" in done.out
    orphan, summary = tailrace("gc", "--data-dir", str(data_dir), "--json").rows
    assert orphan["key"].startswith(stream_prefix(named("orders", 0).stream_id) + "segments/")
    assert summary["summary"]["orphans"] == 1
    assert not (data_dir / "objects" / orphan["key"]).exists()
    assert "deleted 0 (" in tailrace("gc", "--data-dir", str(data_dir)).out
    assert tailrace("verify", "--data-dir", str(data_dir)).code == 0
    tombstone = data_dir / "objects" / stream_prefix(named("gone", 0).stream_id) / "manifest.json"
    assert tombstone.exists()
    assert tailrace("gc", "--data-dir", str(data_dir), "--offline").code == 0
    assert not tombstone.exists()
    assert tailrace("gc", "--grace", "soon").code == 2


def test_inspect_manifest_shows_what_is_recorded(data_dir: Path) -> None:
    done = tailrace("inspect", "manifest", "orders", "--data-dir", str(data_dir), "--segments")
    assert done.code == 0, done.err
    head = _head(data_dir, "orders")
    assert f"stream_id         {head.stream_id}\n" in done.out
    assert done.out.count("segment  key=segments/") == 5
    described, *segments = tailrace(
        "inspect", "manifest", head.stream_id, "--data-dir", str(data_dir), "--segments", "--json"
    ).rows
    assert (described["uploaded_through"], described["segment_count"]) == (50, 5)
    assert described["producers"] == {"p": [0, 4]}
    assert [segment["first"] for segment in segments] == [1, 11, 21, 31, 41]
    (gone,) = tailrace("inspect", "manifest", "gone", "--data-dir", str(data_dir), "--json").rows
    assert gone["deleted"]["reason"] == "deleted"
    assert tailrace("inspect", "manifest", "nobody", "--data-dir", str(data_dir)).code == 1
