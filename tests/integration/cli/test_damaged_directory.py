"""Tools on a damaged data directory say so: doctor, inspect, verify. A crash alone is no damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli import tailrace
from support.damage import checkpointed, damage_journal, filled, overwrite_page
from support.journals import append, create, flip, write_journal_file
from support.ports import free_port
from support.workers import names_of
from tailrace.log.journal_check import inspect_journal


def doctor(directory: Path) -> tuple[int, dict[str, str]]:
    done = tailrace("doctor", "--data-dir", str(directory), "--port", str(free_port()), "--json")
    findings = [json.loads(line) for line in done.out.splitlines()]
    return done.code, {one["check"]: one["verdict"] for one in findings}


def test_a_crash_is_no_damage(tmp_path: Path) -> None:
    directory = filled(tmp_path / "data")
    rows = [row for row in inspect_journal(directory) if "ops" in row]
    last = directory / "journal" / str(rows[-1]["file"])
    flip(last, int(str(rows[-1]["position"])) + 12)
    code, verdicts = doctor(directory)
    assert (code, verdicts["journal"], verdicts["hot store"]) == (0, "ok", "ok")
    assert tailrace("inspect", "journal", "--data-dir", str(directory)).code == 0
    assert tailrace("verify", "--data-dir", str(directory)).code == 0


def test_damage_to_the_journal_is_told_by_every_tool(tmp_path: Path) -> None:
    directory = filled(tmp_path / "data")
    path = damage_journal(directory)
    before = path.read_bytes()
    code, verdicts = doctor(directory)
    assert (code, verdicts["journal"]) == (1, "fail")
    for flags in ((), ("--json",)):
        done = tailrace("inspect", "journal", "--data-dir", str(directory), *flags)
        assert done.code == 1
        assert "the journal is damaged" in done.err
    done = tailrace("verify", "--data-dir", str(directory))
    assert done.code == 1
    assert path.name in done.out
    assert path.read_bytes() == before


def test_a_missing_journal_file_is_damage(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    positions = write_journal_file(directory / "journal", 1, [[create(1, "orders")], [append(1, 1, b"a")]])
    write_journal_file(directory / "journal", 2, [[append(1, 2, b"b")]], previous=(1, positions[-1]))
    assert tailrace("verify", "--data-dir", str(directory)).code == 0
    (directory / "journal" / "0000000000000001.jnl").unlink()
    code, verdicts = doctor(directory)
    told = tailrace("verify", "--data-dir", str(directory))
    assert (code, verdicts["journal"], told.code) == (1, "fail", 1), told.out


def test_damage_to_the_hot_store_is_told(tmp_path: Path) -> None:
    directory = checkpointed(tmp_path / "data")
    assert tailrace("verify", "--data-dir", str(directory)).code == 0
    overwrite_page(directory / "hot.db", 3)
    done = tailrace("verify", "--data-dir", str(directory), "--json")
    assert done.code == 1
    assert any(json.loads(line).get("key", "").endswith("hot.db") for line in done.out.splitlines())


def test_a_hot_store_that_is_none_stops_a_server_and_doctor_says_so(tmp_path: Path) -> None:
    directory = checkpointed(tmp_path / "data")
    (directory / "hot.db").write_bytes(b"this is no database" * 1000)
    code, verdicts = doctor(directory)
    assert (code, verdicts["hot store"]) == (1, "fail")
    assert tailrace("inspect", "hot", "--data-dir", str(directory)).code == 1
    assert tailrace("verify", "--data-dir", str(directory)).code == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_the_directory_of_several_workers(tmp_path: Path, damaged: bool) -> None:
    names = (next(names_of(0, 2)), next(names_of(1, 2)))
    directory = filled(tmp_path / "data", "--workers", "2", names=names)
    if damaged:
        damage_journal(directory / "workers" / "1" / "1", record=-4)
    done = tailrace("inspect", "journal", "--data-dir", str(directory), "--json")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert {row["worker"] for row in rows} == {0, 1}
    assert done.code == int(damaged), done.err
    hot = tailrace("inspect", "hot", "--data-dir", str(directory), "--json")
    assert [json.loads(line)["worker"] for line in hot.out.splitlines()] == [0, 1]
    assert tailrace("verify", "--data-dir", str(directory)).code == int(damaged)
    assert doctor(directory)[0] == int(damaged)


def test_verify_says_what_it_did_not_look_at(tmp_path: Path) -> None:
    directory = filled(tmp_path / "data")
    done = tailrace("verify", "--data-dir", str(directory), "--json")
    summary = json.loads(done.out.splitlines()[-1])["summary"]
    assert summary["journal_records"] > 20
    assert summary["not_checked"] == ["watch.db (it is derived from its streams)"]
    bucket = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    done = tailrace("verify", "--data-dir", str(tmp_path / "nowhere"), "--object-store", bucket)
    assert done.code == 0
    assert "not checked: journal and hot store (data directory" in done.out
