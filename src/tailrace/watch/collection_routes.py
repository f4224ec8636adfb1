"""HTTP routes of databases and collections: create, configure, list, delete, and status.

`/v1/databases/{db}[/collections/...]` configure, `/v1/databases` and `/v1/databases/{db}/collections` list in
pages, `/v1/databases/{db}/status` shows states and service objectives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final, TypedDict, cast

import msgspec
import orjson

from tailrace.auth import Action, Identity, visible_databases
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.log import append_to_streams
from tailrace.log.transaction import Transaction
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Component,
    Count,
    Json,
    answer,
    array,
    closed,
    counts,
    headers,
    nullable,
    obj,
    query,
    request,
)
from tailrace.routing.responses import next_page_header, page_limit
from tailrace.routing.table import Route, route_group
from tailrace.watch import collection_registry, document, names
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import (
    NATIVE,
    Collection,
    CollectionConfig,
    ReplicationConfig,
    Slo,
    check_duration,
    encode_config_entry,
    encode_database_entry,
    format_duration,
)
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.realtime.gateway import Gateway

CONFIG_BYTES: Final = 64 * 1024
_SETTABLE_MEMBERS: Final = frozenset(
    {
        "partitions",
        "source",
        "view",
        "storeBefore",
        "retention",
        "tombstoneTtl",
        "readRule",
        "writeRule",
        "slo",
    }
    | {"replication"}
)
_RULES: Final = {"readRule": "read_rule", "writeRule": "write_rule"}
_WINDOWS: Final = {"retention": "retention", "tombstoneTtl": "tombstone_ttl"}


class CollectionRoutes:
    def __init__(
        self,
        context: Context,
        registry: CollectionRegistry,
        access: AccessRules,
        on_rules: Callable[[Collection], None],
        on_removed: Callable[[Collection], None],
    ) -> None:
        """Calls `on_rules` when the rules of a collection changed, `on_removed` when one was deleted."""
        self._context = context
        self._registry = registry
        self._access = access
        self._log = context.log
        self._on_rules = on_rules
        self._on_removed = on_removed

    def create_database(self, exchange: Exchange, _: Identity, database: str) -> None:
        names.check_database(database)
        head = responses.JSON_TYPE + responses.NO_STORE
        body = orjson.dumps(CreatedDatabase(database=database))
        if database in self._registry.databases:
            exchange.respond(200, head, body)
            return

        def on_settled(_: Transaction, error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
                return
            self._registry.databases.setdefault(database, {})
            exchange.respond(201, head, body)

        now_ns = self._context.clock.now_ns()
        parts = [(names.collections_stream_name(database), [encode_database_entry(now_ns)])]
        append_to_streams(self._log, parts, now_ns, on_settled, None)

    def show(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        self._respond(exchange, 200, self._find_existing(database, name))

    def configure(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        self._configure(exchange, database, names.check_collection(name))

    def delete(self, exchange: Exchange, _: Identity, database: str, name: str) -> None:
        self._remove(exchange, self._find_existing(database, name))

    def _find_existing(self, database: str, name: str) -> Collection:
        collection = self._registry.find(database, names.check_collection(name))
        if collection is None or not collection.durable:
            raise TailraceError("not_found", f"collection {name!r} not found")
        return collection

    def _remove(self, exchange: Exchange, collection: Collection) -> None:
        if self._registry.has_source(collection):
            raise TailraceError("conflict", "the collection follows a source, remove the source first")

        def on_settled(error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
                return
            self._on_removed(collection)
            exchange.respond(204, responses.NO_STORE)

        collection_registry.remove_collection(self._registry, collection, on_settled)

    # -- configuring -----------------------------------------------------------------------------------

    def _configure(self, exchange: Exchange, database: str, name: str) -> None:
        body = document.load(exchange.body or b"{}", CONFIG_BYTES)
        if unknown := sorted(set(body) - _SETTABLE_MEMBERS):
            raise TailraceError("invalid_request", f"unknown member {unknown[0]!r}")
        partitions = _read_partitions(body)
        changed = self._read_changes(body)
        collection = self._registry.writable(database, name)
        if collection is None:
            expected = partitions or self._registry.partitions_for(name)
            collection = self._registry.plan(database, name, expected)
            config = collection.config.with_changes(**changed)
            ruled = config.read_rule is not None or config.write_rule is not None
            collection.config = config.with_changes(rule_version=int(ruled))  # applies to later writes
            self._write(exchange, collection, collection.config, is_new=True)
            self._registry.add(collection)
            return
        if partitions is not None and partitions != collection.config.partitions:
            raise TailraceError("collection_exists", "the number of partitions of a collection cannot change")
        if body.get("source", collection.config.source) != collection.config.source:
            raise TailraceError("collection_exists", "the source of a collection cannot change")
        before = collection.effective_config
        after = before.with_changes(**changed)
        if after == before:
            self._respond_settled(exchange, collection)
            return
        if (before.read_rule, before.write_rule) != (after.read_rule, after.write_rule):
            after = after.with_changes(rule_version=before.rule_version + 1)
        self._write(exchange, collection, after, is_new=False)

    def _read_changes(self, body: dict[str, Any]) -> dict[str, Any]:
        """The validated changes of a request, by the fields of the configuration."""
        if body.get("source", NATIVE) != NATIVE:
            raise TailraceError("invalid_request", "a collection with a source is created by that source")
        if body.get("view", "full") != "full":
            raise TailraceError(
                "before_image_required", "view must be full: changes need the document before"
            )
        changed: dict[str, Any] = {}
        if "storeBefore" in body:
            if not isinstance(body["storeBefore"], bool):
                raise TailraceError("invalid_request", "storeBefore must be true or false")
            changed["store_before"] = body["storeBefore"]
        for key, field in _RULES.items():
            rule = body.get(key)
            if rule is not None and not isinstance(rule, str):
                raise TailraceError("invalid_request", f"{key} must be a string, or null for none")
            if rule is not None:
                self._access.rule(rule, key)
            if key in body:
                changed[field] = rule
        for key, field in _WINDOWS.items():
            if key in body:
                changed[field] = check_duration(body[key], key)
        if "slo" in body:
            changed["slo"] = _read_slo(body["slo"])
        if "replication" in body:
            changed["replication"] = _read_replication(body["replication"])
        return changed

    def _write(
        self, exchange: Exchange, collection: Collection, planned: CollectionConfig, *, is_new: bool
    ) -> None:
        """Each request builds on the pending result of the previous one; effects keep that order."""

        def on_settled(_: Transaction, error: TailraceError | None) -> None:
            if collection.pending is planned:
                collection.pending = None
            if error is not None:
                if is_new:
                    self._registry.drop_uncommitted()
                responses.respond_error(exchange, error)
                return
            known = 0 if is_new else collection.config.rule_version
            collection.config = planned
            collection.durable = True
            if known != planned.rule_version:
                self._on_rules(collection)
            self._respond(exchange, 201 if is_new else 200, collection)

        now_ns = self._context.clock.now_ns()
        entry = encode_config_entry(collection.name, planned, "insert" if is_new else "update", now_ns)
        parts = [(names.collections_stream_name(collection.database), [entry])]
        append_to_streams(self._log, parts, now_ns, on_settled, None)
        collection.pending = planned

    # -- responses -------------------------------------------------------------------------------------

    def _respond_settled(self, exchange: Exchange, collection: Collection) -> None:
        """Nothing changes: respond when the pending configuration is durable."""
        newest = self._log.committer.newest
        if newest is None or (collection.pending is None and collection.durable):
            self._respond(exchange, 200, collection)
            return

        def settled(error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
            else:
                self._respond(exchange, 200, collection)

        newest.waiting.append(settled)

    def _respond(self, exchange: Exchange, status: int, collection: Collection) -> None:
        body = self.to_json(collection)
        exchange.respond(status, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    def to_json(self, collection: Collection) -> dict[str, Any]:
        config, limits = collection.config, self._context.limits
        return {
            "collection": collection.name,
            "database": collection.database,
            **config.value(),
            "view": "full",
            "retention": format_duration(config.retention_s(limits)),
            "tombstoneTtl": format_duration(config.tombstone_s(limits)),
            "generation": self._registry.generation(collection),
            "state": collection.state,
            "positions": collection.applied,
            "lag": self._registry.lags(collection),
            "documents": self._registry.view.count(collection.number),
        }


def _read_partitions(body: dict[str, Any]) -> int | None:
    partitions = body.get("partitions")
    if partitions is None:
        return None
    if type(partitions) is not int or not 1 <= partitions <= names.PARTITIONS_MAX:
        raise TailraceError("invalid_request", f"partitions must be 1 to {names.PARTITIONS_MAX}")
    return partitions


def _read_replication(body: object) -> ReplicationConfig | None:
    if body is None:
        return None
    held = cast("dict[str, Any]", body) if isinstance(body, dict) else {"": 0}
    fields: object = held.get("tombstoneFields")
    if set(held) != {"tombstoneFields"} or not isinstance(fields, dict):
        raise TailraceError(
            "invalid_request", "replication must be null or an object with tombstoneFields, an object"
        )
    # Sent as fields of a document, so the same rules apply.
    return ReplicationConfig(tombstone_fields=document.check_fields(cast("dict[str, Any]", fields), ""))


def _read_slo(body: object) -> Slo | None:
    """Objectives of the collection; null: the server's defaults."""
    if body is None:
        return None
    known = {"deliveryMs", "resumeRatio", "lagMs", "bloomRatio"}
    members = cast("dict[str, Any]", body) if isinstance(body, dict) else {"": 0}
    if not set(members) <= known:
        raise TailraceError(
            "invalid_request",
            "slo must be null or an object of deliveryMs, resumeRatio, lagMs and bloomRatio",
        )
    try:
        slo = msgspec.convert(members, Slo)
    except msgspec.ValidationError as error:
        raise TailraceError("invalid_request", f"slo: {error}") from None
    times = [value for value in (slo.delivery_ms, slo.lag_ms) if value is not None]
    ratios = [value for value in (slo.resume_ratio, slo.bloom_ratio) if value is not None]
    if any(value < 1 for value in times) or not all(0 < value <= 1 for value in ratios):
        raise TailraceError(
            "invalid_request", "slo: times must be at least 1 ms, ratios above 0 and at most 1"
        )
    return slo


