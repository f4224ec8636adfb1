"""States of measures as the columns of `agg`, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import cast

from tailrace.query.family_format import (
    COUNT,
    HISTOGRAM,
    MAX,
    MAX_WHOLE,
    MIN,
    MIN_WHOLE,
    SKETCH,
    SUM_EXACT,
    UNPLACED,
    stored_sum,
    sum_of,
)
from tailrace.query.measures import Histogram, Number, Summary
from tailrace.query.sketch import sketch_of

Row = tuple[object, ...]

_SCALE = 1074


def count_row(count: int) -> Row:
    return (count, *[None] * 9)


def summary_row(summary: Summary) -> Row:
    """Count, sum, exact sum, the edges, the histogram and the sketch, in the order of the file."""
    histogram = None
    if summary.histogram is not None:
        histogram = sorted(summary.histogram.counts.items())
    return (
        summary.count,
        rounded(summary.total),
        stored_sum(summary.total),
        as_double(summary.smallest),
        as_double(summary.largest),
        as_whole(summary.smallest),
        as_whole(summary.largest),
        histogram,
        summary.unplaced,
        summary.sketch.to_bytes(),
    )


def summary_of(row: Mapping[str, object]) -> Summary:
    """The state that a row was made of. `whole` is for the caller: it only matters for what is shown."""
    histogram = row[HISTOGRAM]
    summary = Summary(histogram=histogram is not None, whole=False)
    summary.count = cast("int", row[COUNT])
    summary.total = sum_of(cast("bytes", row[SUM_EXACT]))
    summary.smallest = _number(row[MIN], row[MIN_WHOLE])
    summary.largest = _number(row[MAX], row[MAX_WHOLE])
    summary.unplaced = cast("int", row[UNPLACED])
    if histogram is not None:
        summary.histogram = Histogram()
        summary.histogram.counts = dict(cast("list[tuple[int, int]]", histogram))
    sketch = sketch_of(cast("bytes", row[SKETCH]))
    assert sketch is not None, "a sketch that we have written"
    summary.sketch = sketch
    return summary


def as_double(number: Number | None) -> float | None:
    return None if number is None else float(number)


def as_whole(number: Number | None) -> int | None:
    return number if isinstance(number, int) else None


def rounded(total: int) -> float:
    try:
        return total / (1 << _SCALE)
    except OverflowError:
        return sys.float_info.max if total > 0 else -sys.float_info.max


def _number(double: object, whole: object) -> Number | None:
    return cast("Number | None", double if whole is None else whole)
