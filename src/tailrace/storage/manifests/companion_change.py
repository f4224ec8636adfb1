"""What a head becomes when companions are published: some added, some that they replace taken out.

Everything of one publication is in the one head that is written, so it is seen together or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tailrace.storage.manifests.companion_pages import IndexFilePages, ListedIndexFiles, is_trimmed
from tailrace.storage.manifests.model import ManifestError, ManifestHead, RetiredObject, StreamDeletedError
from tailrace.storage.object_store.objects import ObjectMissingError
from tailrace.storage.segments.companions import IndexFile
from tailrace.storage.segments.segments import stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

# A replaced object stays for those who looked at the manifest before: so long, and for so many generations.
RETIRED_NS: Final = 5 * 60 * 10**9
RETIRED_GENERATIONS: Final = 2
RETIRED_MAX: Final = 1000  # in the head; the sweep takes what is pushed out
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
    """What is listed already stays as it is; what retention took meanwhile is not listed any more.

    A crash may have left companions listed that the owner does not know of. Those of the same making for the
    same entries give way to the ones it adds now.
    """
    if current.deleted is not None:
        raise StreamDeletedError(current.stream_id, f"it was {current.deleted.reason} and takes nothing more")
    pages = IndexFilePages(objects, current.stream_id)
    listed = ListedIndexFiles(current.companion_pages, current.companions)
    known = await pages.found(listed, {one.object for one in added})
    new = [one for one in added if one.object not in known and not is_trimmed(one, current.earliest)]
    await _check_objects(objects, current.stream_id, new)
    kept = {one.object for one in added}
    gone = await pages.found(listed, set(removed) - kept)
    gone |= await pages.twins(listed, new, kept)
    shorter = await pages.without(listed, gone)
    grown = await pages.roll(ListedIndexFiles(shorter.pages, (*shorter.companions, *new)))
    if grown == listed:
        return IndexFileChange(current, [], [])
    stay, ripe = retire_objects(current, gone, kept, now_ns)
    head = msgspec.structs.replace(
        current, companion_pages=grown.pages, companions=grown.companions, retired=stay
    )
    return IndexFileChange(head, [*pages.superseded, *ripe], new)


def retire_objects(
    current: ManifestHead, gone: set[str], listed: set[str], now_ns: int
) -> tuple[tuple[RetiredObject, ...], list[str]]:
    """What stays a little while, and what has stayed long enough. What is listed again is neither."""
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


async def _check_objects(objects: ObjectStore, stream_id: str, companions: Sequence[IndexFile]) -> None:
    """One look at each object: nothing is listed that is not there."""
    gate = asyncio.Semaphore(HEAD_REQUESTS_IN_PARALLEL)
    prefix = stream_prefix(stream_id)

    async def check(one: IndexFile) -> None:
        async with gate:
            try:
                found = await objects.head(prefix + one.object)
            except ObjectMissingError:
                raise IndexFileMissingError(stream_id, one.object, "is not there") from None
        if found.size != one.bytes:
            message = f"has {found.size} bytes, and {one.bytes} were reported"
            raise IndexFileMissingError(stream_id, one.object, message)

    outcomes = await asyncio.gather(*map(check, companions), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
