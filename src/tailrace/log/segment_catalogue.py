"""Segments and index files of a stream as of now: the hot store's list and what the journal adds.

Compaction as the log knows it: what is about to be replaced, and what has been since the last checkpoint.

Before the manifest is touched, a fact of the log says which segment is to stand for which. A server that is
killed in between finds it at its next start and finishes: it never goes on with segments that the manifest
has given up.

Which companions a stream has: the hot store's book, and what the journal says beyond it.

Whoever answers queries asks here. An answer is of one moment and never changes: companions that were
published together are in it together or not at all.

The segments of a stream as they are now: the hot store's book, and what the journal says beyond it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import msgspec

from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Op, Published, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.index_files import IndexFile, PlanHistory, QuarantinedSegment, sort_index_files
from tailrace.storage.segments.model import SegmentInfo

COMPACTION_FACT_PREFIX: Final = "compact/"  # of the facts, which go on with the number of the stream


class CompactionIntent(msgspec.Struct, frozen=True, array_like=True):
    """One segment, and those in whose place it is put."""

    segment: SegmentInfo
    replaced: tuple[SegmentInfo, ...]

    def done(self, number: int, generation: int, footer: bytes, at_ns: int) -> Compacted:
        ranges = [(info.first, info.last) for info in self.replaced]
        size = sum(info.bytes for info in self.replaced)
        return Compacted(number, generation, self.segment, footer, ranges, size, at_ns)


def compaction_fact_key(number: int) -> str:
    """The key of the fact about a stream: one compaction at a time."""
    return f"{COMPACTION_FACT_PREFIX}{number}"


def encode_intent(intent: CompactionIntent) -> bytes:
    return msgspec.msgpack.encode(intent)


def decode_intent(raw: bytes) -> CompactionIntent:
    return msgspec.msgpack.decode(raw, type=CompactionIntent)


def pending_compactions(streams: Streams) -> Iterator[tuple[int, CompactionIntent]]:
    """Everything that was begun, with the number of its stream."""
    for key, raw in list(streams.meta.items()):
        if key.startswith(COMPACTION_FACT_PREFIX):
            yield int(key.removeprefix(COMPACTION_FACT_PREFIX)), decode_intent(raw)


def replacement_segment(streams: Streams, number: int, entry: int) -> Compacted | None:
    """What stands for the segment of an entry since the last checkpoint. Also asked on other threads."""
    for _, op in reversed(tuple(streams.unfolded.get(number, ()))):
        if isinstance(op, Compacted) and op.segment.first <= entry <= op.segment.last:
            return op
    return None


def has_uncheckpointed_compaction(streams: Streams, number: int, earliest: int) -> bool:
    """Whether the hot store does not know some of the segments that begin up to an entry.

    Retention is decided by what it knows, and takes whole segments.
    """
    raw = streams.meta.get(compaction_fact_key(number))
    begun: Sequence[SegmentInfo] = () if raw is None else (decode_intent(raw).segment,)
    fresh = (op.segment for _, op in streams.unfolded.get(number, ()) if isinstance(op, Compacted))
    return any(info.first <= earliest for info in (*begun, *fresh))


INDEX_DOCUMENT: Final = "index"  # key of the stream's document with its plans
CACHED_INDEX_FILES_MAX: Final = 200_000  # companions held in memory, of all streams; each is about 500 bytes

UncheckpointedOps = Sequence[tuple[int, Sealed | Published | Compacted]]


class IndexFileSet(msgspec.Struct, frozen=True):
    """The companions of one stream, by family and first entry, and the plans they were built by."""

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
    """Owned by the loop thread. What is asked for often is held, up to a bound."""

    def __init__(self, streams: Streams, store: StoredStreams, loop: asyncio.AbstractEventLoop) -> None:
        self._streams = streams
        self._store = store
        self._loop = loop
        self._threads: ThreadPoolExecutor | None = None
        self._held: OrderedDict[int, IndexFileSet] = OrderedDict()
        self._count = 0
        self._loading: dict[int, object] = {}  # so that what was read before a change is not held after it

    def changed(self, op: Op, stream: Stream) -> None:
        """What is held of a stream is read again when it is asked for."""
        if isinstance(op, Published | Trim) or stream.removed:
            self.forget(stream.number)

    def forget(self, number: int) -> None:
        self._loading.pop(number, None)
        held = self._held.pop(number, None)
        if held is not None:
            self._count -= len(held.companions)

    def held(self, stream: Stream) -> IndexFileSet | None:
        """At once, if it is in memory or there is nothing to know."""
        plans = durable_plans(stream)
        if not plans.plans:
            return IndexFileSet(plans=plans)
        found = self._held.get(stream.number)
        if found is None:
            return None
        self._held.move_to_end(stream.number)
        return found if found.plans is plans else msgspec.structs.replace(found, plans=plans)

    async def of(self, stream: Stream) -> IndexFileSet:
        """The companions of a stream as they are now."""
        found = self.held(stream)
        if found is not None:
            return found
        loading, plans = object(), durable_plans(stream)
        self._loading[stream.number] = loading
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "catalogue")
        unfolded = tuple(self._streams.unfolded.get(stream.number, ()))
        found = await self._loop.run_in_executor(
            self._threads, read_index_files, self._store, stream.number, stream.earliest, unfolded
        )
        found = msgspec.structs.replace(found, plans=plans)
        if self._loading.get(stream.number) is loading:
            self._hold(stream.number, found)
        return found

    def _hold(self, number: int, found: IndexFileSet) -> None:
        self.forget(number)
        self._held[number] = found
        self._count += len(found.companions)
        while self._count > CACHED_INDEX_FILES_MAX and len(self._held) > 1:
            self.forget(next(iter(self._held)))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def read_index_files(
    store: StoredStreams, number: int, earliest: int, unfolded: UncheckpointedOps
) -> IndexFileSet:
    """On a thread. Journal files that the hot store has by now are not counted twice."""
    with store.snapshot():
        seq = store.db.journal_seq
        found = {one.object: one for one in store.db.companions.of(number)}
        given_up = {one.object: one for one in store.db.companions.quarantined(number)}
    for file, op in unfolded:
        if file <= seq or not isinstance(op, Published):
            continue
        for key in op.removed:
            found.pop(key, None)
            given_up.pop(key, None)
        found |= {one.object: one for one in op.added}
        given_up |= {one.object: one for one in op.quarantined}
    shown = (one for one in found.values() if is_index_file_valid(one, earliest))
    kept = tuple(one for one in given_up.values() if one.last > earliest)
    return IndexFileSet(sort_index_files(shown), kept)


def is_index_file_valid(companion: IndexFile, earliest: int) -> bool:
    """Whether retention has left it something to say. Sums over trimmed entries are no longer right."""
    if companion.family == "agg":
        return companion.first > earliest
    return companion.last > earliest


_decode_segment_info = msgspec.msgpack.Decoder(SegmentInfo).decode


def read_segments(
    store: StoredStreams, number: int, earliest: int, unfolded: UncheckpointedOps
) -> list[SegmentInfo]:
    """On a thread. The segments with entries behind `earliest`, oldest first.

    Journal files that the hot store has by now are not counted twice.
    """
    with store.snapshot():
        seq = store.db.journal_seq
        found = {
            info.first: info
            for info in map(_decode_segment_info, store.db.cold.infos_from(number, earliest + 1))
        }
    for file, op in unfolded:
        if file <= seq:
            continue
        if isinstance(op, Sealed):
            found.update((info.first, info) for info in op.segments)
        elif isinstance(op, Compacted):
            for first, _ in op.replaced:
                found.pop(first, None)
            found[op.segment.first] = op.segment
    return [found[first] for first in sorted(found) if found[first].last > earliest]
