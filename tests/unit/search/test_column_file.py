"""What a file tells of a column without decoding it is what decoding it would tell."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from tailrace.search.index_files.column_file import ColumnFile
from tailrace.search.index_files.file_cache import LoadedContent
from tailrace.search.index_files.parquet_file import ParquetFile

GROUP_ROWS = 3
KINDS = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "string": st.text(max_size=3),
    "bool": st.booleans(),
}
COMPARISONS = (">", ">=", "<", "<=", "=")


def _opened(kind: str, rows: list[list[Any] | None]) -> ColumnFile:
    numbers = pa.array(range(1, len(rows) + 1), pa.uint64())
    values = pa.array(rows, pa.list_(pa.type_for_alias(kind)))
    target = io.BytesIO()
    pq.write_table(pa.table({"_entry": numbers, "v": values}), target, row_group_size=GROUP_ROWS)
    return ColumnFile(ParquetFile(LoadedContent(target.getvalue())), 1, len(rows))


@st.composite
def _columns(draw: st.DrawFn) -> tuple[str, list[list[Any] | None], Any]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    values = KINDS[kind]
    rows = draw(st.lists(st.none() | st.lists(values, max_size=2), min_size=1, max_size=10))
    return kind, rows, draw(values)


@given(_columns())
def test_bounds_and_gaps_of_a_column_are_known_without_decoding_it(
    given_column: tuple[str, list[list[Any] | None], Any],
) -> None:
    kind, rows, bound = given_column
    file = _opened(kind, rows)
    column = file.column("v")
    for comparison in COMPARISONS:
        if file.is_beyond("v", comparison, bound):
            assert column.rows_in_range(comparison, bound) == 0
    if file.is_full("v"):
        assert column.present == (1 << len(rows)) - 1


def test_a_full_column_is_told_from_one_with_gaps() -> None:
    assert _opened("int64", [[1], [2], [3], [4, 5]]).is_full("v")
    for gap in ([], None):
        assert not _opened("int64", [[1], [2], [3], gap]).is_full("v")


def test_what_lies_beyond_all_values_is_told() -> None:
    file = _opened("int64", [[5], [7], [6], [9]])
    told = {comparison: file.is_beyond("v", comparison, 9) for comparison in COMPARISONS}
    assert told == {">": True, ">=": False, "<": False, "<=": False, "=": False}
    assert file.is_beyond("v", "<", 5)
    assert not file.is_beyond("v", "<=", 5)
    assert file.is_beyond("v", "=", 10)
