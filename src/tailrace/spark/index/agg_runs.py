"""Sorted runs of `agg` read side by side, a few rows of each at a time.

Rows of one group and measure follow each other, in no order of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tailrace.search.index_files.format import DIMENSIONS, INTERVAL_MS, MEASURE, ROLLUP, WINDOW_START
from tailrace.spark.index.arrays import argsort_bytes, np, to_numpy
from tailrace.spark.index.batch_runs import SortedRunReader
from tailrace.storage.segments.parquet import pa

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