class DatabaseListingRoutes:
    def __init__(self, context: Context, registry: CollectionRegistry) -> None:
        self._limits = context.limits
        self._registry = registry

    def databases(self, exchange: Exchange, identity: Identity) -> None:
        """List the databases that the caller may access; others are not revealed."""
        found = visible_databases(identity, self._registry.databases)
        page, head = self._page(exchange, "/v1/databases", found)
        rows: list[DatabaseListed] = [
            {"database": name, "collections": len(self._durable_collections(name))} for name in page
        ]
        exchange.respond(200, head, orjson.dumps(rows))

    def collections(self, exchange: Exchange, _: Identity, database: str) -> None:
        self._registry.database(database)
        found = self._durable_collections(database)
        page, head = self._page(exchange, f"/v1/databases/{database}/collections", sorted(found))
        rows = [self._to_json(found[name]) for name in page]
        exchange.respond(200, head, orjson.dumps(rows))

    def _durable_collections(self, database: str) -> dict[str, Collection]:
        """The collections whose creation is durable."""
        return {name: one for name, one in self._registry.databases[database].items() if one.durable}

    def _page(self, exchange: Exchange, path: str, names: list[str]) -> tuple[list[str], bytes]:
        query = parse_query(exchange.query)
        limit = page_limit(query, self._limits)
        begin = bisect_right(names, query.get("after", ""))
        page = names[begin : begin + limit]
        head = responses.JSON_TYPE + responses.NO_STORE
        if begin + limit < len(names):
            head += next_page_header(path, limit, page[-1])
        return page, head

    def _to_json(self, collection: Collection) -> dict[str, Any]:
        return {
            "collection": collection.name,
            "source": collection.config.source,
            "state": collection.reported_state,
            "partitions": collection.config.partitions,
            "generation": self._registry.generation(collection),
            "documents": self._registry.view.count(collection.number),
        }


