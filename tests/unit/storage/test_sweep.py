"""Sweeping a bucket: what nobody can name again goes, everything else stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from support.buckets import fill, named, upload
from support.manifests import CREATED_NS, CrashError, CrashingObjects, facts, run_of, segment
from tailrace.common.clock import SYSTEM_CLOCK, FakeClock
from tailrace.storage.manifests.model import ManifestHead
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.object_store.listing import list_objects
from tailrace.storage.segments.model import stream_prefix
from tailrace.storage.sweep import Orphan, Sweeper
from tailrace.storage.verify import Verifier, VerifyFinding

_NAMES = count()
HOUR_S = 3600
MONTH_NS = 30 * 24 * HOUR_S * 10**9
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)


def run(work: Callable[[ObjectStore, ManifestStore], Awaitable[None]]) -> None:
    async def running() -> None:
        objects = open_object_store(f"memory://sweep-{next(_NAMES)}")
        await work(objects, ManifestStore(objects, 1, segments_max=2, pages_max=2))
        await objects.close()

    asyncio.run(running())


def later(hours: float) -> FakeClock:
    """So much after now, which is when the objects of a test are made."""
    clock = FakeClock(SYSTEM_CLOCK.now_ns())
    clock.advance(hours * HOUR_S)
    return clock


async def sweep(objects: ObjectStore, hours: float, **options: Any) -> list[Orphan]:
    found: list[Orphan] = []
    sweeper = Sweeper(objects, found.append, tombstone_ns=MONTH_NS, clock=later(hours), **options)
    seen = await sweeper.bucket()
    assert (seen.orphans, seen.orphan_bytes) == (len(found), sum(orphan.bytes for orphan in found))
    return found


async def keys_of(objects: ObjectStore) -> set[str]:
    return {info.key.removeprefix(PREFIX) async for info in list_objects(objects, PREFIX)}


async def put(objects: ObjectStore, *keys: str) -> None:
    for key in keys:
        await objects.create(PREFIX + key, b"left behind")


def test_what_is_named_stays_and_what_is_over_goes() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        for info in run_of(1, 40, 4):
            await put(objects, info.key)
            await manifests.publish(facts(info.last), [info], {"p": (0, info.last)})
        await manifests.take_fence(STREAM, ((0, 1), (2, 41)))
        whole = await keys_of(objects)
        over = {
            segment(1, 4, content="lost").key,
            segment(39, 44, content="straddles").key,
            segment(41, 44, epoch=1, content="of an epoch that is over").key,
            "manifest/00000000000000000001-00000000000000000008.0123456789abcdef.json",
            "producers/0000000002.0123456789abcdef.json",
        }
        kept = {
            segment(41, 44, epoch=2).key,
            segment(45, 50, epoch=2).key,
            "meta/schema.json",
            "companions/x",
        }
        await put(objects, *over, *kept)
        assert await sweep(objects, 0.5) == []
        listed = await sweep(objects, 2, dry_run=True)
        assert {orphan.key.removeprefix(PREFIX) for orphan in listed} == over
        assert await keys_of(objects) == whole | over | kept
        assert await sweep(objects, 2) == listed
        assert await keys_of(objects) == whole | kept
        assert await sweep(objects, 2) == []
        assert await sweep(objects, 1000, offline=True) == []

    run(work)


def test_a_deleted_stream_loses_what_a_crash_left_of_it() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await manifests.publish(facts(4), [segment(1, 4)])
        now_ns = SYSTEM_CLOCK.now_ns()
        await manifests.delete_stream(facts(4), now_ns, "deleted")
        await put(objects, segment(1, 4).key, "meta/schema.json")
        assert {orphan.reason for orphan in await sweep(objects, 2)} == {"its stream was deleted"}
        assert await keys_of(objects) == {"manifest.json"}
        # Nobody needs the tombstone after a month, but only the owner may take it away.
        assert await sweep(objects, 31 * 24) == []
        assert await keys_of(objects) == {"manifest.json"}
        await sweep(objects, 31 * 24, offline=True)
        assert await keys_of(objects) == set()

    run(work)


def test_what_anybody_may_sweep_is_for_the_first_of_several_workers_and_tombstones_stay() -> None:
    async def owns(_head: ManifestHead) -> bool:
        return False

    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await manifests.publish(facts(2), [segment(1, 2)])
        await put(objects, segment(1, 1).key, "producers/0000000009.0123456789abcdef.json")
        options: dict[str, Any] = {"owner": manifests, "owns": owns}
        assert await sweep(objects, 2, share="rest", **options) == []
        assert len(await sweep(objects, 2, share="first", **options)) == 2
        await manifests.delete_stream(facts(2), SYSTEM_CLOCK.now_ns(), "deleted")
        await put(objects, "companions/x", "plans/x")
        assert await sweep(objects, 2, share="rest", **options) == []
        assert len(await sweep(objects, 2, share="first", **options)) == 2
        for share in ("rest", "first"):
            assert await sweep(objects, 24 * 40, share=share, **options) == []
        assert await keys_of(objects) == {"manifest.json"}
        await sweep(objects, 24 * 40, owner=manifests)
        assert await keys_of(objects) == set()

    run(work)


def test_another_life_in_the_folder_of_a_deleted_stream_is_left_alone() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await manifests.delete_stream(facts(0), CREATED_NS, "expired")
        await put(objects, segment(1, 4).key)  # long after the deletion
        assert await sweep(objects, 2) == []

    run(work)


def test_a_folder_without_a_head_is_swept_only_when_nobody_writes() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await put(objects, segment(1, 4).key)
        assert await sweep(objects, 100) == []
        assert len(await sweep(objects, 100, offline=True)) == 1
        assert await keys_of(objects) == set()

    run(work)


def test_a_damaged_manifest_protects_everything() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await put(objects, "manifest.json", segment(1, 4).key)
        assert await sweep(objects, 100, offline=True) == []
        assert len(await keys_of(objects)) == 2

    run(work)


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_of_a_change_or_a_sweep_leaves_a_bucket_that_verifies(
    tmp_path: Path, after: bool
) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await fill(objects, manifests, tmp_path, "orders", 12, 2)
        for calls in range(12):
            dying = CrashingObjects(objects, calls, after=after)
            through = 24 + 2 * calls
            for attempt in (ManifestStore(dying, 1, segments_max=2, pages_max=2), manifests):
                try:
                    if attempt is manifests:
                        info = await upload(objects, tmp_path, "orders", through + 1, 2)
                        await attempt.publish(named("orders", info.last), [info], {"p": (1, calls)})
                    await attempt.trim(named("orders", 0).stream_id, 3 * calls)
                except CrashError:
                    pass
            try:
                await sweep(CrashingObjects(objects, calls, after=after), 2)
            except CrashError:
                pass
            findings: list[VerifyFinding] = []
            seen = await Verifier(objects, findings.append).bucket()
            assert findings == []
            assert seen.entries == through + 2 - 3 * calls + (3 * calls) % 2
        await sweep(objects, 2)
        assert await sweep(objects, 2) == []
        head = await manifests.load(named("orders", 0).stream_id)
        assert head is not None
        left = {info.key async for info in list_objects(objects, stream_prefix(head.head.stream_id))}
        pages = [ref async for ref in manifests.pages(head.head.stream_id).walk_pages(head.head.pages)]
        assert len(left) == 1 + 1 + len(pages) + head.head.segment_count

    run(work)
