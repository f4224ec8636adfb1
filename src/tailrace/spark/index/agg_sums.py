"""Partial states of rollups added up: one state for each measure of each group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from tailrace.spark.index.agg import AGGREGATE_SCHEMA
from tailrace.spark.index.aggregate_states import count_row, summary_from_row, summary_row
from tailrace.spark.index.arrays import np, to_numpy
from tailrace.storage.segments.parquet import pa, pc

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
