"""Compaction: which segments become one, verification, replacement in the manifest, completion after a crash.

The decisions are pure functions of the listed segments. The sealer reads the new segment once more before it
puts it into the manifest. The log records the intent before the manifest changes and removes it afterwards:
without it, a server killed in between would continue with segments whose objects are deleted later. At start
pending intents are completed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.log import segment_catalogue
from tailrace.log.model import Lifetime, Stream
from tailrace.log.segment_catalogue import CompactionIntent
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import await_commit
from tailrace.storage.index_coverage import Coverage
from tailrace.storage.manifest_recording import stored_manifest_facts
from tailrace.storage.manifests.model import ManifestConflictError, StreamDeletedError, StreamFacts
from tailrace.storage.manifests.store import ManifestStore, StoredHead, StreamLocks
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.sealer_process import ManifestPublication, SealerJob, SealerReport
from tailrace.storage.segments.index_files import (
    SEGMENT_FAMILY,
    IndexFile,
    PlanRecord,
    PublishedObject,
    PublishRequest,
)
from tailrace.storage.segments.model import (
    CorruptSegmentError,
    SegmentInfo,
    fetch_footer,
    make_stream_id,
    segment_name,
    stream_prefix,
)

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.object_store.interface import ObjectStore
    from tailrace.storage.sealing import SealingService


HOUR_NS: Final = 3600 * 10**9
BYTES_MAX: Final = 64 << 20  # payload of a joined segment, with something for each entry
ENTRY_BYTES: Final = 32
INPUTS_MAX: Final = 512
COMPACTIONS_OFFERED_MAX: Final = 4  # of one stream in one response
RETENTION_SHARE: Final = 10  # so many parts of what a stream retains are trimmed one by one


class CompactionRule(NamedTuple):
    """From how many adjacent segments on, up to which size of each, and from which age on."""

    segments_min: int
    small_bytes: int
    age_ns: int


class CompactionBorders(NamedTuple):
    """What no segment may reach across."""

    cuts: Sequence[int]  # sorted entries that must be the last of their segment
    bucket_ns: int  # append times of one segment are in one interval of this length; 0: any
    bytes_max: int

    def is_cut(self, first: int, last: int) -> bool:
        """Whether there is a cut between two entries of a range."""
        index = bisect_left(self.cuts, first)
        return index < len(self.cuts) and self.cuts[index] < last

    def bucket(self, info: SegmentInfo) -> int | None:
        """The time interval of a segment; None if it is in several."""
        if not self.bucket_ns:
            return 0
        first, last = info.first_ns // self.bucket_ns, info.last_ns // self.bucket_ns
        return first if first == last else None


class DueCompactions(NamedTuple):
    """Runs of segments to be joined, oldest first; and when there will be more without anything new."""

    runs: tuple[tuple[SegmentInfo, ...], ...] = ()
    next_ns: int | None = None


def borders_of(lifetime: Lifetime, cuts: Collection[int]) -> CompactionBorders:
    """Retention trims whole segments: a compacted one may delay it by a tenth of its bound, or an hour."""
    bucket_ns, bytes_max = 0, BYTES_MAX
    if lifetime.retention_s is not None:
        bucket_ns = max(lifetime.retention_s * 10**9 // RETENTION_SHARE, HOUR_NS)
    if lifetime.retention_bytes is not None:
        bytes_max = min(bytes_max, lifetime.retention_bytes // RETENTION_SHARE)
    return CompactionBorders(sorted(cuts), bucket_ns, bytes_max)


def due_compactions(
    segments: Sequence[SegmentInfo],
    rule: CompactionRule,
    borders: CompactionBorders,
    is_settled: Callable[[SegmentInfo], bool],
    now_ns: int,
) -> DueCompactions:
    """Due compactions. `is_settled` is whether nothing is left to build for a segment: others are skipped."""
    found: list[tuple[SegmentInfo, ...]] = []
    next_ns: int | None = None
    for run in _runs(segments, rule, borders, is_settled):
        old = [info for info in run if info.last_ns + rule.age_ns <= now_ns]
        if len(old) >= rule.segments_min:
            found.append(tuple(old))
        elif len(run) >= rule.segments_min:
            at_ns = run[rule.segments_min - 1].last_ns + rule.age_ns
            next_ns = at_ns if next_ns is None else min(next_ns, at_ns)
    return DueCompactions(tuple(found[:COMPACTIONS_OFFERED_MAX]), next_ns)


def _runs(
    segments: Sequence[SegmentInfo],
    rule: CompactionRule,
    borders: CompactionBorders,
    is_settled: Callable[[SegmentInfo], bool],
) -> Iterator[list[SegmentInfo]]:
    """Adjacent small segments that may be merged, regardless of their age."""
    run: list[SegmentInfo] = []
    size = 0
    for info in segments:
        fits = (
            info.payload_bytes < rule.small_bytes
            and borders.bucket(info) is not None
            and not borders.is_cut(info.first, info.last)
            and is_settled(info)
        )
        weight = info.payload_bytes + ENTRY_BYTES * info.rows
        if run and not (fits and size + weight <= borders.bytes_max and _continues(run, info, borders)):
            yield run
            run, size = [], 0
        if fits:
            run.append(info)
            size += weight
    if run:
        yield run


def _continues(run: list[SegmentInfo], info: SegmentInfo, borders: CompactionBorders) -> bool:
    last = run[-1]
    return (
        len(run) < INPUTS_MAX
        and info.first == last.last + 1
        and info.epoch == last.epoch
        and borders.bucket(info) == borders.bucket(last)
        and not borders.is_cut(last.last, info.first)
    )


# -- publication ---------------------------------------------------------------------------------------


def decide_compaction(
    offer: PublishRequest,
    plan: PlanRecord | None,
    companions: Sequence[IndexFile],
    segments: Mapping[str, SegmentInfo],
) -> CompactionIntent | None:
    """The intent of a compaction; None if it was completed already.

    `segments` are all that the stream shows, by key.
    """
    if len(offer.add) != 1 or offer.add[0].family != SEGMENT_FAMILY:
        raise TailraceError("invalid_request", "a compaction must have one output, a segment")
    prefix = stream_prefix(offer.stream_id)
    named = {one.object.removeprefix(prefix): one.sha256 for one in offer.inputs}
    if named.keys() != {key.removeprefix(prefix) for key in offer.replace} or len(named) < 2:
        raise TailraceError("invalid_request", "a compaction must replace exactly its inputs, at least two")
    joined = offered_segment(offer.add[0], prefix)
    listed = [info for info in segments.values() if info.first <= joined.last and joined.first <= info.last]
    if len(listed) == 1 and (listed[0].first, listed[0].last) == (joined.first, joined.last):
        return None
    inputs = sorted((info for info in listed if info.key in named), key=lambda info: info.first)
    if len(inputs) != len(named) or len(listed) != len(named):
        raise TailraceError("inputs_changed", "an input segment is no longer listed")
    if any(info.sha256 != named[info.key] for info in inputs):
        raise TailraceError("inputs_changed", "an input segment is a different object")
    _check_sums(joined, inputs)
    _check_companions(joined, plan, companions)
    return CompactionIntent(joined, tuple(inputs))


def offered_segment(one: PublishedObject, prefix: str) -> SegmentInfo:
    """The recorded fields of an offered segment, not verified yet."""
    values = [one.stats.get(name) for name in ("epoch", "raw_bytes", "first_ns", "last_ns")]
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) != len(values):
        raise TailraceError("invalid_request", "stats must have epoch, raw_bytes, first_ns and last_ns")
    epoch, payload_bytes, first_ns, last_ns = numbers
    key = one.object.removeprefix(prefix)
    sound = 0 < one.first <= one.last and one.rows == one.last - one.first + 1 and one.bytes > 0
    if not sound or key != segment_name(epoch, one.first, one.last, one.sha256):
        raise TailraceError("invalid_request", "the object name does not match the segment")
    return SegmentInfo(
        key=key,
        epoch=epoch,
        first=one.first,
        last=one.last,
        rows=one.rows,
        bytes=one.bytes,
        payload_bytes=payload_bytes,
        sha256=one.sha256,
        first_ns=first_ns,
        last_ns=last_ns,
    )


def _check_sums(joined: SegmentInfo, inputs: Sequence[SegmentInfo]) -> None:
    following = joined.first
    for info in inputs:
        if info.first != following or info.epoch != joined.epoch:
            raise TailraceError("range_conflict", "the segments are not adjacent in one epoch")
        following = info.last + 1
    if following != joined.last + 1:
        raise TailraceError("range_conflict", "the entries of the new segment differ from its inputs")
    reported = (joined.payload_bytes, joined.first_ns, joined.last_ns)
    if reported != (sum(info.payload_bytes for info in inputs), inputs[0].first_ns, inputs[-1].last_ns):
        raise TailraceError("range_conflict", "the bytes or times of the new segment differ from its inputs")


def _check_companions(joined: SegmentInfo, plan: PlanRecord | None, companions: Sequence[IndexFile]) -> None:
    """Either all index files of the inputs are built, or none: a part could never be completed.

    Index files are built for whole segments, and none may overlap another.
    """
    if plan is None:
        return
    for family in Coverage(plan, companions).missing(joined.first, joined.last):
        making = (family, plan.families[family])
        if any(
            (one.family, one.fingerprint) == making and one.first <= joined.last and joined.first <= one.last
            for one in companions
        ):
            message = f"{family} of entries {joined.first} to {joined.last} is being built"
            raise TailraceError("range_conflict", message)


MS_NS: Final = 1_000_000


class UnfitSegmentError(Exception):
    """What was offered cannot be listed."""


class CompactionSealer:
    def __init__(
        self,
        store: StoredStreams,
        objects: ObjectStore,
        manifests: ManifestStore,
        threads: Executor,
        limits: Limits,
    ) -> None:
        self._store = store
        self._objects = objects
        self._manifests = manifests
        self._threads = threads
        self._grace_ns = limits.gc_segment_grace * MS_NS
        # A sweep may be about to delete objects older than its age limit: half of that is safe.
        self._age_ns_max = limits.sweep_age_ms * MS_NS // 2

    async def do(self, job: SealerJob, report: SealerReport) -> None:
        assert job.publication is not None
        assert job.publication.segment is not None
        loop = asyncio.get_running_loop()
        facts = await loop.run_in_executor(self._threads, stored_manifest_facts, self._store, job.numbers[0])
        if facts is None:
            report.refused, report.detail = "buried", "the stream was deleted"
            return
        joined = job.publication.segment
        try:
            stored = await self._manifests.load(facts.stream_id)
            if stored is None or stored.head.fence < self._manifests.fence:
                await self._manifests.publish(facts, known=stored)  # ours from before a takeover
            if not await self._is_listed(stored, joined):
                await self._check(facts, joined)
            failpoints.reached("compact.before_manifest")
            head = await self._manifests.compact(
                facts.stream_id, joined, job.publication.replaced, self._grace_ns
            )
            failpoints.reached("compact.after_manifest")
        except StreamDeletedError as error:
            report.refused, report.detail = "buried", str(error)
        except UnfitSegmentError as error:
            report.refused, report.detail = "missing", str(error)
        except ManifestConflictError as error:
            report.refused, report.detail = "changed", str(error)
        else:
            key = stream_prefix(facts.stream_id) + joined.key
            report.generation = head.generation
            report.footers = [await fetch_footer(self._objects, key, joined)]

    async def _is_listed(self, stored: StoredHead | None, joined: SegmentInfo) -> bool:
        """Whether an earlier try got this far."""
        if stored is None:
            return False
        async for info in self._manifests.segments(stored.head, joined.first):
            return info == joined
        return False

    async def _check(self, facts: StreamFacts, joined: SegmentInfo) -> None:
        """Others are deleted for this one some day, so all of it is read: every checksum has to be right."""
        key = stream_prefix(facts.stream_id) + joined.key
        try:
            found = await self._objects.head(key)
            if found.size != joined.bytes:
                raise UnfitSegmentError(
                    f"{joined.key} has {found.size} bytes instead of the reported {joined.bytes}"
                )
            if time.time_ns() - found.modified_ns > self._age_ns_max:
                raise UnfitSegmentError(f"{joined.key} is too old to be published; build it again")
            raw, _etag = await self._objects.get(key)
        except ObjectMissingError:
            raise UnfitSegmentError(f"{joined.key} does not exist") from None
        loop = asyncio.get_running_loop()
        problems = await loop.run_in_executor(self._threads, _segment_problems, raw, joined, facts)
        if problems:
            raise UnfitSegmentError(f"{joined.key}: {'; '.join(problems)}")


def _segment_problems(raw: bytes, joined: SegmentInfo, facts: StreamFacts) -> list[str]:
    from tailrace.storage.segments.reader import check_segment, file_footer

    problems = check_segment(raw, joined)
    try:
        recorded = file_footer(raw).facts
    except CorruptSegmentError:
        return problems  # already reported
    if (recorded.get("name"), recorded.get("stream_id")) != (facts.name, facts.stream_id):
        problems.append("it belongs to another stream")
    return problems


logger = logging.getLogger("tailrace.pipeline")

COMPACTION_RETRY_S: Final = 10.0
_REFUSAL_CODES: Final = {"missing": "object_missing", "changed": "inputs_changed", "buried": "stream_gone"}


class CompactionService:
    """Runs on the loop thread. The caller holds the lock of the stream."""

    def __init__(
        self, log: Log, sealing: SealingService, locks: StreamLocks, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._log = log
        self._sealing = sealing
        self._locks = locks
        self._loop = loop
        self._tasks = TaskSet()
        self.segments = self.rows = 0  # that became part of others, since the start

    def start(self) -> None:
        """Completes compactions that an earlier run of the server started."""
        self._finish_later()

    async def stop(self) -> None:
        await self._tasks.close()

    async def begin(self, stream: Stream, intent: CompactionIntent) -> int:
        """The generation of the manifest that lists the new segment. TailraceError if it is not listed."""
        await self._record_intent(stream.number, intent)
        failpoints.reached("compact.after_intent")
        if intent.segment.first <= stream.earliest:
            # Retention was decided before the intent was known.
            await self._record_intent(stream.number, None)
            raise TailraceError("inputs_changed", "retention has removed some of the entries")
        try:
            return await self._replace_in_manifest(stream, intent)
        except TailraceError:
            self._finish_later()
            raise

    async def finish(self, stream: Stream) -> None:
        """Completes a compaction that was started and is not recorded as done."""
        raw = self._log.streams.meta.get(segment_catalogue.compaction_fact_key(stream.number))
        if raw is not None:
            try:
                await self._replace_in_manifest(stream, segment_catalogue.decode_intent(raw))
            except TailraceError as error:
                if segment_catalogue.compaction_fact_key(stream.number) in self._log.streams.meta:
                    raise
                fields = log_fields(stream=stream.name, error=str(error))
                logger.info("compaction abandoned", extra=fields)

    async def _replace_in_manifest(self, stream: Stream, intent: CompactionIntent) -> int:
        publication = ManifestPublication(
            stream_id=make_stream_id(stream.name, stream.incarnation),
            segment=intent.segment,
            replaced=list(intent.replaced),
        )
        if not self._sealing.health.owned:
            raise TailraceError("unavailable", "the object store is unavailable; retry later")
        report = await self._sealing.run_job("compact", [stream.number], publication=publication)
        if report.error:
            raise TailraceError("unavailable", f"the manifest cannot be written: {report.error}")
        if report.refused or stream.removed:
            await self._record_intent(stream.number, None)
            raise TailraceError(
                _REFUSAL_CODES.get(report.refused, "stream_gone"), report.detail or "it was deleted"
            )
        now_ns = self._log.clock.now_ns()
        await self._sealing.journal(intent.done(stream.number, report.generation, report.footers[0], now_ns))
        failpoints.reached("compact.after_journal")
        self.segments += len(intent.replaced)
        self.rows += intent.segment.rows
        return report.generation

    async def _record_intent(self, number: int, intent: CompactionIntent | None) -> None:
        """Returns when it is durable."""
        value = None if intent is None else segment_catalogue.encode_intent(intent)
        await await_commit(partial(self._log.put_meta, segment_catalogue.compaction_fact_key(number), value))

    # -- what was not finished -----------------------------------------------------------------------------

    def _finish_later(self) -> None:
        if not self._tasks.running:
            self._tasks.start(self._finish_all())

    async def _finish_all(self) -> None:
        """Retries until no started compaction is left."""
        while numbers := [number for number, _ in segment_catalogue.pending_compactions(self._log.streams)]:
            for number in numbers:
                try:
                    await self._finish_one(number)
                except TailraceError as error:
                    fields = log_fields(stream_number=number, error=str(error))
                    logger.warning("cannot complete a started compaction, retrying", extra=fields)
                except Exception:
                    logger.exception(
                        "completing a started compaction failed", extra=log_fields(stream_number=number)
                    )
            if any(True for _ in segment_catalogue.pending_compactions(self._log.streams)):
                await asyncio.sleep(COMPACTION_RETRY_S)

    async def _finish_one(self, number: int) -> None:
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            await self._record_intent(number, None)
            return
        async with self._locks.lock(make_stream_id(stream.name, stream.incarnation)):
            await self.finish(stream)
