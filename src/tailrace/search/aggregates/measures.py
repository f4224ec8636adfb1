"""Measures of an aggregate: counts, exact sums, histograms and quantile sketches (DDSketch).

States are merged in any order. Sums are exact, as integer multiples of the smallest double, so the result
does not depend on the order of rows or on how time is divided.

A sketch estimates quantiles with a bounded relative error. A number belongs to the bucket with the key
`ceil(log(|v|) / log(gamma))`; positive and negative numbers have separate stores, and zeros are counted.
Every number of a bucket lies within 1 % of the bucket's middle. A store with more than 2048 buckets merges
those of the smallest magnitudes into its lowest one; which that is depends on all keys, so the order of
merges does not matter.

Bytes of a sketch, all integers as LEB128 (seven bits a byte, the lowest first, the high bit for "more"):

    1 byte     the version of the form, 1
    integer    the count of zeros
    twice      the positive store, then the negative one:
      integer  the count of buckets
      each     key, less the key before it (zigzag for the first), then the count; keys ascend

In JSON a sketch is the base64 text of these bytes.
"""

from __future__ import annotations

import math
import sys
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from math import frexp
from typing import Final, NamedTuple, cast

from tailrace.schema.json_values import ABSENT, parse_pointer, resolve_pointer
from tailrace.schema.search_config import Measure
from tailrace.search.index_files.format import decode_sum
from tailrace.search.records import to_float, to_integer

RELATIVE_ERROR: Final = 0.0099  # relative; 1 % is promised, and rounding takes its share
BUCKETS_MAX: Final = 2048  # of one store
SKETCH_FORMAT: Final = 1
COUNTED_FROM: Final = 16
SKETCH_BYTES_MAX: Final = 2 * BUCKETS_MAX * 14 + 32

_GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA: Final = math.log(_GAMMA)
PER_LOG: Final = 1 / _LOG_GAMMA
_MIDDLE: Final = math.log(2 / (_GAMMA + 1))
_KEY_MAX: Final = 1 << 17  # no double has a key beyond it
_COUNT_MAX: Final = 2**63 - 1

BucketCounts = dict[int, int]  # counts by key


class Sketch:
    """How often which magnitudes occurred. Two sketches are equal if their buckets are."""

    __slots__ = ("negative", "positive", "zeros")

    def __init__(self) -> None:
        self.positive: BucketCounts = {}
        self.negative: BucketCounts = {}
        self.zeros = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]

    def _parts(self) -> tuple[int, BucketCounts, BucketCounts]:
        return self.zeros, self.positive, self.negative

    @property
    def count(self) -> int:
        return self.zeros + sum(self.positive.values()) + sum(self.negative.values())

    @property
    def buckets(self) -> int:
        return len(self.positive) + len(self.negative)

    def add_all(self, numbers: Sequence[int | float]) -> None:
        """Counts finite numbers in."""
        log, ceil, per_log = math.log, math.ceil, PER_LOG
        above = [number for number in numbers if number > 0]
        _add_keys(self.positive, [ceil(log(number) * per_log) for number in above])
        if len(above) < len(numbers):
            below = [-number for number in numbers if number < 0]
            _add_keys(self.negative, [ceil(log(number) * per_log) for number in below])
            self.zeros += len(numbers) - len(above) - len(below)

    def merge(self, other: Sketch) -> None:
        self.zeros += other.zeros
        for mine, its in ((self.positive, other.positive), (self.negative, other.negative)):
            for key, count in its.items():
                mine[key] = mine.get(key, 0) + count
            _collapse(mine)

    def quantile(self, share: float) -> float | None:
        """The number at the nearest rank; None if there are none."""
        count = self.count
        return self.quantiles([share], count)[0] if count else None

    def quantiles(self, shares: Sequence[float], count: int) -> list[float]:
        """The numbers at the nearest ranks of shares that ascend, of `count` numbers that there are."""
        found: list[float] = []
        passed = sign = key = 0
        buckets = self._ascending()
        for share in shares:
            rank = nearest_rank(share, count)
            while passed < rank:
                sign, key, size = next(buckets)
                passed += size
            found.append(sign * bucket_value(key) if sign else 0.0)
        return found

    def _ascending(self) -> Iterator[tuple[int, int, int]]:
        """The sign and key of each bucket, and how many numbers it has."""
        for key in sorted(self.negative, reverse=True):
            yield -1, key, self.negative[key]
        if self.zeros:
            yield 0, 0, self.zeros
        for key in sorted(self.positive):
            yield 1, key, self.positive[key]

    # -- bytes -------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        out = bytearray([SKETCH_FORMAT])
        _put_varint(out, self.zeros)
        for store in (self.positive, self.negative):
            _put_varint(out, len(store))
            before: int | None = None
            for key in sorted(store):
                # Only the first key may be negative: zigzag.
                step = (2 * key if key >= 0 else -2 * key - 1) if before is None else key - before
                _put_varint(out, step)
                _put_varint(out, store[key])
                before = key
        return bytes(out)

    def to_text(self) -> str:
        return b64encode(self.to_bytes()).decode()


