"""`/v1/databases` and `/v1/databases/{db}/collections`: what there is, page by page."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

import orjson

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.listing import next_page, page_limit
from tailrace.auth import Action, Identity, authorise, visible_databases
from tailrace.http.exchange import Exchange
from tailrace.protocol.query_params import parse_query
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection

LISTING_METHODS: Final = "GET, HEAD, OPTIONS"


class DatabaseListingRoutes:
    def __init__(self, context: Context, book: CollectionRegistry) -> None:
        self._limits = context.limits
        self._book = book

    def databases(self, exchange: Exchange, identity: Identity, method: bytes) -> None:
        """Those that the caller could name; of the others it is not even said that they exist."""
        _check_method(method)
        authorise(identity, Action.LIST_DATABASES)
        found = visible_databases(identity, self._book.databases)
        page, head = self._page(exchange, "/v1/databases", found)
        rows = [{"database": name, "collections": len(self._made(name))} for name in page]
        exchange.respond(200, head, orjson.dumps(rows))

    def collections(self, exchange: Exchange, identity: Identity, method: bytes, database: str) -> None:
        _check_method(method)
        authorise(identity, Action.READ_DATABASE, db=database)
        self._book.database(database)
        found = self._made(database)
        page, head = self._page(exchange, f"/v1/databases/{database}/collections", sorted(found))
        rows = [self._shown(found[name]) for name in page]
        exchange.respond(200, head, orjson.dumps(rows))

    def _made(self, database: str) -> dict[str, Collection]:
        """Its collections, without those whose making is not durable yet."""
        return {name: one for name, one in self._book.databases[database].items() if one.durable}

    def _page(self, exchange: Exchange, path: str, names: list[str]) -> tuple[list[str], bytes]:
        query = parse_query(exchange.query)
        limit = page_limit(query, self._limits)
        begin = bisect_right(names, query.get("after", ""))
        page = names[begin : begin + limit]
        head = answers.JSON_TYPE + answers.NO_STORE
        if begin + limit < len(names):
            head += next_page(path, limit, page[-1])
        return page, head

    def _shown(self, collection: Collection) -> dict[str, Any]:
        return {
            "collection": collection.name,
            "source": collection.config.source,
            "state": collection.shown_state,
            "partitions": collection.config.partitions,
            "generation": self._book.generation(collection),
            "documents": self._book.view.count(collection.number),
        }


def _check_method(method: bytes) -> None:
    if method not in (b"GET", b"HEAD"):
        raise answers.not_allowed(LISTING_METHODS)
