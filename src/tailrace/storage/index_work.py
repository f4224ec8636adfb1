"""Index work per stream: what has to be built, merged, rewritten for retention, or compacted.

A stream is examined when it is sealed, trimmed, configured or published to, and once at start. Lists are read
from the hot store on a thread; everything else runs on the loop thread.

Aggregates over many segments are useless once some of their entries are trimmed. So they are merged only
within a part of the retention time, and split again before retention reaches that part. Other merged files
stay valid but contain trimmed entries; when these are too many, the rest is built again.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet, wait_event
from tailrace.log import system_streams
from tailrace.log.model import Lifetime, Stream
from tailrace.log.records import Compacted, Delete, Describe, Op, Published, Sealed, Trim
from tailrace.log.segment_catalogue import (
    NO_PLANS,
    UncheckpointedOps,
    decode_plans,
    durable_plans,
    read_index_files,
    read_segments,
)
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import await_commit
from tailrace.storage.compaction import RETENTION_SHARE, CompactionRule, borders_of, due_compactions
from tailrace.storage.index_coverage import (
    EMPTY_SUMMARY,
    Coverage,
    IndexMerge,
    IndexSummary,
    MergeRule,
    UncoveredSegment,
    build_order,
    due_merges,
    stale_index_files,
    summarise_index,
    uncovered_segments,
)
from tailrace.storage.meta_objects import version_cuts
from tailrace.storage.retention_rules import fork_points
from tailrace.storage.segments.index_files import IndexFile, PlanHistory, PlanRecord
from tailrace.storage.segments.model import SegmentInfo

if TYPE_CHECKING:
    from tailrace.log.log import Log

ROLLUP_FAMILY: Final = "agg"
REWRITES_OFFERED_MAX: Final = 4  # of one stream in one response
REWRITE_SEGMENTS_MAX: Final = 512  # of one rewrite: all are published at once
TRIMMED_SHARE: Final = 0.3  # of trimmed entries in a merged file, beyond which the rest of it is built again


class RollupRewrite(NamedTuple):
    """A merged file that is to be built again, for each of the segments that are left by itself."""

    merged: IndexFile
    segments: tuple[SegmentInfo, ...]


class RollupRetention:
    """The segments that a stream shows, oldest first, and its bounds. `shown_bytes` is all its payload."""

    def __init__(
        self, segments: Sequence[SegmentInfo], lifetime: Lifetime, shown_bytes: int, now_ns: int
    ) -> None:
        self._segments = segments
        self._firsts = [info.first for info in segments]
        self._lifetime = lifetime
        self._borders = borders_of(lifetime, ())
        self.soon = self._soon(shown_bytes, now_ns)  # entries up to this one are trimmed within one interval

    def _soon(self, newer_bytes: int, now_ns: int) -> int:
        through = 0
        bound = self._lifetime.retention_bytes
        for info in self._segments:
            newer_bytes -= info.payload_bytes
            at_ns = self._due_ns(info)
            by_age = at_ns is not None and at_ns <= now_ns
            by_size = bound is not None and newer_bytes >= bound - bound // RETENTION_SHARE
            if not by_age and not by_size:
                break
            through = info.last
        return through

    def _due_ns(self, info: SegmentInfo) -> int | None:
        """One part of the time before a segment is trimmed for its age."""
        if self._lifetime.retention_s is None:
            return None
        return info.last_ns + self._lifetime.retention_s * 10**9 - self._borders.bucket_ns

    def part(self, index_file: IndexFile) -> int | None:
        """The time interval in which a file may be merged with others; None if it may not be merged."""
        parts = {self._borders.bucket(info) for info in self._touched(index_file)}
        return parts.pop() if len(parts) == 1 and index_file.first > self.soon else None

    def _touched(self, index_file: IndexFile) -> Sequence[SegmentInfo]:
        begin = max(0, bisect_right(self._firsts, index_file.first) - 1)
        return self._segments[begin : bisect_right(self._firsts, index_file.last)]

    def _within(self, index_file: IndexFile) -> Sequence[SegmentInfo]:
        """The segments that a file covers, if these are whole ones."""
        found = self._touched(index_file)
        whole = found and (found[0].first, found[-1].last) == (index_file.first, index_file.last)
        return found if whole else ()

    def _left(self, index_file: IndexFile, earliest: int) -> Sequence[SegmentInfo]:
        """The remaining segments of a merged file, if most of its entries are trimmed."""
        trimmed, rows = earliest - index_file.first + 1, index_file.last - index_file.first + 1
        if not index_file.level or trimmed <= rows * TRIMMED_SHARE:
            return ()
        found = self._touched(index_file)
        return found if found and found[-1].last == index_file.last else ()

    def rewrites(
        self, plan: PlanRecord, index_files: Sequence[IndexFile], coverage: Coverage, earliest: int
    ) -> tuple[list[RollupRewrite], int | None]:
        """Those that are due, oldest first; and when the next is. `earliest` is the last trimmed entry."""
        due: list[RollupRewrite] = []
        next_ns: int | None = None
        for one in index_files:
            if one.fingerprint != plan.families.get(one.family):
                continue
            found = self._within(one) if one.family == ROLLUP_FAMILY else self._left(one, earliest)
            settled = not any(coverage.missing(info.first, info.last) for info in found)
            if (
                not settled
                or not (2 if one.family == ROLLUP_FAMILY else 1) <= len(found) <= REWRITE_SEGMENTS_MAX
            ):
                continue
            if one.family != ROLLUP_FAMILY or one.first <= self.soon:
                due.append(RollupRewrite(one, tuple(found)))
            elif (at_ns := self._due_ns(found[0])) is not None:
                next_ns = at_ns if next_ns is None else min(next_ns, at_ns)
        return due[:REWRITES_OFFERED_MAX], next_ns


logger = logging.getLogger("tailrace.pipeline")

SEGMENTS_OFFERED_MAX: Final = 512  # segments of one stream in one response
SUMMARIES_MAX: Final = 10_000
PLANS_MAX: Final = 8  # that are remembered of a stream
START_PAGE: Final = 256
INDEX_RETRY_S: Final = 5.0
TIMERS_MAX: Final = 100_000  # streams with a timer for the next scan; others wait for their next change
P = ParamSpec("P")
T = TypeVar("T")


class WantedPlan(Protocol):
    """An index plan, as far as it matters here."""

    @property
    def hash(self) -> str: ...
    @property
    def families(self) -> tuple[str, ...]: ...
    @property
    def fingerprints(self) -> Mapping[str, str]: ...


class StreamIndexWork(msgspec.Struct, frozen=True):
    """What is to be done for one stream, in the order in which it should be done."""

    number: int
    plan: PlanRecord
    offered: tuple[UncoveredSegment, ...] = ()
    merges: tuple[IndexMerge, ...] = ()
    compactions: tuple[tuple[SegmentInfo, ...], ...] = ()  # segments that should become one, each
    rewrites: tuple[RollupRewrite, ...] = ()
    segments: int = 0  # all without index files, including quarantined ones
    raw_bytes: int = 0
    oldest_ns: int = 0  # last append time of the oldest that is not quarantined
    given_up: int = 0
    stale: tuple[str, ...] = ()  # objects of older plans that may be deleted
    summary: IndexSummary = EMPTY_SUMMARY
    look_at_ns: int | None = None  # when there will be more to do without anything new

    @property
    def pending(self) -> bool:
        return bool(self.offered or self.merges or self.compactions or self.rewrites)


class IndexWorkScope(NamedTuple):
    """What the work of one stream depends on, besides what is listed."""

    merge: MergeRule
    compact: CompactionRule
    lifetime: Lifetime
    shown_bytes: int
    schema: bytes | None
    now_ns: int


class IndexWork:
    """Runs on the loop thread. `wanted` computes the plan of a stream from its documents."""

    def __init__(
        self, log: Log, wanted: Callable[[Stream, bool], WantedPlan], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._log = log
        self._wanted = wanted
        self._loop = loop
        limits = log.limits
        self._merge = MergeRule(limits.index_l0_span, limits.index_compaction_fanout, limits.index_max_level)
        age_ns = limits.compact_age_ms * 1_000_000
        self._compact = CompactionRule(limits.compact_segments, limits.compact_small_bytes, age_ns)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.by_stream: dict[int, StreamIndexWork] = {}  # those with something to do
        # Of streams that were looked at lately.
        self.summaries: LruCache[int, StreamIndexWork] = LruCache(entries_max=SUMMARIES_MAX)
        self.given_up: dict[int, int] = {}  # streams with quarantined segments, and how many
        self._dirty: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks = TaskSet()
        self._scanned = False
        self._threads = ThreadPoolExecutor(1, "work")  # SQLite has one connection for each thread
        self.on_stale: Callable[[Stream, tuple[str, ...]], None] | None = None

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._log.publisher.on_change.append(self._on_change)
        for number, stream in self._log.streams.by_number.items():
            if stream.visible_documents:
                self._dirty[number] = None
        for number in self._log.streams.uncheckpointed:
            self._dirty[number] = None
        self._tasks.start(self._run())
        self._wake.set()

    async def stop(self) -> None:
        await self._tasks.close()
        for timer in self._timers.values():
            timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _on_change(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Sealed | Published | Compacted | Trim | Describe | Delete):
            self.request_scan(stream.number)

    def request_scan(self, number: int) -> None:
        self._dirty[number] = None
        self._wake.set()

    async def change(self, wait_s: float) -> None:
        """Returns when there may be other work than now, or the time is up."""
        await wait_event(self._changed, wait_s)

    @property
    def settled(self) -> bool:
        """Whether everything that changed has been scanned."""
        return self._scanned and not self._dirty

    # -- scanning --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._find_described()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                number = next(iter(self._dirty))
                del self._dirty[number]
                try:
                    await self._scan(number)
                except TailraceError as error:
                    fields = log_fields(stream_number=number, error=str(error))
                    logger.warning("cannot determine the index work of a stream, retrying", extra=fields)
                    self._loop.call_later(INDEX_RETRY_S, self.request_scan, number)
                except Exception:
                    logger.exception(
                        "determining the index work of a stream failed",
                        extra=log_fields(stream_number=number),
                    )
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _find_described(self) -> None:
        """Once at start: every stream with documents that define an index plan, or with many segments."""
        store, count = self._log.store, self._compact.segments_min
        for find in (_described_after, partial(_segmented_after, count=count)):
            after = 0
            while True:
                found = await self._on_thread(find, store, after)
                self._dirty.update(dict.fromkeys(found))
                if len(found) < START_PAGE:
                    break
                after = found[-1]
        self._scanned = True
        self._wake.set()

    async def _on_thread(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._threads, partial(work, *args, **named))

    async def _scan(self, number: int) -> None:
        stream = self._log.streams.get(number)
        if stream is None or stream.removed or stream.gone:
            self._set(number, None)
            return
        planned = system_streams.has_index_files(stream.name) and await self._plan(stream) is not None
        if not planned and stream.cold.segments < self._compact.segments_min:
            self._set(number, None)
            return
        work = await self._find(stream, decode_plans(stream.documents) if planned else NO_PLANS)
        self._set(number, work)
        if planned:
            self._log.publisher.waker.wake(stream)  # readers that follow its index status
        if work.stale and self.on_stale is not None:
            self.on_stale(stream, work.stale)

    async def _find(self, stream: Stream, plans: PlanHistory) -> StreamIndexWork:
        uncheckpointed = tuple(self._log.streams.uncheckpointed.get(stream.number, ()))
        schema = None if stream.documents is None else stream.documents.get("schema")
        scope = IndexWorkScope(
            self._merge, self._compact, stream.lifetime, stream.size_bytes, schema, self._log.clock.now_ns()
        )
        return await self._on_thread(
            find_index_work, self._log.store, stream.number, stream.earliest, uncheckpointed, plans, scope
        )

    def _scan_later(self, number: int, at_ns: int | None) -> None:
        timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()
        if at_ns is not None and len(self._timers) < TIMERS_MAX:
            delay_s = max(0, at_ns - self._log.clock.now_ns()) / 1e9
            self._timers[number] = self._loop.call_later(delay_s, self.request_scan, number)

    async def _plan(self, stream: Stream) -> PlanRecord | None:
        """The current plan. A new one is journaled first."""
        known = decode_plans(stream.documents)
        entry = desired_plan(known, self._wanted(stream, known.keyed))
        if entry is None or entry == known.wanted:
            return entry
        older = [plan for plan in known.plans if plan.hash != entry.hash]
        plans = PlanHistory(known.keyed, (*older[-(PLANS_MAX - 1) :], entry))
        await await_commit(partial(self._log.set_index_plans, stream, plans))
        return entry

    def _set(self, number: int, work: StreamIndexWork | None) -> None:
        self._scan_later(number, None if work is None else work.look_at_ns)
        self.summaries.pop(number)
        if work is not None:
            self.summaries.put(number, work)
        if work is None or not work.pending:
            self.by_stream.pop(number, None)
        else:
            self.by_stream[number] = work
        if work is None or not work.given_up:
            self.given_up.pop(number, None)
        else:
            self.given_up[number] = work.given_up

    # -- queries -----------------------------------------------------------------------------------------

    def known(self, stream: Stream) -> StreamIndexWork | None:
        """The result of the last scan of a stream; None if it has to be scanned first."""
        if not durable_plans(stream).plans or not system_streams.has_index_files(stream.name):
            return StreamIndexWork(stream.number, NO_PLAN)
        return self.summaries.get(stream.number)

    async def load(self, stream: Stream) -> StreamIndexWork:
        """What is to be done for one stream right now."""
        known = durable_plans(stream)
        if not known.plans or not system_streams.has_index_files(stream.name):
            known = NO_PLANS
        if known is NO_PLANS and stream.cold.segments < self._compact.segments_min:
            return StreamIndexWork(stream.number, NO_PLAN)
        return await self._find(stream, known)

    def next_streams(self, place: tuple[int, int], limit: int) -> list[StreamIndexWork]:
        """Streams with work, longest waiting first, after a position in that order."""
        waiting = sorted((work.oldest_ns, work.number) for work in self.by_stream.values())
        found = [number for key in waiting if key > place for number in (key[1],)]
        return [self.by_stream[number] for number in found[:limit]]


NO_PLAN: Final = PlanRecord(0, "", {})


def desired_plan(known: PlanHistory, plan: WantedPlan) -> PlanRecord | None:
    """The stream's plan with its generation; None while nothing was ever to be built."""
    last = known.wanted
    if last is None and not plan.families:
        return None
    if last is not None and last.hash == plan.hash:
        return last
    return PlanRecord(
        1 if last is None else last.generation + 1,
        plan.hash,
        {family: plan.fingerprints[f"family:{family}"] for family in plan.families},
        {name: value for name, value in plan.fingerprints.items() if not name.startswith("family:")},
    )


