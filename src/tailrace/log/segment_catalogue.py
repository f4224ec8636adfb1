"""The current segments and index files of a stream: those of the hot store and of later journal files.

Queries use `IndexFileCatalogue`. An `IndexFileSet` is an immutable snapshot: index files that were published
together are in it together or not at all.

Before a compaction changes the manifest, a fact of the log records the intent: the new segment and those it
replaces. A server that is killed in between finds the intent at its next start and completes the compaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import msgspec

from tailrace.common.caches import LruCache
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Op, Published, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.index_files import IndexFile, PlanHistory, QuarantinedSegment, sort_index_files
from tailrace.storage.segments.model import SegmentInfo

COMPACTION_FACT_PREFIX: Final = "compact/"  # followed by the number of the stream


class CompactionIntent(msgspec.Struct, frozen=True, array_like=True):
    """A new segment, and the segments it replaces."""

    segment: SegmentInfo
    replaced: tuple[SegmentInfo, ...]

    def done(self, number: int, generation: int, footer: bytes, at_ns: int) -> Compacted:
        ranges = [(info.first, info.last) for info in self.replaced]
        size = sum(info.bytes for info in self.replaced)
        return Compacted(number, generation, self.segment, footer, ranges, size, at_ns)


def compaction_fact_key(number: int) -> str:
    """The key of a stream's compaction intent. A stream has one compaction at a time."""
    return f"{COMPACTION_FACT_PREFIX}{number}"


def encode_intent(intent: CompactionIntent) -> bytes:
    return msgspec.msgpack.encode(intent)


def decode_intent(raw: bytes) -> CompactionIntent:
    return msgspec.msgpack.decode(raw, type=CompactionIntent)


def pending_compactions(streams: Streams) -> Iterator[tuple[int, CompactionIntent]]:
    """Compactions that were started and not completed, with the number of their stream."""
    for key, raw in list(streams.meta.items()):
        if key.startswith(COMPACTION_FACT_PREFIX):
            yield int(key.removeprefix(COMPACTION_FACT_PREFIX)), decode_intent(raw)


def replacement_segment(streams: Streams, number: int, entry: int) -> Compacted | None:
    """The segment that replaced the one of an entry since the last checkpoint. Called on any thread."""
    for _, op in reversed(tuple(streams.uncheckpointed.get(number, ()))):
        if isinstance(op, Compacted) and op.segment.first <= entry <= op.segment.last:
            return op
    return None


def has_uncheckpointed_compaction(streams: Streams, number: int, earliest: int) -> bool:
    """Whether the hot store lacks a compacted segment that starts at or before an entry.

    Retention is decided from the hot store and removes whole segments, so it has to wait then.
    """
    raw = streams.meta.get(compaction_fact_key(number))
    started: Sequence[SegmentInfo] = () if raw is None else (decode_intent(raw).segment,)
    fresh = (op.segment for _, op in streams.uncheckpointed.get(number, ()) if isinstance(op, Compacted))
    return any(info.first <= earliest for info in (*started, *fresh))


INDEX_DOCUMENT: Final = "index"  # key of the stream's document with its index plans
CACHED_INDEX_FILES_MAX: Final = 200_000  # of all streams; each is about 500 bytes

UncheckpointedOps = Sequence[tuple[int, Sealed | Published | Compacted]]


class IndexFileSet(msgspec.Struct, frozen=True):
    """The index files of one stream by family and first entry, and the plans they were built with."""

    companions: tuple[IndexFile, ...] = ()
    quarantined: tuple[QuarantinedSegment, ...] = ()
    plans: PlanHistory = PlanHistory()

    def of_family(self, family: str) -> tuple[IndexFile, ...]:
        return tuple(one for one in self.companions if one.family == family)


NO_PLANS: Final = PlanHistory()


def durable_plans(stream: Stream) -> PlanHistory:
    """The plans that are durable; none for nearly every stream."""
    return decode_plans(stream.visible_documents)


def decode_plans(documents: Mapping[str, bytes] | None) -> PlanHistory:
    found = None if documents is None else documents.get(INDEX_DOCUMENT)
    return NO_PLANS if found is None else _decode_plan_history(found)


def encode_plans(plans: PlanHistory) -> bytes:
    return msgspec.json.encode(plans)


