"""Write-back errors as Linux reports them: nothing acknowledged is lost, and the server starts again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from crash.faults import JOURNAL, SYNC
from crash.gate import Crew
from crash.shared import Loader, ProducerWriter, SharedStream, SharedWriter
from crash.station import Station, eventually
from crash.wire import Content, Wire
from crash.writeback import ANY, OVERTAKEN, WritebackDisk
from tailrace.log.journal import read_header

SLOW_US = 12_000  # above what counts as a slow disk, so that several syncs are kept in flight

# Two descriptions, one of them with two descriptors; another that is opened after the error was reported.
REPORTED = """
import os, sys
first = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL)
second = os.open(sys.argv[1], os.O_RDWR)
shared = os.dup(first)
def sync(fd):
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error.errno
    return 0
os.pwrite(first, b"lost", 0)
found = [sync(second), sync(first), sync(shared), sync(second)]
later = os.open(sys.argv[1], os.O_RDWR)
print([*found, sync(later), os.pread(first, 4, 0)])
"""


def test_the_shim_reports_an_error_once_to_each_description(tmp_path: Path, writeback: WritebackDisk) -> None:
    """errseq_t of Linux 4.13: the descriptor that wrote is not told apart from any other."""
    file = tmp_path / "1.jnl"
    writeback.fail_writeback()
    done = subprocess.run(
        [sys.executable, "-c", REPORTED, str(file)],
        env=writeback.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[5, 5, 0, 0, 0, b'lost']"
    writeback.cut_power(tmp_path)
    assert file.read_bytes() == bytes(4), "what failed is not on the disk"


@contextmanager
def at_work(post: Station, seed: int) -> Iterator[Crew]:
    """Writers of one stream, enough of them that a batch is always on its way."""
    stream = SharedStream("shared/stream")
    wire = Wire(post.server.port)
    stream.create(wire)
    wire.close()
    writers = [
        Loader(stream),
        *(SharedWriter(stream, f"plain-{index}", seed) for index in range(6)),
        *(ProducerWriter(stream, f"producer-{index}", seed) for index in range(2)),
    ]
    crew = Crew(post.server.port, writers)
    try:
        yield crew
    finally:
        crew.end()


@pytest.fixture
def post(tmp_path: Path, writeback: WritebackDisk) -> Iterator[Station]:
    station = Station(tmp_path, writeback, "--journal-file-bytes", "256KiB")
    station.start()
    yield station
    station.kill()
    print(station.server.log)


def cut_power(post: Station, disk: WritebackDisk) -> None:
    post.stop_dead()
    disk.cut_power(post.data_dir / "journal")
    post.server.start()


@pytest.mark.parametrize("mode", [OVERTAKEN, ANY], ids=["overtaken", "any"])
def test_one_error_with_several_syncs_in_flight_loses_nothing(
    post: Station, writeback: WritebackDisk, mode: int
) -> None:
    """The sync of a later batch must not consume the error of an earlier one."""
    with at_work(post, writeback.seed) as crew:
        for round_ in range(3):
            writeback.slow_syncs(SLOW_US)
            crew.go()
            crew.wait_steps(100)
            writeback.fail_writeback(mode, skip=writeback.random.randint(0, 20))
            eventually(lambda failed=round_ + 1: writeback.failures == failed, "write-back fails")
            crew.wait_steps(writeback.random.randint(1, 60))
            post.server.kill()
            crew.rest()
            cut_power(post, writeback)
            crew.settle()


def test_the_server_goes_on_after_an_error(post: Station, writeback: WritebackDisk) -> None:
    """In the same life: a new file is begun, and after a power cut the old one is as it was acknowledged."""
    with at_work(post, writeback.seed) as crew:
        for round_ in range(4):
            writeback.slow_syncs(SLOW_US)
            crew.go()
            crew.wait_steps(60)
            writeback.fail_writeback(OVERTAKEN if round_ % 2 else ANY)
            eventually(lambda failed=round_ + 1: writeback.failures == failed, "write-back fails")
            crew.wait_steps(20)
            crew.rest()
            writeback.heal()
            eventually(lambda: post.server.status("/readyz") == 200, "the server goes on by itself")
            crew.settle()
        post.server.kill()
        cut_power(post, writeback)
        crew.settle()


def test_what_is_read_after_an_error_and_a_kill_survives_a_power_cut(
    post: Station, writeback: WritebackDisk
) -> None:
    """The error was reported to the process that died: no later sync reports it, or writes the pages."""
    post.append_many(3)
    writeback.fail_writeback(die=True)
    lost = post.in_background("POST", "lines", post.line())
    assert lost.wait() is None, "the server died"
    post.stop_dead()
    post.server.start()
    content = post.wire.read_all("lines")
    assert isinstance(content, Content)
    assert content.entries[:3] == post.acknowledged
    cut_power(post, writeback)
    assert post.wire.read_all("lines") == content


def test_what_was_refused_does_not_come_back_after_a_power_cut(
    post: Station, writeback: WritebackDisk
) -> None:
    """A part of the batches was on the disk, and the file was cut only in the cache."""
    for _ in range(8):
        post.append_many(2)
        # The sync fails although the data arrives: the error may be that of any page of the file.
        active = max(path for path in post.journal_files if read_header(path) is not None)
        fault = writeback.fail(active.name, SYNC, count=1)
        answer = post.append()
        assert (answer.status, answer.code) == (503, "unavailable")
        assert b"unknown" not in answer.body, "the file could be cut"
        assert writeback.hits(fault) == 1
        cut_power(post, writeback)
        post.check()


def test_an_answer_says_when_the_outcome_is_unknown(post: Station, writeback: WritebackDisk) -> None:
    """Nothing can be synced any more, so whether a power cut brings the append back is not known."""
    post.append_many(2)
    writeback.fail(JOURNAL, SYNC)
    answer = post.append()
    assert (answer.status, answer.code) == (503, "unavailable")
    assert orjson.loads(answer.body)["error"]["outcome"] == "unknown"
    answer = post.append()
    assert (answer.status, answer.code) == (503, "unavailable")
    assert "outcome" not in orjson.loads(answer.body)["error"], "it was not written at all"
    post.check()
