"""Merge of `agg` index files: a k-way merge of sorted runs, which adds up the states of equal groups.

`merge_aggregate_runs` reads a few rows of each run at a time, independent of the size of row groups, and
yields tables in sort order; rows of one group and measure are adjacent, in any order. `merge_states` reduces
them to one state per measure of each group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from tailrace.search.aggregates.measures import Summary
from tailrace.search.index_files.format import (
    COUNT,
    DIMENSIONS,
    INTERVAL_MS,
    MAX_WHOLE,
    MEASURE,
    MIN_WHOLE,
    ROLLUP,
    SKETCH,
    SUM,
    SUM_EXACT,
    SUM_REST,
    WINDOW_START,
)
from tailrace.search.records import INT64_MAX
from tailrace.spark.index.aggregate_states import count_row, summary_from_row, summary_row
from tailrace.spark.index.aggregates import AGGREGATE_SCHEMA
from tailrace.spark.index.arrays import argsort_bytes, np, to_numpy
from tailrace.storage.segments.parquet import pa, pc


class SortedRunReader:
    """Reads a sorted file in small batches. `key_of` returns the sort key of a row of a table."""

    def __init__(self, file: Any, read_rows: int, key_of: Callable[[Any, int], Any]) -> None:
        self._batches = file.iter_batches(batch_size=read_rows, use_threads=False)
        self._key_of = key_of
        self._left = file.metadata.num_rows
        self._first: Any = None
        self.buffered: Any = None  # rows read but not consumed
        self.last: Any = None  # the key of the last buffered row

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def fill(self) -> None:
        """Read the next batch if the buffer is empty."""
        if self.buffered is None and self.has_more:
            found = pa.Table.from_batches([next(self._batches)])
            self._left -= found.num_rows
            self.last = self._key_of(found, found.num_rows - 1)
            self._set_buffer(found)

    def consume_through(self, bound: Any) -> Any:
        """Remove and return the buffered rows up to the bound, all if it is None; None if there are none."""
        # Computing keys is slow, and runs of consecutive entries rarely overlap.
        if bound is None or self.last <= bound:
            consumed, self.buffered = self.buffered, None
            return consumed
        if self._first > bound:
            return None
        rows = range(self.buffered.num_rows)
        count = bisect_right(rows, bound, key=lambda row: self._key_of(self.buffered, row))
        consumed = self.buffered.slice(0, count)
        self._set_buffer(self.buffered.slice(count))
        return consumed

    def _set_buffer(self, table: Any) -> None:
        self.buffered = table
        self._first = self._key_of(table, 0)


READ_ROWS: Final = 2048  # per run and batch: sketches are large

AggregateSortKey = tuple[str, int, int, list[tuple[bool, str]], str]


def merge_aggregate_runs(files: Sequence[Any], read_rows: int = READ_ROWS) -> Iterator[Any]:
    """The rows of all runs in sort order, as tables."""
    runs = [SortedRunReader(file, read_rows, _sort_key) for file in files]
    while True:
        for run in runs:
            run.fill()
        nonempty = [run for run in runs if run.buffered is not None]
        if not nonempty:
            return
        # The unread rows of a run are not smaller than its last buffered row.
        bound = min((run.last for run in nonempty if run.has_more), default=None)
        consumed = [table for run in nonempty if (table := run.consume_through(bound)) is not None]
        if len(consumed) == 1:
            yield consumed[0]
        elif consumed:
            table = pa.concat_tables(consumed).combine_chunks()
            yield table.take(pa.array(_sort_order(table)))


def _sort_key(table: Any, row: int) -> AggregateSortKey:
    """The sort key of a row. A missing dimension sorts first."""
    texts = table.column(DIMENSIONS)[row].as_py()
    return (
        table.column(ROLLUP)[row].as_py(),
        table.column(INTERVAL_MS)[row].as_py(),
        table.column(WINDOW_START)[row].as_py(),
        [(text is not None, text or "") for text in texts],
        table.column(MEASURE)[row].as_py(),
    )


def _sort_order(table: Any) -> Any:
    """Stable argsort of the rows by their sort keys."""
    lists = table.column(DIMENSIONS).combine_chunks()
    sizes = np.diff(to_numpy(lists.offsets))
    codes = np.full((len(lists), int(sizes.max(initial=0))), -2, dtype=np.int64)  # absent sorts first
    codes[np.arange(codes.shape[1]) < sizes[:, np.newaxis]] = _text_ranks(lists.flatten())
    keys = [
        _text_ranks(table.column(ROLLUP).combine_chunks()),
        to_numpy(table.column(INTERVAL_MS)),
        to_numpy(table.column(WINDOW_START)),
        *codes.T,
        _text_ranks(table.column(MEASURE).combine_chunks()),
    ]
    return np.lexsort(keys[::-1])


def _text_ranks(texts: Any) -> Any:
    """Integers that compare like the texts; -1 for null."""
    encoded = texts.dictionary_encode()
    order = argsort_bytes(encoded.dictionary)
    rank = np.empty(len(order) + 1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    return rank[to_numpy(encoded.indices.fill_null(-1))]


MERGE_ROWS: Final = 4096

AggregateRow = dict[str, Any]


def merge_states(tables: Iterable[Any]) -> Iterator[Any]:
    """Reduce sorted rows to one row per group and measure."""
    last_group: Any = None  # may continue in the next slice
    for rows in _slice_tables(tables):
        if last_group is not None:
            rows = pa.concat_tables([last_group, rows]).combine_chunks()
        starts = _group_starts(rows)
        yield from _merge_groups(rows.slice(0, starts[-1]), starts[:-1])
        last_group = rows.slice(starts[-1])
    if last_group is not None:
        yield from _merge_groups(last_group, np.zeros(1, np.int64))


def _slice_tables(tables: Iterable[Any]) -> Iterator[Any]:
    """Small slices, because rows that are added up become Python objects."""
    for table in tables:
        for at in range(0, table.num_rows, MERGE_ROWS):
            yield table.slice(at, MERGE_ROWS).combine_chunks()


def _group_starts(rows: Any) -> Any:
    """The rows at which a new group or measure starts."""
    is_start = np.ones(rows.num_rows, dtype=bool)
    is_start[1:] = _dimensions_differ(rows.column(DIMENSIONS).combine_chunks())
    for name in (ROLLUP, INTERVAL_MS, WINDOW_START, MEASURE):
        column = rows.column(name).combine_chunks()
        is_start[1:] |= to_numpy(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)))
    return np.flatnonzero(is_start)


def _dimensions_differ(lists: Any) -> Any:
    """For each list but the first, whether it differs from the one before."""
    sizes = np.diff(to_numpy(lists.offsets))
    texts = lists.flatten().dictionary_encode().indices.fill_null(-1)
    codes = np.full((len(lists), int(sizes.max(initial=0))), -2, dtype=np.int64)
    codes[np.arange(codes.shape[1]) < sizes[:, np.newaxis]] = to_numpy(texts)
    return (codes[1:] != codes[:-1]).any(axis=1)


def _merge_groups(rows: Any, starts: Any) -> Iterator[Any]:
    """Merge groups that have several rows. Most are in one run only and have one."""
    if not rows.num_rows:
        return
    sizes = np.diff(starts, append=rows.num_rows)
    groups = np.arange(len(starts))
    single = sizes == 1
    if not single.all():
        repeated = rows.take(pa.array(np.flatnonzero(np.repeat(~single, sizes))))
        added = [
            (group, (*key, *state))
            for group, (key, found) in zip(
                groups[~single].tolist(), groupby(repeated.to_pylist(), key=_group_key), strict=True
            )
            for state in _sum_states(found)
        ]
        rows = pa.concat_tables(
            [rows.take(pa.array(starts[single])), _build_table([row for _, row in added])]
        )
        places = np.concatenate([groups[single], [group for group, _ in added]])
        rows = rows.combine_chunks().take(pa.array(np.argsort(places, kind="stable")))
    yield rows.combine_chunks()


def _group_key(row: AggregateRow) -> tuple[Any, ...]:
    return row[ROLLUP], row[INTERVAL_MS], row[WINDOW_START], row[DIMENSIONS], row[MEASURE]


def _sum_states(rows: Iterator[AggregateRow]) -> list[tuple[object, ...]]:
    """The sum of the states; several states if the count exceeds 64 bits."""
    counted = 0
    sums: list[Summary] = []
    for row in sorted(rows, key=_content_key):
        if row[SKETCH] is None:
            counted += row[COUNT]
            continue
        summary = summary_from_row(row)
        if not sums or sums[-1].count + summary.count > INT64_MAX:
            sums.append(summary)
        else:
            sums[-1].merge(summary)
    return [summary_row(summary) for summary in sums] or [count_row(counted)]


def _content_key(row: AggregateRow) -> tuple[Any, ...]:
    """Sort key by content: rows of a group arrive in any order, and the result must not depend on it."""
    return (
        row[COUNT],
        row[SUM] or 0.0,
        row[SUM_REST] or 0.0,
        row[SUM_EXACT] or b"",
        row[SKETCH] or [],
        row[MIN_WHOLE] is None,
        row[MAX_WHOLE] is None,
    )


def _build_table(rows: list[tuple[object, ...]]) -> Any:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, AGGREGATE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=AGGREGATE_SCHEMA)