@lru_cache(1024)
def _decode_plan_history(document: bytes) -> PlanHistory:
    return msgspec.json.decode(document, type=PlanHistory)


class IndexFileCatalogue:
    """Loads and caches the index files of streams. Runs on the loop thread."""

    def __init__(self, streams: Streams, store: StoredStreams, loop: asyncio.AbstractEventLoop) -> None:
        self._streams = streams
        self._store = store
        self._loop = loop
        self._threads: ThreadPoolExecutor | None = None
        self._cached: LruCache[int, IndexFileSet] = LruCache(
            size_max=CACHED_INDEX_FILES_MAX, size_of=lambda _, found: len(found.companions), keep_newest=True
        )
        self._loading: dict[int, object] = {}  # removed by a change, so that a stale result is not cached

    def changed(self, op: Op, stream: Stream) -> None:
        """Drops the cached index files of a stream that an operation has changed."""
        if isinstance(op, Published | Trim) or stream.removed:
            self.forget(stream.number)

    def forget(self, number: int) -> None:
        self._loading.pop(number, None)
        self._cached.pop(number)

    def cached(self, stream: Stream) -> IndexFileSet | None:
        """The index files if they are in memory or the stream has no plans, else None."""
        plans = durable_plans(stream)
        if not plans.plans:
            return IndexFileSet(plans=plans)
        found = self._cached.get(stream.number)
        if found is None:
            return None
        return found if found.plans is plans else msgspec.structs.replace(found, plans=plans)

    async def load(self, stream: Stream) -> IndexFileSet:
        """The current index files of a stream."""
        found = self.cached(stream)
        if found is not None:
            return found
        loading, plans = object(), durable_plans(stream)
        self._loading[stream.number] = loading
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "catalogue")
        uncheckpointed = tuple(self._streams.uncheckpointed.get(stream.number, ()))
        found = await self._loop.run_in_executor(
            self._threads, read_index_files, self._store, stream.number, stream.earliest, uncheckpointed
        )
        found = msgspec.structs.replace(found, plans=plans)
        if self._loading.get(stream.number) is loading:
            del self._loading[stream.number]
            self._cached.put(stream.number, found)
        return found

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def read_index_files(
    store: StoredStreams, number: int, earliest: int, uncheckpointed: UncheckpointedOps
) -> IndexFileSet:
    """Runs on a thread. Skips operations of journal files that the hot store has by now."""
    with store.snapshot():
        seq = store.db.journal_seq
        found = {one.object: one for one in store.db.companions.files_of(number)}
        quarantined = {one.object: one for one in store.db.companions.quarantined(number)}
    for file, op in uncheckpointed:
        if file <= seq or not isinstance(op, Published):
            continue
        for key in op.removed:
            found.pop(key, None)
            quarantined.pop(key, None)
        found |= {one.object: one for one in op.added}
        quarantined |= {one.object: one for one in op.quarantined}
    valid = (one for one in found.values() if is_index_file_valid(one, earliest))
    retained = tuple(one for one in quarantined.values() if one.last > earliest)
    return IndexFileSet(sort_index_files(valid), retained)


def is_index_file_valid(index_file: IndexFile, earliest: int) -> bool:
    """Whether retention has left the file usable. Aggregates that include removed entries are not."""
    if index_file.family == "agg":
        return index_file.first > earliest
    return index_file.last > earliest


_decode_segment_info = msgspec.msgpack.Decoder(SegmentInfo).decode


def read_segments(
    store: StoredStreams, number: int, earliest: int, uncheckpointed: UncheckpointedOps
) -> list[SegmentInfo]:
    """Runs on a thread. The segments with entries after `earliest`, oldest first.

    Skips operations of journal files that the hot store has by now.
    """
    with store.snapshot():
        seq = store.db.journal_seq
        found = {
            info.first: info
            for info in map(_decode_segment_info, store.db.cold.infos_from(number, earliest + 1))
        }
    for file, op in uncheckpointed:
        if file <= seq:
            continue
        if isinstance(op, Sealed):
            found.update((info.first, info) for info in op.segments)
        elif isinstance(op, Compacted):
            for first, _ in op.replaced:
                found.pop(first, None)
            found[op.segment.first] = op.segment
    return [found[first] for first in sorted(found) if found[first].last > earliest]
