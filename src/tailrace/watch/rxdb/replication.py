"""The replication service: pull, push and feeds of all replicating clients.

A client pulls what changed since its checkpoint, pushes its own changes, and receives the changes of others.
Everything is read from the view: a document that changed ten times is sent once, in its current state. Pushed
rows are checked for conflicts when they are written, in the order of all writes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import orjson

from tailrace.auth import Identity
from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.log.transaction import Transaction
from tailrace.routing.context import Context
from tailrace.watch import document, names
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import Document
from tailrace.watch.document_writer import DocumentState, DocumentWrite, DocumentWriter, WriteResult
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.resume_tokens import KEY_BYTES, KeyRing, SigningKey, TokenSigner
from tailrace.watch.rxdb import protocol as checkpoints
from tailrace.watch.rxdb.feed import (
    READABLE_STATES,
    ChangePages,
    DocumentShape,
    FeedBatch,
    ReplicationFeed,
    ReplicationTransport,
)
from tailrace.watch.rxdb.protocol import LATE_MS, Checkpoint, PullCursor, PushRow, decide_push

STATUS_CONFLICT: Final = 409
STATUS_UNCHANGED: Final = 304

# Called with the conflicting documents, or with the error if nothing was written.
PushCallback = Callable[[list[Document], TailraceError | None], None]


class PushHandler:
    """Writes pushed rows, and counts their outcomes."""

    def __init__(self, writer: DocumentWriter, access: AccessRules) -> None:
        self._writer = writer
        self._access = access
        self.rows = {"written": 0, "same": 0, "conflict": 0, "refused": 0}

    def push(
        self,
        identity: Identity,
        database: str,
        name: str,
        rows: list[PushRow],
        shape: DocumentShape,
        callback: PushCallback,
    ) -> None:
        """Write the accepted rows as one record; `callback` is called when they are durable."""
        if not rows:
            callback([], None)
            return
        conflicts: list[Document] = []
        writes = [
            _PushedWrite(self._access, identity, database, name, row, shape, conflicts).write for row in rows
        ]

        def on_written(results: list[WriteResult], error: TailraceError | None) -> None:
            # One row rejected by the rules rejects the push: nothing was submitted.
            failure = error or next((one.error for one in results if one.error is not None), None)
            if failure is not None:
                self.rows["refused"] += len(results)
                callback([], failure)
                return
            same = sum(result.status == STATUS_UNCHANGED for result in results)
            self._writer.count_repeats(database, name, "push", same)
            for result in results:
                kind = (
                    "conflict"
                    if result.status == STATUS_CONFLICT
                    else "same"
                    if result.status == STATUS_UNCHANGED
                    else "written"
                )
                self.rows[kind] += 1
            callback(conflicts, None)

        self._writer.write(database, writes, self._access.write_check(identity), on_written, atomic=True)


class _PushedWrite:
    """One row; on conflict the current document is added to `conflicts`."""

    def __init__(
        self,
        access: AccessRules,
        identity: Identity,
        database: str,
        name: str,
        row: PushRow,
        shape: DocumentShape,
        conflicts: list[Document],
    ) -> None:
        self._access = access
        self._identity = identity
        self._row = row
        self._shape = shape
        self._conflicts = conflicts
        path = names.split_document_path(f"{names.check_collection(name)}/{row.id}")
        self._path = f"{path.collection}/{path.id}"
        op = "delete" if row.deleted else "put"
        self.write = DocumentWrite(op, path, row.content, decider=self._decide, creates_tombstone=row.deleted)

    def _decide(self, collection: Collection, state: DocumentState | None) -> WriteResult | None:
        row = self._row
        current: Document | None = None if state is None else orjson.loads(state.data)
        verdict = decide_push(current, state is not None and state.deleted, row)
        if verdict in ("insert", "replace"):
            return None
        flat = self._flat(collection, current, state)
        readable = flat is not None and self._access.readable(self._identity, collection, flat)
        if verdict == "same":
            if not readable:
                # A client that cannot read the document must not be able to guess its content.
                self._check(collection, state, flat)
            assert state is not None
            return WriteResult(self._path, STATUS_UNCHANGED, state.version, state.updated_ms)
        self._check(collection, state, flat)
        visible = flat if readable and flat is not None else {**row.content, "id": row.id}
        gone = state is None or state.deleted or not readable
        self._conflicts.append(self._shape.apply(visible, gone))
        return WriteResult(self._path, STATUS_CONFLICT)

    def _check(self, collection: Collection, state: DocumentState | None, flat: Document | None) -> None:
        """Check the write rule before anything about the document is revealed."""
        row = self._row
        new = document.flatten_document(row.content, row.id, collection.name, 0, 0, 0)
        lives = state is not None and not state.deleted
        check = self._access.write_check(self._identity)
        if row.deleted:
            check(collection, "delete", flat if lives else new, None)
        else:
            check(collection, "update" if lives else "create", flat if lives else None, new)

    def _flat(
        self, collection: Collection, data: Document | None, state: DocumentState | None
    ) -> Document | None:
        if data is None or state is None:
            return None
        return document.flatten_document(
            data, self._row.id, collection.name, state.version, state.created_ms, state.updated_ms
        )


LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1000
TICK_S: Final = 1.0
SOFT: Final = 0.7
REPLICATION_KEY_FACT: Final = "secret/replication-key"
BATCHES_CACHED_MAX: Final = 8


class PullRequest(NamedTuple):
    """The parameters of a pull."""

    database: str
    name: str
    raw_checkpoint: Any
    checkpoint: Checkpoint | None
    limit: int
    shape: DocumentShape


class PullResult(NamedTuple):
    """A page, and the client's cursor after it."""

    pieces: AsyncIterator[bytes]
    cursor: PullCursor | None


