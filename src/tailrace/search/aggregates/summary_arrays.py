"""Summaries of many groups as arrays: counts, sums, extremes, histogram and sketch buckets.

One row for each group, with the same results as `measures.Summary`. Everything is summed exactly, so the
order in which groups are merged does not matter. A bucket of a sketch has one code for sign and key, so that
codes ascend as the numbers do: 2 ** 18 plus the key for positive numbers, 0 for zeros, the negative of that
for negative ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tailrace.search.aggregates.exact_sums import (
    AddendArray,
    SumArray,
    concat_sums,
    merge_addends,
    merge_sums,
    split_addends,
    sum_addends,
    sum_by_group,
    sums_from_addends,
)
from tailrace.search.aggregates.measures import (
    BUCKETS_MAX,
    PER_LOG,
    Sketch,
    Summary,
    bucket_key,
    bucket_value,
)
from tailrace.search.numpy_arrays import np
from tailrace.search.records import INT64_MAX

CODE_OF_KEY_0: Final = 1 << 18
CODE_MAX: Final = CODE_OF_KEY_0 + (1 << 17)

_CODE_BITS: Final = 20
_DOUBT: Final = 1e-8  # by so much two libraries' logarithms never differ here
_DENSE: Final = 8  # so many counters for each number are quicker than sorting
_WHOLE_IN_DOUBLE: Final = 1 << 53


class BucketArray(NamedTuple):
    """Counts by code, one row behind the other: those of row n lie from `starts[n]` to `starts[n + 1]`."""

    starts: Any
    codes: Any
    counts: Any

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.codes.nbytes + self.counts.nbytes

    @property
    def rows(self) -> Any:
        """The row of each bucket."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def row(self, row: int) -> dict[int, int]:
        part = slice(self.starts[row], self.starts[row + 1])
        return dict(zip(self.codes[part].tolist(), self.counts[part].tolist(), strict=True))

    def filter(self, marks: Any) -> BucketArray:
        """The marked rows. Where these are most of all, this is quicker than to take them."""
        sizes = np.diff(self.starts)
        places = np.repeat(marks, sizes)
        return BucketArray(_starts_of(sizes[marks]), self.codes[places], self.counts[places])

    def take(self, rows: Any) -> BucketArray:
        sizes = np.diff(self.starts)[rows]
        starts = _starts_of(sizes)
        places = np.repeat(self.starts[:-1][rows] - starts[:-1], sizes) + np.arange(starts[-1])
        return BucketArray(starts, self.codes[places], self.counts[places])


def concat_buckets(parts: Sequence[BucketArray]) -> BucketArray:
    sizes = np.concatenate([np.diff(part.starts) for part in parts])
    codes, counts = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
    return BucketArray(_starts_of(sizes), codes, counts)


def count_codes(codes: Any, group_of: Any, groups: int, times: Any = None) -> BucketArray:
    """How often each code occurs in each group; a code may stand for so many `times`."""
    if not len(codes):
        return BucketArray(np.zeros(groups + 1, np.int64), codes, np.zeros(0, np.int64))
    low = int(codes.min())
    width = int(codes.max()) - low + 1
    keys = group_of * width + (codes - low)
    if groups * width <= _DENSE * len(codes):
        counted = np.bincount(keys, times, minlength=groups * width)
        found = np.flatnonzero(counted)
        return _cut(found, width, low, counted[found].astype(np.int64), groups)
    if times is None:
        keys.sort()
    else:
        order = np.argsort(keys)
        keys, times = keys[order], times[order]
    firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    counts = (
        np.diff(np.concatenate([firsts, [len(keys)]])) if times is None else np.add.reduceat(times, firsts)
    )
    return _cut(keys[firsts], width, low, counts, groups)


def _cut(keys: Any, width: int, low: int, counts: Any, groups: int) -> BucketArray:
    starts = np.searchsorted(keys, np.arange(groups + 1) * width)
    return BucketArray(starts, keys % width + low, counts)


def merge_buckets(spread: BucketArray, group_of: Any, groups: int) -> BucketArray:
    """The rows of each group as one."""
    keys = (group_of[spread.rows] << _CODE_BITS) + (spread.codes + CODE_MAX)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    if not len(keys):
        return BucketArray(np.zeros(groups + 1, np.int64), spread.codes, spread.counts)
    firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    counts = np.add.reduceat(spread.counts[order], firsts)
    found = keys[firsts]
    starts = np.searchsorted(found, np.arange(groups + 1) << _CODE_BITS)
    return BucketArray(starts, (found & ((1 << _CODE_BITS) - 1)) - CODE_MAX, counts)


