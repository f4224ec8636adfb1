"""Segments in the bucket that the journal does not tell of: ours only if they hold the entries we hold.

A sealer whose server was killed leaves such segments behind, and their entries are still in the hot store.
But so does a server that went on after the backup was made which is in use now, or one that runs on a copy of
this directory: its entries have the same numbers and are others. Taking those for ours would drop what we
acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tailrace.log.model import Stream
from tailrace.log.stored_streams import StoredStreams, decode_block
from tailrace.storage.cut import slice_run
from tailrace.storage.manifests.manifest import ManifestStore
from tailrace.storage.manifests.manifest_resolve import is_same_incarnation
from tailrace.storage.manifests.model import ManifestConflictError, ManifestHead, StreamFacts
from tailrace.storage.seal_job import SealerJob, SealerReport
from tailrace.storage.segments.footers import footer_has_keys
from tailrace.storage.segments.segments import SegmentInfo, SegmentRows, stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore


class SegmentAdoption:
    """Compares what the bucket has with what the hot store has, and reports as sealed what is the same."""

    def __init__(
        self,
        store: StoredStreams,
        objects: ObjectStore,
        manifests: ManifestStore,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._store = store
        self._objects = objects
        self._manifests = manifests
        self._threads = threads

    def is_ahead(self, head: ManifestHead, facts: StreamFacts, job: SealerJob) -> bool:
        """Whether more is recorded than the server knows of; by somebody who may have been us."""
        if head.deleted is not None or head.uploaded_through <= job.sealed:
            return False
        return head.fence == self._manifests.fence or is_same_incarnation(facts, head)

    async def adopt(
        self, job: SealerJob, facts: StreamFacts, head: ManifestHead, report: SealerReport, count_max: int
    ) -> None:
        """ManifestConflictError if an entry in the bucket is not the one we have; then nothing is taken."""
        if not is_same_incarnation(facts, head):
            raise _conflict(facts, "that stream was created elsewhere")
        following = job.sealed + 1
        async for info in self._manifests.segments(head, following):
            if info.first != following:
                raise _conflict(facts, f"entry {following} is not where it was left")
            report.footers.append(await self._footer(job.numbers[0], facts, info))
            report.segments.append(info)
            report.keyed = report.keyed or footer_has_keys(report.footers[-1])
            following = info.last + 1
            if len(report.segments) == count_max:
                break
        if not report.segments:
            raise _conflict(facts, f"entry {following} was trimmed there")
        report.generation = head.generation
        report.more = True  # the stream may have grown since, and its head may be behind

    async def _footer(self, number: int, facts: StreamFacts, info: SegmentInfo) -> bytes:
        """The footer of a segment that holds what the hot store has."""
        raw, _etag = await self._objects.get(stream_prefix(facts.stream_id) + info.key)
        loop = asyncio.get_running_loop()
        footer = await loop.run_in_executor(self._threads, self._compared, number, info, raw)
        if footer is None:
            raise _conflict(facts, f"entries {info.first} to {info.last} differ or are not here")
        return footer

    def _compared(self, number: int, info: SegmentInfo, raw: bytes) -> bytes | None:
        from tailrace.storage.segments import segment_tail
        from tailrace.storage.segments.segment_check import file_footer, read_all_rows

        with self._store.snapshot():
            stream = self._store.stream_by_number(number)
            if stream is None:
                return None
            held = hot_runs_after(self._store, stream, info.first - 1)
            if not is_prefix_of(read_all_rows(raw, file_footer(raw)), held, stream.separator):
                return None
        tail = segment_tail.find_tail(raw, len(raw))
        assert isinstance(tail, bytes), "all of the file was given"
        return segment_tail.pack_tail(tail)


def hot_runs_after(store: StoredStreams, stream: Stream, entry: int) -> Iterator[SegmentRows]:
    """What the hot store has behind an entry of a stream, in order."""
    following = entry + 1
    for row in store.db.blocks_from(stream.number, following):
        block = decode_block(row)
        assert block.first <= following <= block.last, f"entry {following} of {stream.name} is missing"
        run = SegmentRows(block.first, block.body, block.ends, block.times, block.keys)
        yield slice_run(run, following - block.first, len(block.ends), stream.separator)
        following = block.last + 1


def is_prefix_of(some: Iterable[SegmentRows], all_of: Iterator[SegmentRows], separator: int) -> bool:
    """Whether the one begins with exactly the entries of the other, however either is cut into runs."""
    held: SegmentRows | None = None
    for run in some:
        at, count = 0, len(run.ends)
        while at < count:
            held = held or next(all_of, None)
            if held is None:
                return False
            shared = min(count - at, len(held.ends))
            part = slice_run(run, at, at + shared, separator)
            if not _equal_runs(part, slice_run(held, 0, shared, separator)):
                return False
            rest = len(held.ends) - shared
            held = slice_run(held, shared, len(held.ends), separator) if rest else None
            at += shared
    return True


def _equal_runs(one: SegmentRows, other: SegmentRows) -> bool:
    """A run may come with a list of keys that are all missing, or without any list."""
    return one[:4] == other[:4] and _run_keys(one) == _run_keys(other)


def _run_keys(run: SegmentRows) -> list[bytes | None]:
    return run.keys or [None] * len(run.ends)


def _conflict(facts: StreamFacts, why: str) -> ManifestConflictError:
    return ManifestConflictError(
        facts.stream_id, f"the object store has other entries of {facts.name!r} than this server: {why}"
    )
