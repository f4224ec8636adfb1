"""What the caches on disk hold of a stream is told by what it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.server.index_status import ManifestStatus, read_documents
from tailrace.server.stream_details import VolatileDetails, cached_bytes_by_artifact, stream_details
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache, ObjectRange, cache_source
from tailrace.storage.segments.model import make_stream_id, stream_prefix

HELD = {
    "segments/a.parquet": 100,
    "companions/0/routing_key_index/a.parquet": 20,
    "companions/0/routing_key_lexicon/a.parquet": 3,
    "companions/0/exact/a.parquet": 400,
    "companions/0/col/a.parquet": 5000,
    "companions/0/fts/a.zip": 1000,
}


def test_caches_are_told_by_what_they_hold(tmp_path: Path) -> None:
    async def main() -> None:
        work = LoopTasks(asyncio.get_running_loop(), 1)
        parts = ObjectCache("memory://", tmp_path, 1 << 20, Limits(), work)
        assert parts.cache is not None
        stream = Stream(1, "ev", 0)
        for name in ("ev", "another"):
            for rest, size in HELD.items():
                key = stream_prefix(make_stream_id(name, 0)) + rest
                parts.cache.add(ObjectRange(cache_source(key), 0, size))
        around = VolatileDetails(cached=cached_bytes_by_artifact([parts], stream))
        shown = stream_details(stream, read_documents(stream), ManifestStatus(0), around)["storage"]
        assert isinstance(shown, dict)
        local = shown["local_storage"]
        assert {name: size for name, size in local.items() if "cache" in name} == {
            "segment_cache_bytes": "100",
            "routing_index_cache_bytes": "20",
            "exact_index_cache_bytes": "400",
            "lexicon_index_cache_bytes": "3",
            "companion_cache_bytes": "6000",
        }
        assert local["total_bytes"] == "6523"
        await work.end()

    asyncio.run(main())
