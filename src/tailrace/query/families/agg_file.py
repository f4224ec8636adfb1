"""`agg`: partial states of rollups, by window and group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from tailrace.query import family_format as names
from tailrace.query.families.parquet_file import ParquetFile
from tailrace.query.families.shelf import UnusableFileError
from tailrace.query.measures import Histogram, Number, Summary
from tailrace.query.sketch import sketch_of
from tailrace.store.arrow import pa, pc

_COLUMNS = (
    names.ROLLUP,
    names.INTERVAL_MS,
    names.WINDOW_START,
    names.DIMENSIONS,
    names.MEASURE,
    names.COUNT,
    names.SUM_EXACT,
    names.MIN,
    names.MAX,
    names.MIN_WHOLE,
    names.MAX_WHOLE,
    names.HISTOGRAM,
    names.UNPLACED,
    names.SKETCH,
)


class State(NamedTuple):
    """One measure of one group."""

    start_ms: int
    dimensions: tuple[str | None, ...]
    measure: str
    size: int  # how many records or numbers it tells of
    row: dict[str, Any]

    def summary(self) -> Summary:
        """For measures that are no counts."""
        row = self.row
        histogram = cast("list[tuple[int, int]] | None", row[names.HISTOGRAM])
        sketch = sketch_of(row[names.SKETCH] or b"")
        if sketch is None:
            raise UnusableFileError("it has a sketch that is none")
        summary = Summary(histogram=histogram is not None, whole=False)
        summary.count = self.size
        summary.total = names.sum_of(row[names.SUM_EXACT] or b"")
        summary.smallest = _number(row[names.MIN], row[names.MIN_WHOLE])
        summary.largest = _number(row[names.MAX], row[names.MAX_WHOLE])
        summary.unplaced = row[names.UNPLACED] or 0
        summary.sketch = sketch
        if histogram is not None:
            summary.histogram = Histogram()
            summary.histogram.counts = dict(histogram)
        return summary


class AggFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes

    def states(self, rollup: str, interval_ms: int, from_ms: int, to_ms: int) -> Iterator[State]:
        """All measures of the windows that begin at or behind `from_ms` and before `to_ms`, in order."""
        for table in self._tables(rollup, interval_ms, from_ms, to_ms):
            for row in table.to_pylist():
                yield State(
                    row[names.WINDOW_START],
                    tuple(row[names.DIMENSIONS]),
                    row[names.MEASURE],
                    row[names.COUNT],
                    row,
                )

    def has_window(self, rollup: str, interval_ms: int, start_ms: int) -> bool:
        """Whether any record lies in a window."""
        return any(
            table.num_rows for table in self._tables(rollup, interval_ms, start_ms, start_ms + interval_ms)
        )

    def _tables(self, rollup: str, interval_ms: int, from_ms: int, to_ms: int) -> Iterator[Any]:
        for group in range(self._file.groups):
            if not self._may_have(group, rollup, interval_ms, from_ms, to_ms):
                continue
            table = self._file.group(group, _COLUMNS)
            starts = table.column(names.WINDOW_START)
            marks = [
                pc.equal(table.column(names.ROLLUP), rollup),
                pc.equal(table.column(names.INTERVAL_MS), pa.scalar(interval_ms)),
                pc.greater_equal(starts, pa.scalar(from_ms)),
                pc.less(starts, pa.scalar(to_ms)),
            ]
            chosen = marks[0]
            for mark in marks[1:]:
                chosen = pc.and_(chosen, mark)
            yield table.filter(chosen)

    def _may_have(self, group: int, rollup: str, interval_ms: int, from_ms: int, to_ms: int) -> bool:
        rollups = self._file.statistics(group, names.ROLLUP)
        intervals = self._file.statistics(group, names.INTERVAL_MS)
        starts = self._file.statistics(group, names.WINDOW_START)
        if rollups is not None and not rollups[0] <= rollup <= rollups[1]:
            return False
        if intervals is not None and not intervals[0] <= interval_ms <= intervals[1]:
            return False
        return starts is None or (starts[0] < to_ms and starts[1] >= from_ms)


def _number(double: float | None, whole: int | None) -> Number | None:
    return double if whole is None else whole
