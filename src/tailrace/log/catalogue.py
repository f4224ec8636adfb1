"""Which companions a stream has: the hot store's book, and what the journal says beyond it.

Whoever answers queries asks here. An answer is of one moment and never changes: companions that were
published together are in it together or not at all.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import msgspec

from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Op, Published, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.companions import IndexFile, PlanHistory, QuarantinedSegment, sort_index_files

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
