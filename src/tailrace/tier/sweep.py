"""Finds what no manifest names any more, and deletes it: leftovers of crashes, of deletions, of replacements.

It may run beside a server, and be killed at any moment. An object goes only if no head can ever name it
again, whoever is writing:

- a segment, if its entries are recorded in other segments or its epoch is over: what follows the last
  recorded entry may be an upload that is under way, or one that is about to be repeated;
- a page or producers object, if the head does not name it and it is old: every attempt to change a head makes
  its own, and is over long before the grace time;
- anything in the folder of a deleted stream that was there around the time of the deletion.

Folders without a head, and tombstones that nobody needs any more, can only be told from new streams when no
server uses the bucket (`offline`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tailrace.clock import SYSTEM_CLOCK, Clock
from tailrace.store.bucket import LIST_PAGE, delete_all, epoch_of, range_of
from tailrace.store.manifest import Manifests
from tailrace.store.manifest_model import HEAD_KEY, Deleted, Head, ManifestCorruptError
from tailrace.store.objects import ObjectMissingError
from tailrace.store.segments import stream_prefix
from tailrace.tier.crowd import for_each_stream

if TYPE_CHECKING:
    from tailrace.store.objects import ObjectInfo, Objects

SECOND_NS = 10**9
GRACE_NS = 3600 * SECOND_NS
# Another life of a name gets the same folder only after its tombstone was forgotten, much later than this.
OLD_LIFE_NS = 24 * 3600 * SECOND_NS
LOOKS_MAX = 5


class Orphan(msgspec.Struct, frozen=True):
    """An object that may go."""

    key: str
    bytes: int
    modified_ns: int
    reason: str


class Swept(msgspec.Struct):
    streams: int = 0
    objects: int = 0  # looked at
    orphans: int = 0
    orphan_bytes: int = 0
    unclaimed: int = 0  # objects in folders without a head
    tombstones: int = 0  # that may be forgotten
    unreadable: int = 0  # streams with a damaged manifest


class Sweeper:
    """Sweeps one bucket. `report` is called with each orphan, before it is deleted."""

    def __init__(
        self,
        objects: Objects,
        report: Callable[[Orphan], None],
        *,
        grace_ns: int = GRACE_NS,
        tombstone_ns: int,
        dry_run: bool = False,
        offline: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._objects = objects
        self._manifests = Manifests(objects, 0)
        self._report = report
        self._grace_ns = grace_ns
        self._tombstone_ns = tombstone_ns
        self._dry_run = dry_run
        self._offline = offline
        self._clock = clock
        self.seen = Swept()

    async def bucket(self) -> Swept:
        await for_each_stream(self._objects, self._readable_stream)
        return self.seen

    async def _readable_stream(self, stream_id: str) -> None:
        try:
            await self.stream(stream_id)
        except ManifestCorruptError:
            self.seen.unreadable += 1  # it may name anything, so nothing of it goes

    async def stream(self, stream_id: str) -> None:
        """One folder, a page of its listing at a time."""
        self.seen.streams += 1
        prefix = stream_prefix(stream_id)
        after = ""
        while True:
            found = await self._objects.list_after(prefix, after, LIST_PAGE)
            # The head is read after the listing: what a newer head names was made after it was listed, or is
            # young.
            orphans = await self._judge(stream_id, found)
            self.seen.objects += len(found)
            for orphan in orphans:
                self.seen.orphans += 1
                self.seen.orphan_bytes += orphan.bytes
                self._report(orphan)
            if not self._dry_run:
                await delete_all(self._objects, [orphan.key for orphan in orphans])
            if len(found) < LIST_PAGE:
                break
            after = found[-1].key
        await self._tombstone(stream_id)

    async def _judge(self, stream_id: str, found: list[ObjectInfo]) -> list[Orphan]:
        oldest_ns = self._clock.now_ns() - self._grace_ns
        head_key = stream_prefix(stream_id) + HEAD_KEY
        old = [info for info in found if info.modified_ns <= oldest_ns and info.key != head_key]
        for _look in range(LOOKS_MAX):
            stored = await self._manifests.load(stream_id)
            if stored is None:
                self.seen.unclaimed += len(old)
                return [_orphan(info, "its stream has no manifest") for info in old if self._offline]
            if stored.head.deleted is not None:
                return _of_deleted(old, stored.head.deleted)
            try:
                return await self._of_living(old, stored.head)
            except ObjectMissingError:
                continue  # a page went while we looked: there is a newer head
        return []

    async def _of_living(self, old: list[ObjectInfo], head: Head) -> list[Orphan]:
        prefix = stream_prefix(head.stream_id)
        named = await self._named(old, head)
        orphans: list[Orphan] = []
        for info in old:
            key = info.key.removeprefix(prefix)
            kind = key.partition("/")[0]
            if key in named or kind not in ("segments", "manifest", "producers"):
                continue
            if kind != "segments":
                orphans.append(_orphan(info, "the manifest does not name it"))
            elif _is_over(key, head):
                orphans.append(_orphan(info, "other segments are recorded in its place"))
        return orphans

    async def _named(self, old: list[ObjectInfo], head: Head) -> set[str]:
        """The keys that the head names, as far as the objects of this page of the listing are concerned."""
        prefix = stream_prefix(head.stream_id)
        named = {head.producers_key or ""}
        keys = [info.key.removeprefix(prefix) for info in old]
        if any(key.startswith("manifest/") for key in keys):
            named |= {ref.key async for ref in self._manifests.pages(head.stream_id).walk_pages(head.pages)}
        ranges = [entries for key in keys if key.startswith("segments/") and (entries := range_of(key))]
        if ranges:
            last = max(entries[1] for entries in ranges)
            async for info in self._manifests.segments(head, min(entries[0] for entries in ranges)):
                if info.first > last:
                    break
                named.add(info.key)
        return named

    async def _tombstone(self, stream_id: str) -> None:
        before_ns = self._clock.now_ns() - self._tombstone_ns
        stored = await self._manifests.load(stream_id)
        if stored is None or stored.head.deleted is None or stored.head.deleted.at_ns >= before_ns:
            return
        self.seen.tombstones += 1
        if self._offline and not self._dry_run:
            await Manifests(self._objects, stored.head.fence).forget(stream_id, before_ns)


def _is_over(key: str, head: Head) -> bool:
    """Whether a segment that is not recorded can never be: only the entry after the last one is taken."""
    entries, epoch = range_of(key), epoch_of(key)
    if entries is None or epoch is None:
        return False
    return entries[0] <= head.uploaded_through or epoch < head.epoch


def _of_deleted(old: list[ObjectInfo], deleted: Deleted) -> list[Orphan]:
    reason = f"its stream was {deleted.reason}"
    return [_orphan(info, reason) for info in old if info.modified_ns < deleted.at_ns + OLD_LIFE_NS]


def _orphan(info: ObjectInfo, reason: str) -> Orphan:
    return Orphan(info.key, info.size, info.modified_ns, reason)