class Replication:
    """State shared by the replication routes. Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway, writer: DocumentWriter) -> None:
        self.context = context
        self.limits = context.limits
        self.gateway = gateway
        self.registry: CollectionRegistry = gateway.registry
        self.access = gateway.access
        self.pushes = PushHandler(writer, gateway.access)
        self.transports: set[ReplicationTransport] = set()
        self._feeds: dict[tuple[str, str], set[ReplicationFeed]] = {}
        self.tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self.outbound_bytes = 0  # unsent bytes of all connections at the last tick
        self.held_bytes = 0  # buffered before authentication or while draining
        self.pulls = 0
        self.resyncs = 0
        self._signer: TokenSigner | None = None
        self._creating_key = False
        self._batches: LruCache[tuple[object, ...], FeedBatch] = LruCache(entries_max=BATCHES_CACHED_MAX)

    # -- cursors ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """One key that is never rotated: clients may be offline for long, and it grants no access."""
        log = self.registry.log
        secret = log.streams.meta.get(REPLICATION_KEY_FACT)
        if secret is not None:
            self._signer = _signer(secret)
        elif log.refusal is None and not self._creating_key:
            self._creating_key = True
            fresh = secrets.token_bytes(KEY_BYTES)

            def durable(_: Transaction, error: TailraceError | None) -> None:
                self._creating_key = False
                if error is None:
                    self._signer = _signer(fresh)

            log.put_meta(REPLICATION_KEY_FACT, fresh, durable)

    @property
    def signer(self) -> TokenSigner:
        if self._signer is None:
            self.start()
        if self._signer is None:
            raise TailraceError("unavailable", "the checkpoint signing key is not available yet, retry")
        return self._signer

    def find(self, database: str, name: str) -> Collection | None:
        """The collection, if its creation is durable."""
        found = self.registry.find(database, name)
        return None if found is None or not found.durable else found

    def pages(self, identity: Identity, collection: Collection, shape: DocumentShape) -> ChangePages:
        return ChangePages(self.registry, self.access, identity, collection, shape)

    def cursor(self, identity: Identity, collection: Collection, checkpoint: Checkpoint | None) -> PullCursor:
        """The cursor of a checkpoint; raises if it cannot be continued."""
        fresh = self.cursor_at_end(identity, collection)
        if checkpoint is None:
            return fresh.advanced([0] * len(fresh.seqs), began=fresh.seqs)
        purged = [one.seq for one in self.registry.view.current.purged(collection.number, len(fresh.seqs))]
        if checkpoint.cursor is None:
            return self._since(collection, checkpoint.updated_ms, fresh, purged)
        cursor = checkpoint.cursor
        if (cursor.database, cursor.collection) != (fresh.database, fresh.collection):
            raise TailraceError("invalid_checkpoint", "the checkpoint belongs to another collection")
        known = len(cursor.seqs) == len(fresh.seqs) and not any(map(int.__gt__, cursor.seqs, fresh.seqs))
        if cursor.generation != fresh.generation or not known:
            raise checkpoints.checkpoint_expired("the collection was created again")
        if cursor.misses(purged):
            raise checkpoints.checkpoint_expired("tombstones that the client has not received were purged")
        return cursor if cursor.digest == fresh.digest else cursor.restarted(fresh.digest)

    def cursor_at_end(self, identity: Identity, collection: Collection) -> PullCursor:
        """A cursor at the current end."""
        return PullCursor(
            collection.database,
            collection.name,
            self.registry.generation(collection),
            self.access.read_fingerprint(identity, collection),
            list(collection.applied),
            [],
            [],
        )

    def _since(
        self, collection: Collection, updated_ms: int, fresh: PullCursor, purged: list[int]
    ) -> PullCursor:
        """For a checkpoint with only a time: all that may be newer, with repeats but without losses."""
        since_ms = updated_ms - LATE_MS
        view = self.registry.view.current
        seqs = [
            view.last_seq_before(collection.number, partition, since_ms, tail)
            for partition, tail in enumerate(fresh.seqs)
        ]
        if any(map(int.__gt__, purged, seqs)):
            retained_s = collection.config.tombstone_s(self.limits)
            now_ms = self.context.clock.now_ns() // 1_000_000
            if retained_s is None or since_ms < now_ms - retained_s * 1000:
                raise checkpoints.checkpoint_expired(
                    "tombstones that the client has not received were purged"
                )
            # All purged tombstones are older than that.
            seqs = list(map(max, seqs, purged))
        return fresh.advanced(seqs)

    def checkpoint_json(self, cursor: PullCursor, last: tuple[int, str]) -> dict[str, Any]:
        return checkpoints.encode_checkpoint(cursor, *last, self.signer)

    async def pull(
        self, identity: Identity, request: PullRequest, head: bytes = b"", tail: bytes = b""
    ) -> PullResult:
        """The page after a checkpoint, as JSON between `head` and `tail`."""
        self.pulls += 1
        collection = self.find(request.database, request.name)
        if collection is None:
            if request.checkpoint is not None and request.checkpoint.cursor is not None:
                raise checkpoints.checkpoint_expired("the collection was deleted")
            empty = orjson.dumps({"documents": [], "checkpoint": request.raw_checkpoint})
            return PullResult(single_piece(head + empty + tail), None)
        if collection.state not in READABLE_STATES:
            raise TailraceError("unavailable", f"the collection is {collection.state}, retry later")
        pages = self.pages(identity, collection, request.shape)
        page = await pages.list_page(self.cursor(identity, collection, request.checkpoint), request.limit)
        # Nothing new: the client's checkpoint stays valid.
        checkpoint = self.checkpoint_json(page.cursor, page.last) if page.keys else request.raw_checkpoint
        end = b',"checkpoint":%b}' % orjson.dumps(checkpoint)
        return PullResult(pages.stream_page(page, head + b'{"documents":', end + tail), page.cursor)

    async def batch(
        self, identity: Identity, collection: Collection, shape: DocumentShape, cursor: PullCursor, limit: int
    ) -> FeedBatch:
        """The next batch of a feed; cached, since many feeds have the same position and rights."""
        key = _batch_key(collection, cursor, shape, limit)
        found = self._batches.get(key)
        if found is None:
            pages = self.pages(identity, collection, shape)
            found = await pages.batch(cursor, limit, self.limits.watch_snapshot_bytes)
            if not cursor.began and not cursor.held and key == _batch_key(collection, cursor, shape, limit):
                self._batches.put(key, found)
        return found

    def push(
        self,
        identity: Identity,
        database: str,
        name: str,
        rows: list[PushRow],
        shape: DocumentShape,
        client: object,
        callback: PushCallback,
    ) -> None:
        """`client` identifies the feeds that wait during the push; None if unknown."""

        def mark_pushed() -> None:
            now = self.context.loop.time()
            for feed in self._feeds.get((database, name), ()) if client is not None else ():
                if feed.client == client:
                    feed.pushed_at = now

        def on_written(conflicts: list[Document], error: TailraceError | None) -> None:
            mark_pushed()
            callback(conflicts, error)

        mark_pushed()
        self.pushes.push(identity, database, name, rows, shape, on_written)

    # -- feeds and connections -------------------------------------------------------------------------

    def check_room(self) -> None:
        if len(self.transports) + len(self.gateway.sessions) >= self.limits.watch_connections:
            raise TailraceError("overloaded", "too many realtime connections, retry later")

    @property
    def is_overloaded(self) -> bool:
        """Whether feeds must wait because too many bytes are unsent."""
        unsent = self.outbound_bytes + self.gateway.outbound_bytes
        return unsent >= SOFT * self.limits.watch_outbound_total_bytes

    def opened(self, transport: ReplicationTransport) -> None:
        self.transports.add(transport)
        if self._timer is None:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def closed(self, transport: ReplicationTransport) -> None:
        self.transports.discard(transport)

    def follow(self, feed: ReplicationFeed) -> asyncio.Task[None]:
        """Run a feed until it is cancelled or its connection ends."""
        key = (feed.database, feed.name)
        self._feeds.setdefault(key, set()).add(feed)

        def ended(_: asyncio.Task[None]) -> None:
            found = self._feeds.get(key)
            if found is not None:
                found.discard(feed)
                if not found:
                    del self._feeds[key]

        task = self.tasks.start(feed.run())
        task.add_done_callback(ended)
        return task

    @property
    def feeds(self) -> int:
        return sum(len(found) for found in self._feeds.values())

    def on_changed(self, collection: Collection) -> None:
        """Wake the feeds of a collection whose documents or rules changed; the view is updated by the time
        they run."""
        for feed in self._feeds.get((collection.database, collection.name), ()):
            feed.woken.set()

    def _tick(self) -> None:
        self._timer = None
        self.outbound_bytes = sum(transport.unsent_bytes for transport in self.transports)
        now = self.context.loop.time()
        for transport in tuple(self.transports):
            transport.on_tick(now)
        if self.transports:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """Close connections whose token was revoked; returns how many."""
        lost = [
            transport
            for transport in self.transports
            if transport.authenticated is not None and not is_valid(transport.authenticated)
        ]
        for transport in lost:
            transport.close(4401, "the token was revoked")
        return len(lost)

    def close_all(self) -> None:
        """Shutdown: answer pending requests, then close all connections."""
        for transport in tuple(self.transports):
            transport.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def single_piece(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _signer(secret: bytes) -> TokenSigner:
    return TokenSigner(KeyRing((SigningKey(0, secret, 0),)), 0, lambda: 0)


def _batch_key(
    collection: Collection, cursor: PullCursor, shape: DocumentShape, limit: int
) -> tuple[object, ...]:
    """Feeds with equal keys receive the same batch."""
    about = (collection, cursor.generation, cursor.digest, collection.config.rule_version, shape, limit)
    return (*about, tuple(cursor.began), tuple(cursor.held), tuple(cursor.seqs), tuple(collection.applied))
