"""One field of one chunk: its distinct values, which of them each row has, and which rows have each of them.

`ranks` is the column: the values of all rows in order, as numbers of terms. For a text the terms are its
tokens, and a break stands between two values, so that the column holds positions too. The inverted lists
(`rows` by term) are made from the column and may be dropped again; then the column is searched.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.schema.search_fields import Field
from tailrace.search.inverted import InvertedLists, invert, invert_single, invert_unique, rows_at_positions
from tailrace.search.packed import (
    NumberDictionary,
    StringDictionary,
    TermDictionary,
    array_bytes,
    bits_from_rows,
    bits_in_code_range,
    pack_numbers,
)
from tailrace.search.values import Value

_COLUMN_OVERHEAD_BYTES = 500  # of a column's objects
_PHRASES_CACHED_MAX = 8


class PhraseOccurrences(NamedTuple):
    """The rows that have a phrase, and how often those have it that have it more than once."""

    rows: int
    more: dict[int, int]


NO_OCCURRENCES = PhraseOccurrences(0, {})


class Column:
    """Made by `column_build`. Without `starts` every row has exactly one value, and that is no break.

    `order` is given where every term is in one row, too: the rows by their ranks.
    """

    def __init__(
        self,
        field: Field,
        terms: list[Any],
        ranks: list[int],
        starts: list[int] | None,
        multiple: int,
        present: int,
        *,
        lists: bool = True,
        order: list[int] | None = None,
    ) -> None:
        self.count = len(ranks) if starts is None else len(starts) - 1
        self.terms: TermDictionary = (
            StringDictionary(terms)
            if field.kind in ("keyword", "text")
            else NumberDictionary(terms, field.kind == "float")
        )
        self.break_rank = len(terms)
        self.ranks = pack_numbers(ranks, len(terms))
        self.starts = None if starts is None else pack_numbers(starts, len(ranks))
        self.multiple = multiple  # rows with more than one value
        self.present = present  # rows with a value
        self._phrase: tuple[tuple[str, ...], PhraseOccurrences] | None = None
        self.tokens = self.documents = 0
        lengths: list[int] | None = None
        if field.kind == "text":
            lengths = self._lengths()
            self.tokens = sum(lengths)
            self.documents = self.count - lengths.count(0)  # rows with a token
        self._lists: InvertedLists | None = None
        # A column that is never inverted is made for one search, which asks the same more than once.
        self._asked: dict[range, int] | None = None if lists else {}
        if lists:
            plain = starts is None and lengths is None
            self._lists = (
                invert_unique(order)
                if order is not None
                else invert_single(ranks, len(terms))
                if plain
                else invert(
                    ranks,
                    range(self.count + 1) if starts is None else starts,
                    len(terms),
                    lengths if self.tokens else None,
                )
            )
        self.memory_bytes = self._measure()

    def _lengths(self) -> list[int]:
        if self.starts is None:
            return [1] * self.count
        if self.multiple:
            return [self.length_of(row) for row in range(self.count)]
        starts = self.starts
        return [starts[row + 1] - starts[row] for row in range(self.count)]

    def _measure(self) -> int:
        bits = (self.multiple.bit_length() + self.present.bit_length()) // 8
        lists = 0 if self._lists is None else self._lists.memory_bytes(self.count)
        columns = self.terms.memory_bytes + array_bytes(self.ranks) + array_bytes(self.starts)
        return columns + lists + bits + _COLUMN_OVERHEAD_BYTES

    @property
    def inverted(self) -> bool:
        return self._lists is not None

    def drop_lists(self) -> None:
        """Leaves the column alone. Somebody may be reading it on another thread: one assignment."""
        self._lists = None
        self.memory_bytes = self._measure()

    # -- questions ---------------------------------------------------------------------------------------

    def with_ranks(self, wanted: range) -> int:
        """The rows that have some term in this stretch of ranks."""
        if not wanted:
            return 0
        lists = self._lists
        if lists is not None:
            begin = lists.ends[wanted.start - 1] if wanted.start else 0
            end = lists.ends[wanted.stop - 1]
            found = bits_from_rows(lists.rows[begin:end], self.count) if begin < end else 0
            for rank, bits in lists.dense.items():
                if rank in wanted:
                    found |= bits
            return found
        found = self._asked.get(wanted) if self._asked else None
        if found is None:
            found = self._search(wanted)
            if self._asked is not None and len(self._asked) < _PHRASES_CACHED_MAX:
                self._asked[wanted] = found
        return found

    def _search(self, wanted: range) -> int:
        low, high = wanted.start, wanted.stop
        if not low and high == len(self.terms) and not self.tokens:
            return self.present  # in a text, a row may have a value and no token
        if self.starts is None and self.ranks.typecode == "B":
            return bits_in_code_range(self.ranks.tobytes(), low, high)
        places = [at for at, rank in enumerate(self.ranks) if low <= rank < high]
        return bits_from_rows(
            places if self.starts is None else rows_at_positions(self.starts, places), self.count
        )

    def by_length(self, rows: int) -> dict[int, int] | None:
        """Rows by the length of their text; None where that is not known."""
        lists = self._lists
        if lists is None or lists.lengths is None:
            return None
        return {length: found for length, bits in lists.lengths.items() if (found := bits & rows)}

    def repeating(self, rank: int) -> int:
        """Rows that have a token more than once, where `by_length` is known."""
        lists = self._lists
        return self.present if lists is None else bits_from_rows(lists.repeats.get(rank, ()), self.count)

    def phrase(self, tokens: Sequence[str]) -> PhraseOccurrences:
        """Where some tokens follow one another. The last answer is kept: a search asks more than once."""
        wanted, known = tuple(tokens), self._phrase
        if known is None or known[0] != wanted:
            ranks = [self.terms.find(token) for token in wanted]
            known = self._phrase = wanted, NO_OCCURRENCES if -1 in ranks else self._occurrences(ranks)
        return known[1]

    def _occurrences(self, ranks: Sequence[int]) -> PhraseOccurrences:
        width = self.ranks.itemsize
        text, wanted = self.ranks.tobytes(), array(self.ranks.typecode, ranks).tobytes()
        starts, length = self.starts, len(ranks)
        found: dict[int, int] = {}
        at = text.find(wanted)
        while at >= 0:
            place, inside = divmod(at, width)
            if not inside:
                row = place if starts is None else bisect_right(starts, place) - 1
                end = place + 1 if starts is None else starts[row + 1]
                if place + length <= end:  # else it runs on into the next row
                    found[row] = found.get(row, 0) + 1
            at = text.find(wanted, at + 1)
        more = {row: count for row, count in found.items() if count > 1}
        return PhraseOccurrences(bits_from_rows(found, self.count), more)

    def documents_with(self, rank: int) -> int:
        """How many rows have a term."""
        lists = self._lists
        if lists is not None and rank not in lists.dense:
            return lists.ends[rank] - (lists.ends[rank - 1] if rank else 0)
        return self.with_ranks(range(rank, rank + 1)).bit_count()

    def ranks_of(self, row: int) -> array[int]:
        if self.starts is None:
            return self.ranks[row : row + 1]
        return self.ranks[self.starts[row] : self.starts[row + 1]]

    def length_of(self, row: int) -> int:
        """Tokens of a text."""
        if self.starts is None:
            return 1
        length = self.starts[row + 1] - self.starts[row]
        if self.multiple and self.multiple >> row & 1:
            length -= self.ranks_of(row).count(self.break_rank)
        return length

    def values_of(self, row: int) -> list[array[int]]:
        """The values of a text in one row, each as the ranks of its tokens."""
        ranks = self.ranks_of(row)
        if not self.multiple or not self.multiple >> row & 1:
            return [ranks]
        values: list[array[int]] = [array(ranks.typecode)]
        for rank in ranks:
            if rank == self.break_rank:
                values.append(array(ranks.typecode))
            else:
                values[-1].append(rank)
        return values

    def edge(self, row: int, largest: bool) -> Value | None:
        """The smallest or largest value of a row."""
        ranks = self.ranks_of(row)
        if not ranks:
            return None
        return self.terms[ranks[0] if len(ranks) == 1 else max(ranks) if largest else min(ranks)]
