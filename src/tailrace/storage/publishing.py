"""Publications of the pipeline: decided, put into the manifest, written down. One at a time for each stream.

The manifest comes first, then the journal. Whoever is killed in between has published: the same offer finds
it in the manifest and only the journal is written.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal, NamedTuple

from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.log.catalogue import IndexFileSet, durable_plans
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.records import Published
from tailrace.log.segment_list import read_segments
from tailrace.storage.compacting import CompactionService
from tailrace.storage.compaction import decide_compaction
from tailrace.storage.manifests.stream_locks import StreamLocks
from tailrace.storage.publication import AcceptedPublication, decide_publication, decide_quarantine
from tailrace.storage.seal import SealingService
from tailrace.storage.seal_job import ManifestPublication
from tailrace.storage.segments.companions import IndexFile, PlanRecord
from tailrace.storage.segments.offers import PublishRequest
from tailrace.storage.segments.segments import SegmentInfo, make_stream_id

PUBLICATIONS_MAX = 64  # under way or waiting; more are told to come back


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
            raise TailraceError("overloaded", "too many publications at once")
        self._under_way += 1
        try:
            async with self._locks.hold(offer.stream_id):
                return await self._publish(stream, offer)
        finally:
            self._under_way -= 1

    async def _publish(self, stream: Stream, offer: PublishRequest) -> PublishOutcome:
        self._check_there(stream)
        plan = durable_plans(stream).wanted
        if offer.job == "compact":
            return await self._compact(stream, offer, plan)
        if plan is None:
            raise TailraceError("plan_superseded", "no companions are wanted of this stream")
        known = await self._log.catalogue.of(stream)
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
        """The condition is that the segments are still those that were joined, whatever the plan is."""
        await self.compacting.finish(stream)
        known: IndexFileSet = await self._log.catalogue.of(stream)
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
        """Takes out companions that nobody wants, and quarantines that are to be tried again."""
        folder = make_stream_id(stream.name, stream.incarnation)
        async with self._locks.hold(folder):
            self._check_there(stream)
            known = await self._log.catalogue.of(stream)
            listed = {one.object for one in known.companions} | {one.object for one in known.quarantined}
            removed = tuple(key for key in keys if key in listed)
            if removed:
                await self._record(stream, AcceptedPublication(removed=removed))

    def _check_there(self, stream: Stream) -> None:
        if stream.removed or stream.gone:
            raise TailraceError("stream_gone", "the stream was deleted")

    async def _segments(self, stream: Stream) -> dict[str, SegmentInfo]:
        unfolded = tuple(self._log.streams.unfolded.get(stream.number, ()))
        store, number, earliest = self._log.store, stream.number, stream.earliest
        found = await self._sealing.on_thread(lambda: read_segments(store, number, earliest, unfolded))
        return {info.key: info for info in found}

    async def _record(self, stream: Stream, accepted: AcceptedPublication) -> int:
        """Into the manifest, then into the journal. The generation of the manifest that has it."""
        generation = stream.cold.generation
        if accepted.added or any(key.startswith("companions/") for key in accepted.removed):
            folder = make_stream_id(stream.name, stream.incarnation)
            publication = ManifestPublication(
                stream_id=folder, added=list(accepted.added), removed=list(accepted.removed)
            )
            report = await self._sealing.ask("publish", [stream.number], publication=publication)
            if report.error:
                raise TailraceError("unavailable", f"the manifest cannot be written: {report.error}")
            if report.refused == "missing":
                raise TailraceError("object_missing", report.detail)
            if report.refused:
                raise TailraceError("stream_gone", "the stream was deleted")
            generation = report.generation
        self._check_there(stream)
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
