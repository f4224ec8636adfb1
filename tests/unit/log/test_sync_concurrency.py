"""How many syncs are worth having at once, learnt from how long they take."""

from __future__ import annotations

import pytest

from tailrace.log.commit import SYNCS_PER_PROBE, SyncConcurrency


class Disk:
    """Syncs take `each_s`; `in_turn` they wait for one another. The next one begins as soon as it may."""

    def __init__(self, each_s: float, *, in_turn: bool) -> None:
        self.each_s = each_s
        self.in_turn = in_turn
        self._now = 0.0
        self._free_at = 0.0
        self._under_way: list[tuple[float, float, int]] = []  # end, begin, how many there were

    def run(self, overlap: SyncConcurrency, syncs: int) -> float:
        """How long so many take."""
        begun_at = self._now
        for _ in range(syncs):
            while len(self._under_way) < overlap.permitted:
                start = max(self._now, self._free_at) if self.in_turn else self._now
                self._free_at = start + self.each_s
                self._under_way.append((self._free_at, self._now, len(self._under_way) + 1))
            self._now, began, under_way = self._under_way.pop(0)
            overlap.record_sync(self._now - began, under_way)
        return self._now - begun_at


def test_one_is_enough_for_a_quick_disk() -> None:
    overlap = SyncConcurrency(4)
    Disk(0.0003, in_turn=False).run(overlap, 200)
    assert overlap.permitted == 1


def test_several_on_a_slow_disk_that_works_on_them_together() -> None:
    overlap = SyncConcurrency(4)
    disk = Disk(0.005, in_turn=False)
    disk.run(overlap, 20)
    assert overlap.permitted == 4
    assert disk.run(overlap, 1000) == pytest.approx(1000 * 0.005 / 4, rel=0.05)


def test_one_on_a_slow_disk_that_does_them_in_turn() -> None:
    overlap = SyncConcurrency(4)
    disk = Disk(0.005, in_turn=True)
    disk.run(overlap, 100)
    seen: list[int] = []
    for _ in range(10 * SYNCS_PER_PROBE):
        disk.run(overlap, 1)
        seen.append(overlap.permitted)
    assert seen.count(1) > 0.9 * len(seen)
    assert set(seen) == {1, 2}, "now and then it looks again"


def test_a_disk_that_changes_its_ways() -> None:
    overlap = SyncConcurrency(4)
    disk = Disk(0.005, in_turn=True)
    disk.run(overlap, 200)
    disk.in_turn = False
    disk.run(overlap, 40 * SYNCS_PER_PROBE)
    assert overlap.permitted == 4
    disk.in_turn = True
    disk.run(overlap, 200)
    assert overlap.permitted < 4
    disk.each_s = 0.0002
    disk.run(overlap, 200)
    assert overlap.permitted == 1


def test_never_more_than_is_allowed() -> None:
    overlap = SyncConcurrency(1)
    Disk(0.005, in_turn=True).run(overlap, 10 * SYNCS_PER_PROBE)
    assert overlap.permitted == 1
