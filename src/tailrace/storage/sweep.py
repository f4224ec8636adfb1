"""The sweep: finds objects that no manifest can name any more and deletes them; its schedule.

Such objects are left by crashes, deletions and replacements. The sweep may run while a server is running and
be killed at any moment. An object is deleted only if no head can name it again:

- a segment, if its entries are recorded in other segments or its epoch has ended: after the last recorded
  entry there may be a running or repeated upload. A compacted segment stays for one more day;
- an index file that is not listed, after a day, if it cannot be published meanwhile; likewise a plan that no
  stream has and no index file was built with;
- a page or producers object, if the head does not name it and it is old: every attempt to change a head
  creates its own, and ends long before the grace time;
- anything in the folder of a deleted stream that was there around the time of the deletion.

Unneeded tombstones are deleted if the owner of the bucket sweeps (`owner`), or no server uses it (`offline`).
Folders without a head can be distinguished from new streams only when no server uses the bucket.

Several workers are one owner in several processes (`share`): general leftovers are deleted by the first one;
those of the pipeline by the worker that owns the stream, since it can lock out publications. Tombstones stay:
any worker may be recording a fork of that name.

On a server the sealer sweeps one page of the listing at a time, with pauses, so that sealing is not delayed.
The position is a fact of the log, so a restart continues there. A step that a crash interrupted is repeated.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from tailrace.common import failpoints
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.tasks import run_all
from tailrace.log.segment_catalogue import INDEX_DOCUMENT, decode_plans
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.manifests.changes import is_in_grace
from tailrace.storage.manifests.model import HEAD_KEY, HeadTombstone, ManifestCorruptError, ManifestHead
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.meta_objects import DocumentObject, MetaCorruptError, MetaObjects, document_key
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.object_store.listing import (
    LIST_PAGE,
    STREAMS_IN_PARALLEL,
    STREAMS_PREFIX,
    delete_keys,
    entry_range_of_key,
    epoch_of_key,
    stream_id_of_key,
)
from tailrace.storage.segments.index_files import IndexFile, PlanHistory, index_file_range, plan_name
from tailrace.storage.segments.model import stream_prefix

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.object_store.interface import ObjectInfo, ObjectStore
    from tailrace.storage.sealing import SealingService


_PLAN: Final = re.compile(r"plans/[0-9a-f]{64}\.json")

# The plans that the server has for a stream; those in the bucket may be older.
LookUpPlans = Callable[[ManifestHead], Awaitable[PlanHistory]]


def has_same_stream(store: StoredStreams, head: ManifestHead) -> bool:
    """On a thread: whether the hot store has the very stream of a manifest."""
    stream = store.stream_by_name(head.name)
    return stream is not None and stream.incarnation == head.incarnation


def stored_plans(store: StoredStreams, head: ManifestHead) -> PlanHistory:
    """On a thread: the plans of a stream in the hot store."""
    stream = store.stream_by_name(head.name)
    if stream is None or stream.incarnation != head.incarnation:
        return PlanHistory()
    return decode_plans(stream.documents)


async def superseded_plans(
    objects: ObjectStore,
    head: ManifestHead,
    index_files: AsyncIterator[IndexFile],
    found: Sequence[ObjectInfo],
    oldest_ns: int,
    remembered: LookUpPlans | None,
) -> list[ObjectInfo]:
    """Plans that are not current and that no index file was built with. No plan may be stored meanwhile.

    A stream has the hashes of some plans before the current one; the object of such a plan is needed only
    while an index file was built with it. A plan that is used again is stored again, so each object is
    checked once more: the listing may be out of date.
    """
    prefix = stream_prefix(head.stream_id)
    plans = [info for info in found if _PLAN.fullmatch(info.key.removeprefix(prefix))]
    book = await _recorded_plans(objects, head) if plans else None
    if book is None:
        return []
    books = [book] if remembered is None else [book, await remembered(head)]
    known = {each.wanted.hash for each in books if each.wanted is not None}
    known |= {one.plan_hash async for one in index_files}
    named = {prefix + plan_name(plan_hash) for plan_hash in known}
    return [
        info for info in plans if info.key not in named and await _is_older_than(objects, info.key, oldest_ns)
    ]


async def _recorded_plans(objects: ObjectStore, head: ManifestHead) -> PlanHistory | None:
    """The plans of a stream according to the bucket; None if they cannot be determined."""
    if INDEX_DOCUMENT not in head.meta_keys:
        return PlanHistory()
    try:
        found = await MetaObjects(objects, 0).load(
            document_key(head.stream_id, INDEX_DOCUMENT), DocumentObject
        )
        return None if found is None else decode_plans({INDEX_DOCUMENT: bytes(found[0].document)})
    except (MetaCorruptError, msgspec.DecodeError):
        return None


async def _is_older_than(objects: ObjectStore, key: str, oldest_ns: int) -> bool:
    try:
        return (await objects.head(key)).modified_ns <= oldest_ns
    except ObjectMissingError:
        return False


SECOND_NS = 10**9
GRACE_NS = 3600 * SECOND_NS
# A pipeline may take this long from its first object to the publication of all.
INDEX_FILE_NS = 24 * 3600 * SECOND_NS
# Another life of a name gets the same folder only after its tombstone was forgotten, much later than this.
OLD_INCARNATION_NS = 24 * 3600 * SECOND_NS
# Readers and queries may still use segments that were merged.
SEGMENT_NS = 24 * 3600 * SECOND_NS
READ_ATTEMPTS_MAX = 5

# The part of one of several sweepers of a bucket: everything, or a worker's part.
SweepShare = Literal["all", "first", "rest"]
# Whether a living stream is this worker's.
OwnsStream = Callable[[ManifestHead], Awaitable[bool]]


class Orphan(msgspec.Struct, frozen=True):
    """An object that may be deleted."""

    key: str
    bytes: int
    modified_ns: int
    reason: str


class SweepReport(msgspec.Struct, omit_defaults=True):
    streams: int = 0
    objects: int = 0  # examined
    orphans: int = 0
    orphan_bytes: int = 0
    unclaimed: int = 0  # objects in folders without a head
    tombstones: int = 0  # that may be forgotten
    forgotten: int = 0  # of these
    unreadable: int = 0  # streams with a damaged manifest

    def add(self, other: SweepReport) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Sweeper:
    """Sweeps one bucket. `report` is called with each orphan before it is deleted.

    `owner`: the manifests of the server that owns the bucket, if it runs in this process. `remembered`: the
    plans that it knows. `owns`: the streams that it owns, if it is one of several workers.
    """

    def __init__(
        self,
        objects: ObjectStore,
        report: Callable[[Orphan], None],
        *,
        owner: ManifestStore | None = None,
        remembered: LookUpPlans | None = None,
        share: SweepShare = "all",
        owns: OwnsStream | None = None,
        grace_ns: int = GRACE_NS,
        tombstone_ns: int,
        segment_grace_ns: int = SEGMENT_NS,
        orphan_age_ns: int = INDEX_FILE_NS,
        dry_run: bool = False,
        offline: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._objects = objects
        self._owner = owner
        self._remembered = remembered
        assert (share == "all") == (owns is None)
        self._share: SweepShare = share
        self._owns = owns
        self._manifests = owner or ManifestStore(objects, 0)
        self._report = report
        self._grace_ns = grace_ns
        self._tombstone_ns = tombstone_ns
        self._segment_grace_ns = segment_grace_ns
        self._orphan_age_ns = orphan_age_ns
        self._old_life_ns = min(OLD_INCARNATION_NS, tombstone_ns)
        self._dry_run = dry_run
        self._offline = offline
        self._clock = clock
        self.seen = SweepReport()

    async def bucket(self) -> SweepReport:
        after: str | None = ""
        while after is not None:
            after = await self.turn(after)
        return self.seen

    async def turn(self, after: str = "") -> str | None:
        """One page of the bucket's listing after a key; returns where the next starts, None at the end."""
        found = await self._objects.list_after(STREAMS_PREFIX, after, LIST_PAGE)
        folders: dict[str, list[ObjectInfo]] = {}
        for info in found:
            stream_id = stream_id_of_key(info.key)
            if stream_id is not None:
                folders.setdefault(stream_id, []).append(info)
        self.seen.streams += len(folders.keys() - {stream_id_of_key(after)})
        await run_all(folders.items(), lambda folder: self._folder(*folder), at_once=STREAMS_IN_PARALLEL)
        return found[-1].key if len(found) == LIST_PAGE else None

    async def _folder(self, stream_id: str, found: list[ObjectInfo]) -> None:
        """A part of the objects in the folder of a stream.

        The head is read after the listing: what a newer head names was created later, or is young. It is read
        only if there is something to judge.
        """
        self.seen.objects += len(found)
        head_key = stream_prefix(stream_id) + HEAD_KEY
        now_ns = self._clock.now_ns()
        old = [info for info in found if info.modified_ns <= now_ns - self._grace_ns and info.key != head_key]
        # Plans of a deleted stream are deleted with it; others only if no plan can be stored meanwhile.
        kinds = ("companions", "plans") if self._owner or self._offline else ("companions",)
        pipelines = tuple(f"{stream_prefix(stream_id)}{kind}/" for kind in kinds)
        try:
            made = [info for info in old if info.key.startswith(pipelines)]
            old = [info for info in old if not info.key.startswith(pipelines)]
            if made:
                await self._made_by_pipelines(stream_id, made, now_ns)
            if self._share == "rest":
                return
            if old:
                await self._drop(await self._judge(stream_id, old))
            before_ns = now_ns - self._tombstone_ns
            written_ns = next((info.modified_ns for info in found if info.key == head_key), None)
            if written_ns is not None and (self._offline or written_ns < before_ns):
                await self._tombstone(stream_id, before_ns)
        except ManifestCorruptError:
            self.seen.unreadable += 1  # it may name anything, so nothing of it goes

    async def _drop(self, orphans: list[Orphan]) -> None:
        for orphan in orphans:
            self.seen.orphans += 1
            self.seen.orphan_bytes += orphan.bytes
            self._report(orphan)
        if orphans and not self._dry_run:
            failpoints.reached("gc.before_sweep")
            await delete_keys(self._objects, [orphan.key for orphan in orphans])
            failpoints.reached("gc.after_sweep")

    async def _made_by_pipelines(self, stream_id: str, old: list[ObjectInfo], now_ns: int) -> None:
        """Index files that no manifest lists and no pipeline is about to publish, and unneeded plans.

        A pipeline that repeats its work finds an object of the same name and publishes it. So nothing may be
        published while an object is judged and deleted: only the owner, or an offline sweep, can ensure that.
        """
        if self._owner is None and not self._offline:
            return
        async with self._manifests.lock(stream_id):
            stored = await self._manifests.load(stream_id)
            if stored is None or stored.head.deleted is not None:
                if self._share != "rest":
                    await self._drop(await self._judge(stream_id, old))
                return
            if self._owns is not None and not await self._owns(stored.head):
                return
            oldest_ns = now_ns if self._offline else now_ns - self._orphan_age_ns
            old = [info for info in old if info.modified_ns <= oldest_ns]
            await self._drop(await self._unlisted(stored.head, old, oldest_ns))
            listed = self._manifests.index_files(stored.head)
            plans = await superseded_plans(
                self._objects, stored.head, listed, old, oldest_ns, self._remembered
            )
            await self._drop([_orphan(info, "another plan has replaced it") for info in plans])

    async def _unlisted(self, head: ManifestHead, old: list[ObjectInfo], oldest_ns: int) -> list[Orphan]:
        prefix = stream_prefix(head.stream_id)
        found = [info for info in old if index_file_range(info.key.removeprefix(prefix)) is not None]
        if not found:
            return []
        named = {one.object async for one in self._manifests.index_files(head)}
        named |= {one.object for one in head.retired if one.at_ns > oldest_ns}
        reason = "the manifest does not list it"
        return [_orphan(info, reason) for info in found if info.key.removeprefix(prefix) not in named]

    async def _judge(self, stream_id: str, old: list[ObjectInfo]) -> list[Orphan]:
        for _look in range(READ_ATTEMPTS_MAX):
            stored = await self._manifests.load(stream_id)
            if stored is None:
                self.seen.unclaimed += len(old)
                return [_orphan(info, "its stream has no manifest") for info in old if self._offline]
            if stored.head.deleted is not None:
                return self._of_deleted(old, stored.head.deleted)
            try:
                return await self._of_living(old, stored.head)
            except ObjectMissingError:
                continue  # a page was deleted meanwhile: there is a newer head
        return []

    async def _of_living(self, old: list[ObjectInfo], head: ManifestHead) -> list[Orphan]:
        prefix = stream_prefix(head.stream_id)
        named = await self._named(old, head)
        orphans: list[Orphan] = []
        for info in old:
            key = info.key.removeprefix(prefix)
            kind = key.partition("/")[0]
            if key in named or kind not in ("segments", "manifest", "producers", "catalogue"):
                continue
            if kind != "segments":
                orphans.append(_orphan(info, "the manifest does not name it"))
            elif _is_obsolete(key, head) and not self._is_in_grace(key, head):
                orphans.append(_orphan(info, "other segments have replaced it"))
        return orphans

    def _is_in_grace(self, key: str, head: ManifestHead) -> bool:
        entries = entry_range_of_key(key)
        after_ns = self._clock.now_ns() - self._segment_grace_ns
        return entries is not None and is_in_grace(head, *entries, after_ns)

    async def _named(self, old: list[ObjectInfo], head: ManifestHead) -> set[str]:
        """The keys that the head names, as far as the objects of this page of the listing are concerned."""
        prefix = stream_prefix(head.stream_id)
        named = {head.producers_key or ""}
        keys = [info.key.removeprefix(prefix) for info in old]
        if any(key.startswith("manifest/") for key in keys):
            named |= {ref.key async for ref in self._manifests.pages(head.stream_id).walk_pages(head.pages)}
        if any(key.startswith("catalogue/") for key in keys):
            pages = self._manifests.index_file_pages(head.stream_id)
            named |= {ref.key async for ref in pages.walk_pages(head.index_file_pages)}
        ranges = [
            entries for key in keys if key.startswith("segments/") and (entries := entry_range_of_key(key))
        ]
        if ranges:
            last = max(entries[1] for entries in ranges)
            async for info in self._manifests.segments(head, min(entries[0] for entries in ranges)):
                if info.first > last:
                    break
                named.add(info.key)
        return named

    def _of_deleted(self, old: list[ObjectInfo], deleted: HeadTombstone) -> list[Orphan]:
        reason = f"its stream was {deleted.reason}"
        before_ns = deleted.at_ns + self._old_life_ns
        return [_orphan(info, reason) for info in old if info.modified_ns < before_ns]

    async def _tombstone(self, stream_id: str, before_ns: int) -> None:
        stored = await self._manifests.load(stream_id)
        if stored is None or stored.head.deleted is None or stored.head.deleted.at_ns >= before_ns:
            return
        self.seen.tombstones += 1
        owner = ManifestStore(self._objects, stored.head.fence) if self._offline else self._owner
        if owner is not None and self._share == "all" and not self._dry_run:
            self.seen.forgotten += await owner.forget(stream_id, before_ns)


