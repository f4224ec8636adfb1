"""Manifests: what is recorded, what a repeat changes, and who may change it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from support.manifests import CREATED_NS, facts, run_of, segment
from support.s3 import S3Server
from tailrace.storage.manifests.model import (
    FencedError,
    ManifestConflictError,
    ManifestCorruptError,
    ManifestHead,
    RecordedLifetime,
    StreamDeletedError,
)
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectConflictError, ObjectStore, open_object_store
from tailrace.storage.object_store.listing import list_objects, list_stream_ids
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

T = TypeVar("T")
_NAMES = count()
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "memory":
        return f"memory://manifest-{next(_NAMES)}"
    if request.param == "file":
        return (tmp_path / "objects").as_uri()
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return server.url(f"manifest-{next(_NAMES)}")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ObjectStore]:
    objects = open_object_store(url)
    try:
        yield objects
    finally:
        await objects.close()


def on(url: str, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
    async def run() -> T:
        async with opened(url) as objects:
            return await work(objects)

    return asyncio.run(run())


async def listed(manifests: ManifestStore, head: ManifestHead) -> list[SegmentInfo]:
    return [info async for info in manifests.segments(head)]


async def keys_of(objects: ObjectStore) -> list[str]:
    return [info.key.removeprefix(PREFIX) async for info in list_objects(objects, PREFIX)]


async def head_of(manifests: ManifestStore) -> ManifestHead:
    stored = await manifests.load(STREAM)
    assert stored is not None
    return stored.head


def test_what_is_published_is_what_is_loaded(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 3)
        assert await manifests.load(STREAM) is None
        given = facts(
            20,
            lifetime=RecordedLifetime(ttl_s=60),
            closed=True,
            closed_by=("p", 1, 2),
            seq=b"\x00\xff",
            size_bytes=240,
        )
        head = await manifests.publish(given, run_of(1, 20, 10), {"p": (1, 2)})
        assert head == await head_of(manifests)
        assert (head.fence, head.generation, head.uploaded_through, head.earliest) == (3, 1, 20, 0)
        assert (head.closed, head.closed_by, head.seq, head.tail) == (True, ("p", 1, 2), b"\x00\xff", 20)
        assert await listed(manifests, head) == run_of(1, 20, 10)
        assert await manifests.producers(head) == {"p": (1, 2)}
        assert [found async for found in list_stream_ids(objects)] == [STREAM]

    on(url, work)


def test_a_repeat_changes_nothing(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        first = await manifests.publish(facts(10), run_of(1, 10, 5), {"p": (0, 1)})
        before = await manifests.load(STREAM)
        writes = objects.requests["replace"] + objects.requests["create"]
        assert await manifests.publish(facts(10), run_of(1, 10, 5), {"p": (0, 1)}) == first
        assert await manifests.publish(facts(10)) == first
        assert await manifests.load(STREAM) == before
        assert objects.requests["replace"] + objects.requests["create"] == writes
        # What was recorded before a crash comes again together with what is new.
        head = await manifests.publish(facts(12), [segment(6, 10), segment(11, 12)])
        assert await listed(manifests, head) == [*run_of(1, 10, 5), segment(11, 12)]

    on(url, work)


@pytest.mark.parametrize(
    "added",
    [
        [segment(12, 15)],  # a hole
        [segment(8, 12)],  # half recorded, half new
        [segment(6, 10, content="other")],  # the same entries with other content
        [segment(11, 12), segment(14, 15)],  # a hole inside
        [segment(11, 12), segment(12, 15)],  # an entry twice
    ],
)
def test_segments_that_do_not_fit_are_refused(url: str, added: Sequence[SegmentInfo]) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        await manifests.publish(facts(10), run_of(1, 10, 5))
        before = await manifests.load(STREAM)
        with pytest.raises(ManifestConflictError):
            await manifests.publish(facts(15), added)
        assert await manifests.load(STREAM) == before

    on(url, work)


def test_a_fork_begins_behind_what_it_inherits(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        head = await manifests.publish(facts(7, fork_entry=7))
        assert (head.uploaded_through, head.tail) == (7, 7)
        with pytest.raises(ManifestConflictError):
            await manifests.publish(facts(9, fork_entry=7), [segment(1, 9)])
        head = await manifests.publish(facts(9, fork_entry=7), [segment(8, 9)])
        assert head.uploaded_through == 9

    on(url, work)


def test_state_is_recorded_only_together_with_its_entries(url: str) -> None:
    """Producers ahead of their entries would have the repeats of lost entries taken for duplicates."""

    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        await manifests.publish(facts(10), run_of(1, 10), {"p": (0, 9)})
        ahead = facts(12, closed=True, seq=b"z", lifetime=RecordedLifetime(ttl_s=5))
        head = await manifests.publish(ahead, [], {"p": (0, 11)})
        assert (head.closed, head.seq, head.tail, head.lifetime.ttl_s) == (False, None, 10, 5)
        assert await manifests.producers(head) == {"p": (0, 9)}
        head = await manifests.publish(ahead, [segment(11, 12)], {"p": (0, 11)})
        assert (head.closed, head.seq, head.tail) == (True, b"z", 12)
        assert await manifests.producers(head) == {"p": (0, 11)}

    on(url, work)


def test_an_older_snapshot_does_not_replace_a_newer_one(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        newer = await manifests.publish(facts(5, as_of=9, closed=True), run_of(1, 5), {"p": (0, 2)})
        older = await manifests.publish(facts(5, as_of=8), run_of(1, 5), {"p": (0, 1)})
        assert older == newer
        # Another owner counts its snapshots from the beginning.
        other = ManifestStore(objects, 2)
        await other.take_fence(STREAM)
        head = await other.publish(facts(5, as_of=1, epochs=((0, 1), (1, 6))))
        assert (head.as_of, head.fence, head.epoch) == (1, 2, 1)

    on(url, work)


def test_producers_are_written_only_when_they_change(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        for tail, state in ((1, {"p": (0, 1)}), (2, {"p": (0, 1)}), (3, {"p": (0, 2)}), (4, None)):
            await manifests.publish(facts(tail), [segment(tail, tail)], state)
        head = await head_of(manifests)
        assert head.producers_key is not None
        assert head.producers_key.startswith("producers/0000000003.")
        assert [key for key in await keys_of(objects) if key.startswith("producers/")] == [head.producers_key]
        head = await manifests.publish(facts(4), [], {})
        assert head.producers_key is None
        assert await manifests.producers(head) == {}

    on(url, work)


def test_a_higher_fence_ends_the_lower_one(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        first, second = ManifestStore(objects, 1), ManifestStore(objects, 2)
        await first.publish(facts(5), run_of(1, 5))
        stale = await first.load(STREAM)
        head = await second.take_fence(STREAM, ((0, 1), (1, 6)))
        assert (head.fence, head.epoch) == (2, 1)
        assert await second.take_fence(STREAM, ((0, 1), (1, 6))) == head
        before = await keys_of(objects)
        for late in (
            first.publish(facts(6), [segment(6, 6)]),
            first.publish(facts(6), [segment(6, 6)], known=stale),
            first.trim(STREAM, 2),
            first.delete_stream(facts(5), CREATED_NS + 1, "deleted"),
            first.take_fence(STREAM),
        ):
            with pytest.raises(FencedError):
                await late
        assert await head_of(first) == head
        assert await keys_of(objects) == before
        with pytest.raises(ManifestConflictError):
            await second.take_fence("0" * 32)

    on(url, work)


@pytest.mark.parametrize("other", [{"created_ns": CREATED_NS + 1}, {"epochs": ((0, 1), (1, 4))}])
def test_only_the_very_same_stream_is_taken_from_an_earlier_owner(url: str, other: dict[str, Any]) -> None:
    """Another server made a stream of this name, or restored this one and went on in an epoch of its own."""

    async def work(objects: ObjectStore) -> None:
        await ManifestStore(objects, 1).publish(facts(5), run_of(1, 5))
        later = ManifestStore(objects, 3)
        before = await later.load(STREAM)
        with pytest.raises(ManifestConflictError, match="adopted"):
            await later.publish(facts(6, **other), [segment(6, 6)])
        with pytest.raises(ManifestConflictError, match="adopted"):
            await later.delete_stream(facts(5, **other), CREATED_NS + 9, "deleted")
        with pytest.raises(ManifestConflictError, match="adopted"):
            await later.trim(STREAM, 2)
        assert await later.load(STREAM) == before
        # Its owner from before is back.
        head = await later.publish(facts(6), [segment(6, 6)])
        assert (head.fence, head.uploaded_through) == (3, 6)

    on(url, work)


def test_an_answer_that_got_lost_is_recognised(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        class Forgetful:
            """Replaces, and then says that somebody else was faster."""

            def __getattr__(self, name: str) -> object:
                return getattr(objects, name)

            async def replace(self, key: str, data: bytes, etag: str | None) -> str:
                await objects.replace(key, data, etag)
                raise ObjectConflictError(key, "another version")

        head = await ManifestStore(Forgetful(), 1).publish(facts(3), run_of(1, 3))  # pyright: ignore[reportArgumentType]
        assert head.generation == 1
        assert await head_of(ManifestStore(objects, 1)) == head

    on(url, work)


def test_pages_hold_what_the_head_cannot(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1, segments_max=3, pages_max=2)
        for entry in range(1, 61):
            head = await manifests.publish(facts(entry), [segment(entry, entry)])
            assert len(head.segments) <= 3
            assert all(sum(ref.level == level for ref in head.pages) <= 2 for level in range(6))
        head = await head_of(manifests)
        assert max(ref.level for ref in head.pages) >= 3
        assert (head.segment_count, head.segment_bytes) == (60, 60 * 110)
        assert await listed(manifests, head) == run_of(1, 60)
        assert [info.first async for info in manifests.segments(head, 17)] == list(range(17, 61))
        # A repeat of what lies in pages by now is compared with them.
        assert await manifests.publish(facts(60), [segment(4, 4)]) == head
        with pytest.raises(ManifestConflictError):
            await manifests.publish(facts(60), [segment(4, 4, content="other")])

    on(url, work)


def test_retention_shortens_pages_and_deletes_what_is_over(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1, segments_max=3, pages_max=2)
        for info in run_of(1, 120, 2):
            await objects.create(PREFIX + info.key, b"x")
            await manifests.publish(facts(info.last), [info])
        for earliest in (1, 2, 7, 31, 31, 60, 119):
            head = await manifests.trim(STREAM, earliest)
            assert head.earliest == earliest
            kept = [info for info in run_of(1, 120, 2) if info.last > earliest]
            assert await listed(manifests, head) == kept
            referred = {ref.key async for ref in manifests.pages(STREAM).walk_pages(head.pages)}
            keys = set(await keys_of(objects))
            assert keys == {"manifest.json", *referred, *(info.key for info in kept)}
        assert (await manifests.trim(STREAM, 5)).earliest == 119
        with pytest.raises(ManifestConflictError):
            await manifests.trim(STREAM, 121)
        head = await manifests.trim(STREAM, 120)
        assert (head.pages, head.segments, head.uploaded_through) == ((), (), 120)
        assert (await manifests.publish(facts(121), [segment(121, 121)])).segment_count == 1
        # A late repeat of something that was trimmed is no conflict.
        assert (await manifests.publish(facts(121), [segment(1, 2)])).uploaded_through == 121

    on(url, work)


def test_a_buried_stream_leaves_a_tombstone(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1, segments_max=2)
        for info in run_of(1, 9):
            await objects.create(PREFIX + info.key, b"x")
            await manifests.publish(facts(info.last), [info], {"p": (0, info.last)})
        await objects.create(PREFIX + "meta/schema.json", b"{}")
        head = await manifests.delete_stream(facts(9, epochs=((0, 1), (4, 8))), CREATED_NS + 50, "expired")
        assert head.deleted is not None
        assert (head.deleted.at_ns, head.deleted.reason, head.deleted.epoch) == (
            CREATED_NS + 50,
            "expired",
            4,
        )
        assert await keys_of(objects) == ["manifest.json"]
        # Repeated, with leftovers of a crash; the first tombstone stays.
        await objects.create(PREFIX + "producers/0000000001.00.json", b"{}")
        assert await manifests.delete_stream(facts(9), CREATED_NS + 70, "deleted") == head
        assert await keys_of(objects) == ["manifest.json"]
        with pytest.raises(StreamDeletedError):
            await manifests.publish(facts(10), [segment(10, 10)])
        # Long after, the name may be used again.
        assert not await manifests.forget(STREAM, CREATED_NS + 50)
        reborn = await manifests.publish(facts(1, created_ns=CREATED_NS + 99), [segment(1, 1)])
        assert (reborn.deleted, reborn.uploaded_through) == (None, 1)
        assert reborn.generation == head.generation + 1
        assert await manifests.delete_stream(facts(9), CREATED_NS + 60, "deleted") == reborn
        assert not await manifests.forget(STREAM, CREATED_NS + 1000)

    on(url, work)


def test_a_burial_under_an_older_clock_is_one_all_the_same(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        info = segment(1, 3)
        await objects.create(PREFIX + info.key, b"x")
        await manifests.publish(facts(3), [info])
        head = await manifests.delete_stream(facts(3), CREATED_NS - 10**15, "deleted")
        assert head.deleted is not None
        assert head.deleted.at_ns == CREATED_NS
        assert await keys_of(objects) == ["manifest.json"]
        with pytest.raises(StreamDeletedError):
            await manifests.publish(facts(3), [info])
        # Another stream of the name is one, also if the clock says that it was created before.
        other = await manifests.publish(facts(1, created_ns=CREATED_NS - 5), [segment(1, 1)])
        assert (other.deleted, other.uploaded_through) == (None, 1)

    on(url, work)


def test_a_stream_without_a_head_can_be_buried_and_forgotten(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1)
        head = await manifests.delete_stream(facts(0), CREATED_NS + 5, "deleted")
        assert head.deleted is not None
        assert (await head_of(manifests)).name == head.name
        assert await manifests.forget(STREAM, CREATED_NS + 6)
        assert await keys_of(objects) == []

    on(url, work)


def test_damage_is_named(url: str) -> None:
    async def work(objects: ObjectStore) -> None:
        manifests = ManifestStore(objects, 1, segments_max=1)
        head = await manifests.publish(facts(3), run_of(1, 3), {"p": (0, 3)})
        key = PREFIX + head.pages[0].key
        await objects.delete([key])
        await objects.create(key, b'{"version":1}')
        with pytest.raises(ManifestCorruptError, match="does not match its hash"):
            await listed(manifests, head)
        assert head.producers_key is not None
        await objects.delete([PREFIX + head.producers_key])
        await objects.create(PREFIX + head.producers_key, b"{}")
        with pytest.raises(ManifestCorruptError, match="does not match its hash"):
            await manifests.producers(head)
        for wrong in (
            b"{",
            b"[]",
            b'{"version":2}',
            msgspec.json.encode({**msgspec.to_builtins(head), "version": 2}),
        ):
            await objects.delete([PREFIX + "manifest.json"])
            await objects.create(PREFIX + "manifest.json", wrong)
            with pytest.raises(ManifestCorruptError):
                await manifests.load(STREAM)

    on(url, work)
