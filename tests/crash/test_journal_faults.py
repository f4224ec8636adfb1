"""A journal that cannot be written: nothing false is acknowledged, reads go on, writing resumes by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.faults import ALLOCATE, JOURNAL, SYNC, WRITE, Disk
from crash.station import Station, eventually
from crash.wire import TEXT
from support.wire import Wire, fresh
from tailrace.log.journal_check import inspect_journal

OpenStation = Callable[..., Station]

FAULTS = {
    "write EIO": (WRITE, errno.EIO, 503, "unavailable"),
    "write ENOSPC": (WRITE, errno.ENOSPC, 507, "insufficient_storage"),
    "sync EIO": (SYNC, errno.EIO, 503, "unavailable"),
    "sync ENOSPC": (SYNC, errno.ENOSPC, 507, "insufficient_storage"),
}
each_fault = pytest.mark.parametrize(
    ("operation", "error", "status", "code"), FAULTS.values(), ids=FAULTS.keys()
)


@pytest.fixture
def station(tmp_path: Path, disk: Disk) -> Iterator[OpenStation]:
    opened: list[Station] = []

    def start(*args: str) -> Station:
        opened.append(Station(tmp_path, disk, "--journal-file-bytes", "256KiB", *args))
        return opened[-1]

    yield start
    for found in opened:
        found.kill()
        print(found.server.log)


@each_fault
def test_a_failing_journal_refuses_reads_on_and_resumes(
    station: OpenStation, disk: Disk, operation: int, error: int, status: int, code: str
) -> None:
    post = station().start()
    post.append_many(5)
    disk.fail(JOURNAL, operation, error)
    for attempt in range(3):
        answer = post.append()
        # What was written and can neither be synced nor cut may be on the disk: nothing is promised about it.
        unknown = operation == SYNC and attempt == 0
        assert (answer.status, answer.code) == ((503, "unavailable") if unknown else (status, code))
        assert (b'"outcome":"unknown"' in answer.body) == unknown
        assert answer.headers["retry-after"] == "5"
        post.check()
    created = post.send("PUT", "another", headers=TEXT)
    assert (created.status, created.code) == (status, code)
    assert post.server.status("/readyz") == 503
    assert post.server.status("/healthz") == 200
    disk.heal()
    post.append_until_accepted()
    post.append_many(3)
    post.check()
    assert post.send("PUT", "another", headers=TEXT).status == 201
    post.crash_and_check()


@each_fault
def test_nothing_is_acknowledged_from_a_file_that_failed(
    station: OpenStation, disk: Disk, operation: int, error: int, status: int, code: str
) -> None:
    post = station().start()
    post.append_many(3)
    failing = post.journal_files[0].name
    disk.fail(failing, operation, error, count=1)
    assert post.append().status == status
    post.append_until_accepted()
    rows = [row for row in inspect_journal(post.data_dir) if "ops" in row]
    assert rows[-1]["file"] != failing
    assert rows[0]["file"] == failing
    post.crash_and_check()


@each_fault
def test_what_was_refused_does_not_come_back(
    station: OpenStation, disk: Disk, operation: int, error: int, status: int, code: str
) -> None:
    """The bytes of a failed sync are still in the page cache, where the next start would find them."""
    post = station().start()
    post.append_many(2)
    disk.fail(JOURNAL, operation, error)
    assert post.append().status == (503 if operation == SYNC else status)
    post.crash_and_check()
    post.append_many(2)
    post.crash_and_check()


def test_the_very_first_write_may_fail(station: OpenStation, disk: Disk) -> None:
    post = station()
    # The first sync is that of the empty file, the second that of the first records.
    fault = disk.fail("0000000000000001.jnl", SYNC, errno.EIO, skip=1, count=1)
    post.start()
    assert disk.hits(fault) == 1
    post.append_many(3)
    assert post.send("GET", "__registry__").status == 200
    post.crash_and_check()


def test_no_room_for_the_next_file(station: OpenStation, disk: Disk) -> None:
    post = station().start()
    disk.fail(JOURNAL, ALLOCATE, errno.ENOSPC)
    eventually(lambda: post.append(size=20_000).status == 507, "the journal is full")
    assert len(post.acknowledged) > 5, "room that was allocated is used"
    post.check()
    disk.heal()
    post.append_until_accepted()
    post.append_many(30, size=20_000)
    post.crash_and_check()


def test_a_full_disk(station: OpenStation, disk: Disk) -> None:
    """Neither journal nor hot store can grow; then there is room again."""
    post = station().start()
    post.append_many(30, size=20_000)
    disk.fill_up()
    eventually(lambda: post.append(size=20_000).status == 507, "the disk is full")
    post.check()
    disk.heal()
    post.append_until_accepted()
    post.append_many(30, size=20_000)
    post.check()
    post.crash_and_check()


def test_deleting_is_undone_when_it_could_not_be_written(station: OpenStation, disk: Disk) -> None:
    post = station().start()
    post.append_many(2)
    disk.fail(post.journal_files[0].name, SYNC, count=1)
    assert post.send("DELETE", "lines").status == 503
    post.check()
    post.append_until_accepted()
    assert post.send("DELETE", "lines").status == 204
    assert post.send("GET", "lines").status == 404


def test_a_reader_waits_through_a_failure(station: OpenStation, disk: Disk) -> None:
    """Somebody who follows a stream sees what is written after the trouble, not what failed in it."""
    post = station("--long-poll-max-ms", "20000", "--request-ms", "30000").start()
    post.append_many(1)
    tail = post.send("HEAD", "lines").headers["stream-next-offset"]
    waiting = post.in_background("GET", "lines", query=f"?live=long-poll&offset={tail}&timeout_ms=20000")
    eventually(lambda: post.metric('tailrace_live_connections{mode="long-poll"}') == 1, "the reader waits")
    disk.fail(post.journal_files[0].name, SYNC, count=1)
    assert post.send("DELETE", "lines").status == 503
    post.append_until_accepted()
    answer = waiting.wait()
    assert answer is not None
    assert (answer.status, answer.body) == (200, post.acknowledged[-1])


def test_repeated_appends_follow_the_state_that_was_rolled_back_to(station: OpenStation, disk: Disk) -> None:
    """Their head is known, so they take the short way; that way must not remember streams of before."""
    post = station().start()
    wire = Wire(post.server.port)
    name = fresh()
    assert wire.put(name, "text/plain").status == 201
    for _ in range(16):
        assert wire.post(name, "text/plain", "x").status == 204
    disk.fail(JOURNAL, WRITE, errno.EIO)
    assert wire.post(name, "text/plain", "y").status == 503
    disk.heal()
    eventually(lambda: wire.post(name, "text/plain", "z").status == 204, "appends are accepted again")
    assert wire.delete(name).status == 204
    assert wire.post(name, "text/plain", "x").status == 404
    assert wire.put(name, "text/plain").status == 201
    assert wire.post(name, "text/plain", "x").status == 204
    assert wire.get(name).body == b"x"
    wire.close()
    post.server.restart(kill=True)
    assert wire.get(name).body == b"x"
    wire.close()
