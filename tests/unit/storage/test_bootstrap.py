"""A bootstrap of buckets that no orderly life leaves behind: unburied names, chains, pages, damage."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.log.model import Stream, Tombstone
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.bootstrap import BootstrapReport, bootstrap
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.data_directory import DataDirectory
from tailrace.storage.manifests.model import FencedError, ForkParent, StreamFacts
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, segment_name

_numbers = itertools.count(1)


class Bucket:
    """A bucket that a server wrote which is gone."""

    def __init__(self, tmp_path: Path) -> None:
        self.url = f"memory://bootstrap-{next(_numbers)}"
        self._path = tmp_path
        self.objects: ObjectStore = open_object_store(self.url)
        self.manifests = ManifestStore(self.objects, 1, segments_max=3, pages_max=2)

    async def claim(self) -> None:
        await BucketOwnership(self.objects).claim("before")

    async def put(self, name: str, entries: int = 0, incarnation: int = 0, **more: Any) -> StreamFacts:
        """A stream whose segments hold two entries each."""
        base = int(str(more.get("fork_entry", 0)))
        added = [_segment(first, incarnation) for first in range(base + 1, base + entries, 2)]
        facts = {
            "name": name,
            "stream_id": make_stream_id(name, incarnation),
            "incarnation": incarnation,
            "epochs": ((incarnation, 1),),
            "created_ns": 10 + incarnation,
            "tail": base + entries,
            "as_of": 4,
            **more,
        }
        made = msgspec.convert(facts, StreamFacts)
        for start in range(0, max(1, len(added)), 2):
            await self.manifests.publish(made, added[start : start + 2], {"p": (0, entries)})
        return made

    async def restore(self) -> tuple[BootstrapReport, StoredStreams]:
        """On a disk of its own."""
        path = self._path / f"data-{next(_numbers)}"
        limits = Limits(bootstrap_settle_ms=1, bootstrap_requests=4)
        settings = Settings(data_dir=path, object_store=self.url, limits=limits)
        directory = DataDirectory(path)
        try:
            restored = await bootstrap(settings, directory, SYSTEM_CLOCK)
        finally:
            directory.close()
        assert {file.name for file in path.iterdir()} >= {"hot.db", "journal"}
        assert not (path / "bootstrap").exists()
        return restored, StoredStreams(path / "hot.db")


def _segment(first: int, epoch: int = 0) -> SegmentInfo:
    sha256 = f"{first:064x}"
    name = segment_name(epoch, first, first + 1, sha256)
    return SegmentInfo(name, epoch, first, first + 1, 2, 1000, 20, sha256, first, first + 1)


def fork_of(source: StreamFacts, entry: int) -> dict[str, Any]:
    return {"parent": ForkParent(source.stream_id, source.name), "fork_entry": entry}


def run(tmp_path: Path, test: Callable[[Bucket], Awaitable[None]]) -> None:
    async def whole() -> None:
        bucket = Bucket(tmp_path)
        await bucket.claim()
        await test(bucket)

    asyncio.run(whole())


def found(store: StoredStreams, name: str) -> Stream:
    stream = store.stream_by_name(name)
    assert stream is not None, name
    return stream


def test_long_manifests_come_back_page_by_page(tmp_path: Path) -> None:
    async def test(bucket: Bucket) -> None:
        await bucket.put("long", 60)
        await bucket.put("empty")
        restored, store = await bucket.restore()
        assert (restored.streams, restored.segments, restored.entries) == (2, 30, 60)
        stream = found(store, "long")
        assert (stream.tail, stream.sealed, stream.size_bytes, stream.last_ns) == (60, 60, 600, 60)
        assert stream.epochs == ((0, 1), (1, 61))
        rows = list(store.db.cold.segments(stream.number))
        assert [(row.first, row.last, row.footer) for row in rows] == [
            (first, first + 1, b"") for first in range(1, 60, 2)
        ]
        assert store.db.producers(stream.number) == {"p": (0, 60)}
        assert store.db.cold.stale_heads(0, 10) == []
        assert found(store, "empty").epochs == ((0, 1), (1, 1))
        assert (store.db.fact("next_number", 0), store.db.fact("first_epoch", 0)) == (3, 1024)

    run(tmp_path, test)


def test_only_the_newest_use_of_a_name_lives(tmp_path: Path) -> None:
    async def test(bucket: Bucket) -> None:
        await bucket.put("again", 2)  # its deletion was never recorded
        await bucket.put("again", 4, 1)
        old = await bucket.put("ended", 2)
        last = await bucket.put("ended", 2, 3)
        await bucket.manifests.delete_stream(last, 99, "expired")
        buried = await bucket.put("reborn", 2)
        await bucket.manifests.delete_stream(buried, 99, "deleted")
        await bucket.put("reborn", 6, 1)
        restored, store = await bucket.restore()
        assert (restored.streams, restored.tombstones, restored.problems) == (2, 1, [])
        assert (found(store, "again").incarnation, found(store, "again").tail) == (1, 4)
        assert (found(store, "reborn").incarnation, found(store, "reborn").tail) == (1, 6)
        assert store.tombstone("reborn") is None
        assert store.stream_by_name("ended") is None
        assert store.tombstone("ended") == Tombstone(4, 3, 99, "expired")
        # What should have been deleted before has its grave.
        graves = {grave.stream_id for grave in store.db.cold.deleted_streams(0, 10)}
        assert graves == {make_stream_id("again", 0), old.stream_id}

    run(tmp_path, test)


def test_chains_of_forks_come_back_in_any_order(tmp_path: Path) -> None:
    async def test(bucket: Bucket) -> None:
        facts = await bucket.put("f/0", 4)
        for depth in range(1, 80):
            facts = await bucket.put(f"f/{depth}", 2, **fork_of(facts, 2 * depth + 2))
        restored, store = await bucket.restore()
        assert (restored.streams, restored.forks, restored.problems) == (80, 79, [])
        for depth in range(1, 80):
            stream, source = found(store, f"f/{depth}"), found(store, f"f/{depth - 1}")
            assert (stream.parent, source.forks, stream.earliest) == (source.number, 1, 0)
        assert found(store, "f/79").forks == 0

    run(tmp_path, test)


def test_what_only_lost_forks_needed_goes(tmp_path: Path) -> None:
    async def test(bucket: Bucket) -> None:
        gone: dict[str, Any] = {"gone": True, "gone_reason": "deleted", "forks": 1}
        root = await bucket.put("root", 4, forks=2)
        middle = await bucket.put("middle", 2, **fork_of(root, 4), **gone)
        inner = await bucket.put("inner", 2, **fork_of(middle, 6), **gone)
        needed = await bucket.put("needed", 2, **gone)
        last = await bucket.put("last", 2, **fork_of(inner, 8))
        await bucket.manifests.delete_stream(last, 50, "deleted")
        await bucket.put("living", 2, **fork_of(needed, 2))
        restored, store = await bucket.restore()
        assert (restored.streams, restored.tombstones, restored.problems) == (3, 3, [])
        assert found(store, "root").forks == 0
        assert (found(store, "needed").forks, found(store, "needed").gone) == (1, True)
        for facts in (middle, inner):
            assert store.stream_by_name(facts.name) is None
            assert store.tombstone(facts.name) is not None
        graves = {grave.stream_id for grave in store.db.cold.deleted_streams(0, 10)}
        assert graves == {middle.stream_id, inner.stream_id}

    run(tmp_path, test)


def test_the_owner_before_cannot_change_what_was_restored(tmp_path: Path) -> None:
    async def test(bucket: Bucket) -> None:
        facts = await bucket.put("s", 4)
        await bucket.restore()
        for change in (
            bucket.manifests.publish(facts, [_segment(5)]),
            bucket.manifests.trim(facts.stream_id, 2),
            bucket.manifests.delete_stream(facts, 9, "deleted"),
        ):
            with pytest.raises(FencedError):
                await change
        with pytest.raises(FencedError):
            await BucketOwnership(bucket.objects).confirm("before", 1)
        # Each bootstrap is another owner and another epoch.
        _, store = await bucket.restore()
        assert found(store, "s").epochs == ((0, 1), (2, 5))
        assert store.db.fact("first_epoch", 0) == 2048

    run(tmp_path, test)


def test_an_empty_bucket_is_a_new_beginning(tmp_path: Path) -> None:
    async def whole() -> None:
        bucket = Bucket(tmp_path)
        restored, store = await bucket.restore()
        assert restored.streams == 0
        assert (store.db.fact("next_number", 0), store.db.fact("first_epoch", 0)) == (1, 0)

    asyncio.run(whole())


def test_a_url_that_is_none_is_told(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data")
    settings = Settings(data_dir=directory.path, object_store="ftp://bucket")
    with pytest.raises(TailraceError, match="is not an object store URL"):
        asyncio.run(bootstrap(settings, directory, SYSTEM_CLOCK))
    directory.close()