def _described_after(store: StoredStreams, number: int) -> list[int]:
    return store.db.index_files.described_after(number, START_PAGE)


def _segmented_after(store: StoredStreams, number: int, count: int) -> list[int]:
    return store.db.cold.streams_with_segments_after(number, count, START_PAGE)


def find_index_work(
    store: StoredStreams,
    number: int,
    earliest: int,
    uncheckpointed: UncheckpointedOps,
    plans: PlanHistory,
    scope: IndexWorkScope,
) -> StreamIndexWork:
    """Runs on a thread: reads all segments and index files of a stream at once."""
    plan = plans.wanted or NO_PLAN
    with store.snapshot():
        segments = read_segments(store, number, earliest, uncheckpointed)
        known = msgspec.structs.replace(
            read_index_files(store, number, earliest, uncheckpointed), plans=plans
        )
        cuts = fork_points(store.db, number)
    coverage = Coverage(plan, known.index_files)
    given_up = {one.object for one in known.quarantined if one.plan_hash == plan.hash}
    found, stuck = uncovered_segments(segments, coverage, given_up)
    if scope.schema is not None:
        cuts.update(version_cuts(scope.schema))
    unsound = {one.object for one in known.quarantined}
    retention = RollupRetention(segments, scope.lifetime, scope.shown_bytes, scope.now_ns)

    def is_settled(info: SegmentInfo) -> bool:
        stays = info.first > max(earliest, retention.soon) and info.key not in unsound
        return stays and not coverage.missing(info.first, info.last)

    small = due_compactions(
        segments, scope.compact, borders_of(scope.lifetime, cuts), is_settled, scope.now_ns
    )
    rewrites, rewrite_ns = retention.rewrites(plan, known.index_files, coverage, earliest)
    return StreamIndexWork(
        number,
        plan,
        tuple(build_order(found)[:SEGMENTS_OFFERED_MAX]),
        tuple(due_merges(plan, known.index_files, scope.merge, retention.part)),
        small.runs,
        tuple(rewrites),
        len(found) + len(stuck),
        sum(one.info.payload_bytes for one in found),
        found[0].info.last_ns if found else 0,
        len(stuck),
        tuple(stale_index_files(plan, known.index_files, coverage)),
        summarise_index(plan, segments, known, coverage),
        min((at_ns for at_ns in (small.next_ns, rewrite_ns) if at_ns is not None), default=None),
    )
