"""Publication of index files: validation of a request, the manifest change, and the journal record.

A request is valid if its inputs and its plan are still those it was built from; other changes do not matter.
The manifest is changed first, then the journal is written, one publication per stream at a time. If the
server is killed in between, a repeated request finds the files in the manifest and only the journal is
written.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from tailrace.common import failpoints
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.records import Published
from tailrace.log.segment_catalogue import IndexFileSet, durable_plans, read_segments
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.compaction import CompactionService, decide_compaction
from tailrace.storage.index_coverage import Coverage, stale_index_files
from tailrace.storage.manifest_recording import stored_manifest_facts
from tailrace.storage.manifests.changes import IndexFileMissingError
from tailrace.storage.manifests.model import StreamDeletedError, StreamFacts
from tailrace.storage.manifests.store import ManifestStore, StreamLocks
from tailrace.storage.object_store.interface import ObjectExistsError
from tailrace.storage.sealer_process import ManifestPublication, SealerJob, SealerReport
from tailrace.storage.segments.index_files import (
    IndexFile,
    PlanRecord,
    PublishedObject,
    PublishRequest,
    QuarantinedSegment,
    has_valid_name,
)
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.object_store.interface import ObjectStore
    from tailrace.storage.sealing import SealingService


OBJECTS_MAX: Final = 4096
TEXT_MAX: Final = 500


class AcceptedPublication(msgspec.Struct, frozen=True):
    """What changes: nothing at all if everything was published before."""

    added: tuple[IndexFile, ...] = ()
    removed: tuple[str, ...] = ()
    quarantined: tuple[QuarantinedSegment, ...] = ()


def decide_publication(
    offer: PublishRequest,
    plan: PlanRecord,
    known: IndexFileSet,
    segments: Mapping[str, SegmentInfo],
    earliest: int,
    now_ns: int,
) -> AcceptedPublication:
    """`segments` are those that the stream shows, by key, as far as the inputs name them.
    Entries up to `earliest` are trimmed and need no index file.
    """
    if offer.plan_hash != plan.hash:
        raise TailraceError("plan_superseded", "the plan has changed; read it again")
    added = [_index_file(offer, one, plan, now_ns) for one in offer.add]
    if offer.job == "merge":
        return _accept_merge(offer, added, plan, known)
    inputs = _input_segments(offer, segments)
    given_up = _quarantined(offer, inputs, now_ns)
    for one in added:
        _check_tiled(one, inputs)
    replaced = {relative_key(key, offer.stream_id) for key in offer.replace}
    gone = [one for one in known.companions if one.object in replaced]
    left = [msgspec.structs.replace(one, first=max(one.first, earliest + 1)) for one in gone]
    return _accept_segments(added, given_up, inputs, plan, known, left)


def decide_quarantine(
    offer: PublishRequest, known: IndexFileSet, segments: Mapping[str, SegmentInfo], now_ns: int
) -> AcceptedPublication:
    """Segments that cannot be joined: they are not what was recorded."""
    given_up = _quarantined(offer, _input_segments(offer, segments), now_ns)
    known_objects = {one.object for one in known.quarantined}
    return AcceptedPublication(quarantined=tuple(one for one in given_up if one.object not in known_objects))


def relative_key(key: str, stream_id: str) -> str:
    """A key in the stream's folder, whether it was named from there or from the root."""
    return key.removeprefix(stream_prefix(stream_id))


def _index_file(offer: PublishRequest, one: PublishedObject, plan: PlanRecord, now_ns: int) -> IndexFile:
    fingerprint = plan.families.get(one.family)
    if fingerprint is None:
        raise TailraceError("invalid_request", f"the plan has no family {one.family[:TEXT_MAX]!r}")
    made = IndexFile(
        one.family,
        one.first,
        one.last,
        one.rows,
        relative_key(one.object, offer.stream_id),
        one.bytes,
        one.sha256,
        one.stats,
        offer.plan_hash,
        0,
        fingerprint,
        now_ns,
    )
    sound = 0 < one.first <= one.last and one.rows >= 0 and one.bytes > 0
    if not sound or not has_valid_name(made):
        raise TailraceError(
            "invalid_request", f"{made.object[:TEXT_MAX]!r} is not a valid name for this index file"
        )
    return made


