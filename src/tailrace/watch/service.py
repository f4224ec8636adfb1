"""The watch service: wiring of documents, live queries, replication and sources of one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.auth import GrantStore, Identity, TokenVerifier
from tailrace.common.server_metrics import ServerMetrics
from tailrace.routing.context import Context
from tailrace.storage.sealing import SealingService
from tailrace.watch import metrics
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import BeforeImageLimits, Collection, CounterRegistry
from tailrace.watch.collection_registry import CollectionRegistry, reset_after_view_loss
from tailrace.watch.collection_routes import CollectionRoutes, DatabaseListingRoutes, StatusRoute
from tailrace.watch.document import Change
from tailrace.watch.document_writer import DocumentWriter
from tailrace.watch.external_jobs import JobRoutes, SubscriptionSummaries
from tailrace.watch.maintenance import Maintenance
from tailrace.watch.names import PartitionPatterns
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.realtime.routes import RealtimeRoutes
from tailrace.watch.routes import DocumentRoutes
from tailrace.watch.rxdb.http_routes import ReplicationRoutes
from tailrace.watch.rxdb.replication import Replication
from tailrace.watch.rxdb.websocket import RealtimeStreams, ReplicationSocketRoute
from tailrace.watch.sources.manager import SourceManager
from tailrace.watch.sources.routes import SourceRoutes
from tailrace.watch.sources.stream import OpenRemoteOrigin


class ReplicationService:
    def __init__(self, context: Context, gateway: Gateway, writer: DocumentWriter) -> None:
        self._replication = Replication(context, gateway, writer)
        self.routes = (ReplicationRoutes(self._replication), ReplicationSocketRoute(self._replication))
        gateway.on_stream = RealtimeStreams(self._replication).start
        self._connect(context.telemetry)

    def start(self) -> None:
        self._replication.start()

    def on_changed(self, collection: Collection) -> None:
        """Documents or rules of the collection changed, or it was deleted."""
        self._replication.on_changed(collection)

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        return self._replication.recheck(is_valid)

    def close_all(self) -> None:
        self._replication.close_all()

    def _connect(self, telemetry: ServerMetrics) -> None:
        found = self._replication
        rows = found.pushes.rows
        telemetry.watch_replication_connections.read = lambda: len(found.transports)
        telemetry.watch_pull.read = lambda: found.pulls
        telemetry.watch_push_rows.each = lambda: [([result], count) for result, count in rows.items()]
        telemetry.watch_conflicts.read = lambda: rows["conflict"]
        telemetry.watch_resync.read = lambda: found.resyncs


VIEW_FILE: Final = "watch.db"


class WatchService:
    """Documents and live queries of one server."""

    def __init__(
        self,
        context: Context,
        directory: Path,
        verifier: TokenVerifier | None,
        grants: GrantStore,
        sealing: SealingService,
        open_remote: OpenRemoteOrigin | None = None,
    ) -> None:
        """`open_remote` opens streams of other workers, which sources read."""
        limits = context.limits
        patterns = PartitionPatterns(context.settings.watch_partition_patterns, limits.watch_partitions)
        remembered = BeforeImageLimits(
            limits.watch_window_changes, limits.watch_window_bytes, limits.watch_window_ms
        )
        counters = CounterRegistry(limits.watch_metrics_collections)
        self.registry = CollectionRegistry(context.log, directory / VIEW_FILE, patterns, remembered, counters)
        self._writer = DocumentWriter(self.registry, document_bytes=limits.watch_document_bytes)
        access = AccessRules()
        self.gateway = Gateway(context, self.registry, access, verifier, grants)
        self._summaries = SubscriptionSummaries(context, self.gateway)
        self.maintenance = Maintenance(
            context, self.registry, self.gateway.keys, sealing, self._summaries.bounds
        )
        self.registry.restore = self.maintenance.views.restore
        self.registry.on_view_lost = self._on_view_lost
        self.registry.on_before_image_lost = self.gateway.on_before_image_lost
        self._replication = ReplicationService(context, self.gateway, self._writer)
        self.sources = SourceManager(
            context, self.registry, self.gateway, self._replication.on_changed, open_remote
        )
        self.sources.connect(context.telemetry)
        self.registry.on_applied = self._on_applied
        self.registry.on_page = self.gateway.on_page
        self.routes: tuple[object, ...] = (
            CollectionRoutes(context, self.registry, access, self._on_rules_changed, self._on_removed),
            DatabaseListingRoutes(context, self.registry),
            StatusRoute(self.registry, self.gateway),
            DocumentRoutes(context, self.gateway, self._writer),
            RealtimeRoutes(self.gateway),
            *self._replication.routes,
            JobRoutes(context, self.registry, self._writer, self._summaries),
            SourceRoutes(context, self.sources),
        )
        metrics.register_metrics(
            context.telemetry,
            self.gateway,
            self.maintenance,
            partitions=context.settings.watch_metrics_partitions,
        )

    async def start(self) -> None:
        await self.registry.start()
        self._replication.start()
        self.gateway.start()
        # The signing keys must be durable before the first token or checkpoint is issued.
        await self.gateway.keys.wait_settled()
        self.maintenance.start()
        self._summaries.start()
        await self.sources.start()

    async def stop(self) -> None:
        await self.maintenance.stop()
        self.sources.stop()
        self._summaries.stop()
        self.gateway.delivered.stop()
        self.registry.close()

    def close_live(self) -> None:
        """Shutdown: close all connections."""
        self.gateway.close_all()
        self._replication.close_all()

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """Close connections whose token was revoked; returns how many."""
        return self.gateway.recheck(is_valid) + self._replication.recheck(is_valid)

    def _on_rules_changed(self, collection: Collection) -> None:
        """Rules changed: results that clients have may be different now."""
        self.gateway.on_rules(collection)
        self._replication.on_changed(collection)

    async def _on_view_lost(self, collection: Collection) -> None:
        self.gateway.audit.event("partition.stale", collection, {"reason": "view-lost"})
        await reset_after_view_loss(self.registry, collection)
        self.gateway.audit.event("partition.live", collection, {"reason": "view-lost"})

    def _on_removed(self, collection: Collection) -> None:
        """A collection was deleted: its subscriptions must resync."""
        self._writer.forget(collection)
        self.maintenance.on_removed(collection)
        self.gateway.objectives.forget(collection)
        self.gateway.invalidate_all(collection, "generation")
        self._replication.on_changed(collection)

    def _on_applied(self, collection: Collection, change: Change) -> None:
        self._writer.on_applied(collection, change)
        self.gateway.on_applied(collection, change)
        self._replication.on_changed(collection)
