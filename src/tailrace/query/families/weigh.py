"""Scores of rows from the postings of their tokens, added up in the order of the clauses as everywhere."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from tailrace.query.bind import All, AnyOf, Anywhere, Bound, Clause, Negation, Phrase, Words
from tailrace.query.families.field_column import bits_in
from tailrace.query.packed import rows_of
from tailrace.query.score import Scorer, Target
from tailrace.query.sort import has_text
from tailrace.store.arrow import pc

COMBINATIONS_MAX = 256  # of frequency and length, for each of which there is a set of rows


class TokenRows(NamedTuple):
    """The rows with one token: how often they have it, for all rows; null where they do not."""

    frequencies: Any
    listed: list[int | None]  # the same, as a list
    by_weight: dict[tuple[int, int], int] | None  # rows by frequency and length, if these are few
    once: int  # the rows that have it once


class Weighed(Protocol):
    """Who knows which rows match and what their texts are like."""

    def certain(self, clause: Clause) -> int: ...
    def token_rows(self, field: str, token: str) -> TokenRows: ...
    def text_lengths(self, field: str) -> list[int]: ...


def can_weigh(query: Bound) -> bool:
    """Whether postings are enough, at least for most rows."""
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return all(can_weigh(clause) for clause in clauses)
        case Phrase():
            return len(set(query.tokens)) == len(query.tokens)
        case _:
            return True


def hard_rows(source: Weighed, query: Bound) -> int:
    """The rows in which a phrase may occur more than once: how often, only their records tell.

    Where one of its tokens occurs once, so does the phrase.
    """
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= hard_rows(source, clause)
            return found
        case Phrase(field, tokens) if len(tokens) > 1:
            found = source.certain(query)
            for token in tokens:
                found &= ~source.token_rows(field, token).once if found else 0
            return found
        case _:
            return 0


def combined(frequencies: Any, lengths: Any) -> dict[tuple[int, int], int] | None:
    """The rows of each frequency and length; None if there are too many combinations."""
    keys = pc.add(pc.multiply(frequencies.cast("int64"), 1 << 32), lengths.cast("int64"))
    encoded = keys.dictionary_encode()
    if len(encoded.dictionary) > COMBINATIONS_MAX:
        return None
    found: dict[tuple[int, int], int] = {}
    for place, key in enumerate(encoded.dictionary.to_pylist()):
        found[key >> 32, key & 0xFFFFFFFF] = bits_in(pc.equal(encoded.indices, place))
    return found


def scores_of(source: Weighed, query: Bound, rows: int, scorer: Scorer) -> dict[int, float]:
    scores = dict.fromkeys(rows_of(rows), 0.0)
    _add(source, query, rows, scorer, scores)
    return scores


def _add(source: Weighed, query: Bound, rows: int, scorer: Scorer, scores: dict[int, float]) -> None:
    match query:
        case All(clauses):
            for clause in clauses:
                _add(source, clause, rows, scorer, scores)
        case AnyOf(clauses):
            for clause in clauses:
                if has_text(clause) and (matching := rows & matches(source, clause)):
                    _add(source, clause, matching, scorer, scores)
        case Anywhere(targets):
            best: dict[int, float] = {}
            for target in targets:
                weights = _weights(source, target, rows & source.certain(target), scorer)
                for row, weight in weights.items():
                    if weight > best.get(row, 0.0):
                        best[row] = weight
            for row, weight in best.items():
                scores[row] += weight
        case Words() | Phrase():
            for row, weight in _weights(source, query, rows, scorer).items():
                scores[row] += weight
        case _:
            return


def matches(source: Weighed, query: Bound) -> int:
    """The rows that match a part of a query all of which is certain."""
    match query:
        case All(clauses):
            found = -1
            for clause in clauses:
                found &= matches(source, clause)
            return found
        case AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= matches(source, clause)
            return found
        case Negation(clause):
            return ~matches(source, clause)
        case _:
            return source.certain(query)


def _weights(source: Weighed, clause: Target, rows: int, scorer: Scorer) -> dict[int, float]:
    """The weight of one clause in each row, all of which match it."""
    if not rows:
        return {}
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return dict.fromkeys(rows_of(rows), scorer.boost(clause.field))
    lists = [source.token_rows(clause.field, token).listed for token in clause.tokens]
    lengths = source.text_lengths(clause.field)
    weights: dict[int, float] = {}
    known: dict[tuple[tuple[int, ...], int], float] = {}  # few combinations, many rows
    for row in rows_of(rows):
        often = tuple([found[row] or 0 for found in lists])
        key = ((min(often),) if isinstance(clause, Phrase) else often, lengths[row])
        weight = known.get(key)
        if weight is None:
            weight = known[key] = scorer.weigh(clause, *key)
        weights[row] = weight
    return weights


def heavy_rows(source: Weighed, query: Bound, rows: int, scorer: Scorer, least: float) -> int:
    """The rows, of those that match, that may weigh at least so much; none of those that do is missing."""
    match query:
        case All(clauses):
            weighing = [clause for clause in clauses if has_text(clause)]
            return heavy_rows(source, weighing[0], rows, scorer, least) if len(weighing) == 1 else rows
        case Anywhere(targets):
            heavy = 0
            for target in targets:
                heavy |= _heavy(source, target, rows & source.certain(target), scorer, least)
            return heavy
        case Words() | Phrase():
            return _heavy(source, query, rows, scorer, least)
        case _:
            return rows


def _heavy(source: Weighed, clause: Target, rows: int, scorer: Scorer, least: float) -> int:
    """Rows that match one clause and may weigh so much."""
    if not rows:
        return 0
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return rows if scorer.boost(clause.field) >= least else 0
    [token, *others] = clause.tokens
    is_phrase = isinstance(clause, Phrase) and bool(others)
    by_weight = None if others and not is_phrase else source.token_rows(clause.field, token).by_weight
    if by_weight is None:
        return rows
    heavy = 0
    for (frequency, length), found in by_weight.items():
        # A phrase that is weighed here occurs once, however often its tokens do.
        if found & rows and scorer.weigh(clause, (1 if is_phrase else frequency,), length) >= least:
            heavy |= found
    return heavy & rows
