"""Companions in manifests: listed, replaced, retired and trimmed, at a cost that does not grow with them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import pytest

from support.manifests import facts, run_of
from tailrace.common.clock import FakeClock
from tailrace.storage.index_coverage import (
    Coverage,
    MergeRule,
    build_order,
    due_merges,
    stale_index_files,
    uncovered_segments,
)
from tailrace.storage.manifests.changes import RETIRED_MAX, IndexFileMissingError
from tailrace.storage.manifests.model import ManifestHead, StreamDeletedError, encode_manifest
from tailrace.storage.manifests.pages import (
    INDEX_FILE_PAGES_MAX,
    INDEX_FILES_MAX,
    IndexFilePages,
    ListedIndexFiles,
)
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectMissingError, ObjectStore, open_object_store
from tailrace.storage.segments.index_files import IndexFile, PlanRecord, index_file_name
from tailrace.storage.segments.model import stream_prefix

PLAN = "sha256:" + "ab" * 32
STREAM = facts(1).stream_id
RULE = MergeRule(span=2, fan_out=2, level_max=2)


def companion(
    family: str, first: int, last: int, *, text: str = "", print_: str = "f1", level: int = 0
) -> IndexFile:
    sha256 = hashlib.sha256(f"{family}{first}{last}{text}".encode()).hexdigest()
    key = index_file_name(PLAN, family, first, last, sha256, "parquet")
    return IndexFile(family, first, last, last - first + 1, key, 4, sha256, {}, PLAN, level, print_)


async def put(objects: ObjectStore, *companions: IndexFile) -> None:
    for one in companions:
        await objects.create(stream_prefix(STREAM) + one.object, b"file")


def run(name: str, work: Callable[[ObjectStore, ManifestStore, FakeClock], Awaitable[None]]) -> None:
    async def inside() -> None:
        objects = open_object_store(f"memory://companions-{name}")
        clock = FakeClock()
        manifests = ManifestStore(objects, 1, clock=clock)
        await manifests.publish(facts(1000), run_of(1, 1000, 10))
        await work(objects, manifests, clock)
        await objects.close()

    asyncio.run(inside())


async def listed(manifests: ManifestStore, head: ManifestHead) -> set[str]:
    return {one.object async for one in manifests.companions(head)}


async def is_there(objects: ObjectStore, one: IndexFile) -> bool:
    try:
        await objects.head(stream_prefix(STREAM) + one.object)
    except ObjectMissingError:
        return False
    return True


def test_p4_listed_once_whatever_is_repeated() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        some = [companion("col", 1, 10), companion("fts", 1, 10)]
        with pytest.raises(IndexFileMissingError):
            await manifests.publish_companions(STREAM, some, [])
        await put(objects, *some)
        head, new = await manifests.publish_companions(STREAM, some, [])
        assert new == some
        again, new = await manifests.publish_companions(STREAM, some, [])
        assert (again, new) == (head, [])
        # What the owner does not know of, since it was killed, gives way to what it adds.
        other = companion("fts", 1, 10, text="other bytes")
        await put(objects, other)
        head, _ = await manifests.publish_companions(STREAM, [some[0], other], [])
        assert await listed(manifests, head) == {some[0].object, other.object}
        assert [one.object for one in head.retired] == [some[1].object]

    run("once", work)


def test_what_is_replaced_stays_a_little_while() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        inputs = [companion("exact", 1, 10), companion("exact", 11, 20)]
        output = companion("exact", 1, 20, level=1)
        later = [companion("col", first, first + 9) for first in range(1, 41, 10)]
        await put(objects, *inputs, output, *later)
        await manifests.publish_companions(STREAM, inputs, [])
        head, _ = await manifests.publish_companions(STREAM, [output], [one.object for one in inputs])
        assert await listed(manifests, head) == {output.object}
        await manifests.publish_companions(STREAM, later[:1], [])
        await manifests.publish_companions(STREAM, later[1:2], [])
        assert await is_there(objects, inputs[0])  # two generations, but not long enough
        clock.advance(300)
        # One that is listed again is not deleted.
        head, _ = await manifests.publish_companions(STREAM, [later[2], inputs[1]], [output.object])
        assert not await is_there(objects, inputs[0])
        assert await is_there(objects, inputs[1])
        assert [one.object for one in head.retired] == [output.object]
        clock.advance(300)
        head, _ = await manifests.publish_companions(STREAM, later[3:], [])
        assert await is_there(objects, output)  # long enough, but one generation only
        assert len(head.retired) <= RETIRED_MAX

    run("replaced", work)


def test_retention_takes_them_and_a_tombstone_all() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        some = [companion(family, first, first + 9) for family in ("col", "agg") for first in (1, 11, 21)]
        wide = companion("agg", 21, 40, level=1)
        await put(objects, *some, wide)
        await manifests.publish_companions(STREAM, [*some[:5], wide], [])
        head = await manifests.trim(STREAM, 20)
        assert await listed(manifests, head) == {some[2].object, wide.object}
        # Sums over entries of which some are gone are not right any more.
        head = await manifests.trim(STREAM, 30)
        assert await listed(manifests, head) == set()
        head, new = await manifests.publish_companions(STREAM, some[:1], [])
        assert new == []
        head = await manifests.delete_stream(facts(1000), clock.now_ns(), "deleted")
        assert (head.companions, head.companion_pages, head.retired) == ((), (), ())
        with pytest.raises(StreamDeletedError):
            await manifests.publish_companions(STREAM, some[:1], [])

    run("retention", work)


def test_any_number_of_them_at_the_same_cost() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        pages = IndexFilePages(objects, STREAM, companions_max=2)
        listed_ = ListedIndexFiles((), ())
        everything = [companion("col", first, first) for first in range(1, 2 * INDEX_FILE_PAGES_MAX + 10)]
        sizes: list[int] = []
        for start in range(0, len(everything), 4):
            before = objects.bytes_out
            grown = (*listed_.companions, *everything[start : start + 4])
            listed_ = await pages.roll(ListedIndexFiles(listed_.pages, grown))
            sizes.append(objects.bytes_out - before)
        assert max(ref.level for ref in listed_.pages) == 1
        assert [one async for one in pages.walk(listed_)] == everything
        # Pages of pages are written now and then; all other publications cost the same.
        assert sorted(sizes)[-3] <= 2 * sorted(sizes)[len(sizes) // 2] + 100
        gone = {everything[0].object, everything[3].object, everything[-1].object}
        shorter = await pages.without(listed_, gone)
        left = [one async for one in pages.walk(shorter)]
        assert left == [one for one in everything if one.object not in gone]
        assert await pages.find_listed(shorter, {one.object for one in everything[:5]}) == {
            one.object for one in everything[:5] if one.object not in gone
        }

    run("many", work)


def test_a_head_stays_small() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore, clock: FakeClock) -> None:
        some = [companion("col", first, first) for first in range(1, INDEX_FILES_MAX + 11)]
        await put(objects, *some)
        head, _ = await manifests.publish_companions(STREAM, some, [])
        assert (len(head.companion_pages), len(head.companions)) == (1, 10)
        assert head.companion_count == len(some)
        assert len(encode_manifest(head)) < 100_000
        head, _ = await manifests.publish_companions(STREAM, [], [some[3].object])
        assert head.companion_count == len(some) - 1
        assert [one.object for one in head.retired] == [some[3].object]

    run("small", work)


def test_coverage_is_of_entries_not_of_files() -> None:
    plan = PlanRecord(1, PLAN, {"col": "f1", "exact": "e1"})
    files = [
        companion("col", 1, 20),
        companion("col", 21, 30),
        companion("col", 31, 40, print_="older"),
        companion("exact", 1, 10, print_="e1"),
    ]
    coverage = Coverage(plan, files)
    assert coverage.covers("col", 5, 25)
    assert not coverage.covers("col", 25, 35)
    assert coverage.missing(11, 20) == ("exact",)
    segments = run_of(1, 40, 10)
    found, stuck = uncovered_segments(segments, coverage, {segments[2].key})
    assert [(one.info.first, one.families) for one in found] == [(11, ("exact",)), (31, ("col", "exact"))]
    assert stuck == [segments[2]]
    assert stale_index_files(plan, files, coverage) == []
    newer = [*files, companion("col", 31, 40, text="new")]
    assert stale_index_files(plan, newer, Coverage(plan, newer)) == [files[2].object]
    assert stale_index_files(plan, [companion("fts", 1, 10)], coverage) == [companion("fts", 1, 10).object]


def test_the_newest_eight_come_first() -> None:
    plan = PlanRecord(1, PLAN, {"col": "f1"})
    found, _ = uncovered_segments(run_of(1, 100, 10), Coverage(plan, []), set())
    assert [one.info.first for one in build_order(found)] == [91, 81, 71, 61, 51, 41, 31, 21, 1, 11]
    assert [one.info.first for one in build_order(found[:3])] == [21, 11, 1]


def test_merges_are_of_neighbours_of_one_level() -> None:
    plan = PlanRecord(1, PLAN, {"exact": "f1", "col": "f1", "fts": "f1"})
    first, second, third = (companion("exact", start, start + 9) for start in (1, 11, 21))
    assert due_merges(plan, [first, third], RULE) == []
    (merge,) = due_merges(plan, [third, second, first], RULE)
    assert (merge.family, merge.level, merge.first, merge.last) == ("exact", 1, 1, 20)
    assert merge.inputs == (first, second)
    # Several files of one range go together; columns are not merged; the last level stays.
    parts = [companion("exact", 11, 20, text=text) for text in ("a", "b")]
    (merge,) = due_merges(plan, [first, *parts], RULE)
    assert list(merge.inputs) == [first, *parts]
    assert due_merges(plan, [companion("col", 1, 10), companion("col", 11, 20)], RULE) == []
    top = [companion("exact", 1, 20, level=2), companion("exact", 21, 40, level=2)]
    assert due_merges(plan, top, RULE) == []
    wide = [companion("fts", 1, 900_000), companion("fts", 900_001, 1_800_000)]
    assert due_merges(plan, wide, RULE) == []
