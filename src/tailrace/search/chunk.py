"""A stretch of a stream's newest rows, taken apart by field: the unit of the tail index."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Compares,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.chunk_score import add_statistics, rows_scoring_at_least, score_chunk_rows
from tailrace.search.column import Column
from tailrace.search.column_build import build_column, join_columns
from tailrace.search.members import Getter, raw_column
from tailrace.search.packed import StringDictionary, rows_from_bits
from tailrace.search.score import Scorer, Statistics
from tailrace.search.values import Value


class Chunk:
    """Rows in the order of their entries. Every row knows its entry: none is found by counting."""

    def __init__(self, entries: Iterable[int], columns: dict[str, Column]) -> None:
        self.entries: array[int] = array("Q", entries)
        self.count = len(self.entries)
        self.all_rows = (1 << self.count) - 1
        self.columns = columns

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

    # -- what a search asks of a source --------------------------------------------------------------------

    def edge(self, name: str, row: int, largest: bool) -> Value | None:
        """The smallest or largest value of a field in a row."""
        return self.columns[name].edge(row, largest)

    def bounds(self, name: str) -> tuple[Value, Value] | None:
        """The smallest and largest value of a field; None if no row has one."""
        terms = self.columns[name].terms
        return (terms[0], terms[len(terms) - 1]) if len(terms) else None

    def within(self, name: str, comparison: str, bound: Value) -> int:
        """The rows with a value of a field on one side of a bound."""
        column = self.columns[name]
        return column.with_ranks(column.terms.range_of(comparison, bound))

    def missing(self, name: str) -> int:
        """The rows without a value of a field."""
        return self.all_rows & ~self.columns[name].present

    def add_statistics(self, statistics: Statistics, after: int) -> None:
        add_statistics(self, statistics, after)

    def scores(self, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
        return score_chunk_rows(self, query, rows, scorer)

    def heavy(self, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int:
        return rows_scoring_at_least(self, query, rows, scorer, least)

    def match(self, query: BoundQuery) -> int:
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
                assert isinstance(column.terms, StringDictionary)
                return column.with_ranks(column.terms.starting_with(prefix))
            case Compares(field, comparison, bound):
                column = self.columns[field]
                return column.with_ranks(column.terms.range_of(comparison, bound))
            case Words():
                return self._words(query)
            case Phrase(field, tokens):
                return self.columns[field].phrase(tokens).rows

    def _words(self, query: Words) -> int:
        column = self.columns[query.field]
        wanted = token_ranges(column, query)
        found = self._with_all(column, wanted)
        doubtful = found & column.multiple if len(wanted) > 1 else 0
        for row in rows_from_bits(doubtful):
            if not any(
                all(any(rank in stretch for rank in value) for stretch in wanted)
                for value in column.values_of(row)
            ):
                found &= ~(1 << row)
        return found

    def _with_all(self, column: Column, wanted: Sequence[range]) -> int:
        found = self.all_rows
        for stretch in wanted:
            if not found:
                break
            found &= column.with_ranks(stretch)
        return found


def build_columns(
    config: SearchConfig, gets: Mapping[str, Getter | None], members: Sequence[Any], *, lists: bool = True
) -> dict[str, Column]:
    """The columns of some fields over decoded records, each with what gets it out of them."""
    nothing: list[object] = [None] * len(members)
    return {
        name: build_column(
            config.fields[name], nothing if get is None else raw_column(members, get), lists=lists
        )
        for name, get in gets.items()
    }


def join_chunks(config: SearchConfig, chunks: Sequence[Chunk]) -> Chunk:
    columns = {
        name: join_columns(field, [chunk.columns[name] for chunk in chunks])
        for name, field in config.fields.items()
    }
    return Chunk(chain.from_iterable(chunk.entries for chunk in chunks), columns)


def token_ranges(column: Column, query: Words) -> list[range]:
    """The ranks that each token of a clause stands for; the last one may be a prefix."""
    terms = column.terms
    assert isinstance(terms, StringDictionary)
    whole = query.tokens[:-1] if query.prefix else query.tokens
    wanted: list[range] = []
    for token in whole:
        rank = terms.find(token)
        wanted.append(range(0) if rank < 0 else range(rank, rank + 1))
    if query.prefix:
        wanted.append(terms.starting_with(query.tokens[-1]))
    return wanted
