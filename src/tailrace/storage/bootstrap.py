"""Bootstrap: a server with an empty disk restores everything from the object store.

1. Take the bucket over with a higher fence, so that a server that still runs cannot change it any more.
2. Read every manifest and record in each that its stream continues in a new epoch.
3. Build a hot store from the manifests. Entries stay on the object store.

The hot store gets its final name at the very end: a bootstrap that is killed before starts over.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.common import failpoints
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.private_files import sync_directory
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet, run_all
from tailrace.log import system_streams
from tailrace.log.journal import JournalCorruptError, list_files
from tailrace.log.model import Tombstone
from tailrace.log.recovery import ReplayResult, replay_journal
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.data_directory import DataDirectory, make_directory
from tailrace.storage.hot_store.tables import SUBSCRIPTION_PREFIX
from tailrace.storage.manifests.model import HEAD_KEY, ManifestError, ManifestHead, decode_manifest
from tailrace.storage.manifests.store import StoredHead, TakeoverManifestStore
from tailrace.storage.meta_objects import (
    DocumentObjects,
    MetaCorruptError,
    MetaObjects,
    SubscriptionObject,
    put_server_facts,
    restore_secrets,
    restore_subscription,
    stream_tails,
)
from tailrace.storage.object_store.interface import (
    ObjectMissingError,
    ObjectStore,
    ObjectStoreError,
    open_object_store,
)
from tailrace.storage.object_store.listing import STREAMS_PREFIX, list_stream_ids
from tailrace.storage.restore import (
    FoundHead,
    RestoreOutcome,
    RestoreStore,
    SegmentTotals,
    WaitingHead,
    restored_head,
    restored_ranges,
    restored_stream,
)
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import SegmentInfo

logger = logging.getLogger("tailrace.bootstrap")

PROBLEMS_MAX = 100
LINE_S = 5.0
BAR_S = 0.2


class BootstrapReport(msgspec.Struct):
    """Counts, and what could not be restored as it was."""

    found: int = 0  # manifests, those of deleted streams included
    done: int = 0
    streams: int = 0
    forks: int = 0
    tombstones: int = 0
    segments: int = 0
    entries: int = 0
    payload_bytes: int = 0
    producers: int = 0
    subscriptions: int = 0
    seconds: float = 0.0
    problems_count: int = 0
    problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)
            logger.warning("bootstrap problem", extra=log_fields(problem=text))

    def summary(self) -> str:
        return (
            f"restored {self.streams} streams ({self.forks} of them forks) with {self.entries} entries and "
            f"{self.payload_bytes} bytes in {self.segments} segments, {self.tombstones} tombstones, "
            f"{self.producers} producers and {self.subscriptions} subscriptions in {self.seconds:.1f} s; "
            f"{self.problems_count} problems"
        )


@asynccontextmanager
async def show_progress(restored: BootstrapReport) -> AsyncGenerator[None]:
    """Shows the counts while they grow."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    work = _draw_progress_bar(restored) if sys.stderr.isatty() else _log_progress(restored)
    tasks = TaskSet()
    tasks.start(work)
    try:
        yield
    finally:
        restored.seconds = loop.time() - begun_s
        await tasks.close()


async def _log_progress(restored: BootstrapReport) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        fields = log_fields(
            done=restored.done,
            manifests=restored.found,
            entries=restored.entries,
            bytes=restored.payload_bytes,
        )
        logger.info("bootstrap progress", extra=fields)


