"""The order of hits: sort keys, BM25 scores and the best hits of a page.

Every order ends with the offset, so no two hits tie. Chunks, index files and scans provide term frequencies,
lengths and counts; only this module computes scores from them, in one order of additions, so that a score
does not depend on where a row was found.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import total_ordering
from math import inf
from typing import Generic, NamedTuple, TypeVar, cast

from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.schema.json_values import invalid_request, shorten
from tailrace.schema.search_config import SearchConfig
from tailrace.search.query_language import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Equals,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.records import INT64_MAX, Value

SORTS_MAX = 64

SortValue = str | int | float | None
SortRank = tuple[object, ...]
T = TypeVar("T")


class SortKey(NamedTuple):
    """`kind` is `score`, `offset` or the kind of the field."""

    name: str
    kind: str
    descending: bool


SORT_BY_SCORE = SortKey("_score", "score", True)
SORT_BY_OFFSET = SortKey("offset", "offset", True)


def parse_sort(
    requested: Sequence[str] | None, query: BoundQuery, config: SearchConfig
) -> tuple[SortKey, ...]:
    """The effective sort: the requested keys or the default, with the offset as last key."""
    if not requested:
        primary = config.primary_timestamp_field
        if not has_text_clause(query):
            return (SORT_BY_OFFSET,)
        dates = () if primary is None else (SortKey(primary, "date", True),)
        return (SORT_BY_SCORE, *dates, SORT_BY_OFFSET)
    keys = tuple(_key(text, config) for text in requested)
    return keys if any(key.kind == "offset" for key in keys) else (*keys, SORT_BY_OFFSET)


def _key(text: str, config: SearchConfig) -> SortKey:
    name, colon, direction = text.partition(":")
    if colon and direction not in ("asc", "desc"):
        raise invalid_request(f"invalid sort direction for {shorten(name)}")
    descending = direction != "asc"
    if name in ("_score", "offset"):
        return SortKey(name, name.removeprefix("_"), descending)
    resolved = config.resolve(name)
    if resolved is None:
        raise invalid_request(f"unknown sort field {shorten(name)}")
    field = config.fields[resolved]
    if not field.sortable and resolved != config.primary_timestamp_field:
        raise invalid_request(f"search field {shorten(name)} is not sortable")
    return SortKey(resolved, field.kind, descending)


def has_text_clause(query: BoundQuery) -> bool:
    """Whether some clause is on a text field, or names no field."""
    match query:
        case All(clauses) | AnyOf(clauses):
            return any(has_text_clause(clause) for clause in clauses)
        case Negation(clause):
            return has_text_clause(clause)
        case _:
            return isinstance(query, Words | Phrase | Anywhere)


@total_ordering
class ReversedText:
    """A string in descending order; a missing one comes first."""

    __slots__ = ("word",)

    def __init__(self, word: str | None) -> None:
        self.word = word

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReversedText) and self.word == other.word

    def __hash__(self) -> int:
        return hash(self.word)

    def __lt__(self, other: ReversedText) -> bool:
        if self.word is None or other.word is None:
            return self.word is None and other.word is not None
        return self.word > other.word


def sort_rank_part(key: SortKey, value: SortValue) -> object:
    """The sort value in a form that compares ascending; a missing value is greater than any."""
    if key.kind == "keyword":
        if key.descending:
            return ReversedText(cast("str | None", value))
        return (1, "") if value is None else (0, value)
    number = inf if value is None else cast("int | float", value)
    return -number if key.descending else number


def sort_rank(keys: Sequence[SortKey], values: Sequence[SortValue]) -> SortRank:
    """The position of a hit in the order. In `values` the entry number stands for the offset."""
    return tuple(sort_rank_part(key, value) for key, value in zip(keys, values, strict=True))


def to_sort_value(value: Value | None) -> SortValue:
    return int(value) if isinstance(value, bool) else value


def parse_search_after(value: object, keys: Sequence[SortKey]) -> tuple[SortValue, ...]:
    """Parse `search_after`: the sort values of a hit."""
    if not isinstance(value, list):
        raise invalid_request("search_after must be an array")
    values = cast("list[object]", value)
    if len(values) != len(keys):
        raise invalid_request(f"search_after must have {len(keys)} values, one for each sort key")
    return tuple(_parse_after_value(index, keys[index], value) for index, value in enumerate(values))


def _parse_after_value(index: int, key: SortKey, value: object) -> SortValue:
    wrong = invalid_request(f"search_after[{index}] has the wrong type")
    if value is None:
        return None
    if key.kind == "offset":
        if not isinstance(value, str):
            raise wrong
        try:
            return offsets.parse_offset(value)[1]
        except TailraceError:
            raise wrong from None
    if key.kind == "keyword":
        if not isinstance(value, str):
            raise wrong
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong
    if key.kind in ("score", "float"):
        return value
    if isinstance(value, float):
        if not value.is_integer() or abs(value) > INT64_MAX:
            raise wrong
        return int(value)
    return value


class TopHits(Generic[T]):
    """The first hits of an order, sorted. Holds one more than a page, to tell whether others follow."""

    def __init__(self, size: int, after: SortRank | None) -> None:
        self._room = size + 1
        self._after = after
        self._ranks: list[SortRank] = []
        self.hits: list[T] = []
        self.peak = 0

    @property
    def full(self) -> bool:
        return len(self._ranks) == self._room

    @property
    def worst(self) -> SortRank | None:
        """The rank that a hit must precede to be added; None while there is room."""
        return self._ranks[-1] if self.full else None

    def wants(self, rank: SortRank) -> bool:
        if self._after is not None and rank <= self._after:
            return False
        return not self.full or rank < self._ranks[-1]

    def add(self, rank: SortRank, hit: T) -> None:
        """Insert a hit for which `wants` was true."""
        at = bisect_left(self._ranks, rank)
        self._ranks.insert(at, rank)
        self.hits.insert(at, hit)
        self.peak = max(self.peak, len(self.hits))
        if len(self._ranks) > self._room:
            self._ranks.pop()
            self.hits.pop()


BM25_K1 = 1.2
BM25_B = 0.75

ScoredClause = Equals | StartsWith | Words | Phrase


class FieldStatistics:
    """BM25 statistics of one text field: rows with a token, tokens in all, rows with each scored token."""

    __slots__ = ("documents", "tokens", "with_token")

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.documents = 0
        self.tokens = 0
        self.with_token: dict[str, int] = dict.fromkeys(tokens, 0)

    def add(self, documents: int, tokens: int, with_token: Mapping[str, int]) -> None:
        self.documents += documents
        self.tokens += tokens
        for token, count in with_token.items():
            self.with_token[token] += count


Statistics = dict[str, FieldStatistics]


class TermMatch(NamedTuple):
    """A text clause in a row: frequency of each token (or of the phrase), and length of the text."""

    clause: Words | Phrase
    frequencies: tuple[int, ...]
    length: int


ClauseMatches = tuple[float | TermMatch, ...]  # alternatives: the best one counts


def scored_tokens(query: BoundQuery) -> dict[str, set[str]]:
    """The tokens by field that contribute to the score."""
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
    """Scores matches by the statistics of a snapshot."""

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

    def score_clause(self, clause: Words | Phrase, frequencies: Sequence[int], length: int) -> float:
        """The score of one matching text clause."""
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
            total += max(self.score_clause(*one) if isinstance(one, TermMatch) else one for one in group)
        return total


def _saturated(frequency: int, norm: float) -> float:
    return frequency * (BM25_K1 + 1) / (frequency + norm)
