"""Nothing acknowledged is ever lost, nothing appears twice: writers, a real process, and SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.faults import Disk
from crash.ordeal import Ordeal


@pytest.mark.parametrize("seed", range(5))
def test_nothing_acknowledged_is_lost_or_doubled(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run(kills=5)


@pytest.mark.parametrize("seed", range(3))
def test_no_fault_of_the_disk_breaks_a_promise(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run_faults(rounds=4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 125))
def test_nothing_acknowledged_is_lost_or_doubled_all_night(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run(kills=10)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200, 220))
def test_no_fault_of_the_disk_breaks_a_promise_all_night(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run_faults(rounds=12)
