"""Scores of rows from the postings of their tokens, added up in the order of the clauses as everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Clause, Negation, Phrase, Words
from tailrace.search.numpy_arrays import bits_from_row_array, np
from tailrace.search.packed import rows_from_bits
from tailrace.search.score import ScoredClause, Scorer
from tailrace.search.sort import has_text_clause

SCORE_TABLE_MAX = 1 << 16  # numbers up to here are told apart with a table; larger ones are sorted


class TokenPostings:
    """The rows with one token, ascending; how often each has it, and how long its text is."""

    def __init__(self, rows: Any, frequencies: Any, lengths: Any) -> None:
        self.rows = rows
        self.frequencies = frequencies
        self.lengths = lengths

    def often(self, rows: Any) -> Any:
        """How often each of some rows has the token."""
        if not len(self.rows):
            return np.zeros(len(rows), np.int64)
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[places] == rows, self.frequencies[places], 0)

    def once(self, count: int) -> int:
        """The set of rows that have it once."""
        return bits_from_row_array(self.rows[self.frequencies == 1], count)

    @cached_property
    def _kinds(self) -> tuple[list[tuple[int, int]], Any]:
        """The different pairs of frequency and length, and which of them each row has."""
        width = int(self.lengths.max()) + 1
        listed, places = _distinct_numbers(self.frequencies.astype(np.int64) * width + self.lengths)
        return [divmod(kind, width) for kind in listed.tolist()], places

    def heavy(self, weigh: Callable[[int, int], float], least: float, count: int) -> int:
        """The set of rows whose frequency and length weigh at least so much."""
        if not len(self.rows):
            return 0
        kinds, places = self._kinds
        enough = np.array([weigh(*kind) >= least for kind in kinds])
        return bits_from_row_array(self.rows[enough[places]], count)


def _distinct_numbers(numbers: Any) -> tuple[Any, Any]:
    """The different ones of some numbers, and the place among them of each."""
    largest = int(numbers.max())
    if largest >= SCORE_TABLE_MAX:
        return np.unique(numbers, return_inverse=True)
    listed = np.flatnonzero(np.bincount(numbers))
    table = np.zeros(largest + 1, np.intp)
    table[listed] = np.arange(len(listed))
    return listed, table[numbers]


class PostingsSource(Protocol):
    """Who knows which rows match and what their texts are like."""

    @property
    def count(self) -> int:
        """How many rows there are."""
        ...

    def certain(self, clause: Clause) -> int: ...
    def token_rows(self, field: str, token: str) -> TokenPostings: ...
    def text_lengths(self, field: str) -> Any:
        """The tokens in the text of each row."""
        ...


def can_score_from_postings(query: BoundQuery) -> bool:
    """Whether postings are enough, at least for most rows."""
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return all(can_score_from_postings(clause) for clause in clauses)
        case Phrase():
            return len(set(query.tokens)) == len(query.tokens)
        case _:
            return True


def rows_needing_records(source: PostingsSource, query: BoundQuery) -> int:
    """The rows in which a phrase may occur more than once: how often, only their records tell.

    Where one of its tokens occurs once, so does the phrase.
    """
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= rows_needing_records(source, clause)
            return found
        case Phrase(field, tokens) if len(tokens) > 1:
            found = source.certain(query)
            for token in tokens:
                found &= ~source.token_rows(field, token).once(source.count) if found else 0
            return found
        case _:
            return 0


def score_rows(source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
    scores = dict.fromkeys(rows_from_bits(rows), 0.0)
    _add_scores(source, query, rows, scorer, scores)
    return scores


def _add_scores(
    source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer, scores: dict[int, float]
) -> None:
    match query:
        case All(clauses):
            for clause in clauses:
                _add_scores(source, clause, rows, scorer, scores)
        case AnyOf(clauses):
            for clause in clauses:
                if has_text_clause(clause) and (matching := rows & certain_rows(source, clause)):
                    _add_scores(source, clause, matching, scorer, scores)
        case Anywhere(targets):
            best: dict[int, float] = {}
            for target in targets:
                weights = _clause_scores(source, target, rows & source.certain(target), scorer)
                for row, weight in weights.items():
                    if weight > best.get(row, 0.0):
                        best[row] = weight
            for row, weight in best.items():
                scores[row] += weight
        case Words() | Phrase():
            for row, weight in _clause_scores(source, query, rows, scorer).items():
                scores[row] += weight
        case _:
            return


def certain_rows(source: PostingsSource, query: BoundQuery) -> int:
    """The rows that match a part of a query all of which is certain."""
    match query:
        case All(clauses):
            found = -1
            for clause in clauses:
                found &= certain_rows(source, clause)
            return found
        case AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= certain_rows(source, clause)
            return found
        case Negation(clause):
            return ~certain_rows(source, clause)
        case _:
            return source.certain(query)


def _clause_scores(
    source: PostingsSource, clause: ScoredClause, rows: int, scorer: Scorer
) -> dict[int, float]:
    """The weight of one clause in each row, all of which match it."""
    if not rows:
        return {}
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return dict.fromkeys(rows_from_bits(rows), scorer.boost(clause.field))
    listed = rows_from_bits(rows)
    places = np.array(listed)
    often = np.stack([source.token_rows(clause.field, token).often(places) for token in clause.tokens])
    if isinstance(clause, Phrase):
        often = often.min(axis=0, keepdims=True)
    frequencies: list[list[int]] = often.T.tolist()
    lengths: list[int] = source.text_lengths(clause.field)[places].tolist()
    weights: dict[int, float] = {}
    known: dict[tuple[tuple[int, ...], int], float] = {}  # few combinations, many rows
    for row, found, length in zip(listed, frequencies, lengths, strict=True):
        key = (tuple(found), length)
        weight = known.get(key)
        if weight is None:
            weight = known[key] = scorer.weigh(clause, *key)
        weights[row] = weight
    return weights


def rows_scoring_at_least(
    source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer, least: float
) -> int:
    """The rows, of those that match, that may weigh at least so much; none of those that do is missing."""
    match query:
        case All(clauses):
            weighing = [clause for clause in clauses if has_text_clause(clause)]
            return (
                rows_scoring_at_least(source, weighing[0], rows, scorer, least)
                if len(weighing) == 1
                else rows
            )
        case Anywhere(targets):
            heavy = 0
            for target in targets:
                heavy |= _clause_rows_scoring_at_least(
                    source, target, rows & source.certain(target), scorer, least
                )
            return heavy
        case Words() | Phrase():
            return _clause_rows_scoring_at_least(source, query, rows, scorer, least)
        case _:
            return rows


def _clause_rows_scoring_at_least(
    source: PostingsSource, clause: ScoredClause, rows: int, scorer: Scorer, least: float
) -> int:
    """Rows that match one clause and may weigh so much."""
    if not rows:
        return 0
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return rows if scorer.boost(clause.field) >= least else 0
    [token, *others] = clause.tokens
    is_phrase = isinstance(clause, Phrase) and bool(others)
    if others and not is_phrase:
        return rows

    def weigh(frequency: int, length: int) -> float:
        # A phrase that is weighed here occurs once, however often its tokens do.
        return scorer.weigh(clause, (1 if is_phrase else frequency,), length)

    return source.token_rows(clause.field, token).heavy(weigh, least, source.count) & rows
