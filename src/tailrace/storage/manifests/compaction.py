"""What a head becomes when one segment takes the place of several.

The objects of those that go stay for a grace time: readers may be at them, and queries elsewhere hold their
names. The head remembers which entries that concerns, so that the sweep leaves them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from tailrace.storage.manifests.manifest_pages import ListedSegments, SegmentPages
from tailrace.storage.manifests.model import (
    ManifestConflictError,
    ManifestHead,
    ReplacedRange,
    StreamDeletedError,
)
from tailrace.storage.segments.segments import SegmentInfo

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
        raise StreamDeletedError(current.stream_id, f"it was {current.deleted.reason} and takes nothing more")
    listed = ListedSegments(current.pages, current.segments)
    found = await pages.within(listed, joined.first, joined.last)
    if found == [joined]:
        return CompactedHead(current, [])
    if found != list(replaced):
        raise ManifestConflictError(
            current.stream_id, f"other segments are recorded than those that became {joined.key}"
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
    """What the sweep has to know. Whatever lies within the new segment is spoken for by it."""
    kept = [
        one
        for one in known
        if now_ns - one.at_ns < grace_ns and not (joined.first <= one.first and one.last <= joined.last)
    ]
    kept.append(ReplacedRange(joined.first, joined.last, now_ns))
    while len(kept) > REPLACED_MAX:
        older, newer = kept[0], kept[1]
        first, last = min(older.first, newer.first), max(older.last, newer.last)
        kept[:2] = [ReplacedRange(first, last, max(older.at_ns, newer.at_ns))]
    return tuple(kept)


def is_in_grace(head: ManifestHead, first: int, last: int, after_ns: int) -> bool:
    """Whether entries were replaced so lately that their old segments stay."""
    return any(one.first <= first and last <= one.last and one.at_ns > after_ns for one in head.replaced)
