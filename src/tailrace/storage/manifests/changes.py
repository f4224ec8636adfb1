"""Changes of a head: recording a snapshot, compaction, publication of index files. Pure except for pages.

Replaced segments stay for a grace time, because readers and queries may still use them. The head records the
entry ranges, so that the sweep does not delete them earlier. All index files of one publication are in one
head, so they become visible together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tailrace.storage.manifests.model import (
    CONFIGURATION_FIELDS,
    TAIL_STATE_FIELDS,
    HeadTombstone,
    ManifestConflictError,
    ManifestError,
    ManifestHead,
    ReplacedRange,
    RetiredObject,
    StreamDeletedError,
    StreamFacts,
)
from tailrace.storage.manifests.pages import (
    IndexFilePages,
    ListedIndexFiles,
    ListedSegments,
    SegmentPages,
    is_trimmed,
)
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore


def first_head(facts: StreamFacts, fence: int, generation: int = 0) -> ManifestHead:
    """The first head of a stream. A fork's own entries start after what it inherits."""
    return ManifestHead(
        stream_id=facts.stream_id,
        tail=facts.fork_entry,
        uploaded_through=facts.fork_entry,
        fence=fence,
        generation=generation,
        **_select_fields(facts, CONFIGURATION_FIELDS),
    )


def base_head(facts: StreamFacts, current: ManifestHead | None, fence: int) -> ManifestHead:
    """The head to build on. A name that is used again long after may get the same folder."""
    if current is None:
        return first_head(facts, fence)
    if current.deleted is None:
        _refuse_foreign_stream(facts, current, fence)
        return current
    if is_later_incarnation(facts, current, current.deleted):
        return first_head(facts, fence, current.generation)
    raise StreamDeletedError(
        facts.stream_id, f"the stream was {current.deleted.reason} and cannot be changed"
    )


def is_later_incarnation(facts: StreamFacts, current: ManifestHead, deleted: HeadTombstone) -> bool:
    """Whether a stream is not that of the tombstone but uses its name again.

    By the clock it was created later. If the clock was set back, it is another stream if its creation time
    differs from that of the deleted one.
    """
    return facts.created_ns > deleted.at_ns or facts.created_ns != current.created_ns


def _refuse_foreign_stream(facts: StreamFacts, current: ManifestHead, fence: int) -> None:
    """An owner has one stream of a name at a time: this head was written by a copy of this server."""
    if current.fence == fence and current.created_ns != facts.created_ns:
        message = f"another stream {facts.name!r} is recorded, which was created elsewhere"
        raise ManifestConflictError(facts.stream_id, message)


def is_same_incarnation(facts: StreamFacts, head: ManifestHead) -> bool:
    """Whether a head of another fence is of our stream.

    No two servers create a stream in the same nanosecond, and a server that restores one starts a new
    epoch. So this head is ours from before another server took the bucket over without restoring it.
    """
    return facts.created_ns == head.created_ns and facts.epochs == head.epochs


def is_older_snapshot(facts: StreamFacts, base: ManifestHead, fence: int) -> bool:
    """Whether a newer snapshot of the same owner is recorded already. Owners do not share their numbers."""
    return base.fence == fence and facts.as_of < base.as_of


def is_newest_tail_state(facts: StreamFacts, base: ManifestHead, head: ManifestHead, fence: int) -> bool:
    """Whether closed state, producers and the like are those of the last recorded entry, and the newest."""
    grown = head.uploaded_through > base.uploaded_through
    return facts.tail == head.uploaded_through and (grown or not is_older_snapshot(facts, base, fence))


def with_facts(facts: StreamFacts, base: ManifestHead, head: ManifestHead, fence: int) -> ManifestHead:
    changes: dict[str, Any] = {}
    if not is_older_snapshot(facts, base, fence):
        changes |= _select_fields(facts, CONFIGURATION_FIELDS)
    if is_newest_tail_state(facts, base, head, fence):
        changes |= _select_fields(facts, TAIL_STATE_FIELDS)
    return msgspec.structs.replace(head, **changes)


def tombstone_head(
    facts: StreamFacts, current: ManifestHead | None, fence: int, at_ns: int, reason: str
) -> ManifestHead:
    """The tombstone of a stream. An existing tombstone or a later stream of the name stays."""
    base = first_head(facts, fence) if current is None else current
    at_ns = max(at_ns, facts.created_ns)
    if base.deleted is not None or base.created_ns > at_ns:
        return base
    _refuse_foreign_stream(facts, base, fence)
    epoch = max(base.epoch, facts.epochs[-1][0])
    return msgspec.structs.replace(
        base,
        created_ns=facts.created_ns,
        deleted=HeadTombstone(at_ns=at_ns, reason=reason, epoch=epoch),
        pages=(),
        segments=(),
        producers_key=None,
        producers_sha256="",
        meta_keys=(),
        index_file_pages=(),
        index_files=(),
        retired=(),
        replaced=(),
    )


def _select_fields(facts: StreamFacts, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in names}


REPLACED_MAX: Final = 256  # in a head; beyond, the oldest are remembered together, and for longer


class CompactedHead(NamedTuple):
    head: ManifestHead
    superseded: list[str]


