"""Walking a bucket: its streams, the objects under a prefix, deleting them, a task for each stream.

Listings are read in pages and never held as a whole, so a bucket may be of any size.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from tailrace.common.tasks import run_all

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectInfo, ObjectStore
    from tailrace.storage.segments.model import RetainedRanges


STREAMS_PREFIX = "streams/"
LIST_PAGE = 1000

_STREAM = re.compile(r"streams/(?P<shard>[0-9a-f]{2})/(?P<id>(?P=shard)[0-9a-f]{30})/")
_SEGMENT = re.compile(r"segments/(\d{10})-(\d{20})-(\d{20})\.[0-9a-f]{16}\.parquet")
_PAGE = re.compile(r"manifest/(\d{20})-(\d{20})\.[0-9a-f]{16}\.json")


def stream_id_of_key(key: str) -> str | None:
    """The id of the stream to whose folder a key belongs."""
    found = _STREAM.match(key)
    return None if found is None else found["id"]


def entry_range_of_key(relative_key: str) -> tuple[int, int] | None:
    """First and last entry in the name of a segment or page."""
    found = _SEGMENT.fullmatch(relative_key)
    if found is not None:
        return int(found[2]), int(found[3])
    found = _PAGE.fullmatch(relative_key)
    return None if found is None else (int(found[1]), int(found[2]))


def epoch_of_key(relative_key: str) -> int | None:
    """The epoch in the name of a segment."""
    found = _SEGMENT.fullmatch(relative_key)
    return None if found is None else int(found[1])


async def list_stream_ids(objects: ObjectStore, prefix: str = STREAMS_PREFIX) -> AsyncIterator[str]:
    """The streams of a bucket in the order of their ids, those without a head included."""
    after = seen = ""
    while True:
        found = await objects.list_after(prefix, after, LIST_PAGE)
        for info in found:
            stream_id = stream_id_of_key(info.key)
            if stream_id is not None and stream_id != seen:
                seen = stream_id
                yield stream_id
        if len(found) < LIST_PAGE:
            return
        after = found[-1].key
        if seen and stream_id_of_key(after) == seen:
            # After everything in this folder: '0' comes right after '/'.
            after = after[: after.index(seen) + len(seen)] + "0"


async def list_objects(objects: ObjectStore, prefix: str) -> AsyncIterator[ObjectInfo]:
    """Everything below a prefix, in key order."""
    after = ""
    while True:
        found = await objects.list_after(prefix, after, LIST_PAGE)
        for info in found:
            yield info
        if len(found) < LIST_PAGE:
            return
        after = found[-1].key


async def holds_only(objects: ObjectStore, prefix: str, key: str) -> bool:
    """Whether there is only one object in the folder of a stream."""
    found = await objects.list_after(prefix, limit=2)
    return all(info.key == prefix + key for info in found)


async def delete_keys(objects: ObjectStore, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), LIST_PAGE):
        await objects.delete(keys[start : start + LIST_PAGE])


async def delete_folder(objects: ObjectStore, prefix: str, *, keep: str) -> None:
    """Delete everything in the folder of a stream but one object."""
    doomed: list[str] = []
    async for info in list_objects(objects, prefix):
        if info.key != prefix + keep:
            doomed.append(info.key)
        if len(doomed) == LIST_PAGE:
            await objects.delete(doomed)
            doomed = []
    await delete_keys(objects, doomed)


async def delete_trimmed(
    objects: ObjectStore, prefix: str, epochs: Sequence[tuple[int, int]], retained: RetainedRanges
) -> None:
    """Deletes segments and pages without any retained entry.

    No head can ever name them again, so this is safe with concurrent writers and may be repeated. Also
    deletes what a crash left the last time.
    """
    following = retained.earliest + 1
    epoch = max((number for number, first in epochs if first < following), default=0)
    await _delete_trimmed(objects, prefix, "segments/", f"segments/{epoch:010}-{following:020}", retained)
    await _delete_trimmed(objects, prefix, "manifest/", f"manifest/{following:020}", retained)


async def _delete_trimmed(
    objects: ObjectStore, prefix: str, kind: str, stop: str, retained: RetainedRanges
) -> None:
    doomed: list[str] = []
    async for info in list_objects(objects, prefix + kind):
        relative = info.key.removeprefix(prefix)
        if relative >= stop:
            break
        entries = entry_range_of_key(relative)
        if entries is not None and not retained.overlaps(*entries):
            doomed.append(info.key)
        if len(doomed) == LIST_PAGE:
            await objects.delete(doomed)
            doomed = []
    await delete_keys(objects, doomed)


STREAMS_IN_PARALLEL = 8


async def for_each_stream(objects: ObjectStore, work: Callable[[str], Awaitable[None]]) -> None:
    """The first failure ends it."""
    await run_all(list_stream_ids(objects), work, at_once=STREAMS_IN_PARALLEL)
