"""Merge of `agg` index files: sorted runs read side by side, states of equal groups added up.

A sorted file that is read a few rows at a time, however many rows its row groups have.

Sorted runs of `agg` read side by side, a few rows of each at a time.

Rows of one group and measure follow each other, in no order of their own.

Partial states of rollups added up: one state for each measure of each group.
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
    """An open file, of which some rows are held. `key_of` says where a row of a table belongs."""

    def __init__(self, file: Any, read_rows: int, key_of: Callable[[Any, int], Any]) -> None:
        self._batches = file.iter_batches(batch_size=read_rows, use_threads=False)
        self._key_of = key_of
        self._left = file.metadata.num_rows
        self._first: Any = None
        self.held: Any = None  # rows that were read and not yet taken
        self.last: Any = None  # the key of the last of these

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def fill(self) -> None:
        """Reads on if nothing is held."""
        if self.held is None and self.has_more:
            found = pa.Table.from_batches([next(self._batches)])
            self._left -= found.num_rows
            self.last = self._key_of(found, found.num_rows - 1)
            self._hold(found)

    def take(self, upto: Any) -> Any:
        """The rows with keys that are not larger, all of them without a bound; None if there are none."""
        # Making a key takes long, and files of entries that follow each other seldom overlap.
        if upto is None or self.last <= upto:
            taken, self.held = self.held, None
            return taken
        if self._first > upto:
            return None
        count = bisect_right(range(self.held.num_rows), upto, key=lambda row: self._key_of(self.held, row))
        taken = self.held.slice(0, count)
        self._hold(self.held.slice(count))
        return taken

    def _hold(self, table: Any) -> None:
        self.held = table
        self._first = self._key_of(table, 0)


READ_ROWS: Final = 2048  # of one run at a time: sketches are large

AggregateSortKey = tuple[str, int, int, list[tuple[bool, str]], str]


def merge_aggregate_runs(files: Sequence[Any], read_rows: int = READ_ROWS) -> Iterator[Any]:
    """The rows of open runs, in order, as tables."""
    runs = [SortedRunReader(file, read_rows, _sort_key) for file in files]
    while True:
        for run in runs:
            run.fill()
        holding = [run for run in runs if run.held is not None]
        if not holding:
            return
        # What a run has not read yet is not smaller than the last row that it has.
        bound = min((run.last for run in holding if run.has_more), default=None)
        taken = [table for run in holding if (table := run.take(bound)) is not None]
        if len(taken) == 1:
            yield taken[0]
        elif taken:
            table = pa.concat_tables(taken).combine_chunks()
            yield table.take(pa.array(_sort_order(table)))


def _sort_key(table: Any, row: int) -> AggregateSortKey:
    """Where a row belongs. A dimension without a value comes first."""
    texts = table.column(DIMENSIONS)[row].as_py()
    return (
        table.column(ROLLUP)[row].as_py(),
        table.column(INTERVAL_MS)[row].as_py(),
        table.column(WINDOW_START)[row].as_py(),
        [(text is not None, text or "") for text in texts],
        table.column(MEASURE)[row].as_py(),
    )


def _sort_order(table: Any) -> Any:
    """The places of rows as their keys ascend; equal ones stay as they are."""
    lists = table.column(DIMENSIONS).combine_chunks()
    sizes = np.diff(to_numpy(lists.offsets))
    codes = np.full((len(lists), int(sizes.max(initial=0))), -2, dtype=np.int64)  # before all others
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
    """Numbers that compare as texts do; -1 where there is none."""
    encoded = texts.dictionary_encode()
    order = argsort_bytes(encoded.dictionary)
    rank = np.empty(len(order) + 1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    return rank[to_numpy(encoded.indices.fill_null(-1))]


MERGE_ROWS: Final = 4096

AggregateRow = dict[str, Any]


def merge_states(tables: Iterable[Any]) -> Iterator[Any]:
    """Sorted rows in, one row for each group and measure out."""
    held: Any = None  # the last group so far: it may go on
    for rows in _slice_tables(tables):
        if held is not None:
            rows = pa.concat_tables([held, rows]).combine_chunks()
        starts = _group_starts(rows)
        yield from _merge_groups(rows.slice(0, starts[-1]), starts[:-1])
        held = rows.slice(starts[-1])
    if held is not None:
        yield from _merge_groups(held, np.zeros(1, np.int64))


def _slice_tables(tables: Iterable[Any]) -> Iterator[Any]:
    """A few rows at a time: those that are added up become objects of Python."""
    for table in tables:
        for at in range(0, table.num_rows, MERGE_ROWS):
            yield table.slice(at, MERGE_ROWS).combine_chunks()


def _group_starts(rows: Any) -> Any:
    """Where another group or measure begins."""
    fresh = np.ones(rows.num_rows, dtype=bool)
    fresh[1:] = _dimensions_differ(rows.column(DIMENSIONS).combine_chunks())
    for name in (ROLLUP, INTERVAL_MS, WINDOW_START, MEASURE):
        column = rows.column(name).combine_chunks()
        fresh[1:] |= to_numpy(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)))
    return np.flatnonzero(fresh)


def _dimensions_differ(lists: Any) -> Any:
    """For each list but the first, whether it is another one than that before it."""
    sizes = np.diff(to_numpy(lists.offsets))
    texts = lists.flatten().dictionary_encode().indices.fill_null(-1)
    codes = np.full((len(lists), int(sizes.max(initial=0))), -2, dtype=np.int64)
    codes[np.arange(codes.shape[1]) < sizes[:, np.newaxis]] = to_numpy(texts)
    return (codes[1:] != codes[:-1]).any(axis=1)


def _merge_groups(rows: Any, starts: Any) -> Iterator[Any]:
    """Most groups are in one run only, and stay as they are."""
    if not rows.num_rows:
        return
    sizes = np.diff(starts, append=rows.num_rows)
    groups = np.arange(len(starts))
    once = sizes == 1
    if not once.all():
        again = rows.take(pa.array(np.flatnonzero(np.repeat(~once, sizes))))
        added = [
            (group, (*key, *state))
            for group, (key, found) in zip(
                groups[~once].tolist(), groupby(again.to_pylist(), key=_group_key), strict=True
            )
            for state in _sum_states(found)
        ]
        rows = pa.concat_tables([rows.take(pa.array(starts[once])), _build_table([row for _, row in added])])
        places = np.concatenate([groups[once], [group for group, _ in added]])
        rows = rows.combine_chunks().take(pa.array(np.argsort(places, kind="stable")))
    yield rows.combine_chunks()


def _group_key(row: AggregateRow) -> tuple[Any, ...]:
    return row[ROLLUP], row[INTERVAL_MS], row[WINDOW_START], row[DIMENSIONS], row[MEASURE]


def _sum_states(rows: Iterator[AggregateRow]) -> list[tuple[object, ...]]:
    """One state, or several where a count would not fit in 64 bits."""
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
    """Rows of one group come in any order; they are added up in one that only depends on what they say."""
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
