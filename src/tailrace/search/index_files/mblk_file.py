"""`mblk`: the summaries that records of metrics bring along, by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.search.aggregates.measures import Histogram, Number, SummaryParts
from tailrace.search.aggregates.sketch import decode_sketch
from tailrace.search.index_files import format as names
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.index_files.published import UnusableFileError
from tailrace.storage.segments.parquet import INT64, pa, pc

_COLUMNS = (
    names.COUNT,
    *(names.SUM, names.SUM_WHOLE, names.MIN, names.MIN_WHOLE, names.MAX, names.MAX_WHOLE),
    *(names.HISTOGRAM, names.SKETCH),
)


class MetricBlockFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes

    def blocks(self) -> MetricBlocks:
        """All of the file; it is not kept."""
        return MetricBlocks(self._file.read((names.ENTRY, *_COLUMNS)))


class MetricBlocks:
    """Rows of a file, sorted by metric: an entry has to be looked for."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._entries = column_array(table, names.ENTRY)

    def parts(self, entries: Sequence[int]) -> list[SummaryParts | None]:
        """What each of some entries tells of; None for nothing."""
        places = pc.index_in(pa.array(entries, INT64), value_set=self._entries)
        if places.null_count:
            raise UnusableFileError("it lacks entries")
        some = self._table.take(places)
        columns = [some.column(name).to_pylist() for name in _COLUMNS]
        return [_parts(*row) for row in zip(*columns, strict=True)]


def _parts(
    count: int | None,
    total: float | None,
    whole_total: int | None,
    least: float | None,
    whole_least: int | None,
    most: float | None,
    whole_most: int | None,
    buckets: list[tuple[int, int]] | None,
    sketch: bytes | None,
) -> SummaryParts | None:
    if count is None:
        return None
    found_sum = _number(total, whole_total)
    found_sketch = None if sketch is None else decode_sketch(sketch)
    if found_sum is None or (sketch is not None and found_sketch is None):
        raise UnusableFileError("it has a summary that is none")
    histogram = None
    if buckets is not None:
        histogram = Histogram()
        histogram.counts = dict(buckets)
    smallest, largest = _number(least, whole_least), _number(most, whole_most)
    return SummaryParts(count, found_sum, smallest, largest, histogram, found_sketch)


def _number(double: float | None, whole: int | None) -> Number | None:
    return double if whole is None else whole
