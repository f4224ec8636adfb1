"""Sorted runs of values, read side by side, are what sorting everything would give."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.spark.index.exact import EXACT_SCHEMA, merge_exact_runs
from tailrace.spark.index.file_writer import IndexFileWriter

LIST_MAX = 3
Key = tuple[str, bytes | None]

values = st.none() | st.binary(max_size=2) | st.sampled_from([b"same", b"same\0"])
keys = st.tuples(st.sampled_from(["a", "b"]), values)
runs = st.lists(st.dictionaries(keys, st.integers(1, 8), max_size=12), min_size=1, max_size=4)


def _place(key: Key) -> tuple[str, bool, bytes]:
    return key[0], key[1] is not None, key[1] or b""


def _rows(lists: dict[Key, list[int]]) -> list[dict[str, Any]]:
    """Lists in order, none longer than allowed, every one but the last of a value full."""
    return [
        {"field": field, "value": value, "entries": entries[at : at + LIST_MAX]}
        for (field, value), entries in sorted(lists.items(), key=lambda item: _place(item[0]))
        for at in range(0, len(entries), LIST_MAX)
    ]


def _file(lists: dict[Key, list[int]], group_rows: int) -> Any:
    rows = _rows(lists)
    writer = IndexFileWriter(EXACT_SCHEMA, {}, dictionary=["field"])
    for field in ("a", "b"):
        found = [row for row in rows if row["field"] == field]
        for at in range(0, len(found), group_rows):
            writer.write(pa.Table.from_pylist(found[at : at + group_rows], schema=EXACT_SCHEMA))
    return pq.ParquetFile(pa.BufferReader(writer.finish()))


@settings(max_examples=150)
@given(runs, st.integers(1, 4))
def test_runs_side_by_side_are_all_rows_in_order(sizes: list[dict[Key, int]], group_rows: int) -> None:
    entry = 0
    every: dict[Key, list[int]] = {}
    files: list[Any] = []
    for run in sizes:
        lists: dict[Key, list[int]] = {}
        for key, size in run.items():
            lists[key] = list(range(entry, entry + size))
            entry += size
            every.setdefault(key, []).extend(lists[key])
        files.append(_file(lists, group_rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.spark.index.exact.LIST_ENTRIES_MAX", LIST_MAX)
        tables = list(merge_exact_runs(files))
    assert [row for table in tables for row in table.to_pylist()] == _rows(every)
    assert all(len(set(table.column("field").to_pylist())) <= 1 for table in tables)
