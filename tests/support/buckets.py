"""Buckets with real segments in them, written as the sealer writes them."""

from __future__ import annotations

from array import array
from pathlib import Path

from support.manifests import CREATED_NS, facts
from tailrace.storage.manifests.model import ManifestHead, StreamFacts
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStore
from tailrace.storage.segments.model import SegmentInfo, SegmentRows, make_stream_id, stream_prefix
from tailrace.storage.segments.writer import write_segment


def rows(first: int, count: int, word: str = "entry") -> SegmentRows:
    entries = [f'{{"{word}":{first + index}}}'.encode() for index in range(count)]
    ends: array[int] = array("I")
    position = 0
    for entry in entries:
        position += len(entry)
        ends.append(position)
        position += 1
    times = array("q", [CREATED_NS + 1000 * (first + index) for index in range(count)])
    return SegmentRows(first, b",".join(entries), ends, times, None)


async def upload(
    objects: ObjectStore,
    scratch: Path,
    name: str,
    first: int,
    count: int,
    *,
    epoch: int = 0,
    word: str = "entry",
) -> SegmentInfo:
    """One segment in the stream's folder, and nothing recorded yet."""
    number = make_stream_id(name, 0)
    path = scratch / "segment.parquet"
    file = write_segment(
        [rows(first, count, word)], path, name=name, stream_id=number, epoch=epoch, json=True
    )
    await objects.create(stream_prefix(number) + file.info.key, path.read_bytes())
    path.unlink()
    return file.info


async def fill(
    objects: ObjectStore, manifests: ManifestStore, scratch: Path, name: str, segments: int, count: int = 10
) -> ManifestHead:
    """A stream with so many recorded segments, and a producer."""
    head: ManifestHead | None = None
    for index in range(segments):
        info = await upload(objects, scratch, name, 1 + index * count, count)
        head = await manifests.publish(named(name, info.last), [info], {"p": (0, index)})
    return head or await manifests.publish(named(name, 0))


def named(name: str, tail: int) -> StreamFacts:
    return facts(tail, name=name)


async def overwrite(objects: ObjectStore, key: str, data: bytes) -> None:
    """What no part of the product does: other bytes under a name that was used."""
    await objects.delete([key])
    await objects.create(key, data)
