"""Partial states of rollups added up: one state for each measure of each group."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from tailrace.pipeline.kernels.agg import GROUP_ROWS, SCHEMA
from tailrace.pipeline.kernels.arrays import pa
from tailrace.pipeline.kernels.states import count_row, summary_of, summary_row
from tailrace.query.family_format import (
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
from tailrace.query.measures import Summary
from tailrace.query.values import INT64_MAX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS: Final = (ROLLUP, INTERVAL_MS, WINDOW_START, DIMENSIONS, MEASURE)
DDL: Final = (
    "rollup string, interval_ms bigint, window_start bigint, dimensions array<string>, measure string, "
    "count bigint, sum double, sum_rest double, sum_exact binary, min double, max double, "
    "min_whole bigint, max_whole bigint, histogram map<int,bigint>, unplaced bigint, sketch map<int,bigint>"
)

Row = dict[str, Any]


def merge_agg(states: DataFrame) -> DataFrame:
    """Rows of one group meet in one partition and follow each other; then they are added up as they come."""
    frame: Any = states
    return frame.repartition(*KEYS).sortWithinPartitions(*KEYS).mapInArrow(merge_states, DDL)


def merge_states(batches: Iterator[Any]) -> Iterator[Any]:
    """Sorted rows in, one row for each group and measure out."""
    rows = (row for batch in batches for row in batch.to_pylist())
    held: list[tuple[object, ...]] = []
    for key, found in groupby(rows, key=_key):
        held += [(*key, *state) for state in _added_up(found)]
        if len(held) >= GROUP_ROWS:
            yield _batch(held)
            held = []
    if held:
        yield _batch(held)


def _key(row: Row) -> tuple[Any, ...]:
    return row[ROLLUP], row[INTERVAL_MS], row[WINDOW_START], row[DIMENSIONS], row[MEASURE]


def _added_up(rows: Iterator[Row]) -> list[tuple[object, ...]]:
    """One state, or several where a count would not fit in 64 bits."""
    counted = 0
    sums: list[Summary] = []
    for row in sorted(rows, key=_content):
        if row[SKETCH] is None:
            counted += row[COUNT]
            continue
        summary = summary_of(row)
        if not sums or sums[-1].count + summary.count > INT64_MAX:
            sums.append(summary)
        else:
            sums[-1].merge(summary)
    return [summary_row(summary) for summary in sums] or [count_row(counted)]


def _content(row: Row) -> tuple[Any, ...]:
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


def _batch(rows: list[tuple[object, ...]]) -> Any:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    # Without our own marks of what is never null: Spark compares the types of what comes back.
    return pa.RecordBatch.from_arrays(arrays, names=SCHEMA.names)