def _input_segments(offer: PublishRequest, segments: Mapping[str, SegmentInfo]) -> dict[str, SegmentInfo]:
    inputs: dict[str, SegmentInfo] = {}
    for one in offer.inputs:
        key = relative_key(one.object, offer.stream_id)
        found = segments.get(key)
        if found is None or found.sha256 != one.sha256:
            raise _inputs_changed(key)
        inputs[key] = found
    if not inputs:
        raise TailraceError("invalid_request", "inputs must not be empty")
    return inputs


def _inputs_changed(key: str) -> TailraceError:
    return TailraceError("inputs_changed", f"{key[:TEXT_MAX]} is no longer listed, or is a different object")


def _quarantined(
    offer: PublishRequest, inputs: Mapping[str, SegmentInfo], now_ns: int
) -> list[QuarantinedSegment]:
    found: list[QuarantinedSegment] = []
    for one in offer.quarantine:
        key = relative_key(one.object, offer.stream_id)
        info = inputs.get(key)
        if info is None:
            raise TailraceError("invalid_request", f"{key[:TEXT_MAX]!r} is not one of the inputs")
        code, message = one.code[:TEXT_MAX], one.message[:TEXT_MAX]
        found.append(QuarantinedSegment(key, info.first, info.last, offer.plan_hash, code, message, now_ns))
    return found


def _check_tiled(one: IndexFile, inputs: Mapping[str, SegmentInfo]) -> None:
    """An index file covers whole, adjacent inputs."""
    inside = [info for info in inputs.values() if one.first <= info.first and info.last <= one.last]
    inside.sort(key=lambda info: info.first)
    _check_run(one, [(info.first, info.last) for info in inside])


def _check_run(one: IndexFile, ranges: Sequence[tuple[int, int]]) -> None:
    following = one.first
    for first, last in ranges:
        if first != following:
            break
        following = last + 1
    if following != one.last + 1:
        message = f"{one.family} of entries {one.first} to {one.last} does not cover whole inputs"
        raise TailraceError("range_conflict", message)


def _accept_segments(
    added: list[IndexFile],
    given_up: list[QuarantinedSegment],
    inputs: Mapping[str, SegmentInfo],
    plan: PlanRecord,
    known: IndexFileSet,
    gone: Sequence[IndexFile],
) -> AcceptedPublication:
    """`gone` are those that the others replace, as far as there are still entries."""
    replaced = {one.object for one in gone}
    rest = [one for one in known.companions if one.object not in replaced]
    new = _unlisted(added, rest, set())
    coverage = Coverage(plan, [*rest, *new])
    stuck = {one.object for one in given_up}
    for key, info in inputs.items():
        missing = coverage.missing(info.first, info.last)
        if missing and key not in stuck:
            message = f"entries {info.first} to {info.last} would have no {', '.join(missing)}"
            raise TailraceError("range_conflict", message)
    _check_replaced(gone, plan, coverage)
    known_quarantine = {(one.object, one.plan_hash, one.code) for one in known.quarantined}
    fresh = [one for one in given_up if (one.object, one.plan_hash, one.code) not in known_quarantine]
    if not new:
        return AcceptedPublication(quarantined=tuple(fresh))
    # Quarantined segments that could be built after all, and files of older plans that are replaced.
    healed = [one.object for one in known.quarantined if one.object in inputs and one.object not in stuck]
    removed = [*stale_index_files(plan, rest, coverage), *healed, *(one.object for one in gone)]
    return AcceptedPublication(tuple(new), tuple(removed), tuple(fresh))