def _starts_of(sizes: Any) -> Any:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


# -- sketches --------------------------------------------------------------------------------------------


def bucket_codes(numbers: Any) -> Any:
    """The bucket of each number, the very one that a sketch would put it in."""
    sizes = np.abs(numbers.astype(np.float64))
    is_zero = sizes == 0
    with np.errstate(divide="ignore"):
        places = np.log(sizes) * PER_LOG
    places[is_zero] = 0.5
    keys = np.ceil(places).astype(np.int64)
    doubtful = np.flatnonzero(np.abs(places - np.rint(places)) < _DOUBT)
    if len(doubtful):
        different, which = np.unique(numbers[doubtful], return_inverse=True)
        keys[doubtful] = np.array([bucket_key(abs(number)) for number in different.tolist()])[which]
    codes = np.where(numbers < 0, -(keys + CODE_OF_KEY_0), keys + CODE_OF_KEY_0)
    codes[is_zero] = 0
    return codes


def collapse_buckets(spread: BucketArray) -> BucketArray:
    """The same with no more buckets than sketches have."""
    sizes = np.diff(spread.starts)
    if not (sizes > BUCKETS_MAX).any():
        return spread
    rows = [spread.take(np.array([row])) for row in range(len(sizes))]
    for row in np.flatnonzero(sizes > BUCKETS_MAX).tolist():
        rows[row] = single_row_buckets(encode_sketch(sketch_from_buckets(spread.row(row))))
    return concat_buckets(rows)


def encode_sketch(sketch: Sketch) -> dict[int, int]:
    """The buckets of a sketch, by code, ascending."""
    found = {-(key + CODE_OF_KEY_0): count for key, count in sketch.negative.items()}
    if sketch.zeros:
        found[0] = sketch.zeros
    found |= {key + CODE_OF_KEY_0: count for key, count in sketch.positive.items()}
    return dict(sorted(found.items()))


def sketch_from_buckets(buckets: dict[int, int]) -> Sketch:
    sketch, other = Sketch(), Sketch()
    sketch.zeros = buckets.get(0, 0)
    sketch.positive = {code - CODE_OF_KEY_0: count for code, count in buckets.items() if code > 0}
    sketch.negative = {-code - CODE_OF_KEY_0: count for code, count in buckets.items() if code < 0}
    sketch.merge(other)  # has too many buckets collapse
    return sketch


def single_row_buckets(buckets: dict[int, int]) -> BucketArray:
    """One row."""
    codes = np.array(list(buckets), np.int64)
    return BucketArray(np.array([0, len(codes)]), codes, np.array(list(buckets.values()), np.int64))


def values_at_ranks(spread: BucketArray, ranks: Any) -> Any:
    """The number at a rank of each row, from 1; rows without numbers have any."""
    if not len(spread.codes):
        return np.zeros(len(ranks))
    passed = np.cumsum(spread.counts)
    before = np.concatenate([[0], passed])[spread.starts[:-1]]
    places = np.minimum(np.searchsorted(passed, before + ranks), len(passed) - 1)
    codes, which = np.unique(spread.codes[places], return_inverse=True)
    return np.array([_value(code) for code in codes.tolist()])[which]


@lru_cache(65_536)
def _value(code: int) -> float:
    if not code:
        return 0.0
    return math.copysign(bucket_value(abs(code) - CODE_OF_KEY_0), code)


# -- histograms ------------------------------------------------------------------------------------------


def exponents_by_number(numbers: Any) -> Any:
    """The exponent of the largest power of two at or below max(1, |v|)."""
    if numbers.dtype == np.int64:
        sizes = np.abs(numbers).view(np.uint64)
        bits = np.frexp(sizes.astype(np.float64))[1]
        large = sizes >= _WHOLE_IN_DOUBLE
        if large.any():
            bits[large] = np.frexp((sizes[large] >> np.uint64(11)).astype(np.float64))[1] + 11
    else:
        bits = np.frexp(numbers)[1]
    return np.maximum(bits.astype(np.int64) - 1, 0)


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

    def filter(self, marks: Any) -> SummaryArray:
        """The marked rows."""
        histogram = None if self.histogram is None else self.histogram.filter(marks)
        sums = self.sums.take(np.flatnonzero(marks))
        edges = self.smallest[marks], self.largest[marks]
        return SummaryArray(self.counts[marks], sums, *edges, histogram, self.sketch.filter(marks))

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
