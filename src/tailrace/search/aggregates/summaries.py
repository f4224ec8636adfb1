"""Summaries of many groups, one row for each, as `measures.Summary` has them one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.search.aggregates.exact_sums import (
    Addends,
    Sums,
    addends_of,
    joined_sums,
    merged_sums,
    sums_of,
    sums_of_addends,
)
from tailrace.search.aggregates.measures import Summary
from tailrace.search.aggregates.spread import (
    Spread,
    bucket_codes,
    collapsed,
    exponents_of,
    joined_spreads,
    merged_spreads,
    sketch_from,
    tallied,
)
from tailrace.search.numpy_arrays import np
from tailrace.search.values import INT64_MAX


class Numbers(NamedTuple):
    """Numbers of one field, all doubles or all 64-bit integers, with the buckets they go into."""

    values: Any
    codes: Any
    exponents: Any  # None if there is no histogram
    addends: Addends | None  # None if they are added up as they are

    def take(self, places: Any) -> Numbers:
        exponents = None if self.exponents is None else self.exponents[places]
        addends = None if self.addends is None else self.addends.take(places)
        return Numbers(self.values[places], self.codes[places], exponents, addends)


def numbers_from(values: Any, *, histogram: bool) -> Numbers:
    exponents = exponents_of(values) if histogram else None
    return Numbers(values, bucket_codes(values), exponents, addends_of(values))


class Summaries(NamedTuple):
    """In rows without numbers, smallest and largest mean nothing."""

    counts: Any
    sums: Sums
    smallest: Any
    largest: Any
    histogram: Spread | None
    sketch: Spread

    @property
    def nbytes(self) -> int:
        spreads = [self.sketch] if self.histogram is None else [self.sketch, self.histogram]
        return 5 * self.counts.nbytes + sum(spread.nbytes for spread in spreads)

    @property
    def whole(self) -> bool:
        """Whether all numbers are integers."""
        return self.smallest.dtype == np.int64

    def take(self, rows: Any) -> Summaries:
        histogram = None if self.histogram is None else self.histogram.take(rows)
        edges = self.smallest[rows], self.largest[rows]
        return Summaries(self.counts[rows], self.sums.take(rows), *edges, histogram, self.sketch.take(rows))

    def keep(self, marks: Any) -> Summaries:
        """The marked rows."""
        histogram = None if self.histogram is None else self.histogram.keep(marks)
        sums = self.sums.take(np.flatnonzero(marks))
        edges = self.smallest[marks], self.largest[marks]
        return Summaries(self.counts[marks], sums, *edges, histogram, self.sketch.keep(marks))

    def merged(self, group_of: Any, groups: int) -> Summaries:
        """The rows of each group as one."""
        counts = np.zeros(groups, np.int64)
        np.add.at(counts, group_of, self.counts)
        some = self.counts > 0
        edges = edges_of(self.smallest[some], self.largest[some], group_of[some], groups)
        histogram = None
        if self.histogram is not None:
            histogram = merged_spreads(self.histogram, group_of, groups)
        sketch = collapsed(merged_spreads(self.sketch, group_of, groups))
        return Summaries(counts, merged_sums(self.sums, group_of, groups), *edges, histogram, sketch)

    def summary(self, row: int) -> Summary:
        """One of them as it is alone."""
        found = Summary(histogram=self.histogram is not None, whole=self.whole)
        found.count = int(self.counts[row])
        if found.count:
            found.total = self.sums.total(row)
            found.smallest, found.largest = self.smallest[row].item(), self.largest[row].item()
        if self.histogram is not None and found.histogram is not None:
            found.histogram.counts = self.histogram.row(row)
        found.sketch = sketch_from(self.sketch.row(row))
        return found


def summaries_of(numbers: Numbers, group_of: Any, groups: int) -> Summaries:
    """The summary of each group, by the group of each number."""
    histogram = None if numbers.exponents is None else tallied(numbers.exponents, group_of, groups)
    if numbers.addends is None:
        sums = sums_of(numbers.values, group_of, groups)
    else:
        sums = sums_of_addends(numbers.addends, group_of, groups)
    return Summaries(
        np.bincount(group_of, minlength=groups),
        sums,
        *edges_of(numbers.values, numbers.values, group_of, groups),
        histogram,
        collapsed(tallied(numbers.codes, group_of, groups)),
    )


def joined_summaries(parts: Sequence[Summaries]) -> Summaries:
    """One behind the other."""
    counts, smallest, largest = (np.concatenate([part[place] for part in parts]) for place in (0, 2, 3))
    histograms = [part.histogram for part in parts if part.histogram is not None]
    return Summaries(
        counts,
        joined_sums([part.sums for part in parts]),
        smallest,
        largest,
        joined_spreads(histograms) if len(histograms) == len(parts) else None,
        joined_spreads([part.sketch for part in parts]),
    )


def edges_of(smallest: Any, largest: Any, group_of: Any, groups: int) -> tuple[Any, Any]:
    """The smallest and the largest of each group."""
    whole = smallest.dtype == np.int64
    least = np.full(groups, INT64_MAX if whole else np.inf, smallest.dtype)
    most = np.full(groups, -INT64_MAX - 1 if whole else -np.inf, smallest.dtype)
    np.minimum.at(least, group_of, smallest)
    np.maximum.at(most, group_of, largest)
    return least, most
