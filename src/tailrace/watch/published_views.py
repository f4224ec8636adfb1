"""Published views: copies of collections on the object store, for restoring when the log is too short.

Retention may remove a change only if a published view has it. Publishing writes the parts, waits until all
changes of the view are sealed, and then writes the head. So a restore always finds the changes after a view,
and never a view that is ahead of its changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tailrace.common.logging_setup import log_fields
from tailrace.routing.context import Context
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreError,
    open_object_store,
)
from tailrace.watch import document_view
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document_view import InvalidViewError, PublishedViewHead, PurgedTombstones, open_snapshot

logger = logging.getLogger("tailrace.watch")

SEAL_S_MAX: Final = 600.0  # then publishing is abandoned until it is due again
SEAL_POLL_S: Final = 0.5


class PublishedViews:
    """Publishes and restores views. Owned by the loop thread; encoding runs on other threads."""

    def __init__(
        self, context: Context, registry: CollectionRegistry, seal_soon: Callable[[int], None] | None = None
    ) -> None:
        """`seal_soon` requests an early seal of a stream."""
        self._context = context
        self._registry = registry
        self._objects: ObjectStore | None = None
        self._seal_soon = seal_soon
        self.published = 0

    async def close(self) -> None:
        if self._objects is not None:
            await self._objects.close()

    def _store(self) -> ObjectStore:
        if self._objects is None:
            settings = self._context.settings
            self._objects = open_object_store(settings.object_store_url, limits=settings.limits)
        return self._objects

    def _folder(self, collection: Collection) -> str:
        return document_view.view_folder(collection.database, collection.name, collection.config.generation)

    # -- publishing ------------------------------------------------------------------------------------

    async def refresh(self, collection: Collection) -> None:
        """Load the newest published head, possibly written by another process."""
        if collection.published_positions is None:
            found = await self._load_head(collection)
            if found is not None:
                self._remember_head(collection, found[0])

    async def publish(self, collection: Collection) -> bool:
        """Publish the current view; True if complete. Parts of an incomplete one are deleted."""
        folder, store = self._folder(collection), self._store()
        found = await self._load_head(collection)
        if found is not None and self._is_fresh(found[0], collection):
            self._remember_head(collection, found[0])  # published by a job
            return True
        number = 1 if found is None else found[0].number + 1
        head = await self._write_parts(collection, folder, number)
        try:
            if not await self._wait_sealed(collection, head.positions):
                await self._delete_parts(folder, head.parts)
                return False
            await store.replace(
                document_view.head_key(folder),
                document_view.encode_head(head),
                None if found is None else found[1],
            )
        except ObjectConflictError:
            await self._delete_parts(folder, head.parts)
            return False
        self._remember_head(collection, head)
        self.published += 1
        if found is not None:
            await self._delete_parts(folder, found[0].parts)
        return True

    def _is_fresh(self, head: PublishedViewHead, collection: Collection) -> bool:
        now_ms = self._context.clock.now_ns() // 1_000_000
        young = now_ms - head.at_ms < self._context.limits.watch_view_ms
        return (young and head.at_ms > collection.published_ms) or head.positions == collection.applied

    def _remember_head(self, collection: Collection, head: PublishedViewHead) -> None:
        if len(head.positions) == collection.config.partitions:
            collection.published_positions, collection.published_ms = list(head.positions), head.at_ms

    async def _write_parts(self, collection: Collection, folder: str, number: int) -> PublishedViewHead:
        """Encode on a thread and upload, one part at a time."""
        store, loop = self._store(), self._context.loop
        at_ms = self._context.clock.now_ns() // 1_000_000
        packed: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        partitions, view_number = collection.config.partitions, collection.number
        path = self._registry.path

        def hand_over(part: bytes | None) -> None:
            asyncio.run_coroutine_threadsafe(packed.put(part), loop).result()

        def pack() -> tuple[list[int], list[PurgedTombstones], int]:
            rows = 0
            try:
                with open_snapshot(path) as snapshot:
                    for part in document_view.view_parts(snapshot, view_number):
                        rows += len(part)
                        hand_over(document_view.encode_part(part))
                    return (
                        snapshot.positions(view_number, partitions),
                        snapshot.purged(view_number, partitions),
                        rows,
                    )
            finally:
                hand_over(None)

        work = loop.run_in_executor(None, pack)
        parts: list[str] = []
        try:
            while (part := await packed.get()) is not None:
                name = document_view.part_name(number, len(parts))
                parts.append(name)
                await self._create(store, folder + name, part)
        except BaseException:
            while await packed.get() is not None:
                pass  # wait for the thread to end
            await asyncio.gather(work, return_exceptions=True)
            await self._delete_parts(folder, parts)
            raise
        positions, purged, rows = await work
        return PublishedViewHead(
            database=collection.database,
            collection=collection.name,
            generation=collection.config.generation,
            number=number,
            at_ms=at_ms,
            positions=positions,
            purged=purged,
            parts=parts,
            rows=rows,
        )

    async def _create(self, store: ObjectStore, key: str, part: bytes) -> None:
        """Create a part, replacing one left by an interrupted attempt."""
        await store.delete([key])
        await store.create(key, part)

    async def _wait_sealed(self, collection: Collection, positions: list[int]) -> bool:
        """Wait until every change of the view is on the object store."""
        loop = self._context.loop
        until = loop.time() + SEAL_S_MAX
        while loop.time() < until:
            waiting = False
            for partition, seq in enumerate(positions):
                stream = self._registry.log.find(collection.stream(partition)) if seq else None
                if stream is not None and stream.sealed < seq:
                    waiting = True
                    if self._seal_soon is not None:
                        self._seal_soon(stream.number)
            if not waiting:
                return True
            await asyncio.sleep(SEAL_POLL_S)
        return False

    async def _delete_parts(self, folder: str, parts: list[str]) -> None:
        try:
            await self._store().delete([folder + name for name in parts])
        except ObjectStoreError as error:
            logger.warning(
                "cannot delete view parts from object store",
                extra=log_fields(folder=folder, error=str(error)),
            )

    async def remove(self, collection: Collection) -> None:
        """Delete the published view of a deleted collection."""
        folder = self._folder(collection)
        try:
            found = await self._load_head(collection)
            if found is not None:
                await self._store().delete([document_view.head_key(folder)])
                await self._delete_parts(folder, found[0].parts)
        except ObjectStoreError as error:
            logger.warning(
                "cannot delete published view from object store",
                extra=log_fields(database=collection.database, collection=collection.name, error=str(error)),
            )

    async def _load_head(self, collection: Collection) -> tuple[PublishedViewHead, str] | None:
        try:
            raw, etag = await self._store().get(document_view.head_key(self._folder(collection)))
            return document_view.decode_head(raw), etag
        except ObjectMissingError:
            return None
        except InvalidViewError as error:
            logger.error(
                "invalid head of published view",
                extra=log_fields(database=collection.database, collection=collection.name, error=str(error)),
            )
            return None

    # -- restoring -------------------------------------------------------------------------------------

    async def restore(self, collection: Collection) -> bool:
        """Replace the local view with the published one, if the log continues after it."""
        try:
            found = await self._load_head(collection)
            if found is None or not self._is_usable(collection, found[0]):
                return False
            head = found[0]
            self._registry.empty(collection)
            view, number = self._registry.view, collection.number
            for name in head.parts:
                raw, _ = await self._store().get(self._folder(collection) + name)
                rows = await self._context.loop.run_in_executor(None, document_view.decode_part, raw)
                with view.write_transaction():
                    view.apply(number, rows, (), {})
            with view.write_transaction():
                view.apply(number, (), (), dict(enumerate(head.positions)))
                for partition, purged in enumerate(head.purged):
                    if purged.version:
                        view.record_purged(number, partition, purged)
        except (ObjectStoreError, InvalidViewError) as error:
            logger.error(
                "cannot restore published view",
                extra=log_fields(database=collection.database, collection=collection.name, error=str(error)),
            )
            self._registry.empty(collection)
            return False
        collection.applied = list(head.positions)
        collection.purged = [purged.version for purged in head.purged]
        self._remember_head(collection, head)
        return True

    def _is_usable(self, collection: Collection, head: PublishedViewHead) -> bool:
        if len(head.positions) != collection.config.partitions:
            return False
        registry = self._registry
        streams = [registry.log.find(name) for name in collection.streams()]
        tails = [0 if stream is None else max(0, stream.visible) for stream in streams]
        earliest = registry.earliest(collection)
        return all(
            first <= seq <= tail for first, seq, tail in zip(earliest, head.positions, tails, strict=True)
        )
