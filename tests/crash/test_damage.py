"""A real server on a damaged journal: it drops a torn tail and starts, or refuses and says where to look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import HOT, JOURNAL, WRITE, Disk
from crash.station import Station, eventually
from crash.wire import Content
from support.journals import flip
from tailrace.log.journal_check import inspect_journal


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    """A station with several journal files, none of them checkpointed: the hot store cannot be written."""
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB")
    station.start()
    disk.fail(HOT, WRITE)
    station.append_many(12, size=15_000)
    yield station
    station.kill()
    print(station.server.log)


def written(post: Station) -> list[tuple[Path, int, int]]:
    """Every record: its file, where it begins and where it ends."""
    directory = post.data_dir / "journal"
    return [
        (
            directory / str(row["file"]),
            int(str(row["position"])),
            int(str(row["position"])) + 8 + int(str(row["bytes"])),
        )
        for row in inspect_journal(post.data_dir)
        if "ops" in row
    ]


def refusal(post: Station) -> str:
    """Starts the server, which must not come up; what it said. Nothing on the disk may change."""
    before = {path.name: path.read_bytes() for path in post.journal_files}
    post.server.start(ready=False)
    assert post.server.wait_exit() == 1
    assert {path.name: path.read_bytes() for path in post.journal_files} == before
    return post.server.log.splitlines()[-1]


@pytest.mark.parametrize("damage", ["cut", "zeroed", "flipped", "garbage"])
def test_a_damaged_tail_is_dropped(post: Station, damage: str) -> None:
    post.stop_dead()
    path, begins, ends = written(post)[-1]
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: (begins + ends) // 2])
    elif damage == "zeroed":
        data[begins + 100 :] = bytes(len(data) - begins - 100)
        path.write_bytes(data)
    elif damage == "flipped":
        flip(path, begins + 50, 3)
    else:
        # The last record was acknowledged; behind it is the beginning of one that was not.
        data[ends : ends + 40] = b"\x55" * 40
        path.write_bytes(data)
    if damage != "garbage":
        post.acknowledged.pop()
    post.server.start()
    assert "dropped a torn record" in post.server.log
    post.check()
    post.append_many(3)
    post.crash_and_check()


def test_damage_in_the_middle_is_refused(post: Station) -> None:
    post.stop_dead()
    path, begins, _ = written(post)[1]
    flip(path, begins + 50, 3)
    message = refusal(post)
    assert path.name in message
    assert "tailrace inspect journal" in message
    flip(path, begins + 50, 3)
    post.crash_and_check()


def test_damage_in_the_last_file_is_refused_too(post: Station) -> None:
    """What was acknowledged before the last batch was written is known to have been."""
    post.append_many(3, size=100)
    post.stop_dead()
    path, begins, _ = written(post)[-3]
    assert path == written(post)[-1][0]
    flip(path, begins + 50, 3)
    assert "tailrace inspect journal" in refusal(post)
    flip(path, begins + 50, 3)
    post.crash_and_check()


def test_a_damaged_header_is_refused(post: Station) -> None:
    post.stop_dead()
    path = written(post)[-1][0]
    flip(path, 20)
    assert "tailrace inspect journal" in refusal(post)
    flip(path, 20)
    post.crash_and_check()


def test_a_missing_file_is_refused(post: Station) -> None:
    post.stop_dead()
    path = written(post)[0][0]
    kept = path.rename(path.with_suffix(".kept"))
    assert "missing" in refusal(post)
    kept.rename(path)
    post.crash_and_check()


def test_a_lost_hot_store_is_refused(post: Station) -> None:
    """The journal goes on where the hot store ends; without it, it is not the whole story."""
    post.disk.heal()
    eventually(lambda: len(post.journal_files) <= 2, "the journal is checkpointed")
    post.stop_dead()
    for path in post.data_dir.glob("hot.db*"):
        path.rename(path.with_name(path.name.replace("hot", "kept")))
    assert "missing" in refusal(post)
    for path in post.data_dir.glob("hot.db*"):
        path.unlink()
    for path in post.data_dir.glob("kept.db*"):
        path.rename(path.with_name(path.name.replace("kept", "hot")))
    post.crash_and_check()


def test_a_damaged_hot_store_is_refused(post: Station) -> None:
    post.stop_dead()
    kept = {path: path.read_bytes() for path in post.data_dir.glob("hot.db*")}
    for path in kept:
        path.write_bytes(b"no database" * 1000)
    assert "tailrace inspect hot" in refusal(post)
    for path, data in kept.items():
        path.write_bytes(data)
    post.crash_and_check()


@pytest.mark.parametrize("kept_bytes", [1, 63, 70])
def test_a_write_that_was_torn(post: Station, kept_bytes: int) -> None:
    """The machine stops in the middle of a write: of a record, or of a new file's header."""
    post.disk.heal()
    for size in (300, 60_000):
        post.disk.tear(JOURNAL, kept_bytes)
        lost = post.in_background("POST", "lines", post.line(size))
        assert lost.wait() is None
        content = _after_restart(post)
        assert content.entries == post.acknowledged
        post.append_many(2)


def _after_restart(post: Station) -> Content:
    post.stop_dead()
    post.server.start()
    content = post.wire.read_all("lines")
    assert isinstance(content, Content)
    return content
