"""The registry of collections: loads them, applies their changes to the view, and deletes them.

The changes of a collection are entries of its partition streams. As soon as entries are durable they are read
here in log order, matched for subscribers, and applied to the view, all in one loop callback: for all other
code on the loop the view is never behind the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import apsw
import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.log.listing import list_streams
from tailrace.log.log import Log, append_to_streams
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.log.records import Delete, Op
from tailrace.log.transaction import Transaction, ignore_reply
from tailrace.watch import names
from tailrace.watch.collection import (
    NATIVE,
    BeforeImageCache,
    BeforeImageLimits,
    Collection,
    CollectionConfig,
    CounterRegistry,
    complete_before_images,
    encode_config_entry,
    encode_control_entry,
    encode_database_entry,
)
from tailrace.watch.document import Change, decode_change
from tailrace.watch.document_view import DocumentRow, DocumentView, WriteRow

__all__ = [
    "Collection",
    "CollectionConfig",
    "CollectionRegistry",
    "encode_config_entry",
    "encode_control_entry",
    "encode_database_entry",
]

logger = logging.getLogger("tailrace.watch")

PAGE_BYTES = 4 * 1024 * 1024
PAGE_ENTRIES = 2000
MATCH_BATCH_CHANGES = 256  # changes matched at once; bounds memory
RETRY_S = 1.0

CollectionKey = tuple[str, str]  # database and name


class CollectionRegistry:
    """All collections of a server. Follows the log; owned by the loop thread."""

    def __init__(
        self,
        log: Log,
        path: Path,
        partitions_for: Callable[[str], int],
        before_image_limits: BeforeImageLimits,
        counters: CounterRegistry,
    ) -> None:
        self.log = log
        self.counters = counters  # metrics by collection
        self.partitions_for = partitions_for  # default number for a collection name
        self._before_image_limits = before_image_limits
        self.path = path
        self.view = DocumentView(path)
        self.databases: dict[str, dict[str, Collection]] = {names.DATABASE_DEFAULT: {}}
        self.deleted_generations: dict[CollectionKey, int] = {}  # last generation of deleted collections
        self.deleting: set[CollectionKey] = set()  # deletion submitted, not yet durable
        self._by_stream: dict[str, tuple[Collection, int]] = {}
        # Called for every durable change, before it is applied to the view.
        self.on_applied: Callable[[Collection, Change], None] | None = None
        # Called before that with a batch of changes.
        self.on_page: Callable[[Collection, list[Change]], None] | None = None
        # Called when the before-images of some changes are not known.
        self.on_before_image_lost: Callable[[Collection], None] | None = None
        # Restores the published view if the log does not reach back far enough; False if there is none.
        self.restore: Callable[[Collection], Awaitable[bool]] | None = None
        # Whether a source writes to the collection.
        self.has_source: Callable[[Collection], bool] = lambda _: False
        # Called when changes were lost: clients must not resume from earlier positions.
        self.on_view_lost: Callable[[Collection], Awaitable[None]] | None = None
        self._unapplied: dict[Collection, tuple[list[DocumentRow], list[WriteRow]]] = {}
        self._catching_up: dict[tuple[Collection, int], asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Load all collections and bring their views up to date."""
        for stream in self._streams(names.COLLECTIONS_PREFIX):
            await self._load_database(stream)
        for collection in self.collections():
            await self._open_view(collection)
        publisher = self.log.publisher
        publisher.on_system_append.append(self._on_published)
        publisher.on_change.append(self._on_change)

    def close(self) -> None:
        publisher = self.log.publisher
        if self._on_published in publisher.on_system_append:
            publisher.on_system_append.remove(self._on_published)
            publisher.on_change.remove(self._on_change)
        for task in self._catching_up.values():
            task.cancel()
        self.view.close()

    def collections(self) -> Iterator[Collection]:
        for found in self.databases.values():
            yield from found.values()

    # -- lookup ----------------------------------------------------------------------------------------

    def database(self, name: str) -> dict[str, Collection]:
        found = self.databases.get(names.check_database(name))
        if found is None:
            raise TailraceError("not_found", f"database {name!r} not found")
        return found

    def find(self, database: str, name: str) -> Collection | None:
        return self.database(database).get(name)

    def writable(self, database: str, name: str) -> Collection | None:
        """As `find`, for a write; raises if the collection is being deleted."""
        if (database, name) in self.deleting:
            raise TailraceError("unavailable", "the collection is being deleted")
        return self.find(database, name)

    def split_path(self, database: str, path: str) -> names.DocumentPath:
        """Split a path into collection and id; ids of sources may contain slashes."""
        found = self.database(database)
        at = path.rfind("/")
        while at > 0:
            collection = found.get(path[:at])
            if collection is not None and collection.config.source != NATIVE:
                return names.DocumentPath(path[:at], path[at + 1 :])
            at = -1 if collection is not None else path.rfind("/", 0, at)
        return names.split_document_path(path)

    def plan(self, database: str, name: str, partitions: int) -> Collection:
        """A new collection that is not registered yet (see `add`)."""
        generation = self.deleted_generations.get((database, name), 0) + 1
        collection = Collection(
            database, name, CollectionConfig(partitions=partitions, generation=generation)
        )
        self._bind_to_view(collection)
        collection.durable = False
        return collection

    def add(self, collection: Collection) -> None:
        self.databases[collection.database][collection.name] = collection

    def drop_uncommitted(self) -> None:
        """After a failed commit: drop collections whose creation is not durable."""
        for found in self.databases.values():
            for name in [name for name, collection in found.items() if not collection.durable]:
                self.counters.forget(found.pop(name))

    def drop(self, collection: Collection) -> None:
        """Drop a collection after its deletion is durable."""
        key = (collection.database, collection.name)
        self.deleted_generations[key] = collection.config.generation
        self.deleting.discard(key)
        self.databases[collection.database].pop(collection.name, None)
        self.counters.forget(collection)
        self._unapplied.pop(collection, None)
        for (owner, _), task in self._catching_up.items():
            if owner is collection:
                task.cancel()
        try:
            with self.view.write_transaction():
                self.view.delete_collection(collection.number)
        except apsw.Error:
            # Not visible to readers: the next collection of this name has another generation.
            logger.exception("cannot empty view", extra=_fields(collection))

    def check_applied(self, collection: Collection) -> None:
        """Retry unapplied changes; raises if the view is still behind."""
        if collection.lagging:
            if collection in self._unapplied:
                self._apply(collection, [], [], {})
            if collection.lagging:
                raise TailraceError(
                    "unavailable", "the view of the collection is behind its changes, retry later"
                )

    def lags(self, collection: Collection) -> list[int]:
        """The number of unapplied changes per partition."""
        found: list[int] = []
        for partition, applied in enumerate(collection.applied):
            stream = self.log.find(collection.stream(partition))
            found.append(0 if stream is None else max(0, stream.visible - applied))
        return found

    def earliest(self, collection: Collection) -> list[int]:
        """The last change of each partition that retention has removed."""
        streams = [self.log.find(name) for name in collection.streams()]
        return [0 if stream is None else stream.earliest for stream in streams]

    # -- following the log -----------------------------------------------------------------------------

    def _on_change(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Delete):
            self._by_stream.pop(stream.name, None)

    def _on_published(self, stream: Stream) -> None:
        if not stream.name.startswith(names.CHANGES_PREFIX) or stream.removed:
            return
        found = self._by_stream.get(stream.name) or self._collection_of_stream(stream.name)
        if found is not None:
            self._drain(stream, *found)

    def _collection_of_stream(self, name: str) -> tuple[Collection, int] | None:
        database, _, rest = name.removeprefix(names.CHANGES_PREFIX).partition("/")
        path, _, partition = rest.rpartition("/")
        collection = self.databases.get(database, {}).get(path)
        if collection is None:
            logger.error("change stream without collection", extra=log_fields(stream=name))
            return None
        found = self._by_stream[name] = (collection, int(partition))
        return found

    def _drain(self, stream: Stream, collection: Collection, partition: int) -> None:
        rows: list[DocumentRow] = []
        writes: list[WriteRow] = []
        collection.durable = True
        if (collection, partition) in self._catching_up:
            return  # the catch-up task reads these changes in order
        applied = collection.applied
        while applied[partition] < stream.visible:
            page = self.log.reader.try_read_labelled(stream, applied[partition], PAGE_BYTES, PAGE_ENTRIES)
            if not isinstance(page, Page):
                logger.warning(
                    "changes evicted from memory before they were applied",
                    extra=log_fields(stream=stream.name),
                )
                self._catch_up_later(collection, partition)
                break
            self._consume_page(collection, partition, page, rows, writes)
        self._apply(collection, rows, writes, {partition: applied[partition]})

    def _catch_up_later(self, collection: Collection, partition: int) -> None:
        """Read changes from disk that are no longer in memory; until then the view is behind."""
        key = (collection, partition)

        async def run() -> None:
            try:
                while True:
                    try:
                        await self._catch_up(collection, partition)
                    except TailraceError as error:
                        logger.warning(
                            "cannot read changes, retrying", extra=_fields(collection, error=str(error))
                        )
                        await asyncio.sleep(RETRY_S)
                    stream = self.log.find(collection.stream(partition))
                    if stream is None or collection.applied[partition] >= stream.visible:
                        break
            finally:
                self._catching_up.pop(key, None)
                self._check_view_current(collection)

        self._catching_up[key] = asyncio.get_running_loop().create_task(run())
        self._check_view_current(collection)

    def _check_view_current(self, collection: Collection) -> None:
        """Update `lagging`."""
        behind = any(owner is collection for owner, _ in self._catching_up)
        collection.lagging = behind or collection in self._unapplied

    def _consume_page(
        self,
        collection: Collection,
        partition: int,
        page: Page,
        rows: list[DocumentRow],
        writes: list[WriteRow],
    ) -> None:
        """Publish the changes of a page one by one, and collect the rows for the view."""
        assert page.labels is not None
        entries = list(zip(page.entries(), page.parts, page.labels.times, strict=True))
        for begin in range(0, len(entries), MATCH_BATCH_CHANGES):
            some = [
                (seq, decode_change(bytes(raw), partition, seq, time_ns))
                for seq, raw, time_ns in entries[begin : begin + MATCH_BATCH_CHANGES]
            ]
            changes = [change for _, change in some if change is not None]
            if any(change.lacks_before_image for change in changes):
                self._complete(collection, changes, rows)
            if self.on_page is not None:
                self.on_page(collection, changes)
            for seq, change in some:
                if change is not None:
                    self._publish_change(collection, change, rows, writes)
                collection.applied[partition] = seq

    def _complete(self, collection: Collection, changes: list[Change], rows: list[DocumentRow]) -> None:
        older = self._unapplied.get(collection)
        unwritten = rows if older is None else older[0] + rows
        try:
            whole = complete_before_images(
                self.view, collection, changes, unwritten, self._before_image_limits
            )
        except apsw.Error:
            logger.exception("cannot read view", extra=_fields(collection))
            whole = False
        if not whole and self.on_before_image_lost is not None:
            self.on_before_image_lost(collection)

    def _publish_change(
        self, collection: Collection, change: Change, rows: list[DocumentRow], writes: list[WriteRow]
    ) -> None:
        self.counters.for_collection(collection).changes[change.entry.op, change.partition] += 1
        rows.append(view_row_from_change(change))
        if change.entry.writeId is not None:
            writes.append(write_row_from_change(change))
        if self.on_applied is not None:
            self.on_applied(collection, change)

    def _apply(
        self,
        collection: Collection,
        rows: list[DocumentRow],
        writes: list[WriteRow],
        positions: dict[int, int],
    ) -> None:
        older = self._unapplied.pop(collection, None)
        if older is not None:
            rows, writes = older[0] + rows, older[1] + writes
            positions = dict(enumerate(collection.applied))
        try:
            with self.view.write_transaction():
                self.view.apply(collection.number, rows, writes, positions)
        except apsw.Error:
            logger.exception("cannot write view", extra=_fields(collection))
            self._unapplied[collection] = (rows, writes)
        self._check_view_current(collection)

    # -- starting --------------------------------------------------------------------------------------

    def _streams(self, prefix: str) -> Iterator[Stream]:
        after = ""
        while page := list_streams(self.log, after, prefix, 1000, system=True):
            yield from page
            after = page[-1].name

    async def _open_view(self, collection: Collection) -> None:
        """Bring the view of a collection up to date with the log."""
        if self._is_ahead(collection):
            logger.warning("view is ahead of the log, rebuilding it", extra=_fields(collection))
            self.empty(collection)
        if any(map(int.__lt__, collection.applied, self.earliest(collection))):
            await self._restore_published(collection)
        for partition in range(collection.config.partitions):
            await self._catch_up(collection, partition)

    async def _restore_published(self, collection: Collection) -> None:
        """Restore the view from a published one, since the log no longer has all changes."""
        if self.restore is not None and await self.restore(collection):
            logger.info("restored view from published view", extra=_fields(collection))
            return
        logger.error("changes lost, no usable published view", extra=_fields(collection))
        earliest = self.earliest(collection)
        collection.applied = [max(pair) for pair in zip(collection.applied, earliest, strict=True)]
        if self.on_view_lost is not None:
            await self.on_view_lost(collection)

    def empty(self, collection: Collection) -> None:
        with self.view.write_transaction():
            self.view.delete_collection(collection.number)
        self._bind_to_view(collection)

    def _is_ahead(self, collection: Collection) -> bool:
        """Whether the view has changes that the log does not have, as after files were replaced."""
        for partition, seq in enumerate(collection.applied):
            stream = self.log.find(collection.stream(partition)) if seq else None
            if seq and (stream is None or stream.visible < seq):
                return True
        return False

    def _bind_to_view(self, collection: Collection) -> None:
        """Look up the collection's number and positions in the view."""
        number = self.view.number_of(collection.database, collection.name, self.generation(collection))
        collection.number = number
        collection.applied = self.view.positions(number, collection.config.partitions)
        purged = self.view.current.purged(number, collection.config.partitions)
        collection.purged = [one.version for one in purged]
        if not collection.config.store_before:
            collection.before_images = BeforeImageCache(self._before_image_limits, collection.applied)

    def generation(self, collection: Collection) -> int:
        """Increases when continuity cannot be proved, e.g. after a bootstrap that may have lost the tail."""
        return collection.config.generation + self.log.streams.first_epoch

    def next_generation(self, database: str, name: str) -> int:
        """The generation that a collection that does not exist would get."""
        return self.deleted_generations.get((database, name), 0) + 1 + self.log.streams.first_epoch

    async def _load_database(self, stream: Stream) -> None:
        """Load the latest configuration of each collection of a database."""
        database = stream.name.removeprefix(names.COLLECTIONS_PREFIX)
        configs: dict[str, CollectionConfig] = {}
        position = stream.earliest
        while position < stream.visible:
            page = await self.log.reader.read_labelled(stream, position, PAGE_BYTES, PAGE_ENTRIES)
            position = page.next_entry
            for raw in page.parts:
                message = orjson.loads(raw)
                if message["type"] != "collection":
                    continue
                name, config = message["key"], CollectionConfig.from_value(message["value"])
                if message["headers"]["operation"] == "delete":
                    configs.pop(name, None)
                    self.deleted_generations[database, name] = config.generation
                else:
                    configs[name] = config
        found = self.databases.setdefault(database, {})
        for name, config in configs.items():
            found[name] = collection = Collection(database, name, config)
            self._bind_to_view(collection)

    async def _catch_up(self, collection: Collection, partition: int) -> None:
        stream = self.log.find(collection.stream(partition))
        if stream is None or stream.visible < 0:
            return
        applied = collection.applied
        while applied[partition] < stream.visible:
            page = await self.log.reader.read_labelled(stream, applied[partition], PAGE_BYTES, PAGE_ENTRIES)
            rows: list[DocumentRow] = []
            writes: list[WriteRow] = []
            self._consume_page(collection, partition, page, rows, writes)
            self._apply(collection, rows, writes, {partition: applied[partition]})


