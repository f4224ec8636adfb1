"""Segmented Bloom filters: whether anybody may ask for a value, where the index that knows it is far away.

A filter grows by segments of a fixed number of keys, so that it is never full. A key cannot be taken out;
deletions are counted, and when there are many of them, or too many answers were wrong, a new filter is made
of the keys there are. The old one serves until then. A key that was added is always found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import orjson
import xxhash

KEYS_PER_SEGMENT: Final = 65_536
BITS_PER_KEY: Final = 10
HASHES: Final = 7
SAMPLE_INTERVAL: Final = 256  # one answer in so many is checked
SAMPLES_MIN: Final = 50
FALSE_POSITIVE_MAX: Final = 0.02
REBUILD_S: Final = 24 * 3600.0


def bloom_key(path: tuple[str, ...], value_class: object) -> bytes:
    """A field and a value as `class_of` has it."""
    return orjson.dumps([path, value_class])


class _Segment:
    __slots__ = ("bits", "count", "size")

    def __init__(self, keys: int) -> None:
        self.size = keys * BITS_PER_KEY
        self.bits = bytearray((self.size + 7) // 8)
        self.count = 0

    def add(self, first: int, step: int) -> None:
        bits, size = self.bits, self.size
        for turn in range(HASHES):
            place = (first + turn * step) % size
            bits[place >> 3] |= 1 << (place & 7)
        self.count += 1

    def holds(self, first: int, step: int) -> bool:
        bits, size = self.bits, self.size
        for turn in range(HASHES):
            place = (first + turn * step) % size
            if not bits[place >> 3] & 1 << (place & 7):
                return False
        return True


def _hashes(key: bytes) -> tuple[int, int]:
    both = xxhash.xxh3_128_intdigest(key)
    return both >> 64, (both & 0xFFFF_FFFF_FFFF_FFFF) | 1


class BloomFilter:
    """The filter of one collection."""

    def __init__(self, now_s: float, keys_each: int = KEYS_PER_SEGMENT) -> None:
        self._keys_each = keys_each
        self._segments = [_Segment(keys_each)]
        self._made_s = now_s
        self._discarded = 0
        self._asked = 0
        self._samples = 0
        self._wrong = 0

    def __len__(self) -> int:
        return sum(segment.count for segment in self._segments)

    def __contains__(self, key: bytes) -> bool:
        first, step = _hashes(key)
        return any(segment.holds(first, step) for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(len(segment.bits) for segment in self._segments)

    @property
    def segments(self) -> list[bytes]:
        """The bits, as they can be put down elsewhere."""
        return [bytes(segment.bits) for segment in self._segments]

    def add(self, key: bytes) -> None:
        if self._segments[-1].count >= self._keys_each:
            self._segments.append(_Segment(self._keys_each))
        self._segments[-1].add(*_hashes(key))

    def discard(self) -> None:
        """A key is nobody's any more; it is still found."""
        self._discarded += 1

    def is_sampled(self) -> bool:
        """Whether this answer is to be checked against who really asks: `checked` is told then."""
        self._asked += 1
        return self._asked % SAMPLE_INTERVAL == 0

    def checked(self, found: bool, really: bool) -> None:
        """Of those that nobody asks for, how many were found all the same."""
        if not really:
            self._samples += 1
            self._wrong += found

    @property
    def false_ratio(self) -> float:
        return self._wrong / self._samples if self._samples else 0.0

    def is_worn(self, now_s: float) -> bool:
        """Whether a new filter should take the place of this one."""
        if self._discarded * 2 > len(self):
            return True
        if self._samples >= SAMPLES_MIN and self.false_ratio > FALSE_POSITIVE_MAX:
            return True
        return now_s - self._made_s >= REBUILD_S

    def rebuilt(self, keys: Iterable[bytes], now_s: float) -> BloomFilter:
        """A filter of the keys there are; this one goes on until it is there."""
        fresh = BloomFilter(now_s, self._keys_each)
        for key in keys:
            fresh.add(key)
        return fresh
