"""What a rollup measures: partial states that are merged in any order, and shown only at the end.

Sums are kept exactly, as whole numbers of the smallest double: whatever the order of the rows and wherever a
stretch of time is cut, the sum is the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from math import frexp
from typing import Final, NamedTuple, cast

from tailrace.schema.pointer import ABSENT, parse_pointer, resolve_pointer
from tailrace.schema.search_rollups import Measure
from tailrace.search.aggregates.sketch import Sketch, count_keys, nearest_rank, parse_sketch
from tailrace.search.index_files.format import decode_sum
from tailrace.search.values import to_float, to_integer

Number = int | float
Json = dict[str, object]

PERCENTILES: Final = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
SHARES: Final = tuple(share for _, share in PERCENTILES)
STATE_BYTES: Final = 1000  # about what a summary takes in memory, and a bucket of it
BUCKET_BYTES: Final = 130

EXACT_SUM_SCALE: Final = 1074  # 2 ** -1074 is the smallest double
EXACT_INTEGER_MAX: Final = 2**53  # beyond it, sums are shown as the nearest double


class Histogram:
    """`log2_v1`: counts by the exponent of the largest power of two at or below max(1, |v|)."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, exponent: int, count: int) -> None:
        self.counts[exponent] = self.counts.get(exponent, 0) + count

    def add_all(self, numbers: Sequence[Number]) -> None:
        counts = self.counts
        # All are of one field, and so of one type. The sign is no bit of an integer.
        if type(numbers[0]) is int:
            bits = [number.bit_length() for number in cast("Sequence[int]", numbers)]
        else:
            bits = [frexp(number)[1] for number in numbers]
        for size, count in count_keys(bits):
            exponent = size - 1 if size > 0 else 0
            counts[exponent] = counts.get(exponent, 0) + count

    def merge(self, other: Histogram) -> None:
        for exponent, count in other.counts.items():
            self.add(exponent, count)

    def shown(self) -> Json:
        return {str(1 << exponent): self.counts[exponent] for exponent in sorted(self.counts)}

    def at_rank(self, rank: int, filled: int) -> float:
        """The place of a rank inside its bucket, as if the bucket were evenly filled.

        `filled` is 1 if a rank stands at the end of its share of the bucket, and 0 at the beginning.
        """
        left = rank
        for exponent in sorted(self.counts):
            count = self.counts[exponent]
            if left <= count:
                low = 2.0**exponent if exponent else 0.0
                width = 2.0 ** min(exponent + 1, 1023) - low
                return low + width * ((left - 1 + filled) / count)
            left -= count
        raise AssertionError("a rank lies within the count")


def exponent_of(number: Number) -> int:
    # The sign is no bit of an integer.
    bits = number.bit_length() if isinstance(number, int) else frexp(number)[1]
    return bits - 1 if bits > 0 else 0


class Summary:
    """Count, sum, smallest, largest, and how the numbers are spread."""

    __slots__ = ("count", "histogram", "largest", "sketch", "smallest", "total", "unplaced", "whole")

    def __init__(self, *, histogram: bool, whole: bool) -> None:
        self.count = 0
        self.total = 0  # in units of 2 ** -1074
        self.smallest: Number | None = None
        self.largest: Number | None = None
        self.histogram = Histogram() if histogram else None
        self.unplaced = 0  # numbers in the histogram of which only the mean is known
        self.sketch = Sketch()
        self.whole = whole  # all numbers are integers

    @property
    def memory_bytes(self) -> int:
        buckets = self.sketch.buckets + (len(self.histogram.counts) if self.histogram else 0)
        return STATE_BYTES + buckets * BUCKET_BYTES

    def add_all(self, numbers: Sequence[Number]) -> None:
        if not numbers:
            return
        self.count += len(numbers)
        self.total += exact_sum(numbers)
        self._widen(min(numbers), max(numbers))
        self.sketch.add_all(numbers)
        if self.histogram is not None:
            self.histogram.add_all(numbers)

    def add_parts(self, parts: SummaryParts) -> None:
        """A summary that somebody else has made."""
        self.count += parts.size
        self.total += to_exact(parts.total)
        self._widen(parts.smallest, parts.largest)
        if parts.sketch is not None:
            self.sketch.merge(parts.sketch)
        if self.histogram is None:
            return
        if parts.histogram is not None:
            self.histogram.merge(parts.histogram)
            return
        # Nothing is known but the mean. All numbers are there if there is one, or all are equal.
        self.histogram.add(exponent_of(parts.total / parts.size), parts.size)
        if parts.size > 1 and (parts.smallest is None or parts.smallest != parts.largest):
            self.unplaced += parts.size

    def merge(self, other: Summary) -> None:
        self.count += other.count
        self.total += other.total
        self._widen(other.smallest, other.largest)
        self.unplaced += other.unplaced
        self.sketch.merge(other.sketch)
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)

    def _widen(self, smallest: Number | None, largest: Number | None) -> None:
        if smallest is not None and (self.smallest is None or smallest < self.smallest):
            self.smallest = smallest
        if largest is not None and (self.largest is None or largest > self.largest):
            self.largest = largest

    @property
    def percentile_method(self) -> str | None:
        """What tells of every number that was counted."""
        if not self.count:
            return None
        if self.sketch.count == self.count:
            return "sketch"
        if self.histogram is not None and not self.unplaced:
            return "histogram"
        return None

    def _percentiles(self, method: str | None) -> list[Number | None]:
        if method is None:
            return [None] * len(PERCENTILES)
        if type(self.smallest) is float and self.smallest == self.largest:
            return [self.smallest] * len(PERCENTILES)  # wherever they lie, they are clamped to it
        if method == "sketch":
            found: Sequence[float] = self.sketch.quantiles(SHARES, self.count)
        else:
            found = [self._place_in_histogram(share) for _, share in PERCENTILES]
        return [self._clamped(value) for value in found]

    def _place_in_histogram(self, share: float) -> float:
        assert self.histogram is not None
        rank = nearest_rank(share, self.count)
        if self.largest is not None and self.largest <= 0:
            # The histogram has magnitudes: the largest number is the first of them.
            return -self.histogram.at_rank(self.count - rank + 1, 0)
        return self.histogram.at_rank(rank, 1)

    def _clamped(self, value: float) -> Number:
        if self.smallest is not None and value < self.smallest:
            return self.smallest
        return self.largest if self.largest is not None and value > self.largest else value

    def shown(self, *, method: bool) -> Json:
        """With `method`, which way the percentiles were had."""
        chosen = self.percentile_method
        body: Json = {
            "count": self.count,
            "sum": round_sum(self.total, self.whole),
            "min": self.smallest,
            "max": self.largest,
            "avg": nearest_ratio(self.total, self.count << EXACT_SUM_SCALE) if self.count else None,
        }
        for (name, _), value in zip(PERCENTILES, self._percentiles(chosen), strict=True):
            body[name] = value
        if self.histogram is not None:
            body["histogram"] = self.histogram.shown()
        if method:
            body["percentile_method"] = chosen
        return body


