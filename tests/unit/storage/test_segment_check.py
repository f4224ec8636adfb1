"""`tailrace inspect segment` and the check behind it: what a segment holds, and what is wrong with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from support.cli import tailrace
from support.segments import NAME, STREAM_ID, Entry, runs_of, write
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.model import stream_prefix
from tailrace.storage.segments.reader import check_segment, describe_segment

ENTRIES = [Entry(b'{"n":%d}' % index, 10**18 + index, b"k") for index in range(1500)]


@pytest.mark.parametrize("json", [True, False])
def test_a_whole_segment_has_no_problem(tmp_path: Path, json: bool) -> None:
    path = tmp_path / "segment.parquet"
    made = write(path, runs_of(1, ENTRIES, json), json, epoch=2)
    raw = path.read_bytes()
    assert check_segment(raw, made.info) == []
    described = describe_segment(raw, made.info.key)
    assert "problem" not in described
    for field in (
        "bytes",
        "sha256",
        "epoch",
        "first",
        "last",
        "rows",
        "payload_bytes",
        "first_ns",
        "last_ns",
    ):
        assert described[field] == getattr(made.info, field)
    assert (described["name"], described["stream_id"], described["json"]) == (NAME, STREAM_ID, json)
    assert [group["rows"] for group in described["row_groups"]] == [1024, 476]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 1},
        {"first": 2},
        {"last": 7},
        {"rows": 3},
        {"bytes": 4},
        {"payload_bytes": 5},
        {"sha256": "0" * 64},
        {"first_ns": 1},
        {"last_ns": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_record_that_does_not_fit_is_a_problem(tmp_path: Path, changes: dict[str, int | str]) -> None:
    path = tmp_path / "segment.parquet"
    made = write(path, runs_of(1, ENTRIES, True), True)
    wrong = msgspec.structs.replace(made.info, **changes)
    assert len(check_segment(path.read_bytes(), wrong)) == 1


def test_damage_anywhere_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "segment.parquet"
    made = write(path, runs_of(1, ENTRIES, True), True)
    raw = path.read_bytes()
    for at in range(0, len(raw), 97):
        damaged = bytearray(raw)
        damaged[at] ^= 4
        assert check_segment(bytes(damaged), made.info) != []
        assert "problem" in describe_segment(bytes(damaged), made.info.key)
    assert check_segment(b"", made.info) != []
    assert check_segment(raw[:-1], made.info) != []
    other = made.info.key.replace("-00000000000000000001-", "-00000000000000000002-")
    assert "does not match its content" in describe_segment(raw, other)["problem"]


def test_the_command_takes_a_file_or_a_key(tmp_path: Path) -> None:
    path = tmp_path / "segment.parquet"
    entries = [Entry(b"plain", 1, b"k"), Entry(b"\xff", 2)]
    made = write(path, runs_of(1, entries, False), False)
    key = stream_prefix(STREAM_ID) + made.info.key
    data_dir = tmp_path / "data"
    (data_dir / "objects").mkdir(parents=True)

    async def put() -> None:
        objects = open_object_store(f"file://{data_dir}/objects")
        await objects.create(key, path.read_bytes())
        await objects.close()

    asyncio.run(put())
    by_file = tailrace("inspect", "segment", str(path), "--json", "--entries")
    by_key = tailrace("inspect", "segment", key, "--data-dir", str(data_dir), "--json", "--entries")
    by_url = tailrace(
        "inspect", "segment", key, "--json", "--entries", "--object-store", f"file://{data_dir}/objects"
    )
    assert by_file.code == by_key.code == by_url.code == 0
    assert by_file.rows[1:] == by_key.rows[1:] == by_url.rows[1:]
    assert by_key.rows[1:] == [
        {"entry": 1, "time_ns": 1, "key": "k", "payload": "plain"},
        {"entry": 2, "time_ns": 2, "payload_base64": "/w=="},
    ]
    assert by_key.rows[0]["sha256"] == made.info.sha256
    shown = tailrace("inspect", "segment", str(path), "--entries").out
    assert "row group 0  first=1  last=2" in shown
    assert "payload=plain" in shown
    missing = tailrace("inspect", "segment", "streams/none", "--data-dir", str(data_dir))
    assert missing.code == 1
    assert "no object of that name" in missing.err
