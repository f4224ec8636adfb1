"""Summaries on their way: of many small groups, from which those of larger ones are made without an error.

Everything in them is added up as it is, so whichever way groups are put together, the summaries are those
that the numbers themselves would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.search.aggregates.exact_sums import Addends, added_addends, sums_from
from tailrace.search.aggregates.spread import Spread, collapsed, joined_spreads, tallied
from tailrace.search.aggregates.summaries import Numbers, Summaries, edges_of
from tailrace.search.numpy_arrays import np


class Tallies(NamedTuple):
    """One row for each group; what it says of edges means nothing where the count is 0."""

    counts: Any
    addends: Addends
    smallest: Any
    largest: Any
    histogram: Spread | None
    sketch: Spread  # with as many buckets as there are

    def by(self, group_of: Any, groups: int) -> Tallies:
        """The rows of each group as one."""
        histogram = None if self.histogram is None else _by(self.histogram, group_of, groups)
        return Tallies(
            added_counts(self.counts, group_of, groups),
            added_addends(self.addends, group_of, groups),
            *edges_of(self.smallest, self.largest, group_of, groups),
            histogram,
            _by(self.sketch, group_of, groups),
        )

    def summaries(self) -> Summaries:
        edges = self.smallest, self.largest
        return Summaries(self.counts, sums_from(self.addends), *edges, self.histogram, collapsed(self.sketch))


def tallies_of(numbers: Numbers, group_of: Any, groups: int) -> Tallies | None:
    """The tallies of each group, by the group of each number; None if numbers are not added up in pieces."""
    if numbers.addends is None:
        return None
    histogram = None if numbers.exponents is None else tallied(numbers.exponents, group_of, groups)
    return Tallies(
        np.bincount(group_of, minlength=groups),
        added_addends(numbers.addends, group_of, groups),
        *edges_of(numbers.values, numbers.values, group_of, groups),
        histogram,
        tallied(numbers.codes, group_of, groups),
    )


def joined_tallies(parts: Sequence[Tallies]) -> Tallies:
    """One behind the other; all of numbers that were cut together."""
    counts, smallest, largest = (np.concatenate([part[place] for part in parts]) for place in (0, 2, 3))
    pieces = np.concatenate([part.addends.pieces for part in parts], axis=1)
    histograms = [part.histogram for part in parts if part.histogram is not None]
    return Tallies(
        counts,
        Addends(pieces, parts[0].addends.low),
        smallest,
        largest,
        joined_spreads(histograms) if histograms else None,
        joined_spreads([part.sketch for part in parts]),
    )


def added_counts(counts: Any, group_of: Any, groups: int) -> Any:
    """Counts of members, of which there are so few that doubles have room for them."""
    return np.bincount(group_of, weights=counts, minlength=groups).astype(np.int64)


def _by(spread: Spread, group_of: Any, groups: int) -> Spread:
    return tallied(spread.codes, group_of[spread.rows], groups, spread.counts)