async def compact_head(
    pages: SegmentPages,
    current: ManifestHead,
    joined: SegmentInfo,
    replaced: Sequence[SegmentInfo],
    now_ns: int,
    grace_ns: int,
) -> CompactedHead:
    """The same head if it lists the joined segment already. ManifestConflictError if it lists others."""
    if current.deleted is not None:
        raise StreamDeletedError(
            current.stream_id, f"the stream was {current.deleted.reason} and cannot be changed"
        )
    listed = ListedSegments(current.pages, current.segments)
    found = await pages.within(listed, joined.first, joined.last)
    if found == [joined]:
        return CompactedHead(current, [])
    if found != list(replaced):
        raise ManifestConflictError(
            current.stream_id, f"the recorded segments are not the inputs of {joined.key}"
        )
    cut = await pages.join(listed, joined)
    head = msgspec.structs.replace(
        current,
        pages=cut.listed.pages,
        segments=cut.listed.segments,
        replaced=remember_replaced(current.replaced, joined, now_ns, grace_ns),
    )
    return CompactedHead(head, cut.superseded)


def remember_replaced(
    known: Sequence[ReplacedRange], joined: SegmentInfo, now_ns: int, grace_ns: int
) -> tuple[ReplacedRange, ...]:
    """The replaced ranges for the sweep. Ranges within the new segment are covered by it."""
    retained = [
        one
        for one in known
        if now_ns - one.at_ns < grace_ns and not (joined.first <= one.first and one.last <= joined.last)
    ]
    retained.append(ReplacedRange(joined.first, joined.last, now_ns))
    while len(retained) > REPLACED_MAX:
        older, newer = retained[0], retained[1]
        first, last = min(older.first, newer.first), max(older.last, newer.last)
        retained[:2] = [ReplacedRange(first, last, max(older.at_ns, newer.at_ns))]
    return tuple(retained)


def is_in_grace(head: ManifestHead, first: int, last: int, after_ns: int) -> bool:
    """Whether entries were replaced so recently that their old segments stay."""
    return any(one.first <= first and last <= one.last and one.at_ns > after_ns for one in head.replaced)


# A replaced object stays for readers of an older manifest: so long, and for so many generations.
RETIRED_NS: Final = 5 * 60 * 10**9
RETIRED_GENERATIONS: Final = 2
RETIRED_MAX: Final = 1000  # in the head; the sweep deletes older ones
HEAD_REQUESTS_IN_PARALLEL: Final = 16


class IndexFileMissingError(ManifestError):
    """An object that was to be listed is not there, or is not the one that was built."""

    def __init__(self, stream_id: str, key: str, message: str) -> None:
        super().__init__(stream_id, f"{key} {message}")
        self.key = key


class IndexFileChange(NamedTuple):
    head: ManifestHead
    superseded: list[str]
    added: list[IndexFile]  # those that were not listed before


async def change_index_files(
    objects: ObjectStore,
    current: ManifestHead,
    added: Sequence[IndexFile],
    removed: Sequence[str],
    now_ns: int,
) -> IndexFileChange:
    """Listed files stay; files of entries that retention has removed meanwhile are not listed.

    A crash may have left files listed that the owner does not know. Those of the same build for the same
    entries are replaced by the ones it adds now.
    """
    if current.deleted is not None:
        raise StreamDeletedError(
            current.stream_id, f"the stream was {current.deleted.reason} and cannot be changed"
        )
    pages = IndexFilePages(objects, current.stream_id)
    listed = ListedIndexFiles(current.index_file_pages, current.index_files)
    known = await pages.find_listed(listed, {one.object for one in added})
    new = [one for one in added if one.object not in known and not is_trimmed(one, current.earliest)]
    await _check_objects(objects, current.stream_id, new)
    retained = {one.object for one in added}
    gone = await pages.find_listed(listed, set(removed) - retained)
    gone |= await pages.equivalents(listed, new, retained)
    shorter = await pages.without(listed, gone)
    grown = await pages.roll(ListedIndexFiles(shorter.pages, (*shorter.index_files, *new)))
    if grown == listed:
        return IndexFileChange(current, [], [])
    stay, ripe = retire_objects(current, gone, retained, now_ns)
    head = msgspec.structs.replace(
        current, index_file_pages=grown.pages, index_files=grown.index_files, retired=stay
    )
    return IndexFileChange(head, [*pages.superseded, *ripe], new)


def retire_objects(
    current: ManifestHead, gone: set[str], listed: set[str], now_ns: int
) -> tuple[tuple[RetiredObject, ...], list[str]]:
    """Objects that stay for a while, and those that can be deleted. Objects listed again are neither."""
    generation = current.generation + 1
    stay: list[RetiredObject] = []
    ripe: list[str] = []
    for one in current.retired:
        if one.object in listed or one.object in gone:
            continue
        old = now_ns - one.at_ns >= RETIRED_NS and generation - one.generation >= RETIRED_GENERATIONS
        if old:
            ripe.append(one.object)
        else:
            stay.append(one)
    stay += [RetiredObject(key, generation, now_ns) for key in sorted(gone)]
    return tuple(stay[-RETIRED_MAX:]), ripe


async def _check_objects(objects: ObjectStore, stream_id: str, index_files: Sequence[IndexFile]) -> None:
    """Checks every object: nothing is listed that does not exist."""
    gate = asyncio.Semaphore(HEAD_REQUESTS_IN_PARALLEL)
    prefix = stream_prefix(stream_id)

    async def check(one: IndexFile) -> None:
        async with gate:
            try:
                found = await objects.head(prefix + one.object)
            except ObjectMissingError:
                raise IndexFileMissingError(stream_id, one.object, "does not exist") from None
        if found.size != one.bytes:
            message = f"has {found.size} bytes instead of the reported {one.bytes}"
            raise IndexFileMissingError(stream_id, one.object, message)

    outcomes = await asyncio.gather(*map(check, index_files), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
