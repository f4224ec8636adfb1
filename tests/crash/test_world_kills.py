"""Writers, kills, a disk that fills up and a clock that is set: nothing acknowledged is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.faults import Disk
from crash.ordeal import Ordeal
from crash.station import eventually
from crash.world import World
from support.sealing import hot

KIB = 1024
HOUR_S = 3600.0
ROOM_BYTES = (0, 16 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
CLOCKS_S = (-90 * 24 * HOUR_S, -24 * HOUR_S, -HOUR_S, -1.0, 0.0, 1.0, HOUR_S, 24 * HOUR_S)
# With the small one the disk is really full before appends are refused.
RESERVES = ("1KiB", "2MiB")


class WorldOrdeal(Ordeal):
    """An ordeal whose disk gets full, and whose clock is set, instead of failing operations."""

    def __init__(
        self, seed: int, directory: Path, disk: Disk, world: World, *, sealing: bool = False
    ) -> None:
        reserve = {"TAILRACE_DISK_RESERVE_BYTES": RESERVES[seed % len(RESERVES)]}
        disk.env = {**world.with_faults(disk.env), **reserve}
        self.world = world
        self.segments = 0
        super().__init__(seed, directory, disk, sealing=sealing)

    def run_world(self, rounds: int) -> None:
        try:
            for _ in range(rounds):
                self._one_change()
                self.crew.settle()
                if self.sealing:
                    eventually(self._sealed_again, "sealing continues by itself")
        finally:
            self.crew.end()
            self.server.kill()
            print(self.server.log)
        assert len(self.stream.entries) > 20 * rounds, "the writers hardly wrote"

    def _sealed_again(self) -> bool:
        """Whether segments were recorded since this was last true."""
        before, self.segments = self.segments, hot(self.server.data_dir).get("segments", 0)
        return self.segments > before

    def _one_change(self) -> None:
        """Under full load; now and then with a kill on top of it."""
        self.crew.go()
        self.crew.wait_steps(self.random.randint(50, 300))
        if self.random.random() < 0.6:
            self.world.resize_disk(self.world.used_bytes() + self.random.choice(ROOM_BYTES))
        if self.random.random() < 0.6:
            self.world.set_clock(self.random.choice(CLOCKS_S))
        self.crew.wait_steps(self.random.randint(50, 500))
        killed = self.random.random() < 0.5
        if killed:
            self.server.kill()
            self.kills += 1
        self.crew.rest()
        self.world.resize_disk(0)
        if killed:
            self.server.start()
        eventually(lambda: self.server.status("/readyz") == 200, "the server is ready again by itself")


def test_nothing_is_lost_on_a_full_disk_or_under_another_clock(
    seed: int, tmp_path: Path, disk: Disk, world: World
) -> None:
    WorldOrdeal(seed, tmp_path, disk, world).run_world(rounds=5)


def test_nothing_is_lost_while_everything_is_sealed(
    seed: int, tmp_path: Path, disk: Disk, world: World
) -> None:
    ordeal = WorldOrdeal(seed, tmp_path, disk, world, sealing=True)
    ordeal.run_world(rounds=5)
    ordeal.check_bucket()


@pytest.mark.nightly
@pytest.mark.parametrize("sealing", [False, True])
@pytest.mark.parametrize("night", range(10))
def test_nothing_is_lost_on_a_full_disk_or_under_another_clock_all_night(
    seed: int, tmp_path: Path, disk: Disk, world: World, night: int, sealing: bool
) -> None:
    ordeal = WorldOrdeal(seed + night, tmp_path, disk, world, sealing=sealing)
    ordeal.run_world(rounds=20)
    if sealing:
        ordeal.check_bucket()
