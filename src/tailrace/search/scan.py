"""Scans: payloads are prefiltered by required bytes, decoded in batches and matched.

The prefilter excludes most payloads without decoding them: it searches for words that a match must contain.
Only words of ASCII letters, digits and a few characters that JSON never has to escape are used. A payload
that escapes them nevertheless (`\u0041`), or has another letter with the same lower case, is always decoded.

Each batch becomes a chunk of the queried fields, which is dropped after the search. Scans run on a thread and
check the deadline between two batches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from tailrace.schema.search_config import Field, SearchConfig
from tailrace.search.chunks import Chunk, build_columns, explain_row_score
from tailrace.search.columns import build_column
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
from tailrace.search.ranking import ClauseMatches, FieldStatistics, Statistics, field_boosts, scored_tokens
from tailrace.search.records import RecordDecoder, RecordView, Value, raw_column, timestamp_bounds
from tailrace.search.requests import SearchRequest

_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
PREFILTER_WORDS_MAX = 8

# U+212A KELVIN SIGN and U+0130 are the only letters outside ASCII whose lower case begins with an ASCII one.
_ODD_LOWER = ("\u212a".encode(), "\u0130".encode())


class PayloadPrefilter:
    """Words of which a matching payload contains at least one; in lower case if `lower`."""

    __slots__ = ("_lower", "_words")

    def __init__(self, words: Sequence[bytes], lower: bool) -> None:
        self._words = tuple(words)
        self._lower = lower

    def may_match(self, payload: bytes) -> bool:
        text = payload.lower() if self._lower else payload
        for word in self._words:
            if word in text:
                return True
        if b"\\" in payload and b"\\u" in payload:  # a single byte is found much faster than two
            return True
        return self._lower and not payload.isascii() and any(odd in payload for odd in _ODD_LOWER)


def build_prefilter(query: BoundQuery, config: SearchConfig) -> PayloadPrefilter | None:
    """The prefilter of a query; None if no words are required."""
    found = _required_words(query, config)
    if found is None or len(found) > PREFILTER_WORDS_MAX:
        return None
    lower = any(is_lower for _, is_lower in found)
    return PayloadPrefilter([(word.lower() if lower else word).encode() for word, _ in found], lower)


def _required_words(query: BoundQuery, config: SearchConfig) -> set[tuple[str, bool]] | None:
    """Words of which a match contains at least one, each with whether case is ignored."""
    match query:
        case All(clauses):
            # One clause is enough: the one with the fewest and longest words.
            choices = [found for clause in clauses if (found := _required_words(clause, config)) is not None]
            return min(choices, key=_cost, default=None)
        case AnyOf(clauses) | Anywhere(clauses):
            union: set[tuple[str, bool]] = set()
            for clause in clauses:
                found = _required_words(clause, config)
                if found is None:
                    return None
                union |= found
            return union
        case Equals(field, value) if isinstance(value, str):
            return _safe_word(value, config.fields[field].normalizer == "lowercase_v1")
        case StartsWith(field, prefix):
            return _safe_word(prefix, config.fields[field].normalizer == "lowercase_v1")
        case Words(_, tokens, _) | Phrase(_, tokens):
            safe = [token for token in tokens if token.isascii()]
            return _safe_word(max(safe, key=len), True) if safe else None
        case _:
            return None


def _safe_word(text: str, lower: bool) -> set[tuple[str, bool]] | None:
    return {(text, lower)} if _SAFE.fullmatch(text) else None


def _cost(found: set[tuple[str, bool]]) -> tuple[int, int]:
    return len(found), -min(len(word) for word, _ in found)


ROWS_AT_ONCE = 512  # between two checks of the deadline; far less than 20 ms of work
BYTES_AT_ONCE = 1 << 20

Payload = bytes | memoryview


class ScannedRows(Chunk):
    """Rows that were decoded for one search."""


def query_fields(query: BoundQuery) -> set[str]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {field for clause in clauses for field in query_fields(clause)}
        case Negation(clause):
            return query_fields(clause)
        case _:
            return {query.field}


class Scanner:
    """Decodes the payloads that may match a search, and builds columns of them."""

    def __init__(self, view: RecordView, request: SearchRequest) -> None:
        self._view = view
        self._query = request.query
        self._first_current = view.first_current()
        self._prefilter = build_prefilter(request.query, view.config)
        self._boosts = field_boosts(view.config)
        self.scored_tokens = scored_tokens(request.query)
        self._fields = query_fields(request.query)
        self._fields |= {key.name for key in request.sort if key.kind not in ("score", "offset")}
        self._columns = self._fields | set(self.scored_tokens)
        self.decoded = 0

    # Not needed if indexes decide everything.

    @cached_property
    def _match_decoder(self) -> RecordDecoder:
        return RecordDecoder(self._view, sorted(self._fields))

    @cached_property
    def _count_decoder(self) -> RecordDecoder:
        primary = self._view.primary
        return RecordDecoder(
            self._view, sorted(self._columns if primary is None else {*self._columns, primary})
        )

    def new_statistics(self) -> Statistics:
        return {name: FieldStatistics(sorted(tokens)) for name, tokens in self.scored_tokens.items()}

    def scan(
        self,
        entries: Sequence[int],
        payloads: Sequence[Payload],
        counts: PieceStatistics | None,
        deadline: float,
    ) -> Iterator[tuple[int, ScannedRows | None]]:
        """Decode payloads in batches. Yields how many are done, and the rows of a batch that may match.

        Ends early at the deadline. With `counts` all rows are decoded, and their statistics added to it.
        """
        if counts is None:
            yield from self._scan_candidates(entries, payloads, deadline)
            return
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return
            members = self._count_decoder.all_members(entries[begin:end], payloads[begin:end])
            chunk = self._chunk(self._count_decoder, entries[begin:end], members)
            chunk.add_statistics(counts.statistics, 0)
            self._add_bounds(members, counts)
            yield end, chunk

    def _add_bounds(self, members: Sequence[Any], counts: PieceStatistics) -> None:
        primary = self._view.primary
        get = None if primary is None else self._count_decoder.gets[primary]
        if primary is not None and get is not None:
            bounds = value_bounds(self._view.config.fields[primary], raw_column(members, get))
            if bounds is not None:
                counts.add_bounds(bounds)

    def _scan_candidates(
        self, entries: Sequence[int], payloads: Sequence[Payload], deadline: float
    ) -> Iterator[tuple[int, ScannedRows | None]]:
        """As `scan`, without the rows that the prefilter excludes."""
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return
            rows = self._may_match(entries[begin:end], payloads[begin:end])
            if not rows:
                yield end, None
                continue
            numbers = [entries[begin + row] for row in rows]
            members = self._match_decoder.all_members(numbers, [payloads[begin + row] for row in rows])
            yield end, self._chunk(self._match_decoder, numbers, members)

    def explain_payload(self, entry: int, payload: Payload) -> list[ClauseMatches]:
        """The terms to score in a matching record."""
        members = self._match_decoder.all_members([entry], [payload])
        return self.explain(self._chunk(self._match_decoder, [entry], members), 0)

    def explain(self, chunk: ScannedRows, row: int) -> list[ClauseMatches]:
        return explain_row_score(chunk, self._query, row, self._boosts)

    def _may_match(self, entries: Sequence[int], payloads: Sequence[Payload]) -> Sequence[int]:
        """The rows that the prefilter does not exclude."""
        if self._prefilter is None:
            return range(len(payloads))
        current, may_match = self._first_current, self._prefilter.may_match
        return [
            row for row, payload in enumerate(payloads) if may_match(bytes(payload)) or entries[row] < current
        ]

    def _chunk(self, decoder: RecordDecoder, entries: Sequence[int], members: Sequence[Any]) -> ScannedRows:
        """A chunk of the queried fields; timestamp bounds are computed without a column."""
        self.decoded += len(members)
        gets = {name: get for name, get in decoder.gets.items() if name in self._columns}
        return ScannedRows(entries, build_columns(self._view.config, gets, members, lists=False))


def _batches(payloads: Sequence[Payload]) -> Iterator[tuple[int, int]]:
    """Begin and end of batches that are limited in rows and bytes."""
    if sum(map(len, payloads)) <= BYTES_AT_ONCE:
        for begin in range(0, len(payloads), ROWS_AT_ONCE):
            yield begin, min(begin + ROWS_AT_ONCE, len(payloads))
        return
    begin = size = 0
    for end, payload in enumerate(payloads):
        if end - begin >= ROWS_AT_ONCE or (size and size + len(payload) > BYTES_AT_ONCE):
            yield begin, end
            begin, size = end, 0
        size += len(payload)
    if begin < len(payloads):
        yield begin, len(payloads)


def value_bounds(field: Field, found: list[object]) -> tuple[Value, Value] | None:
    """The smallest and the largest value of a field; None if no row has one."""
    bounds = timestamp_bounds(found) if field.kind == "date" else None
    if bounds is not None:
        return bounds
    terms = build_column(field, found, lists=False).terms
    return (terms[0], terms[len(terms) - 1]) if len(terms) else None


class PieceStatistics:
    """Statistics over all rows of a scan range or a span, matching or not."""

    __slots__ = ("primary_max", "primary_min", "statistics")

    def __init__(self, statistics: Statistics, primary_max: Value | None = None) -> None:
        assert primary_max is None or isinstance(primary_max, int)
        self.statistics = statistics
        self.primary_max = primary_max
        self.primary_min: int | None = None

    def add_bounds(self, bounds: tuple[Value, Value]) -> None:
        """Add the smallest and largest primary timestamp of some rows."""
        least, most = bounds
        assert isinstance(least, int)
        assert isinstance(most, int)
        self.primary_min = least if self.primary_min is None else min(least, self.primary_min)
        self.primary_max = most if self.primary_max is None else max(most, self.primary_max)
