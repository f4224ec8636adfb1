"""Maintenance of collections: purges tombstones, publishes views, bounds retention, rotates token keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import apsw

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.log.model import Lifetime
from tailrace.routing.context import Context
from tailrace.storage.object_store.interface import ObjectStoreError
from tailrace.storage.retention_service import RetentionBound
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.published_views import PublishedViews
from tailrace.watch.resume_tokens import TokenKeys

if TYPE_CHECKING:
    from tailrace.storage.sealing import SealingService

logger = logging.getLogger("tailrace.watch")

PURGE_ROWS: Final = 500  # per transaction, then the loop runs other callbacks
WRITE_ID_RETENTION_MS: Final = 10 * 60 * 1000


class Maintenance:
    """Runs periodically; failures are retried in the next run. Owned by the loop thread."""

    def __init__(
        self,
        context: Context,
        registry: CollectionRegistry,
        keys: TokenKeys,
        sealing: SealingService | None = None,
        other_bounds: Callable[[], list[RetentionBound]] = list,
    ) -> None:
        """`other_bounds` returns the retention bounds of streams that are not of collections."""
        self._context = context
        self._limits = context.limits
        self._registry = registry
        self._keys = keys
        self.views = PublishedViews(context, registry, None if sealing is None else sealing.seal_soon)
        self._sealing = sealing
        self._tasks = TaskSet()
        self._removed: list[Collection] = []
        self._other_bounds = other_bounds
        self.purged = 0
        if sealing is not None:
            sealing.retention.add_bounds(self._bounds)

    def start(self) -> None:
        self._tasks.start(self._run())

    async def stop(self) -> None:
        await self._tasks.close()
        await self.views.close()

    def on_removed(self, collection: Collection) -> None:
        """A collection was deleted: delete its published views."""
        self._removed.append(collection)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._limits.watch_care_ms / 1000)
            try:
                await self._run_once()
            except Exception:
                logger.exception("maintenance of collections failed")

    async def _run_once(self) -> None:
        self._keys.rotate_if_due()
        now_ms = self._context.clock.now_ns() // 1_000_000
        try:
            self._registry.view.delete_old_writes(now_ms - WRITE_ID_RETENTION_MS)
        except apsw.Error as error:
            logger.warning("cannot delete expired idempotency keys", extra=log_fields(error=str(error)))
        for collection in tuple(self._registry.collections()):
            if collection.durable:
                await self._purge(collection, now_ms)
                await self._publish(collection, now_ms)
        while self._removed:
            await self.views.remove(self._removed.pop())

    # -- tombstones ------------------------------------------------------------------------------------

    async def _purge(self, collection: Collection, now_ms: int) -> None:
        kept_s = collection.config.tombstone_s(self._limits)
        if kept_s is None or collection.lagging:
            return
        view, before_ms = self._registry.view, now_ms - kept_s * 1000
        try:
            while (count := view.purge(collection.number, before_ms, PURGE_ROWS)) > 0:
                self.purged += count
                found = view.current.purged(collection.number, collection.config.partitions)
                collection.purged = [one.version for one in found]
                if count < PURGE_ROWS:
                    break
                await asyncio.sleep(0)
        except apsw.Error as error:
            logger.warning(
                "cannot purge tombstones",
                extra=log_fields(database=collection.database, collection=collection.name, error=str(error)),
            )

    # -- views and retention ---------------------------------------------------------------------------

    async def _publish(self, collection: Collection, now_ms: int) -> None:
        """Publish the view if changes are due for removal that the last published view lacks."""
        retention_s = collection.config.retention_s(self._limits)
        if retention_s is None or collection.state != "live":
            return
        if collection.published_positions is None and not self._is_old(
            collection, now_ms - retention_s * 1000
        ):
            return  # nothing is due for removal
        try:
            await self.views.refresh(collection)
            due = now_ms - collection.published_ms >= self._limits.watch_view_ms
            if not due or collection.lagging or collection.published_positions == collection.applied:
                return
            if any(collection.applied) and await self.views.publish(collection) and self._sealing is not None:
                self._sealing.retention.look_again()
        except (ObjectStoreError, OSError, TailraceError) as error:
            logger.warning(
                "cannot publish view",
                extra=log_fields(database=collection.database, collection=collection.name, error=str(error)),
            )

    def _is_old(self, collection: Collection, before_ms: int) -> bool:
        """Whether some changes may be older; a stream is as old as its first entry."""
        streams = map(self._registry.log.find, collection.streams())
        return any(stream is not None and stream.created_ns // 1_000_000 < before_ms for stream in streams)

    def _bounds(self) -> list[RetentionBound]:
        """Changes that retention may remove: old enough, and in a published view."""
        found = self._other_bounds()
        for collection in self._registry.collections():
            retention_s = collection.config.retention_s(self._limits)
            if retention_s is None or collection.published_positions is None or collection.state != "live":
                continue
            lifetime = Lifetime(retention_s=retention_s)
            for partition, upto in enumerate(collection.published_positions):
                stream = self._registry.log.find(collection.stream(partition)) if upto else None
                if stream is not None and stream.earliest < upto:
                    found.append(RetentionBound(stream.number, lifetime, upto))
        return found
