"""Nothing acknowledged is ever lost, nothing appears twice: writers, a real process, and SIGKILL."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from crash.faults import SYNC, WRITE, Disk
from crash.ordeal import Ordeal
from support.server import ServerProcess


@pytest.mark.parametrize("seed", range(5))
def test_nothing_acknowledged_is_lost_or_doubled(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run(kills=5)


@pytest.mark.parametrize("seed", range(3))
def test_no_fault_of_the_disk_breaks_a_promise(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run_faults(rounds=4)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled_while_everything_is_sealed(seed: int, tmp_path: Path, disk: Disk) -> None:
    ordeal = Ordeal(seed, tmp_path, disk, sealing=True)
    ordeal.run(kills=4)
    ordeal.check_bucket()


@pytest.mark.parametrize("file", ["VERSION", "deployment", "hot.db-wal", ".jnl"])
@pytest.mark.parametrize("operation", [WRITE, SYNC], ids=["write", "sync"])
def test_a_first_start_that_is_killed_can_be_repeated(
    file: str, operation: int, tmp_path: Path, disk: Disk
) -> None:
    server = ServerProcess(tmp_path / "data", env=disk.env)
    fault = disk.die(file, operation)
    server.start(ready=False)
    assert server.wait_exit() == -signal.SIGKILL
    assert disk.hits(fault) == 1
    disk.heal()
    server.start()
    server.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 125))
def test_nothing_acknowledged_is_lost_or_doubled_all_night(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run(kills=10)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200, 220))
def test_no_fault_of_the_disk_breaks_a_promise_all_night(seed: int, tmp_path: Path, disk: Disk) -> None:
    Ordeal(seed, tmp_path, disk).run_faults(rounds=12)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300, 320))
def test_nothing_is_lost_or_doubled_while_everything_is_sealed_all_night(
    seed: int, tmp_path: Path, disk: Disk
) -> None:
    ordeal = Ordeal(seed, tmp_path, disk, sealing=True)
    ordeal.run(kills=10)
    ordeal.check_bucket()
