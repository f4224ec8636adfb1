"""A hot store that cannot be written: checkpoints are tried again, nothing is lost, nobody notices."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import ALLOCATE, HOT, READ, SYNC, WRITE, Disk, children
from crash.station import Station, eventually
from support.sealing import SEALING_ENV


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB").start()
    yield station
    station.kill()
    print(station.server.log)


def caught_up(post: Station) -> bool:
    """The journal is down to the file being written and the one prepared after it."""
    return len(post.journal_files) <= 2


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", [WRITE, SYNC], ids=["write", "sync"])
def test_checkpoints_are_tried_again(post: Station, disk: Disk, operation: int, error: int) -> None:
    post.append_many(8, size=15_000)
    eventually(lambda: caught_up(post), "the first checkpoint is done")
    fault = disk.fail(HOT, operation, error)
    post.append_many(20, size=15_000)
    eventually(lambda: disk.hits(fault) > 0, "a checkpoint fails")
    post.append_many(4, size=15_000)
    post.check()
    assert post.server.status("/readyz") == 200, "the hot store is not on the acknowledgement path"
    assert len(post.journal_files) > 4, "nothing is deleted that the hot store does not have"
    disk.heal()
    eventually(lambda: caught_up(post), "the checkpoints catch up")
    post.check()
    post.crash_and_check()


def test_a_crash_while_checkpoints_fail(post: Station, disk: Disk) -> None:
    disk.fail(HOT, WRITE | SYNC | ALLOCATE, errno.EIO)
    post.append_many(20, size=15_000)
    post.crash_and_check()
    eventually(lambda: caught_up(post), "the checkpoints catch up")
    post.check()
    post.crash_and_check()


@pytest.mark.parametrize("operation", [WRITE, SYNC], ids=["write", "sync"])
def test_one_fault_at_any_step_of_a_checkpoint(post: Station, disk: Disk, operation: int) -> None:
    """The steps differ in kind: the log of changes, its sync, the database itself, its sync."""
    skipped = 0
    while True:
        fault = disk.fail(HOT, operation, errno.EIO, skip=skipped, count=1)
        post.append_many(5, size=15_000)
        eventually(lambda: caught_up(post), "the checkpoint is done all the same")
        if not disk.hits(fault):
            break
        disk.heal()
        skipped += 1 if operation == SYNC else 9
    assert skipped > 0
    post.crash_and_check()


@pytest.mark.parametrize("skip", [0, 4, 9, 14])
def test_the_checkpointer_dies_at_a_write(post: Station, disk: Disk, skip: int) -> None:
    fault = disk.die(HOT, WRITE | SYNC, skip=skip)
    post.append_many(8, size=15_000)
    eventually(lambda: disk.hits(fault) == 1, "the checkpointer has died")
    post.check()
    eventually(lambda: caught_up(post), "another one has done the work")
    post.check()
    post.crash_and_check()


def test_a_store_that_cannot_be_read_is_unavailable_not_empty(post: Station, disk: Disk) -> None:
    post.append_many(8, size=15_000)
    eventually(lambda: caught_up(post), "the entries are in the hot store only")
    post.stop_dead()
    post.server.start()
    disk.fail(HOT, READ, errno.EIO)
    answer = post.send("GET", "lines")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "unavailable", "5")
    disk.heal()
    post.check()
    post.append_many(1)
    post.crash_and_check()


def test_full_memory_gives_way_to_a_checkpoint(tmp_path: Path, disk: Disk) -> None:
    """When appends are refused for lack of memory, no append can be what starts the checkpoint."""
    post = Station(tmp_path, disk, "--tail-memory-max-bytes", "64KiB", "--append-wait-ms", "0").start()
    post.append_many(1, size=60_000)
    post.append_many(1, size=100_000)
    assert post.append().code == "overloaded"
    eventually(lambda: post.append(size=60_000).ok, "there is memory again")
    disk.fail(HOT, WRITE)
    eventually(lambda: post.append(size=60_000).status == 429, "memory is full")
    post.stop_dead()
    post.server.start()
    eventually(lambda: post.append().ok, "there is memory again after a restart")
    post.crash_and_check()
    post.kill()


def test_checkpointer_and_sealer_end_with_their_server(post: Station) -> None:
    post.append_many(8, size=15_000)
    eventually(lambda: caught_up(post), "a checkpoint is done")
    found = children(post.server.pid)
    assert found
    post.kill()
    for child in found:
        eventually(lambda pid=child: not Path(f"/proc/{pid}").exists(), "its children are gone")


def test_a_failed_seal_job_leaves_nothing_in_the_spool(tmp_path: Path, disk: Disk) -> None:
    env = {**SEALING_ENV, "TAILRACE_SEAL_AGE_MS": "3600000", "TAILRACE_SEAL_ENTRIES": "1000"}
    env |= {"TAILRACE_SEAL_BYTES": "64KiB", "TAILRACE_HELPER_IDLE_MS": "3600000"}
    station = Station(tmp_path, disk, env=env).start()
    spool = station.data_dir / "spool"
    fault = disk.fail("/spool/", SYNC, errno.ENOSPC, skip=2)
    station.append_many(8, size=40_000)
    eventually(lambda: disk.hits(fault) > 0, "the third segment of a job cannot be written")
    eventually(lambda: not list(spool.iterdir()), "the spool is empty although the sealer is still running")
    disk.heal()
    station.append_many(4, size=40_000)  # a job that failed is repeated with what comes next, or in a minute
    eventually(lambda: list((station.data_dir / "objects").rglob("*.parquet")), "the job is repeated")
    station.check()
    station.kill()
    print(station.server.log)
