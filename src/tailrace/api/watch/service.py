"""The parts of watch put together: the book of collections, who writes, who asks, who is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.api.context import Context
from tailrace.api.watch.access import Access
from tailrace.api.watch.book import Book, Collection
from tailrace.api.watch.documents import Writer
from tailrace.api.watch.gateway import Gateway
from tailrace.api.watch.realtime import SSE_PATH, WS_PATH, RealtimeRoutes
from tailrace.api.watch.routes import PREFIX, DatabaseRoutes
from tailrace.auth import Identity, TokenVerifier
from tailrace.net.http1 import Exchange
from tailrace.telemetry import Telemetry
from tailrace.watch.change import Change

FILE: Final = "watch.db"


class WatchService:
    """Documents and live queries of one server."""

    def __init__(self, context: Context, directory: Path, verifier: TokenVerifier | None) -> None:
        self.book = Book(context.log, directory / FILE)
        limits = context.limits
        self._writer = Writer(
            self.book, document_bytes=limits.watch_document_bytes, partitions=limits.watch_partitions
        )
        access = Access()
        self.gateway = Gateway(context, self.book, access, verifier)
        self._databases = DatabaseRoutes(context, self.book, self._writer, access)
        self._databases.collections.on_rules = self.gateway.on_rules
        self._realtime = RealtimeRoutes(self.gateway)
        self.book.on_applied = self._applied

        self._connect(context.telemetry)

    def _connect(self, telemetry: Telemetry) -> None:
        """Metrics are read where they are counted, when somebody asks."""
        gateway, book = self.gateway, self.book
        telemetry.watch_changes.read = lambda: book.changes
        telemetry.watch_match_candidates.read = lambda: gateway.totals()[0]
        telemetry.watch_match_hits.read = lambda: gateway.totals()[1]
        telemetry.watch_predicates.read = lambda: sum(len(one.matcher) for one in gateway.all_watched())
        telemetry.watch_scan_predicates.read = lambda: sum(
            len(one.matcher.index.scan) for one in gateway.all_watched()
        )
        telemetry.watch_connections.read = lambda: len(gateway.sessions)
        telemetry.watch_subscriptions.each = gateway.states
        telemetry.watch_deliveries.each = lambda: [([op], n) for op, n in gateway.deliveries.items()]
        telemetry.watch_outbound_bytes.read = lambda: gateway.outbound_bytes
        telemetry.watch_demotions.read = lambda: gateway.demotions
        telemetry.watch_resync_required.each = lambda: [([why], n) for why, n in gateway.resyncs.items()]
        telemetry.watch_resumes.each = lambda: [([result], n) for result, n in gateway.resumes.items()]
        telemetry.watch_snapshots.read = lambda: gateway.replays.snapshots
        telemetry.watch_snapshot_documents.read = lambda: gateway.replays.snapshot_documents

    async def start(self) -> None:
        await self.book.start()
        self.gateway.start()

    def stop(self) -> None:
        self.book.close()

    def end_live(self) -> None:
        """Shutdown: nobody is kept waiting."""
        self.gateway.end_all()

    def handles(self, path: bytes) -> bool:
        return path.startswith(PREFIX) or path in (WS_PATH, SSE_PATH)

    def serve(
        self, exchange: Exchange, method: bytes, path: bytes, identify: Callable[[Exchange], Identity]
    ) -> None:
        if path == WS_PATH:
            self._realtime.websocket(exchange, method, identify)
        elif path == SSE_PATH:
            self._realtime.events(exchange, method, identify)
        else:
            self._databases.serve(exchange, identify(exchange), method, path[len(PREFIX) :])

    def _applied(self, collection: Collection, change: Change) -> None:
        self._writer.on_applied(collection, change)
        self.gateway.on_applied(collection, change)
