"""Rows decided by decoding their payloads. Runs on a thread, and looks at the clock often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tailrace.query.analyze import tokens_of
from tailrace.query.bind import All, AnyOf, Anywhere, Bound, Negation
from tailrace.query.compiled import Matcher
from tailrace.query.needle import needles_of
from tailrace.query.score import FieldStatistics, Group, Statistics, boosts_of, explain, scored_tokens
from tailrace.query.search_request import SearchRequest
from tailrace.query.sort import SortValue, has_text, shown_value
from tailrace.query.values import Value
from tailrace.query.view import Extractor, Row, View

ROWS_BETWEEN_LOOKS = 128  # at the clock; far less than 20 ms of work
BYTES_BETWEEN_LOOKS = 1 << 20

Take = Callable[[int, list[SortValue], list[Group]], None]
Payload = bytes | memoryview


def fields_in(query: Bound) -> set[str]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {field for clause in clauses for field in fields_in(clause)}
        case Negation(clause):
            return fields_in(clause)
        case _:
            return {query.field}


class Scanner:
    """One search's way to look at payloads. `take` is told every match: entry, sort values, what weighs."""

    def __init__(self, view: View, request: SearchRequest, take: Take) -> None:
        self._view = view
        self._request = request
        self._take = take
        self._first_current = view.first_current()
        self._matcher = Matcher(request.query, view.config, view.version)
        self._needles = needles_of(request.query, view.config)
        self._boosts = boosts_of(view.config)
        self._has_text = has_text(request.query)
        self.wanted = scored_tokens(request.query)
        names = {key.name for key in request.sort if key.kind not in ("score", "offset")}
        names |= set(self.wanted) | (fields_in(request.query) if self._has_text else set())
        if view.primary is not None:
            names.add(view.primary)
        self._names = sorted(names)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._extractor = Extractor(view, self._names)
        self.decoded = 0

    def new_statistics(self) -> Statistics:
        return {name: FieldStatistics(sorted(tokens)) for name, tokens in self.wanted.items()}

    def scan(self, first: int, payloads: Sequence[Payload], counts: Counts | None, deadline: float) -> int:
        """Decides payloads of consecutive entries; answers how many before the deadline.

        Without `counts` nothing is asked but matches, and rows may be passed over undecoded.
        """
        matches = self._matches
        unseen_bytes = 0
        for index, payload in enumerate(payloads):
            unseen_bytes += len(payload)
            if (not index % ROWS_BETWEEN_LOOKS or unseen_bytes > BYTES_BETWEEN_LOOKS) and index:
                unseen_bytes = 0
                if time.monotonic() >= deadline:
                    return index
            entry = first + index
            row: Row | None = None
            if counts is not None:
                row = self._extractor.row(entry, payload)
                self._count(row, counts)
                self.decoded += 1
            if matches(entry, payload, counts is None):
                self._found(entry, row or self._extractor.row(entry, payload))
        return len(payloads)

    def verify(self, entries: Sequence[int], payloads: Sequence[Payload], deadline: float) -> int:
        """Decides rows that an index could not decide; answers how many before the deadline."""
        for index, (entry, payload) in enumerate(zip(entries, payloads, strict=True)):
            if not index % ROWS_BETWEEN_LOOKS and index and time.monotonic() >= deadline:
                return index
            if self._matches(entry, payload, True):
                self._found(entry, self._extractor.row(entry, payload))
        return len(payloads)

    def groups_in(self, entry: int, payload: Payload) -> list[Group]:
        """What weighs in a row that matches."""
        row = self._extractor.row(entry, payload)
        return explain(self._request.query, lambda name: self._values(row, name), self._boosts)

    def _matches(self, entry: int, payload: Payload, may_skip: bool) -> bool:
        if entry < self._first_current and not self._view.is_current(entry):
            self.decoded += may_skip
            return self._matcher.matches_record(self._view.record(entry, payload))
        if self._needles is not None and not self._needles.may_match(bytes(payload)):
            return False
        self.decoded += may_skip
        return self._matcher.matches(payload)

    def _count(self, row: Row, counts: Counts) -> None:
        primary = self._view.primary
        if primary is not None and (values := row[self._index[primary]]):
            largest = max(values)
            assert isinstance(largest, int)
            if counts.primary_max is None or largest > counts.primary_max:
                counts.primary_max = largest
        for name, field in counts.statistics.items():
            tokens = [token for value in row[self._index[name]] for token in tokens_of(str(value))]
            if tokens:
                field.documents += 1
                field.tokens += len(tokens)
                for token in field.with_token:
                    if token in tokens:
                        field.with_token[token] += 1

    def _found(self, entry: int, row: Row) -> None:
        groups: list[Group] = []
        if self._has_text:
            groups = explain(self._request.query, lambda name: self._values(row, name), self._boosts)
        self._take(entry, self._sort_values(entry, row), groups)

    def _values(self, row: Row, name: str) -> list[Value]:
        return list(row[self._index[name]])

    def _sort_values(self, entry: int, row: Row) -> list[SortValue]:
        """With the entry in the place of the offset, and nothing yet in the place of the score."""
        values: list[SortValue] = []
        for key in self._request.sort:
            if key.kind == "offset":
                values.append(entry)
            elif key.kind == "score" or not (found := row[self._index[key.name]]):
                values.append(None)
            else:
                values.append(shown_value(max(found) if key.descending else min(found)))
        return values


class Counts:
    """What is counted over all rows of a stretch, matching or not."""

    __slots__ = ("primary_max", "statistics")

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.primary_max: int | None = None
