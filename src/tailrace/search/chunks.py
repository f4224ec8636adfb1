"""Chunks: rows stored by column, matched and scored without decoding records.

The unit of the tail index; scans build chunks as well, for one search.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tailrace.schema.search_config import SearchConfig
from tailrace.search.columns import (
    Column,
    StringDictionary,
    bits_from_rows,
    build_column,
    join_columns,
    rows_from_bits,
)
from tailrace.search.query_language import (
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
from tailrace.search.ranking import (
    ClauseMatches,
    ScoredClause,
    Scorer,
    Statistics,
    TermMatch,
    has_text_clause,
)
from tailrace.search.records import Getter, Value, raw_column


def add_statistics(chunk: Chunk, statistics: Statistics, after: int) -> None:
    """Add the text statistics of a chunk. `after` is the last entry that retention has removed."""
    whole = chunk.first > after
    visible = chunk.rows_after(after)
    for name, field in statistics.items():
        column = chunk.columns[name]
        if whole:
            documents, tokens = column.documents, column.tokens
        else:
            lengths = [column.length_of(row) for row in rows_from_bits(visible)]
            documents, tokens = sum(1 for length in lengths if length), sum(lengths)
        with_token: dict[str, int] = {}
        for token in field.with_token:
            rank = column.terms.find(token)
            if rank < 0:
                continue
            with_token[token] = (
                column.documents_with(rank)
                if whole
                else (column.with_ranks(range(rank, rank + 1)) & visible).bit_count()
            )
        field.add(documents, tokens, with_token)


def explain_row_score(
    chunk: Chunk, query: BoundQuery, row: int, boosts: Mapping[str, float]
) -> list[ClauseMatches]:
    """The terms to score in a matching row: one group for each positive text clause."""
    match query:
        case All(clauses):
            return [group for clause in clauses for group in explain_row_score(chunk, clause, row, boosts)]
        case AnyOf(clauses):
            return [
                group
                for clause in clauses
                if chunk.match(clause) >> row & 1
                for group in explain_row_score(chunk, clause, row, boosts)
            ]
        case Anywhere(targets):
            matching = [one for one in targets if chunk.match(one) >> row & 1]
            return [tuple(_term_match(chunk, one, row, boosts) for one in matching)]
        case Words() | Phrase():
            return [(_term_match(chunk, query, row, boosts),)]
        case _:
            return []


def _term_match(
    chunk: Chunk, clause: ScoredClause, row: int, boosts: Mapping[str, float]
) -> float | TermMatch:
    if isinstance(clause, Equals | StartsWith) or (isinstance(clause, Words) and clause.prefix):
        return boosts.get(clause.field, 1.0)
    column = chunk.columns[clause.field]
    ranks = [column.terms.find(token) for token in clause.tokens]
    if isinstance(clause, Phrase):
        frequencies = (column.phrase(clause.tokens).more.get(row, 1),)
    else:
        frequencies = tuple(map(column.ranks_of(row).count, ranks))
    return TermMatch(clause, frequencies, column.length_of(row))


def score_chunk_rows(chunk: Chunk, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
    """The scores of matching rows, summed in the order of the clauses."""
    scores = dict.fromkeys(rows_from_bits(rows), 0.0)
    _add_scores(chunk, query, rows, scorer, scores)
    return scores


def _add_scores(chunk: Chunk, query: BoundQuery, rows: int, scorer: Scorer, scores: dict[int, float]) -> None:
    match query:
        case All(clauses):
            for clause in clauses:
                _add_scores(chunk, clause, rows, scorer, scores)
        case AnyOf(clauses):
            for clause in clauses:
                matching = rows & chunk.match(clause)
                if matching:
                    _add_scores(chunk, clause, matching, scorer, scores)
        case Anywhere(targets):
            best: dict[int, float] = {}
            for target in targets:
                for row, weight in _clause_scores(chunk, target, rows & chunk.match(target), scorer).items():
                    if weight > best.get(row, 0.0):
                        best[row] = weight
            for row, weight in best.items():
                scores[row] += weight
        case Words() | Phrase():
            for row, weight in _clause_scores(chunk, query, rows, scorer).items():
                scores[row] += weight
        case _:
            return


def _clause_scores(chunk: Chunk, clause: ScoredClause, rows: int, scorer: Scorer) -> dict[int, float]:
    """The scores of one clause in rows that match it."""
    if not rows:
        return {}
    column = chunk.columns[clause.field]
    if isinstance(clause, Phrase):
        often = column.phrase(clause.tokens).more
        return {
            row: scorer.score_clause(clause, (often.get(row, 1),), column.length_of(row))
            for row in rows_from_bits(rows)
        }
    if not isinstance(clause, Words) or clause.prefix:
        return dict.fromkeys(rows_from_bits(rows), scorer.boost(clause.field))
    ranks = [column.terms.find(token) for token in clause.tokens]
    weights: dict[int, float] = {}
    known: dict[tuple[tuple[int, ...], int], float] = {}  # many rows share few combinations
    for row in rows_from_bits(rows):
        own = column.ranks_of(row)
        key = (tuple([own.count(rank) for rank in ranks]), column.length_of(row))
        weight = known.get(key)
        if weight is None:
            weight = known[key] = scorer.score_clause(clause, *key)
        weights[row] = weight
    return weights


def rows_scoring_at_least(chunk: Chunk, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int:
    """The matching rows that may score at least `least`: a superset of those that do."""
    match query:
        case All(clauses):
            scored = [clause for clause in clauses if has_text_clause(clause)]
            return rows_scoring_at_least(chunk, scored[0], rows, scorer, least) if len(scored) == 1 else rows
        case Anywhere(targets):
            candidates = 0
            for target in targets:
                candidates |= _clause_rows_scoring_at_least(
                    chunk, target, rows & chunk.match(target), scorer, least
                )
            return candidates
        case Words() | Phrase():
            return _clause_rows_scoring_at_least(chunk, query, rows, scorer, least)
        case _:
            return rows


def _clause_rows_scoring_at_least(
    chunk: Chunk, clause: ScoredClause, rows: int, scorer: Scorer, least: float
) -> int:
    """The rows matching one clause that may score at least `least`."""
    if not rows:
        return 0
    if isinstance(clause, Equals | StartsWith) or (isinstance(clause, Words) and clause.prefix):
        return rows if scorer.boost(clause.field) >= least else 0
    column = chunk.columns[clause.field]
    by_length = column.by_length(rows)
    if by_length is None or (isinstance(clause, Words) and len(clause.tokens) > 1):
        return rows
    if len(clause.tokens) == 1:
        candidates = rows & column.repeating(column.terms.find(clause.tokens[0]))
    else:
        candidates = rows & bits_from_rows(column.phrase(clause.tokens).more, chunk.count)
    # The other rows have it once.
    for length, found in by_length.items():
        if scorer.score_clause(clause, (1,), length) >= least:
            candidates |= found
    return candidates


class Chunk:
    """Rows in the order of their entries; sets of rows are integers with a bit for each row."""

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

    def rows_after(self, entry: int) -> int:
        """The rows behind an entry."""
        return self.all_rows & ~((1 << bisect_left(self.entries, entry + 1)) - 1)

    # -- IndexedRows ---------------------------------------------------------------------------------------

    def extreme_value(self, name: str, row: int, largest: bool) -> Value | None:
        """The smallest or largest value of a field in a row."""
        return self.columns[name].extreme_value(row, largest)

    def bounds(self, name: str) -> tuple[Value, Value] | None:
        """The smallest and largest value of a field; None if no row has one."""
        terms = self.columns[name].terms
        return (terms[0], terms[len(terms) - 1]) if len(terms) else None

    def rows_in_range(self, name: str, comparison: str, bound: Value) -> int:
        """The rows with a value of a field for which the comparison holds."""
        column = self.columns[name]
        return column.with_ranks(column.terms.range_of(comparison, bound))

    def rows_without(self, name: str) -> int:
        """The rows without a value of a field."""
        return self.all_rows & ~self.columns[name].present

    def add_statistics(self, statistics: Statistics, after: int) -> None:
        add_statistics(self, statistics, after)

    def scores(self, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
        return score_chunk_rows(self, query, rows, scorer)

    def rows_scoring_at_least(self, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int:
        return rows_scoring_at_least(self, query, rows, scorer, least)

    def match(self, query: BoundQuery) -> int:
        """The rows that match."""
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
        ranges = token_ranges(column, query)
        found = self._with_all(column, ranges)
        doubtful = found & column.multiple if len(ranges) > 1 else 0
        for row in rows_from_bits(doubtful):
            if not any(
                all(any(rank in ranks for rank in value) for ranks in ranges)
                for value in column.values_of(row)
            ):
                found &= ~(1 << row)
        return found

    def _with_all(self, column: Column, ranges: Sequence[range]) -> int:
        found = self.all_rows
        for ranks in ranges:
            if not found:
                break
            found &= column.with_ranks(ranks)
        return found


def build_columns(
    config: SearchConfig, gets: Mapping[str, Getter | None], members: Sequence[Any], *, lists: bool = True
) -> dict[str, Column]:
    """The columns of fields over decoded records. `gets` reads the raw value of each field."""
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
    """The ranks of terms that match each token of a clause; the last token may be a prefix."""
    terms = column.terms
    assert isinstance(terms, StringDictionary)
    whole = query.tokens[:-1] if query.prefix else query.tokens
    ranges: list[range] = []
    for token in whole:
        rank = terms.find(token)
        ranges.append(range(0) if rank < 0 else range(rank, rank + 1))
    if query.prefix:
        ranges.append(terms.starting_with(query.tokens[-1]))
    return ranges
