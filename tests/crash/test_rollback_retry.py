"""Rolling back a commit that failed needs the hot store. One that cannot be read then is waited for."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import HOT, JOURNAL, READ, SYNC, Disk
from crash.station import Station, eventually


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB").start()
    yield station
    station.kill()
    print(station.server.log)


def test_a_roll_back_is_tried_again_until_the_store_can_be_read(post: Station, disk: Disk) -> None:
    post.append_many(8, size=15_000)
    eventually(lambda: len(post.journal_files) <= 2, "the entries are in the hot store")
    unreadable = disk.fail(HOT, READ, errno.EIO)
    failure = disk.fail(JOURNAL, SYNC, errno.EIO, count=1)
    refused = post.append()
    assert (refused.status, refused.code) == (503, "unavailable")
    assert disk.hits(failure) == 1
    assert disk.hits(unreadable) > 0, "the state could not be read back"
    tried = disk.hits(unreadable)
    eventually(lambda: disk.hits(unreadable) > tried, "it is tried again")
    assert post.append().status == 503, "nothing is accepted on a state that is not known"
    assert post.server.status("/healthz") == 200
    disk.heal()
    post.append_until_accepted()
    post.append_many(2)
    post.check()
    post.crash_and_check()
