"""Built indexes beside everything that can make use of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.log import Log
from tailrace.search.index_files.keys import RoutingKeyIndex
from tailrace.search.index_files.library import IndexCatalogue
from tailrace.search.index_files.shelf import IndexFileCache
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache

if TYPE_CHECKING:
    from tailrace.api.app import TailraceApp

LEXICONS = "lexicons"  # the cache beside that of all other companions
FETCH_THREADS = 2  # that fetch and check
DECODE_THREADS = 4  # that decode files for those who have no threads, and may wait for the others


class IndexFileService:
    """The files of companions: on the object store, in a cache on disk, and opened in memory."""

    def __init__(
        self, log: Log, url: str, cache_dir: Path, limits: Limits, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._work = LoopTasks(loop, FETCH_THREADS)
        self._readers = LoopTasks(loop, DECODE_THREADS)
        cache_bytes = limits.search_companion_file_cache_max_bytes
        self.parts = ObjectCache(url, cache_dir, cache_bytes, limits, self._work)
        lexicon_bytes = limits.lexicon_index_cache_max_bytes
        self.lexicons = ObjectCache(url, cache_dir.with_name(LEXICONS), lexicon_bytes, limits, self._work)
        memory_bytes = limits.search_companion_memory_max_bytes
        self.shelf = IndexFileCache(
            self.parts, self._work, self._readers, lexicons=self.lexicons, bytes_max=memory_bytes
        )
        self.library = IndexCatalogue(self.shelf, log.catalogue.of, log.reader.levels)
        self.keys = RoutingKeyIndex(self.library)
        log.reader.history.keys = self.keys

    def connect(self, app: TailraceApp, telemetry: ServerMetrics) -> None:
        """Tells everybody who answers queries, and the metrics."""
        app.search.searcher.library = self.library
        app.filtered.library = self.library
        app.routing_keys.listing.lexicons = self.keys
        counts = self.shelf.counts
        telemetry.companion_opened_bytes.read = lambda: self.shelf.bytes
        telemetry.companion_cache_bytes.read = lambda: self.parts.cached_bytes
        telemetry.lexicon_cache_bytes.read = lambda: self.lexicons.cached_bytes
        telemetry.companion_opens.read = lambda: counts.fetched
        telemetry.companion_unusable.read = lambda: counts.unusable

    async def close(self) -> None:
        await self._readers.end()
        await self._work.end()
        await self.parts.close()
        await self.lexicons.close()
