"""Segments: names, what is refused, what pruning leaves out, and damage, which never becomes a payload."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from support.segments import STREAM_ID, Entry, read_all, run_of, runs_of, write
from tailrace.storage.segments import reader
from tailrace.storage.segments.model import (
    CorruptSegmentError,
    SegmentRows,
    make_stream_id,
    segment_name,
    stream_prefix,
)
from tailrace.storage.segments.reader import Footer, read_row_group
from tailrace.storage.segments.writer import write_segment

HOUR_NS = 3_600_000_000_000


def orders(count: int, keys: int = 0) -> list[Entry]:
    return [
        Entry(b'{"n":%d}' % index, index * HOUR_NS, b"key-%d" % (index * keys // count) if keys else None)
        for index in range(count)
    ]


def test_names() -> None:
    assert make_stream_id("a", 0) == xxhash.xxh3_128_hexdigest(b"a\0" + bytes(8))
    assert make_stream_id("a", 1) == xxhash.xxh3_128_hexdigest(b"a\0" + bytes(7) + b"\1")
    assert stream_prefix("ab" + "0" * 30) == f"streams/ab/ab{'0' * 30}/"
    name = segment_name(3, 1, 20, "0123456789abcdef" * 4)
    assert name == ("segments/0000000003-00000000000000000001-00000000000000000020.0123456789abcdef.parquet")


def test_naming_segments_does_not_cost_an_import_of_arrow() -> None:
    modules = "tailrace.storage.segments.model, tailrace.storage.segments.cold_reader"
    script = f"import sys, {modules}; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_same_entries_make_the_same_file(tmp_path: Path) -> None:
    entries = orders(3000, 50)
    one = write(tmp_path / "one.parquet", runs_of(1, entries, True, 700), True)
    two = write(tmp_path / "two.parquet", runs_of(1, entries, True, 1100), True)
    assert one == two
    assert one.info.key == segment_name(0, 1, 3000, one.info.sha256)


def test_row_groups_are_written_as_they_fill(tmp_path: Path) -> None:
    """However large a segment is, only about a row group of it is in memory."""
    path = tmp_path / "large.parquet"
    draw = random.Random(1)
    written = 0

    def runs() -> Iterator[SegmentRows]:
        nonlocal written
        for number in range(24):
            yield run_of(1 + number, [Entry(draw.randbytes(1 << 18), number)], False)
            on_disk = path.stat().st_size
            assert on_disk >= written - (3 << 19), "what came before is on disk"
            written += 1 << 18

    made = write_segment(runs(), path, name="large", stream_id=STREAM_ID, epoch=0, json=False)
    assert made.info.payload_bytes == 24 << 18
    assert [group.rows for group in Footer(made.footer).row_groups] == [4] * 6


def test_rows_that_fail_midway_fail_the_segment(tmp_path: Path) -> None:
    def runs() -> Iterator[SegmentRows]:
        yield run_of(1, orders(3000), True)
        raise OSError("the hot store went away")

    with pytest.raises(OSError, match="went away"):
        write_segment(runs(), tmp_path / "half", name="half", stream_id=STREAM_ID, epoch=0, json=True)


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [run_of(1, [Entry(b"1", 1)], True), run_of(3, [Entry(b"3", 1)], True)],
        [run_of(1, [Entry(b"1", 1)], True), run_of(1, [Entry(b"1", 1)], True)],
        [SegmentRows(1, b"", array("I"), array("q"), None)],
        [SegmentRows(1, b"12", array("I", [2]), array("q"), None)],
    ],
    ids=["nothing", "gap", "twice", "no rows", "no time"],
)
def test_rows_that_make_no_segment_are_refused(tmp_path: Path, runs: list[SegmentRows]) -> None:
    with pytest.raises(ValueError, match=r"entry|entries|rows"):
        write(tmp_path / "refused.parquet", runs, True)


def test_an_entry_outside_of_the_segment_is_not_found(tmp_path: Path) -> None:
    footer = Footer(write(tmp_path / "some.parquet", runs_of(5, orders(3), True), True).footer)
    for entry in (4, 8):
        with pytest.raises(ValueError, match="not in 5 to 7"):
            footer.find(entry)


def test_a_key_is_looked_for_in_few_row_groups(tmp_path: Path) -> None:
    """Keys that come in runs are told apart by statistics."""
    footer = Footer(write(tmp_path / "keys.parquet", runs_of(1, orders(20_000, 10), True), True).footer)
    assert footer.count == 20
    assert len(footer.groups_with_key(b"key-3")) <= 3
    assert footer.groups_with_key(b"kez") == []


def test_a_filter_tells_scattered_keys_apart(tmp_path: Path) -> None:
    """Each row group spans all of the alphabet, so that only Bloom filters can know."""
    draw = random.Random(1)
    entries = [Entry(b"x", 1, b"%08x" % draw.getrandbits(32)) for _ in range(20_480)]
    footer = Footer(write(tmp_path / "keys.parquet", runs_of(1, entries, False), False).footer)
    for at in (0, 1024, 20_479):
        key = entries[at].key
        assert key is not None
        found = footer.groups_with_key(key)
        assert at // 1024 in found
        assert len(found) < 5
    wrong = sum(len(footer.groups_with_key(b"%08x" % draw.getrandbits(32))) for _ in range(200))
    assert wrong < 200 * 20 * 0.1
    assert footer.next_with_key(entries[-1].key or b"", 19) == 19
    assert footer.next_with_key(b"~", 0) is None


def test_without_keys_no_row_group_is_looked_at(tmp_path: Path) -> None:
    footer = Footer(write(tmp_path / "keys.parquet", runs_of(1, orders(3000), True), True).footer)
    assert footer.groups_with_key(b"key") == []


def test_since_is_answered_by_statistics(tmp_path: Path) -> None:
    footer = Footer(write(tmp_path / "since.parquet", runs_of(1, orders(5000), True), True).footer)
    assert footer.group_since(0) == 0
    assert footer.group_since(1024 * HOUR_NS) == 1
    assert footer.group_since(1024 * HOUR_NS - 1) == 1
    assert footer.group_since(4999 * HOUR_NS) == 4
    assert footer.group_since(4999 * HOUR_NS + 1000) is None


def test_the_footer_is_found_from_any_length_of_the_end(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    draw = random.Random(1)
    entries = [Entry(b"x", 1, b"%016x" % draw.getrandbits(64)) for _ in range(60_000)]
    made = write(path, runs_of(1, entries, False), False)
    raw = path.read_bytes()
    for guess in (8, 100, 10_000, 64 << 10, len(raw)):
        found: bytes | int = len(raw) - guess
        looks = 0
        while not isinstance(found, bytes):
            found = reader.find_tail(raw[found:], len(raw))
            looks += 1
        assert reader.pack_tail(found) == made.footer
        assert looks <= 3
    for wrong in (b"", b"PAR1", bytes(100), raw[:-1]):
        with pytest.raises(CorruptSegmentError):
            reader.find_tail(wrong, len(wrong))


def _read_damaged(raw: bytes) -> list[Entry] | None:
    """The entries of a file, or None if its damage was noticed."""
    try:
        found = reader.find_tail(raw, len(raw))
        assert isinstance(found, bytes)
        return read_all(reader.pack_tail(found), raw)
    except CorruptSegmentError:
        return None


def test_no_flipped_bit_becomes_a_wrong_payload(tmp_path: Path) -> None:
    """Every byte of a file, and what is kept of it: damage is noticed, or it hits what nobody reads."""
    path = tmp_path / "small.parquet"
    entries = [Entry(b'{"n":%d}' % index, 10**18 + index, b"k%d" % (index % 3)) for index in range(40)]
    made = write(path, runs_of(1, entries, True, 7), True)
    raw = path.read_bytes()
    assert _read_damaged(raw) == entries
    harmless: list[int] = []
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        found = _read_damaged(bytes(damaged))
        if found is not None:
            assert found == entries
            harmless.append(at)
    assert harmless == [0, 1, 2, 3], "only the magic at the start is not looked at"
    for at in range(len(made.footer)):
        damaged = bytearray(made.footer)
        damaged[at] ^= 1 << at % 8
        try:
            assert read_all(bytes(damaged), raw) == entries
        except CorruptSegmentError:
            pass


def test_a_row_group_that_is_cut_short_or_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.parquet"
    footer = Footer(write(path, runs_of(1, orders(2000), True), True).footer)
    raw = path.read_bytes()
    first, second = footer.row_groups
    for wrong in (
        b"",
        raw[first.start : first.stop - 1],
        raw[second.start : second.stop],
        bytes(first.stop - first.start),
    ):
        with pytest.raises(CorruptSegmentError, match="row group 0"):
            read_row_group(footer, 0, wrong)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "newer.parquet"
    made = write(path, runs_of(1, orders(3), True), True)
    tail = bytearray(reader.unpack_tail(made.footer))
    marker = b"tailrace.version\x18\x01"
    at = tail.index(marker) + len(marker)
    tail[at : at + 1] = b"9"
    for key in (b"tailrace.footer_xxh3", b"tailrace.index_xxh3"):
        at = tail.index(key) + len(key) + 2
        tail[at : at + 16] = b"0" * 16
    reader.stamp_checksums(tail)
    with pytest.raises(CorruptSegmentError, match="format 9"):
        Footer(reader.pack_tail(tail))


def test_every_fact_of_a_segment_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
    footer = Footer(write(tmp_path / "facts.parquet", runs_of(1, orders(3), True), True).footer)
    assert [fact for fact in footer.facts if f"`tailrace.{fact}`" not in page] == []
    columns = [footer.metadata.schema.column(index).name for index in range(5)]
    assert [column for column in columns if f"| `{column}` |" not in page] == []
