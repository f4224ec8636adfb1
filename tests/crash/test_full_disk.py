"""A disk that was full once takes entries again when there is room: the hot store gives its pages back."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from crash.faults import HOT, SYNC, WRITE, Disk
from crash.station import Station, eventually
from crash.world import World
from support.cli import tailrace
from support.sealing import unsealed_blocks

MIB = 1024 * 1024
LIMITS = {
    "TAILRACE_JOURNAL_FILE_BYTES": "1MiB",
    "TAILRACE_TAIL_MEMORY_MAX_BYTES": "4MiB",
    "TAILRACE_DISK_RESERVE_BYTES": "6MiB",
    "TAILRACE_SEAL_AGE_MS": "3600000",
    "TAILRACE_SEAL_BYTES": "1GiB",
    "TAILRACE_SEAL_ENTRIES": "1000000",
    "TAILRACE_SEAL_INTERVAL_MS": "50",
}


@pytest.fixture
def station(tmp_path: Path, world: World) -> Iterator[Station]:
    """The object store lies on another disk: what is sealed takes no more room on this one."""
    args = ("--object-store", (tmp_path / "bucket").as_uri())
    station = Station(tmp_path, world, *args, env=LIMITS).start()
    yield station
    station.kill()
    print(station.server.log)


def make_old(data_dir: Path) -> None:
    """As versions made it that could not give pages back."""
    with closing(sqlite3.connect(data_dir / "hot.db")) as database:
        database.execute("PRAGMA auto_vacuum=NONE")
        database.execute("VACUUM")
        assert database.execute("PRAGMA auto_vacuum").fetchone() == (0,)


def fill(station: Station, world: World, size_bytes: int) -> None:
    """Appends so much, and leaves the disk with less than its reserve."""
    while (station.data_dir / "hot.db").stat().st_size < size_bytes:
        station.append_until_accepted(size=256 * 1024)

    def refused() -> bool:
        # Checkpoints that are under way delete journal files: room that the disk shall not have.
        world.resize_disk(world.used_bytes() + 4 * MIB)
        return station.append().status == 507

    eventually(refused, "the disk is below its reserve")


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_appends_go_on_when_everything_is_sealed(station: Station, world: World, old: bool) -> None:
    if old:
        station.stop_dead()
        make_old(station.data_dir)
        station.server.start()
    fill(station, world, 24 * MIB)
    sealed = tailrace("seal", "--url", f"http://127.0.0.1:{station.server.port}")
    assert sealed.code == 0, sealed.err
    eventually(lambda: not unsealed_blocks(station.data_dir), "everything is sealed")
    station.append_until_accepted()
    hot = station.data_dir / "hot.db"
    eventually(lambda: hot.stat().st_size < 8 * MIB, "the hot store gave its pages back")
    station.check()
    station.crash_and_check()
    station.append_many(3)


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_kill_while_pages_are_given_back(
    seed: int, tmp_path: Path, world: World, disk: Disk, old: bool
) -> None:
    disk.env = world.with_faults(disk.env)
    args = ("--object-store", (tmp_path / "bucket").as_uri())
    station = Station(tmp_path, disk, *args, env=LIMITS).start()
    if old:
        station.stop_dead()
        make_old(station.data_dir)
        station.server.start()
    fill(station, world, 16 * MIB)
    chance = random.Random(seed)
    for _ in range(3):
        # The checkpointer dies at some write or sync: of the checkpoint that trims, or of the vacuum.
        disk.die(HOT, chance.choice((WRITE, SYNC)), skip=chance.randint(0, 400))
    sealed = tailrace("seal", "--url", f"http://127.0.0.1:{station.server.port}")
    assert sealed.code == 0, sealed.err
    eventually(lambda: not unsealed_blocks(station.data_dir), "everything is sealed")
    station.append_until_accepted()
    disk.heal()
    station.check()
    station.crash_and_check()
    assert tailrace("verify", "--data-dir", str(station.data_dir), *args).code == 0
    station.kill()
    print(station.server.log)


def test_a_restart_gives_back_what_an_earlier_life_left(station: Station, world: World) -> None:
    station.stop_dead()
    make_old(station.data_dir)
    station.server.start()
    fill(station, world, 16 * MIB)
    assert tailrace("seal", "--url", f"http://127.0.0.1:{station.server.port}").code == 0
    eventually(lambda: not unsealed_blocks(station.data_dir), "everything is sealed")
    station.stop_dead()
    station.server.start(ready=False)
    eventually(lambda: station.server.status("/healthz") == 200, "the server is up")
    station.append_until_accepted()
    station.check()
