"""A manifest in which one segment takes the place of several: across pages, once, and remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.manifests import CREATED_NS, facts, run_of, segment
from tailrace.common.clock import FakeClock
from tailrace.storage.manifests.changes import REPLACED_MAX, is_in_grace, remember_replaced
from tailrace.storage.manifests.model import (
    ManifestConflictError,
    ManifestHead,
    ReplacedRange,
    StreamDeletedError,
)
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.segments.model import SegmentInfo, stream_prefix
from tailrace.storage.sweep import Orphan, Sweeper

STREAM = facts(1).stream_id
PREFIX = stream_prefix(STREAM)
DAY_NS = 24 * 3600 * 10**9
INPUTS = run_of(11, 60)


def run(name: str, work: Callable[[ObjectStore, ManifestStore, FakeClock], Awaitable[None]]) -> None:
    async def inside() -> None:
        objects = open_object_store(f"memory://compact-{name}")
        clock = FakeClock()
        manifests = ManifestStore(objects, 1, segments_max=8, pages_max=3, clock=clock)
        for first in range(1, 101, 10):
            await manifests.publish(facts(first + 9), run_of(first, first + 9))
        await work(objects, manifests, clock)
        await objects.close()

    asyncio.run(inside())


async def listed(manifests: ManifestStore, head: ManifestHead) -> list[SegmentInfo]:
    return [info async for info in manifests.segments(head)]


def test_once_and_across_pages() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        joined = segment(11, 60, content="joined")
        head = await manifests.compact(STREAM, joined, INPUTS, DAY_NS)
        assert await listed(manifests, head) == [*run_of(1, 10), joined, *run_of(61, 100)]
        assert head.segment_count == 51
        assert head.uploaded_through == 100
        assert head.replaced == (ReplacedRange(11, 60, clock.now_ns()),)
        assert await manifests.compact(STREAM, joined, INPUTS, DAY_NS) == head
        # Another one of the same entries, or of others than are listed.
        for first, last in ((11, 60), (5, 20), (50, 70)):
            other = segment(first, last, content="x")
            with pytest.raises(ManifestConflictError):
                await manifests.compact(STREAM, other, run_of(first, last), DAY_NS)
        # And once more, with what was joined before.
        again = segment(1, 100, content="all")
        inputs = await listed(manifests, head)
        head = await manifests.compact(STREAM, again, inputs, DAY_NS)
        assert await listed(manifests, head) == [again]
        assert [(one.first, one.last) for one in head.replaced] == [(1, 100)]
        head = await manifests.publish(facts(110), run_of(101, 110))
        assert await listed(manifests, head) == [again, *run_of(101, 110)]
        await manifests.delete_stream(facts(110), CREATED_NS + 1, "deleted")
        with pytest.raises(StreamDeletedError):
            await manifests.compact(STREAM, again, [again], DAY_NS)

    run("once", work)


def test_what_is_remembered_is_bounded_and_never_too_short() -> None:
    known: tuple[ReplacedRange, ...] = ()
    for number in range(REPLACED_MAX + 50):
        known = remember_replaced(known, segment(10 * number + 1, 10 * number + 10), number, 10**9)
    assert len(known) == REPLACED_MAX
    assert (known[0].first, known[0].last, known[0].at_ns) == (1, 510, 50)
    assert (known[-1].first, known[-1].at_ns) == (10 * (REPLACED_MAX + 49) + 1, REPLACED_MAX + 49)
    later = remember_replaced(known, segment(1, 5), 100 + 10**9, 10**9)
    assert min(one.at_ns for one in later) == 101, "those whose time is over are forgotten"


def test_the_sweep_waits_for_the_grace_time() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        joined = segment(11, 60, content="joined")
        lost = segment(11, 60, content="of a pipeline that was killed")
        for info in (*INPUTS, joined, lost):
            await objects.create(PREFIX + info.key, b"x")
        modified_ns = (await objects.head(PREFIX + joined.key)).modified_ns
        late = FakeClock(modified_ns + 3 * 3600 * 10**9)
        compacting = ManifestStore(objects, 1, clock=late)

        async def swept() -> set[str]:
            found: list[Orphan] = []
            sweeper = Sweeper(objects, found.append, tombstone_ns=DAY_NS, dry_run=True, clock=late)
            await sweeper.bucket()
            return {one.key.removeprefix(PREFIX) for one in found if "/segments/" in one.key}

        assert await swept() == {joined.key, lost.key}, "nothing was listed yet"
        head = await compacting.compact(STREAM, joined, INPUTS, DAY_NS)
        assert is_in_grace(head, 11, 11, late.now_ns() - DAY_NS)
        assert await swept() == set()
        late.advance(24 * 3600)
        assert await swept() == {lost.key, *(info.key for info in INPUTS)}

    run("sweep", work)
