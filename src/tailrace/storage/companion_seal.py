"""The sealer's part in the work of the pipeline: plans into the bucket, companions into manifests."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from tailrace.common import failpoints
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.limits import Limits
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.facts import stored_manifest_facts
from tailrace.storage.manifests.companion_change import IndexFileMissingError
from tailrace.storage.manifests.manifest import ManifestStore
from tailrace.storage.manifests.model import StreamDeletedError, StreamFacts
from tailrace.storage.object_store.objects import ObjectExistsError
from tailrace.storage.seal_job import SealerJob, SealerReport
from tailrace.storage.segments.segments import stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

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
        # A sweep may be about to take what is older than its age: half of that is surely safe.
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
        """Their names hold hashes: one that is there is the same. No sweep may be judging it meanwhile."""
        async with self._manifests.hold(stream_id):
            for key, data in objects.items():
                try:
                    await self._objects.create(stream_prefix(stream_id) + key, data)
                except ObjectExistsError:
                    await self._renew(stream_prefix(stream_id) + key)

    async def _renew(self, key: str) -> None:
        """A plan of long ago is wanted again: from now on it is a young object."""
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
                await self._manifests.publish(facts, known=stored)  # ours from before somebody took over
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
