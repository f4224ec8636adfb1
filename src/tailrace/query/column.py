"""One field of one chunk: its distinct values, which of them each row has, and which rows have each of them.

`ranks` is the column: the values of all rows in order, as numbers of terms. For a text the terms are its
tokens, and a break stands between two values, so that the column holds positions too. The inverted list
(`rows` by term) is made from the column and may be dropped again; then the column is searched.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tailrace.query.analyze import tokens_of
from tailrace.query.packed import NumberTerms, Terms, WordTerms, bits_of, pack, size_of
from tailrace.query.values import Value
from tailrace.schema.search_fields import Field


class Column:
    """`starts[row]` is where a row's ranks begin; None if every row has exactly one."""

    def __init__(self, field: Field, values: Sequence[Sequence[Value]]) -> None:
        self.is_text = field.kind == "text"
        self.count = len(values)
        listed = _tokens(values) if self.is_text else values
        distinct: set[Value] = set()
        for row in listed:
            distinct.update(row)
        if self.is_text:
            distinct.discard(_BREAK)
        terms = sorted(distinct)  # pyright: ignore[reportArgumentType]
        self.terms: Terms = (
            WordTerms(terms)  # pyright: ignore[reportArgumentType]
            if field.kind in ("keyword", "text")
            else NumberTerms(terms, field.kind == "float")  # pyright: ignore[reportArgumentType]
        )
        numbers: dict[Value, int] = {term: rank for rank, term in enumerate(terms)}
        self.break_rank = len(terms)
        if self.is_text:
            numbers[_BREAK] = self.break_rank
        ranks: list[int] = []
        starts: list[int] = [0]
        for row in listed:
            ranks += [numbers[value] for value in row]
            starts.append(len(ranks))
        self.ranks = pack(ranks, len(terms))
        single = len(ranks) == self.count and all(len(row) == 1 for row in listed)
        self.starts = None if single else pack(starts, len(ranks))
        self.multiple = bits_of((row for row, found in enumerate(values) if len(found) > 1), self.count)
        self.present = bits_of((row for row, found in enumerate(values) if len(found)), self.count)
        self.tokens = len(ranks) - ranks.count(self.break_rank) if self.is_text else 0
        self.documents = sum(1 for row in listed if any(row)) if self.is_text else 0
        self._rows: array[int] | None = None
        self._ends: array[int] | None = None
        self._invert(ranks)
        self.memory_bytes = self._measure()

    def _measure(self) -> int:
        bits = (self.multiple.bit_length() + self.present.bit_length()) // 8
        return (
            self.terms.memory_bytes
            + size_of(self.ranks)
            + size_of(self.starts)
            + size_of(self._rows)
            + size_of(self._ends)
            + bits
            + 200
        )

    # -- inverted lists ----------------------------------------------------------------------------------

    def _invert(self, ranks: Sequence[int]) -> None:
        lists: list[list[int]] = [[] for _ in range(len(self.terms))]
        if self.starts is None:
            for row, rank in enumerate(ranks):
                lists[rank].append(row)
        else:
            for row in range(self.count):
                for rank in set(ranks[self.starts[row] : self.starts[row + 1]]):
                    if rank < self.break_rank:
                        lists[rank].append(row)
        rows: list[int] = []
        ends: list[int] = []
        for one in lists:
            rows += one
            ends.append(len(rows))
        self._rows = pack(rows, self.count)
        self._ends = pack(ends, len(rows))

    @property
    def inverted(self) -> bool:
        return self._rows is not None

    def drop_lists(self) -> None:
        """Leaves the column alone."""
        self._rows = self._ends = None
        self.memory_bytes = self._measure()

    # -- questions ---------------------------------------------------------------------------------------

    def with_ranks(self, wanted: range) -> int:
        """The rows that have some term in this stretch of ranks."""
        if not wanted:
            return 0
        if self._rows is not None and self._ends is not None:
            begin = self._ends[wanted.start - 1] if wanted.start else 0
            return bits_of(self._rows[begin : self._ends[wanted.stop - 1]], self.count)
        low, high = wanted.start, wanted.stop
        if self.starts is None:
            return bits_of((row for row, rank in enumerate(self.ranks) if low <= rank < high), self.count)
        found = [at for at, rank in enumerate(self.ranks) if low <= rank < high]
        return bits_of(self._owners(found), self.count)

    def _owners(self, positions: Iterable[int]) -> Iterable[int]:
        """The rows that these positions of the column belong to. Positions ascend."""
        assert self.starts is not None
        row = 0
        for position in positions:
            while self.starts[row + 1] <= position:
                row += 1
            yield row

    def documents_with(self, rank: int) -> int:
        """How many rows have a term."""
        if self._ends is not None:
            return self._ends[rank] - (self._ends[rank - 1] if rank else 0)
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
        if self.multiple >> row & 1:
            length -= self.ranks_of(row).count(self.break_rank)
        return length

    def values_of(self, row: int) -> list[array[int]]:
        """The values of a text in one row, each as the ranks of its tokens."""
        ranks = self.ranks_of(row)
        if not self.multiple >> row & 1:
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


_BREAK = ""  # is no token


def _tokens(values: Sequence[Sequence[Value]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for row in values:
        tokens: list[str] = []
        for index, value in enumerate(row):
            if index:
                tokens.append(_BREAK)
            tokens += tokens_of(str(value))
        rows.append(tokens)
    return rows
