"""The sealer process: moves entries from the hot store to segments and records them in manifests.

It reads the hot store, one snapshot per stream and job, and is the only writer of segments and manifests. Its
work becomes part of the log when the server journals its report. It may be killed at any moment: a repeated
job finds what was done before.

Segments in the bucket that the journal does not know may come from such a killed job. They may also come from
a server that continued after the backup in use now was made, or that runs on a copy of this directory; then
their entries differ. So they are accepted only if they hold the same entries as the hot store.

Protocol: one `SealerJob` per line in, one `SealerReport` per line out. The process exits at the end of its
input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tailrace.common import failpoints, process
from tailrace.common.logging_setup import configure_logging, log_fields
from tailrace.common.tasks import TaskSet
from tailrace.log.model import Stream
from tailrace.log.stored_streams import StoredStreams, decode_block
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.compaction import CompactionSealer
from tailrace.storage.data_directory import make_directory
from tailrace.storage.index_publication import IndexFileSealer
from tailrace.storage.manifest_recording import decode_deleted, manifest_facts, stored_manifest_facts
from tailrace.storage.manifests.changes import is_same_incarnation
from tailrace.storage.manifests.model import (
    FencedError,
    ManifestConflictError,
    ManifestError,
    ManifestHead,
    StreamDeletedError,
    StreamFacts,
)
from tailrace.storage.manifests.store import ManifestStore, StoredHead
from tailrace.storage.meta_objects import DocumentObjects, MetaObjects, MetaObjectSealer, versions_within
from tailrace.storage.object_store.interface import (
    ObjectExistsError,
    ObjectStoreUnavailableError,
    open_object_store,
)
from tailrace.storage.object_store.request_stats import CountingObjectStore, RequestStats
from tailrace.storage.retention_rules import reached_by_forks
from tailrace.storage.sealer_client import (
    RECOVERY_KEY_VARIABLE,
    SealerJob,
    SealerReport,
    SealerSetup,
    SealerUsage,
)
from tailrace.storage.segments.index_files import PlanHistory
from tailrace.storage.segments.model import (
    EntryRange,
    SegmentFile,
    SegmentInfo,
    SegmentRows,
    footer_has_keys,
    stream_prefix,
)
from tailrace.storage.sweep import Orphan, Sweeper, has_same_stream, stored_plans

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore


class SegmentPortion(NamedTuple):
    """The rows of one segment: consecutive, of one epoch."""

    epoch: int
    runs: list[SegmentRows]


def slice_run(run: SegmentRows, begin: int, end: int, separator: int) -> SegmentRows:
    """Rows `begin` to `end` (exclusive) of a run, counted from 0."""
    if begin == 0 and end == len(run.ends):
        return run
    start = run.ends[begin - 1] + separator if begin else 0
    ends = run.ends[begin:end]
    if start:
        for index, stop in enumerate(ends):
            ends[index] = stop - start
    body = run.body[start : run.ends[end - 1]]
    keys = None if run.keys is None else run.keys[begin:end]
    return SegmentRows(run.first + begin, body, ends, run.times[begin:end], keys)


def split_into_segments(
    runs: Iterable[SegmentRows],
    epochs: Sequence[tuple[int, int]],
    separator: int,
    *,
    bytes_max: int,
    entries_max: int,
) -> Iterator[SegmentPortion]:
    """What goes into each segment: at most so many bytes and entries, one larger entry alone excepted."""
    held: list[SegmentRows] = []
    held_bytes = held_entries = 0
    epoch = 0
    for run in runs:
        at, count = 0, len(run.ends)
        while at < count:
            entry_epoch, epoch_last = _epoch_at(epochs, run.first + at)
            if held and (held_bytes >= bytes_max or held_entries >= entries_max or entry_epoch != epoch):
                yield SegmentPortion(epoch, held)
                held, held_bytes, held_entries = [], 0, 0
            epoch = entry_epoch
            start = run.ends[at - 1] + separator if at else 0
            reach = min(count, at + entries_max - held_entries, epoch_last - run.first + 1)
            stop = bisect_right(run.ends, start + bytes_max - held_bytes, at, reach)
            if stop == at:
                if held:
                    held_bytes = bytes_max  # the next entry does not fit any more
                    continue
                stop = at + 1
            held.append(slice_run(run, at, stop, separator))
            held_bytes += run.ends[stop - 1] - start
            held_entries += stop - at
            at = stop
    if held:
        yield SegmentPortion(epoch, held)


def _epoch_at(epochs: Sequence[tuple[int, int]], entry: int) -> tuple[int, int]:
    """The epoch an entry was written in, and the last entry that this epoch can have."""
    index = bisect_right(epochs, entry, key=lambda pair: pair[1]) - 1
    last = epochs[index + 1][1] - 1 if index + 1 < len(epochs) else 2**62
    return epochs[max(index, 0)][0], last


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
        """Whether more is recorded than the server knows of, possibly by an earlier job of this server."""
        if head.deleted is not None or head.uploaded_through <= job.sealed:
            return False
        return head.fence == self._manifests.fence or is_same_incarnation(facts, head)

    async def adopt(
        self, job: SealerJob, facts: StreamFacts, head: ManifestHead, report: SealerReport, count_max: int
    ) -> None:
        """Raises ManifestConflictError, changing nothing, if an entry differs from the hot store."""
        if not is_same_incarnation(facts, head):
            raise _conflict(facts, "that stream was created elsewhere")
        following = job.sealed + 1
        async for info in self._manifests.segments(head, following):
            if info.first != following:
                raise _conflict(facts, f"entry {following} is not recorded where it was sealed")
            report.footers.append(await self._footer(job.numbers[0], facts, info))
            report.segments.append(info)
            report.keyed = report.keyed or footer_has_keys(report.footers[-1])
            following = info.last + 1
            if len(report.segments) == count_max:
                break
        if not report.segments:
            raise _conflict(facts, f"entry {following} was trimmed there")
        report.generation = head.generation
        report.more = True  # the stream may have grown since, and its head may be stale

    async def _footer(self, number: int, facts: StreamFacts, info: SegmentInfo) -> bytes:
        """The footer of a segment that has the same entries as the hot store."""
        raw, _etag = await self._objects.get(stream_prefix(facts.stream_id) + info.key)
        loop = asyncio.get_running_loop()
        footer = await loop.run_in_executor(self._threads, self._compared, number, info, raw)
        if footer is None:
            raise _conflict(facts, f"entries {info.first} to {info.last} differ or are not here")
        return footer

    def _compared(self, number: int, info: SegmentInfo, raw: bytes) -> bytes | None:
        from tailrace.storage.segments import reader
        from tailrace.storage.segments.reader import file_footer, read_all_rows

        with self._store.snapshot():
            stream = self._store.stream_by_number(number)
            if stream is None:
                return None
            held = hot_runs_after(self._store, stream, info.first - 1)
            if not is_prefix_of(read_all_rows(raw, file_footer(raw)), held, stream.separator):
                return None
        tail = reader.find_tail(raw, len(raw))
        assert isinstance(tail, bytes), "the whole file was read"
        return reader.pack_tail(tail)


def hot_runs_after(store: StoredStreams, stream: Stream, entry: int) -> Iterator[SegmentRows]:
    """The entries of a stream in the hot store after an entry, in order."""
    following = entry + 1
    for row in store.db.blocks_from(stream.number, following):
        block = decode_block(row)
        assert block.first <= following <= block.last, f"entry {following} of {stream.name} is missing"
        run = SegmentRows(block.first, block.body, block.ends, block.times, block.keys)
        yield slice_run(run, following - block.first, len(block.ends), stream.separator)
        following = block.last + 1


def is_prefix_of(some: Iterable[SegmentRows], all_of: Iterator[SegmentRows], separator: int) -> bool:
    """Whether one starts with exactly the entries of the other, however they are split into runs."""
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
    """A run may have a list of keys that are all missing, or no list."""
    return one[:4] == other[:4] and _run_keys(one) == _run_keys(other)


def _run_keys(run: SegmentRows) -> list[bytes | None]:
    return run.keys or [None] * len(run.ends)


def _conflict(facts: StreamFacts, why: str) -> ManifestConflictError:
    return ManifestConflictError(
        facts.stream_id, f"the object store has other entries of {facts.name!r} than this server: {why}"
    )


logger = logging.getLogger("tailrace.sealer")

SEGMENTS_PER_JOB = 8
WRITER_THREADS = 2  # segments written at once; more uploads may be running
HEADS_IN_PARALLEL = 8
CONFIRM_S = 5.0
MS_NS = 1_000_000

StreamJob = Callable[[int], Awaitable[int]]


class SealSnapshot(NamedTuple):
    """A stream in one snapshot of the hot store, and the segments written from it."""

    facts: StreamFacts
    producers: dict[str, tuple[int, int]]
    as_of: int
    files: list[tuple[SegmentFile, Path]]
    more: bool
    documents: dict[str, bytes]
    keyed: bool = False


class Sealer:
    """Does jobs. Runs on its own loop; what reads SQLite and writes Parquet runs on threads."""

    def __init__(self, setup: SealerSetup) -> None:
        self._setup = setup
        self._limits = setup.limits
        self._spool = Path(setup.data_dir) / "spool"
        make_directory(self._spool)
        for leftover in self._spool.iterdir():
            leftover.unlink()  # of a sealer that was killed; its job is done again
        if setup.url.startswith("file:"):
            # A killed sealer may have left objects whose names a power cut would remove. Existing objects are
            # treated as durable, so they are synced here.
            os.sync()
        self._store = StoredStreams(Path(setup.data_dir) / "hot.db")
        self._book = RequestStats()
        self._objects = CountingObjectStore(open_object_store(setup.url, limits=setup.limits), self._book)
        self._manifests = ManifestStore(self._objects, setup.fence)
        self._ownership = BucketOwnership(self._objects)
        self._threads = ThreadPoolExecutor(WRITER_THREADS, "seal")
        recovery_key = os.environ.get(
            RECOVERY_KEY_VARIABLE, ""
        )  # not an argument: other users can read those
        self._meta = MetaObjectSealer(self._store, self._objects, setup.fence, recovery_key, self._threads)
        self._documents = DocumentObjects(MetaObjects(self._objects, setup.fence))
        self._index_files = IndexFileSealer(
            self._store, self._objects, self._manifests, self._threads, setup.limits
        )
        self._compact = CompactionSealer(
            self._store, self._objects, self._manifests, self._threads, setup.limits
        )
        self._adoption = SegmentAdoption(self._store, self._objects, self._manifests, self._threads)
        self._confirmed_s = 0.0

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
        await self._objects.close()

    async def do(self, job: SealerJob) -> SealerReport:
        """Never raises: what went wrong is in the report."""
        report = SealerReport(id=job.id)
        try:
            await self._confirm()
            if job.kind == "seal":
                await self._seal(job, report)
            elif job.kind == "meta":
                report.as_of = await self._meta.record(job.sealed)
            elif job.kind == "sweep":
                await self._sweep(job, report)
            elif job.kind == "compact":
                await self._compact.do(job, report)
            elif job.kind in ("publish", "plan"):
                await self._index_files.do(job, report)
            else:
                work = {"heads": self._head, "bury": self._bury, "trim": self._trim}
                await self._several(job, report, work[job.kind])
        except FencedError as error:
            report.error, report.trouble = str(error), "fenced"
        except ObjectStoreUnavailableError as error:
            report.error, report.trouble = str(error), "unavailable"
        except ManifestConflictError as error:
            report.error, report.trouble = str(error), "conflict"
        except ManifestError as error:
            report.error, report.trouble = str(error), "failed"
        except Exception as error:
            logger.exception("sealer job failed", extra=log_fields(kind=job.kind))
            report.error, report.trouble = f"{type(error).__name__}: {error}", "failed"
        objects = self._objects
        counts, heads, timings = self._book.drain()
        report.usage = SealerUsage(
            requests=dict(objects.requests),
            bytes_out=objects.bytes_out,
            bytes_in=objects.bytes_in,
            by_stream=counts,
            heads=heads,
            timings=timings,
        )
        return report

    async def _confirm(self) -> None:
        """A new stream has no head whose fence could refuse a write, so ownership is checked periodically."""
        if time.monotonic() - self._confirmed_s > CONFIRM_S:
            await self._ownership.confirm(self._setup.deployment, self._setup.fence)
            self._confirmed_s = time.monotonic()

    # -- segments --------------------------------------------------------------------------------------

    async def _seal(self, job: SealerJob, report: SealerReport) -> None:
        loop = asyncio.get_running_loop()
        number = job.numbers[0]
        facts = await loop.run_in_executor(self._threads, stored_manifest_facts, self._store, number)
        if facts is None:
            return  # removed meanwhile
        stored = await self._manifests.load(facts.stream_id)
        if stored is not None and self._adoption.is_ahead(stored.head, facts, job):
            await self._adoption.adopt(job, facts, stored.head, report, SEGMENTS_PER_JOB)
            return
        snapshot = await loop.run_in_executor(self._threads, self._write, number, job.sealed)
        if snapshot is None:
            return
        spooled = [path for _, path in snapshot.files]
        try:
            for file, _ in snapshot.files:
                await self._upload(stream_prefix(facts.stream_id) + file.info.key, spooled)
            failpoints.reached("seal.before_manifest")
            head = await self._publish(snapshot, stored)
            failpoints.reached("seal.after_manifest")
        except StreamDeletedError as error:
            report.refused, report.detail = "buried", str(error)
            return
        finally:
            for path in spooled:
                discard_file(path)
        report.segments = [file.info for file, _ in snapshot.files]
        report.footers = [file.footer for file, _ in snapshot.files]
        report.generation = head.generation
        report.keyed = snapshot.keyed
        report.more = snapshot.more
        report.as_of = 0 if snapshot.more else snapshot.as_of

    async def _publish(self, snapshot: SealSnapshot, stored: StoredHead | None) -> ManifestHead:
        added = [file.info for file, _ in snapshot.files]
        await self._documents.publish(snapshot.facts.stream_id, snapshot.documents, snapshot.as_of)
        return await self._manifests.publish(snapshot.facts, added, snapshot.producers, known=stored)

    async def _upload(self, key: str, spooled: list[Path]) -> None:
        """Uploads the first file in the spool and removes it."""
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(None, spooled[0].read_bytes)
        failpoints.reached("seal.before_upload")
        try:
            await self._objects.create(key, data)
        except ObjectExistsError:
            pass  # its name contains its hash: an earlier attempt got this far
        failpoints.reached("seal.after_upload")
        await loop.run_in_executor(None, discard_file, spooled.pop(0))

    # -- on threads --------------------------------------------------------------------------------------

    def _write(self, number: int, sealed: int) -> SealSnapshot | None:
        """Writes the entries after `sealed` from the hot store into the spool, up to the limit of one job."""
        spooled: list[Path] = []
        try:
            return self._write_into(spooled, number, sealed)
        except BaseException:
            for path in spooled:
                discard_file(path)  # the job is repeated, and may find other portions then
            raise

    def _write_into(self, spooled: list[Path], number: int, sealed: int) -> SealSnapshot | None:
        from tailrace.storage.segments.writer import write_segment

        with self._store.snapshot():
            stream = self._store.stream_by_number(number)
            if stream is None:
                return None
            as_of = self._store.db.journal_seq
            facts = manifest_facts(stream, as_of, self._store)
            files: list[tuple[SegmentFile, Path]] = []
            through, keyed = sealed, False
            for portion in self._portions(stream, sealed):
                if len(files) == SEGMENTS_PER_JOB:
                    break
                failpoints.reached("seal.before_write")
                path = self._spool / f"{number}-{portion.runs[0].first}.parquet"
                spooled.append(path)
                file = write_segment(
                    portion.runs,
                    path,
                    name=stream.name,
                    stream_id=facts.stream_id,
                    epoch=portion.epoch,
                    json=stream.json,
                    content_type=stream.content_type,
                    schema_versions=schema_versions(stream.documents, portion.runs),
                )
                files.append((file, path))
                through = file.info.last
                keyed = keyed or any(key is not None for run in portion.runs for key in run.keys or ())
                failpoints.reached("seal.after_write")
            producers = self._store.db.producers(number)
            documents = stream.documents or {}
            return SealSnapshot(facts, producers, as_of, files, through < stream.tail, documents, keyed)

    def _portions(self, stream: Stream, sealed: int) -> Iterator[SegmentPortion]:
        return split_into_segments(
            hot_runs_after(self._store, stream, sealed),
            stream.epochs,
            stream.separator,
            bytes_max=self._limits.seal_bytes,
            entries_max=self._limits.seal_entries,
        )

    # -- manifests alone ---------------------------------------------------------------------------------

    async def _several(self, job: SealerJob, report: SealerReport, one: StreamJob) -> None:
        """A few at a time. The first failure is reported with those that were done."""
        gate = asyncio.Semaphore(HEADS_IN_PARALLEL)
        loop = asyncio.get_running_loop()
        report.as_of = await loop.run_in_executor(self._threads, lambda: self._store.db.journal_seq)

        async def guarded(number: int) -> None:
            async with gate:
                report.done.append((number, await one(number)))

        outcomes = await asyncio.gather(*(guarded(number) for number in job.numbers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _head(self, number: int) -> int:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._look, number)
        if found is None:
            return 0
        await self._documents.publish(found.facts.stream_id, found.documents, found.as_of)
        try:
            return (await self._manifests.publish(found.facts, (), found.producers)).generation
        except StreamDeletedError:
            return 0

    def _look(self, number: int) -> SealSnapshot | None:
        with self._store.snapshot():
            stream = self._store.stream_by_number(number)
            if stream is None:
                return None
            as_of = self._store.db.journal_seq
            facts = manifest_facts(stream, as_of, self._store)
            return SealSnapshot(
                facts, self._store.db.producers(number), as_of, [], False, stream.documents or {}
            )

    async def _bury(self, number: int) -> int:
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(self._threads, self._grave, number)
        if raw is not None:
            stream, at_ns, reason = decode_deleted(raw)
            await self._manifests.delete_stream(manifest_facts(stream, 0), at_ns, reason)
        return 0

    async def _trim(self, number: int) -> int:
        """Deletes what neither the stream nor a fork of it shows any more."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._retained, number)
        if found is None:
            return 0  # removed meanwhile: all of it is deleted
        facts, earliest, reached = found
        failpoints.reached("retain.before_manifest")
        try:
            stored = await self._manifests.load(facts.stream_id)
            if stored is None or stored.head.fence < self._manifests.fence:
                # An empty fork of a trimmed stream, or ours from before another server took over.
                await self._manifests.publish(facts, known=stored)
            await self._manifests.trim(facts.stream_id, earliest, reached)
        except StreamDeletedError:
            pass
        return 0

    async def _sweep(self, job: SealerJob, report: SealerReport) -> None:
        """One step. Ownership is checked again, because only the owner deletes tombstones."""
        await self._ownership.confirm(self._setup.deployment, self._setup.fence)
        sweeper = Sweeper(
            self._objects,
            _log_orphan,
            owner=self._manifests,
            remembered=self._remembered,
            share=self._setup.share,
            owns=None if self._setup.share == "all" else self._owns,
            grace_ns=self._limits.sweep_age_ms * MS_NS,
            tombstone_ns=self._limits.tombstone_ms * MS_NS,
            segment_grace_ns=self._limits.gc_segment_grace * MS_NS,
            orphan_age_ns=self._limits.gc_orphan_age * MS_NS,
        )
        report.after = await sweeper.turn(job.after) or ""
        report.swept = sweeper.seen

    async def _owns(self, head: ManifestHead) -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, has_same_stream, self._store, head)

    async def _remembered(self, head: ManifestHead) -> PlanHistory:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, stored_plans, self._store, head)

    def _retained(self, number: int) -> tuple[StreamFacts, int, list[EntryRange]] | None:
        with self._store.snapshot():
            stream = self._store.stream_by_number(number)
            if stream is None:
                return None
            facts = manifest_facts(stream, self._store.db.journal_seq, self._store)
            return facts, stream.earliest, reached_by_forks(self._store.db, stream)

    def _grave(self, number: int) -> bytes | None:
        found = self._store.db.cold.deleted_streams(number - 1, 1)
        return found[0].image if found and found[0].number == number else None


