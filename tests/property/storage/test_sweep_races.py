"""A sweep beside a writer, their object operations interleaved at random: nothing that is recorded goes.

The grace time is zero here. What protects a segment is the rule alone; pages and producers, which are
protected by their age, are left out.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.manifests import facts, segment
from support.turns import Turns, interleave
from tailrace.common.clock import SYSTEM_CLOCK, FakeClock
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectExistsError, ObjectStore, open_object_store
from tailrace.storage.object_store.listing import list_objects
from tailrace.storage.segments.model import SegmentInfo, stream_prefix
from tailrace.storage.sweep import Orphan, Sweeper

_NAMES = count()
STREAM = facts(0).stream_id
PREFIX = stream_prefix(STREAM)

# What a sealer may do with so many entries: record them, die before that, die and then cut them otherwise.
Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "abandon", "retain"]), st.integers(1, 4)), max_size=8
)


class Sealer:
    def __init__(self, objects: Turns, steps: list[Step]) -> None:
        self._objects: Any = objects
        self._manifests = ManifestStore(self._objects, 1)
        self._steps = steps
        self.through = self.earliest = 0
        self.recorded: list[SegmentInfo] = []

    async def run(self) -> None:
        await self._manifests.publish(facts(0))
        for kind, size in self._steps:
            if kind == "retain":
                self.earliest = max(self.earliest, self.through - size)
                await self._manifests.trim(STREAM, self.earliest)
                continue
            info = segment(self.through + 1, self.through + size)
            try:
                await self._objects.create(PREFIX + info.key, info.key.encode())
            except ObjectExistsError:
                pass  # one that died had come as far
            if kind == "publish":
                await self._manifests.publish(facts(info.last), [info])
                self.recorded.append(info)
                self.through = info.last


async def _sweep(objects: Any, times: int) -> None:
    clock = FakeClock(SYSTEM_CLOCK.now_ns() + 3600 * 10**9)
    orphans: list[Orphan] = []
    sweeper = Sweeper(objects, orphans.append, grace_ns=0, tombstone_ns=10**18, clock=clock)
    for _time in range(times):
        await sweeper.bucket()


async def _race(data: st.DataObject, steps: list[Step], times: int) -> None:
    objects: ObjectStore = open_object_store(f"memory://sweep-races-{next(_NAMES)}")
    turns = [Turns(objects), Turns(objects)]
    sealer = Sealer(turns[0], steps)
    await interleave(data, [(turns[0], sealer.run()), (turns[1], _sweep(turns[1], times))])
    manifests = ManifestStore(objects, 1)
    stored = await manifests.load(STREAM)
    assert stored is not None
    kept = [info for info in sealer.recorded if info.last > sealer.earliest]
    assert [info async for info in manifests.segments(stored.head)] == kept
    for info in kept:
        assert (await objects.get(PREFIX + info.key))[0] == info.key.encode()
    # Once the writer rests, a sweep leaves only what may still be recorded.
    await _sweep(objects, 1)
    named = {PREFIX + info.key for info in kept}
    async for found in list_objects(objects, PREFIX + "segments/"):
        assert found.key in named or f"-{sealer.through + 1:020}-" in found.key
    await objects.close()


@given(st.data(), STEPS, st.integers(1, 5))
def test_a_sweep_takes_nothing_that_is_or_can_be_recorded(
    data: st.DataObject, steps: list[Step], times: int
) -> None:
    asyncio.run(_race(data, steps, times))
