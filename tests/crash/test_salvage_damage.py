"""Whatever is damaged in a journal: `tailrace salvage` makes a directory that serves what is left of it."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from crash.faults import HOT, JOURNAL, READ, WRITE, Disk
from crash.station import Station
from crash.wire import TEXT
from support.calls import Caller
from support.cli import tailrace
from support.damage import state_of
from support.server import ServerProcess

NAMES = ("a", "b", "c")
ENTRIES = 120
KINDS = ("flip", "sector", "block", "cut", "delete")


@pytest.fixture
def station(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    """Streams with entries in the hot store, and in several journal files that it does not have."""
    station = Station(tmp_path, disk, "--journal-file-bytes", "64KiB").start()
    for name in NAMES:
        assert station.send("PUT", name, headers=TEXT).status == 201
    for number in range(ENTRIES):
        if number == ENTRIES // 3:
            disk.fail(HOT, WRITE)
        assert station.send("POST", NAMES[number % 3], entry(number), TEXT).status == 204
    station.stop_dead()
    yield station
    station.kill()


def entry(number: int) -> bytes:
    return f"{number} {'z' * (number * 37 % 4000)}\n".encode()


def damage(path: Path, kind: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "sector":
        data[at // 512 * 512 : at // 512 * 512 + 512] = bytes(512)
    elif kind == "block":
        data[at // 4096 * 4096 : at // 4096 * 4096 + 4096] = chance.randbytes(4096)
    elif kind == "cut":
        del data[at:]
    path.unlink()
    if kind != "delete":
        path.write_bytes(data)


def damage_and_check(station: Station, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(station.journal_files)
        kind = chance.choice(KINDS)
        print(f"{kind} {path.name}")
        damage(path, kind, chance)
    check_salvage(station, tmp_path / "new")


def check_salvage(station: Station, new: Path, env: Mapping[str, str] | None = None) -> None:
    before = state_of(station.data_dir)
    done = tailrace("salvage", str(station.data_dir), str(new), "--json", env=env)
    print(done.out)
    assert state_of(station.data_dir) == before
    rows = [json.loads(row) for row in done.out.splitlines()]
    assert done.code in (0, 1), done.err
    lost = {row["stream"]: row["entries"] for row in rows[:-1]}
    assert tailrace("verify", "--data-dir", str(new)).code == 0
    with ServerProcess(new) as server:
        call = Caller(server)
        for index, name in enumerate(NAMES):
            reply = call("GET", f"{name}?offset=-1")
            found = reply.raw.splitlines(keepends=True) if reply.status == 200 else []
            written = [entry(number) for number in range(index, ENTRIES, 3)]
            assert found == [one for one in written if one in found], "each once, in order, and no other"
            if found and found[-1] == written[-1]:
                assert len(written) - len(found) == lost.get(name, 0)
            if reply.status == 200:
                assert call("POST", name, b"more\n", headers=TEXT).status == 204


def test_everything_that_is_left_is_served(station: Station, tmp_path: Path, seed: int) -> None:
    damage_and_check(station, tmp_path, seed)


def test_a_disk_that_answers_some_reads_with_errors(
    station: Station, disk: Disk, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    fault = disk.fail(JOURNAL, READ, errno.EIO, skip=chance.randint(0, 8), count=chance.randint(1, 4))
    check_salvage(station, tmp_path / "new", disk.env)
    assert disk.hits(fault) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("night", range(30))
def test_everything_that_is_left_is_served_all_night(
    station: Station, tmp_path: Path, seed: int, night: int
) -> None:
    damage_and_check(station, tmp_path, seed + night)
