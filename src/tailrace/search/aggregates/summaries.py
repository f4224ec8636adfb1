"""Summaries of many groups, one row for each, as `measures.Summary` has them one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.search.aggregates.exact_sums import (
    AddendArray,
    SumArray,
    concat_sums,
    merge_sums,
    split_addends,
    sum_addends,
    sum_by_group,
)
from tailrace.search.aggregates.measures import Summary
from tailrace.search.aggregates.spread import (
    BucketArray,
    bucket_codes,
    collapse_buckets,
    concat_buckets,
    count_codes,
    exponents_by_number,
    merge_buckets,
    sketch_from_buckets,
)
from tailrace.search.numpy_arrays import np
from tailrace.search.values import INT64_MAX


class NumberArray(NamedTuple):
    """Numbers of one field, all doubles or all 64-bit integers, with the buckets they go into."""

    values: Any
    codes: Any
    exponents: Any  # None if there is no histogram
    addends: AddendArray | None  # None if they are added up as they are

    def take(self, places: Any) -> NumberArray:
        exponents = None if self.exponents is None else self.exponents[places]
        addends = None if self.addends is None else self.addends.take(places)
        return NumberArray(self.values[places], self.codes[places], exponents, addends)


def build_number_array(values: Any, *, histogram: bool) -> NumberArray:
    exponents = exponents_by_number(values) if histogram else None
    return NumberArray(values, bucket_codes(values), exponents, split_addends(values))


class SummaryArray(NamedTuple):
    """In rows without numbers, smallest and largest mean nothing."""

    counts: Any
    sums: SumArray
    smallest: Any
    largest: Any
    histogram: BucketArray | None
    sketch: BucketArray

    @property
    def nbytes(self) -> int:
        spreads = [self.sketch] if self.histogram is None else [self.sketch, self.histogram]
        return 5 * self.counts.nbytes + sum(spread.nbytes for spread in spreads)

    @property
    def whole(self) -> bool:
        """Whether all numbers are integers."""
        return self.smallest.dtype == np.int64

    def take(self, rows: Any) -> SummaryArray:
        histogram = None if self.histogram is None else self.histogram.take(rows)
        edges = self.smallest[rows], self.largest[rows]
        return SummaryArray(
            self.counts[rows], self.sums.take(rows), *edges, histogram, self.sketch.take(rows)
        )

    def keep(self, marks: Any) -> SummaryArray:
        """The marked rows."""
        histogram = None if self.histogram is None else self.histogram.keep(marks)
        sums = self.sums.take(np.flatnonzero(marks))
        edges = self.smallest[marks], self.largest[marks]
        return SummaryArray(self.counts[marks], sums, *edges, histogram, self.sketch.keep(marks))

    def merged(self, group_of: Any, groups: int) -> SummaryArray:
        """The rows of each group as one."""
        counts = np.zeros(groups, np.int64)
        np.add.at(counts, group_of, self.counts)
        some = self.counts > 0
        edges = min_max_by_group(self.smallest[some], self.largest[some], group_of[some], groups)
        histogram = None
        if self.histogram is not None:
            histogram = merge_buckets(self.histogram, group_of, groups)
        sketch = collapse_buckets(merge_buckets(self.sketch, group_of, groups))
        return SummaryArray(counts, merge_sums(self.sums, group_of, groups), *edges, histogram, sketch)

    def summary(self, row: int) -> Summary:
        """One of them as it is alone."""
        found = Summary(histogram=self.histogram is not None, whole=self.whole)
        found.count = int(self.counts[row])
        if found.count:
            found.total = self.sums.total(row)
            found.smallest, found.largest = self.smallest[row].item(), self.largest[row].item()
        if self.histogram is not None and found.histogram is not None:
            found.histogram.counts = self.histogram.row(row)
        found.sketch = sketch_from_buckets(self.sketch.row(row))
        return found


def summarise_by_group(numbers: NumberArray, group_of: Any, groups: int) -> SummaryArray:
    """The summary of each group, by the group of each number."""
    histogram = None if numbers.exponents is None else count_codes(numbers.exponents, group_of, groups)
    if numbers.addends is None:
        sums = sum_by_group(numbers.values, group_of, groups)
    else:
        sums = sum_addends(numbers.addends, group_of, groups)
    return SummaryArray(
        np.bincount(group_of, minlength=groups),
        sums,
        *min_max_by_group(numbers.values, numbers.values, group_of, groups),
        histogram,
        collapse_buckets(count_codes(numbers.codes, group_of, groups)),
    )


def concat_summaries(parts: Sequence[SummaryArray]) -> SummaryArray:
    """One behind the other."""
    counts, smallest, largest = (np.concatenate([part[place] for part in parts]) for place in (0, 2, 3))
    histograms = [part.histogram for part in parts if part.histogram is not None]
    return SummaryArray(
        counts,
        concat_sums([part.sums for part in parts]),
        smallest,
        largest,
        concat_buckets(histograms) if len(histograms) == len(parts) else None,
        concat_buckets([part.sketch for part in parts]),
    )


def min_max_by_group(smallest: Any, largest: Any, group_of: Any, groups: int) -> tuple[Any, Any]:
    """The smallest and the largest of each group."""
    whole = smallest.dtype == np.int64
    least = np.full(groups, INT64_MAX if whole else np.inf, smallest.dtype)
    most = np.full(groups, -INT64_MAX - 1 if whole else -np.inf, smallest.dtype)
    np.minimum.at(least, group_of, smallest)
    np.maximum.at(most, group_of, largest)
    return least, most
