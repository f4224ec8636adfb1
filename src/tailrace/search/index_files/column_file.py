"""The `col` index file: field values by entry, as Arrow columns that are compared as a whole.

A set of rows is one integer with a bit for each row, as everywhere in searches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from tailrace.search.columns import bits_from_rows
from tailrace.search.index_files.file_cache import UnusableFileError
from tailrace.search.index_files.format import ENTRY
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.numpy_arrays import np, to_numpy
from tailrace.search.records import Value, excludes_bounds
from tailrace.storage.segments.parquet import INT64, pa, pc, to_python_array

_COMPARE = {"=": "equal", ">": "greater", ">=": "greater_equal", "<": "less", "<=": "less_equal"}
_OVERHEAD_BYTES = 1000  # of the objects around the buffers
_WORDS_SHARED_MAX = 4096


def bits_from_mask(marks: Any) -> int:
    """The set of rows where a boolean array is true; null counts as false."""
    if marks.null_count:
        marks = pc.fill_null(marks, pa.scalar(False))
    if marks.offset:
        marks = pa.concat_arrays([marks, pa.array([], marks.type)])
    count = len(marks)
    return int.from_bytes(memoryview(marks.buffers()[1]), "little") & ((1 << count) - 1) if count else 0


class ArrowColumn:
    """The values of one field by row, from an Arrow array of lists."""

    def __init__(self, lists: Any) -> None:
        self.count: int = len(lists)
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        largest: int = pc.max(lengths).as_py() or 0
        flat = lists.flatten()
        self._is_words = pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type)
        self._parents: Any = None
        self._starts: Any = None  # start of each row in the flat values, if a row may have several
        if largest <= 1:
            flat = self._spread(flat, lengths)
        else:
            self._parents = pc.list_parent_indices(lists)
            self._starts = lists.offsets
        if self._is_words:
            encoded = flat.dictionary_encode()
            self._words: Any = encoded.dictionary
            self._flat: Any = encoded.indices
        else:
            self._words = None
            self._flat = flat
        self.present = bits_from_mask(pc.greater(lengths, 0))
        self.multiple = bits_from_mask(pc.greater(lengths, 1)) if largest > 1 else 0

    def _spread(self, flat: Any, lengths: Any) -> Any:
        """One value for each row, null where there is none."""
        if len(flat) == self.count:
            return flat
        ends = pc.cumulative_sum(lengths)
        has = pc.equal(lengths, pa.scalar(1, lengths.type))
        return flat.take(
            pc.if_else(has, pc.subtract(ends, pa.scalar(1, ends.type)), pa.scalar(None, ends.type))
        )

    @property
    def memory_bytes(self) -> int:
        held = [self._flat, self._words, self._parents, self._starts]
        return sum(part.nbytes for part in held if part is not None) + self.count // 4 + _OVERHEAD_BYTES

    # -- sets of rows --------------------------------------------------------------------------------------

    def equal(self, value: Value) -> int:
        """The rows with this value."""
        if self._is_words:
            place: int = pc.index(self._words, pa.scalar(str(value), self._words.type)).as_py()
            return 0 if place < 0 else self._rows(pc.equal(self._flat, pa.scalar(place, self._flat.type)))
        return self.rows_in_range("=", value)

    def rows_in_range(self, comparison: str, bound: Value) -> int:
        """The rows with a value for which the comparison holds."""
        compare = getattr(pc, _COMPARE[comparison])
        if self._is_words:
            return self._with_words(compare(self._words, pa.scalar(str(bound), self._words.type)))
        return self._rows(compare(self._flat, self._scalar(bound)))

    def _scalar(self, bound: Value) -> Any:
        kind = self._flat.type
        if pa.types.is_boolean(kind):
            return pa.scalar(bool(bound))
        if pa.types.is_integer(kind) and isinstance(bound, float):
            return pa.scalar(bound)  # both sides are compared as doubles, as in a scan
        return pa.scalar(bound, kind)

    def starting_with(self, prefix: str) -> int:
        if not prefix:
            return self.present
        return self._with_words(pc.starts_with(self._words, prefix))

    def _with_words(self, marks: Any) -> int:
        """The rows with a marked string."""
        marked: int = pc.sum(marks).as_py() or 0
        if not marked:
            return 0
        if marked == len(marks):
            return self.present
        return self._rows(marks.take(self._flat))

    def _rows(self, marks: Any) -> int:
        """The rows of the marked values."""
        if self._parents is None:
            return bits_from_mask(marks)
        return bits_from_rows(self._parents.filter(marks).to_pylist(), self.count)

    # -- values --------------------------------------------------------------------------------------------

    def values(self, row: int) -> list[Value]:
        """The values of one row, in their order."""
        if self._parents is None:
            found = [self._flat[row].as_py()] if self.present >> row & 1 else []
        else:
            found = self._flat[self._starts[row].as_py() : self._starts[row + 1].as_py()].to_pylist()
        return [self._words[place].as_py() for place in found] if self._is_words else found

    def extreme_value(self, row: int, largest: bool) -> Value | None:
        values = self.values(row)
        if not values:
            return None
        return values[0] if len(values) == 1 else max(values) if largest else min(values)

    def flat_at(self, rows: Any) -> tuple[Any, Any]:
        """All values of some rows, concatenated, and the index in `rows` of each.

        Strings are indexes into `words`.
        """
        if self._parents is None:
            found = self._flat.take(pa.array(rows))
            if not found.null_count:
                return found, np.arange(len(rows))
            return found.drop_null(), np.flatnonzero(to_numpy(found.is_valid()))
        starts = to_numpy(self._starts)
        sizes = starts[rows + 1] - starts[rows]
        ends = np.cumsum(sizes)
        places = np.repeat(starts[rows] - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
        return self._flat.take(pa.array(places)), np.repeat(np.arange(len(rows)), sizes)

    @property
    def words(self) -> Any:
        """The distinct strings; None if the values are not strings."""
        return self._words

    @cached_property
    def bounds(self) -> tuple[Value, Value] | None:
        """The smallest and the largest value of all rows."""
        found = pc.min_max(self._words if self._is_words else self._flat).as_py()
        return None if found["min"] is None else (found["min"], found["max"])

    def leaves(self, begin: int, end: int) -> list[object]:
        """The value of each row of a range: a scalar, a list of several, or None."""
        if self._parents is None:
            return self._listed(begin, end)
        starts: list[int] = self._starts[begin : end + 1].to_pylist()
        flat = self._listed(starts[0], starts[-1])
        lists = [flat[first - starts[0] : last - starts[0]] for first, last in pairwise(starts)]
        return [None if not found else found[0] if len(found) == 1 else found for found in lists]

    def _listed(self, begin: int, end: int) -> list[object]:
        """A range of the flat values."""
        flat = self._flat[begin:end]
        if not self._is_words:
            return flat.to_pylist()
        if len(self._words) > _WORDS_SHARED_MAX:
            return self._words.take(flat).to_pylist()
        # Rows with the same string share one object.
        words: list[str] = self._words.to_pylist()
        return [
            None if place is None else words[place] for place in cast("list[int | None]", flat.to_pylist())
        ]


class ColumnFile:
    """An open `col` file; columns are decoded on first use."""

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
            raise UnusableFileError("entries of the col file are not in order")
        return entries

    @property
    def memory_bytes(self) -> int:
        # Another thread may be adding a column.
        return self._file.memory_bytes + sum(column.memory_bytes for column in list(self._columns.values()))

    def has(self, name: str) -> bool:
        return name in self._file.names

    def is_full(self, name: str) -> bool:
        """Whether the statistics show that every row has a value."""
        found = self._full.get(name)
        if found is None:
            found = self._full[name] = self._file.leaf_is_full(name)
        return found

    def is_beyond(self, name: str, comparison: str, bound: Value) -> bool:
        """Whether the statistics show that the comparison holds for no row."""
        if name not in self._bounds:
            self._bounds[name] = self._file.leaf_bounds(name)
        bounds = self._bounds[name]
        return bounds is not None and excludes_bounds(comparison, bound, bounds)

    def column(self, name: str) -> ArrowColumn:
        found = self._columns.get(name)
        if found is None:
            lists = column_array(self._file.read([name]), name)
            if not pa.types.is_list(lists.type) or len(lists) != len(self.entries):
                raise UnusableFileError(f"column {name} has a wrong type or length")
            found = self._columns[name] = ArrowColumn(lists)
        return found
