"""The hot store's book of the object store."""

from __future__ import annotations

from array import array
from pathlib import Path

from tailrace.storage.hot_store.database import BlockRow, HotDatabase
from tailrace.storage.hot_store.tables import DeletedStreamRow, SegmentRow


def block(first: int, last: int, time_ns: int, body: bytes) -> BlockRow:
    count = last - first + 1
    times = array("q", [time_ns] * count)
    return BlockRow(first, last, array("I", [0] * count).tobytes(), times.tobytes(), None, body)


def test_a_store_of_an_older_version_gets_its_tables_from_the_writer(tmp_path: Path) -> None:
    old = HotDatabase(tmp_path / "hot.db", writer=True)
    for table in ("segments", "heads", "graves"):
        old.execute(f"DROP TABLE {table}")
    old.put_stream(4, "old", False, None, b"image")
    old.put_block(4, block(1, 3, 5, b"abcdef"), 5)
    old.close()
    reader, writer = HotDatabase(tmp_path / "hot.db"), HotDatabase(tmp_path / "hot.db", writer=True)
    assert reader.cold.segment_at(4, 1) is None
    assert reader.cold.segment_since(4, 0) is None
    assert reader.cold.stale_heads(0, 10) == []
    assert reader.cold.deleted_streams(0, 10) == []
    assert reader.cold.generation(4) == 0
    assert list(reader.cold.segments(4)) == []
    for _ in range(2):
        with writer.write():
            writer.cold.create()
        assert reader.cold.hot_bytes() == 6
        assert reader.cold.stale_heads(0, 10) == []  # it has yet to be sealed, which records it as well
    with writer.write():
        writer.cold.drop_blocks(4, 3)
    assert reader.cold.stale_heads(0, 10) == [(4, 1)]
    reader.close()
    writer.close()


def test_segments_are_found_by_entry_and_by_time(tmp_path: Path) -> None:
    db = HotDatabase(tmp_path / "hot.db", writer=True)
    rows = [SegmentRow(1, 10, b"a", b"A"), SegmentRow(11, 12, b"b", b"B"), SegmentRow(13, 30, b"c", b"C")]
    for row, last_ns in zip(rows, (100, 100, 300), strict=True):
        db.cold.put_segment(1, row, last_ns)
    db.cold.put_segment(2, SegmentRow(1, 5, b"z", b"Z"), 900)
    assert [db.cold.segment_at(1, entry) for entry in (1, 10, 11, 12, 30)] == [
        rows[index] for index in (0, 0, 1, 1, 2)
    ]
    assert db.cold.segment_at(1, 31) is None
    assert db.cold.segment_at(1, 0) is None
    assert [db.cold.segment_since(1, since) for since in (0, 100, 101, 301)] == [
        rows[0],
        rows[0],
        rows[2],
        None,
    ]
    assert list(db.cold.segments(1)) == rows
    db.close()


def test_blocks_go_when_a_segment_has_them(tmp_path: Path) -> None:
    db = HotDatabase(tmp_path / "hot.db", writer=True)
    for first, last, body in ((1, 4, b"aaaa"), (5, 9, b"bbbbb"), (10, 12, b"ccc")):
        db.put_block(1, block(first, last, first, body), first)
        db.cold.add_hot_bytes(len(body))
    db.put_block(7, block(1, 1, 77, b"d"), 77)
    db.cold.add_hot_bytes(1)
    assert [
        (row.number, row.first, row.last, row.body_bytes, row.oldest_ns) for row in db.cold.hot_ranges(0, 9)
    ] == [
        (1, 1, 12, 12, 1),
        (7, 1, 1, 1, 77),
    ]
    db.cold.drop_blocks(1, 7)
    assert db.cold.hot_bytes() == 9
    assert list(db.blocks_from(1, 4)) == []
    assert [row.first for row in db.blocks_from(1, 5)] == [5, 10]
    assert list(db.blocks_from(1, 13)) == []
    db.delete_stream(1)
    assert db.cold.hot_bytes() == 1
    assert [row.number for row in db.cold.hot_ranges(0, 9)] == [7]
    assert db.cold.hot_ranges(7, 9) == []
    db.close()


def test_a_manifest_is_behind_until_it_speaks_for_the_change(tmp_path: Path) -> None:
    db = HotDatabase(tmp_path / "hot.db", writer=True)
    db.cold.mark_head_stale(1, 5)
    db.cold.mark_head_stale(2, 6)
    db.cold.mark_head_recorded(1, 4, 1)
    assert db.cold.stale_heads(0, 10) == [(1, 5), (2, 6)]
    db.cold.mark_head_recorded(1, 5, 2)
    db.cold.mark_head_recorded(1, 3, 1)  # late news of an earlier try
    assert db.cold.stale_heads(0, 10) == [(2, 6)]
    assert db.cold.stale_heads(2, 10) == []
    assert db.cold.generation(1) == 2
    db.cold.mark_head_stale(1, 8)
    db.cold.mark_head_stale(1, 7)
    assert db.cold.stale_heads(0, 1) == [(1, 8)]
    db.close()


def test_graves(tmp_path: Path) -> None:
    db = HotDatabase(tmp_path / "hot.db", writer=True)
    graves = [DeletedStreamRow(number, f"n{number}", "f" * 32, b"image") for number in (3, 5, 9)]
    for grave in graves:
        db.cold.put_deleted(grave)
    assert db.cold.deleted_streams(0, 2) == graves[:2]
    assert db.cold.deleted_streams(5, 2) == graves[2:]
    db.cold.forget_deleted(5)
    assert db.cold.deleted_streams(0, 9) == [graves[0], graves[2]]
    db.close()
