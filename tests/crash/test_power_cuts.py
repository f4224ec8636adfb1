"""Kills after which the disk has lost a part of what was not synced: torn at sectors and reordered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.ordeal import Ordeal
from crash.writeback import ANY, OVERTAKEN, WritebackDisk

NIGHTLY_RUNS, NIGHTLY_KILLS = 25, 20  # 500 kills


class PowerCuts(Ordeal):
    """After each death the power is cut; in some lives write-back fails before."""

    def __init__(self, directory: Path, disk: WritebackDisk) -> None:
        self.page_cache = disk
        super().__init__(disk.seed, directory, disk)

    def _one_life(self) -> None:
        if self.slow:
            self.page_cache.slow_syncs(4000)
        if self.random.random() < 0.3:
            mode = self.random.choice((ANY, OVERTAKEN))
            self.page_cache.fail_writeback(mode, skip=self.random.randint(0, 100))
        super()._one_life()

    def _between_lives(self) -> None:
        self.page_cache.cut_power(self.server.data_dir / "journal")


def run(directory: Path, disk: WritebackDisk, kills: int) -> None:
    PowerCuts(directory, disk).run(kills)
    print(f"{kills} kills, write-back failed {disk.failures} times")


def test_a_few_power_cuts_lose_nothing_acknowledged(tmp_path: Path, writeback: WritebackDisk) -> None:
    run(tmp_path, writeback, int(os.environ.get("POWER_CUTS") or 6))


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(NIGHTLY_RUNS))
def test_many_power_cuts_lose_nothing_acknowledged(
    index: int, tmp_path: Path, writeback: WritebackDisk
) -> None:
    run(tmp_path, writeback, NIGHTLY_KILLS)