def nearest_rank(share: float, count: int) -> int:
    """From 1 to `count`, in whole numbers: shares are percents, counts may be beyond the doubles."""
    percent = round(share * 100)
    return max(1, -(-percent * count // 100))


def decode_sketch(form: bytes) -> Sketch | None:
    """The sketch that these bytes stand for; None if they are none."""
    if not form or form[0] != SKETCH_FORMAT or len(form) > SKETCH_BYTES_MAX:
        return None
    numbers = _read_varints(form)
    if not numbers or max(numbers) > _COUNT_MAX:
        return None
    sketch, at = Sketch(), 1
    sketch.zeros = numbers[0]
    for store in (sketch.positive, sketch.negative):
        if at == len(numbers):
            return None
        end = at + 1 + 2 * numbers[at]
        steps, counts = numbers[at + 1 : end : 2], numbers[at + 2 : end : 2]
        if end > len(numbers) or len(counts) > BUCKETS_MAX or 0 in counts or 0 in steps[1:]:
            return None
        if steps:
            first = steps[0]
            steps[0] = -(first + 1) // 2 if first & 1 else first // 2
            keys = list(accumulate(steps))
            if keys[0] < -_KEY_MAX or keys[-1] > _KEY_MAX:
                return None
            store.update(zip(keys, counts, strict=True))
        at = end
    return sketch if at == len(numbers) else None


def parse_sketch(text: object) -> Sketch | None:
    """The sketch in a JSON value; None if it is none."""
    if not isinstance(text, str) or len(text) > SKETCH_BYTES_MAX * 2:
        return None
    try:
        return decode_sketch(b64decode(text, validate=True))
    except ValueError:
        return None


def bucket_key(size: int | float) -> int:
    """The key of the bucket that a magnitude goes into."""
    return math.ceil(math.log(size) * PER_LOG)


def bucket_value(key: int) -> float:
    """The magnitude that a bucket stands for."""
    try:
        return math.exp(key * _LOG_GAMMA + _MIDDLE)
    except OverflowError:
        return sys.float_info.max


def _add_keys(store: BucketCounts, keys: list[int]) -> None:
    for key, count in count_keys(keys):
        store[key] = store.get(key, 0) + count
    _collapse(store)


def count_keys(keys: list[int]) -> Iterable[tuple[int, int]]:
    """Keys and how often they occur. Few stand for themselves: that is quicker than to count them."""
    return zip(keys, repeat(1)) if len(keys) < COUNTED_FROM else Counter(keys).items()


def _collapse(store: BucketCounts) -> None:
    if len(store) <= BUCKETS_MAX:
        return
    keys = sorted(store)
    lower = keys[: len(keys) - BUCKETS_MAX]
    store[keys[len(lower)]] += sum([store.pop(key) for key in lower])


def _put_varint(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _read_varints(form: bytes) -> list[int] | None:
    """All integers behind the first byte; None if one of them is cut off or longer than any can be."""
    found: list[int] = []
    number = shift = 0
    for byte in form[1:]:
        if byte < 0x80:
            found.append(number | byte << shift)
            number = shift = 0
        else:
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                return None
    return None if shift else found


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

    def to_json(self) -> Json:
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
        """Add the summary of a record."""
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
        """The part that covers every counted number; None if there is none."""
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

    def to_json(self, *, method: bool) -> Json:
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
            body["histogram"] = self.histogram.to_json()
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
