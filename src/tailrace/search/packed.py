"""Numbers and words of a chunk in as few bytes as they take: arrays, sorted dictionaries, sets of rows.

A set of rows is one integer with a bit for each row: and, or and not of whole chunks are single steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from typing import Protocol

from tailrace.search.values import Value

_DICTIONARY_OVERHEAD_BYTES = 64  # of an array object
_SPARSE = 8  # sets with fewer rows than one in so many are gone through from row to row
_DIGITS = bytes.maketrans(b"01", b"\0\1")


def pack_numbers(numbers: Sequence[int], largest: int) -> array[int]:
    """Unsigned numbers in the narrowest array that holds the largest."""
    return array("B" if largest < 1 << 8 else "H" if largest < 1 << 16 else "I", numbers)


def array_bytes(numbers: array[int] | array[float] | None) -> int:
    return 0 if numbers is None else len(numbers) * numbers.itemsize + _DICTIONARY_OVERHEAD_BYTES


def bits_from_rows(rows: Iterable[int], count: int) -> int:
    """The set of these rows, of `count` rows there are."""
    marks = bytearray(count // 8 + 1)
    for row in rows:
        marks[row >> 3] |= 1 << (row & 7)
    return int.from_bytes(marks, "little")


def bits_in_code_range(codes: bytes, first: int, end: int) -> int:
    """The set of rows whose code, a byte for each row, lies from `first` to below `end`."""
    digits = b"0" * first + b"1" * (end - first) + b"0" * (256 - end)
    return int(codes.translate(digits)[::-1], 2) if codes else 0


def bits_from_flags(flags: Iterable[bool]) -> int:
    """The set of rows that have a flag, of which there is one for each row."""
    return bits_in_code_range(bytes(flags), 1, 2)


def rows_from_bits(bits: int) -> list[int]:
    """The rows of a set, ascending."""
    length = bits.bit_length()
    if bits.bit_count() * _SPARSE > length:
        return list(compress(range(length), format(bits, "b")[::-1].encode().translate(_DIGITS)))
    rows: list[int] = []
    text = format(bits, "b")[::-1]
    at = text.find("1")
    while at >= 0:
        rows.append(at)
        at = text.find("1", at + 1)
    return rows


class TermDictionary(Protocol):
    """The distinct values of one field in one chunk, ascending; a term's number is its rank."""

    memory_bytes: int

    def __len__(self) -> int: ...
    def __getitem__(self, rank: int) -> Value: ...
    def all(self) -> Sequence[Value]:
        """Every term, by rank."""
        ...

    def find(self, value: Value) -> int:
        """The rank of a value, or -1."""
        ...

    def range_of(self, comparison: str, bound: Value) -> range:
        """The ranks on the wanted side of a bound."""
        ...


class NumberDictionary:
    """Integers, dates, truths and floats."""

    def __init__(self, values: Sequence[int | float], is_float: bool) -> None:
        self._values: array[int] | array[float] = array("d" if is_float else "q", values)
        self.memory_bytes = array_bytes(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rank: int) -> Value:
        return self._values[rank]

    def all(self) -> Sequence[Value]:
        return self._values

    def find(self, value: Value) -> int:
        assert not isinstance(value, str)
        rank = bisect_left(self._values, value)
        return rank if rank < len(self._values) and self._values[rank] == value else -1

    def range_of(self, comparison: str, bound: Value) -> range:
        assert not isinstance(bound, str)
        values, count = self._values, len(self._values)
        if comparison == ">":
            return range(bisect_right(values, bound), count)
        if comparison == ">=":
            return range(bisect_left(values, bound), count)
        if comparison == "<":
            return range(bisect_left(values, bound))
        if comparison == "<=":
            return range(bisect_right(values, bound))
        return range(bisect_left(values, bound), bisect_right(values, bound))


class StringDictionary:
    """Strings, as one run of UTF-8 and where each ends: bytes sort as code points do."""

    def __init__(self, words: Sequence[str]) -> None:
        text = "".join(words)
        self._text = text.encode()
        lengths = map(len, words) if text.isascii() else [len(word.encode()) for word in words]
        self._ends = pack_numbers(list(accumulate(lengths)), len(self._text))
        self.memory_bytes = len(self._text) + array_bytes(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, rank: int) -> bytes:
        return self._text[self._ends[rank - 1] if rank else 0 : self._ends[rank]]

    def __getitem__(self, rank: int) -> str:
        return self.raw(rank).decode()

    def all(self) -> Sequence[Value]:
        text, begin, words = self._text, 0, list[str]()
        for end in self._ends:
            words.append(text[begin:end].decode())
            begin = end
        return words

    def find(self, value: Value) -> int:
        wanted = str(value).encode()
        rank = bisect_left(range(len(self._ends)), wanted, key=self.raw)
        return rank if rank < len(self._ends) and self.raw(rank) == wanted else -1

    def starting_with(self, prefix: str) -> range:
        wanted = prefix.encode()
        ranks, length = range(len(self._ends)), len(wanted)
        first = bisect_left(ranks, wanted, key=self.raw)
        return range(first, bisect_right(ranks, wanted, first, key=lambda rank: self.raw(rank)[:length]))

    def range_of(self, comparison: str, bound: Value) -> range:
        """Words are compared where hits are sorted by them."""
        wanted, ranks = str(bound).encode(), range(len(self._ends))
        if comparison == ">=":
            return range(bisect_left(ranks, wanted, key=self.raw), len(ranks))
        assert comparison == "<="
        return range(bisect_right(ranks, wanted, key=self.raw))
