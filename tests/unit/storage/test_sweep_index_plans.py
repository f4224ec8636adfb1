"""Plans of the pipeline in the bucket: those that nobody needs are swept, and never another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.manifests import CrashError, CrashingObjects, facts, segment
from tailrace.common.clock import SYSTEM_CLOCK, Clock, FakeClock
from tailrace.common.limits import Limits
from tailrace.log.segment_catalogue import INDEX_DOCUMENT, encode_plans
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.index_publication import IndexFileSealer
from tailrace.storage.manifests.model import ManifestHead
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.meta_objects import DocumentObject, MetaObjects, document_key
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.object_store.listing import list_objects
from tailrace.storage.sealer_process import ManifestPublication, SealerJob, SealerReport
from tailrace.storage.segments.index_files import (
    IndexFile,
    PlanHistory,
    PlanRecord,
    index_file_name,
    plan_name,
)
from tailrace.storage.segments.model import stream_prefix
from tailrace.storage.sweep import Orphan, Sweeper

_NAMES = count()
HOUR_S = 3600
MONTH_NS = 30 * 24 * HOUR_S * 10**9
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)
RECORDED, REMEMBERED, BUILT_BY, NOBODYS, SUPERSEDED = (f"sha256:{digit * 64}" for digit in "abcde")


def run(work: Callable[[ObjectStore, ManifestStore], Awaitable[None]]) -> None:
    async def running() -> None:
        objects = open_object_store(f"memory://sweep-plans-{next(_NAMES)}")
        manifests = ManifestStore(objects, 1)
        await _fill(objects, manifests)
        await work(objects, manifests)
        await objects.close()

    asyncio.run(running())


def _book(*hashes: str) -> PlanHistory:
    return PlanHistory(False, tuple(PlanRecord(number, each, {}) for number, each in enumerate(hashes)))


async def _fill(objects: ObjectStore, manifests: ManifestStore) -> None:
    """A stream with four plans: one that the bucket remembers, one that a companion was built by."""
    await MetaObjects(objects, 1).put(
        document_key(STREAM, INDEX_DOCUMENT),
        DocumentObject(document=msgspec.Raw(encode_plans(_book(RECORDED)))),
    )
    await manifests.publish(facts(4, meta_keys=(INDEX_DOCUMENT,)), [segment(1, 4)])
    name = index_file_name(BUILT_BY, "col", 1, 4, "0" * 64, "parquet")
    await objects.create(PREFIX + name, b"a companion")
    companion = IndexFile("col", 1, 4, 4, name, 11, "0" * 64, {}, BUILT_BY)
    await manifests.publish_companions(STREAM, [companion], [])
    for plan_hash in (RECORDED, REMEMBERED, BUILT_BY, NOBODYS):
        await objects.create(PREFIX + plan_name(plan_hash), b"a plan")


async def _remembered(_head: ManifestHead) -> PlanHistory:
    return _book(REMEMBERED)


def _later(hours: float) -> FakeClock:
    clock = FakeClock(SYSTEM_CLOCK.now_ns())
    clock.advance(hours * HOUR_S)
    return clock


async def _sweep(objects: ObjectStore, hours: float, **options: Any) -> set[str]:
    found: list[Orphan] = []
    await Sweeper(objects, found.append, tombstone_ns=MONTH_NS, clock=_later(hours), **options).bucket()
    return {orphan.key.removeprefix(PREFIX) for orphan in found}


async def _plans(objects: ObjectStore) -> set[str]:
    return {info.key.removeprefix(PREFIX) async for info in list_objects(objects, f"{PREFIX}plans/")}


def _names(hashes: Iterable[str]) -> set[str]:
    return {plan_name(plan_hash) for plan_hash in hashes}


def test_the_owner_sweeps_what_nobody_names_when_it_is_old() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        options: dict[str, Any] = {"owner": manifests, "remembered": _remembered}
        assert await _sweep(objects, 23, **options) == set()
        assert await _sweep(objects, 25, dry_run=True, **options) == {plan_name(NOBODYS)}
        assert await _sweep(objects, 25, **options) == {plan_name(NOBODYS)}
        assert await _plans(objects) == _names((RECORDED, REMEMBERED, BUILT_BY))
        assert await _sweep(objects, 1000, **options) == set()

    run(work)


def test_a_superseded_plan_goes_when_no_companion_was_built_by_it() -> None:
    async def remembered(_head: ManifestHead) -> PlanHistory:
        return _book(SUPERSEDED, BUILT_BY, REMEMBERED)

    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        book = encode_plans(_book(SUPERSEDED, BUILT_BY, RECORDED))
        key = document_key(STREAM, INDEX_DOCUMENT)
        await objects.delete([key])
        await MetaObjects(objects, 1).put(key, DocumentObject(document=msgspec.Raw(book)))
        await objects.create(PREFIX + plan_name(SUPERSEDED), b"a plan")
        options: dict[str, Any] = {"owner": manifests, "remembered": remembered}
        assert await _sweep(objects, 23, **options) == set()
        assert await _sweep(objects, 25, **options) == _names((SUPERSEDED, NOBODYS))
        assert await _plans(objects) == _names((RECORDED, REMEMBERED, BUILT_BY))

    run(work)


@pytest.mark.parametrize("share", ["first", "rest"])
def test_one_of_several_workers_sweeps_plans_of_its_own_streams_only(share: str) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        options: dict[str, Any] = {"owner": manifests, "remembered": _remembered, "share": share}
        assert await _sweep(objects, 1000, owns=_nobodys, **options) == set()
        assert await _sweep(objects, 1000, owns=_ours, **options) == {plan_name(NOBODYS)}

    run(work)


async def _ours(_head: ManifestHead) -> bool:
    return True


async def _nobodys(_head: ManifestHead) -> bool:
    return False


def test_beside_a_server_nobody_else_sweeps_plans_and_alone_one_does() -> None:
    async def work(objects: ObjectStore, _: ManifestStore) -> None:
        assert await _sweep(objects, 1000) == set()
        assert await _sweep(objects, 2, offline=True) == _names((REMEMBERED, NOBODYS))

    run(work)


def test_plans_go_with_their_stream() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await manifests.delete_stream(facts(4), SYSTEM_CLOCK.now_ns(), "deleted")
        await _sweep(objects, 2)
        assert await _plans(objects) == set()

    run(work)


@pytest.mark.parametrize("document", [None, b"", b"{}", b'{"version":1,"document":{"plans":7}}'])
def test_what_the_stream_remembers_is_lost_or_damaged_and_nothing_goes(document: bytes | None) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        key = document_key(STREAM, INDEX_DOCUMENT)
        await objects.delete([key])
        if document is not None:
            await objects.create(key, document)
        assert await _sweep(objects, 1000, owner=manifests, remembered=_remembered) == set()

    run(work)


def test_a_plan_that_is_stored_again_meanwhile_stays() -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        async def store_again(head: ManifestHead) -> PlanHistory:
            """After the listing: too late to be seen in it."""
            key = PREFIX + plan_name(NOBODYS)
            data, etag = await objects.get(key)
            await objects.replace(key, data, etag)
            return await _remembered(head)

        now_ns = SYSTEM_CLOCK.now_ns()
        swept = await _sweep(objects, 0, owner=manifests, remembered=store_again, grace_ns=0, orphan_age_ns=0)
        assert swept == set()
        assert (await objects.head(PREFIX + plan_name(NOBODYS))).modified_ns >= now_ns

    run(work)


@pytest.mark.parametrize("after", [False, True])
def test_a_sweep_that_dies_anywhere_is_just_done_again(after: bool) -> None:
    async def work(objects: ObjectStore, _: ManifestStore) -> None:
        for calls in range(12):
            dying = CrashingObjects(objects, calls, after=after)
            try:
                await _sweep(dying, 25, owner=ManifestStore(dying, 1), remembered=_remembered)
            except CrashError:
                pass
            assert await _plans(objects) >= _names((RECORDED, REMEMBERED, BUILT_BY))
        await _sweep(objects, 25, owner=ManifestStore(objects, 1), remembered=_remembered)
        assert await _plans(objects) == _names((RECORDED, REMEMBERED, BUILT_BY))

    run(work)


async def _store(objects: ObjectStore, manifests: ManifestStore, path: Path, clock: Clock) -> None:
    """As the sealer does it."""
    with ThreadPoolExecutor(1) as threads:
        sealing = IndexFileSealer(StoredStreams(path), objects, manifests, threads, Limits(), clock)
        publication = ManifestPublication(stream_id=STREAM, objects={plan_name(NOBODYS): b"a plan"})
        job = SealerJob(id=1, kind="plan", numbers=[1], publication=publication)
        await sealing.do(job, SealerReport(id=1))


def test_an_old_plan_that_is_wanted_again_is_young_again(tmp_path: Path) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        key = PREFIX + plan_name(NOBODYS)
        before = await objects.head(key)
        await _store(objects, manifests, tmp_path / "hot.db", SYSTEM_CLOCK)
        assert await objects.head(key) == before, "it is young already"
        await _store(objects, manifests, tmp_path / "hot.db", _later(13))
        assert (await objects.head(key)).modified_ns > before.modified_ns
        assert (await objects.get(key))[0] == b"a plan"

    run(work)