def _is_obsolete(key: str, head: ManifestHead) -> bool:
    """Whether an unrecorded segment can never be recorded: only the entry after the last one can follow."""
    entries, epoch = entry_range_of_key(key), epoch_of_key(key)
    if entries is None or epoch is None:
        return False
    return entries[0] <= head.uploaded_through or epoch < head.epoch


def _orphan(info: ObjectInfo, reason: str) -> Orphan:
    return Orphan(info.key, info.size, info.modified_ns, reason)


SWEEP_FACT: Final = "swept"
MS_NS: Final = 1_000_000
FIRST_S_MAX: Final = 600.0  # until the first step after a start
SWEEP_CHECK_S: Final = 60.0
SWEEP_PAUSE_S: Final = 0.5
SWEEP_PAUSE_SHARE: Final = 4.0  # the pause after a step, as a multiple of its duration
STEPS_PER_SAVE: Final = 16  # up to so many steps are repeated after a crash


class SweepProgress(NamedTuple):
    """When the current pass started, or the last one if `after` is empty; the last key reached."""

    begun_ns: int
    after: str

    @classmethod
    def decode(cls, value: bytes) -> SweepProgress:
        begun, _, after = value.decode().partition(" ")
        return cls(int(begun), after)

    def encode(self) -> bytes:
        return f"{self.begun_ns} {self.after}".encode()


