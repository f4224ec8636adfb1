"""A wall clock that is set back or forward: deleted streams stay deleted, acknowledged entries stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.station import Station, eventually
from crash.wire import TEXT, Content
from crash.world import World
from support.sealing import SEALING_ENV, hot, wait_sealed
from support.server import ServerProcess
from tailrace.storage.segments.model import make_stream_id

DAY_S = 86_400.0


@pytest.fixture
def station(tmp_path: Path, world: World) -> Iterator[Station]:
    args = ("--object-store", (tmp_path / "bucket").as_uri())
    station = Station(tmp_path, world, *args, env=SEALING_ENV).start()
    yield station
    station.kill()
    print(station.server.log)


def statuses_after_loss(station: Station, tmp_path: Path, *names: str) -> list[int]:
    """The disk is lost; what a new server shows that has only the bucket."""
    station.kill()
    args = (*station.server.args, "--bootstrap")
    with ServerProcess(tmp_path / "restored", args=args) as server:
        return [server.status(f"/v1/stream/{name}") or 0 for name in names]


def test_a_stream_deleted_under_an_older_clock_stays_deleted(
    station: Station, world: World, tmp_path: Path
) -> None:
    station.append_many(5)
    assert station.send("PUT", "gone", b"content", TEXT).status == 201
    wait_sealed(station.data_dir)
    world.set_clock(-DAY_S)
    assert station.send("DELETE", "gone").status == 204
    station.append_many(5)
    eventually(lambda: hot(station.data_dir)["graves"] == 1 or is_buried(tmp_path, "gone"), "it is noted")
    eventually(lambda: hot(station.data_dir)["graves"] == 0, "what was deleted is buried")
    assert is_buried(tmp_path, "gone")
    station.check()
    wait_sealed(station.data_dir)
    assert statuses_after_loss(station, tmp_path, "lines", "gone") == [200, 404]


def is_buried(tmp_path: Path, name: str) -> bool:
    """Whether nothing but a tombstone is left of the first stream of that name."""
    folders = list((tmp_path / "bucket").rglob(make_stream_id(name, 0)))
    assert len(folders) <= 1
    if not folders:
        return False
    files = [path.name for path in folders[0].rglob("*") if path.is_file()]
    return files == ["manifest.json"] and b'"deleted":{' in (folders[0] / "manifest.json").read_bytes()


def test_a_name_deleted_and_made_again_under_an_older_clock(
    station: Station, world: World, tmp_path: Path
) -> None:
    for life, added_s in enumerate((0.0, -DAY_S, -2 * DAY_S, DAY_S)):
        world.set_clock(added_s)
        assert station.send("PUT", "again", f"life {life}".encode(), TEXT).status == 201
        station.append_many(3)
        wait_sealed(station.data_dir)
        assert station.send("DELETE", "again").status == 204
    world.set_clock(-3 * DAY_S)
    assert station.send("PUT", "again", b"the last one", TEXT).status == 201
    station.append_many(3)
    eventually(lambda: is_buried(tmp_path, "again"), "the first life is buried")
    bucket, last = tmp_path / "bucket", make_stream_id("again", 4)
    eventually(lambda: list(bucket.rglob(f"{last}/manifest.json")), "the last life is sealed")
    station.crash_and_check()
    content = station.wire.read_all("again")
    assert isinstance(content, Content)
    assert content.entries == [b"the last one"]
    assert is_buried(tmp_path, "again")
    assert statuses_after_loss(station, tmp_path, "lines", "again") == [200, 200]
