"""Pages of changed documents, and the live feed of a collection for a replicating client.

`ChangePages` lists the documents of a collection in the order of their last change, as one identity may see
them. A `ReplicationFeed` is a cursor in that order and the task that advances it. It reads the view at the
client's pace, so slow clients need no buffers.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import wait_event
from tailrace.watch import document
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import Document
from tailrace.watch.document_view import DocumentRow
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate
from tailrace.watch.query_execution import TimeSlice
from tailrace.watch.rxdb.protocol import DELETED_FIELD, PullCursor

if TYPE_CHECKING:
    from tailrace.watch.rxdb.replication import Replication


SCAN_ROWS: Final = 200  # per read of the view
PIECE_BYTES: Final = 64 * 1024
_STAMPS: Final = ("collection", "version", "createdAt", "updatedAt")


class DocumentShape(NamedTuple):
    """The form of documents that a client requests."""

    deleted_field: str = DELETED_FIELD
    stamps: bool = True  # with collection, version, createdAt and updatedAt

    def apply(self, flat: Document, deleted: bool) -> Document:
        found = {name: value for name, value in flat.items() if self.stamps or name not in _STAMPS}
        found[self.deleted_field] = deleted
        return found


class ChangeKey(NamedTuple):
    """The position of a document's last change."""

    partition: int
    seq: int
    updated_ms: int


class PageKeys(NamedTuple):
    """The ids of a page; the documents are read when they are sent."""

    keys: dict[str, ChangeKey]
    cursor: PullCursor

    @property
    def last(self) -> tuple[int, str]:
        """Time and id of the last document."""
        document_id = next(reversed(self.keys))
        return self.keys[document_id].updated_ms, document_id


class FeedBatch(NamedTuple):
    documents: list[bytes]
    page: PageKeys


