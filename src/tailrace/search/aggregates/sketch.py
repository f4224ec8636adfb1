"""Quantiles of many numbers in little room: a mergeable sketch with a bounded relative error (DDSketch).

A number goes into the bucket whose key is `ceil(log(|v|) / log(gamma))`; positive and negative numbers have
stores of their own, and zeros are counted. Every number of a bucket lies within 1 % of the bucket's middle.
A store that has more than 2048 buckets adds up those of the smallest magnitudes in the lowest one it keeps.
Which bucket that is depends on all keys together, so the order of merges does not matter.

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
from typing import Final

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