def _log_orphan(orphan: Orphan) -> None:
    logger.info("deleted orphaned object", extra=log_fields(key=orphan.key, reason=orphan.reason))


def schema_versions(documents: dict[str, bytes] | None, runs: Sequence[SegmentRows]) -> str:
    """Which entries of a segment are of which version; nothing if the stream has no schema."""
    if documents is None or "schema" not in documents:
        return ""
    return versions_within(documents["schema"], runs[0].first, runs[-1].first + len(runs[-1].ends) - 1)


def discard_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def _read_jobs(loop: asyncio.AbstractEventLoop, take: Callable[[SealerJob], None]) -> None:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(take, msgspec.json.decode(line, type=SealerJob))
    os._exit(0)  # the server has exited; unfinished work is repeated


async def serve_jobs(setup: SealerSetup) -> None:
    sealer = Sealer(setup)
    tasks = TaskSet()
    loop = asyncio.get_running_loop()

    async def work(job: SealerJob) -> None:
        line = msgspec.json.encode(await sealer.do(job)) + b"\n"
        await loop.run_in_executor(None, _write_line, line)

    def take(job: SealerJob) -> None:
        tasks.start(work(job))

    threading.Thread(target=_read_jobs, args=(loop, take), daemon=True).start()
    await asyncio.Event().wait()


_output_lock = threading.Lock()


def _write_line(line: bytes) -> None:
    with _output_lock:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def main() -> None:
    process.lower_cpu_priority()
    failpoints.mark_child_process()
    configure_logging("warning", "auto")
    asyncio.run(serve_jobs(msgspec.json.decode(sys.argv[1], type=SealerSetup)))


if __name__ == "__main__":
    main()