async def _draw_progress_bar(restored: BootstrapReport) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("restoring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("streams", total=None, more="")

        def draw() -> None:
            more = f"{restored.entries:,} entries, {restored.payload_bytes / 1e6:,.1f} MB"
            progress.update(task, completed=restored.done, total=restored.found or None, more=more)

        try:
            while True:
                await asyncio.sleep(BAR_S)
                draw()
        finally:
            draw()


def is_bootstrapped(path: Path) -> bool:
    """Whether a bootstrap got as far as its last step here. Raises if the directory is in use."""
    hot = path / "hot.db"
    make_directory(path / "journal")
    if not hot.exists() and not list_files(path / "journal"):
        return False
    try:
        store = StoredStreams(hot)
        found = replay_journal(path / "journal", store)
        count = _count_streams(store, found)
        subscriptions = sum(key.startswith(SUBSCRIPTION_PREFIX) for key in found.streams.meta)
        finished = store.db.fact("bootstrapped_ns", None) is not None and not found.records
        store.db.close()
    except JournalCorruptError as error:
        raise _refusal(path, f"its journal cannot be read ({error})") from error
    if finished:
        return True
    if count or subscriptions:
        raise _refusal(path, f"it has {count} streams and {subscriptions} subscriptions")
    return False


def _count_streams(store: StoredStreams, found: ReplayResult) -> int:
    """Whether only system streams exist and the registry is empty, as after a start by mistake."""
    names = {name for name, _ in store.db.images_after("", "", 3)} | found.streams.by_name.keys()
    own = found.streams.find(system_streams.REGISTRY_STREAM)
    if names <= set(system_streams.BOUNDED_STREAMS) and (own is None or own.tail == 0):
        return 0
    return max(store.db.count_streams(), len(names))


def _refusal(path: Path, why: str) -> TailraceError:
    message = (
        f"--bootstrap needs a data directory without streams, but {path}: {why}. To continue with what "
        "is there, start without --bootstrap; to restore from the object store, move hot.db, hot.db-* and "
        "journal/ away first"
    )
    return TailraceError("unavailable", message)


WORK_DIRECTORY = "bootstrap"  # what is being built, in the data directory
LISTS_IN_PARALLEL = 16
RESTORE_BATCH = 1000
SEGMENTS_HELD = 20_000
EPOCHS_PER_OWNER = 1024  # more than one owner can use up on a name without a manifest that records it
T = TypeVar("T")


async def bootstrap(settings: Settings, directory: DataDirectory, clock: Clock) -> BootstrapReport:
    """Fills an empty data directory from the object store, or raises TailraceError and changes nothing."""
    restored = BootstrapReport()
    if is_bootstrapped(directory.path):
        logger.warning("bootstrap was completed before, starting from the restored directory")
        shutil.rmtree(directory.path / WORK_DIRECTORY, ignore_errors=True)
        return restored
    try:
        objects = open_object_store(settings.object_store_url, limits=settings.limits)
    except (ValueError, ObjectStoreError) as error:
        raise TailraceError("unavailable", str(error)) from error
    try:
        await Bootstrap(settings, directory, clock, objects, restored).run()
    except ObjectStoreError as error:
        raise TailraceError(
            "unavailable", f"the bootstrap failed and can be started again: {error}"
        ) from error
    finally:
        await objects.close()
    logger.warning("bootstrap completed", extra=log_fields(summary=restored.summary()))
    return restored


class Bootstrap:
    """One run. Requests to the object store are made on the loop, SQLite is used on one thread."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        clock: Clock,
        objects: ObjectStore,
        restored: BootstrapReport,
    ) -> None:
        self._settings = settings
        self._at_once = settings.limits.bootstrap_requests
        self._directory = directory
        self._clock = clock
        self._objects = objects
        self.restored = restored
        self._thread = ThreadPoolExecutor(1, "bootstrap")
        self._writing = asyncio.Lock()
        self._damaged: set[str] = set()
        self._outcomes: list[RestoreOutcome] = []
        self._segments: list[tuple[int, SegmentInfo]] = []
        self._index_files: list[tuple[int, IndexFile]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with show_progress(self.restored):
                work = await self._on_thread(self._clear)
                taken_over = await self._claim()
                claimed_s = loop.time()
                failpoints.reached("bootstrap.after_claim")
                self._store = await self._on_thread(lambda: RestoreStore(work))
                await self._round()
                if taken_over:
                    # The previous server may write for a moment before it notices.
                    settle_s = self._settings.limits.bootstrap_settle_ms / 1000
                    await asyncio.sleep(max(0.0, claimed_s + settle_s - loop.time()))
                    await self._round()
                await self._restore_meta()
                await self._on_thread(self._finish)
        finally:
            self._thread.shutdown(wait=True)

    def _clear(self) -> Path:
        """Removes what an earlier attempt left, and becomes a deployment that never owned this bucket."""
        path = self._directory.path
        for old in (path / "hot.db", path / "hot.db-wal", path / "hot.db-shm"):
            old.unlink(missing_ok=True)
        for _, file in list_files(path / "journal"):
            file.unlink()
        work = path / WORK_DIRECTORY
        shutil.rmtree(work, ignore_errors=True)
        make_directory(work)
        self._directory.become_new()
        return work

    async def _claim(self) -> bool:
        """Claims the bucket; whether it had an owner before."""
        ownership = BucketOwnership(self._objects, self._clock)
        before = await ownership.current()
        fence = await ownership.claim(self._directory.deployment, take_over=True)
        self._manifests = TakeoverManifestStore(self._objects, fence, clock=self._clock)
        logger.warning("bootstrap started", extra=log_fields(url=self._objects.url, fence=fence))
        return before is not None

    async def _round(self) -> None:
        """Everything that is in the bucket and was not found before."""
        await self._find()
        failpoints.reached("bootstrap.after_list")
        while waiting := await self._on_thread(lambda: self._store.next_waiting(RESTORE_BATCH)):
            await run_all(waiting, self._restore, at_once=self._at_once)
            await self._flush()
            failpoints.reached("bootstrap.after_batch")

    # -- finding ---------------------------------------------------------------------------------------

    async def _find(self) -> None:
        heads: list[FoundHead] = []

        async def load(found_id: str) -> None:
            head = await self._load(found_id)
            if head is not None:
                heads.append(head)
                self.restored.found += 1
            if len(heads) >= RESTORE_BATCH:
                batch, heads[:] = heads[:], []
                await self._on_thread(lambda: self._store.add_found(batch))

        async def shard(prefix: str) -> None:
            await run_all(self._unknown(prefix), load, at_once=max(1, self._at_once // LISTS_IN_PARALLEL))

        prefixes = (f"{STREAMS_PREFIX}{number:02x}/" for number in range(256))
        await run_all(prefixes, shard, at_once=LISTS_IN_PARALLEL)
        await self._on_thread(lambda: self._store.add_found(heads))

    async def _unknown(self, prefix: str) -> AsyncIterator[str]:
        page: list[str] = []
        async for found_id in list_stream_ids(self._objects, prefix):
            page.append(found_id)
            if len(page) == RESTORE_BATCH:
                for unknown in await self._on_thread(partial(self._store.unknown, page)):
                    yield unknown
                page = []
        for unknown in await self._on_thread(partial(self._store.unknown, page)):
            yield unknown

    async def _load(self, found_id: str) -> FoundHead | None:
        try:
            stored = await self._manifests.load(found_id)
        except ManifestError as error:
            if found_id not in self._damaged:
                self._damaged.add(found_id)
                self.restored.problem(str(error))
            return None
        if stored is None:
            return None  # segments without a manifest are garbage
        head, etag = stored
        source = None if head.parent is None or head.deleted is not None else head.parent.stream_id
        raw = msgspec.json.encode(head)
        return FoundHead(found_id, head.name, head.incarnation, source, etag, raw)

    # -- restoring -------------------------------------------------------------------------------------

    async def _restore(self, waiting: WaitingHead) -> None:
        try:
            await self._restore_one(waiting)
        except (ManifestError, ObjectMissingError) as error:
            found = decode_manifest(waiting.head, ManifestHead, waiting.stream_id, HEAD_KEY)
            self.restored.problem(f"{found.name}: {error}")
            # Recorded as unusable, so that no fork waits for it.
            stream = restored_stream(waiting.number, found, None, SegmentTotals(), 0)
            self._outcomes.append(RestoreOutcome("passed", stream))
        self.restored.done += 1

    async def _restore_one(self, waiting: WaitingHead) -> None:
        source = waiting.source
        known = StoredHead(
            decode_manifest(waiting.head, ManifestHead, waiting.stream_id, HEAD_KEY), waiting.etag
        )
        # Recorded before anything is served: new entries are of another epoch.
        head = await self._manifests.take_over(
            waiting.stream_id, lambda current: restored_head(current, source), known=known
        )
        failpoints.reached("bootstrap.after_take")
        if head.deleted is not None or not waiting.newest:
            self._bury(waiting, head)
            return
        producers = await self._manifests.producers(head)
        sums = await self._take_segments(waiting.number, head)
        await self._load_index_files(waiting.number, head)
        stream = restored_stream(waiting.number, head, source, sums, self._clock.now_ns())
        stream.documents = await self._take_documents(head, stream.tail)
        runs = restored_ranges(head, source, sums)
        self._outcomes.append(RestoreOutcome("stream", stream, head.generation, producers, runs=runs))
        restored = self.restored
        restored.streams += 1
        restored.entries += sums.entries
        restored.payload_bytes += sums.payload_bytes
        restored.producers += len(producers)
        if head.parent is not None:
            restored.forks += 1
            if source is None:
                restored.problem(
                    f"{head.name}: its source {head.parent.name} is missing; inherited entries are lost"
                )
            elif source.tail < known.head.fork_entry:
                lost = (
                    f"entries {source.tail + 1} to {known.head.fork_entry} of its source were never recorded"
                )
                restored.problem(f"{head.name}: {lost}")

    def _bury(self, waiting: WaitingHead, head: ManifestHead) -> None:
        stream = restored_stream(waiting.number, head, None, SegmentTotals(), 0)
        deleted = head.deleted
        if deleted is None:
            self._outcomes.append(RestoreOutcome("grave", stream))
        elif waiting.newest:
            tombstone = Tombstone(deleted.epoch, head.incarnation, deleted.at_ns, deleted.reason)
            self._outcomes.append(RestoreOutcome("tombstone", stream, tombstone=tombstone))
            self.restored.tombstones += 1
        else:
            self._outcomes.append(RestoreOutcome("passed", stream))

    async def _take_documents(self, head: ManifestHead, tail: int) -> dict[str, bytes] | None:
        """Reports a schema registry that cannot be read; the entries are restored without it."""
        documents: dict[str, bytes] = {}
        for key in head.meta_keys:
            objects = DocumentObjects(MetaObjects(self._objects, self._manifests.fence))
            try:
                documents[key] = await objects.restore(head.stream_id, key, tail)
            except MetaCorruptError as error:
                self.restored.problem(f"{head.name}: {error}")
        return documents or None

    async def _take_segments(self, number: int, head: ManifestHead) -> SegmentTotals:
        sums = SegmentTotals(head.earliest)
        async for info in self._manifests.segments(head):
            self._segments.append((number, info))
            sums.add(info)
            self.restored.segments += 1
            if len(self._segments) >= SEGMENTS_HELD:
                await self._flush()
        return sums

    async def _load_index_files(self, number: int, head: ManifestHead) -> None:
        """Of segments that are recorded, so they are as good as before."""
        async for index_file in self._manifests.index_files(head):
            self._index_files.append((number, index_file))
            if len(self._index_files) >= SEGMENTS_HELD:
                await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            outcomes, self._outcomes = self._outcomes, []
            segments, self._segments = self._segments, []
            index_files, self._index_files = self._index_files, []
            if outcomes or segments or index_files:
                await self._on_thread(lambda: self._store.put(outcomes, segments, index_files))

    # -- what is no stream -----------------------------------------------------------------------------

    async def _restore_meta(self) -> None:
        objects = MetaObjects(self._objects, self._manifests.fence)
        db = self._store.db

        async def subscription(key: str) -> None:
            try:
                loaded = await objects.load(key, SubscriptionObject)
                if loaded is None:
                    return
                names = [link.stream for link in loaded[0].links]
                tails = await self._on_thread(lambda: stream_tails(db, names))
                facts = await restore_subscription(objects, key, loaded[0], tails)
            except MetaCorruptError as error:
                self.restored.problem(str(error))
                return
            await self._on_thread(lambda: put_server_facts(db, facts))
            self.restored.subscriptions += loaded[0].config is not None

        await run_all(objects.subscription_keys(), subscription, at_once=self._at_once)
        try:
            secrets = await restore_secrets(objects, self._settings.recovery_key)
        except MetaCorruptError as error:
            self.restored.problem(f"{error}; webhooks are signed with new keys")
            return
        await self._on_thread(lambda: put_server_facts(db, secrets))

    # -- the end ---------------------------------------------------------------------------------------

    def _finish(self) -> None:
        now_ns = self._clock.now_ns()
        removed = self._store.settle_forks(now_ns)
        self.restored.streams -= removed
        self.restored.tombstones += removed
        # Names without a manifest may have been used as well, more than once.
        self._store.finish((self._manifests.fence - 1) * EPOCHS_PER_OWNER, now_ns)
        self._store.close()
        path = self._directory.path
        failpoints.reached("bootstrap.before_rename")
        sync_directory(path / WORK_DIRECTORY)
        (path / WORK_DIRECTORY / "hot.db").rename(path / "hot.db")
        sync_directory(path)
        failpoints.reached("bootstrap.after_rename")
        shutil.rmtree(path / WORK_DIRECTORY, ignore_errors=True)

    # -- in parallel -----------------------------------------------------------------------------------

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
