"""What a head becomes when one segment takes the place of several.

The objects of those that go stay for a grace time: readers may be at them, and queries elsewhere hold their
names. The head remembers which entries that concerns, so that the sweep leaves them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from tailrace.storage.manifests.manifest_pages import Listed, Pages
from tailrace.storage.manifests.model import BuriedError, Head, ManifestConflictError, Replaced
from tailrace.storage.segments.segments import SegmentInfo

REPLACED_MAX: Final = 256  # in a head; beyond, the oldest are remembered together, and for longer


class Compaction(NamedTuple):
    head: Head
    superseded: list[str]


async def compact_head(
    pages: Pages,
    current: Head,
    joined: SegmentInfo,
    replaced: Sequence[SegmentInfo],
    now_ns: int,
    grace_ns: int,
) -> Compaction:
    """The same head if it lists the joined segment already. ManifestConflictError if it lists others."""
    if current.deleted is not None:
        raise BuriedError(current.stream_id, f"it was {current.deleted.reason} and takes nothing more")
    listed = Listed(current.pages, current.segments)
    found = await pages.within(listed, joined.first, joined.last)
    if found == [joined]:
        return Compaction(current, [])
    if found != list(replaced):
        raise ManifestConflictError(
            current.stream_id, f"other segments are recorded than those that became {joined.key}"
        )
    cut = await pages.join(listed, joined)
    head = msgspec.structs.replace(
        current,
        pages=cut.listed.pages,
        segments=cut.listed.segments,
        replaced=remembered(current.replaced, joined, now_ns, grace_ns),
    )
    return Compaction(head, cut.superseded)


def remembered(
    known: Sequence[Replaced], joined: SegmentInfo, now_ns: int, grace_ns: int
) -> tuple[Replaced, ...]:
    """What the sweep has to know. Whatever lies within the new segment is spoken for by it."""
    kept = [
        one
        for one in known
        if now_ns - one.at_ns < grace_ns and not (joined.first <= one.first and one.last <= joined.last)
    ]
    kept.append(Replaced(joined.first, joined.last, now_ns))
    while len(kept) > REPLACED_MAX:
        older, newer = kept[0], kept[1]
        first, last = min(older.first, newer.first), max(older.last, newer.last)
        kept[:2] = [Replaced(first, last, max(older.at_ns, newer.at_ns))]
    return tuple(kept)


def is_in_grace(head: Head, first: int, last: int, after_ns: int) -> bool:
    """Whether entries were replaced so lately that their old segments stay."""
    return any(one.first <= first and last <= one.last and one.at_ns > after_ns for one in head.replaced)
