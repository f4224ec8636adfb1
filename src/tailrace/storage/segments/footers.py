"""The footer of a segment of which only the object is left, in the form the hot store keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.storage.segments.segments import SegmentInfo

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore


async def fetch_footer(objects: ObjectStore, key: str, info: SegmentInfo) -> bytes:
    """Two ranged gets at most: the end of the object, and more of it if that was not enough."""
    from tailrace.storage.segments import segment_tail

    start = max(info.bytes - segment_tail.GUESS_BYTES, 0)
    while True:
        found = segment_tail.find_tail(await objects.get_range(key, start, info.bytes), info.bytes)
        if isinstance(found, bytes):
            return segment_tail.pack_tail(found)
        assert found < start, f"{key} wants more of its end, but not from before"
        start = found


def footer_has_keys(kept: bytes) -> bool:
    """Whether any entry of the segment with this footer has a key."""
    from tailrace.storage.segments.segment_reader import Footer

    footer = Footer(kept)
    return any(footer.has_keys(index) for index in range(footer.count))