def _fields(collection: Collection, **more: object) -> dict[str, object]:
    return log_fields(database=collection.database, collection=collection.name, **more)


def view_row_from_change(change: Change) -> DocumentRow:
    """The view row of a change; a tombstone has the last data."""
    entry = change.entry
    deleted = entry.op == "delete"
    return DocumentRow(
        entry.documentKey,
        change.partition,
        change.seq,
        entry.version,
        entry.createdAt,
        change.updated_ms,
        int(deleted),
        bytes(entry.before if deleted else entry.after),
    )


def write_row_from_change(change: Change) -> WriteRow:
    entry = change.entry
    assert entry.writeId is not None
    index = 0 if entry.txn is None else entry.txn.index
    digest = entry.writeDigest if isinstance(entry.writeDigest, str) else ""
    return WriteRow(
        entry.writeId, change.updated_ms, index, entry.documentKey, entry.version, entry.op, digest
    )


DoneCallback = Callable[[TailraceError | None], None]


def remove_collection(registry: CollectionRegistry, collection: Collection, callback: DoneCallback) -> None:
    """Delete a collection with all its changes in one record.

    The name may be used again: the new collection has a higher generation, so old positions are not valid
    for it.
    """
    key = (collection.database, collection.name)
    if key in registry.deleting or not collection.durable or collection.pending is not None:
        raise TailraceError("unavailable", "the collection is being changed, retry")
    streams = [stream for stream in map(registry.log.find, collection.streams()) if stream is not None]
    if any(stream.forks for stream in streams):
        raise TailraceError("conflict", "the change streams of the collection have forks, delete these first")

    def settled(_: Transaction, error: TailraceError | None) -> None:
        if error is None:
            registry.drop(collection)
        else:
            registry.deleting.discard(key)
        callback(error)

    now_ns = registry.log.clock.now_ns()
    entry = encode_config_entry(collection.name, collection.config, "delete", now_ns)
    parts = [(names.collections_stream_name(collection.database), [entry])]
    append_to_streams(registry.log, parts, now_ns, settled, None, removed=streams)
    registry.deleting.add(key)


