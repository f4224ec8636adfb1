"""The parts of watch put together: the book of collections, who writes, who asks, who is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.api.context import Context
from tailrace.api.watch.access import Access
from tailrace.api.watch.book import Book, Collection
from tailrace.api.watch.documents import Writer
from tailrace.api.watch.routes import PREFIX, DatabaseRoutes
from tailrace.auth import Identity
from tailrace.net.http1 import Exchange
from tailrace.watch.change import Change

FILE: Final = "watch.db"


class WatchService:
    """Documents and live queries of one server."""

    def __init__(self, context: Context, directory: Path) -> None:
        self.book = Book(context.log, directory / FILE)
        limits = context.limits
        self._writer = Writer(
            self.book, document_bytes=limits.watch_document_bytes, partitions=limits.watch_partitions
        )
        self._access = Access()
        self._databases = DatabaseRoutes(context, self.book, self._writer, self._access)
        self.book.on_applied = self._applied

    async def start(self) -> None:
        await self.book.start()

    def stop(self) -> None:
        self.book.close()

    def end_live(self) -> None:
        """Shutdown: nobody is kept waiting."""

    def handles(self, path: bytes) -> bool:
        return path.startswith(PREFIX)

    def serve(
        self, exchange: Exchange, method: bytes, path: bytes, identify: Callable[[Exchange], Identity]
    ) -> None:
        self._databases.serve(exchange, identify(exchange), method, path[len(PREFIX) :])

    def _applied(self, collection: Collection, change: Change) -> None:
        self._writer.on_applied(collection, change)
