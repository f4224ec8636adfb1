"""Statistics and scores of chunks: from their columns, without the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Equals, Phrase, StartsWith, Words
from tailrace.search.packed import bits_from_rows, rows_from_bits
from tailrace.search.score import ClauseMatches, ScoredClause, Scorer, Statistics, TermMatch
from tailrace.search.sort import has_text_clause

if TYPE_CHECKING:
    from tailrace.search.chunk import Chunk


def add_statistics(chunk: Chunk, statistics: Statistics, after: int) -> None:
    """Counts a chunk in; `after` is the last entry that retention has taken."""
    whole = chunk.first > after
    kept = chunk.after(after)
    for name, field in statistics.items():
        column = chunk.columns[name]
        if whole:
            documents, tokens = column.documents, column.tokens
        else:
            lengths = [column.length_of(row) for row in rows_from_bits(kept)]
            documents, tokens = sum(1 for length in lengths if length), sum(lengths)
        with_token: dict[str, int] = {}
        for token in field.with_token:
            rank = column.terms.find(token)
            if rank < 0:
                continue
            with_token[token] = (
                column.documents_with(rank)
                if whole
                else (column.with_ranks(range(rank, rank + 1)) & kept).bit_count()
            )
        field.add(documents, tokens, with_token)


def explain_row_score(
    chunk: Chunk, query: BoundQuery, row: int, boosts: Mapping[str, float]
) -> list[ClauseMatches]:
    """What weighs in a row that matches: one group for each positive clause with words in it."""
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
    """The scores of matching rows, added up in the order of the clauses."""
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
    """The weight of one clause in each row, all of which match it."""
    if not rows:
        return {}
    column = chunk.columns[clause.field]
    if isinstance(clause, Phrase):
        often = column.phrase(clause.tokens).more
        return {
            row: scorer.weigh(clause, (often.get(row, 1),), column.length_of(row))
            for row in rows_from_bits(rows)
        }
    if not isinstance(clause, Words) or clause.prefix:
        return dict.fromkeys(rows_from_bits(rows), scorer.boost(clause.field))
    ranks = [column.terms.find(token) for token in clause.tokens]
    weights: dict[int, float] = {}
    known: dict[tuple[tuple[int, ...], int], float] = {}  # few combinations, many rows
    for row in rows_from_bits(rows):
        own = column.ranks_of(row)
        key = (tuple([own.count(rank) for rank in ranks]), column.length_of(row))
        weight = known.get(key)
        if weight is None:
            weight = known[key] = scorer.weigh(clause, *key)
        weights[row] = weight
    return weights


def rows_scoring_at_least(chunk: Chunk, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int:
    """The rows, of those that match, that may weigh at least so much; none of those that do is missing."""
    match query:
        case All(clauses):
            weighing = [clause for clause in clauses if has_text_clause(clause)]
            return (
                rows_scoring_at_least(chunk, weighing[0], rows, scorer, least) if len(weighing) == 1 else rows
            )
        case Anywhere(targets):
            heavy = 0
            for target in targets:
                heavy |= _clause_rows_scoring_at_least(
                    chunk, target, rows & chunk.match(target), scorer, least
                )
            return heavy
        case Words() | Phrase():
            return _clause_rows_scoring_at_least(chunk, query, rows, scorer, least)
        case _:
            return rows


def _clause_rows_scoring_at_least(
    chunk: Chunk, clause: ScoredClause, rows: int, scorer: Scorer, least: float
) -> int:
    """Rows that match one clause and may weigh so much."""
    if not rows:
        return 0
    if isinstance(clause, Equals | StartsWith) or (isinstance(clause, Words) and clause.prefix):
        return rows if scorer.boost(clause.field) >= least else 0
    column = chunk.columns[clause.field]
    by_length = column.by_length(rows)
    if by_length is None or (isinstance(clause, Words) and len(clause.tokens) > 1):
        return rows
    if len(clause.tokens) == 1:
        heavy = rows & column.repeating(column.terms.find(clause.tokens[0]))
    else:
        heavy = rows & bits_from_rows(column.phrase(clause.tokens).more, chunk.count)
    # The others have it once.
    for length, found in by_length.items():
        if scorer.weigh(clause, (1,), length) >= least:
            heavy |= found
    return heavy