class StatusRoute:
    def __init__(self, registry: CollectionRegistry, gateway: Gateway) -> None:
        self._registry = registry
        self._gateway = gateway

    def show(self, exchange: Exchange, _: Identity, database: str) -> None:
        found = self._registry.database(database)
        gateway = self._gateway
        body = {
            "database": database,
            "connections": sum(1 for one in gateway.sessions if one.database == database),
            "watermark": round(gateway.level, 4),
            "collections": [self._to_json(found[name]) for name in sorted(found) if found[name].durable],
        }
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    def _to_json(self, collection: Collection) -> dict[str, Any]:
        gateway, objectives = self._gateway, self._gateway.objectives
        targets = objectives.targets(collection)
        burn = objectives.burn_rates(collection.database, collection.name, collection)
        watched = gateway.find_watched(collection)
        return {
            "collection": collection.name,
            "state": collection.reported_state,
            "generation": self._registry.generation(collection),
            "documents": self._registry.view.count(collection.number),
            "lag": sum(self._registry.lags(collection)),
            "subscriptions": 0 if watched is None else len(watched.subscriptions),
            "predicates": 0 if watched is None else len(watched.matcher),
            "targets": {
                "deliveryMs": targets["delivery"],
                "resumeRatio": targets["resume"],
                "lagMs": targets["lag"],
                "bloomRatio": targets["bloom"],
            },
            "burn": {objective: round(value, 3) for objective, value in burn.items()},
            "reason": objectives.explain(collection, burn),
        }


class DatabaseListed(TypedDict):
    database: str
    collections: Count


class CreatedDatabase(TypedDict):
    database: str


