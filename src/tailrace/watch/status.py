"""`/v1/databases/{db}/status`: how each collection does, what was promised, and why it is as it is."""

from __future__ import annotations

from typing import Any

import orjson

from tailrace.api import answers
from tailrace.auth import Action, Identity, authorise
from tailrace.http.exchange import Exchange
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection
from tailrace.watch.realtime.gateway import Gateway

STATUS_METHODS = "GET, HEAD, OPTIONS"


class StatusRoute:
    def __init__(self, book: CollectionRegistry, gateway: Gateway) -> None:
        self._book = book
        self._gateway = gateway

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, database: str) -> None:
        if method not in (b"GET", b"HEAD"):
            raise answers.not_allowed(STATUS_METHODS)
        authorise(identity, Action.READ_DATABASE, db=database)
        found = self._book.database(database)
        gateway = self._gateway
        body = {
            "database": database,
            "connections": sum(1 for one in gateway.sessions if one.database == database),
            "watermark": round(gateway.level, 4),
            "collections": [self._shown(found[name]) for name in sorted(found) if found[name].durable],
        }
        exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, orjson.dumps(body))

    def _shown(self, collection: Collection) -> dict[str, Any]:
        gateway, objectives = self._gateway, self._gateway.objectives
        targets = objectives.targets(collection)
        burn = objectives.burn(collection.database, collection.name, collection)
        watched = gateway.watched_if_any(collection)
        return {
            "collection": collection.name,
            "state": collection.shown_state,
            "generation": self._book.generation(collection),
            "documents": self._book.view.count(collection.number),
            "lag": sum(self._book.lags(collection)),
            "subscriptions": 0 if watched is None else len(watched.subscriptions),
            "predicates": 0 if watched is None else len(watched.matcher),
            "targets": {
                "deliveryMs": targets["delivery"],
                "resumeRatio": targets["resume"],
                "lagMs": targets["lag"],
                "bloomRatio": targets["bloom"],
            },
            "burn": {objective: round(value, 3) for objective, value in burn.items()},
            "reason": objectives.reason(collection, burn),
        }
