"""Two writers on one bucket, their object operations interleaved at random."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.manifests import facts, segment
from support.turns import Turns, interleave
from tailrace.storage.bucket_ownership import BucketOwnership, OwnedElsewhereError
from tailrace.storage.manifests.model import (
    FencedError,
    ManifestConflictError,
    ManifestHead,
    decode_manifest,
)
from tailrace.storage.manifests.store import ManifestStore, StoredHead
from tailrace.storage.object_store.interface import ObjectExistsError, ObjectStore, open_object_store
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

_NAMES = count()
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "publish", "retain"]), st.integers(1, 4)), max_size=6
)


class Writer:
    """A sealer: it looks at the head, makes the next segments, uploads and records them."""

    def __init__(self, objects: Turns, name: str, steps: list[Step]) -> None:
        self._objects: Any = objects
        self._name = name
        self._steps = steps
        self.recorded: list[SegmentInfo] = []
        self.trimmed = 0
        self.fenced = False

    async def run(self, *, take_over: bool) -> None:
        try:
            fence = await BucketOwnership(self._objects).claim(self._name if take_over else "a", take_over)
            manifests = ManifestStore(self._objects, fence, segments_max=2, pages_max=2)
            for kind, size in self._steps:
                try:
                    await (
                        self._publish(manifests, size) if kind == "publish" else self._retain(manifests, size)
                    )
                except ManifestConflictError:
                    pass  # the other one of the same fence recorded something else
        except (FencedError, OwnedElsewhereError):
            self.fenced = True

    async def _load(self, manifests: ManifestStore) -> StoredHead | None:
        stored = await manifests.load(STREAM)
        if stored is not None and stored.head.fence < manifests.fence:
            await manifests.take_fence(STREAM)
            stored = await manifests.load(STREAM)
        return stored

    async def _publish(self, manifests: ManifestStore, size: int) -> None:
        stored = await self._load(manifests)
        through = 0 if stored is None else stored.head.uploaded_through
        added = [segment(through + 1 + i, through + 1 + i, content=self._name) for i in range(size)]
        for info in added:
            try:
                await self._objects.create(PREFIX + info.key, info.key.encode())
            except ObjectExistsError:
                pass  # uploaded before, and not recorded then
        tail = through + size
        await manifests.publish(facts(tail), added, {self._name: (0, tail)}, known=stored)
        self.recorded.extend(added)

    async def _retain(self, manifests: ManifestStore, kept: int) -> None:
        stored = await self._load(manifests)
        if stored is not None and stored.head.uploaded_through > kept:
            head = await manifests.trim(STREAM, stored.head.uploaded_through - kept)
            self.trimmed = max(self.trimmed, head.earliest)


def _check_history(heads: list[ManifestHead]) -> None:
    generation = through = earliest = fence = 0
    for head in heads:
        assert head.generation == generation + 1, "a head was overwritten that its writer had not seen"
        assert head.fence >= fence, "an owner that was taken over changed a head"
        assert head.uploaded_through >= through
        assert head.earliest >= earliest
        generation, through = head.generation, head.uploaded_through
        earliest, fence = head.earliest, head.fence


async def _check_bucket(objects: ObjectStore, recorded: list[SegmentInfo], trimmed: int) -> None:
    manifests = ManifestStore(objects, 99)
    stored = await manifests.load(STREAM)
    if stored is None:
        assert recorded == []
        return
    head = stored.head
    listed = [info async for info in manifests.segments(head)]
    assert [info.first for info in listed] == list(range(head.earliest + 1, head.uploaded_through + 1))
    assert listed == sorted(
        (info for info in recorded if info.last > head.earliest), key=lambda info: info.first
    )
    assert head.earliest >= trimmed
    for info in listed:
        assert (await objects.get(PREFIX + info.key))[0] == info.key.encode()
    assert head.tail == head.uploaded_through
    assert [tail for _epoch, tail in (await manifests.producers(head)).values()] == [head.tail]


async def _race(data: st.DataObject, first: list[Step], second: list[Step], *, take_over: bool) -> None:
    objects = open_object_store(f"memory://races-{next(_NAMES)}")
    heads: list[ManifestHead] = []

    def note(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "replace" and args[0] == PREFIX + "manifest.json":
            heads.append(decode_manifest(args[1], ManifestHead, STREAM, "manifest.json"))

    turns = [Turns(objects, note), Turns(objects, note)]
    writers = [Writer(turns[0], "a", first), Writer(turns[1], "b", second)]
    runs = [
        (turns[0], writers[0].run(take_over=False)),
        (turns[1], writers[1].run(take_over=take_over)),
    ]
    try:
        await BucketOwnership(objects).claim("a")
        await interleave(data, runs)
        _check_history(heads)
        recorded = [info for writer in writers for info in writer.recorded]
        await _check_bucket(objects, recorded, max(writer.trimmed for writer in writers))
        assert not writers[1].fenced
        if not take_over:
            assert not writers[0].fenced
    finally:
        await objects.close()


@given(st.data(), STEPS, STEPS)
def test_a_bucket_that_is_taken_over_stays_whole(
    data: st.DataObject, first: list[Step], second: list[Step]
) -> None:
    asyncio.run(_race(data, first, second, take_over=True))


@given(st.data(), STEPS, STEPS)
def test_two_writers_of_one_fence_never_lose_what_the_other_recorded(
    data: st.DataObject, first: list[Step], second: list[Step]
) -> None:
    """A server that was killed may leave a writer behind whose last call is still on its way."""
    asyncio.run(_race(data, first, second, take_over=False))
