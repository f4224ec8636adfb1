"""BM25 over texts: statistics of all visible rows, and the weight of one row's matches.

Every tier brings term frequencies, lengths and counts; only this file makes scores of them, in one order of
additions, so that a score does not depend on where a row was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Equals, Phrase, StartsWith, Words

BM25_K1 = 1.2
BM25_B = 0.75

ScoredClause = Equals | StartsWith | Words | Phrase


class FieldStatistics:
    """Of one text field: rows with a token, tokens in all, rows with each token that is asked for."""

    __slots__ = ("documents", "tokens", "with_token")

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        self.documents = 0
        self.tokens = 0
        self.with_token: dict[str, int] = dict.fromkeys(wanted, 0)

    def add(self, documents: int, tokens: int, with_token: Mapping[str, int]) -> None:
        self.documents += documents
        self.tokens += tokens
        for token, count in with_token.items():
            self.with_token[token] += count


Statistics = dict[str, FieldStatistics]


class TermMatch(NamedTuple):
    """A text clause in a row: how often each token (or the phrase) occurs, and how long the text is."""

    clause: Words | Phrase
    frequencies: tuple[int, ...]
    length: int


ClauseMatches = tuple[float | TermMatch, ...]  # of these the best counts


def scored_tokens(query: BoundQuery) -> dict[str, set[str]]:
    """The tokens by field that weigh something in this query."""
    found: dict[str, set[str]] = {}
    for clause in _scored(query):
        found.setdefault(clause.field, set()).update(clause.tokens)
    return found


def _scored(query: BoundQuery) -> list[Words | Phrase]:
    match query:
        case All(clauses) | AnyOf(clauses):
            return [found for clause in clauses for found in _scored(clause)]
        case Anywhere(targets):
            return [found for target in targets for found in _scored(target)]
        case Phrase():
            return [query]
        case Words():
            return [] if query.prefix else [query]
        case _:
            return []


def field_boosts(config: SearchConfig) -> dict[str, float]:
    return {entry.field: float(entry.boost) for entry in config.default_fields}


class Scorer:
    """Weighs matches by the statistics of a snapshot."""

    def __init__(self, config: SearchConfig, statistics: Statistics) -> None:
        self._boosts = field_boosts(config)
        self._average: dict[str, float] = {}
        self._idf: dict[tuple[str, str], float] = {}
        for name, field in statistics.items():
            self._average[name] = field.tokens / field.documents if field.documents else 1.0
            for token, count in field.with_token.items():
                rarity = (field.documents - count + 0.5) / (count + 0.5)
                self._idf[name, token] = math.log(1 + rarity)

    def boost(self, field: str) -> float:
        return self._boosts.get(field, 1.0)

    def weigh(self, clause: Words | Phrase, frequencies: Sequence[int], length: int) -> float:
        """The score of one text clause that matches."""
        field = clause.field
        norm = BM25_K1 * (1 - BM25_B + BM25_B * length / self._average[field])
        if isinstance(clause, Phrase):
            idf = sum(self._idf[field, token] for token in clause.tokens)
            return self.boost(field) * idf * _saturated(frequencies[0], norm)
        total = 0.0
        for token, frequency in zip(clause.tokens, frequencies, strict=True):
            total += self._idf[field, token] * _saturated(frequency, norm)
        return self.boost(field) * total

    def score(self, groups: Sequence[ClauseMatches]) -> float:
        total = 0.0
        for group in groups:
            total += max(self.weigh(*one) if isinstance(one, TermMatch) else one for one in group)
        return total


def _saturated(frequency: int, norm: float) -> float:
    return frequency * (BM25_K1 + 1) / (frequency + norm)
