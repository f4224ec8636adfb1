"""`tailrace inspect`: shows what is there, names what is damaged, changes nothing and never fails."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson

from support.journals import append, create, flip, write_journal_file
from tailrace.log.journal import MARK_BYTES, file_path
from tailrace.log.journal_check import inspect_journal
from tailrace.log.records import Bind, Delete, Meta, Op, Touch
from tailrace.storage.hot_store.database import BlockRow, HotDatabase, inspect_hot_store

RECORDS: list[list[Op]] = [
    [create(1, "a"), append(1, 1, b"first")],
    [append(1, 2, b"second")],
    [
        append(1, 3, b"third"),
        Touch(1, 5),
        Meta("k", b"value"),
        Bind(1, "text/plain"),
        Delete(1, 9, "deleted", False),
    ],
]


def shown(data_dir: Path) -> list[dict[str, Any]]:
    """Everything, proven to be printable as JSON."""
    rows = list(inspect_journal(data_dir))
    return orjson.loads(orjson.dumps(rows))


def test_every_record_of_every_file(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ends = write_journal_file(journal, 1, RECORDS)
    write_journal_file(journal, 2, [[create(2, "b")]], previous=(1, ends[-1]))
    file_path(journal, 3).write_bytes(bytes(512))
    rows = shown(tmp_path)
    assert [row.get("problem") for row in rows] == [None] * len(rows)
    records = [row for row in rows if "ops" in row]
    assert [row["position"] for row in records] == [*ends[:-1], 64]
    kinds = [[op["kind"] for op in row["ops"]] for row in records]
    assert kinds == [
        ["create", "append"],
        ["append"],
        ["append", "touch", "meta", "bind", "delete"],
        ["create"],
    ]
    second = records[1]["ops"][0]
    assert second == {"kind": "append", "stream": 1, "first": 2, "count": 1, "bytes": 6, "time_ns": 2}
    assert rows[0]["end"] == ends[-1]
    assert rows[-1] == {"file": "0000000000000003.jnl", "state": "prepared, not used yet"}


def test_damage_is_marked_and_what_follows_is_shown(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ends = write_journal_file(journal, 1, RECORDS)
    flip(file_path(journal, 1), ends[1] + 20)
    rows = shown(tmp_path)
    assert [row["position"] for row in rows if "ops" in row] == [ends[0], ends[2]]
    damaged = [row for row in rows if "problem" in row]
    assert damaged[0]["position"] == ends[1]
    assert "recovery drops" in damaged[-1]["problem"]


def test_damage_before_a_recorded_end_is_told_from_a_torn_tail(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ends = write_journal_file(journal, 1, RECORDS)
    write_journal_file(journal, 2, [[create(2, "b")]], previous=(1, ends[-1]))
    flip(file_path(journal, 1), ends[2] + 20)
    problems = [str(row["problem"]) for row in shown(tmp_path) if "problem" in row]
    assert problems == [f"damaged at byte {ends[2]}, but records up to byte {ends[-1]} were acknowledged"]


def test_a_mark_tells_damage_from_a_torn_tail(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ends = write_journal_file(journal, 1, RECORDS, marked=True)
    marks = [row["acknowledged"] for row in shown(tmp_path) if "acknowledged" in row]
    assert marks == [end - MARK_BYTES for end in ends[1:-1]]
    flip(file_path(journal, 1), ends[1] + 20)
    assert f"damaged at byte {ends[1]}, but records up to" in shown(tmp_path)[-1]["problem"]


def test_a_file_that_was_passed_over_is_void(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ends = write_journal_file(journal, 1, RECORDS[:1])
    write_journal_file(journal, 2, [[append(1, 2, b"failed")]], previous=(1, ends[-1]))
    write_journal_file(journal, 3, [[append(1, 2, b"in its place")]], previous=(1, ends[-1]))
    rows = shown(tmp_path)
    assert [row["state"] for row in rows if "state" in row] == ["void: a later file continues an older one"]
    assert [row["file"] for row in rows if "ops" in row] == ["0000000000000001.jnl", "0000000000000003.jnl"]


def test_no_damage_makes_it_fail(tmp_path: Path) -> None:
    random_bits = random.Random(1)
    for trial in range(300):
        journal = tmp_path / str(trial) / "journal"
        write_journal_file(journal, 1, RECORDS, padding=0)
        path = file_path(journal, 1)
        size = path.stat().st_size
        for _ in range(random_bits.randint(1, 4)):
            flip(path, random_bits.randrange(size), random_bits.randrange(8))
        if trial % 3 == 0:
            path.write_bytes(path.read_bytes()[: random_bits.randrange(size)])
        before = path.read_bytes()
        assert shown(journal.parent)
        assert path.read_bytes() == before
    assert "problem" in shown(tmp_path / "nowhere")[0]


def test_the_hot_store_in_numbers(tmp_path: Path) -> None:
    assert "problem" in inspect_hot_store(tmp_path)
    writer = HotDatabase(tmp_path / "hot.db", writer=True)
    writer.set_fact("journal_seq", 7)
    for number in range(1, 31):
        writer.put_stream(number, f"s{number:02}", False, None, b"image")
    writer.put_block(1, BlockRow(1, 3, b"", b"", None, b"abc"), 5)
    writer.put_block(1, BlockRow(4, 9, b"", b"", None, b"defghi"), 6)
    writer.put_producer(1, "p", 0, 4)
    described = orjson.loads(orjson.dumps(inspect_hot_store(tmp_path)))
    assert described["facts"] == {"journal_seq": 7, "version": 1}
    assert described["rows"] == {
        "streams": 30,
        "tombstones": 0,
        "producers": 1,
        "blocks": 2,
        "meta": 0,
        "segments": 0,
        "heads": 0,
        "graves": 0,
        "forks": 0,
        "due": 0,
        "trims": 0,
        "documents": 0,
    }
    assert len(described["streams"]) == 20
    assert described["streams"][0] == {
        "number": 1,
        "name": "s01",
        "gone": 0,
        "deadline_ns": None,
        "image_bytes": 5,
        "producers": 1,
        "blocks": 2,
        "first_entry": 1,
        "last_entry": 9,
        "payload_bytes": 9,
    }
    writer.close()


def test_the_hot_store_can_be_seen_while_it_is_written(tmp_path: Path) -> None:
    writer = HotDatabase(tmp_path / "hot.db", writer=True)
    with writer.connection:
        writer.set_fact("journal_seq", 7)
        assert inspect_hot_store(tmp_path)["facts"] == {"version": 1}
    assert inspect_hot_store(tmp_path)["facts"] == {"journal_seq": 7, "version": 1}
    writer.close()


def test_a_hot_store_that_is_none_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "hot.db").write_bytes(b"not a database" * 100)
    assert "cannot be read" in str(inspect_hot_store(tmp_path)["problem"])
