"""Sorted runs of `exact` become one, a few row groups of each at a time.

Runs follow each other in the order of entries, so that rows of one value are joined in the order of the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tailrace.search.index_files.format import ENTRIES, FIELD, VALUE
from tailrace.spark.index.arrays import np, to_numpy
from tailrace.spark.index.exact_tables import exact_table
from tailrace.storage.segments.parquet import pa, pc


class _ExactRun:
    """An open file, read row group by row group. Each of them has rows of one field."""

    def __init__(self, file: Any) -> None:
        self._file = file
        names = file.schema_arrow.names
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        self.fields: list[str] = [group.column(names.index(FIELD)).statistics.min for group in groups]
        self._next = 0
        self.held: Any = None  # rows that were read and not yet taken

    def has_more(self, field: str) -> bool:
        return self._next < len(self.fields) and self.fields[self._next] == field

    def read(self) -> None:
        """One row group more."""
        found = self._file.read_row_group(self._next, use_threads=False)
        self._next += 1
        self.held = found if self.held is None else pa.concat_tables([self.held, found])

    def last_value(self) -> Any:
        return self.held.column(VALUE)[-1].as_py()

    def take(self, below: Any) -> Any:
        """The rows with smaller values; all of them if there is no bound."""
        count = self.held.num_rows if below is None else _count_below(self.held.column(VALUE), below)
        taken = self.held.slice(0, count)
        self.held = self.held.slice(count) if count < self.held.num_rows else None
        return taken


def merge_exact_runs(files: Sequence[Any]) -> Iterator[Any]:
    """The rows of open runs as tables of one field each, in order, values that are equal joined."""
    runs = [_ExactRun(file) for file in files]
    for field in sorted({field for run in runs for field in run.fields}):
        yield from _join_equal_values(field, _iter_sorted(field, runs))


def _iter_sorted(field: str, runs: Sequence[_ExactRun]) -> Iterator[Any]:
    """All rows of a field by value, and by run where values are equal."""
    while True:
        for run in runs:
            if run.held is None and run.has_more(field):
                run.read()
        open_ended = [run for run in runs if run.has_more(field)]
        holding = [run for run in runs if run.held is not None]
        if not holding:
            return
        bound: Any = None
        if open_ended:
            # What a run has not read yet may go on with its last value, but has nothing smaller.
            lasts = [run.last_value() for run in open_ended]
            bound = b"" if None in lasts else min(lasts)
        taken = pa.concat_tables([run.take(bound) for run in holding]).combine_chunks()
        if taken.num_rows:
            values = taken.column(VALUE).combine_chunks()
            yield taken.take(pc.array_sort_indices(values, null_placement="at_start"))  # equal ones stay
        else:
            # One value fills all that was read of it.
            for run in open_ended:
                if (run.last_value() or b"") <= bound:
                    run.read()


def _count_below(values: Any, bound: bytes) -> int:
    """How many of some sorted values come before another; null comes before all, but may go on itself."""
    if not bound:
        return 0
    return pc.sum(pc.fill_null(pc.less(values, pa.scalar(bound, pa.binary())), True)).as_py() or 0


def _join_equal_values(field: str, tables: Iterable[Any]) -> Iterator[Any]:
    """Rows of one value as one, as far as lists may be long."""
    held: Any = None
    for table in tables:
        joined = _join_lists(field, table if held is None else pa.concat_tables([held, table]))
        yield joined.slice(0, joined.num_rows - 1)
        held = joined.slice(joined.num_rows - 1)  # it may go on
    if held is not None:
        yield held


def _join_lists(field: str, table: Any) -> Any:
    table = table.combine_chunks()
    values, entries = table.column(VALUE).combine_chunks(), table.column(ENTRIES).combine_chunks()
    valid = to_numpy(values.is_valid())
    fresh = np.ones(len(values), dtype=bool)
    differ = pc.fill_null(pc.not_equal(values.slice(1), values.slice(0, len(values) - 1)), False)
    fresh[1:] = to_numpy(differ) | (valid[1:] != valid[:-1])
    starts = np.flatnonzero(fresh)
    offsets = to_numpy(entries.offsets).astype(np.int64)
    offsets -= offsets[0]
    bounds = np.append(offsets[:-1][starts], offsets[-1])
    return exact_table(field, values.take(pa.array(starts)), bounds, to_numpy(entries.flatten()))
