"""Replication as the rest of the server sees it: its paths, its numbers, and what it has to be told."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.api.context import Context
from tailrace.auth import Identity
from tailrace.common.server_metrics import ServerMetrics
from tailrace.http.exchange import Exchange
from tailrace.watch.collection import Collection
from tailrace.watch.documents import DocumentWriter
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.rxdb.http_routes import REPLICATION_PREFIX, ReplicationRoutes
from tailrace.watch.rxdb.rxdb import Replication
from tailrace.watch.rxdb.rxdb_realtime import RealtimeStreams
from tailrace.watch.rxdb.rxdb_ws import REPLICATION_WS_PATH, ReplicationSocketRoute


class ReplicationService:
    def __init__(self, context: Context, gateway: Gateway, writer: DocumentWriter) -> None:
        self._replication = Replication(context, gateway, writer)
        self._routes = ReplicationRoutes(self._replication)
        self._socket = ReplicationSocketRoute(self._replication)
        gateway.on_stream = RealtimeStreams(self._replication).start
        self._connect(context.telemetry)

    def start(self) -> None:
        self._replication.start()

    def handles(self, path: bytes) -> bool:
        return path.startswith(REPLICATION_PREFIX) or path == REPLICATION_WS_PATH

    def serve(
        self, exchange: Exchange, method: bytes, path: bytes, identify: Callable[[Exchange], Identity]
    ) -> None:
        if path == REPLICATION_WS_PATH:
            self._socket.serve(exchange, method, identify)
        else:
            self._routes.serve(exchange, identify(exchange), method, path[len(REPLICATION_PREFIX) :])

    def on_changed(self, collection: Collection) -> None:
        """A change of it is durable, or its rules are others, or it is gone."""
        self._replication.on_changed(collection)

    def recheck(self, stands: Callable[[Identity], bool]) -> int:
        return self._replication.recheck(stands)

    def end_all(self) -> None:
        self._replication.end_all()

    def _connect(self, telemetry: ServerMetrics) -> None:
        found = self._replication
        rows = found.pushes.rows
        telemetry.watch_replication_connections.read = lambda: len(found.wires)
        telemetry.watch_pull.read = lambda: found.pulls
        telemetry.watch_push_rows.each = lambda: [([result], count) for result, count in rows.items()]
        telemetry.watch_conflicts.read = lambda: rows["conflict"]
        telemetry.watch_resync.read = lambda: found.resyncs
