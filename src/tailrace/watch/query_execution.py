"""One-shot queries: matching documents in pages, from one snapshot of the view."""

from __future__ import annotations

import asyncio
import base64
import heapq
import time
from typing import Any, Final, NamedTuple, cast

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.routing.openapi import STRING, Component, Json, array, closed
from tailrace.watch import document
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import client_document
from tailrace.watch.document_view import DocumentRow, ViewSnapshot
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate
from tailrace.watch.query import Query, read_query, sort_key, sort_values

SCAN_ROWS: Final = 200
SLICE_S: Final = 0.005
PAGE_BYTES: Final = 8 * 1024 * 1024


class TimeSlice:
    """How long a scan may run before it yields to the event loop."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._until

    async def yield_to_loop(self) -> None:
        await asyncio.sleep(0)
        self._until = time.perf_counter() + SLICE_S


class QueryHit(NamedTuple):
    """A matching document and its sort key."""

    row: DocumentRow
    values: list[Any]
    key: tuple[Any, ...]


class QueryExecutor:
    def __init__(self, registry: CollectionRegistry, access: AccessRules) -> None:
        self._registry = registry
        self._access = access

    def prepare(self, identity: Identity, database: str, value: object) -> PreparedQuery:
        """Validate a query without running it."""
        query = read_query(value, live=False)
        collection = self._registry.find(database, query.collection)
        rule = self._access.read_predicate_part(identity, collection)
        parts = query.parts if rule is None else (*query.parts, rule)
        return PreparedQuery(self._registry, collection, query, Predicate(parts, query.documents))


class PreparedQuery:
    """A validated query, ready to run."""

    def __init__(
        self, registry: CollectionRegistry, collection: Collection | None, query: Query, predicate: Predicate
    ) -> None:
        self._registry = registry
        self._collection = collection
        self._query = query
        self._matches = predicate.matches
        self._after = _read_cursor(query)
        self._time_slice = TimeSlice()

    async def run(self) -> dict[str, Any]:
        collection, query = self._collection, self._query
        if collection is None:
            return {"documents": [], "cursor": None, "positions": []}
        self._registry.check_applied(collection)
        with self._registry.view.snapshot() as snapshot:
            positions = list(collection.applied)
            if query.order:
                found, fits = await self._run_ordered(snapshot, collection)
            else:
                found, fits = await self._run_by_id(snapshot, collection)
        page = found[:fits]
        return {
            "documents": [_document_json(collection, one.row) for one in page],
            "cursor": _cursor(page[-1]) if len(found) > fits else None,
            "positions": positions,
        }

    async def _run_by_id(self, snapshot: ViewSnapshot, collection: Collection) -> tuple[list[QueryHit], int]:
        """The matches in id order, and how many fit into the page; an extra match means there are more."""
        found: list[QueryHit] = []
        after = "" if self._after is None else self._after[-1]
        size = 0
        while rows := self._rows(snapshot, collection, after):
            after = rows[-1].id
            for row in rows:
                one = self._match(collection, row)
                if one is not None:
                    found.append(one)
                    size += len(row.data)
                    if len(found) > self._query.limit or (size > PAGE_BYTES and len(found) > 1):
                        return found, len(found) - 1
                if self._time_slice.is_over:
                    await self._time_slice.yield_to_loop()
        return found, len(found)

    async def _run_ordered(
        self, snapshot: ViewSnapshot, collection: Collection
    ) -> tuple[list[QueryHit], int]:
        """The first matches in query order after the cursor; only one page is held in memory.

        The content is read when the page is known, since many large documents do not fit into memory.
        """
        expected = self._query.limit + 1
        best: list[QueryHit] = []
        after = ""
        while rows := self._rows(snapshot, collection, after):
            after = rows[-1].id
            for row in rows:
                one = self._match(collection, row)
                if one is not None and (self._after is None or one.key > self._after):
                    best.append(one._replace(row=row._replace(data=b"")))
                if self._time_slice.is_over:
                    await self._time_slice.yield_to_loop()
            best = heapq.nsmallest(expected, best, key=lambda one: one.key)
        return best, await self._load(snapshot, collection, best)

    async def _load(self, snapshot: ViewSnapshot, collection: Collection, best: list[QueryHit]) -> int:
        """Load the documents of the page, up to its size; returns how many fit."""
        size = 0
        for index, one in enumerate(best[: self._query.limit]):
            (row,) = snapshot.documents_by_id(collection.number, [one.row.id])
            size += len(row.data)
            if index and size > PAGE_BYTES:
                return index
            best[index] = one._replace(row=row)
            if self._time_slice.is_over:
                await self._time_slice.yield_to_loop()
        return min(len(best), self._query.limit)

    def _rows(self, snapshot: ViewSnapshot, collection: Collection, after: str) -> list[DocumentRow]:
        documents = self._query.documents
        if documents is None:
            return snapshot.documents_after(collection.number, after, SCAN_ROWS)
        rest = [name for name in sorted(documents) if name > after]
        for name in rest:  # one at a time, since they may be large
            if found := snapshot.documents_by_id(collection.number, [name]):
                return found
        return []

    def _match(self, collection: Collection, row: DocumentRow) -> QueryHit | None:
        flat = flatten_row(collection, row)
        try:
            if not self._matches(flat):
                return None
        except CostExceededError:
            raise TailraceError(
                "query_too_complex", "the expression exceeded its evaluation steps on a document"
            ) from None
        order = self._query.order
        values = sort_values(flat, order)
        return QueryHit(row, values, sort_key(values, row.id, order))


def flatten_row(collection: Collection, row: DocumentRow) -> dict[str, Any]:
    data = orjson.loads(row.data)
    return document.flatten_document(
        data, row.id, collection.name, row.version, row.created_ms, row.updated_ms
    )


def _document_json(collection: Collection, row: DocumentRow) -> dict[str, Any]:
    data = orjson.Fragment(row.data)
    return client_document(collection.name, row.id, data, row.version, row.created_ms, row.updated_ms)


def _cursor(last: QueryHit) -> str:
    raw = orjson.dumps([last.values, last.row.id])
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _read_cursor(query: Query) -> tuple[Any, ...] | None:
    if query.cursor is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(query.cursor + "=" * (-len(query.cursor) % 4))
        values, document_id = orjson.loads(raw)
        if not isinstance(document_id, str) or not all(_is_ranked(value) for value in values):
            raise ValueError(document_id)
        return sort_key(values, document_id, query.order)
    except (ValueError, TypeError, KeyError):
        raise TailraceError(
            "invalid_query", "cursor must be taken from a response to the same query"
        ) from None


def _is_ranked(value: Any) -> bool:
    kinds = {1: (bool,), 2: (int, float), 3: (str,)}
    if not isinstance(value, list) or len(cast("list[Any]", value)) != 2:
        return False
    rank, item = cast("list[Any]", value)
    return type(item) in kinds.get(rank, (int,))


# By hand: a query is parsed with errors of its own.
_VALUE: Final[Json] = {"type": ["null", "boolean", "number", "string", "array"]}
_FIELD: Final[dict[str, Json]] = {
    "field": STRING,
    "fieldPath": array(STRING, minItems=1, maxItems=20),
}
DOCUMENT_QUERY: Final = Component(
    "DocumentQuery",
    closed(
        {"collection": STRING},
        {
            "filters": array(
                closed(
                    {"op": {"enum": ["==", "!=", ">", ">=", "<", "<=", "in", "contains"]}, "value": _VALUE},
                    _FIELD,
                ),
                maxItems=32,
            ),
            "where": {"type": "string", "maxLength": 4096},
            "documents": array(STRING, maxItems=100),
            "orderBy": array(closed({}, {**_FIELD, "direction": {"enum": ["asc", "desc"]}}), maxItems=8),
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "cursor": STRING,
        },
    ),
)
