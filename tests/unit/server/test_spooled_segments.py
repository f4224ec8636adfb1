"""Segments on their way to the object store, as the details of a stream count them."""

from __future__ import annotations

from pathlib import Path

from tailrace.server.stream_details import spooled_bytes


def test_only_those_of_the_stream_count(tmp_path: Path) -> None:
    assert spooled_bytes(tmp_path, 7) == 0
    spool = tmp_path / "spool"
    spool.mkdir()
    for name, size in (
        ("7-1.parquet", 10),
        ("7-900.parquet", 5),
        ("77-1.parquet", 100),
        ("17-7.parquet", 1000),
    ):
        (spool / name).write_bytes(bytes(size))
    assert spooled_bytes(tmp_path, 7) == 15
    assert spooled_bytes(tmp_path, 8) == 0
