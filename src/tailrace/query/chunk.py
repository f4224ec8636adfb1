"""A stretch of a stream's newest rows, taken apart by field: the unit of the tail index."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from tailrace.query.bind import (
    All,
    AnyOf,
    Anywhere,
    Bound,
    Compares,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.query.column import Column
from tailrace.query.packed import WordTerms, bits_of, rows_of
from tailrace.query.view import Row
from tailrace.schema.search_config import SearchConfig


class Chunk:
    """Rows in the order of their entries. Every row knows its entry: none is found by counting."""

    def __init__(self, config: SearchConfig, entries: Sequence[int], rows: Sequence[Row]) -> None:
        self.entries: array[int] = array("Q", entries)
        self.count = len(entries)
        self.all_rows = (1 << self.count) - 1
        self.columns: dict[str, Column] = {
            name: Column(field, [row[index] for row in rows])
            for index, (name, field) in enumerate(config.fields.items())
        }

    @property
    def first(self) -> int:
        return self.entries[0]

    @property
    def last(self) -> int:
        return self.entries[-1]

    @property
    def memory_bytes(self) -> int:
        return sum(column.memory_bytes for column in self.columns.values()) + 8 * self.count + 300

    @property
    def inverted(self) -> bool:
        return any(column.inverted for column in self.columns.values())

    def drop_lists(self) -> None:
        for column in self.columns.values():
            column.drop_lists()

    def after(self, entry: int) -> int:
        """The set of rows behind an entry."""
        return self.all_rows & ~((1 << bisect_left(self.entries, entry + 1)) - 1)

    def match(self, query: Bound) -> int:
        """The set of rows that match."""
        match query:
            case All(clauses):
                found = self.all_rows
                for clause in clauses:
                    if not found:
                        break
                    found &= self.match(clause)
                return found
            case AnyOf(clauses):
                found = 0
                for clause in clauses:
                    found |= self.match(clause)
                return found
            case Negation(clause):
                return self.all_rows & ~self.match(clause)
            case Anywhere(targets):
                found = 0
                for target in targets:
                    found |= self.match(target)
                return found
            case HasValue(field):
                return self.columns[field].present
            case Equals(field, value):
                column = self.columns[field]
                rank = column.terms.find(value)
                return 0 if rank < 0 else column.with_ranks(range(rank, rank + 1))
            case StartsWith(field, prefix):
                column = self.columns[field]
                assert isinstance(column.terms, WordTerms)
                return column.with_ranks(column.terms.starting_with(prefix))
            case Compares(field, comparison, bound):
                column = self.columns[field]
                return column.with_ranks(column.terms.range_of(comparison, bound))
            case Words():
                return self._words(query)
            case Phrase():
                return self._phrase(query)

    def _words(self, query: Words) -> int:
        column = self.columns[query.field]
        wanted = token_ranges(column, query)
        found = self._with_all(column, wanted)
        doubtful = found & column.multiple if len(wanted) > 1 else 0
        for row in rows_of(doubtful):
            if not any(
                all(any(rank in stretch for rank in value) for stretch in wanted)
                for value in column.values_of(row)
            ):
                found &= ~(1 << row)
        return found

    def _phrase(self, query: Phrase) -> int:
        column = self.columns[query.field]
        ranks = [column.terms.find(token) for token in query.tokens]
        if -1 in ranks:
            return 0
        found = self._with_all(column, [range(rank, rank + 1) for rank in ranks])
        if len(ranks) == 1:
            return found
        rows = (row for row in rows_of(found) if occurrences(column, row, ranks))
        return bits_of(rows, self.count)

    def _with_all(self, column: Column, wanted: Sequence[range]) -> int:
        found = self.all_rows
        for stretch in wanted:
            if not found:
                break
            found &= column.with_ranks(stretch)
        return found


def token_ranges(column: Column, query: Words) -> list[range]:
    """The ranks that each token of a clause stands for; the last one may be a prefix."""
    terms = column.terms
    assert isinstance(terms, WordTerms)
    whole = query.tokens[:-1] if query.prefix else query.tokens
    wanted: list[range] = []
    for token in whole:
        rank = terms.find(token)
        wanted.append(range(0) if rank < 0 else range(rank, rank + 1))
    if query.prefix:
        wanted.append(terms.starting_with(query.tokens[-1]))
    return wanted


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
