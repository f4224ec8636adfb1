"""`col`: the values of fields, entry by entry."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tailrace.search.index_files.field_column import ArrowColumn
from tailrace.search.index_files.format import ENTRY
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.values import Value, excludes_bounds
from tailrace.storage.segments.parquet import INT64, pa, to_python_array


class ColumnFile:
    """A column is decoded when it is first asked for."""

    def __init__(self, file: ParquetFile, first: int, last: int) -> None:
        self._file = file
        self._columns: dict[str, ArrowColumn] = {}
        self._bounds: dict[str, tuple[Value, Value] | None] = {}
        self._full: dict[str, bool] = {}
        rows: int = file.metadata.num_rows
        self.entries: Sequence[int] = range(first, last + 1)
        if rows != last - first + 1:
            self.entries = self._listed(first, last)

    def _listed(self, first: int, last: int) -> array[int]:
        entries = to_python_array("q", column_array(self._file.read([ENTRY]), ENTRY).cast(INT64))
        rising = all(entries[at] < entries[at + 1] for at in range(len(entries) - 1))
        if not rising or not (entries and first <= entries[0] and entries[-1] <= last):
            raise UnusableFileError("its entries are not in order")
        return entries

    @property
    def memory_bytes(self) -> int:
        # Another thread may be adding a column.
        return self._file.memory_bytes + sum(column.memory_bytes for column in list(self._columns.values()))

    def has(self, name: str) -> bool:
        return name in self._file.names

    def is_full(self, name: str) -> bool:
        """Whether every row has a value; what only decoding could tell is no."""
        found = self._full.get(name)
        if found is None:
            found = self._full[name] = self._file.leaf_is_full(name)
        return found

    def is_beyond(self, name: str, comparison: str, bound: Value) -> bool:
        """Whether no row has a value on one side of a bound, as far as that is told without decoding."""
        if name not in self._bounds:
            self._bounds[name] = self._file.leaf_bounds(name)
        bounds = self._bounds[name]
        return bounds is not None and excludes_bounds(comparison, bound, bounds)

    def column(self, name: str) -> ArrowColumn:
        found = self._columns.get(name)
        if found is None:
            lists = column_array(self._file.read([name]), name)
            if not pa.types.is_list(lists.type) or len(lists) != len(self.entries):
                raise UnusableFileError(f"the column {name} is not what it should be")
            found = self._columns[name] = ArrowColumn(lists)
        return found
