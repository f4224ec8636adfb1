"""Manifests against a list: any order of changes, repeats, take-overs and crashes gives what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypedDict, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.manifests import CREATED_NS, CrashError, CrashingObjects, facts, segment
from tailrace.storage.manifests.model import ManifestHead, StreamDeletedError, StreamFacts
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectExistsError, ObjectStore, open_object_store
from tailrace.storage.object_store.listing import list_objects
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

_NAMES = count()
T = TypeVar("T")
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)

Work = Callable[[ManifestStore, ObjectStore], Awaitable[ManifestHead]]
LENGTHS = st.lists(st.integers(1, 5), max_size=7)
GRACE_NS = 10**9


class Sizes(TypedDict):
    segments_max: int
    pages_max: int


class ManifestMachine(RuleBasedStateMachine):
    """The model is the list of all segments ever recorded, and the few numbers of the head."""

    @initialize(segments_max=st.integers(1, 4), pages_max=st.integers(2, 4))
    def begin(self, segments_max: int, pages_max: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.objects = open_object_store(f"memory://model-{next(_NAMES)}")
        self.sizes = Sizes(segments_max=segments_max, pages_max=pages_max)
        self.fence = 1
        self.recorded: list[SegmentInfo] = []
        self.epochs: tuple[tuple[int, int], ...] = ((0, 1),)
        self.earliest = 0
        self.reached: set[int] = set()  # entries up to `earliest` that forks still show
        self.as_of = 0
        self.closed = False
        self.producers: dict[str, tuple[int, int]] = {}
        self.exists = False
        self.deleted = False
        self.crashed = False
        self.generation = 0
        self.joined = 0
        self.replaced: set[str] = set()  # objects that stay for a while after others took their place

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.do(self.objects.close())
            self.loop.close()

    def do(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    @property
    def through(self) -> int:
        return self.recorded[-1].last if self.recorded else 0

    def facts(self, tail: int) -> StreamFacts:
        return facts(tail, as_of=self.as_of, epochs=self.epochs, closed=self.closed)

    def attempt(self, work: Work, crash: tuple[int, bool] | None) -> ManifestHead:
        """Do it; after a crash in the midst of it, do it again, as a restarted process would."""
        if crash is not None:
            dying = CrashingObjects(self.objects, crash[0], after=crash[1])
            try:
                return self.do(work(ManifestStore(dying, self.fence, **self.sizes), dying))
            except CrashError:
                self.crashed = True
        return self.do(work(ManifestStore(self.objects, self.fence, **self.sizes), self.objects))

    CRASH = st.none() | st.tuples(st.integers(0, 12), st.booleans())

    @precondition(lambda self: not self.deleted)
    @rule(
        lengths=LENGTHS, closing=st.booleans(), seq=st.integers(0, 2), repeated=st.integers(0, 6), crash=CRASH
    )
    def publish(
        self, lengths: list[int], closing: bool, seq: int, repeated: int, crash: tuple[int, bool] | None
    ) -> None:
        added: list[SegmentInfo] = []
        for length in lengths:
            first = (added[-1].last if added else self.through) + 1
            added.append(segment(first, first + length - 1, epoch=self.epochs[-1][0]))
        again = self.recorded[len(self.recorded) - repeated :] if repeated else []
        self.as_of += 1
        self.closed = closing
        self.producers = {"p": (0, seq)} if seq else {}
        given = self.facts(added[-1].last if added else self.through)

        async def work(manifests: ManifestStore, objects: ObjectStore) -> ManifestHead:
            for info in added:
                try:
                    await objects.create(PREFIX + info.key, b"x")
                except ObjectExistsError:
                    pass
            return await manifests.publish(given, [*again, *added], self.producers)

        head = self.attempt(work, crash)
        self.recorded += added
        self.exists = True
        assert (head.tail, head.closed, head.as_of) == (self.through, closing, self.as_of)

    @precondition(lambda self: self.exists and not self.deleted)
    @rule(age=st.integers(1, 3))
    def publish_an_older_snapshot(self, age: int) -> None:
        """Nothing changes."""
        late = facts(self.through, as_of=self.as_of - age, epochs=self.epochs, closed=not self.closed)
        manifests = ManifestStore(self.objects, self.fence, **self.sizes)
        before = self.do(manifests.load(STREAM))
        assert before is not None
        head = self.do(manifests.publish(late, self.recorded[-2:], {"other": (9, 9)}))
        if before.head.as_of > late.as_of:
            assert self.do(manifests.load(STREAM)) == before
        else:  # a new owner has not published yet, and takes any snapshot of its own
            self.closed, self.producers = not self.closed, {"other": (9, 9)}
            self.as_of = head.as_of

    @precondition(lambda self: self.exists and not self.deleted)
    @rule(kept=st.integers(0, 12), shown=st.sets(st.integers(1, 60)), crash=CRASH)
    def retain(self, kept: int, shown: set[int], crash: tuple[int, bool] | None) -> None:
        earliest = max(0, self.through - kept)
        # What no fork shows any more is never shown again.
        reached = shown & (self.reached | set(range(self.earliest + 1, earliest + 1)))

        async def work(manifests: ManifestStore, objects: ObjectStore) -> ManifestHead:
            return await manifests.trim(STREAM, earliest, [(entry - 1, entry) for entry in reached])

        self.attempt(work, crash)
        self.earliest = max(self.earliest, earliest)
        self.reached = reached

    @precondition(lambda self: self.exists and not self.deleted)
    @rule(place=st.integers(0, 20), count=st.integers(2, 9), crash=CRASH)
    def compact(self, place: int, count: int, crash: tuple[int, bool] | None) -> None:
        shown = [info for info in self.recorded if info.first > self.earliest]
        inputs = shown[place : place + count]
        if len(inputs) < 2 or inputs[0].epoch != inputs[-1].epoch:
            return
        self.joined += 1
        joined = segment(
            inputs[0].first, inputs[-1].last, epoch=inputs[0].epoch, content=f"joined {self.joined}"
        )

        async def work(manifests: ManifestStore, objects: ObjectStore) -> ManifestHead:
            try:
                await objects.create(PREFIX + joined.key, b"x")
            except ObjectExistsError:
                pass
            return await manifests.compact(STREAM, joined, inputs, GRACE_NS)

        head = self.attempt(work, crash)
        assert any(one.first <= joined.first and joined.last <= one.last for one in head.replaced)
        at = self.recorded.index(inputs[0])
        self.recorded[at : at + len(inputs)] = [joined]
        self.replaced |= {info.key for info in inputs}

    @precondition(lambda self: self.exists)
    @rule(new_epoch=st.booleans(), crash=CRASH)
    def take_over(self, new_epoch: bool, crash: tuple[int, bool] | None) -> None:
        self.fence += 1
        if new_epoch:
            self.epochs = (*self.epochs, (self.epochs[-1][0] + 1, self.through + 1))

        async def work(manifests: ManifestStore, objects: ObjectStore) -> ManifestHead:
            return await manifests.take_fence(STREAM, self.epochs)

        head = self.attempt(work, crash)
        self.as_of = 0
        assert head.fence == self.fence

    @rule(crash=CRASH)
    @precondition(lambda self: self.exists and len(self.recorded) > 8)
    def bury(self, crash: tuple[int, bool] | None) -> None:
        async def work(manifests: ManifestStore, objects: ObjectStore) -> ManifestHead:
            return await manifests.delete_stream(self.facts(self.through), CREATED_NS + 1, "deleted")

        self.attempt(work, crash)
        self.deleted = True

    @precondition(lambda self: self.deleted)
    @rule()
    def publish_to_a_tombstone(self) -> None:
        manifests = ManifestStore(self.objects, self.fence, **self.sizes)
        try:
            self.do(
                manifests.publish(self.facts(self.through + 1), [segment(self.through + 1, self.through + 1)])
            )
        except StreamDeletedError:
            return
        raise AssertionError("a buried stream took a segment")

    def is_kept(self, info: SegmentInfo) -> bool:
        entries = range(info.first, info.last + 1)
        return info.last > self.earliest or not self.reached.isdisjoint(entries)

    @invariant()
    def the_bucket_says_what_the_list_says(self) -> None:
        if hasattr(self, "loop"):
            self.do(self._compare())

    async def _compare(self) -> None:
        manifests = ManifestStore(self.objects, self.fence, **self.sizes)
        stored = await manifests.load(STREAM)
        assert (stored is not None) == self.exists
        if stored is None:
            return
        head = stored.head
        kept = [] if self.deleted else [info for info in self.recorded if self.is_kept(info)]
        assert [info async for info in manifests.segments(head)] == kept
        assert (head.segment_count, head.segment_bytes) == (len(kept), sum(info.bytes for info in kept))
        assert (head.uploaded_through, head.earliest, head.epochs) == (
            self.through,
            self.earliest,
            self.epochs,
        )
        assert (head.fence, head.deleted is not None) == (self.fence, self.deleted)
        assert head.generation >= self.generation
        self.generation = head.generation
        assert len(head.segments) <= self.sizes["segments_max"]
        if not self.deleted:
            assert await manifests.producers(head) == self.producers
            assert head.closed == self.closed
        named = {"manifest.json", *(info.key for info in kept)}
        named |= {ref.key async for ref in manifests.pages(STREAM).walk_pages(head.pages)}
        if head.producers_key is not None:
            named.add(head.producers_key)
        there = {info.key.removeprefix(PREFIX) async for info in list_objects(self.objects, PREFIX)}
        assert named <= there
        if not self.crashed:
            assert there - named <= self.replaced, "objects that nobody names were left without a crash"


TestManifestModel = ManifestMachine.TestCase
TestManifestModel.settings = settings(max_examples=80, stateful_step_count=25)
