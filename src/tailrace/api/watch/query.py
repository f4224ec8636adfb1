"""One-shot queries: what matches now, page by page, as of one moment."""

from __future__ import annotations

import asyncio
import base64
import heapq
from typing import Any, Final, cast

import orjson

from tailrace.api.watch.access import Access
from tailrace.api.watch.book import Book, Collection
from tailrace.auth import Identity
from tailrace.errors import TailraceError
from tailrace.watch import document
from tailrace.watch.change import shown
from tailrace.watch.cost import CostError
from tailrace.watch.predicate import Predicate
from tailrace.watch.query import Query, read_query, sort_key, sort_values
from tailrace.watch.view import Moment, Row

SCAN_ROWS: Final = 200  # between two looks at what else the loop has to do


class Found:
    """A matching document, and its place in the order."""

    __slots__ = ("flat", "key", "row", "values")

    def __init__(self, row: Row, flat: dict[str, Any], values: list[Any], key: tuple[Any, ...]) -> None:
        self.row = row
        self.flat = flat
        self.values = values
        self.key = key


class Queries:
    def __init__(self, book: Book, access: Access) -> None:
        self._book = book
        self._access = access

    def prepare(self, identity: Identity, database: str, given: object) -> Asked:
        """Checked; nothing has been looked at."""
        query = read_query(given, live=False)
        collection = self._book.find(database, query.collection)
        rule = self._access.read_part(identity, collection)
        parts = query.parts if rule is None else (*query.parts, rule)
        return Asked(self._book, collection, query, Predicate(parts, query.documents))


class Asked:
    """A query that can be run."""

    def __init__(self, book: Book, collection: Collection | None, query: Query, predicate: Predicate) -> None:
        self._book = book
        self._collection = collection
        self._query = query
        self._matches = predicate.matches
        self._after = _read_cursor(query)

    async def run(self) -> dict[str, Any]:
        collection, query = self._collection, self._query
        if collection is None:
            return {"documents": [], "cursor": None, "positions": []}
        self._book.check_applied(collection)
        with self._book.view.moment() as moment:
            positions = list(collection.applied)
            if query.order:
                found = await self._ordered(moment, collection)
            else:
                found = await self._by_id(moment, collection)
        more = len(found) > query.limit
        page = found[: query.limit]
        return {
            "documents": [_shown(collection, one.row) for one in page],
            "cursor": _cursor(page[-1]) if more else None,
            "positions": positions,
        }

    async def _by_id(self, moment: Moment, collection: Collection) -> list[Found]:
        found: list[Found] = []
        after = "" if self._after is None else self._after[-1]
        wanted = self._query.limit + 1
        while len(found) < wanted:
            rows = self._rows(moment, collection, after)
            if not rows:
                break
            after = rows[-1].id
            for row in rows:
                one = self._match(collection, row)
                if one is not None and len(found) < wanted:
                    found.append(one)
            if self._query.documents is not None:
                break
            await asyncio.sleep(0)
        return found

    async def _ordered(self, moment: Moment, collection: Collection) -> list[Found]:
        """The first of the order behind the cursor; only as many are held as the page has."""
        wanted = self._query.limit + 1
        best: list[Found] = []
        after = ""
        while rows := self._rows(moment, collection, after):
            after = rows[-1].id
            for row in rows:
                one = self._match(collection, row)
                if one is not None and (self._after is None or one.key > self._after):
                    best.append(one)
            best = heapq.nsmallest(wanted, best, key=lambda one: one.key)
            if self._query.documents is not None:
                break
            await asyncio.sleep(0)
        return best

    def _rows(self, moment: Moment, collection: Collection, after: str) -> list[Row]:
        documents = self._query.documents
        if documents is None:
            return moment.documents_after(collection.number, after, SCAN_ROWS)
        return moment.documents_named(collection.number, [name for name in sorted(documents) if name > after])

    def _match(self, collection: Collection, row: Row) -> Found | None:
        flat = flat_of(collection, row)
        try:
            if not self._matches(flat):
                return None
        except CostError:
            raise TailraceError(
                "query_too_complex", "the expression took too many steps on a document"
            ) from None
        order = self._query.order
        values = sort_values(flat, order)
        return Found(row, flat, values, sort_key(values, row.id, order))


def flat_of(collection: Collection, row: Row) -> dict[str, Any]:
    data = orjson.loads(row.data)
    return document.flat(data, row.id, collection.name, row.version, row.created_ms, row.updated_ms)


def _shown(collection: Collection, row: Row) -> dict[str, Any]:
    data = orjson.Fragment(row.data)
    return shown(collection.name, row.id, data, row.version, row.created_ms, row.updated_ms)


def _cursor(last: Found) -> str:
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
        raise TailraceError("invalid_query", "cursor is what an answer to the same query gave") from None


def _is_ranked(value: Any) -> bool:
    kinds = {1: (bool,), 2: (int, float), 3: (str,)}
    if not isinstance(value, list) or len(cast("list[Any]", value)) != 2:
        return False
    rank, item = cast("list[Any]", value)
    return type(item) in kinds.get(rank, (int,))