class SummaryParts(NamedTuple):
    """One record's own summary."""

    size: int  # how many numbers it tells of
    total: Number
    smallest: Number | None
    largest: Number | None
    histogram: Histogram | None  # None if it does not say where all of them are
    sketch: Sketch | None  # likewise


def summary_pointers(measure: Measure) -> tuple[str | None, ...]:
    """Where a record has count, sum, smallest, largest, histogram and sketch."""
    return (
        measure.count_json_pointer,
        measure.sum_json_pointer,
        measure.min_json_pointer,
        measure.max_json_pointer,
        measure.histogram_json_pointer,
        measure.sketch_json_pointer,
    )


class SummaryPartsReader:
    """Finds the summary in a record, by the pointers of a measure."""

    def __init__(self, measure: Measure) -> None:
        pointers = summary_pointers(measure)
        self._tokens = [None if pointer is None else parse_pointer(pointer) for pointer in pointers]

    def read(self, record: object) -> SummaryParts | None:
        """None if the record contributes nothing."""
        found = [ABSENT if tokens is None else resolve_pointer(record, tokens) for tokens in self._tokens]
        count, total = to_integer(found[0]), _number(found[1])
        if count is None or count <= 0 or total is None:
            return None
        sketch = parse_sketch(found[5])
        if sketch is not None and sketch.count != count:
            sketch = None
        return SummaryParts(
            count, total, _number(found[2]), _number(found[3]), parse_histogram(found[4], count), sketch
        )


def parse_histogram(value: object, count: int) -> Histogram | None:
    """A histogram from a record: lower bounds and counts. None if it does not tell of `count` numbers."""
    if not isinstance(value, dict):
        return None
    histogram = Histogram()
    left = count
    for label, item in cast("dict[str, object]", value).items():
        bound, found = to_float(label), to_integer(item)
        if bound is None or found is None or found < 0:
            return None
        left -= found
        if found:
            histogram.add(exponent_of(bound), found)
    return None if left else histogram


def _number(value: object) -> Number | None:
    """An integer as it is, so that nothing is lost, or a double."""
    if type(value) is int:
        return to_integer(value)
    return to_float(value)


def to_exact(number: Number) -> int:
    """In units of 2 ** -1074."""
    if isinstance(number, int):
        return number << EXACT_SUM_SCALE
    above, below = number.as_integer_ratio()
    return above << (EXACT_SUM_SCALE + 1 - below.bit_length())


def decode_total(nearest: float, rest: float, stored: bytes | None) -> int:
    """A sum that was stored: two doubles that make it up, or bytes where they do not."""
    return to_exact(nearest) + to_exact(rest) if stored is None else decode_sum(stored)


def exact_sum(numbers: Sequence[Number]) -> int:
    if type(numbers[0]) is int:
        return sum(cast("Sequence[int]", numbers)) << EXACT_SUM_SCALE
    rest, total = list(numbers), 0
    try:
        # Rounded, and then what the rounding lost, until nothing is left: two or three rounds.
        while nearest := math.fsum(rest):
            total += to_exact(nearest)
            rest.append(-nearest)
    except OverflowError:
        return sum(map(to_exact, numbers))
    return total


def nearest_ratio(above: int, below: int) -> float:
    """The nearest double; what is larger than all of them is shown as the largest."""
    try:
        return above / below
    except OverflowError:
        return sys.float_info.max if above > 0 else -sys.float_info.max


def round_sum(total: int, whole: bool) -> Number:
    value = total >> EXACT_SUM_SCALE
    return value if whole and abs(value) <= EXACT_INTEGER_MAX else nearest_ratio(total, 1 << EXACT_SUM_SCALE)
