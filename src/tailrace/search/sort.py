"""The order of hits: by score, by offset, by fields. Every order ends with the offset, so no two hits tie."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import total_ordering
from math import inf
from typing import Generic, NamedTuple, TypeVar, cast

from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.schema.body import invalid_request, shorten
from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Negation, Phrase, Words
from tailrace.search.values import INT64_MAX, Value

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


def parse_sort(given: Sequence[str] | None, query: BoundQuery, config: SearchConfig) -> tuple[SortKey, ...]:
    """The effective sort: what was asked for, or the default, and the offset at its end."""
    if not given:
        primary = config.primary_timestamp_field
        if not has_text_clause(query):
            return (SORT_BY_OFFSET,)
        dates = () if primary is None else (SortKey(primary, "date", True),)
        return (SORT_BY_SCORE, *dates, SORT_BY_OFFSET)
    keys = tuple(_key(text, config) for text in given)
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
    """Whether some clause looks into texts, or names no field."""
    match query:
        case All(clauses) | AnyOf(clauses):
            return any(has_text_clause(clause) for clause in clauses)
        case Negation(clause):
            return has_text_clause(clause)
        case _:
            return isinstance(query, Words | Phrase | Anywhere)


@total_ordering
class ReversedText:
    """A word that sorts before smaller ones; a missing one comes first."""

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
    """What compares in the place of one sort value: smaller comes first, missing is greater than any."""
    if key.kind == "keyword":
        if key.descending:
            return ReversedText(cast("str | None", value))
        return (1, "") if value is None else (0, value)
    number = inf if value is None else cast("int | float", value)
    return -number if key.descending else number


def sort_rank(keys: Sequence[SortKey], values: Sequence[SortValue]) -> SortRank:
    """`values` hold the entry's number in the place of the offset."""
    return tuple(sort_rank_part(key, value) for key, value in zip(keys, values, strict=True))


def to_sort_value(value: Value | None) -> SortValue:
    return int(value) if isinstance(value, bool) else value


def parse_search_after(given: object, keys: Sequence[SortKey]) -> tuple[SortValue, ...]:
    """`search_after`: a position in the order, of the types that hits show."""
    if not isinstance(given, list):
        raise invalid_request("search_after must be an array")
    values = cast("list[object]", given)
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
    """The first so many hits of an order, kept sorted; one more than a page tells whether others follow."""

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
        """A hit must come before this one to be kept."""
        return self._ranks[-1] if self.full else None

    def wants(self, rank: SortRank) -> bool:
        if self._after is not None and rank <= self._after:
            return False
        return not self.full or rank < self._ranks[-1]

    def add(self, rank: SortRank, hit: T) -> None:
        """Keeps a hit that is wanted."""
        at = bisect_left(self._ranks, rank)
        self._ranks.insert(at, rank)
        self.hits.insert(at, hit)
        self.peak = max(self.peak, len(self.hits))
        if len(self._ranks) > self._room:
            self._ranks.pop()
            self.hits.pop()
