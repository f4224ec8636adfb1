"""Token buckets: rate limits of identities by kind, in integers to avoid rounding."""

from __future__ import annotations

from typing import Final

import msgspec

_SECOND_NS: Final = 1_000_000_000
_MILLI_NS: Final = 1_000_000
BUCKETS_MAX: Final = 100_000


class Rate(msgspec.Struct, frozen=True):
    """Tokens per second, and burst size."""

    per_s: int
    burst: int


class TokenBucket:
    """A bucket, initially full. A token is 10^9 parts, so that `per_s` parts are added each nanosecond."""

    __slots__ = ("_filled_ns", "_full", "_parts", "rate")

    def __init__(self, rate: Rate, now_ns: int) -> None:
        assert rate.per_s > 0
        assert rate.burst > 0
        self.rate = rate
        self._parts = self._full = rate.burst * _SECOND_NS
        self._filled_ns = now_ns

    def take(self, now_ns: int, count: int = 1) -> int:
        """Take `count` tokens and return 0, or return the milliseconds after which they will be available.

        More than the bucket's capacity needs a full bucket and leaves a debt that is refilled first.
        """
        if now_ns > self._filled_ns:
            self._fill(now_ns)
        wanted = count * _SECOND_NS
        needed = wanted if wanted < self._full else self._full
        if self._parts >= needed:
            self._parts -= wanted
            return 0
        missing_ns = -(-(needed - self._parts) // self.rate.per_s)
        return -(-missing_ns // _MILLI_NS)

    def take_with(self, other: TokenBucket, now_ns: int, count: int) -> bool:
        """Take one token here and `count` of the other bucket, or none; `take` inlined for the hot path."""
        if now_ns > self._filled_ns:
            self._fill(now_ns)
        if now_ns > other._filled_ns:
            other._fill(now_ns)
        wanted = count * _SECOND_NS
        if self._parts < _SECOND_NS or other._parts < (wanted if wanted < other._full else other._full):
            return False
        self._parts -= _SECOND_NS
        other._parts -= wanted
        return True

    def give_back(self, count: int = 1) -> None:
        """Return tokens that were taken for an operation that was then refused for another reason."""
        self._parts = min(self._parts + count * _SECOND_NS, self._full)

    def is_full(self, now_ns: int) -> bool:
        self._fill(now_ns)
        return self._parts >= self._full

    def _fill(self, now_ns: int) -> None:
        passed_ns = now_ns - self._filled_ns
        if passed_ns > 0:
            parts, full = self._parts + passed_ns * self.rate.per_s, self._full
            self._parts = parts if parts < full else full
            self._filled_ns = now_ns


class TokenBuckets:
    """The buckets of all identities and kinds. A full bucket equals a new one and is dropped."""

    __slots__ = ("_buckets", "_buckets_max", "_pairs", "_rates")

    def __init__(self, rates: dict[str, Rate], *, buckets_max: int = BUCKETS_MAX) -> None:
        self._rates = rates
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._buckets_max = buckets_max
        # Two buckets of an identity that are always used together; `_buckets` has them too.
        self._pairs: dict[str, tuple[TokenBucket, TokenBucket]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, identity: str, kind: str, now_ns: int, count: int = 1, *, rate: Rate | None = None) -> int:
        """Return 0 if allowed now, else the milliseconds to wait. `rate` replaces the default of the kind."""
        return self._bucket(identity, kind, now_ns, rate or self._rates[kind]).take(now_ns, count)

    def pair(self, identity: str, one: str, other: str, now_ns: int) -> tuple[TokenBucket, TokenBucket]:
        """The buckets of two kinds, with their default rates. Do not hold them: a sweep may replace them."""
        found = self._pairs.get(identity)
        if found is None:
            rates = self._rates
            first = self._bucket(identity, one, now_ns, rates[one])
            second = self._bucket(identity, other, now_ns, rates[other])
            if self._buckets.get((identity, one)) is not first:
                # Creating the second one evicted it; now there is enough space.
                first = self._bucket(identity, one, now_ns, rates[one])
            found = self._pairs[identity] = (first, second)
        return found

    def _bucket(self, identity: str, kind: str, now_ns: int, rate: Rate) -> TokenBucket:
        bucket = self._buckets.get((identity, kind))
        if bucket is None or (bucket.rate is not rate and bucket.rate != rate):
            if len(self._buckets) >= self._buckets_max:
                self._sweep(now_ns)
            bucket = self._buckets[identity, kind] = TokenBucket(rate, now_ns)
            self._pairs.pop(identity, None)
        return bucket

    def give_back(self, identity: str, kind: str, count: int = 1) -> None:
        if (bucket := self._buckets.get((identity, kind))) is not None:
            bucket.give_back(count)

    def _sweep(self, now_ns: int) -> None:
        """Drop full buckets and, if too few are full, the oldest ones."""
        self._pairs.clear()
        for key in [key for key, bucket in self._buckets.items() if bucket.is_full(now_ns)]:
            del self._buckets[key]
        surplus = len(self._buckets) - self._buckets_max // 2
        for key in list(self._buckets)[: max(0, surplus)]:
            del self._buckets[key]
