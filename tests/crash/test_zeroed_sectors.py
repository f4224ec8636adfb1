"""A sector of the journal that reads as zeros: the server refuses to start and changes no file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import HOT, WRITE, Disk
from crash.station import Station, eventually
from crash.wire import Content
from crash.writeback import SECTOR_BYTES
from tailrace.log.journal import read_header
from tailrace.log.journal_check import inspect_journal


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    """A station with several journal files, none of them checkpointed: the hot store cannot be written."""
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB")
    station.start()
    disk.fail(HOT, WRITE)
    station.append_many(8, size=15_000)
    station.append_many(12, size=700)
    yield station
    station.kill()
    print(station.server.log)


def used(post: Station) -> list[Path]:
    return [path for path in post.journal_files if read_header(path) is not None]


def zero(path: Path, sector: int) -> bytes:
    """Zeroes one sector; what the file was before."""
    before = path.read_bytes()
    start, end = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
    path.write_bytes(before[:start] + bytes(len(before[start:end])) + before[end:])
    return before


def starts(post: Station) -> bool:
    """Whether the server comes up. If it does not, it says what to do, and no file has changed."""
    before = {path.name: path.read_bytes() for path in post.journal_files}
    server = post.server.start(ready=False)
    eventually(lambda: not server.running or server.status("/readyz") == 200, "it starts or refuses to")
    if server.running:
        return True
    assert post.server.wait_exit() == 1
    assert {path.name: path.read_bytes() for path in post.journal_files} == before
    message = post.server.log.splitlines()[-1]
    assert "tailrace inspect journal" in message
    assert "tailrace salvage" in message
    return False


def test_a_zeroed_first_sector_of_any_file_is_refused(post: Station) -> None:
    post.stop_dead()
    assert len(used(post)) > 1
    for path in used(post):
        before = zero(path, 0)
        assert not starts(post), f"{path.name} was taken for a file that was never begun"
        path.write_bytes(before)
    post.crash_and_check()


def test_a_zeroed_sector_never_loses_more_than_the_last_batch(
    post: Station, seed: int, tmp_path: Path
) -> None:
    """Whether the last batch was acknowledged is written nowhere yet; everything before it is known to be.

    The mark that the last batch begins with says so of the batch before. A sector with this mark has the end
    of that batch too: without both, the two cannot be told from batches that were never synced.
    """
    chance = random.Random(seed)
    post.stop_dead()
    rows = list(inspect_journal(post.data_dir))
    ends = {str(row["file"]): int(str(row["ends_at"])) for row in rows if "records" in row}
    marks = [(str(row["file"]), int(str(row["position"]))) for row in rows if "acknowledged" in row]
    last_mark = marks[-1][0], marks[-1][1] // SECTOR_BYTES
    refused = 0
    kept = shutil.copytree(post.data_dir, tmp_path / "kept")
    for _ in range(6):
        path = chance.choice(used(post))
        sector = chance.randrange(-(-ends[path.name] // SECTOR_BYTES))
        zero(path, sector)
        if starts(post):
            content = post.wire.read_all("lines")
            assert isinstance(content, Content)
            lost = len(post.acknowledged) - len(content.entries)
            assert lost <= (2 if (path.name, sector) == last_mark else 1)
            assert content.entries == post.acknowledged[: len(content.entries)]
        else:
            refused += 1
        post.stop_dead()
        shutil.rmtree(post.data_dir)
        shutil.copytree(kept, post.data_dir)
    assert refused, "no damage was noticed"
    post.crash_and_check()
