"""`/v1/databases/{db}` and its collections: making them, setting their rules, looking at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.watch.access import Access
from tailrace.api.watch.book import Book, Collection, config_entry, database_entry
from tailrace.auth import Action, Identity, authorise
from tailrace.errors import TailraceError
from tailrace.log.together import append_together
from tailrace.log.transaction import Transaction
from tailrace.net.http1 import Exchange
from tailrace.watch import document, names

COLLECTION_METHODS: Final = "GET, PUT, HEAD, OPTIONS"
CONFIG_BYTES: Final = 64 * 1024
_SET: Final = frozenset({"partitions", "source", "readRule", "writeRule"})


class CollectionRoutes:
    def __init__(self, context: Context, book: Book, access: Access) -> None:
        self._context = context
        self._book = book
        self._access = access
        self._log = context.log
        # Told when the rules of a collection have changed.
        self.on_rules: Callable[[Collection], None] | None = None

    def serve_database(self, exchange: Exchange, identity: Identity, method: bytes, database: str) -> None:
        if method != b"PUT":
            raise answers.not_allowed("PUT, OPTIONS")
        authorise(identity, Action.MANAGE_DATABASE, db=database)
        names.check_database(database)
        head, body = answers.JSON_TYPE + answers.NO_STORE, orjson.dumps({"database": database})
        if database in self._book.databases:
            exchange.respond(200, head, body)
            return

        def answer(_: Transaction, error: TailraceError | None) -> None:
            if error is not None:
                answers.refuse(exchange, error)
                return
            self._book.databases.setdefault(database, {})
            exchange.respond(201, head, body)

        now_ns = self._context.clock.now_ns()
        parts = [(names.collections_of(database), [database_entry(now_ns)])]
        append_together(self._log, parts, now_ns, answer, None)

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, database: str, name: str) -> None:
        if method in (b"GET", b"HEAD"):
            authorise(identity, Action.READ_DATABASE, db=database)
            collection = self._book.find(database, names.check_collection(name))
            if collection is None or not collection.durable:
                raise TailraceError("not_found", f"there is no collection {name!r}")
            self._answer(exchange, 200, collection)
        elif method == b"PUT":
            authorise(identity, Action.MANAGE_DATABASE, db=database)
            self._set(exchange, database, names.check_collection(name))
        else:
            raise answers.not_allowed(COLLECTION_METHODS)

    def _set(self, exchange: Exchange, database: str, name: str) -> None:
        given = document.load(exchange.body or b"{}", CONFIG_BYTES)
        if unknown := sorted(set(given) - _SET):
            raise TailraceError("invalid_request", f"unknown member {unknown[0]!r}")
        partitions, source = given.get("partitions"), given.get("source", "native")
        if partitions is not None and (
            type(partitions) is not int or not 1 <= partitions <= names.PARTITIONS_MAX
        ):
            raise TailraceError("invalid_request", f"partitions is a number from 1 to {names.PARTITIONS_MAX}")
        if source != "native":
            raise TailraceError("invalid_request", "this server has native collections only")
        rules = {key: given[key] for key in ("readRule", "writeRule") if key in given}
        for key, rule in rules.items():
            if rule is not None and not isinstance(rule, str):
                raise TailraceError("invalid_request", f"{key} is a text, or null for none")
            if rule is not None:
                self._access.rule(rule, key)
        collection = self._book.find(database, name)
        is_new = collection is None
        if collection is None:
            wanted = partitions or self._context.limits.watch_partitions
            collection = self._book.planned(database, name, wanted)
        elif partitions is not None and partitions != collection.config.partitions:
            raise TailraceError("collection_exists", "the number of partitions of a collection cannot change")
        self._change(exchange, collection, rules, is_new)

    def _change(
        self, exchange: Exchange, collection: Collection, rules: dict[str, Any], is_new: bool
    ) -> None:
        config = collection.config
        before = (config.read_rule, config.write_rule)
        after = (rules.get("readRule", before[0]), rules.get("writeRule", before[1]))
        if not is_new and before == after:
            self._answer(exchange, 200, collection)
            return

        def answer(_: Transaction, error: TailraceError | None) -> None:
            if error is not None:
                answers.refuse(exchange, error)
                return
            collection.durable = True
            config.read_rule, config.write_rule = after
            config.rule_version += before != after
            self._book.databases[collection.database].setdefault(collection.name, collection)
            if before != after and self.on_rules is not None:
                self.on_rules(collection)
            self._answer(exchange, 201 if is_new else 200, collection)

        now_ns = self._context.clock.now_ns()
        planned = type(config)(config.partitions)
        planned.generation = config.generation
        planned.read_rule, planned.write_rule = after
        planned.rule_version = config.rule_version + (before != after)
        entry = config_entry(collection.name, planned, "insert" if is_new else "update", now_ns)
        parts = [(names.collections_of(collection.database), [entry])]
        append_together(self._log, parts, now_ns, answer, None)

    def _answer(self, exchange: Exchange, status: int, collection: Collection) -> None:
        body = {
            "collection": collection.name,
            "database": collection.database,
            **collection.config.value(),
            "generation": self._book.generation(collection),
            "state": "live",
            "positions": collection.applied,
            "documents": self._book.view.count(collection.number),
        }
        exchange.respond(status, answers.JSON_TYPE + answers.NO_STORE, orjson.dumps(body))
