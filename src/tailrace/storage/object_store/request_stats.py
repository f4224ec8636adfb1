"""Statistics of object store requests by stream and kind of object, and the newest manifests.

Collected by the process that makes the requests; the sealer adds its part to each report. Only the inspection
of streams uses it, so the streams idle for longest are dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from tailrace.common.caches import LruCache
from tailrace.storage.object_store.interface import ObjectInfo, ObjectStore

STATS_STREAMS_MAX = 10_000
_FOLDERS = {
    "segments": "segment",
    "manifest": "manifest",
    "manifest.json": "manifest",
    "producers": "manifest",
    "meta": "schema_registry",
}
_FAMILIES = {
    "routing_key_index": "routing_index",
    "routing_key_lexicon": "routing_key_lexicon",
    "exact": "exact_index",
}


class RequestCount(NamedTuple):
    stream_id: str
    artifact: str
    counter: str  # puts, gets, heads, lists, deletes
    number: int


class UploadedHead(msgspec.Struct, frozen=True, array_like=True):
    """A manifest's head as it was uploaded."""

    stream_id: str
    etag: str
    size_bytes: int
    at_ns: int = 0


class RequestTiming(NamedTuple):
    """Number and total duration of calls of one kind."""

    kind: str  # put, get, head, list, delete
    calls: int
    seconds: float


class RequestStats:
    def __init__(self, streams_max: int = STATS_STREAMS_MAX) -> None:
        self._timings: dict[str, RequestTiming] = {}
        self._counts: LruCache[str, Counter[tuple[str, str]]] = LruCache(entries_max=streams_max)
        self._heads: LruCache[str, UploadedHead] = LruCache(entries_max=streams_max)

    def record(self, key: str, counter: str, number: int = 1) -> None:
        found = stream_and_artifact(key)
        if found is not None:
            self._add(RequestCount(*found, counter, number))

    def record_head(self, head: UploadedHead) -> None:
        self._heads.put(head.stream_id, head)

    def head(self, stream_id: str) -> UploadedHead | None:
        return self._heads.peek(stream_id)

    @contextmanager
    def timed(self, kind: str) -> Generator[None]:
        """Counts the body as one call, also if it fails."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.record_time(kind, time.perf_counter() - begun)

    def record_time(self, kind: str, seconds: float) -> None:
        self._time(RequestTiming(kind, 1, seconds))

    def timing(self, kind: str) -> RequestTiming:
        return self._timings.get(kind, RequestTiming(kind, 0, 0.0))

    def _time(self, more: RequestTiming) -> None:
        _, calls, seconds = self.timing(more.kind)
        self._timings[more.kind] = RequestTiming(more.kind, calls + more.calls, seconds + more.seconds)

    def requests(self, stream_id: str) -> dict[str, Counter[str]]:
        """Counters by artifact. `reads` are all that change nothing."""
        by_artifact: dict[str, Counter[str]] = {}
        for (artifact, counter), number in (
            self._counts.peek(stream_id) or Counter[tuple[str, str]]()
        ).items():
            counters = by_artifact.setdefault(artifact, Counter())
            counters[counter] += number
            if counter in ("gets", "heads", "lists"):
                counters["reads"] += number
        return by_artifact

    def drain(self) -> tuple[list[RequestCount], list[UploadedHead], list[RequestTiming]]:
        """Returns and resets everything since the last call, for the process that merges all counts."""
        counts = [
            RequestCount(stream_id, *kind, number)
            for stream_id, counters in self._counts.items()
            for kind, number in counters.items()
        ]
        heads, timings = list(self._heads.values()), list(self._timings.values())
        self._counts.clear()
        self._heads.clear()
        self._timings.clear()
        return counts, heads, timings

    def merge(
        self,
        counts: Sequence[RequestCount],
        heads: Sequence[UploadedHead],
        timings: Sequence[RequestTiming],
        now_ns: int,
    ) -> None:
        """What another process drained."""
        for count in counts:
            self._add(count)
        for head in heads:
            self.record_head(msgspec.structs.replace(head, at_ns=now_ns))
        for timing in timings:
            self._time(timing)

    def _add(self, count: RequestCount) -> None:
        counters = self._counts.pop(count.stream_id) or Counter()
        counters[count.artifact, count.counter] += count.number
        self._counts.put(count.stream_id, counters)


def stream_and_artifact(key: str) -> tuple[str, str] | None:
    """Stream and kind of an object; None for what belongs to no stream."""
    parts = key.split("/")
    if len(parts) < 4 or parts[0] != "streams":
        return None
    if parts[3] == "companions":
        family = parts[5] if len(parts) > 5 else ""
        return parts[2], _FAMILIES.get(family, "bundled_companion")
    artifact = _FOLDERS.get(parts[3])
    return None if artifact is None else (parts[2], artifact)


class CountingObjectStore:
    """An object store that counts its requests."""

    def __init__(self, objects: ObjectStore, book: RequestStats) -> None:
        self._objects = objects
        self._book = book
        self.url = objects.url
        self.requests = objects.requests

    @property
    def bytes_out(self) -> int:
        return self._objects.bytes_out

    @property
    def bytes_in(self) -> int:
        return self._objects.bytes_in

    async def create(self, key: str, data: bytes | memoryview) -> str:
        self._book.record(key, "puts")
        with self._book.timed("put"):
            return await self._objects.create(key, data)

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        self._book.record(key, "puts")
        with self._book.timed("put"):
            recorded = await self._objects.replace(key, data, etag)
        found = stream_and_artifact(key)
        if found is not None and key.endswith("/manifest.json"):
            self._book.record_head(UploadedHead(found[0], recorded, len(data)))
        return recorded

    async def get(self, key: str) -> tuple[bytes, str]:
        self._book.record(key, "gets")
        with self._book.timed("get"):
            return await self._objects.get(key)

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._book.record(key, "gets")
        with self._book.timed("get"):
            return await self._objects.get_range(key, start, stop)

    async def head(self, key: str) -> ObjectInfo:
        self._book.record(key, "heads")
        with self._book.timed("head"):
            return await self._objects.head(key)

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        self._book.record(prefix, "lists")
        with self._book.timed("list"):
            return await self._objects.list_after(prefix, after, limit)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._book.record(key, "deletes")
        with self._book.timed("delete"):
            await self._objects.delete(keys)

    async def close(self) -> None:
        await self._objects.close()
