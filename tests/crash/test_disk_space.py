"""Too little room: refused before anything is written, with everything else going on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import ALLOCATE, JOURNAL, WRITE, Disk
from crash.station import Station, eventually
from crash.wire import JSON, TEXT, Answer

MORE_THAN_ANY_DISK = str(2**60)


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    station = Station(tmp_path, disk).start()
    station.append_many(3)
    assert station.send("PUT", "spare", b"content", TEXT).status == 201
    yield station
    station.kill()
    print(station.server.log)


def start_unready(post: Station) -> None:
    post.server.start(ready=False)
    eventually(lambda: post.server.status("/healthz") == 200, "the server is up")
    assert post.server.status("/readyz") == 503


def refused(answer: Answer) -> bool:
    assert answer.headers.get("retry-after") == "5", answer
    return (answer.status, answer.code) == (507, "insufficient_storage")


def test_below_the_reserve_nothing_new_is_taken_in(post: Station) -> None:
    post.stop_dead()
    plain = post.server.args
    post.server.args = (*plain, "--disk-reserve-bytes", MORE_THAN_ANY_DISK)
    start_unready(post)
    assert refused(post.append())
    assert refused(post.send("POST", "lines", headers={"Stream-Closed": "true"}))
    assert refused(post.send("PUT", "new", headers=JSON))
    assert refused(post.send("PUT", "fork", headers={"Stream-Forked-From": "/v1/stream/lines"}))
    assert post.send("PUT", "lines", headers=TEXT).status == 200, "what exists is confirmed"
    post.check()
    assert post.send("DELETE", "spare").status == 204, "deleting is what makes room"
    assert post.send("GET", "spare").status == 404
    post.stop_dead()
    post.server.args = plain
    post.server.start()
    post.check()
    assert post.send("GET", "spare").status == 404
    post.append_many(2)


def test_a_server_that_cannot_write_at_the_start_serves_reads(post: Station, disk: Disk) -> None:
    post.stop_dead()
    disk.fail(JOURNAL, WRITE | ALLOCATE, errno.ENOSPC)
    start_unready(post)
    post.check()
    assert refused(post.append())
    disk.heal()
    post.append_until_accepted()
    assert post.send("PUT", "new", headers=JSON).status == 201
    post.crash_and_check()
