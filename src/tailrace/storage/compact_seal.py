"""The sealer's part in a compaction: the joined segment is read once more, then put into the manifest."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from tailrace.common import failpoints
from tailrace.common.limits import Limits
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.facts import stored_manifest_facts
from tailrace.storage.manifests.manifest import ManifestStore, StoredHead
from tailrace.storage.manifests.model import ManifestConflictError, StreamDeletedError, StreamFacts
from tailrace.storage.object_store.objects import ObjectMissingError
from tailrace.storage.seal_job import SealerJob, SealerReport
from tailrace.storage.segments.footers import fetch_footer
from tailrace.storage.segments.segments import CorruptSegmentError, SegmentInfo, stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

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
        # A sweep may be about to take what is older than its age: half of that is surely safe.
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
                await self._manifests.publish(facts, known=stored)  # ours from before somebody took over
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
                    f"{joined.key} has {found.size} bytes, and {joined.bytes} were reported"
                )
            if time.time_ns() - found.modified_ns > self._age_ns_max:
                raise UnfitSegmentError(f"{joined.key} has lain there for too long; it has to be built again")
            raw, _etag = await self._objects.get(key)
        except ObjectMissingError:
            raise UnfitSegmentError(f"{joined.key} is not there") from None
        loop = asyncio.get_running_loop()
        problems = await loop.run_in_executor(self._threads, _segment_problems, raw, joined, facts)
        if problems:
            raise UnfitSegmentError(f"{joined.key}: {'; '.join(problems)}")


def _segment_problems(raw: bytes, joined: SegmentInfo, facts: StreamFacts) -> list[str]:
    from tailrace.storage.segments.segment_check import check_segment, file_footer

    problems = check_segment(raw, joined)
    try:
        told = file_footer(raw).facts
    except CorruptSegmentError:
        return problems  # said already
    if (told.get("name"), told.get("stream_id")) != (facts.name, facts.stream_id):
        problems.append("it is of another stream")
    return problems
