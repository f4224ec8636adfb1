"""A hot store that takes its time: whoever needs it is told so, everybody else is served meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import HOT, READ, Disk
from crash.station import Station, eventually

REQUEST_MS = 1500
LONG_US = 4_000_000


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    """A server whose entries are in the hot store only, and not in any cache of its own."""
    waits = ["--request-ms", str(REQUEST_MS), "--long-poll-max-ms", "200", "--long-poll-default-ms", "100"]
    waits += ["--details-max-wait-ms", "200"]
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB", *waits).start()
    station.append_many(8, size=15_000)
    eventually(lambda: len(station.journal_files) <= 2, "the entries are in the hot store")
    station.stop_dead()
    station.server.start()
    assert station.send("HEAD", "lines").status == 200, "the stream itself is known"
    yield station
    station.kill()
    print(station.server.log)


def test_a_read_that_the_store_keeps_waiting_is_408(post: Station, disk: Disk) -> None:
    # Every read is slow: the checkpointer reads as well, and might take the blow.
    pause = disk.delay(HOT, READ, LONG_US)
    reading = post.in_background("GET", "lines", query="?offset=-1")
    eventually(lambda: disk.hits(pause) > 0, "the read is at the store")
    post.append_many(1)
    assert post.server.status("/readyz") == 200
    answer = reading.wait()
    assert answer is not None
    assert (answer.status, answer.code) == (408, "request_timeout")
    disk.heal()
    eventually(lambda: post.send("GET", "lines").status == 200, "the store is quick again")
    post.check()


def test_a_read_that_the_store_keeps_waiting_a_little_is_answered(post: Station, disk: Disk) -> None:
    pause = disk.delay(HOT, READ, REQUEST_MS * 1000 // 10, count=1)
    post.check()
    assert disk.hits(pause) == 1