class SweepSchedule:
    """Runs the sweep one step at a time."""

    def __init__(self, sealing: SealingService, log: Log) -> None:
        self._sealing = sealing
        self._log = log
        self._interval_ns = log.limits.sweep_interval_ms * MS_NS
        self._progress: SweepProgress | None = None
        self._running = False
        self._next_s: float | None = None
        self._steps = 0
        self.passes = 0
        self.seen = SweepReport()

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.sweeps.read = lambda: self.passes
        metrics.swept_objects.read = lambda: self.seen.objects
        metrics.swept_orphans.read = lambda: self.seen.orphans
        metrics.swept_orphan_bytes.read = lambda: self.seen.orphan_bytes
        metrics.swept_tombstones.read = lambda: self.seen.forgotten

    def poll(self, now_s: float) -> None:
        """Starts a step if one is due."""
        if not self._interval_ns or self._running or self._log.refusal is not None:
            return
        if self._next_s is None:
            self._next_s = now_s + min(self._interval_ns / 1e9, FIRST_S_MAX)
        if now_s < self._next_s:
            return
        progress = self._due()
        if progress is None:
            self._next_s = now_s + min(self._interval_ns / 1e9, SWEEP_CHECK_S)
            return
        self._running = True
        self._sealing.tasks.start(self._step(progress, now_s))

    def _due(self) -> SweepProgress | None:
        """Where the next step starts; None if none is due."""
        now_ns = self._log.clock.now_ns()
        saved = self._log.streams.meta.get(SWEEP_FACT)
        if self._progress is None and saved is not None:
            self._progress = SweepProgress.decode(saved)
        if self._progress is None:
            # There is nothing to sweep before the first seal.
            return None if self._sealing.sealer is None else SweepProgress(now_ns, "")
        if self._progress.after:
            return self._progress
        # A clock that was set back must not stop the sweep.
        waited_ns = abs(now_ns - self._progress.begun_ns)
        return SweepProgress(now_ns, "") if waited_ns >= self._interval_ns else None

    async def _step(self, progress: SweepProgress, started_s: float) -> None:
        pause_s = SWEEP_CHECK_S
        try:
            report = await self._sealing.run_job("sweep", [], after=progress.after)
            if report.error:
                return
            self.seen.add(report.swept)
            self._steps += 1
            self.passes += not report.after
            self._progress = progress._replace(after=report.after)
            if not report.after or self._steps % STEPS_PER_SAVE == 0:
                self._log.put_meta(SWEEP_FACT, self._progress.encode())
            pause_s = max(SWEEP_PAUSE_S, SWEEP_PAUSE_SHARE * (self._sealing.now_s() - started_s))
        except TailraceError:
            pass  # the journal is unavailable: only the progress is not saved
        finally:
            self._running = False
            self._next_s = self._sealing.now_s() + pause_s
