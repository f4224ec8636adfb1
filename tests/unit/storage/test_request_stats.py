"""The book of requests to the object store: by stream and kind of object, bounded, handed over whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.storage.object_store.cache import DiskCache, ObjectRange, cache_source
from tailrace.storage.object_store.interface import ObjectMissingError, open_object_store
from tailrace.storage.object_store.request_stats import (
    CountingObjectStore,
    RequestStats,
    stream_and_artifact,
)
from tailrace.storage.segments.model import make_stream_id, stream_prefix

ONE, TWO = make_stream_id("one", 0), make_stream_id("two", 0)


@pytest.mark.parametrize(
    ("rest", "artifact"),
    [
        ("segments/x.parquet", "segment"),
        ("manifest.json", "manifest"),
        ("manifest/page.json", "manifest"),
        ("producers/1.json", "manifest"),
        ("meta/schema.json", "schema_registry"),
        ("companions/5b1e90c2d47a3f68/routing_key_index/x.parquet", "routing_index"),
        ("companions/5b1e90c2d47a3f68/routing_key_lexicon/x.parquet", "routing_key_lexicon"),
        ("companions/5b1e90c2d47a3f68/exact/x.parquet", "exact_index"),
        ("companions/5b1e90c2d47a3f68/fts/x.zip", "bundled_companion"),
        ("companions/5b1e90c2d47a3f68/mblk/x.parquet", "bundled_companion"),
    ],
)
def test_objects_by_their_keys(rest: str, artifact: str) -> None:
    assert stream_and_artifact(stream_prefix(ONE) + rest) == (ONE, artifact)


def test_what_belongs_to_no_stream() -> None:
    for key in ("meta/owner.json", "streams/ab", stream_prefix(ONE), stream_prefix(ONE) + "other/x"):
        assert stream_and_artifact(key) is None


def test_calls_are_counted_timed_and_handed_over(tmp_path: Path) -> None:
    async def main() -> None:
        book, all_of_it = RequestStats(), RequestStats()
        objects = CountingObjectStore(open_object_store(tmp_path.as_uri()), book)
        head, segment = stream_prefix(ONE) + "manifest.json", stream_prefix(ONE) + "segments/a.parquet"
        await objects.create(segment, b"12345")
        etag = await objects.replace(head, b"{}", None)
        assert await objects.get(head) == (b"{}", etag)
        assert await objects.get_range(segment, 1, 3) == b"23"
        assert (await objects.head(segment)).size == 5
        with pytest.raises(ObjectMissingError):
            await objects.get(stream_prefix(TWO) + "manifest.json")
        await objects.list_after(stream_prefix(ONE))
        await objects.delete([segment])
        all_of_it.merge(*book.drain(), now_ns=7)
        assert book.drain() == ([], [], [])
        found = all_of_it.requests(ONE)
        assert found["segment"] == {"puts": 1, "gets": 1, "heads": 1, "reads": 2, "deletes": 1}
        assert found["manifest"] == {"puts": 1, "gets": 1, "reads": 1}
        assert all_of_it.requests(TWO)["manifest"] == {"gets": 1, "reads": 1}
        recorded = all_of_it.head(ONE)
        assert recorded is not None
        assert (recorded.etag, recorded.size_bytes, recorded.at_ns) == (etag, 2, 7)
        assert [all_of_it.timing(kind).calls for kind in ("put", "get", "head", "list", "delete")] == [
            2,
            3,
            1,
            1,
            1,
        ]
        assert objects.bytes_out == 7
        await objects.close()

    asyncio.run(main())


def test_idle_streams_are_forgotten() -> None:
    book = RequestStats(streams_max=2)
    for name in ("a", "b", "a", "c"):
        book.record(stream_prefix(make_stream_id(name, 0)) + "segments/x", "gets")
    assert book.requests(make_stream_id("b", 0)) == {}
    assert book.requests(make_stream_id("a", 0))["segment"]["gets"] == 2


def test_the_cache_knows_whose_its_parts_are(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    parts = [
        ObjectRange(cache_source(stream_prefix(owner) + f"segments/{n}.parquet"), 0, 30)
        for n, owner in enumerate((ONE, TWO, TWO))
    ]
    for part in parts:
        cache.add(part)
    held = [cache.bytes_of(owner, "segment") for owner in (ONE, TWO)]
    assert (held, cache.bytes) == ([30, 60], 90)
    leaving = cache.add(ObjectRange(parts[0].source, 30, 60))
    assert leaving == [parts[0]]
    assert [cache.bytes_of(owner, "segment") for owner in (ONE, TWO)] == [30, 60]
    cache.forget(parts[1])
    cache.forget(parts[2])
    assert cache.bytes_of(TWO, "segment") == 0
    cache.add(ObjectRange(cache_source(stream_prefix(TWO) + "companions/0/exact/x.parquet"), 0, 20))
    assert (cache.bytes_of(TWO, "exact_index"), cache.bytes_of(TWO, "segment")) == (20, 0)
