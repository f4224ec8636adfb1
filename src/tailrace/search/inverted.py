"""The inverted lists of a column: which rows have each of its terms."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from tailrace.search.packed import array_bytes, bits_from_rows, bits_in_code_range, pack_numbers

_DENSE = 16  # a term in more than one of so many rows has a set of rows instead of a list
_SET_BYTES = 120  # of such a set, beside its bits
_LENGTHS_MAX = 64  # of texts in a chunk, for each of which there is a set of rows


class InvertedLists(NamedTuple):
    """The rows of each term, one list behind the other, and where each ends; sets for terms of many rows."""

    rows: array[int]
    ends: array[int]
    dense: dict[int, int]
    lengths: dict[int, int] | None  # of a text: the rows of each length, if these are few
    repeats: dict[int, array[int]]  # of a text: the rows that have a token more than once

    def memory_bytes(self, count: int) -> int:
        sets = len(self.dense) + len(self.lengths or ())
        lists = array_bytes(self.rows) + array_bytes(self.ends) + sum(map(array_bytes, self.repeats.values()))
        return lists + sets * (_SET_BYTES + count // 8) + len(self.repeats) * _SET_BYTES


def invert_unique(order: Sequence[int]) -> InvertedLists:
    """Of a column in which terms and rows are one to one; `order` are the rows by rank."""
    count = len(order)
    return InvertedLists(pack_numbers(order, count), pack_numbers(range(1, count + 1), count), {}, None, {})


def invert_single(ranks: Sequence[int], terms: int) -> InvertedLists:
    """Of a column with exactly one value in each row."""
    count = len(ranks)
    found = Counter(ranks)
    sizes = [found[rank] for rank in range(terms)]
    # Stable: the rows of one term stay in order.
    rows = sorted(range(count), key=ranks.__getitem__)
    dense: dict[int, int] = {}
    often = [rank for rank, size in enumerate(sizes) if _is_dense(size, count)]
    if often:
        ends = list(accumulate(sizes))
        codes = bytes(ranks) if terms <= 256 else None
        kept: list[int] = []
        at = 0
        for rank in often:
            begin, end = ends[rank] - sizes[rank], ends[rank]
            dense[rank] = (
                bits_from_rows(rows[begin:end], count)
                if codes is None
                else bits_in_code_range(codes, rank, rank + 1)
            )
            kept += rows[at:begin]
            at = end
            sizes[rank] = 0
        rows = kept + rows[at:]
    ends = list(accumulate(sizes))
    return InvertedLists(pack_numbers(rows, count), pack_numbers(ends, len(rows)), dense, None, {})


def invert(
    ranks: Sequence[int], starts: Sequence[int], terms: int, lengths: Sequence[int] | None
) -> InvertedLists:
    """Of a column with any number of values in a row; `lengths` are those of texts, in tokens."""
    count = len(starts) - 1
    owners = list(chain.from_iterable(repeat(row, starts[row + 1] - starts[row]) for row in range(count)))
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    found = Counter(ranks)
    rows: list[int] = []
    ends: list[int] = []
    dense: dict[int, int] = {}
    repeats: dict[int, array[int]] = {}
    at = 0
    for rank in range(terms):
        own = [owners[place] for place in order[at : at + found[rank]]]
        at += len(own)
        once = list(dict.fromkeys(own))
        if len(once) < len(own) and lengths is not None:
            repeats[rank] = pack_numbers([row for row, often in Counter(own).items() if often > 1], count)
        if _is_dense(len(once), count):
            dense[rank] = bits_from_rows(once, count)
        else:
            rows += once
        ends.append(len(rows))
    by_length = None if lengths is None else _by_length(lengths)
    return InvertedLists(pack_numbers(rows, count), pack_numbers(ends, len(rows)), dense, by_length, repeats)


def _is_dense(size: int, count: int) -> bool:
    return size * _DENSE > count >= _DENSE


def _by_length(lengths: Sequence[int]) -> dict[int, int] | None:
    distinct = set(lengths)
    if len(distinct) > _LENGTHS_MAX:
        return None
    if max(distinct, default=0) < 256:
        codes = bytes(lengths)
        return {length: bits_in_code_range(codes, length, length + 1) for length in sorted(distinct)}
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    return {length: bits_from_rows(rows, len(lengths)) for length, rows in by_length.items()}


def rows_at_positions(starts: Sequence[int], positions: Iterable[int]) -> Iterable[int]:
    """The rows that these positions of a column belong to. Positions ascend."""
    row = 0
    for position in positions:
        while starts[row + 1] <= position:
            row += 1
        yield row