def _check_replaced(gone: Sequence[IndexFile], plan: PlanRecord, coverage: Coverage) -> None:
    """What is removed has to be covered by the others."""
    for one in gone:
        wanted = plan.families.get(one.family) == one.fingerprint
        if wanted and not coverage.covers(one.family, one.first, one.last):
            message = f"entries {one.first} to {one.last} would not all have {one.family}"
            raise TailraceError("range_conflict", message)


def _unlisted(added: Iterable[IndexFile], listed: Iterable[IndexFile], replaced: set[str]) -> list[IndexFile]:
    """Those without an equal or equivalent one. One that overlaps another in any other way is refused."""
    by_making: dict[tuple[str, str], list[IndexFile]] = {}
    for one in listed:
        if one.object not in replaced:
            by_making.setdefault((one.family, one.fingerprint), []).append(one)
    new: list[IndexFile] = []
    for one in added:
        others = by_making.get((one.family, one.fingerprint), [])
        over = [other for other in others if other.first <= one.last and one.first <= other.last]
        if any((other.first, other.last) == (one.first, one.last) for other in over):
            continue
        if any(other.first <= one.first and one.last <= other.last for other in over):
            continue  # it has been merged into a larger one since
        if over:
            message = f"{one.family} of entries {one.first} to {one.last} overlaps {over[0].object}"
            raise TailraceError("range_conflict", message)
        new.append(one)
    for index, one in enumerate(new):
        for other in new[:index]:
            same = (one.family, one.first, one.last) == (other.family, other.first, other.last)
            if (
                one.family == other.family
                and not same
                and other.first <= one.last
                and one.first <= other.last
            ):
                raise TailraceError("range_conflict", f"{one.object} overlaps {other.object}")
    return new


def _accept_merge(
    offer: PublishRequest, added: list[IndexFile], plan: PlanRecord, known: IndexFileSet
) -> AcceptedPublication:
    """Several files may share the range of the output; together they replace all inputs."""
    if not added or len({(one.family, one.first, one.last) for one in added}) != 1:
        raise TailraceError("invalid_request", "a merge must have one output, of one family and one range")
    output = added[0]
    replaced = {relative_key(key, offer.stream_id) for key in offer.replace}
    named = {relative_key(one.object, offer.stream_id): one.sha256 for one in offer.inputs}
    if named.keys() != replaced or not named:
        raise TailraceError("invalid_request", "a merge must replace exactly its inputs")
    listed = {one.object: one for one in known.companions}
    made = [
        one
        for one in known.companions
        if (one.family, one.fingerprint, one.first, one.last)
        == (output.family, output.fingerprint, output.first, output.last)
        and one.level
    ]
    if made and not any(key in listed for key in replaced):
        return AcceptedPublication()
    inputs: list[IndexFile] = []
    for key, sha256 in named.items():
        found = listed.get(key)
        if found is None or found.sha256 != sha256:
            raise _inputs_changed(key)
        if (found.family, found.fingerprint) != (output.family, plan.families[output.family]):
            raise _inputs_changed(key)
        inputs.append(found)
    _check_run(output, sorted({(one.first, one.last) for one in inputs}))
    if _unlisted(added, known.companions, replaced) != added:
        raise TailraceError(
            "range_conflict", f"{output.object} overlaps index files that it does not replace"
        )
    level = 1 + max(one.level for one in inputs)
    outputs = [msgspec.structs.replace(one, level=level) for one in added]
    return AcceptedPublication(tuple(outputs), tuple(sorted(replaced)))


MS_NS: Final = 1_000_000


