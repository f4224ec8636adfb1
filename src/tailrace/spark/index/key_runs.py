"""Sorted runs of keys become one, a few row groups of each at a time: each key once, with all its spans.

Runs follow each other in the order of entries, so that spans of a key are joined in the order of the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tailrace.search.index_files.format import (
    ENTRY_COUNT,
    FIRST_ENTRY,
    KEY,
    KEY_HASH,
    LAST_ENTRY,
    SPAN_FIRSTS,
    SPAN_LASTS,
)
from tailrace.spark.index.arrays import INT64_LIST, build_list_array, from_numpy, np, to_numpy
from tailrace.storage.segments.parquet import INT64, pa, pc

_REDUCERS = {FIRST_ENTRY: np.minimum, LAST_ENTRY: np.maximum, ENTRY_COUNT: np.add}
_SPAN_COLUMNS = (SPAN_FIRSTS, SPAN_LASTS)


class _KeyRun:
    """An open file, read row group by row group."""

    def __init__(self, file: Any, lead: str) -> None:
        self._file = file
        self._lead = lead
        self._next = 0
        self.held: Any = None  # rows that were read and not yet taken

    @property
    def has_more(self) -> bool:
        return self._next < self._file.metadata.num_row_groups

    def read(self) -> None:
        """One row group more."""
        found = self._file.read_row_group(self._next, use_threads=False)
        self._next += 1
        self.held = found if self.held is None else pa.concat_tables([self.held, found])

    def last(self) -> Any:
        """What is not read yet has nothing smaller, but may go on with this."""
        return self.held.column(self._lead)[-1].as_py()

    def take(self, below: Any) -> Any:
        """The rows with smaller values; all of them if there is no bound."""
        count = self.held.num_rows
        if below is not None:
            values = self.held.column(self._lead)
            count = pc.sum(pc.less(values, pa.scalar(below, values.type))).as_py() or 0
        taken = self.held.slice(0, count)
        self.held = self.held.slice(count) if count < self.held.num_rows else None
        return taken


def merge_key_runs(files: Sequence[Any], schema: Any) -> Iterator[Any]:
    """The rows of open runs of an index or of a lexicon, in order, as tables."""
    by = [name for name in (KEY_HASH, KEY) if name in schema.names]
    runs = [_KeyRun(file, by[0]) for file in files]
    while True:
        for run in runs:
            if run.held is None and run.has_more:
                run.read()
        holding = [run for run in runs if run.held is not None]
        if not holding:
            return
        open_ended = [run for run in holding if run.has_more]
        bound = min((run.last() for run in open_ended), default=None)
        taken = pa.concat_tables([run.take(bound) for run in holding]).combine_chunks()
        if taken.num_rows:
            order = pc.sort_indices(taken, sort_keys=[(name, "ascending") for name in by])  # equal ones stay
            yield _join_equal_keys(taken.take(order).combine_chunks(), schema)
        else:
            # One value fills all that was read of it.
            for run in open_ended:
                if run.last() == bound:
                    run.read()


def _join_equal_keys(table: Any, schema: Any) -> Any:
    """Rows of one key as one."""
    keys = table.column(KEY).combine_chunks()
    fresh = np.ones(len(keys), dtype=bool)
    fresh[1:] = to_numpy(pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1)))
    if fresh.all():
        return table
    starts = np.flatnonzero(fresh)
    columns: list[Any] = []
    for name in schema.names:
        column = table.column(name).combine_chunks()
        if name in _REDUCERS:
            columns.append(from_numpy(_REDUCERS[name].reduceat(to_numpy(column), starts), INT64))
        elif name in _SPAN_COLUMNS:
            offsets = to_numpy(column.offsets)
            bounds = np.append(offsets[starts], offsets[-1]) - offsets[0]
            columns.append(build_list_array(INT64_LIST, bounds, column.flatten()))
        else:
            columns.append(column.take(pa.array(starts)))
    return pa.Table.from_arrays(columns, schema=schema)
