"""The manifests of a bucket: loading, conditional replacement under a fence, takeover, lookup by name.

Every change is one conditional replacement of the head: the objects it names are created before, those it no
longer names are deleted after. So a crash leaves either the old or the new manifest, and at most objects that
nothing refers to. A change may be repeated at any time; what is recorded already stays as it is. Within a
process the changes of one stream are serialized by a lock.

Owners are ordered by their fence. A head with a higher fence belongs to a later owner and is never written. A
head with a lower fence has to be adopted before it is changed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tailrace.common import failpoints
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.logging_setup import log_fields
from tailrace.storage.manifests import pages as manifest_pages
from tailrace.storage.manifests.changes import (
    base_head,
    change_index_files,
    compact_head,
    is_newest_tail_state,
    is_same_incarnation,
    retire_objects,
    tombstone_head,
    with_facts,
)
from tailrace.storage.manifests.model import (
    HEAD_KEY,
    FencedError,
    ManifestConflictError,
    ManifestCorruptError,
    ManifestHead,
    RecordedProducers,
    StreamFacts,
    decode_manifest,
    encode_manifest,
    new_attempt_id,
    producers_key,
    sha256_of,
)
from tailrace.storage.manifests.pages import (
    IndexFilePages,
    ListedIndexFiles,
    ListedSegments,
    SegmentPages,
    append_segments,
)
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectMissingError,
    ObjectStoreUnavailableError,
)
from tailrace.storage.object_store.listing import (
    delete_folder,
    delete_keys,
    delete_trimmed,
    holds_only,
    list_stream_ids,
)
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import (
    EntryRange,
    RetainedRanges,
    SegmentInfo,
    make_stream_id,
    stream_prefix,
)

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore


class StreamLocks:
    """Locks by stream id, created on use and dropped after it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def lock(self, stream_id: str) -> AsyncGenerator[None]:
        lock = self._locks.setdefault(stream_id, asyncio.Lock())
        self._users[stream_id] = self._users.get(stream_id, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[stream_id] -= 1
            if not self._users[stream_id]:
                del self._users[stream_id], self._locks[stream_id]


logger = logging.getLogger("tailrace.store")

# A lost race means that another writer made progress; so many in a row are an error.
CHANGE_ATTEMPTS_MAX = 16
# A process that was suspended for longer creates its pages again: the sweep may have deleted them as orphans.
PLAN_NS_MAX = 10 * 60 * 10**9


class StoredHead(NamedTuple):
    """A head in the bucket and its etag."""

    head: ManifestHead
    etag: str


class HeadChange(NamedTuple):
    """The new head, and the keys it no longer needs."""

    head: ManifestHead
    superseded: Sequence[str] = ()


PlanHeadChange = Callable[[ManifestHead | None], Awaitable[HeadChange]]


class ManifestStore:
    """Reads and changes all manifests of a bucket, as one owner with one fence."""

    def __init__(
        self,
        objects: ObjectStore,
        fence: int,
        *,
        segments_max: int = manifest_pages.HEAD_SEGMENTS_MAX,
        pages_max: int = manifest_pages.SEGMENT_PAGES_MAX,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self.fence = fence
        self._segments_max = segments_max
        self._pages_max = pages_max
        self._locks = StreamLocks()

    # -- reading -----------------------------------------------------------------------------------------

    async def load(self, stream_id: str) -> StoredHead | None:
        try:
            data, etag = await self._objects.get(stream_prefix(stream_id) + HEAD_KEY)
        except ObjectMissingError:
            return None
        head = decode_manifest(data, ManifestHead, stream_id, HEAD_KEY)
        if head.stream_id != stream_id:
            raise ManifestCorruptError(stream_id, f"{HEAD_KEY} is the head of {head.stream_id}")
        return StoredHead(head, etag)

    def segments(self, head: ManifestHead, from_entry: int = 0) -> AsyncIterator[SegmentInfo]:
        """Every segment with entries at or after `from_entry`, oldest first, including those in pages."""
        return self.pages(head.stream_id).walk(ListedSegments(head.pages, head.segments), from_entry)

    async def producers(self, head: ManifestHead) -> dict[str, tuple[int, int]]:
        """Producer states as of the head's `tail`."""
        key = head.producers_key
        if key is None:
            return {}
        data, _etag = await self._objects.get(stream_prefix(head.stream_id) + key)
        if key != producers_key(_generation_of(key), sha256_of(data)):
            raise ManifestCorruptError(head.stream_id, f"the content of {key} does not match its hash")
        return decode_manifest(data, RecordedProducers, head.stream_id, key).producers

    def pages(self, stream_id: str) -> SegmentPages:
        return SegmentPages(self._objects, stream_id, self._segments_max, self._pages_max)

    # -- changing ----------------------------------------------------------------------------------------

    async def publish(
        self,
        facts: StreamFacts,
        added: Sequence[SegmentInfo] = (),
        producers: Mapping[str, tuple[int, int]] | None = None,
        *,
        known: StoredHead | None = None,
    ) -> ManifestHead:
        """Records uploaded segments, and the state of the stream in the snapshot they come from.

        Segments that are recorded already are skipped; the others must follow the last recorded entry.
        `producers=None` leaves the producers unchanged. `known` is a head that was just loaded, to save a
        get. Returns the recorded head.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            base = base_head(facts, current, self.fence)
            new = await self._unrecorded(base, added)
            segments = append_segments(base, new)
            through = new[-1].last if new else base.uploaded_through
            head = msgspec.structs.replace(base, segments=segments, uploaded_through=through)
            superseded: list[str] = []
            if producers is not None and is_newest_tail_state(facts, base, head, self.fence):
                head = await self._with_producers(head, producers)
                if base.producers_key is not None and base.producers_key != head.producers_key:
                    superseded.append(base.producers_key)
            head = with_facts(facts, base, head, self.fence)
            listed = await self.pages(head.stream_id).roll(ListedSegments(head.pages, head.segments))
            head = msgspec.structs.replace(head, pages=listed.pages, segments=listed.segments)
            return HeadChange(head, superseded)

        return await self._change(facts.stream_id, plan, known, facts=facts)

    async def take_fence(
        self, stream_id: str, epochs: tuple[tuple[int, int], ...] | None = None
    ) -> ManifestHead:
        """Writes our fence into the head of an earlier owner, which cannot change it from then on.

        A server that restores a stream does this before it serves it, with the epoch it continues in. No
        other change is made to a head that was not adopted, unless it is our own from before another server
        owned the bucket: only then does it have our entries.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            if current is None:
                raise ManifestConflictError(stream_id, "there is no head to adopt")
            as_of = current.as_of if current.fence == self.fence else 0
            return HeadChange(msgspec.structs.replace(current, epochs=epochs or current.epochs, as_of=as_of))

        return await self._change(stream_id, plan, adopting=True)

    async def trim(self, stream_id: str, earliest: int, reached: Sequence[EntryRange] = ()) -> ManifestHead:
        """Unlists and deletes the segments that end at entry `earliest` or before.

        Those with entries that are `reached` by forks stay, in the manifest as well, although the stream
        itself no longer shows them.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            if current is None or earliest > current.uploaded_through:
                raise ManifestConflictError(
                    stream_id, f"entry {earliest} is not recorded and cannot be trimmed"
                )
            if current.deleted is not None:
                return HeadChange(current)
            retained = RetainedRanges(max(earliest, current.earliest), reached)
            cut = await self.pages(stream_id).cut(ListedSegments(current.pages, current.segments), retained)
            pages, segments = cut.listed
            head = msgspec.structs.replace(
                current, pages=pages, segments=segments, earliest=retained.earliest
            )
            head, superseded = await self._trim_companions(head)
            return HeadChange(head, [*cut.superseded, *superseded])

        head = await self._change(stream_id, plan)
        failpoints.reached("gc.before_delete")
        retained = RetainedRanges(head.earliest, reached)
        await delete_trimmed(self._objects, stream_prefix(stream_id), head.epochs, retained)
        failpoints.reached("gc.after_delete")
        return head

    async def publish_companions(
        self, stream_id: str, added: Sequence[IndexFile], removed: Sequence[str]
    ) -> tuple[ManifestHead, list[IndexFile]]:
        """Lists index files in place of others, in one step. Also returns those that were not listed before.

        Raises IndexFileMissingError and changes nothing if an object is missing.
        """
        new: list[IndexFile] = []

        async def plan(current: ManifestHead | None) -> HeadChange:
            nonlocal new
            if current is None:
                raise ManifestConflictError(stream_id, "there is no head to list index files in")
            changed = await change_index_files(self._objects, current, added, removed, self._clock.now_ns())
            new = changed.added
            return HeadChange(changed.head, changed.superseded)

        return await self._change(stream_id, plan), new

    async def compact(
        self, stream_id: str, joined: SegmentInfo, replaced: Sequence[SegmentInfo], grace_ns: int
    ) -> ManifestHead:
        """Lists one segment in place of several, in one step. Their objects stay for the grace time.

        If it is listed already, nothing changes. Raises ManifestConflictError if other segments are listed.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            if current is None:
                raise ManifestConflictError(stream_id, "there is no head to list segments in")
            now_ns, pages = self._clock.now_ns(), self.pages(stream_id)
            return HeadChange(*await compact_head(pages, current, joined, replaced, now_ns, grace_ns))

        return await self._change(stream_id, plan)

    def lock(self, stream_id: str) -> AbstractAsyncContextManager[None]:
        """Locks the manifest of a stream against other changes by this process."""
        return self._locks.lock(stream_id)

    def companion_pages(self, stream_id: str) -> IndexFilePages:
        return IndexFilePages(self._objects, stream_id)

    def companions(self, head: ManifestHead) -> AsyncIterator[IndexFile]:
        """Every index file that a head lists."""
        listed = ListedIndexFiles(head.companion_pages, head.companions)
        return IndexFilePages(self._objects, head.stream_id).walk(listed)

    async def _trim_companions(self, head: ManifestHead) -> tuple[ManifestHead, list[str]]:
        """Unlists index files of trimmed entries, and aggregates that include some."""
        pages = IndexFilePages(self._objects, head.stream_id)
        listed = ListedIndexFiles(head.companion_pages, head.companions)
        rest, gone = await pages.trimmed(listed, head.earliest)
        if not gone:
            return head, []
        stay, ripe = retire_objects(head, set(gone), set(), self._clock.now_ns())
        head = msgspec.structs.replace(
            head, companion_pages=rest.pages, companions=rest.companions, retired=stay
        )
        return head, [*pages.superseded, *ripe]

    async def delete_stream(self, facts: StreamFacts, at_ns: int, reason: str) -> ManifestHead:
        """Replaces the head by a tombstone, then deletes everything else of the stream.

        Raises ManifestConflictError if the head is still of this stream afterwards. The head of a later
        stream of the same name stays as it is: the earlier one was deleted before that was recorded.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            return HeadChange(tombstone_head(facts, current, self.fence, at_ns, reason))

        head = await self._change(facts.stream_id, plan, facts=facts)
        if head.deleted is not None:
            failpoints.reached("gc.before_delete")
            await delete_folder(self._objects, stream_prefix(facts.stream_id), keep=HEAD_KEY)
            failpoints.reached("gc.after_delete")
        elif head.created_ns == facts.created_ns:
            raise ManifestConflictError(facts.stream_id, "the head was not replaced by a tombstone")
        return head

    async def forget(self, stream_id: str, before_ns: int) -> bool:
        """Deletes a tombstone older than `before_ns`; True if it was deleted.

        Only for the owner: a delete has no condition, so no other process may write to the stream. A
        tombstone stays while there are other objects in the folder: they are orphans, which the sweep deletes
        first, or the name is in use again and not recorded yet.
        """
        prefix = stream_prefix(stream_id)
        async with self._locks.lock(stream_id):
            stored = await self.load(stream_id)
            if stored is None or stored.head.deleted is None or stored.head.deleted.at_ns >= before_ns:
                return False
            self._check_fence(stored.head, adopting=True)
            if not await holds_only(self._objects, prefix, HEAD_KEY):
                return False
            failpoints.reached("gc.before_forget")
            await self._objects.delete([prefix + HEAD_KEY])
        return True

    async def _change(
        self,
        stream_id: str,
        plan: PlanHeadChange,
        known: StoredHead | None = None,
        *,
        facts: StreamFacts | None = None,
        adopting: bool = False,
    ) -> ManifestHead:
        """Plans a new head from the current one and replaces it, repeating after a lost race."""
        async with self._locks.lock(stream_id):
            return await self._change_locked(stream_id, plan, known, facts, adopting)

    async def _change_locked(
        self,
        stream_id: str,
        plan: PlanHeadChange,
        known: StoredHead | None,
        facts: StreamFacts | None,
        adopting: bool,
    ) -> ManifestHead:
        prefix = stream_prefix(stream_id)
        for _attempt in range(CHANGE_ATTEMPTS_MAX):
            stored, known = known or await self.load(stream_id), None
            current = None if stored is None else stored.head
            if current is not None:
                same = facts is not None and is_same_incarnation(facts, current)
                self._check_fence(current, adopting=adopting or same)
            planned_ns = self._clock.now_ns()
            try:
                change = await plan(current)
            except ObjectMissingError:
                # Another writer may have replaced a page; one that the current head names is lost.
                if stored is None or await self.load(stream_id) == stored:
                    raise
                continue
            if current is not None and change.head == current and current.fence == self.fence:
                return current
            if self._clock.now_ns() - planned_ns > PLAN_NS_MAX:
                continue
            head = msgspec.structs.replace(
                change.head, fence=self.fence, generation=change.head.generation + 1
            )
            if await self._replace(
                prefix + HEAD_KEY, encode_manifest(head), None if stored is None else stored.etag
            ):
                await self._drop([prefix + key for key in change.superseded])
                return head
        raise ManifestConflictError(
            stream_id, f"the head changed {CHANGE_ATTEMPTS_MAX} times while it was written"
        )

    async def _replace(self, key: str, data: bytes, etag: str | None) -> bool:
        try:
            await self._objects.replace(key, data, etag)
        except ObjectConflictError:
            # Our own earlier attempt may have succeeded although its response was lost.
            try:
                found, _etag = await self._objects.get(key)
            except ObjectMissingError:
                return False
            return found == data
        return True

    async def _drop(self, keys: Sequence[str]) -> None:
        """Deletes what the new head does not name. A failure is harmless: the sweep deletes the rest."""
        try:
            await delete_keys(self._objects, keys)
        except ObjectStoreUnavailableError as error:
            logger.info(
                "cannot delete superseded objects, left to the sweep", extra=log_fields(error=str(error))
            )

    def _check_fence(self, head: ManifestHead, *, adopting: bool = False) -> None:
        if head.fence > self.fence:
            raise FencedError(f"the bucket has a new owner (fence {head.fence}, ours is {self.fence})")
        if head.fence < self.fence and not adopting:
            # Its entries may differ from ours although they have the same numbers.
            message = f"the head was recorded by an earlier owner (fence {head.fence}) and not adopted"
            raise ManifestConflictError(head.stream_id, message)

    async def _unrecorded(self, base: ManifestHead, added: Sequence[SegmentInfo]) -> Sequence[SegmentInfo]:
        """The segments after what is recorded. The others must be exactly those that are recorded."""
        before = [info for info in added if info.first <= base.uploaded_through]
        # What retention trimmed was recorded once.
        missing = {info.first: info for info in before if info.last > base.earliest}
        if missing:
            async for info in self.segments(base, min(missing)):
                if missing.get(info.first) == info:
                    del missing[info.first]
                if not missing:
                    break
        for info in missing.values():
            raise ManifestConflictError(base.stream_id, f"other segments are recorded instead of {info.key}")
        return added[len(before) :]

    async def _with_producers(
        self, head: ManifestHead, producers: Mapping[str, tuple[int, int]]
    ) -> ManifestHead:
        """The head with these producers in a separate object; with the current one if none changed."""
        sha256 = sha256_of(encode_manifest(dict(producers))) if producers else ""
        if sha256 == head.producers_sha256:
            return head
        key = None
        if producers:
            data = encode_manifest(RecordedProducers(attempt=new_attempt_id(), producers=dict(producers)))
            key = producers_key(head.generation + 1, sha256_of(data))
            await self._objects.create(stream_prefix(head.stream_id) + key, data)
        return msgspec.structs.replace(head, producers_key=key, producers_sha256=sha256)


def _generation_of(key: str) -> int:
    return int(key.removeprefix("producers/").partition(".")[0])


class TakeoverManifestStore(ManifestStore):
    """The manifests of an owner that takes a bucket over and continues its streams."""

    async def take_over(
        self,
        stream_id: str,
        become: Callable[[ManifestHead], ManifestHead],
        *,
        known: StoredHead | None = None,
    ) -> ManifestHead:
        """Writes our fence and a new state into a head. Earlier owners cannot change it afterwards.

        `become` computes the new head from the current one; it is called again if that has changed meanwhile.
        Each owner numbers its snapshots from the start.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            if current is None:
                raise ManifestConflictError(stream_id, "the head does not exist")
            return HeadChange(msgspec.structs.replace(become(current), as_of=0))

        return await self._change(stream_id, plan, known, adopting=True)


# Incarnations are counted up; nearly every name has been used a few times at most.
INCARNATIONS_TRIED = 64
_STREAM_ID = re.compile(r"[0-9a-f]{32}")


async def find_heads(objects: ObjectStore, name_or_id: str) -> list[ManifestHead]:
    """The heads of every use of a name, tombstones included, the newest last; or the one with that id."""
    manifests = ManifestStore(objects, 0)
    ids = [make_stream_id(name_or_id, number) for number in range(INCARNATIONS_TRIED)]
    if _STREAM_ID.fullmatch(name_or_id):
        ids.append(name_or_id)
    found = [stored.head for stored in await asyncio.gather(*map(manifests.load, ids)) if stored is not None]
    if not found or found[-1].incarnation == INCARNATIONS_TRIED - 1:
        async for candidate in list_stream_ids(objects):
            stored = await manifests.load(candidate)
            if stored is not None and stored.head.name == name_or_id and stored.head not in found:
                found.append(stored.head)
    return sorted(found, key=lambda head: head.incarnation)


def describe_head(head: ManifestHead, producers: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """All fields of the head, with its lists counted instead of printed, because they may be long."""
    described: dict[str, Any] = msgspec.json.decode(encode_manifest(head))
    del described["segments"]
    del described["companions"]
    described["pages"] = [msgspec.structs.asdict(page) for page in head.pages]
    described["companion_pages"] = [msgspec.structs.asdict(page) for page in head.companion_pages]
    return described | {
        "segment_count": head.segment_count,
        "segment_bytes": head.segment_bytes,
        "companion_count": head.companion_count,
        "companion_bytes": head.companion_bytes,
        "producers": producers,
    }