class IndexFileSealer:
    def __init__(
        self,
        store: StoredStreams,
        objects: ObjectStore,
        manifests: ManifestStore,
        threads: Executor,
        limits: Limits,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._objects = objects
        self._manifests = manifests
        self._threads = threads
        self._clock = clock
        # A sweep may be about to delete objects older than its age limit: half of that is safe.
        self._age_ns_max = limits.gc_orphan_age * MS_NS // 2

    async def do(self, job: SealerJob, report: SealerReport) -> None:
        assert job.publication is not None
        if job.kind == "plan":
            await self._create(job.publication.stream_id, job.publication.objects)
            return
        facts = await asyncio.get_running_loop().run_in_executor(
            self._threads, stored_manifest_facts, self._store, job.numbers[0]
        )
        if facts is None:
            report.refused, report.detail = "buried", "the stream was deleted"
        else:
            await self._publish(facts, job, report)

    async def _create(self, stream_id: str, objects: dict[str, bytes]) -> None:
        """Names contain hashes: an existing object is the same. The sweep must not be judging it."""
        async with self._manifests.lock(stream_id):
            for key, data in objects.items():
                try:
                    await self._objects.create(stream_prefix(stream_id) + key, data)
                except ObjectExistsError:
                    await self._renew(stream_prefix(stream_id) + key)

    async def _renew(self, key: str) -> None:
        """An old plan is used again: rewritten, so that the sweep sees a young object."""
        found = await self._objects.head(key)
        if found.modified_ns < self._clock.now_ns() - self._age_ns_max:
            data, etag = await self._objects.get(key)
            await self._objects.replace(key, data, etag)

    async def _publish(self, facts: StreamFacts, job: SealerJob, report: SealerReport) -> None:
        assert job.publication is not None
        failpoints.reached("publish.before_manifest")
        try:
            stored = await self._manifests.load(facts.stream_id)
            if stored is None or stored.head.fence < self._manifests.fence:
                await self._manifests.publish(facts, known=stored)  # ours from before a takeover
            head, added = await self._manifests.publish_companions(
                facts.stream_id, job.publication.added, job.publication.removed
            )
        except StreamDeletedError as error:
            report.refused, report.detail = "buried", str(error)
            return
        except IndexFileMissingError as error:
            report.refused, report.detail = "missing", str(error)
            return
        failpoints.reached("publish.after_manifest")
        report.generation = head.generation
        report.added = added


PUBLICATIONS_MAX = 64  # running or waiting; more are refused with a retry hint


class PublishOutcome(NamedTuple):
    result: Literal["published", "already_published"]
    generation: int


class PublicationService:
    """Owned by the loop thread."""

    def __init__(self, log: Log, sealing: SealingService, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._sealing = sealing
        self._locks = StreamLocks()
        self._under_way = 0
        self.compacting = CompactionService(log, sealing, self._locks, loop)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by job and result
        self.segments = self.rows = self.bytes_in = self.bytes_out = 0
        self.last_ns = 0

    async def publish(self, stream: Stream, offer: PublishRequest) -> PublishOutcome:
        """Raises TailraceError with one of the refusals of a publication."""
        try:
            outcome = await self._admitted(stream, offer)
        except TailraceError as refusal:
            self.outcomes[offer.job, refusal.code] += 1
            raise
        self.outcomes[offer.job, outcome.result] += 1
        return outcome

    async def _admitted(self, stream: Stream, offer: PublishRequest) -> PublishOutcome:
        if self._under_way >= PUBLICATIONS_MAX:
            raise TailraceError("overloaded", "too many concurrent publications; retry later")
        self._under_way += 1
        try:
            async with self._locks.lock(offer.stream_id):
                return await self._publish(stream, offer)
        finally:
            self._under_way -= 1

    async def _publish(self, stream: Stream, offer: PublishRequest) -> PublishOutcome:
        self._require_stream(stream)
        plan = durable_plans(stream).wanted
        if offer.job == "compact":
            return await self._compact(stream, offer, plan)
        if plan is None:
            raise TailraceError("plan_superseded", "this stream has no index plan")
        known = await self._log.catalogue.load(stream)
        segments = await self._segments(stream)
        accepted = decide_publication(offer, plan, known, segments, stream.earliest, self._log.clock.now_ns())
        return await self._accept(stream, offer, accepted, segments)

    async def _accept(
        self,
        stream: Stream,
        offer: PublishRequest,
        accepted: AcceptedPublication,
        segments: dict[str, SegmentInfo],
    ) -> PublishOutcome:
        if accepted == AcceptedPublication():
            return PublishOutcome("already_published", stream.cold.generation)
        generation = await self._record(stream, accepted)
        self._count(offer, accepted, segments)
        return PublishOutcome("published", generation)

    async def _compact(
        self, stream: Stream, offer: PublishRequest, plan: PlanRecord | None
    ) -> PublishOutcome:
        """The segments must still be those that were merged; the plan does not matter."""
        await self.compacting.finish(stream)
        known: IndexFileSet = await self._log.catalogue.load(stream)
        segments = await self._segments(stream)
        if offer.quarantine:
            accepted = decide_quarantine(offer, known, segments, self._log.clock.now_ns())
            return await self._accept(stream, offer, accepted, segments)
        intent = decide_compaction(offer, plan, known.companions, segments)
        if intent is None:
            return PublishOutcome("already_published", stream.cold.generation)
        generation = await self.compacting.begin(stream, intent)
        self.last_ns = self._log.clock.now_ns()
        self.bytes_out += intent.segment.bytes
        return PublishOutcome("published", generation)

    async def unlist(self, stream: Stream, keys: tuple[str, ...]) -> None:
        """Removes unneeded index files, and quarantines that are to be tried again."""
        folder = make_stream_id(stream.name, stream.incarnation)
        async with self._locks.lock(folder):
            self._require_stream(stream)
            known = await self._log.catalogue.load(stream)
            listed = {one.object for one in known.companions} | {one.object for one in known.quarantined}
            removed = tuple(key for key in keys if key in listed)
            if removed:
                await self._record(stream, AcceptedPublication(removed=removed))

    def _require_stream(self, stream: Stream) -> None:
        if stream.removed or stream.gone:
            raise TailraceError("stream_gone", "the stream was deleted")

    async def _segments(self, stream: Stream) -> dict[str, SegmentInfo]:
        uncheckpointed = tuple(self._log.streams.uncheckpointed.get(stream.number, ()))
        store, number, earliest = self._log.store, stream.number, stream.earliest
        found = await self._sealing.on_thread(lambda: read_segments(store, number, earliest, uncheckpointed))
        return {info.key: info for info in found}

    async def _record(self, stream: Stream, accepted: AcceptedPublication) -> int:
        """Into the manifest, then into the journal. The generation of the manifest that has it."""
        generation = stream.cold.generation
        if accepted.added or any(key.startswith("companions/") for key in accepted.removed):
            folder = make_stream_id(stream.name, stream.incarnation)
            publication = ManifestPublication(
                stream_id=folder, added=list(accepted.added), removed=list(accepted.removed)
            )
            report = await self._sealing.run_job("publish", [stream.number], publication=publication)
            if report.error:
                raise TailraceError("unavailable", f"the manifest cannot be written: {report.error}")
            if report.refused == "missing":
                raise TailraceError("object_missing", report.detail)
            if report.refused:
                raise TailraceError("stream_gone", "the stream was deleted")
            generation = report.generation
        self._require_stream(stream)
        now_ns = self._log.clock.now_ns()
        added, removed = list(accepted.added), list(accepted.removed)
        op = Published(stream.number, generation, added, removed, list(accepted.quarantined), now_ns)
        await self._sealing.journal(op)
        failpoints.reached("publish.after_journal")
        self.last_ns = now_ns
        return generation

    def _count(
        self, offer: PublishRequest, accepted: AcceptedPublication, segments: dict[str, SegmentInfo]
    ) -> None:
        self.bytes_out += sum(one.bytes for one in accepted.added)
        if offer.job == "companions" and accepted.added:
            inputs = [info for info in segments.values() if _covers_segment(accepted.added, info)]
            self.segments += len(inputs)
            self.rows += sum(info.rows for info in inputs)
            self.bytes_in += sum(info.bytes for info in inputs)


def _covers_segment(companions: tuple[IndexFile, ...], info: SegmentInfo) -> bool:
    return any(one.first <= info.first and info.last <= one.last for one in companions)
