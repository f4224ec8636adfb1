"""Searches in the plainest way: every record looked at, everything counted, everything sorted."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cmp_to_key
from typing import Any, NamedTuple

from support.queries import SEARCH_BODY
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.matching import evaluate_record
from tailrace.search.query_language import (
    SEARCH_DIALECT,
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Equals,
    Negation,
    Phrase,
    StartsWith,
    Words,
    bind_query,
)
from tailrace.search.records import RecordView, field_values, tokenize_text

SORTABLE = ("id", "service", "status", "ratio", "ok")
RENAMED = "/renamed"


def search_body(*, turned: bool = False) -> dict[str, Any]:
    """Every kind of field, nearly all sortable; `id` moves in version 2. Turned, others look elsewhere."""
    body = copy.deepcopy(SEARCH_BODY)
    if turned:
        fields = body["fields"]
        fields["service"]["bindings"], fields["plan"]["bindings"] = (
            fields["plan"]["bindings"],
            fields["service"]["bindings"],
        )
        fields["note"]["bindings"] = fields["message"]["bindings"]
        body["defaultFields"] = ["note", {"field": "service", "boost": 3}]
    for name in SORTABLE:
        body["fields"][name]["sortable"] = True
    body["fields"]["id"]["bindings"].append({"version": 2, "jsonPointer": RENAMED})
    return body


def registry_of(evolved_at: int | None = None, *, turned: bool = False) -> Registry:
    """Version 1 from the start, and version 2 from a sequence number on."""
    boundaries = [VersionBoundary(0, 1)]
    lenses: dict[int, dict[str, object]] = {}
    if evolved_at is not None:
        boundaries.append(VersionBoundary(evolved_at, 2))
        ops = [{"op": "rename", "from": "/id", "to": RENAMED}]
        lenses[1] = {"apiVersion": "durable.lens/v1", "schema": "s", "from": 1, "to": 2, "ops": ops}
    return Registry(
        name="s",
        version=len(boundaries),
        search=parse_search_config(search_body(turned=turned)),
        boundaries=tuple(boundaries),
        schemas={1: {}, 2: {}},
        lenses=lenses,
    )


class ModelHit(NamedTuple):
    entry: int
    score: float
    values: list[Any]


class SearchModel:
    """All entries from 1 on, promoted."""

    def __init__(self, payloads: Sequence[bytes], view: RecordView, first: int = 1) -> None:
        self._view = view
        self.records = {
            entry: view.record(entry, payload) for entry, payload in enumerate(payloads, 1) if entry >= first
        }

    def values(self, entry: int, field: str) -> list[Any]:
        found = self._view.config.fields[field]
        return list(field_values(self.records[entry], found, self._view.version))

    def hits(self, text: str, sort: Sequence[str]) -> list[ModelHit]:
        """All of them, in order. `sort` is the effective one, each with its direction."""
        config, version = self._view.config, self._view.version
        query = bind_query(text, config, SEARCH_DIALECT)
        found = [
            entry for entry, record in self.records.items() if evaluate_record(query, record, config, version)
        ]
        hits: list[ModelHit] = []
        for entry in found:
            score = self._score(query, entry)
            values = [self._sort_value(key, entry, score) for key in sort]
            hits.append(ModelHit(entry, score, values))
        return sorted(hits, key=cmp_to_key(lambda one, other: self._compare(one, other, sort)))

    def _sort_value(self, key: str, entry: int, score: float) -> Any:
        name, _, direction = key.partition(":")
        if name == "_score":
            return score
        if name == "offset":
            return entry
        values = self.values(entry, name)
        if not values:
            return None
        value = max(values) if direction == "desc" else min(values)
        return int(value) if isinstance(value, bool) else value

    def _compare(self, one: ModelHit, other: ModelHit, sort: Sequence[str]) -> int:
        for key, mine, its in zip(sort, one.values, other.values, strict=True):
            if key.startswith("_score") and math.isclose(mine, its, rel_tol=1e-9):
                continue
            if mine != its:
                greater = its is not None and (mine is None or mine > its)
                return 1 if greater != key.endswith("desc") else -1
        return 0

    def _score(self, query: BoundQuery, entry: int) -> float:
        def holds(clause: BoundQuery) -> bool:
            return evaluate_record(clause, self.records[entry], self._view.config, self._view.version)

        match query:
            case All(clauses):
                return sum(self._score(clause, entry) for clause in clauses)
            case AnyOf(clauses):
                return sum(self._score(clause, entry) for clause in clauses if holds(clause))
            case Anywhere(targets):
                return max(
                    self._boost(target.field)
                    if isinstance(target, Equals | StartsWith)
                    else self._score(target, entry)
                    for target in targets
                    if holds(target)
                )
            case Words():
                if query.prefix:
                    return self._boost(query.field)
                return self._boost(query.field) * sum(
                    self._bm25(query.field, entry, (token,)) for token in query.tokens
                )
            case Phrase():
                return self._boost(query.field) * self._bm25(query.field, entry, query.tokens)
            case Negation():
                return 0.0
            case _:
                return 0.0

    def _boost(self, field: str) -> float:
        return {entry.field: entry.boost for entry in self._view.config.default_fields}.get(field, 1)

    def _bm25(self, field: str, entry: int, tokens: tuple[str, ...]) -> float:
        texts = {
            other: [tokenize_text(value) for value in self.values(other, field)] for other in self.records
        }
        lengths = {other: sum(map(len, text)) for other, text in texts.items()}
        documents = sum(1 for length in lengths.values() if length)
        average = sum(lengths.values()) / documents
        idf = 0.0
        for token in tokens:
            containing = sum(1 for text in texts.values() if any(token in value for value in text))
            idf += math.log(1 + (documents - containing + 0.5) / (containing + 0.5))
        frequency = sum(
            tuple(value[at : at + len(tokens)]) == tokens
            for value in texts[entry]
            for at in range(len(value))
        )
        norm = 1.2 * (0.25 + 0.75 * lengths[entry] / average)
        return idf * frequency * 2.2 / (frequency + norm)
