"""What a killed server wrote may be in the page cache only. The next one syncs it before it builds on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import SYNC, Disk
from crash.station import Station, eventually

LAST = "0000000000000001.jnl"
LONG_US = 20_000_000


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    station = Station(tmp_path, disk).start()
    station.append_many(3)
    station.kill()
    yield station
    station.kill()
    print(station.server.log)


def test_nothing_is_served_before_the_last_file_is_synced(post: Station, disk: Disk) -> None:
    pause = disk.delay(LAST, SYNC, LONG_US, count=1)
    post.server.start(ready=False)
    eventually(lambda: disk.hits(pause) == 1, "the last file is being synced")
    assert post.server.log.count("tailrace ready") == 1, "in its first life only"
    post.crash_and_check()


def test_a_last_file_that_cannot_be_synced_is_not_built_on(post: Station, disk: Disk) -> None:
    fault = disk.fail(LAST, SYNC)
    post.server.start(ready=False)
    assert post.server.wait_exit() == 1
    assert disk.hits(fault) == 1
    problem = f"cannot read data directory {post.data_dir}: [Errno 5] Input/output error"
    assert problem in post.server.log
    assert "Traceback" not in post.server.log
    assert post.server.log.count("tailrace ready") == 1, "in its first life only"
    post.crash_and_check()
