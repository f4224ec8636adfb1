"""One field of one chunk: its distinct values, which of them each row has, and which rows have each of them.

`ranks` is the column: the values of all rows in order, as numbers of terms. For a text the terms are its
tokens, and a break stands between two values, so that the column holds positions too. The inverted lists
(`rows` by term) are made from the column and may be dropped again; then the column is searched.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tailrace.query.analyze import tokens_of
from tailrace.query.packed import NumberTerms, Terms, WordTerms, bits_of, pack, size_of
from tailrace.query.values import Value
from tailrace.schema.search_fields import Field

_BREAK = ""  # is no token
_OVERHEAD_BYTES = 400  # of a column's objects
_DENSE = 16  # a term in more than one of so many rows has a set of rows instead of a list
_SET_BYTES = 120  # of such a set, beside its bits
_LENGTHS_MAX = 64  # of texts in a chunk, for each of which there is a set of rows


class Lists(NamedTuple):
    """The rows of each term, one list behind the other, and where each ends; sets for terms of many rows."""

    rows: array[int]
    ends: array[int]
    dense: dict[int, int]
    lengths: dict[int, int] | None  # of a text: the rows of each length, if these are few
    repeats: dict[int, array[int]]  # of a text: the rows that have a token more than once

    def memory_bytes(self, count: int) -> int:
        sets = len(self.dense) + len(self.lengths or ())
        lists = size_of(self.rows) + size_of(self.ends) + sum(map(size_of, self.repeats.values()))
        return lists + sets * (_SET_BYTES + count // 8) + len(self.repeats) * _SET_BYTES


class Column:
    """Made by `column_of` from values or by `joined` from other columns."""

    def __init__(
        self, field: Field, terms: list[Any], ranks: list[int], starts: list[int], multiple: int, present: int
    ) -> None:
        self.count = len(starts) - 1
        self.terms: Terms = (
            WordTerms(terms)
            if field.kind in ("keyword", "text")
            else NumberTerms(terms, field.kind == "float")
        )
        self.break_rank = len(terms)
        self.ranks = pack(ranks, len(terms))
        single = len(ranks) == self.count and starts == list(range(len(starts)))
        # Two values without a token are nothing but the break between them.
        single = single and self.break_rank not in ranks
        self.starts = None if single else pack(starts, len(ranks))  # None: every row has exactly one
        self.multiple = multiple  # rows with more than one value
        self.present = present  # rows with a value
        self.tokens = self.documents = 0
        if field.kind == "text":
            self.tokens = len(ranks) - ranks.count(self.break_rank)
            self.documents = self._count_documents()
        self._lists: Lists | None = self._invert(ranks)
        self.memory_bytes = self._measure()

    def _count_documents(self) -> int:
        """Rows with a token."""
        return sum(1 for row in range(self.count) if self.length_of(row))

    def _measure(self) -> int:
        bits = (self.multiple.bit_length() + self.present.bit_length()) // 8
        lists = 0 if self._lists is None else self._lists.memory_bytes(self.count)
        columns = self.terms.memory_bytes + size_of(self.ranks) + size_of(self.starts)
        return columns + lists + bits + _OVERHEAD_BYTES

    # -- inverted lists ----------------------------------------------------------------------------------

    def _invert(self, ranks: Sequence[int]) -> Lists:
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
        dense: dict[int, int] = {}
        for rank, one in enumerate(lists):
            if len(one) * _DENSE > self.count >= _DENSE:
                dense[rank] = bits_of(one, self.count)
            else:
                rows += one
            ends.append(len(rows))
        by_length, repeats = (self._by_length(), self._repeats()) if self.tokens else (None, {})
        return Lists(pack(rows, self.count), pack(ends, len(rows)), dense, by_length, repeats)

    def _by_length(self) -> dict[int, int] | None:
        by_length: dict[int, list[int]] = {}
        for row in range(self.count):
            by_length.setdefault(self.length_of(row), []).append(row)
        if len(by_length) > _LENGTHS_MAX:
            return None
        return {length: bits_of(rows, self.count) for length, rows in by_length.items()}

    def _repeats(self) -> dict[int, array[int]]:
        repeats: dict[int, array[int]] = {}
        for row in range(self.count):
            ranks = self.ranks_of(row)
            if len(set(ranks)) < len(ranks):
                for rank, frequency in Counter(ranks).items():
                    if frequency > 1 and rank < self.break_rank:
                        repeats.setdefault(rank, pack((), self.count)).append(row)
        return repeats

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
            found = bits_of(lists.rows[begin:end], self.count) if begin < end else 0
            for rank, bits in lists.dense.items():
                if rank in wanted:
                    found |= bits
            return found
        low, high = wanted.start, wanted.stop
        places = [at for at, rank in enumerate(self.ranks) if low <= rank < high]
        return bits_of(places if self.starts is None else self._owners(places), self.count)

    def _owners(self, positions: Iterable[int]) -> Iterable[int]:
        """The rows that these positions of the column belong to. Positions ascend."""
        assert self.starts is not None
        row = 0
        for position in positions:
            while self.starts[row + 1] <= position:
                row += 1
            yield row

    def by_weight(self, rank: int, rows: int) -> tuple[dict[int, int], int] | None:
        """Rows with a token, by length where they have it once, and those that have it more often.

        None where that is not known.
        """
        lists = self._lists
        if lists is None or lists.lengths is None:
            return None
        often = bits_of(lists.repeats.get(rank, ()), self.count) & rows
        once = rows & ~often
        return {length: found for length, bits in lists.lengths.items() if (found := bits & once)}, often

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


def column_of(field: Field, values: Sequence[Sequence[Value]]) -> Column:
    """The column of a field, given its values in each row."""
    is_text = field.kind == "text"
    listed: Sequence[Sequence[Any]] = _tokens(values) if is_text else values
    distinct: set[Any] = set()
    for row in listed:
        distinct.update(row)
    if is_text:
        distinct.discard(_BREAK)
    terms = sorted(distinct)
    numbers: dict[Value, int] = {term: rank for rank, term in enumerate(terms)}
    if is_text:
        numbers[_BREAK] = len(terms)
    ranks: list[int] = []
    starts: list[int] = [0]
    for row in listed:
        ranks += [numbers[value] for value in row]
        starts.append(len(ranks))
    multiple = bits_of((row for row, found in enumerate(values) if len(found) > 1), len(values))
    present = bits_of((row for row, found in enumerate(values) if found), len(values))
    return Column(field, terms, ranks, starts, multiple, present)


def joined(field: Field, columns: Sequence[Column]) -> Column:
    """One column of several, one behind the other."""
    listed = [[column.terms[rank] for rank in range(len(column.terms))] for column in columns]
    terms: list[Any] = sorted({term for terms in listed for term in terms})
    numbers = {term: rank for rank, term in enumerate(terms)}
    ranks: list[int] = []
    starts: list[int] = [0]
    multiple = present = count = 0
    for column, own in zip(columns, listed, strict=True):
        renumbered = [numbers[term] for term in own] + [len(terms)]
        base = len(ranks)
        ranks += [renumbered[rank] for rank in column.ranks]
        ends = range(1, column.count + 1) if column.starts is None else column.starts[1:]
        starts += [base + end for end in ends]
        multiple |= column.multiple << count
        present |= column.present << count
        count += column.count
    return Column(field, terms, ranks, starts, multiple, present)


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


def occurrences(column: Column, row: int, ranks: Sequence[int]) -> int:
    """How often the tokens follow one another in a row. A break has a rank of its own and is in no phrase."""
    found = column.ranks_of(row)
    first, length = ranks[0], len(ranks)
    wanted = array(found.typecode, ranks)
    count = 0
    for at in range(len(found) - length + 1):
        if found[at] == first and found[at : at + length] == wanted:
            count += 1
    return count
