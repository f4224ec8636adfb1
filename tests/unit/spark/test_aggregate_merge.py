"""Sorted runs of states, read side by side, are what sorting everything would give."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.spark.index.aggregate_merge import merge_aggregate_runs, merge_states
from tailrace.spark.index.aggregates import AGGREGATE_SCHEMA

Key = tuple[str, int, int, tuple[str | None, ...], str]

texts = st.sampled_from(["", "a", "a\0", "b", "\uffff", "😀", "a" * 300])
keys = st.tuples(
    st.sampled_from(["r", "r\0", "ß"]),
    st.sampled_from([1000, 60_000]),
    st.sampled_from([-5, 0, 2**40]),
    st.lists(st.none() | texts, max_size=3).map(tuple),
    st.sampled_from(["m", "n"]),
)
runs = st.lists(st.lists(keys, max_size=12), min_size=1, max_size=5)


def _place(key: Key) -> tuple[object, ...]:
    """Code points ascend as the bytes of UTF-8 do."""
    rollup, span_ms, start, dimensions, measure = key
    return rollup, span_ms, start, [(text is not None, text or "") for text in dimensions], measure


def _file(keys: list[Key], group_rows: int) -> Any:
    rows = [
        {
            "rollup": rollup,
            "interval_ms": span_ms,
            "window_start": start,
            "dimensions": list(dimensions),
            "measure": measure,
            "count": 1,
        }
        for rollup, span_ms, start, dimensions, measure in sorted(keys, key=_place)
    ]
    out = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(rows, schema=AGGREGATE_SCHEMA),
        out,
        row_group_size=group_rows,
        store_schema=False,
    )
    return pq.ParquetFile(pa.BufferReader(out.getvalue()))


def _key(row: dict[str, Any]) -> Key:
    return row["rollup"], row["interval_ms"], row["window_start"], tuple(row["dimensions"]), row["measure"]


@settings(max_examples=200)
@given(runs, st.integers(1, 5), st.integers(1, 4))
def test_runs_side_by_side_are_all_rows_in_order(
    runs: list[list[Key]], group_rows: int, read_rows: int
) -> None:
    """However they are cut into row groups, however many rows are read at a time; keys may repeat."""
    files = [_file(run, group_rows) for run in runs]
    found = [_key(row) for table in merge_aggregate_runs(files, read_rows) for row in table.to_pylist()]
    assert found == sorted((key for run in runs for key in run), key=_place)
    summed = [
        row
        for table in merge_states(merge_aggregate_runs([_file(run, group_rows) for run in runs], read_rows))
        for row in table.to_pylist()
    ]
    assert [_key(row) for row in summed] == list(dict.fromkeys(found))
    assert [row["count"] for row in summed] == [found.count(_key(row)) for row in summed]
