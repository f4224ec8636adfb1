"""Summaries on their way: of many small groups, from which those of larger ones are made without an error.

Everything in them is added up as it is, so whichever way groups are put together, the summaries are those
that the numbers themselves would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.search.aggregates.exact_sums import AddendArray, merge_addends, sums_from_addends
from tailrace.search.aggregates.spread import BucketArray, collapse_buckets, concat_buckets, count_codes
from tailrace.search.aggregates.summaries import NumberArray, SummaryArray, min_max_by_group
from tailrace.search.numpy_arrays import np


class PartialSummaries(NamedTuple):
    """One row for each group; what it says of edges means nothing where the count is 0."""

    counts: Any
    addends: AddendArray
    smallest: Any
    largest: Any
    histogram: BucketArray | None
    sketch: BucketArray  # with as many buckets as there are

    def by(self, group_of: Any, groups: int) -> PartialSummaries:
        """The rows of each group as one."""
        histogram = None if self.histogram is None else _buckets_by_group(self.histogram, group_of, groups)
        return PartialSummaries(
            sum_counts(self.counts, group_of, groups),
            merge_addends(self.addends, group_of, groups),
            *min_max_by_group(self.smallest, self.largest, group_of, groups),
            histogram,
            _buckets_by_group(self.sketch, group_of, groups),
        )

    def summaries(self) -> SummaryArray:
        edges = self.smallest, self.largest
        return SummaryArray(
            self.counts,
            sums_from_addends(self.addends),
            *edges,
            self.histogram,
            collapse_buckets(self.sketch),
        )


def partial_summaries_by_group(numbers: NumberArray, group_of: Any, groups: int) -> PartialSummaries | None:
    """The tallies of each group, by the group of each number; None if numbers are not added up in pieces."""
    if numbers.addends is None:
        return None
    histogram = None if numbers.exponents is None else count_codes(numbers.exponents, group_of, groups)
    return PartialSummaries(
        np.bincount(group_of, minlength=groups),
        merge_addends(numbers.addends, group_of, groups),
        *min_max_by_group(numbers.values, numbers.values, group_of, groups),
        histogram,
        count_codes(numbers.codes, group_of, groups),
    )


def concat_partial_summaries(parts: Sequence[PartialSummaries]) -> PartialSummaries:
    """One behind the other; all of numbers that were cut together."""
    counts, smallest, largest = (np.concatenate([part[place] for part in parts]) for place in (0, 2, 3))
    pieces = np.concatenate([part.addends.pieces for part in parts], axis=1)
    histograms = [part.histogram for part in parts if part.histogram is not None]
    return PartialSummaries(
        counts,
        AddendArray(pieces, parts[0].addends.low),
        smallest,
        largest,
        concat_buckets(histograms) if histograms else None,
        concat_buckets([part.sketch for part in parts]),
    )


def sum_counts(counts: Any, group_of: Any, groups: int) -> Any:
    """Counts of members, of which there are so few that doubles have room for them."""
    return np.bincount(group_of, weights=counts, minlength=groups).astype(np.int64)


def _buckets_by_group(spread: BucketArray, group_of: Any, groups: int) -> BucketArray:
    return count_codes(spread.codes, group_of[spread.rows], groups, spread.counts)
