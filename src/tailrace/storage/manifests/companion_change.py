"""What a head becomes when companions are published: some added, some that they replace taken out.

Everything of one publication is in the one head that is written, so it is seen together or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tailrace.storage.manifests.companion_pages import CompanionPages, ListedCompanions, is_trimmed
from tailrace.storage.manifests.model import BuriedError, Head, ManifestError, Retired
from tailrace.storage.object_store.objects import ObjectMissingError
from tailrace.storage.segments.companions import Companion
from tailrace.storage.segments.segments import stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import Objects

# A replaced object stays for those who looked at the manifest before: so long, and for so many generations.
RETIRED_NS: Final = 5 * 60 * 10**9
RETIRED_GENERATIONS: Final = 2
RETIRED_MAX: Final = 1000  # in the head; the sweep takes what is pushed out
HEADS_AT_ONCE: Final = 16


class CompanionMissingError(ManifestError):
    """An object that was to be listed is not there, or is not the one that was built."""

    def __init__(self, stream_id: str, key: str, message: str) -> None:
        super().__init__(stream_id, f"{key} {message}")
        self.key = key


class CompanionChange(NamedTuple):
    head: Head
    superseded: list[str]
    added: list[Companion]  # those that were not listed before


async def change_companions(
    objects: Objects, current: Head, added: Sequence[Companion], removed: Sequence[str], now_ns: int
) -> CompanionChange:
    """What is listed already stays as it is; what retention took meanwhile is not listed any more.

    A crash may have left companions listed that the owner does not know of. Those of the same making for the
    same entries give way to the ones it adds now.
    """
    if current.deleted is not None:
        raise BuriedError(current.stream_id, f"it was {current.deleted.reason} and takes nothing more")
    pages = CompanionPages(objects, current.stream_id)
    listed = ListedCompanions(current.companion_pages, current.companions)
    known = await pages.found(listed, {one.object for one in added})
    new = [one for one in added if one.object not in known and not is_trimmed(one, current.earliest)]
    await _check_objects(objects, current.stream_id, new)
    kept = {one.object for one in added}
    gone = await pages.found(listed, set(removed) - kept)
    gone |= await pages.twins(listed, new, kept)
    shorter = await pages.without(listed, gone)
    grown = await pages.roll(ListedCompanions(shorter.pages, (*shorter.companions, *new)))
    if grown == listed:
        return CompanionChange(current, [], [])
    stay, ripe = retire(current, gone, kept, now_ns)
    head = msgspec.structs.replace(
        current, companion_pages=grown.pages, companions=grown.companions, retired=stay
    )
    return CompanionChange(head, [*pages.superseded, *ripe], new)


def retire(
    current: Head, gone: set[str], listed: set[str], now_ns: int
) -> tuple[tuple[Retired, ...], list[str]]:
    """What stays a little while, and what has stayed long enough. What is listed again is neither."""
    generation = current.generation + 1
    stay: list[Retired] = []
    ripe: list[str] = []
    for one in current.retired:
        if one.object in listed or one.object in gone:
            continue
        old = now_ns - one.at_ns >= RETIRED_NS and generation - one.generation >= RETIRED_GENERATIONS
        if old:
            ripe.append(one.object)
        else:
            stay.append(one)
    stay += [Retired(key, generation, now_ns) for key in sorted(gone)]
    return tuple(stay[-RETIRED_MAX:]), ripe


async def _check_objects(objects: Objects, stream_id: str, companions: Sequence[Companion]) -> None:
    """One look at each object: nothing is listed that is not there."""
    gate = asyncio.Semaphore(HEADS_AT_ONCE)
    prefix = stream_prefix(stream_id)

    async def check(one: Companion) -> None:
        async with gate:
            try:
                found = await objects.head(prefix + one.object)
            except ObjectMissingError:
                raise CompanionMissingError(stream_id, one.object, "is not there") from None
        if found.size != one.bytes:
            message = f"has {found.size} bytes, and {one.bytes} were reported"
            raise CompanionMissingError(stream_id, one.object, message)

    outcomes = await asyncio.gather(*map(check, companions), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
