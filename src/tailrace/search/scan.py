"""Scans: payloads are prefiltered by required bytes, decoded in batches and matched.

Bytes that a payload must hold to match: most rows of a scan are settled without decoding them.

A needle is only taken where it is safe: plain ASCII letters, digits and a few signs that JSON never has to
escape. A payload may still escape them (`\u0041`), or hold another letter whose lower case is ours; such a
payload is always looked at.

Rows decided by decoding their payloads: some at a time become a chunk of the fields in question.

A chunk made here answers as those of the tail index do, and is gone when the search is. Runs on a thread, and
looks at the clock between two chunks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tailrace.schema.search_config import Field, SearchConfig
from tailrace.search.chunks import Chunk, build_columns, explain_row_score
from tailrace.search.columns import build_column
from tailrace.search.language import (
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
    """A payload without any of them does not match. They are in lower case if `lower`."""

    __slots__ = ("_lower", "_words")

    def __init__(self, words: Sequence[bytes], lower: bool) -> None:
        self._words = tuple(words)
        self._lower = lower

    def may_match(self, payload: bytes) -> bool:
        text = payload.lower() if self._lower else payload
        for word in self._words:
            if word in text:
                return True
        if b"\\" in payload and b"\\u" in payload:  # a single byte is found much quicker than two
            return True
        return self._lower and not payload.isascii() and any(odd in payload for odd in _ODD_LOWER)


def build_prefilter(query: BoundQuery, config: SearchConfig) -> PayloadPrefilter | None:
    """The needles of a query; None if it can match without any."""
    found = _required_words(query, config)
    if found is None or len(found) > PREFILTER_WORDS_MAX:
        return None
    lower = any(is_lower for _, is_lower in found)
    return PayloadPrefilter([(word.lower() if lower else word).encode() for word, _ in found], lower)


def _required_words(query: BoundQuery, config: SearchConfig) -> set[tuple[str, bool]] | None:
    """Words of which one has to be there, each with whether its case does not matter."""
    match query:
        case All(clauses):
            # One clause is enough: the one with the fewest and longest needles.
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


ROWS_AT_ONCE = 512  # between two looks at the clock; far less than 20 ms of work
BYTES_AT_ONCE = 1 << 20

Payload = bytes | memoryview


class ScannedRows(Chunk):
    """Rows that were decoded for one search."""


ScanCallback = Callable[[ScannedRows], None]


def query_fields(query: BoundQuery) -> set[str]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {field for clause in clauses for field in query_fields(clause)}
        case Negation(clause):
            return query_fields(clause)
        case _:
            return {query.field}


class Scanner:
    """One search's way to look at payloads.

    Whoever takes the rows that may match is named with each call: kept here, it would be held by its own
    scanner, and with it every file its hits come from, until somebody looks for cycles.
    """

    def __init__(self, view: RecordView, request: SearchRequest) -> None:
        self._view = view
        self._query = request.query
        self._first_current = view.first_current()
        self._needles = build_prefilter(request.query, view.config)
        self._boosts = field_boosts(view.config)
        self.wanted = scored_tokens(request.query)
        self._fields = query_fields(request.query)
        self._fields |= {key.name for key in request.sort if key.kind not in ("score", "offset")}
        self._columns = self._fields | set(self.wanted)
        self.decoded = 0

    # Where indexes decide everything, nothing is decoded and nobody needs these.

    @cached_property
    def _asked(self) -> RecordDecoder:
        return RecordDecoder(self._view, sorted(self._fields))

    @cached_property
    def _counted(self) -> RecordDecoder:
        primary = self._view.primary
        return RecordDecoder(
            self._view, sorted(self._columns if primary is None else {*self._columns, primary})
        )

    def new_statistics(self) -> Statistics:
        return {name: FieldStatistics(sorted(tokens)) for name, tokens in self.wanted.items()}

    def scan(
        self,
        first: int,
        payloads: Sequence[Payload],
        counts: ScanStatistics | None,
        deadline: float,
        take: ScanCallback,
    ) -> int:
        """Decides payloads of consecutive entries; answers how many before the deadline.

        Without `counts` nothing is asked but matches, and rows may be passed over undecoded.
        """
        entries = range(first, first + len(payloads))
        if counts is None:
            return self.verify(entries, payloads, deadline, take)
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return begin
            members = self._counted.all_members(entries[begin:end], payloads[begin:end])
            chunk = self._chunk(self._counted, entries[begin:end], members)
            chunk.add_statistics(counts.statistics, 0)
            self._see_times(members, counts)
            take(chunk)
        return len(payloads)

    def _see_times(self, members: Sequence[Any], counts: ScanStatistics) -> None:
        primary = self._view.primary
        get = None if primary is None else self._counted.gets[primary]
        if primary is not None and get is not None:
            bounds = value_bounds(self._view.config.fields[primary], raw_column(members, get))
            if bounds is not None:
                counts.see(bounds)

    def verify(
        self, entries: Sequence[int], payloads: Sequence[Payload], deadline: float, take: ScanCallback
    ) -> int:
        """Decides payloads for their matches alone; answers how many before the deadline."""
        for begin, end in _batches(payloads):
            if begin and time.monotonic() >= deadline:
                return begin
            rows = self._hopeful(entries[begin:end], payloads[begin:end])
            if rows:
                numbers, some = (
                    [entries[begin + row] for row in rows],
                    [payloads[begin + row] for row in rows],
                )
                take(self._chunk(self._asked, numbers, self._asked.all_members(numbers, some)))
        return len(payloads)

    def groups_in(self, entry: int, payload: Payload) -> list[ClauseMatches]:
        """What weighs in a row that matches."""
        members = self._asked.all_members([entry], [payload])
        return self.explain(self._chunk(self._asked, [entry], members), 0)

    def explain(self, chunk: ScannedRows, row: int) -> list[ClauseMatches]:
        return explain_row_score(chunk, self._query, row, self._boosts)

    def _hopeful(self, entries: Sequence[int], payloads: Sequence[Payload]) -> Sequence[int]:
        """Rows that may match, as far as can be told without decoding them."""
        if self._needles is None:
            return range(len(payloads))
        current, may_match = self._first_current, self._needles.may_match
        return [
            row for row, payload in enumerate(payloads) if may_match(bytes(payload)) or entries[row] < current
        ]

    def _chunk(self, decoder: RecordDecoder, entries: Sequence[int], members: Sequence[Any]) -> ScannedRows:
        """Of the fields that are asked for; how far times reach is told without a column of them."""
        self.decoded += len(members)
        gets = {name: get for name, get in decoder.gets.items() if name in self._columns}
        return ScannedRows(entries, build_columns(self._view.config, gets, members, lists=False))


def _batches(payloads: Sequence[Payload]) -> Iterator[tuple[int, int]]:
    """Where to begin and end, so that neither rows nor bytes become too many."""
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


class ScanStatistics:
    """What is counted over all rows of a stretch, matching or not."""

    __slots__ = ("primary_max", "primary_min", "statistics")

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.primary_max: int | None = None
        self.primary_min: int | None = None

    def see(self, bounds: tuple[Value, Value]) -> None:
        """The smallest and largest primary timestamp of some of the rows."""
        least, most = bounds
        assert isinstance(least, int)
        assert isinstance(most, int)
        self.primary_min = least if self.primary_min is None else min(least, self.primary_min)
        self.primary_max = most if self.primary_max is None else max(most, self.primary_max)