def raise_generation(
    registry: CollectionRegistry, collection: Collection, reason: str, callback: DoneCallback
) -> None:
    """Invalidate all earlier positions: in the configuration, then in each partition stream.

    The documents stay. The caller must invalidate subscriptions when it is durable.
    """
    base = collection.effective_config
    planned = base.with_changes(generation=base.generation + 1)

    def settled(_: Transaction, error: TailraceError | None) -> None:
        if collection.pending is planned:
            collection.pending = None
        if error is None:
            collection.config = planned
            # Published views belong to the earlier generation.
            collection.published_positions, collection.published_ms = None, 0
            registry.view.set_generation(collection.number, registry.generation(collection))
            control = encode_control_entry("generation", registry.generation(collection), reason=reason)
            streams = [name for name in collection.streams() if registry.log.find(name) is not None]
            if streams:
                parts = [(name, [control]) for name in streams]
                registry.log.backpressure_queue.call(
                    lambda: append_to_streams(
                        registry.log, parts, registry.log.clock.now_ns(), ignore_reply, None
                    ),
                    lambda error: logger.warning(
                        "cannot write generation control",
                        extra=log_fields(collection=collection.name, error=error.message),
                    ),
                )
        callback(error)

    now_ns = registry.log.clock.now_ns()
    entry = encode_config_entry(collection.name, planned, "update", now_ns)
    append_to_streams(
        registry.log, [(names.collections_stream_name(collection.database), [entry])], now_ns, settled, None
    )
    collection.pending = planned


async def reset_after_view_loss(registry: CollectionRegistry, collection: Collection) -> None:
    """Raise the generation after changes were lost, so that clients resync."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def callback(error: TailraceError | None) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    await registry.log.backpressure_queue.submit(
        lambda: raise_generation(registry, collection, "view-lost", callback)
    )
    await done