class ChangePages:
    """The documents of one collection, as one identity may see them."""

    def __init__(
        self,
        registry: CollectionRegistry,
        access: AccessRules,
        identity: Identity,
        collection: Collection,
        shape: DocumentShape,
    ) -> None:
        self._registry = registry
        self._access = access
        self._identity = identity
        self._collection = collection
        self._shape = shape
        self._rule_version = -1  # of `_rule`
        self._rule: Predicate | None = None

    async def list_page(self, cursor: PullCursor, limit: int) -> PageKeys:
        """The next `limit` documents after the cursor; fewer only if there are no more now."""
        collection, view = self._collection, self._registry.view
        seqs = list(cursor.seqs)
        keys: dict[str, ChangeKey] = {}
        time_slice = TimeSlice()
        while len(keys) < limit:
            self._registry.check_applied(collection)
            pending = [index for index, seq in enumerate(seqs) if seq < collection.applied[index]]
            if not pending:
                break
            # Rotate, so that all partitions are read even if pages are smaller than their number.
            first = sum(seqs) % len(pending)
            share = min(SCAN_ROWS, -(-(limit - len(keys)) // len(pending)))
            for partition in pending[first:] + pending[:first]:
                if len(keys) == limit:
                    break
                rows = view.current.changed_after(collection.number, partition, seqs[partition], share)
                tail = collection.applied[partition]
                for document_id, seq, updated_ms in rows:
                    if len(keys) == limit:
                        break
                    if time_slice.is_over:
                        await time_slice.yield_to_loop()
                    seqs[partition] = seq
                    if cursor.changed_since_start(partition, seq) or self._is_visible(document_id):
                        # A document that changes meanwhile is listed once, at its newest position.
                        keys.pop(document_id, None)
                        keys[document_id] = ChangeKey(partition, seq, updated_ms)
                else:
                    if len(rows) < share:
                        seqs[partition] = tail
        return PageKeys(keys, cursor.advanced(seqs))

    async def batch(self, cursor: PullCursor, limit: int, bytes_max: int) -> FeedBatch:
        """The next documents up to `bytes_max`, at least one if there is one."""
        page = await self.list_page(cursor, limit)
        documents: list[bytes] = []
        included: dict[str, ChangeKey] = {}
        seqs = list(cursor.seqs)
        size, time_slice = 0, TimeSlice()
        for document_id, key in page.keys.items():
            if time_slice.is_over:
                await time_slice.yield_to_loop()
            raw = self.encoded(document_id)
            if documents and size + len(raw) > bytes_max:
                return FeedBatch(documents, PageKeys(included, cursor.advanced(seqs)))
            included[document_id] = key
            seqs[key.partition] = max(seqs[key.partition], key.seq)
            documents.append(raw)
            size += len(raw)
        return FeedBatch(documents, page)

    async def stream_page(self, page: PageKeys, head: bytes, tail: bytes) -> AsyncIterator[bytes]:
        """The documents of a page as a JSON array between `head` and `tail`, in small pieces."""
        gathered, size = [head, b"["], 0
        comma, time_slice = b"", TimeSlice()
        for document_id in page.keys:
            if time_slice.is_over:
                await time_slice.yield_to_loop()
            raw = self.encoded(document_id)
            gathered += (comma, raw)
            size += len(raw)
            comma = b","
            if size >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
                await time_slice.yield_to_loop()
        gathered += (b"]", tail)
        yield b"".join(gathered)

    def encoded(self, document_id: str) -> bytes:
        """The current document; sent as deleted if it is purged or not readable."""
        row = self._registry.view.find(self._collection.number, document_id)
        flat = None if row is None else self._flat(row)
        if row is None or flat is None or not self._readable(flat):
            replicated = self._collection.config.replication
            fields = {} if replicated is None else replicated.tombstone_fields
            return orjson.dumps({**fields, "id": document_id, self._shape.deleted_field: True})
        return orjson.dumps(self._shape.apply(flat, bool(row.deleted)))

    def _flat(self, row: DocumentRow) -> Document:
        data: Document = orjson.loads(row.data)
        name = self._collection.name
        return document.flatten_document(data, row.id, name, row.version, row.created_ms, row.updated_ms)

    def _is_visible(self, document_id: str) -> bool:
        if self._collection.config.read_rule is None:
            return True
        row = self._registry.view.find(self._collection.number, document_id)
        return row is not None and self._readable(self._flat(row))

    def _readable(self, flat: dict[str, Any]) -> bool:
        """By the current rule, which may change while a page is sent."""
        config = self._collection.config
        if config.rule_version != self._rule_version:
            self._rule_version = config.rule_version
            part = self._access.read_predicate_part(self._identity, self._collection)
            self._rule = None if part is None else Predicate([part])
        if self._rule is None:
            return True
        try:
            return self._rule.matches(flat)
        except CostExceededError:
            return False


logger = logging.getLogger("tailrace.watch")

RECOVER: Final = 0.6
POLL_S: Final = 0.25
PULL_REMINDER_S: Final = 2.0
PUSH_QUIET_S: Final = 1.0  # without a push; busy clients may pause for half a second
PUSH_QUIET_S_MAX: Final = 5.0  # a client that writes all the time must receive changes too
RESYNC: Final = b'"RESYNC"'
# Not while a source is loading or stale.
READABLE_STATES: Final = frozenset({"live", "lagging"})


class FeedListener(Protocol):
    """The receiver of a feed."""

    @property
    def identity(self) -> Identity: ...
    async def wait_for_room(self) -> bool:
        """Wait until the connection has room; False if it is closed."""
        ...

    async def send(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None: ...
    def fail(self, error: TailraceError) -> None: ...


class ReplicationTransport(ABC):
    """A connection of a replicating client: flow control, authentication time-out and expiry."""

    def __init__(self, replication: Replication, identity: Identity | None) -> None:
        self.replication = replication
        self.authenticated: Identity | None = identity  # None until authenticated
        self.drained = asyncio.Event()
        self.ended = False
        now = replication.context.loop.time()
        self.opened_at = now
        self._written_bytes = 0
        self._drained_before = 0
        self._progress_at = now
        replication.opened(self)

    @property
    def identity(self) -> Identity:
        assert self.authenticated is not None
        return self.authenticated

    @property
    @abstractmethod
    def unsent_bytes(self) -> int: ...

    @abstractmethod
    def close(self, code: int, reason: str) -> None:
        """Close the connection."""

    def drain(self) -> None:
        """The server is stopping."""
        self.close(1001, "the server is stopping")

    def on_gone(self) -> None:
        """The connection is closed."""
        if not self.ended:
            self.ended = True
            self.drained.set()
            self.replication.closed(self)

    def count_sent(self, size_bytes: int) -> None:
        self._written_bytes += size_bytes

    def on_drain(self) -> None:
        self.drained.set()

    async def wait_for_room(self) -> bool:
        bytes_max = RECOVER * self.replication.limits.watch_outbound_bytes
        while not self.ended:
            if self.unsent_bytes <= bytes_max and not self.replication.is_overloaded:
                return True
            self.drained.clear()
            await wait_event(self.drained, POLL_S)
        return False

    def on_tick(self, now: float) -> None:
        limits = self.replication.limits
        unsent = self.unsent_bytes
        drained = self._written_bytes - unsent
        if drained > self._drained_before or not unsent:
            self._drained_before, self._progress_at = drained, now
            self.drained.set()
        elif now - self._progress_at >= limits.watch_stall_ms / 1000:
            self.close(1013, "the client does not read")
            return
        if self.authenticated is None:
            if now - self.opened_at >= limits.watch_auth_ms / 1000:
                self.close(4401, "authentication timed out")
        elif (
            self.authenticated.until_s is not None
            and self.replication.gateway.now_s() >= self.authenticated.until_s
        ):
            self.close(4401, "the token has expired")


class ReplicationFeed:
    """The changes of one collection for one client."""

    def __init__(
        self,
        replication: Replication,
        listener: FeedListener,
        database: str,
        name: str,
        shape: DocumentShape,
        limit: int,
        cursor: PullCursor | None = None,
        *,
        joined: bool = True,
        client: object = None,
    ) -> None:
        self._replication = replication
        self._listener = listener
        self.database = database
        self.name = name
        self._shape = shape
        self._limit = limit
        self.client = client  # identifies pushes of the same client
        self.pushed_at = -inf
        self.woken = asyncio.Event()
        self.must_resync = False  # the client's position cannot be continued
        # Whether the client has pulled since the feed started. RxDB pulls after it connects, except if it
        # still had work from the previous connection: then it would miss the changes in between.
        self.joined = joined
        self._began = replication.context.loop.time()
        # The client's last pull on the same connection.
        self.pulled: PullCursor | None = None
        collection = replication.find(database, name)
        if cursor is None and collection is not None:
            cursor = replication.cursor_at_end(listener.identity, collection)
        self.cursor = cursor  # None while the collection does not exist
        self._since = [] if cursor is None else list(cursor.seqs)

    async def run(self) -> None:
        try:
            while await self._listener.wait_for_room():
                self.woken.clear()
                await self._wait_for_pushes()
                if not await self._step():
                    await self.woken.wait()
        except TailraceError as error:
            self._listener.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("replication feed failed")
            self._listener.fail(TailraceError("internal", "the replication feed failed"))

    async def _wait_for_pushes(self) -> None:
        """Wait while the client pushes.

        RxDB applies events that arrive during a push after it. An event with the state before the push would
        revert the document, and the next edit, based on it, would conflict.
        """
        loop = self._replication.context.loop
        begun = loop.time()
        while (wait_s := min(self.pushed_at + PUSH_QUIET_S, begun + PUSH_QUIET_S_MAX) - loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    async def _step(self) -> bool:
        """Send the next batch; False if there is nothing to send."""
        replication = self._replication
        collection = replication.find(self.database, self.name)
        if collection is None:
            return await self._check_collection_gone()
        if collection.state not in READABLE_STATES:
            return False  # woken when that changes
        identity = self._listener.identity
        if self.cursor is None:
            # Created meanwhile: everything in it is new.
            fresh = replication.cursor_at_end(identity, collection)
            self.cursor, self.joined = fresh.advanced([0] * len(fresh.seqs)), True
            self._since = list(self.cursor.seqs)
        missed = not self.joined and self.cursor.seqs != collection.applied
        if self.must_resync or missed or self._needs_resync(collection, identity):
            self.must_resync, self.joined = False, True
            self.cursor = replication.cursor_at_end(identity, collection)
            self._since = list(self.cursor.seqs)
            await self._resync()
            return True
        documents, page = await replication.batch(identity, collection, self._shape, self.cursor, self._limit)
        self.cursor = page.cursor
        if not documents:
            return False
        checkpoint = replication.checkpoint_json(self._merge_positions(self.cursor), page.last)
        result = b'{"documents":[%b],"checkpoint":%b}' % (b",".join(documents), orjson.dumps(checkpoint))
        await self._listener.send(self, result, checkpoint["pos"])
        return True

    def send_resync_reminder(self, now: float) -> None:
        """Send RESYNC to a client that has not pulled since it connected."""
        if not self.joined and now - self._began >= PULL_REMINDER_S:
            self.must_resync = True
            self.woken.set()

    @property
    def is_up_to_date(self) -> bool:
        collection = self._replication.find(self.database, self.name)
        return self.cursor is not None and collection is not None and self.cursor.seqs == collection.applied

    async def _check_collection_gone(self) -> bool:
        """Send RESYNC once if the collection was deleted."""
        if self.cursor is None:
            return False
        self.cursor = None
        await self._resync()
        return True

    async def _resync(self) -> None:
        self.pulled = None
        self._replication.resyncs += 1
        await self._listener.send(self, RESYNC, None)

    def _needs_resync(self, collection: Collection, identity: Identity) -> bool:
        """Whether the client may miss changes that the feed will never send."""
        cursor = self.cursor
        assert cursor is not None
        fresh = self._replication.cursor_at_end(identity, collection)
        if (cursor.generation, cursor.digest, len(cursor.seqs)) != (
            fresh.generation,
            fresh.digest,
            len(fresh.seqs),
        ):
            return True
        if cursor.seqs == fresh.seqs:
            return False
        purged = self._replication.registry.view.current.purged(collection.number, len(cursor.seqs))
        return cursor.misses([one.seq for one in purged])

    def _merge_positions(self, cursor: PullCursor) -> PullCursor:
        """What the client has from pulls and this feed together, up to the first gap."""
        pulled = self.pulled
        if pulled is None or len(pulled.seqs) != len(cursor.seqs):
            return cursor
        whole = zip(cursor.seqs, pulled.seqs, self._since, strict=True)
        return pulled.advanced([max(sent, got) if got >= since else got for sent, got, since in whole])