_RULE: Final[Json] = {"type": ["string", "null"], "maxLength": 4096}
_WINDOW: Final[Json] = {"type": ["string", "null"], "pattern": "^(0|[1-9][0-9]{0,8})[smhd]?$"}
_STATE: Final[Json] = {"enum": ["live", "loading", "lagging", "stale"]}
_COLLECTION_LISTED: Final = Component(
    "CollectionListed",
    obj(
        {
            "collection": STRING,
            "source": STRING,
            "state": _STATE,
            **counts("partitions", "generation", "documents"),
        }
    ),
)
_COLLECTION: Final = Component(
    "Collection",
    obj(
        {
            "collection": STRING,
            "database": STRING,
            "source": STRING,
            "state": _STATE,
            "view": {"const": "full"},
            "storeBefore": BOOLEAN,
            "retention": STRING,
            "tombstoneTtl": STRING,
            "positions": array(COUNT),
            "lag": array(COUNT),
            "readRule": _RULE,
            "writeRule": _RULE,
            "slo": nullable(OBJECT),
            **counts("partitions", "generation", "ruleVersion", "documents"),
        }
    ),
)
_DATABASE_STATUS: Final = Component(
    "DatabaseStatus",
    obj(
        {
            "database": STRING,
            "connections": COUNT,
            "watermark": {"type": "number"},
            "collections": array(
                obj(
                    {
                        "collection": STRING,
                        "state": _STATE,
                        "targets": OBJECT,
                        "burn": OBJECT,
                        "reason": STRING,
                        **counts("generation", "documents", "lag", "subscriptions", "predicates"),
                    }
                )
            ),
        }
    ),
)
_COLLECTION_CONFIG: Final = closed(
    {},
    {
        "partitions": {"type": "integer", "minimum": 1, "maximum": 256},
        "source": {"const": "native"},
        "readRule": _RULE,
        "writeRule": _RULE,
        "replication": {
            "type": ["object", "null"],
            "properties": {"tombstoneFields": OBJECT},
        },
        "view": {"const": "full"},
        "storeBefore": BOOLEAN,
        "retention": _WINDOW,
        "tombstoneTtl": _WINDOW,
        "slo": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {
                "deliveryMs": {"type": "integer", "minimum": 1},
                "resumeRatio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "lagMs": {"type": "integer", "minimum": 1},
                "bloomRatio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            },
        },
    },
)
_PAGE: Final = (
    query("after", "Only names after this one."),
    query("limit", "Rows on a page.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
)
_DATABASE_PATH: Final = "/v1/databases/{db}"
_PATH: Final = f"{_DATABASE_PATH}/collections/{{collection}}"
ROUTES: Final = route_group(
    "watch",
    Route(
        *("GET", "/v1/databases", Action.LIST_DATABASES, DatabaseListingRoutes.databases, "listDatabases"),
        "List the databases that the caller may read, by name",
        {200: answer("One page.", list[DatabaseListed], headers("Link"))},
        parameters=_PAGE,
    ),
    Route(
        *("GET", f"{_DATABASE_PATH}/collections", Action.READ_DATABASE, DatabaseListingRoutes.collections),
        "listCollections",
        "List the collections of a database, by name",
        {200: answer("One page.", array(_COLLECTION_LISTED), headers("Link"))},
        errors=(404,),
        parameters=_PAGE,
    ),
    Route(
        *("PUT", _DATABASE_PATH, Action.MANAGE_DATABASE, CollectionRoutes.create_database, "createDatabase"),
        "Create a database",
        {
            201: answer("Created.", CreatedDatabase),
            200: answer("The database exists.", CreatedDatabase),
        },
        errors=(507,),
    ),
    Route(
        *("GET", _PATH, Action.READ_DATABASE, CollectionRoutes.show, "getCollection"),
        "Configuration and progress of a collection",
        {200: answer("The collection.", _COLLECTION)},
        errors=(404,),
    ),
    Route(
        *("PUT", _PATH, Action.MANAGE_DATABASE, CollectionRoutes.configure, "setCollection"),
        "Create a collection, or change its rules",
        {201: answer("Created.", _COLLECTION), 200: answer("Changed, or unchanged.", _COLLECTION)},
        errors=(404, 409, 501, 507),
        body=request(
            _COLLECTION_CONFIG, {"partitions": 4, "readRule": "doc.public == true"}, "The configuration."
        ),
    ),
    Route(
        *("DELETE", _PATH, Action.MANAGE_DATABASE, CollectionRoutes.delete, "deleteCollection"),
        "Delete a collection with all its documents and changes",
        {204: answer("Deleted.")},
        errors=(404, 409, 507),
    ),
    Route(
        *("GET", f"{_DATABASE_PATH}/status", Action.READ_DATABASE, StatusRoute.show, "getDatabaseStatus"),
        "Status of the collections of a database, with reasons",
        {200: answer("The database.", _DATABASE_STATUS)},
        errors=(404,),
    ),
    place="first",
)
